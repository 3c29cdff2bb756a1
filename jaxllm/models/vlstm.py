"""The vLSTM model: the architecture of xLSTM 7B, a recurrent memory in place of attention.

Beck et al. 2025, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", section 3.
"""

import math

from flax import nnx

from jaxllm.config import VLSTMConfig
from jaxllm.layers import Embedding, GatedMLP, Linear, RMSNorm, VLSTMLayer
from jaxllm.models.language_model import LanguageModel, add_norm, zero_columns

STD = 0.02


class VLSTMBlock(nnx.Module):
    """s += vlstm(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: VLSTMConfig, *, rngs: nnx.Rngs):
        C, backend = config.d_model, config.kernels
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, backend=backend)
        # 2 L branches add up on the residual stream.
        weights = dict(std=STD, out_std=STD / math.sqrt(2 * config.n_layers), rngs=rngs)
        self.norm_1 = RMSNorm(C, **norm)
        self.vlstm = VLSTMLayer(
            C,
            config.n_heads,
            gate_soft_cap=config.gate_soft_cap,
            eps=config.norm_eps,
            chunk_size=config.chunk_size,
            backend=backend,
            **weights,
        )
        self.norm_2 = RMSNorm(C, **norm)
        self.mlp = GatedMLP(C, config.ff_width, backend=backend, **weights)

    def __call__(self, branch, residual, positions=None, segment_ids=None):
        y, residual = add_norm(self.norm_1, branch, residual)
        branch = self.vlstm(y, segment_ids)
        y, residual = add_norm(self.norm_2, branch, residual)
        return self.mlp(y), residual


class VLSTM(LanguageModel):
    """xLSTM 7B and its smaller relatives; any sequence length."""

    def __init__(self, config: VLSTMConfig, *, rngs: nnx.Rngs):
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
        self.blocks = nnx.List([VLSTMBlock(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = RMSNorm(
            config.d_model, eps=config.norm_eps, dtype=config.compute_dtype, backend=config.kernels
        )
        self.head = Linear(config.d_model, config.padded_vocab_size, std=STD, rngs=rngs)
        zero_columns(self.head.weight, config.vocab_size)
        self.logit_soft_cap = config.logit_soft_cap

    def mixing_flops(self, seq_len: int) -> float:
        """Of the chunkwise form: L (DQK + DV) for the lower triangles inside a chunk of L tokens,
        and 4 DQK DV to read and to update the state, for each head of each block."""
        c = self.config
        inside = min(c.chunk_size, seq_len) * (c.qk_dim + c.v_dim)
        return float(c.n_layers * c.n_heads * (inside + 4 * c.qk_dim * c.v_dim))
