"""Llama 3.1: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases.

Mistral, Qwen2 and Qwen3 are this model with `window`, `qkv_bias` or `qk_norm`.

Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from flax import nnx

from jaxllm.config import Llama3Config
from jaxllm.layers import Attention, GatedMLP, RMSNorm
from jaxllm.layers.layer import Layer
from jaxllm.models.language_model import LanguageModel, Stream, block_weights, of_row
from pallas_kernels import RopeScaling


class Llama3Block(Layer):
    """s += attention(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: Llama3Config, *, fp8: bool, rngs: nnx.Rngs):
        C, implementation = config.d_model, config.implementation
        scaling = config.rope_scaling and RopeScaling(**config.rope_scaling.model_dump())
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, implementation=implementation)
        weights = block_weights(config, rngs, fp8)
        self.norm_1 = RMSNorm(C, **norm)
        self.attention = Attention(
            C,
            config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            qk_norm=config.norm_eps if config.qk_norm else None,
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
            implementation=implementation,
            **weights,
        )

    def __call__(self, stream, positions=None, segment_ids=None, cache=None):
        if (result := of_row(self, self.attention, stream, cache)) is not None:
            return result
        y, residual = stream.normed(self.norm_1)
        if cache is None:
            branch = self.attention(y, positions, segment_ids, norm=self.norm_1)
        else:
            branch, cache = self.attention.with_cache(y, positions, cache)
        y, residual = Stream(branch, None, residual).normed(self.norm_2)
        return Stream(self.mlp(y, norm=self.norm_2), None, residual), cache


class Llama3(LanguageModel):
    """Llama of any size, with an untied or a tied head, and its relatives."""

    def __init__(self, config: Llama3Config, *, fp8: str = "none", rngs: nnx.Rngs):
        super().__init__(
            config,
            block=Llama3Block,
            norm=RMSNorm,
            tied=config.tie_embeddings,
            fp8=fp8,
            rngs=rngs,
        )
