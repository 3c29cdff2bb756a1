"""The models, by the value of `model.type` in a configuration."""

from collections.abc import Callable

import jax
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.language_model import LanguageModel
from jaxllm.models.llama3 import Llama3
from jaxllm.models.vlstm import VLSTM

__all__ = ["GPT2", "MODELS", "VLSTM", "Llama3", "create", "flops_per_token", "matmul_params"]

MODELS: dict[str, Callable[..., LanguageModel]] = {"gpt2": GPT2, "llama3": Llama3, "vlstm": VLSTM}


def create(config: ModelConfig, *, seed: int = 0, fp8: str = "none") -> LanguageModel:
    """The configured model with initial float32 weights; fp8: none, matmuls or all."""
    return MODELS[config.type](config, fp8=fp8, rngs=nnx.Rngs(seed))


def matmul_params(model: LanguageModel) -> int:
    """Number of parameters that each token multiplies; `model` may be abstract (`nnx.eval_shape`).

    Counts all matrices but the lookup tables: positions, and tokens unless the head is tied to
    them.  Rows that pad the vocabulary do not count.
    """
    config = model.config
    looked_up = {("embedding", "wpe"), *([("embedding", "wte")] if model.head else [])}
    matrices = {
        path: p.size
        for path, p in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if p.ndim >= 2 and path not in looked_up
    }
    padding = (config.padded_vocab_size - config.vocab_size) * config.d_model
    return sum(matrices.values()) - padding


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Floating-point operations per token of training, forward and backward.

    6 N for the N parameters in matmuls (2 N forward, 4 N backward), and 3 x the forward matmuls of
    the sequence mixing; frozen parameters have no gradient, which leaves 4 N.  Recomputation,
    padding and element-wise work do not count.
    """
    model = nnx.eval_shape(lambda: create(config))
    trained = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    frozen = matmul_params(model) - trained if trained else 0
    return 6 * matmul_params(model) - 2 * frozen + 3 * model.mixing_flops(seq_len)
