"""Flax models, data and training on the kernels of pallas_kernels."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from jaxllm.infer.loaded import Loaded

__version__ = "0.1.0"


def load(path: "str | Path", step: int | None = None) -> "Loaded":
    """The model, the tokenizer and the model's configuration in a folder, as a named tuple.

    path: a run's directory, packed weights or a Hugging Face folder.
    step: of a run's checkpoint; None: the newest.
    The tuple also has `generate(prompt, tokens=200, temperature=0.8, ...)`, which returns a text,
    and `score(text)`, its log-likelihood in nats.  Raises jaxllm.errors.InputError.
    """
    from jaxllm.infer.loaded import load

    return load(path, step)
