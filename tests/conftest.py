"""Checks of shapes and dtypes on every public op, and no caches shared between runs."""
