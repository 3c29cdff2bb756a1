"""Llama 3.1: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases.

Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from flax import nnx

from jaxllm.config import Llama3Config
from jaxllm.layers import Attention, GatedMLP, RMSNorm
from jaxllm.layers.layer import Layer
from jaxllm.models.language_model import LanguageModel, attention_flops, block_weights
from jaxllm.models.stream import Stream, of_row
from pallas_kernels import RopeScaling


class Llama3Block(Layer):
    """s += attention(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        C, implementation = config.d_model, config.implementation
        scaling = config.rope_scaling and RopeScaling(**config.rope_scaling.model_dump())
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, implementation=implementation)
        weights = block_weights(config, rngs)
        self.norm_1 = RMSNorm(C, **norm)
        self.attention = Attention(
            C,
            config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=scaling,
            window=config.window,
            softcap=config.softcap,
            implementation=implementation,
            **weights,
        )
        self.norm_2 = RMSNorm(C, **norm)
        self.mlp = GatedMLP(
            C,
            config.ff_width,
            saves_products=config.saves_products,
            implementation=implementation,
            **weights,
        )

    def __call__(self, stream, positions=None, segment_ids=None, cache=None):
        if (result := of_row(self, self.attention, stream, cache)) is not None:
            return result
        y, residual = stream.normed(self.norm_1)
        branch, cache = self.attention.with_cache(
            y, positions, segment_ids, cache, norm=self.norm_1
        )
        y, residual = Stream(branch, None, residual).normed(self.norm_2)
        return Stream(self.mlp(y, norm=self.norm_2), None, residual), cache


class Llama3(LanguageModel):
    """Llama 3.1 of any size, and Llama 3.2 with its tied head."""

    def __init__(self, config: Llama3Config, *, rngs: nnx.Rngs):
        super().__init__(
            config,
            block=Llama3Block,
            norm=RMSNorm,
            tied=config.tie_embeddings,
            rngs=rngs,
        )

    def mixing_flops(self, seq_len: int) -> float:
        """Operations per token of q k^T and of its product with v."""
        return attention_flops(self.config, seq_len)
