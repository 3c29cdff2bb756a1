"""Models with the weights of a folder, for tests."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.models import create
from jaxllm.weights.pretrained import load_params, open_weights


def abstract_model(config):
    """(graph, shapes of the parameters on the first device)."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: create(config)))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return graph, jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), abstract
    )


def logits(directory, tokens):
    """Logits (B, T, V) in float32 with the weights in a directory."""
    weights = open_weights(directory)
    fp32 = dict(compute_dtype="float32", residual_dtype="float32", kernels="xla")
    config = weights.config.model_copy(update=fp32)
    graph, abstract = abstract_model(config)
    params = load_params(weights, abstract)
    with jax.default_matmul_precision("highest"):
        z = jax.jit(lambda params: nnx.merge(graph, params)(jnp.asarray(tokens)))(params)
    return np.asarray(z)[..., : config.vocab_size]
