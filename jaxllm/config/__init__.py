"""Configuration: one YAML file describes one complete run; a flag can override every value.

model.py         the model sections
sections.py      the other sections, and Config, which holds them all
yaml_text.py     the YAML dialect of configurations
loading.py       files and overrides -> Config, or a one-line error with the key and the value
describe.py      the text of --help
command_line.py  the options of `jaxllm train`, and what all commands share
"""

from jaxllm.config.loading import CONFIG_DIR, load, plain_message, sampling
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
    Config,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    SampleConfig,
    Sampling,
    TrainConfig,
)
from jaxllm.errors import InputError
