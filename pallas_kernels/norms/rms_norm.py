"""RMS norm over the last axis, alone or fused with a residual addition.

    n = x r,   r = 1 / sqrt(mean(x^2) + eps),   y = n weight (+ bias)

Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.  With g = weight dy:

    dx = r (g - n mean(g n)),   dweight = sum of n dy,   dbias = sum of dy

The fused form normalises s = x + residual and also returns s; x and residual both get the gradient
dx + ds.  Everything is computed in float32 and rounded once at the end.  The forward pass saves r:
4 bytes for each row are cheaper than another reduction.  Each direction reads and writes every
element once.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.norms import kernels, tiles
from pallas_kernels.options import checked

Weight = Float[Array, "C"] | Float[Array, "H C"] | None


@checked
def rms_norm(
    x: Float[Array, "... C"],
    weight: Weight = None,
    bias: Weight = None,
    *,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "... C"]:
    """Normalises the last axis of x by its root mean square: n weight + bias, in x's dtype.

    weight, bias: (C,), or (H, C) with a row for each head of x (..., H, C), or None.  Their
    gradients have their own dtypes.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that the kernel does not support.
    """
    tiles.check_shapes(x, weight, bias)
    general = tiles.general_form(implementation)
    reason = why_not(x, weight, bias, eps=eps, general=general)
    if not tiles.use_kernel("rms_norm", implementation, reason, x, general):
        return rms_norm_reference(x, weight, bias, eps=eps)
    return kernels.norm(_NORM, eps, general, x, None, weight, bias)[0]


@checked
def add_rms_norm(
    x: Float[Array, "... C"],
    residual: Float[Array, "... C"],
    weight: Weight = None,
    bias: Weight = None,
    x_bias: Weight = None,
    *,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "... C"], Float[Array, "... C"]]:
    """Adds a residual and normalises the sum: (rms_norm(s), s) for s = x + residual.

    s is rounded to its dtype before it is normalised; the norm has x's dtype.
    residual: may be wider than x (a float32 residual stream with bf16 layers).
    x_bias: bias of the matmul that makes x, shaped like weight and bias.  It is added to x first,
    rounded to x's dtype; the backward pass sums its gradient in float32.
    Raises as `rms_norm` does.
    """
    tiles.check_shapes(x, weight, bias, residual, x_bias)
    general = tiles.general_form(implementation)
    reason = why_not(x, weight, bias, residual, x_bias, eps=eps, general=general)
    if not tiles.use_kernel("add_rms_norm", implementation, reason, x, general):
        return add_rms_norm_reference(x, residual, weight, bias, x_bias, eps=eps)
    return kernels.norm(_NORM, eps, general, x, residual, weight, bias, x_bias)


def rms_norm_reference(x, weight=None, bias=None, *, eps=1e-5):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = x.astype(mosaic.stat_dtype(x.dtype))
    y = z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def add_rms_norm_reference(x, residual, weight=None, bias=None, x_bias=None, *, eps=1e-5):
    if x_bias is not None:
        x = x + x_bias.astype(x.dtype)
    # Without the barrier XLA would normalise the sum before it is rounded, unlike the gradient.
    s = lax.optimization_barrier(x + residual)
    return rms_norm_reference(s, weight, bias, eps=eps).astype(x.dtype), s


why_not = tiles.why_not


def _statistics(t, mean, x, eps):
    return (lax.rsqrt(mean(lambda c: jnp.square(x(c))) + eps),)


def _normalise(t, x, r):
    return x * t.broadcast(r)


def _averaged(n, g):
    return (g * n,)


def _differentiate(t, n, g, means, r):
    return t.broadcast(r) * g - n * t.broadcast(r * means[0])


_NORM = kernels.Norm(
    "rms_norm", _statistics, _normalise, _averaged, _differentiate, count=1, most=1
)
