"""Mosaic GPU kernels for training language models, each with a jnp reference beside it."""

from pallas_kernels.attention import attention
from pallas_kernels.cross_entropy import cross_entropy
from pallas_kernels.encoder import encoder
from pallas_kernels.gelu import gelu
from pallas_kernels.rope import RopeScaling, rope
from pallas_kernels.swiglu import swiglu
from pallas_kernels.vlstm import vlstm, vlstm_step

__all__ = [
    "RopeScaling",
    "attention",
    "cross_entropy",
    "encoder",
    "gelu",
    "rope",
    "swiglu",
    "vlstm",
    "vlstm_step",
]
