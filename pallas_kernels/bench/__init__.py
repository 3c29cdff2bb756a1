"""Benchmarks of every op against XLA, cuDNN and the limits of the device."""
