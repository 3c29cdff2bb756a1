"""The linear layer y = x W + b, sharded by columns or by rows, and the weights that it may hold.

A weight holds a matrix W (in, out) and knows how to multiply: Dense, Float8, Transposed, LowBits.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float

from jaxllm import sharding
from jaxllm.config import Lora
from jaxllm.layers.adapter import Adapter, narrow_side_by_side
from jaxllm.layers.layer import Layer
from jaxllm.layers.norm import TOKENS, Norm, plain
from jaxllm.sharding import BATCH, SHARDS, P, axis_size, constrain, normal, one_device, per_device
from pallas_kernels import QuantizedWeight, fp8_linear, quantized_linear, row_linear
from pallas_kernels.dispatch import Implementation
from pallas_kernels.float8.quantize import TILE
from pallas_kernels.mosaic import check_axes, plus
from pallas_kernels.options import with_gradient
from pallas_kernels.quantized.formats import dequantize
from pallas_kernels.single_row import Activation, pays
from pallas_kernels.totals import summed

# Megatron's pair (Shoeybi et al. 2019, section 3): a layer sharded by columns and then one sharded
# by rows need a single sum over the tensor axis.  fsdp divides the rows of both, because XLA
# transposes an array that it gathers along any axis but the first.
COLUMNS = (None, "tensor")
ROWS = ("tensor", None)
Bias = Float[Array, " out"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Summed:
    """A matrix and the float32 total of its gradients, which gradient accumulation adds to."""

    array: jax.Array
    total: jax.Array


def array_and_total(value: jax.Array | Summed) -> tuple[jax.Array, jax.Array | None]:
    """(array, total) of a variable's value, often without a total."""
    return (value.array, value.total) if isinstance(value, Summed) else (value, None)


def _matmul_forward(x, weight, dtype):
    """x @ weight in dtype; the incoming gradient is rounded to x's dtype, as in all other layers.

    Otherwise the backward pass would multiply float32 with bf16, and XLA would keep x in float32
    for it.
    """
    return jnp.matmul(x, weight, preferred_element_type=dtype), (x, weight)


def _matmul_backward(dtype, operands, dy):
    return jax.vjp(jnp.matmul, *operands)[1](dy.astype(operands[0].dtype))


_matmul = with_gradient(_matmul_forward, _matmul_backward, nondiff_argnums=(2,))


@dataclass(frozen=True)
class Dense:
    """A plain matrix, cast to x's dtype for each product."""

    array: jax.Array
    axes: tuple[str | None, ...]  # mesh axes of the matrix that is multiplied
    implementation: Implementation | None
    total: jax.Array | None = None  # of its gradients so far (pallas_kernels/totals.py)
    joins = True  # whether a larger op, or a matmul of several layers, can take the matrix
    row = None  # the weight for row_linear

    def matrix(self, dtype=None) -> Float[Array, "in out"]:
        """W in `dtype` (None: as stored)."""
        return summed(self.array, self.total).astype(dtype or self.array.dtype)

    def operands(self, dtype=None) -> tuple[Float[Array, "in out"], Float[Array, "in out"] | None]:
        """(W, total) for a larger op, which adds to the total itself.

        W: gathered in `dtype`, but still split over the tensor axis; None: as stored.
        """
        if dtype is None:
            return self.array, self.total
        # The constraint makes fsdp gather the cast weight, and never the activations.
        return constrain(self.array.astype(dtype), *self.axes), self.total

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """x W + bias in `dtype` (None: x's); norm: the norm that produced x, or None."""
        w = constrain(self.matrix(x.dtype), *self.axes)
        return plus(x @ w if dtype is None else _matmul(x, w, dtype), bias)


