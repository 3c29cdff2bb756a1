"""Normalization over the features, optionally fused with the residual addition before it."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.layers.layer import Layer
from jaxllm.sharding import BATCH, P, per_device
from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.dispatch import Implementation

STREAM = P(BATCH, "context", None)  # (B, T, C): every device of the tensor axis holds all of C
HEADS = P(BATCH, "context", "tensor", None)  # (B, T, H, D)
_ROUNDING = 1.01  # of y to its dtype


class LayerNorm(Layer):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis of (B, T, C).

    dtype: of y; None: of x.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        dtype=None,
        implementation: Implementation | None = None,
    ):
        self.weight = nnx.Param(jnp.ones(features), axes=())
        self.bias = nnx.Param(jnp.zeros(features), axes=())
        self.eps, self.dtype, self.implementation = eps, dtype, implementation

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        op = partial(layer_norm, eps=self.eps, implementation=self.implementation)
        op = per_device(op, in_specs=(STREAM, P(), P()), out_specs=STREAM)
        return op(x, self.weight[...], self.bias[...]).astype(self.dtype or x.dtype)

    def add(
        self,
        branch: Float[Array, "B T C"],
        residual: Float[Array, "B T C"],
        branch_bias: Float[Array, " C"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) with s = branch + residual in the residual's dtype, in one pass.

        branch_bias is added to the branch before, in the branch's dtype.
        """
        op = lambda x, residual, weight, bias, x_bias: layer_norm(
            x,
            weight,
            bias,
            residual=residual,
            x_bias=x_bias,
            eps=self.eps,
            implementation=self.implementation,
        )
        specs = (STREAM, STREAM, P(), P(), P())
        op = per_device(op, in_specs=specs, out_specs=(STREAM, STREAM))
        y, s = op(branch, residual, self.weight[...], self.bias[...], branch_bias)
        return y.astype(self.dtype or branch.dtype), s

    def row_norm(self) -> Float[Array, ""]:
        """A number that the Euclidean norm of no row of y exceeds, float32, without a gradient."""
        weight, bias = (_constant(p) for p in (self.weight, self.bias))
        return _ROUNDING * (weight.size**0.5 * abs(weight).max() + jnp.sqrt((bias**2).sum()))

    def of_row(self) -> dict[str, Any]:
        """This norm as options of row_linear."""
        weight, bias = self.weight[...], self.bias[...]
        return dict(norm_weight=weight, norm_bias=bias, norm_eps=self.eps)


class RMSNorm(Layer):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis of (B, T, C).

    dtype: of y; None: of x.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        dtype=None,
        implementation: Implementation | None = None,
    ):
        self.weight = nnx.Param(jnp.ones(features), axes=())
        self.eps, self.dtype, self.implementation = eps, dtype, implementation

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        op = partial(rms_norm, eps=self.eps, implementation=self.implementation)
        op = per_device(op, in_specs=(STREAM, P()), out_specs=STREAM)
        return op(x, self.weight[...]).astype(self.dtype or x.dtype)

    def add(
        self,
        branch: Float[Array, "B T C"],
        residual: Float[Array, "B T C"],
        branch_bias: Float[Array, " C"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) with s = branch + residual in the residual's dtype, in one pass.

        branch_bias is added to the branch before, in the branch's dtype.
        """
        op = lambda x, residual, weight, x_bias: rms_norm(
            x,
            weight,
            residual=residual,
            x_bias=x_bias,
            eps=self.eps,
            implementation=self.implementation,
        )
        op = per_device(op, in_specs=(STREAM, STREAM, P(), P()), out_specs=(STREAM, STREAM))
        y, s = op(branch, residual, self.weight[...], branch_bias)
        return y.astype(self.dtype or branch.dtype), s

    def row_norm(self) -> Float[Array, ""]:
        """A number that the Euclidean norm of no row of y exceeds, float32, without a gradient."""
        weight = _constant(self.weight)
        return _ROUNDING * weight.size**0.5 * abs(weight).max()

    def of_row(self) -> dict[str, Any]:
        """This norm as options of row_linear."""
        return dict(norm_weight=self.weight[...], norm_eps=self.eps, centered=False)


def _constant(parameter: nnx.Param) -> Float[Array, " C"]:
    return lax.stop_gradient(parameter[...].astype(jnp.float32))


class HeadLayerNorm(Layer):
    """sigmoid(gate) * layer norm of each head of (B, T, H, D), with a weight and no bias."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        implementation: Implementation | None = None,
    ):
        # Stored flat, because weight decay applies to every parameter with two axes.
        self.weight = nnx.Param(jnp.ones(heads * head_dim), axes=("tensor",))
        self.eps, self.implementation = eps, implementation

    def __call__(
        self, x: Float[Array, "B T H D"], gate: Float[Array, "B T H D"]
    ) -> Float[Array, "B T H D"]:
        op = lambda x, gate, weight: layer_norm(
            x, weight, gate=gate, eps=self.eps, implementation=self.implementation
        )
        op = per_device(op, in_specs=(HEADS, HEADS, P("tensor", None)), out_specs=HEADS)
        return op(x, gate, self.weight[...].reshape(x.shape[-2:]))
