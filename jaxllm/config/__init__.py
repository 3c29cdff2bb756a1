"""Configuration: one YAML file is one complete run, and every value can be overridden by a flag.

model.py         the models' sections
sections.py      the other sections, and Config, which holds them all
yaml_text.py     YAML as a configuration has it
loading.py       files and overrides -> Config, or one line that names the key and the value
describe.py      every key for --help
command_line.py  the words of `jaxllm train`, and what all commands share
"""

from jaxllm.config.describe import help_text
from jaxllm.config.loading import CONFIG_DIR, keys, load, sentence
from jaxllm.config.model import (
    MODEL_CONFIGS,
    GPT2Config,
    Llama3Config,
    ModelConfig,
    VLSTMConfig,
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
    "LARGEST_BPE",
    "MODEL_CONFIGS",
    "SMALLEST_BPE",
    "Config",
    "DataConfig",
    "GPT2Config",
    "InputError",
    "Llama3Config",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "SampleConfig",
    "TrainConfig",
    "VLSTMConfig",
    "help_text",
    "keys",
    "load",
    "round_up",
    "sentence",
]
