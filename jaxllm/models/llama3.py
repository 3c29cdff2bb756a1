"""Llama 3.1: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases.

Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.2.
"""

import math

from flax import nnx

from jaxllm.config import Llama3Config
from jaxllm.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm
from jaxllm.models.language_model import LanguageModel, add_norm, zero_columns
from pallas_kernels import RopeScaling

STD = 0.02


class Llama3Block(nnx.Module):
    """s += attention(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        C, backend = config.d_model, config.kernels
        scaling = config.rope_scaling and RopeScaling(**config.rope_scaling.model_dump())
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, backend=backend)
        # 2 L branches add up on the residual stream.
        weights = dict(std=STD, out_std=STD / math.sqrt(2 * config.n_layers), rngs=rngs)
        self.norm_1 = RMSNorm(C, **norm)
        self.attention = Attention(
            C,
            config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=scaling,
            backend=backend,
            **weights,
        )
        self.norm_2 = RMSNorm(C, **norm)
        self.mlp = GatedMLP(C, config.ff_width, backend=backend, **weights)

    def __call__(self, branch, residual, positions=None, segment_ids=None):
        y, residual = add_norm(self.norm_1, branch, residual)
        branch = self.attention(y, positions, segment_ids)
        y, residual = add_norm(self.norm_2, branch, residual)
        return self.mlp(y), residual


class Llama3(LanguageModel):
    """Llama 3.1 of any size, and the tied 3.2."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.embedding = Embedding(
            config.vocab_size,
            config.d_model,
            padded_vocab_size=config.padded_vocab_size,
            std=STD,
            dtype=config.residual_dtype,
            backend=config.kernels,
            rngs=rngs,
        )
        self.blocks = nnx.List([Llama3Block(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = RMSNorm(
            config.d_model, eps=config.norm_eps, dtype=config.compute_dtype, backend=config.kernels
        )
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.padded_vocab_size, std=STD, rngs=rngs)
            zero_columns(self.head.weight, config.vocab_size)

    def mixing_flops(self, seq_len: int) -> float:
        """2 T C for the lower triangle of q k^T and of its product with v, in each block."""
        return 2.0 * self.config.n_layers * seq_len * self.config.n_heads * self.config.head_dim
