"""The vLSTM model: the architecture of xLSTM 7B, with a recurrent memory instead of attention.

Beck et al. 2025, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference", section 3.
"""

from flax import nnx

from jaxllm.config import VLSTMConfig
from jaxllm.layers import GatedMLP, RMSNorm, VLSTMLayer
from jaxllm.layers.layer import Layer
from jaxllm.models.language_model import LanguageModel, Stream, block_weights, of_row


class VLSTMBlock(Layer):
    """s += vlstm(norm_1(s)); s += mlp(norm_2(s))."""

    def __init__(self, config: VLSTMConfig, *, fp8: bool, rngs: nnx.Rngs):
        C, implementation = config.d_model, config.implementation
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, implementation=implementation)
        weights = block_weights(config, rngs, fp8)
        self.norm_1 = RMSNorm(C, **norm)
        self.vlstm = VLSTMLayer(
            C,
            config.n_heads,
            gate_soft_cap=config.gate_soft_cap,
            eps=config.norm_eps,
            chunk_size=config.chunk_size,
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
        if (result := of_row(self, self.vlstm, stream, cache)) is not None:
            return result
        y, residual = stream.normed(self.norm_1)
        if cache is None:
            branch = self.vlstm(y, segment_ids, norm=self.norm_1)
        else:
            branch, cache = self.vlstm.with_cache(y, cache)
        y, residual = Stream(branch, None, residual).normed(self.norm_2)
        return Stream(self.mlp(y, norm=self.norm_2), None, residual), cache


class VLSTM(LanguageModel):
    """xLSTM 7B and smaller models of its architecture, for any sequence length."""

    def __init__(self, config: VLSTMConfig, *, fp8: str = "none", rngs: nnx.Rngs):
        super().__init__(
            config,
            block=VLSTMBlock,
            norm=RMSNorm,
            logit_soft_cap=config.logit_soft_cap,
            fp8=fp8,
            rngs=rngs,
        )

    def mixing_flops(self, seq_len: int) -> float:
        """Operations per token of the chunkwise form.

        For each head of each block: L (DQK + DV) for the lower triangles of a chunk of L tokens,
        and 4 DQK DV to read and to update the state.
        """
        c = self.config
        inside = min(c.chunk_size, seq_len) * (c.qk_dim + c.v_dim)
        return float(c.n_layers * c.n_heads * (inside + 4 * c.qk_dim * c.v_dim))
