"""The weight objects of a linear layer: each holds a matrix W (in, out) and knows how to multiply.

y = x W + bias      Dense, Float8, Transposed and LowBits
y = ... + s x A B   with an Adapter beside any of them
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.config import Lora
from jaxllm.sharding import BATCH, PARTS, P, constrain, one_device, per_device
from pallas_kernels import QuantizedWeight, fp8_linear, quantized_linear
from pallas_kernels.dispatch import Implementation
from pallas_kernels.float8.quantize import TILE
from pallas_kernels.options import with_gradient
from pallas_kernels.quantized.formats import dequantize
from pallas_kernels.totals import summed

Bias = Float[Array, " out"] | None
TOKENS = P(BATCH, "context")  # of (B, T, ...)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Summed:
    """A matrix and the float32 total of its gradients, which gradient accumulation adds to."""

    array: jax.Array
    total: jax.Array


def array_and_total(value: jax.Array | Summed) -> tuple[jax.Array, jax.Array | None]:
    """(array, total) of a variable's value, often without a total."""
    return (value.array, value.total) if isinstance(value, Summed) else (value, None)


@dataclass(frozen=True)
class Dense:
    """A plain matrix, cast to x's dtype for each product."""

    array: jax.Array
    axes: tuple[str | None, ...]  # mesh axes of the matrix that is multiplied
    implementation: Implementation | None
    total: jax.Array | None = None  # of its gradients so far (pallas_kernels/totals.py)
    joins = True  # whether a larger op, or a matmul of several layers, can take the matrix
    row = None  # what row_linear takes

    def matrix(self, dtype=None) -> Float[Array, "in out"]:
        """W in `dtype` (None: as stored)."""
        return summed(self.array, self.total).astype(dtype or self.array.dtype)

    def operands(self, dtype=None) -> tuple[Float[Array, "in out"], Float[Array, "in out"] | None]:
        """(W, total) for a larger op, which adds to the total itself.

        W: in `dtype` on each device, or its part of the tensor axis; None: as stored.
        """
        if dtype is None:
            return self.array, self.total
        # The constraint makes fsdp gather the cast weight, and never the activations.
        return constrain(self.array.astype(dtype), *self.axes), self.total

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """x W + bias in `dtype` (None: x's); norm: the one that x is a result of, or None."""
        w = constrain(self.matrix(x.dtype), *self.axes)
        y = x @ w if dtype is None else _matmul(x, w, dtype)
        return y if bias is None else y + bias.astype(y.dtype)


