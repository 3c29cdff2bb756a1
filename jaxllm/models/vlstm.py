"""The vLSTM model: the architecture of xLSTM 7B, with a recurrent memory instead of attention.

Beck et al. 2025, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", section 3.
"""

from functools import partial
from typing import Any

from jaxllm.layers import GatedMLP, RMSNorm, VLSTMLayer
from jaxllm.models.language_model import LanguageModel


class VLSTM(LanguageModel):
    """xLSTM 7B and smaller ones, for any T: ids (B, T) -> logits (B, T, vocab_size)."""

    norms, mlps = RMSNorm, GatedMLP

    def mixer(self) -> dict[str, Any]:
        config = self.config
        vlstm = partial(
            VLSTMLayer,
            gate_soft_cap=config.gate_soft_cap,
            eps=config.norm_eps,
            chunk_size=config.chunk_size,
        )
        return {"vlstm": vlstm}

    def mixing_flops(self, seq_len: int) -> float:
        """Operations per token of the chunkwise form.

        For each head of each block: L (DQK + DV) for the lower triangles of a chunk of L tokens,
        and 4 DQK DV to read and to update the state.
        """
        c = self.config
        inside = min(c.chunk_size, seq_len) * (c.qk_dim + c.v_dim)
        return float(c.n_layers * c.n_heads * (inside + 4 * c.qk_dim * c.v_dim))
