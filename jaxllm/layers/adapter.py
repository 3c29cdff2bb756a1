"""Adapters beside frozen matrices, y = x W + s x A B (LoRA)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.config import Lora


class DropoutKey(nnx.Variable):
    """The random key of an adapter's dropout, uint32; the train step sets it."""


class Adapter(nnx.Module):
    """s x A B beside a frozen matrix (in, out), with A (in, rank) and B (rank, out) in float32.

    Initially A is what `draw` returns, and B is zero.  Hu et al. 2021, "LoRA", section 4.1.
    """

    def __init__(self, shape: tuple[int, int], axes: tuple, lora: Lora, *, rngs: nnx.Rngs):
        """axes: mesh axes of the adapted matrix as it is multiplied."""
        self.a = nnx.LoRAParam(draw(rngs.params(), (shape[0], lora.rank)), axes=(axes[0], None))
        self.b = nnx.LoRAParam(jnp.zeros((lora.rank, shape[1]), jnp.float32), axes=(None, axes[1]))
        self.scale, self.dropout = lora.scale, lora.dropout
        key = jax.random.key_data(jax.random.key(0))  # its size depends on jax_default_prng_impl
        self.key = DropoutKey(key) if lora.dropout else None

    def narrow(self, x: Float[Array, "... in"]) -> Float[Array, "... rank"]:
        """x A, with dropout applied to x."""
        if self.key is not None:
            key = jax.random.wrap_key_data(self.key.get_value())
            kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)
        return x @ self.a[...].astype(x.dtype)

    def wide(self, dtype) -> Float[Array, "rank out"]:
        """s B in `dtype`."""
        return (self.scale * self.b[...]).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, shape: tuple[int, int]) -> Float[Array, "in rank"]:
    """An adapter's A from U(-1/sqrt(in), 1/sqrt(in)), as in peft's Kaiming initialization."""
    reach = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, minval=-reach, maxval=reach)


def narrow_side_by_side(x: Float[Array, "... in"], adapters: list[Adapter]) -> jax.Array:
    """x A of several adapters of the same x, which is read once unless dropout masks it."""
    if any(adapter.key is not None for adapter in adapters):
        return jnp.concatenate([adapter.narrow(x) for adapter in adapters], -1)
    return x @ jnp.concatenate([adapter.a[...] for adapter in adapters], -1).astype(x.dtype)
