"""The linear layer y = x W + b, sharded by columns or by rows."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.layers.layer import Layer
from jaxllm.layers.norm import LayerNorm, RMSNorm
from jaxllm.sharding import (
    BATCH,
    SHARDS,
    P,
    constrain,
    context_size,
    normal,
    one_device,
    per_device,
)
from pallas_kernels import QuantizedWeight, dequantize, fp8_linear, quantized_linear, row_linear
from pallas_kernels.dispatch import Implementation
from pallas_kernels.single_row import Activation
from pallas_kernels.single_row import why_not as row_why_not
from pallas_kernels.single_row import why_slower as row_why_slower

# Megatron's pair (Shoeybi et al. 2019, section 3): a layer sharded by columns and then one sharded
# by rows need a single sum over the tensor axis.  fsdp shards the other dimension.
COLUMNS = ("fsdp", "tensor")
ROWS = ("tensor", "fsdp")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix W (in, out), stored as its transpose (out, in) for generation.

    Each output of a single row is then a sum along a row in memory, which XLA computes in one
    kernel.  For sums along columns it takes two, and the first one writes all products.
    """

    array: jax.Array

    def times_row(
        self, x: Float[Array, "... in"], bias: Float[Array, " out"] | None, dtype
    ) -> Float[Array, "... out"]:
        """x W + bias of a single row x, summed in float32."""
        terms = x[..., None, :].astype(jnp.float32) * self.array.astype(jnp.float32)
        if bias is not None:
            # The bias is part of the first term, because XLA gives a sum's other operands a kernel
            # of their own.
            terms += jnp.where(jnp.arange(x.shape[-1]) == 0, bias[:, None], 0)
        return terms.sum(-1).astype(dtype)


class Linear(Layer):
    """y = x W + b with W (in, out) drawn from N(0, std^2) and b = 0.

    For inference the variable `weight` may hold a QuantizedWeight (jaxllm/weights/packed.py) or a
    Transposed matrix (jaxllm/infer/decode.py).

    fp8: whether the matmul and its gradients take fp8 operands (`use_fp8`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str] = COLUMNS,
        std: float = 0.02,
        bias: bool = False,
        copied: bool = True,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs,
    ):
        """copied: training keeps a copy of the weight in the compute dtype.

        implementation: of quantized_linear, for a packed weight, and of fp8_linear.
        """
        weight = normal(rngs.params(), (in_features, out_features), std, axes)
        self.weight = nnx.Param(weight, axes=axes, copied=copied)
        # A layer sharded by rows adds its bias after the sum, so every device needs all of it.
        bias_axes = ("tensor",) if axes == COLUMNS else ()
        self.bias = nnx.Param(jnp.zeros(out_features), axes=bias_axes) if bias else None
        self.gathered = tuple(a if a == "tensor" else None for a in axes)
        self.in_features, self.implementation = in_features, implementation
        self.fp8 = False

    def __call__(
        self, x: Float[Array, "... in"], dtype=None, *, add_bias: bool = True, norm=None
    ) -> Float[Array, "... out"]:
        """Computes x W + b with W cast to x's dtype.

        dtype: of the result; None: that of x.
        add_bias: False leaves the bias to the next op.
        norm: the norm that x is a result of, or None; fp8 takes its bound of x for a scale.
        """
        self.check(x)
        weight = self.weight.get_value()
        bias = self.bias[...] if add_bias and self.bias is not None else None
        if isinstance(weight, QuantizedWeight):
            op = per_device(
                functools.partial(
                    quantized_linear, dtype=dtype, implementation=self.implementation
                ),
                in_specs=(P(BATCH), P(), P()),
                out_specs=P(BATCH),
            )
            return op(x, weight, bias)
        if isinstance(weight, Transposed) and x.size == x.shape[-1]:
            return weight.times_row(x, bias, dtype or x.dtype)
        if self.fp8 and dtype is None:
            return self.fp8_matmul(x, self.cast(x), bias, norm)
        y = jnp.matmul(x, self.cast(x), preferred_element_type=dtype or x.dtype)
        return self.plus_bias(y) if add_bias else y

    def fp8_matmul(
        self, x: Float[Array, "... in"], weight: Float[Array, "in _"], bias=None, norm=None
    ) -> Float[Array, "... _"]:
        """x @ weight + bias with fp8 operands; both are this layer's, or those of several."""
        # On several devices XLA shards the casts; a kernel would see a part of the maximum.
        implementation = self.implementation if one_device() else "xla"
        row_norm = None if norm is None else norm.row_norm()
        return fp8_linear(x, weight, bias, row_norm=row_norm, implementation=implementation)

    def check(self, x: Float[Array, "... in"]) -> None:
        """Raises ValueError if x has another width than the weight."""
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has {x.shape[-1]} columns, and this Linear takes {self.in_features}"
                " (in_features)"
            )

    @property
    def generates(self) -> bool:
        """Whether the weight is stored for generation, where this layer best adds its own bias."""
        return isinstance(self.weight.get_value(), Transposed | QuantizedWeight)

    def matrix(self, dtype) -> Float[Array, "in out"]:
        """The weight in `dtype`; a packed one is dequantized."""
        weight = self.weight.get_value()
        if isinstance(weight, Transposed):
            return weight.array.T.astype(dtype)
        if isinstance(weight, QuantizedWeight):
            return dequantize(weight, dtype)
        return weight.astype(dtype)

    def cast(self, x: Float[Array, "..."]) -> Float[Array, "in out"]:
        """The weight in x's dtype."""
        # The constraint makes fsdp gather the cast weight, and never the activations.
        return constrain(self.matrix(x.dtype), *self.gathered)

    def plus_bias(self, y: Float[Array, "... out"]) -> Float[Array, "... out"]:
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def fused_linear(
    x: Float[Array, "... in"], *layers: Linear, dtype=None, norm=None
) -> Float[Array, "... out"]:
    """Applies several layers to x in one matmul and concatenates their outputs.

    Each device of the tensor axis holds its part of every layer's output: with two devices the
    order is q0 k0 v0 q1 k1 v1, and an op in `per_device` sees its own three.  The context axis
    divides these parts further, so that `split_heads` gives each device its own three, too.
    """
    layers[0].check(x)
    if layers[0].generates:
        return _side_by_side([layer(x, dtype) for layer in layers])
    # fsdp gathers the joint weight and scatters its gradient; then each layer takes its columns.
    weights = [constrain(layer.matrix(x.dtype), SHARDS, "tensor") for layer in layers]
    weight = constrain(_side_by_side(weights), SHARDS, "tensor")
    weight = constrain(weight, None, "tensor")
    biases = [layer.bias[...] for layer in layers if layer.bias is not None]
    bias = _side_by_side(biases).astype(dtype or x.dtype) if biases else None
    if layers[0].fp8 and dtype is None:
        return layers[0].fp8_matmul(x, weight, bias, norm)
    y = x @ weight if dtype is None else _matmul(x, weight, dtype)
    return y if bias is None else y + bias


