"""Llama 3.1: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases.

Mistral, Qwen2 and Qwen3 are this model with `window`, `qkv_bias` or `qk_norm`.

Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.2.
"""

from functools import partial
from typing import Any

from jaxllm.layers import Attention, GatedMLP, RMSNorm
from jaxllm.models.language_model import LanguageModel
from pallas_kernels import RopeScaling


class Llama3(LanguageModel):
    """Llama of any size and its relatives: ids (B, T) -> logits (B, T, vocab_size)."""

    norms, mlps = RMSNorm, GatedMLP

    def mixer(self) -> dict[str, Any]:
        config = self.config
        attention = partial(
            Attention,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            qk_norm=config.norm_eps if config.qk_norm else None,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling and RopeScaling(**config.rope_scaling.model_dump()),
            window=config.window,
            softcap=config.softcap,
        )
        return {"attention": attention}
