"""Layer norm over the last axis, alone or fused with the addition before it or the gate after it.

    n = (x - mean(x)) r,   r = 1 / sqrt(mean((x - mean(x))^2) + eps),   y = n weight + bias

Ba, Kiros and Hinton 2016, "Layer Normalization", equations 3 and 4.  With g = weight dy:

    dx = r (g - mean(g) - n mean(g n)),   dweight = sum of n dy,   dbias = sum of dy

`add_layer_norm` normalises s = x + residual and also returns s; both get the gradient dx + ds.
`gated_layer_norm` returns sigmoid(gate) n weight.  With s = sigmoid(gate), its gradients are those
above for s dy in place of dy, and dgate = g n (1 - s) with g = weight s dy.

Everything is computed in float32.  The variance takes two passes over the row in
registers, so x = 1000 + N(0, 1) stays accurate.  The forward pass saves the mean in two parts and
r: 12 bytes for each row are cheaper than two more rounds of reductions.  Each direction reads and
writes every element once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.norms import kernels, tiles
from pallas_kernels.options import checked

Weight = Float[Array, "C"] | Float[Array, "H C"] | None


@checked
def layer_norm(
    x: Float[Array, "... C"],
    weight: Weight = None,
    bias: Weight = None,
    *,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "... C"]:
    """Normalises the last axis of x to mean 0 and variance 1: n weight + bias, in x's dtype.

    weight, bias: (C,), or (H, C) with a row for each head of x (..., H, C), or None.  Their
    gradients have their own dtypes.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that the kernel does not support.
    """
    tiles.check_shapes(x, weight, bias)
    general = tiles.general_form(implementation)
    reason = why_not(x, weight, bias, eps=eps, general=general)
    if not tiles.use_kernel("layer_norm", implementation, reason, x, general):
        return layer_norm_reference(x, weight, bias, eps=eps)
    return kernels.norm(NORM, eps, general, x, None, weight, bias)[0]


@checked
def add_layer_norm(
    x: Float[Array, "... C"],
    residual: Float[Array, "... C"],
    weight: Weight = None,
    bias: Weight = None,
    x_bias: Weight = None,
    *,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "... C"], Float[Array, "... C"]]:
    """Adds a residual and normalises the sum: (layer_norm(s), s) for s = x + residual.

    s is rounded to its dtype before it is normalised; the norm has x's dtype.
    residual: may be wider than x (a float32 residual stream with bf16 layers).
    x_bias: bias of the matmul that makes x, shaped like weight and bias.  It is added to x first,
    rounded to x's dtype; the backward pass sums its gradient in float32.
    Raises as `layer_norm` does.
    """
    tiles.check_shapes(x, weight, bias, residual, x_bias)
    general = tiles.general_form(implementation)
    reason = why_not(x, weight, bias, residual, x_bias, eps=eps, general=general)
    if not tiles.use_kernel("add_layer_norm", implementation, reason, x, general):
        return add_layer_norm_reference(x, residual, weight, bias, x_bias, eps=eps)
    return kernels.norm(NORM, eps, general, x, residual, weight, bias, x_bias)


@checked
def gated_layer_norm(
    x: Float[Array, "... C"],
    gate: Float[Array, "... C"],
    weight: Weight = None,
    *,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "... C"]:
    """sigmoid(gate) layer_norm(x, weight), computed in float32 and returned in x's dtype.

    The kernel needs x and gate in one dtype and C up to 1024.  Other calls run `layer_norm` and XLA
    multiplies.
    Raises as `layer_norm` does.
    """
    tiles.check_shapes(x, weight, None)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {gate.shape} but x has {x.shape}; they must be equal")
    general = tiles.general_form(implementation)
    reason = gated_why_not(x, gate, weight, eps=eps, general=general)
    if not tiles.use_kernel("gated_layer_norm", implementation, reason, x, general):
        y = layer_norm(x, weight, eps=eps, implementation=implementation)
        return (jax.nn.sigmoid(gate) * y).astype(x.dtype)
    return kernels.norm(NORM, eps, general, x, None, weight, None, None, gate)[0]


def layer_norm_reference(x, weight=None, bias=None, *, eps=1e-5):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = x.astype(mosaic.stat_dtype(x.dtype))
    z = z - jnp.mean(z, axis=-1, keepdims=True)
    y = z * lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * weight.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def add_layer_norm_reference(x, residual, weight=None, bias=None, x_bias=None, *, eps=1e-5):
    if x_bias is not None:
        x = x + x_bias.astype(x.dtype)
    # Without the barrier XLA would normalise the sum before it is rounded, unlike the gradient.
    s = lax.optimization_barrier(x + residual)
    return layer_norm_reference(s, weight, bias, eps=eps).astype(x.dtype), s


def gated_layer_norm_reference(x, gate, weight=None, *, eps=1e-5):
    dtype = mosaic.stat_dtype(x.dtype)
    y = layer_norm_reference(x.astype(dtype), weight, eps=eps)
    return (jax.nn.sigmoid(gate.astype(dtype)) * y).astype(x.dtype)


why_not = tiles.why_not


def gated_why_not(x, gate, weight, *, eps, general: bool = False) -> str | None:
    """Why the kernels of `gated_layer_norm` do not support this call, or None."""
    if reason := mosaic.mixed_dtypes(x=x, gate=gate):
        return reason
    if x.shape[-1] > (most := 1024):
        return f"C={x.shape[-1]} is more than {most}"
    return why_not(x, weight, None, eps=eps, general=general)


def _statistics(t, mean, x, eps):
    average = mean(x)
    centred = lambda c: t.zero_padding(x(c) - t.broadcast(average), c)
    # The mean of x = 1000 + N(0, 1) has a rounding error of 3e-5, which this pass corrects.
    error, square = mean(lambda c: (centred(c), jnp.square(centred(c))))
    r = lax.rsqrt(square - jnp.square(error) + eps)
    return average, r, -error * r


def _normalise(t, x, mean, r, shift):
    return (x - t.broadcast(mean)) * t.broadcast(r) + t.broadcast(shift)


def _averaged(n, g):
    return g, g * n


def _differentiate(t, n, g, means, mean, r, shift):
    mean_g, mean_gn = means
    return t.broadcast(r) * g - t.broadcast(r * mean_g) - n * t.broadcast(r * mean_gn)


NORM = kernels.Norm(
    "layer_norm", _statistics, _normalise, _averaged, _differentiate, count=3, most=2
)