class Float8(Dense):
    """A plain matrix whose products, and their gradients, take fp8 operands."""

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """As Dense; without fp8 if the result's dtype differs from x's."""
        if dtype is not None:
            return super().times(x, bias, dtype)
        apart = self.casts_apart(x)
        implementation = self.implementation if apart else "xla"
        op = lambda x, arrays: fp8_linear(x, **arrays, implementation=implementation)
        op = per_device(op, in_specs=(TOKENS, P()), out_specs=TOKENS) if apart else op
        weight, total = self.operands(x.dtype)
        arrays = {"weight": weight, "bias": bias, "total": total}
        return op(x, arrays | {"row_norm": None if norm is None else norm.row_norm()})

    def casts_apart(self, x: Float[Array, "... in"]) -> bool:
        """Whether kernels cast each device's tokens on that device; else XLA shards the casts.

        Inside `per_device` the scales are computed from the whole arrays.
        """
        rows = x.size // x.shape[-1] // axis_size(*sharding.PARTS)
        return one_device() or (axis_size("tensor") == 1 and x.ndim == 3 and rows % TILE == 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix W (in, out), stored as its transpose `row` (out, in) for generation.

    Each output of a single row is then a sum along a row in memory, which XLA computes in one
    kernel.  For sums along columns it takes two, and the first one writes all products.
    """

    row: Any  # an array, or what JAX puts in place of one
    joins = False

    def matrix(self, dtype=None) -> Float[Array, "in out"]:
        return self.row.T.astype(dtype or self.row.dtype)

    def operands(self, dtype=None) -> tuple[Float[Array, "in out"], None]:
        return self.matrix(dtype), None

    def times(self, x: Float[Array, "... in"], bias: Bias = None, dtype=None, norm=None):
        """x W + bias; sums of a single row x are in float32."""
        dtype = dtype or x.dtype
        if x.size > x.shape[-1]:
            return plus(jnp.matmul(x, self.matrix(x.dtype), preferred_element_type=dtype), bias)
        terms = x[..., None, :].astype(jnp.float32) * self.row.astype(jnp.float32)
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
        op = functools.partial(quantized_linear, dtype=dtype, implementation=self.implementation)
        part = TOKENS if x.ndim == 3 else P(BATCH)
        return per_device(op, (part, P(), P()), part)(x, self.row, bias)


class Linear(Layer):
    """y = x W + b with W (in, out) drawn from N(0, std^2) and b = 0.

    For inference, or where it is frozen, the variable `weight` may hold a QuantizedWeight
    (jaxllm/weights/packed.py) or a Transposed matrix (jaxllm/infer/decode.py), for gradient
    accumulation a Summed one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str = "",
        axes: tuple[str | None, str | None] = COLUMNS,
        std: float = 0.02,
        rows_std: float | None = None,
        bias: bool = False,
        copied: bool = True,
        fp8: bool = False,
        lora: Lora | None = None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """name: the matrix's name in `lora.targets`.

        axes: mesh axes of the matrix as it is multiplied.
        rows_std: std of a layer sharded by rows, which writes to the residual stream; None: std.
        copied: training keeps a copy of the weight in the compute dtype.
        fp8: whether the matmul and its gradients take fp8 operands, where they can.
        lora: the adapters' settings; the layer gets an adapter if it is a target.
        implementation: of quantized_linear, for a packed weight, and of fp8_linear.
        """
        shape = (in_features, out_features)
        std = rows_std if rows_std is not None and axes == ROWS else std
        stored = (axes[0], "fsdp"), axes[1]
        weight = normal(rngs.params(), shape, std, stored)
        self.weight = nnx.Param(weight, axes=stored, copied=copied, summed=True)
        # A layer sharded by rows adds its bias after the sum, so every device needs all of it.
        bias_axes = ("tensor",) if axes == COLUMNS else ()
        zeros = jnp.zeros(out_features, jnp.float32)
        self.bias = nnx.Param(zeros, axes=bias_axes) if bias else None
        self.axes, self.fp8 = axes, fp8
        self.in_features, self.implementation = in_features, implementation
        adapts = lora is not None and lora.adapts(name)
        self.adapter = Adapter(shape, self.axes, lora, rngs=rngs) if adapts else None

    def __call__(
        self, x: Float[Array, "... in"], dtype=None, *, add_bias: bool = True, norm=None
    ) -> Float[Array, "... out"]:
        """Computes x W + b with W cast to x's dtype, and adds the adapter's output.

        dtype: of the result; None: x's.
        add_bias: False leaves the bias to the next op.
        norm: the norm that produced x, or None; fp8 computes a scale from its bound on x.
        """
        self.check(x)
        bias = self.bias[...] if add_bias and self.bias is not None else None
        y = self.held.times(x, bias, dtype, norm)
        if self.adapter is None:
            return y
        # The matmul is the left operand, where XLA can fuse the addition into it.
        return (self.adapter.narrow(x) @ self.adapter.wide(x.dtype)).astype(y.dtype) + y

    def check(self, x: Float[Array, "... in"], axes: str | None = None) -> None:
        """Raises ValueError if x is no array of real numbers with these axes and in_features."""
        if not hasattr(x, "shape"):
            raise ValueError(f"x must be an array, not {type(x).__name__}: pass jnp.asarray(x)")
        if axes is not None:
            check_axes(axes, x=x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:  # W is cast to it
            raise ValueError(f"x is {x.dtype}: cast it to bfloat16, float16 or float32")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x has shape {x.shape}, not (..., in_features={self.in_features})")

    @property
    def held(self) -> Dense | Transposed | LowBits:
        """The weight as an object that knows how to multiply."""
        value = self.weight.get_value()
        if isinstance(value, Transposed):
            return value
        if isinstance(value, QuantizedWeight):
            return LowBits(value, self.implementation)
        array, total = array_and_total(value)
        return (Float8 if self.fp8 else Dense)(array, self.axes, self.implementation, total)

    @property
    def joins(self) -> bool:
        """Whether a larger op can take the matrix; otherwise this layer best adds its own bias."""
        return plain(self, Linear) and self.adapter is None and self.held.joins

    @property
    def row(self) -> jax.Array | QuantizedWeight | None:
        """The weight as row_linear takes it, or None."""
        return self.held.row if plain(self, Linear) and self.adapter is None else None


def fused_linear(
    x: Float[Array, "... in"], *layers: Linear, dtype=None, norm=None
) -> Float[Array, "... out"]:
    """Applies several layers to x in one matmul and concatenates their outputs.

    Each device of the tensor axis holds its part of every layer's output: with two devices the
    order is q0 k0 v0 q1 k1 v1, and an op in `per_device` sees its own three.  The context axis
    divides these parts further, so that `split_heads` gives each device its own three, too.
    """
    held = layers[0].held
    alike = all(plain(layer, Linear) and type(layer.held) is type(held) for layer in layers)
    if not (isinstance(held, Dense) and alike):
        return _side_by_side([layer(x, dtype) for layer in layers])
    # fsdp gathers the joint weight and scatters its gradient; then each layer takes its columns.
    weights = [constrain(layer.held.matrix(x.dtype), SHARDS, "tensor") for layer in layers]
    weight = constrain(_side_by_side(weights), SHARDS, "tensor")
    bias, widths = None, [w.shape[1] for w in weights]
    if any(layer.bias is not None for layer in layers):
        of = lambda a, n: jnp.zeros(n, jnp.float32) if a.bias is None else a.bias[...]
        bias = _side_by_side(list(map(of, layers, widths)))
    y = replace(held, array=weight, axes=(None, "tensor"), total=None).times(x, bias, dtype, norm)
    if not any(adapters := [layer.adapter for layer in layers]):
        return y
    # Adapters are joined, too: a layer's rows of B are zero in the other layers' columns.
    each = zip(adapters, widths, strict=True)
    wide = block_diag(*(a.wide(x.dtype) if a else jnp.zeros((0, n), x.dtype) for a, n in each))
    wide = _side_by_side(jnp.split(wide, np.cumsum(widths)[:-1], axis=1))
    narrow = narrow_side_by_side(x, [a for a in adapters if a is not None])
    return (narrow @ wide).astype(y.dtype) + y


def _side_by_side(arrays: list[jax.Array]) -> jax.Array:
    """Concatenates the last axes so that each device's parts of all arrays are adjacent."""
    n = axis_size("tensor", "context")
    apart = [a.reshape(*a.shape[:-1], n, a.shape[-1] // n) for a in arrays]
    return jax.lax.collapse(jnp.concatenate(apart, axis=-1), arrays[0].ndim - 1)


def takes_row(x: Float[Array, "... in"], *layers: Linear, norm: bool = False) -> bool:
    """Whether `linear_of_row` applies to x, or to a row of its dtype: one row, on one device."""
    rows = [layer.row for layer in layers]
    if x.size != x.shape[-1] or not one_device() or any(w is None for w in rows):
        return False
    # pyrefly: ignore[bad-argument-type]
    return pays(x.dtype, rows, norm=norm, implementation=layers[0].implementation)


def linear_of_row(
    x: Float[Array, "... in"],
    *layers: Linear,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: Float[Array, "... out"] | None = None,
) -> tuple[Float[Array, "... _"], ...]:
    """activation(layer(norm(x))) + residual of one row x for each layer, in one kernel."""
    return row_linear(
        x,
        [layer.row for layer in layers],  # pyrefly: ignore[bad-argument-type]
        [None if layer.bias is None else layer.bias[...] for layer in layers],
        **({} if norm is None else norm.of_row()),
        activation=activation,
        residual=residual,
        implementation=layers[0].implementation,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Float[Array, "..."], n: int) -> tuple[Float[Array, "..."], ...]:
    """Returns x for each of n layers; their gradients are then summed without extra passes.

    XLA can fuse the addition of an array into a matmul, but only if the matmul is the left operand.
    JAX puts the partial sum there, so the third addition would take a separate pass.
    """
    return (x,) * n


fan_out.defvjp(
    lambda x, n: (fan_out(x, n), None),
    lambda n, _, gradients: (functools.reduce(lambda total, g: g + total, gradients),),
)
