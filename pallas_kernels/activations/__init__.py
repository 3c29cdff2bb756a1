"""GELU and SwiGLU, alone and in a feed-forward layer."""
