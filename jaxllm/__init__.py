"""Flax models, data and training on the kernels of pallas_kernels."""
