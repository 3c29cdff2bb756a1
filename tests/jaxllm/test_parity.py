"""Compares our models with Hugging Face's: logits, loss and every gradient (tests/fixtures)."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from huggingface_folders import from_huggingface, to_huggingface
from pydantic import TypeAdapter
from safetensors import safe_open

from jaxllm.config import ModelConfig
from jaxllm.models import create
from jaxllm.weights.places import named_params

FIXTURES = Path(__file__).parent.parent / "fixtures"
TOLERANCE = 2e-5  # of the largest value, for fp32 sums in another order through two blocks


def close(actual, expected, largest=0.0):
    """Asserts agreement within TOLERANCE of the largest value plus float32's eps of `largest`."""
    allowed = TOLERANCE * np.abs(expected).max() + np.finfo(np.float32).eps * largest
    assert 0 < allowed < np.abs(expected).max() / 100
    np.testing.assert_allclose(actual, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "name",
    # test_peft_folders.py has the logits of relatives; a GPT-2 is tied, too.
    ["gpt2", "llama3", *map(slow, ("llama3_tied", "mistral", "qwen2")), "qwen3", "xlstm"],
)
def test_logits_loss_and_gradients_equal_hugging_face(name):
    with safe_open(FIXTURES / f"{name}.safetensors", "numpy") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}
        fields = json.loads(file.metadata()["config"])
    fields |= dict(compute_dtype="float32", residual_dtype="float32", kernels="xla")
    config = TypeAdapter(ModelConfig).validate_python(fields)
    grads = {k.removeprefix("grad."): v for k, v in stored.items() if k.startswith("grad.")}
    weights = {k: stored[k] for k in grads}

    model = create(config)
    arrays, params = from_huggingface(config, weights), named_params(model)
    assert arrays.keys() == params.keys()
    for path, param in params.items():
        assert param.shape == arrays[path].shape
        param[...] = jnp.asarray(arrays[path])
    graph, params = nnx.split(model)
    tokens, labels = jnp.asarray(stored["tokens"]), jnp.asarray(stored["labels"])

    @partial(jax.value_and_grad, has_aux=True)
    def mean_loss_and_logits(params):
        model = nnx.merge(graph, params)
        return model.loss(tokens, labels) / (labels != -100).sum(), model(tokens)

    with jax.default_matmul_precision("highest"):  # a GPU would use TF32
        (loss, logits), ours = jax.jit(mean_loss_and_logits)(params)
    close(logits[..., : config.vocab_size], stored["logits"])
    close(loss, stored["loss"])
    ours = to_huggingface(config, {k: p[...] for k, p in named_params(ours).items()})
    assert ours.keys() == grads.keys()
    # Gradients that nearly cancel (the input gates' biases before a scale-free norm) are known to
    # the rounding of the larger ones.
    largest = max(np.abs(g).max() for g in grads.values())
    for key, expected in grads.items():
        close(ours[key], expected, largest)
    # and the table loses nothing on the way back
    back = to_huggingface(config, from_huggingface(config, weights))
    assert all(np.array_equal(back[key], weights[key]) for key in weights)
