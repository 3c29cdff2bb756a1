"""GPT-2: learned positions, pre-norm blocks with layer norm, GELU, a head tied to the embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from functools import partial
from typing import Any

from jaxllm.layers import MLP, Attention, LayerNorm
from jaxllm.models.language_model import LanguageModel


class GPT2(LanguageModel):
    """GPT-2 of any size: ids (B, T) -> logits (B, T, vocab_size)."""

    norms, mlps = LayerNorm, MLP
    learns_positions = tied = True

    def mixer(self) -> dict[str, Any]:
        config = self.config
        make = partial(Attention, bias=True, window=config.window, softcap=config.softcap)
        return {"attention": make}
