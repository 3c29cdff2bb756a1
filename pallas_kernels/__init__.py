"""Mosaic GPU kernels for training language models, each with a jnp reference beside it."""

from pallas_kernels.gelu import gelu
from pallas_kernels.rope import RopeScaling, rope
from pallas_kernels.swiglu import swiglu

__all__ = ["RopeScaling", "gelu", "rope", "swiglu"]
