"""GPT-2: learned positions, pre-norm blocks with layer norm, GELU, a head tied to the embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from functools import partial

from flax import nnx

from jaxllm.config import GPT2Config
from jaxllm.layers import MLP, Attention, LayerNorm
from jaxllm.models.language_model import LanguageModel


class GPT2(LanguageModel):
    """GPT-2 of any size: ids (B, T) -> logits (B, T, vocab_size)."""

    def __init__(self, config: GPT2Config, *, fp8: str = "none", rngs: nnx.Rngs):
        attention = partial(
            Attention,
            config.d_model,
            config.n_heads,
            bias=True,
            window=config.window,
            softcap=config.softcap,
        )
        super().__init__(
            config,
            norm=LayerNorm,
            attention=attention,
            mlp=MLP,
            max_seq_len=config.max_seq_len,
            tied=True,
            fp8=fp8,
            rngs=rngs,
        )
