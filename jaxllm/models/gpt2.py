"""GPT-2: learned positions, pre-norm blocks with layer norm, GELU, a head tied to the embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import math

from flax import nnx

from jaxllm.config import GPT2Config
from jaxllm.layers import MLP, Attention, Embedding, LayerNorm
from jaxllm.models.language_model import LanguageModel, add_norm

STD = 0.02


class GPT2Block(nnx.Module):
    """s += attention(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        C, backend = config.d_model, config.kernels
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, backend=backend)
        # 2 L branches add up on the residual stream.
        weights = dict(std=STD, out_std=STD / math.sqrt(2 * config.n_layers), rngs=rngs)
        self.norm_1 = LayerNorm(C, **norm)
        self.attention = Attention(C, config.n_heads, bias=True, backend=backend, **weights)
        self.norm_2 = LayerNorm(C, **norm)
        self.mlp = MLP(C, config.ff_width, backend=backend, **weights)

    def __call__(self, branch, residual, positions=None, segment_ids=None):
        y, residual = add_norm(self.norm_1, branch, residual)
        branch = self.attention(y, segment_ids=segment_ids)
        y, residual = add_norm(self.norm_2, branch, residual)
        return self.mlp(y), residual


class GPT2(LanguageModel):
    """GPT-2 of any size."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.embedding = Embedding(
            config.vocab_size,
            config.d_model,
            padded_vocab_size=config.padded_vocab_size,
            max_seq_len=config.max_seq_len,
            std=STD,
            dtype=config.residual_dtype,
            backend=config.kernels,
            rngs=rngs,
        )
        self.blocks = nnx.List([GPT2Block(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = LayerNorm(
            config.d_model, eps=config.norm_eps, dtype=config.compute_dtype, backend=config.kernels
        )

    def mixing_flops(self, seq_len: int) -> float:
        """2 T C for the lower triangle of q k^T and of its product with v, in each block."""
        return 2.0 * self.config.n_layers * seq_len * self.config.n_heads * self.config.head_dim
