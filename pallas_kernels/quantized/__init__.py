"""Weights of few bits: their formats, and products with them."""
