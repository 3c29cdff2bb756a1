"""Weights from and to Hugging Face and our own checkpoints."""
