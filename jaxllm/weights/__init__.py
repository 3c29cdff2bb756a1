"""Reads and writes weights: Hugging Face folders and our own checkpoints."""
