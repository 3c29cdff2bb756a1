"""Normalization over the features, optionally fused with the residual addition before it."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxllm.layers.layer import Layer
from jaxllm.sharding import BATCH, P, per_device
from pallas_kernels import layer_norm, rms_norm
from pallas_kernels.dispatch import Implementation

TOKENS = P(BATCH, "context")  # (B, T, ...): every device of the tensor axis holds all of the rest
HEADS = P(BATCH, "context", "tensor", None)  # (B, T, H, D)
_ROUNDING = 1.01  # allows for rounding y to its dtype


def plain(layer: object, kind: type[Layer], *names: str) -> bool:
    """Whether a layer keeps `kind`'s __call__ and named methods, so a larger op can replace it."""
    return all(getattr(type(layer), x, None) is getattr(kind, x) for x in ("__call__", *names))


class Norm(Layer):
    """What both norms over the last axis of (B, T, C) share; a subclass says which.

    dtype: of y; None: of x.
    """

    centered: bool  # whether it subtracts the mean; then it also adds a bias

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-5,
        dtype=None,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs | None = None,  # unread, but passed by code for any layer (nnx.bridge)
    ):
        self.weight = nnx.Param(jnp.ones(features, jnp.float32), axes=())
        self.bias = nnx.Param(jnp.zeros(features, jnp.float32), axes=()) if self.centered else None
        self.eps, self.dtype, self.implementation = eps, dtype, implementation

    def _parameters(self) -> list[Float[Array, " C"]]:
        return [p[...] for p in (self.weight, self.bias) if p is not None]

    def _op(self, *arrays, **options):
        options |= dict(eps=self.eps, implementation=self.implementation)
        return (layer_norm if self.centered else rms_norm)(*arrays, **options)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        parameters = self._parameters()
        specs = (TOKENS, *[P()] * len(parameters))
        y = per_device(self._op, in_specs=specs, out_specs=TOKENS)(x, *parameters)
        return y.astype(self.dtype or x.dtype)

    def add(
        self,
        branch: Float[Array, "B T C"],
        residual: Float[Array, "B T C"],
        branch_bias: Float[Array, " C"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) with s = branch + residual in the residual's dtype, in one pass.

        branch_bias is first added to the branch, in the branch's dtype.
        """
        op = lambda x, s, bias, *p: self._op(x, *p, residual=s, x_bias=bias)
        parameters = self._parameters()
        specs = (TOKENS, TOKENS, P(), *[P()] * len(parameters))
        op = per_device(op, in_specs=specs, out_specs=(TOKENS, TOKENS))
        y, s = op(branch, residual, branch_bias, *parameters)
        return y.astype(self.dtype or branch.dtype), s

    def row_norm(self) -> Float[Array, ""]:
        """An upper bound on the Euclidean norm of every row of y, float32, without a gradient."""
        weight, *bias = (lax.stop_gradient(p.astype(jnp.float32)) for p in self._parameters())
        most = weight.size**0.5 * abs(weight).max()
        return _ROUNDING * sum((jnp.sqrt((b**2).sum()) for b in bias), most)

    def of_row(self) -> dict[str, Any]:
        """This norm as options of row_linear."""
        names = zip(("norm_weight", "norm_bias"), self._parameters(), strict=False)
        return dict(names, norm_eps=self.eps, centered=self.centered)


class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis of (B, T, C)."""

    centered = True


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis of (B, T, C)."""

    centered = False


class HeadLayerNorm(Layer):
    """sigmoid(gate) * layer norm of each head of (B, T, H, D), with a weight and no bias."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        implementation: Implementation | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        # Stored flat, because weight decay applies to every parameter with two axes.
        self.weight = nnx.Param(jnp.ones(heads * head_dim, jnp.float32), axes=("tensor",))
        self.shape, self.eps, self.implementation = (heads, head_dim), eps, implementation

    def __call__(
        self, x: Float[Array, "B T H D"], gate: Float[Array, "B T H D"]
    ) -> Float[Array, "B T H D"]:
        options = dict(eps=self.eps, implementation=self.implementation)
        op = lambda x, gate, weight: layer_norm(x, weight, gate=gate, **options)
        op = per_device(op, in_specs=(HEADS, HEADS, P("tensor", None)), out_specs=HEADS)
        return op(x, gate, self.weight[...].reshape(self.shape))
