"""Text from a model: the whole window is computed again for each token (no cache yet)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import SampleConfig


def generate(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompt: list[int],
    config: SampleConfig,
    *,
    window: int,
    rows: int = 1,
) -> list[int]:
    """Token ids that follow `prompt` (at least one id), config.tokens of them.

    window: how many of the last tokens the model sees.  rows: equal copies that are computed, so
    that a mesh can divide the batch.  Temperature 0 takes the likeliest token.
    """

    @jax.jit
    def step(params, buffer, length, key):
        model = nnx.merge(graph, params)
        hidden = model.hidden(buffer)
        last = jax.lax.dynamic_index_in_dim(hidden, length - 1, axis=1, keepdims=True)
        logits = model.logits(last)[0, 0, : model.config.vocab_size].astype(jnp.float32)
        token = choose(logits, key, config.temperature, config.top_k)
        full = length == window
        buffer = jnp.where(full, jnp.roll(buffer, -1, axis=1), buffer)
        length = jnp.where(full, window - 1, length)
        buffer = jax.lax.dynamic_update_slice(
            buffer, jnp.broadcast_to(token, (rows, 1)), (0, length)
        )
        return buffer, length + 1, token

    seen = prompt[-window:]
    buffer = np.zeros((rows, window), np.int32)
    buffer[:, : len(seen)] = seen
    buffer, length = jnp.asarray(buffer), jnp.int32(len(seen))
    tokens = []
    for key in jax.random.split(jax.random.key(config.seed), config.tokens):
        buffer, length, token = step(params, buffer, length, key)
        tokens.append(token)
    return [int(t) for t in tokens]


def choose(logits: jax.Array, key: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """One token id from logits (V,): softmax at a temperature over the k likeliest (0: all)."""
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    if 0 < top_k < logits.size:
        least = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
