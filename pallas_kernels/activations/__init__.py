"""GELU and SwiGLU, alone and as the epilogue of a matmul."""
