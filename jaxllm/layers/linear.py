"""The dense layer y = x W + b, split over the mesh along its columns or along its rows."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.sharding import constrain, normal

# Megatron's pair (Shoeybi et al. 2019, section 3): a layer split by columns, then one split by
# rows, so that a pair needs one sum over the tensor axis.  fsdp splits the other dimension.
COLUMNS = ("fsdp", "tensor")
ROWS = ("tensor", "fsdp")


class Linear(nnx.Module):
    """y = x W + b with W (in, out) drawn from N(0, std^2) and b = 0."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str] = COLUMNS,
        std: float = 0.02,
        bias: bool = False,
        copied: bool = True,
        rngs: nnx.Rngs,
    ):
        """copied: training keeps a copy of the weight in the dtype of its matmul."""
        weight = normal(rngs.params(), (in_features, out_features), std, axes)
        self.weight = nnx.Param(weight, axes=axes, copied=copied)
        # The rows' partial products are summed before the bias is added: every device needs all.
        bias_axes = ("tensor",) if axes == COLUMNS else ()
        self.bias = nnx.Param(jnp.zeros(out_features), axes=bias_axes) if bias else None
        self.gathered = tuple(a if a == "tensor" else None for a in axes)

    def __call__(
        self, x: Float[Array, "... in"], dtype=None, *, add_bias: bool = True
    ) -> Float[Array, "... out"]:
        """The weights are cast to x's dtype; dtype: of y, None: of x.

        add_bias: False leaves the bias to the op that follows.
        """
        y = jnp.matmul(x, self.cast(x), preferred_element_type=dtype or x.dtype)
        return self.plus_bias(y) if add_bias else y

    def cast(self, x: Float[Array, "..."]) -> Float[Array, "in out"]:
        """The weight in x's dtype."""
        # Said outright, fsdp gathers the cast weight and never the activations.
        return constrain(self.weight[...].astype(x.dtype), *self.gathered)

    def plus_bias(self, y: Float[Array, "... out"]) -> Float[Array, "... out"]:
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def joined(x: Float[Array, "... in"], *layers: Linear, dtype=None) -> Float[Array, "... out"]:
    """[layer(x, dtype) for layer in layers], side by side in one matmul; on a mesh so on every
    device.

    The layers' outputs stand beside each other on each device of the tensor axis: with two devices
    q0 k0 v0 q1 k1 v1, of which an op in `per_device` sees its own three.
    """
    parts = jax.sharding.get_abstract_mesh().shape.get("tensor", 1)
    side_by_side = lambda arrays: jnp.concatenate(
        [a.reshape(*a.shape[:-1], parts, -1) for a in arrays], axis=-1
    ).reshape(*arrays[0].shape[:-1], -1)
    weights = [constrain(layer.weight[...].astype(x.dtype), None, "tensor") for layer in layers]
    weight = constrain(side_by_side(weights), None, "tensor")
    y = x @ weight if dtype is None else _matmul(x, weight, dtype)
    biases = [layer.bias[...].astype(y.dtype) for layer in layers if layer.bias is not None]
    return y + side_by_side(biases) if biases else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weight, dtype):
    """x @ weight in dtype, whose gradient is rounded to x's like that of every other layer.

    JAX by itself would multiply float32 with bf16, for which XLA keeps x in float32 until then.
    """
    return jnp.matmul(x, weight, preferred_element_type=dtype)


def _matmul_backward(dtype, operands, dy):
    return jax.vjp(jnp.matmul, *operands)[1](dy.astype(operands[0].dtype))


_matmul.defvjp(lambda x, weight, dtype: (_matmul(x, weight, dtype), (x, weight)), _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copies(x: Float[Array, "..."], n: int) -> tuple[Float[Array, "..."], ...]:
    """x for each of n layers, whose gradients then cost no pass of their own to be added up.

    XLA lets a matmul add its product to an array, but looks for that matmul only on the left of an
    addition.  JAX by itself puts the sum so far there: the third product is then added apart.
    """
    return (x,) * n


copies.defvjp(
    lambda x, n: (copies(x, n), None),
    lambda n, _, gradients: (functools.reduce(lambda total, g: g + total, gradients),),
)