def _side_by_side(arrays: list[jax.Array]) -> jax.Array:
    """Concatenates the last axes, each device's part of all arrays together."""
    parts = jax.sharding.get_abstract_mesh().shape.get("tensor", 1) * context_size()
    apart = [a.reshape(*a.shape[:-1], parts, -1) for a in arrays]
    return jnp.concatenate(apart, axis=-1).reshape(*arrays[0].shape[:-1], -1)


def takes_row(x: Float[Array, "... in"] | None, *layers: Linear, norm: bool = False) -> bool:
    """Whether `linear_of_row` applies: x is one row, on one device, for weights of generation.

    x: None for one row in the compute dtype, which is bfloat16 for packed weights.
    """
    if not all(layer.generates for layer in layers):
        return False
    arrays = [_of_row(layer) for layer in layers]
    if x is None:
        w = arrays[0]
        packed = isinstance(w, QuantizedWeight)
        x = jnp.empty(w.shape[0], jnp.bfloat16) if packed else w[0]
    if x.size != x.shape[-1] or not one_device() or layers[0].implementation == "xla":
        return False
    return row_why_not(x, arrays, norm=norm) is None and row_why_slower(arrays) is None


def _of_row(layer: Linear) -> jax.Array | QuantizedWeight:
    """The weight as row_linear takes it."""
    weight = layer.weight.get_value()
    return weight.array if isinstance(weight, Transposed) else weight


def linear_of_row(
    x: Float[Array, "... in"],
    *layers: Linear,
    norm: LayerNorm | RMSNorm | None = None,
    activation: Activation | None = None,
    residual: Float[Array, "... out"] | None = None,
) -> tuple[Float[Array, "... _"], ...]:
    """activation(layer(norm(x))) + residual of one row x for each layer, in one kernel."""
    return row_linear(
        x,
        [_of_row(layer) for layer in layers],
        [None if layer.bias is None else layer.bias[...] for layer in layers],
        norm=None if norm is None else norm.of_row(),
        activation=activation,
        residual=residual,
        implementation=layers[0].implementation,
    )


def use_fp8(module: nnx.Module) -> None:
    """Makes the matmuls of all linear layers inside a module take fp8 operands, where they can."""
    for _, layer in nnx.iter_graph(module):
        if isinstance(layer, Linear):
            layer.fp8 = True


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weight, dtype):
    """x @ weight in dtype; the incoming gradient is rounded to x's dtype, as in all other layers.

    Otherwise the backward pass would multiply float32 with bf16, and XLA would keep x in float32
    for it.
    """
    return jnp.matmul(x, weight, preferred_element_type=dtype)


def _matmul_backward(dtype, operands, dy):
    return jax.vjp(jnp.matmul, *operands)[1](dy.astype(operands[0].dtype))


_matmul.defvjp(lambda x, weight, dtype: (_matmul(x, weight, dtype), (x, weight)), _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Float[Array, "..."], n: int) -> tuple[Float[Array, "..."], ...]:
    """Returns x for each of n layers; their gradients are then summed without extra passes.

    XLA can fuse the addition of an array into a matmul, but only if the matmul is the left operand.
    JAX puts the partial sum there, so the third addition would take a pass of its own.
    """
    return (x,) * n


fan_out.defvjp(
    lambda x, n: (fan_out(x, n), None),
    lambda n, _, gradients: (functools.reduce(lambda total, g: g + total, gradients),),
)
