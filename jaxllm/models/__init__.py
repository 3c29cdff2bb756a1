"""The models, by the name that `model.type` has in a configuration."""

from collections.abc import Callable

from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.language_model import LanguageModel
from jaxllm.models.llama3 import Llama3
from jaxllm.models.vlstm import VLSTM

__all__ = ["GPT2", "MODELS", "VLSTM", "Llama3", "create", "flops_per_token", "matmul_params"]

MODELS: dict[str, Callable[..., LanguageModel]] = {"gpt2": GPT2, "llama3": Llama3, "vlstm": VLSTM}


def create(config: ModelConfig, *, seed: int = 0) -> LanguageModel:
    """The model that a configuration describes, with its initial weights."""
    return MODELS[config.type](config, rngs=nnx.Rngs(seed))


def matmul_params(model: LanguageModel) -> int:
    """Parameters that take part in a matmul for each token; shapes suffice (`nnx.eval_shape`).

    All matrices but the tables that are looked up: positions, and tokens where the head is not
    tied to them.  Rows that pad the vocabulary are not counted.
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
    """Floating point operations of one token in training, forward and backward.

    6 N for the N parameters in matmuls (forward 2 N, backward twice that), and 3 x the forward
    matmuls of the token mixing.  Recomputation, padding and element-wise work are not counted.
    """
    model = nnx.eval_shape(lambda: create(config))
    return 6 * matmul_params(model) + 3 * model.mixing_flops(seq_len)
