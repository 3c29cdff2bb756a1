"""A tiny configuration of every model, for the tests that all models must pass."""

from jaxllm.config import MODEL_CONFIGS, ModelConfig

NEEDED = {  # the settings that some models require besides a shape, or that keep them tiny
    "llama3": dict(n_kv_heads=1, d_ff=96),
    "vlstm": dict(d_ff=96, chunk_size=8),
}


def tiny(kind: str, **options) -> ModelConfig:
    """A model of two blocks, in float32 on XLA unless `options` say otherwise."""
    shape = dict(vocab_size=100, n_layers=2, n_heads=2, d_model=32, max_seq_len=32, kernels="xla")
    dtypes = dict(compute_dtype="float32", residual_dtype="float32")
    return MODEL_CONFIGS[kind](**(shape | dtypes | NEEDED.get(kind, {}) | options))
