"""Configuration: one YAML file describes one complete run; a flag can override every value.

model.py         the model sections
sections.py      the other sections, and Config, which holds them all
yaml_text.py     the YAML dialect of configurations
loading.py       files and overrides -> Config, or a one-line error with the key and the value
describe.py      the text of --help
command_line.py  the options of `jaxllm train`, and what all commands share
"""

from jaxllm.config.describe import help_text
from jaxllm.config.loading import CONFIG_DIR, keys, load, plain_message
from jaxllm.config.model import (
    FORMATS,
    MODEL_CONFIGS,
    GPT2Config,
    Llama3Config,
    Lora,
    ModelConfig,
    VLSTMConfig,
    evaluated,
    round_up,
)
from jaxllm.config.sections import (
    LARGEST_BPE,
    SMALLEST_BPE,
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    ProfileConfig,
    SampleConfig,
    TrainConfig,
)
from jaxllm.errors import InputError

__all__ = [
    "CONFIG_DIR",
    "FORMATS",
    "LARGEST_BPE",
    "MODEL_CONFIGS",
    "SMALLEST_BPE",
    "Config",
    "DataConfig",
    "GPT2Config",
    "InputError",
    "Llama3Config",
    "Lora",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "SampleConfig",
    "TrainConfig",
    "VLSTMConfig",
    "evaluated",
    "help_text",
    "keys",
    "load",
    "plain_message",
    "round_up",
]
