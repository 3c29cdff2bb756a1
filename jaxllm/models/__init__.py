"""The models, by the value of `model.type` in a configuration."""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.language_model import LanguageModel
from jaxllm.models.llama3 import Llama3
from jaxllm.models.vlstm import VLSTM

MODELS: dict[str, Callable[..., LanguageModel]] = {"gpt2": GPT2, "llama3": Llama3, "vlstm": VLSTM}


def create(config: ModelConfig, *, seed: int = 0, fp8: str = "none") -> LanguageModel:
    """The configured model with initial float32 weights; fp8: none, matmuls or all."""
    return MODELS[config.type](config, fp8=fp8, rngs=nnx.Rngs(seed))


def abstract(config: ModelConfig, fp8: str) -> LanguageModel:
    """`create` with shapes for weights; cached (24 blocks take 0.2 s), so never change it."""
    return _abstract(MODELS[config.type], config, fp8)


@functools.cache
def _abstract(make, config, fp8):
    return nnx.eval_shape(lambda: make(config, fp8=fp8, rngs=nnx.Rngs(0)))


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Floating-point operations per token of training, forward and backward.

    6 N for the N parameters in matmuls (2 N forward, 4 N backward), and 3 x the forward matmuls of
    the sequence mixing; frozen parameters have no gradient, which leaves 4 N.  Tables (positions,
    and tokens unless the head is tied to them), rows that pad the vocabulary, recomputation,
    padding and element-wise work do not count.
    """
    model = abstract(config, "none")
    tables = {("embedding", "wpe"), *([("embedding", "wte")] if model.head else [])}
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    n = sum(p.size for path, p in params if p.ndim >= 2 and path not in tables)
    n -= (config.padded_vocab_size - config.vocab_size) * config.d_model
    trained = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    return 4 * n + 2 * (trained if config.adapters else n) + 3 * model.mixing_flops(seq_len)
