"""Mosaic GPU kernels for training language models, each with a jnp reference.

An op raises ValueError, in one line, for arguments that do not fit each other, and under
implementation="mosaic" NotImplementedError for a call that none of its kernels supports.
"""
# ruff: noqa: F403, F405

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.public import *

__all__ = [
    "Packed",
    "QuantizedWeight",
    "RopeScaling",
    "attention",
    "cross_entropy",
    "decode_attention",
    "encoder",
    "fp8_linear",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "quantize",
    "quantized_linear",
    "rms_norm",
    "rope",
    "row_linear",
    "swiglu",
    "vlstm",
    "vlstm_step",
]


def __getattr__(name: str):
    # The first look at an op imports JAX: pallas_kernels.torch mostly needs neither.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pallas_kernels import public

    return getattr(public, name)


def __dir__() -> list[str]:
    return __all__
