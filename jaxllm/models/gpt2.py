"""GPT-2: learned positions, pre-norm blocks with layer norm, GELU, a head tied to the embedding.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from flax import nnx

from jaxllm.config import GPT2Config
from jaxllm.layers import MLP, Attention, LayerNorm
from jaxllm.layers.layer import Layer
from jaxllm.models.language_model import LanguageModel, Stream, block_weights, of_row


class GPT2Block(Layer):
    """s += attention(norm_1(s)); s += mlp(norm_2(s)); when training, the next norms add biases."""

    def __init__(self, config: GPT2Config, *, fp8: bool, rngs: nnx.Rngs):
        C, implementation = config.d_model, config.implementation
        norm = dict(eps=config.norm_eps, dtype=config.compute_dtype, implementation=implementation)
        weights = block_weights(config, rngs, fp8)
        self.norm_1 = LayerNorm(C, **norm)
        self.attention = Attention(
            C,
            config.n_heads,
            bias=True,
            window=config.window,
            softcap=config.softcap,
            implementation=implementation,
            **weights,
        )
        self.norm_2 = LayerNorm(C, **norm)
        self.mlp = MLP(
            C,
            config.ff_width,
            implementation=implementation,
            **weights,
        )

    def __call__(self, stream, positions=None, segment_ids=None, cache=None):
        if (result := of_row(self, self.attention, stream, cache)) is not None:
            return result
        add_bias = not self.mlp.down.joins
        out_bias, down_bias = (
            None if add_bias or layer.bias is None else layer.bias[...]
            for layer in (self.attention.out, self.mlp.down)
        )
        y, residual = stream.normed(self.norm_1)
        if cache is None:
            options = dict(add_bias=add_bias, norm=self.norm_1)
            branch = self.attention(y, positions, segment_ids, **options)
        else:
            branch, cache = self.attention.with_cache(y, positions, cache, add_bias=add_bias)
        y, residual = Stream(branch, out_bias, residual).normed(self.norm_2)
        y = self.mlp(y, add_bias=add_bias, norm=self.norm_2)
        return Stream(y, down_bias, residual), cache


class GPT2(LanguageModel):
    """GPT-2 of any size."""

    def __init__(self, config: GPT2Config, *, fp8: str = "none", rngs: nnx.Rngs):
        super().__init__(
            config,
            block=GPT2Block,
            norm=LayerNorm,
            max_seq_len=config.max_seq_len,
            tied=True,
            fp8=fp8,
            rngs=rngs,
        )
