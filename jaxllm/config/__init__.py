"""Configuration: one YAML file describes one complete run; a flag can override every value."""

from jaxllm.config.loading import CONFIG_DIR, first_error, load, sampling
from jaxllm.config.model import (
    FORMATS,
    IGNORE,
    MODEL_CONFIGS,
    TARGETS,
    GPT2Config,
    Llama3Config,
    Lora,
    ModelConfig,
    VLSTMConfig,
    evaluated,
    round_up,
)
from jaxllm.config.sections import (
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    Sampling,
    TrainConfig,
)
from jaxllm.errors import InputError

__all__ = ["CONFIG_DIR", "FORMATS", "IGNORE", "MODEL_CONFIGS", "TARGETS", "Config", "DataConfig"]
__all__ += ["GPT2Config", "InputError", "Llama3Config", "Lora", "MeshConfig", "ModelConfig"]
__all__ += ["OptimizerConfig", "SampleConfig", "Sampling", "TrainConfig", "VLSTMConfig"]
__all__ += ["evaluated", "first_error", "load", "round_up", "sampling"]
