"""Mosaic GPU kernels for training language models, each with a jnp reference beside it."""

from pallas_kernels.gelu import gelu

__all__ = ["gelu"]
