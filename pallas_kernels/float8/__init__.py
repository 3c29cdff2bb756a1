"""Matmuls of 8-bit floating-point operands: fp8_linear, and the casts that it needs."""