class Float8(Dense):
    """A plain matrix whose products, and their gradients, take fp8 operands."""

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """As Dense; a result in another dtype than x's takes no fp8."""
        if dtype is not None:
            return super().times(x, bias, dtype)
        apart = self.casts_apart(x)
        implementation = self.implementation if apart else "xla"
        op = lambda x, arrays: fp8_linear(x, **arrays, implementation=implementation)
        if apart:
            op = per_device(op, in_specs=(TOKENS, P()), out_specs=TOKENS)
        weight, total = self.operands(x.dtype)
        arrays = {"weight": weight, "bias": bias, "total": total}
        return op(x, arrays | {"row_norm": None if norm is None else norm.row_norm()})

    def casts_apart(self, x: Float[Array, "... in"]) -> bool:
        """Whether each device casts its own tokens by the kernels; otherwise XLA shards the casts.

        Inside `per_device` the scales are the whole arrays'.
        """
        mesh = jax.sharding.get_abstract_mesh().shape
        rows = x.size // x.shape[-1] // math.prod(mesh.get(axis, 1) for axis in PARTS)
        return one_device() or (mesh["tensor"] == 1 and x.ndim == 3 and rows % TILE == 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix W (in, out), stored as its transpose (out, in) for generation.

    Each output of a single row is then a sum along a row in memory, which XLA computes in one
    kernel.  For sums along columns it takes two, and the first one writes all products.
    """

    array: jax.Array
    joins = False

    @property
    def row(self) -> jax.Array:
        return self.array

    def matrix(self, dtype=None) -> Float[Array, "in out"]:
        return self.array.T.astype(dtype or self.array.dtype)

    def operands(self, dtype=None) -> tuple[Float[Array, "in out"], None]:
        return self.matrix(dtype), None

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """x W + bias; sums of a single row x are in float32."""
        if x.size == x.shape[-1]:
            return self.times_row(x, bias, dtype or x.dtype)
        y = jnp.matmul(x, self.matrix(x.dtype), preferred_element_type=dtype or x.dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def times_row(self, x: Float[Array, "... in"], bias: Bias, dtype) -> Float[Array, "... out"]:
        """x W + bias of a single row x, summed in float32."""
        terms = x[..., None, :].astype(jnp.float32) * self.array.astype(jnp.float32)
        if bias is not None:
            # The bias is part of the first term: XLA would add it in another kernel.
            terms += jnp.where(jnp.arange(x.shape[-1]) == 0, bias[:, None], 0)
        return terms.sum(-1).astype(dtype)


@dataclass(frozen=True)
class LowBits:
    """A packed matrix; gradients go to x and bias only."""

    row: QuantizedWeight
    implementation: Implementation | None
    joins = False

    def matrix(self, dtype=None) -> Float[Array, "in out"]:
        return dequantize(self.row, dtype or jnp.float32)

    def operands(self, dtype=None) -> tuple[Float[Array, "in out"], None]:
        return self.matrix(dtype), None

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """x W + bias by a kernel that unpacks words in registers."""
        op = per_device(
            functools.partial(quantized_linear, dtype=dtype, implementation=self.implementation),
            in_specs=(P(BATCH), P(), P()),
            out_specs=P(BATCH),
        )
        return op(x, self.row, bias)


Weight = Dense | Transposed | LowBits


class DropoutKey(nnx.Variable):
    """The random key of an adapter's dropout, uint32; the train step sets it."""


class Adapter(nnx.Module):
    """s x A B beside a frozen matrix (in, out), with A (in, rank) and B (rank, out) in float32.

    Initially A is what `draw` returns, and B is zero.  Hu et al. 2021, "LoRA", section 4.1.
    """

    def __init__(self, shape: tuple[int, int], axes: tuple, lora: Lora, *, rngs: nnx.Rngs):
        """axes: mesh axes of the adapted matrix as it is multiplied."""
        self.a = nnx.LoRAParam(draw(rngs.params(), (shape[0], lora.rank)), axes=(axes[0], None))
        self.b = nnx.LoRAParam(jnp.zeros((lora.rank, shape[1])), axes=(None, axes[1]))
        self.scale, self.dropout = lora.scale, lora.dropout
        key = jax.random.key_data(jax.random.key(0))  # its size depends on jax_default_prng_impl
        self.key = DropoutKey(key) if lora.dropout else None

    def narrow(self, x: Float[Array, "... in"]) -> Float[Array, "... rank"]:
        """x A, of inputs that dropout left."""
        if self.key is not None:
            kept = jax.random.bernoulli(
                jax.random.wrap_key_data(self.key.get_value()), 1 - self.dropout, x.shape
            )
            x = jnp.where(kept, x / (1 - self.dropout), 0).astype(x.dtype)
        return x @ self.a[...].astype(x.dtype)

    def wide(self, dtype) -> Float[Array, "rank out"]:
        """s B in `dtype`."""
        return (self.scale * self.b[...]).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, shape: tuple[int, int]) -> Float[Array, "in rank"]:
    """A of an adapter from U(-1/sqrt(in), 1/sqrt(in)), as by peft's Kaiming initialization."""
    reach = shape[0] ** -0.5
    return jax.random.uniform(key, shape, minval=-reach, maxval=reach)


def narrow_side_by_side(x: Float[Array, "... in"], adapters: list[Adapter]) -> jax.Array:
    """x A of several adapters of the same x, which is read once unless dropout masks it."""
    if any(adapter.key is not None for adapter in adapters):
        return jnp.concatenate([adapter.narrow(x) for adapter in adapters], -1)
    return x @ jnp.concatenate([adapter.a[...] for adapter in adapters], -1).astype(x.dtype)


def _matmul_forward(x, weight, dtype):
    """x @ weight in dtype; the incoming gradient is rounded to x's dtype, as in all other layers.

    Otherwise the backward pass would multiply float32 with bf16, and XLA would keep x in float32
    for it.
    """
    return jnp.matmul(x, weight, preferred_element_type=dtype), (x, weight)


def _matmul_backward(dtype, operands, dy):
    return jax.vjp(jnp.matmul, *operands)[1](dy.astype(operands[0].dtype))


_matmul = with_gradient(_matmul_forward, _matmul_backward, nondiff_argnums=(2,))
