"""Layer norm and RMS norm over the last axis, alone or fused with the ops around them.

    layer norm   n = (x - mean(x)) r,   r = 1 / sqrt(mean((x - mean(x))^2) + eps)
    RMS norm     n = x r,               r = 1 / sqrt(mean(x^2) + eps)
    both         y = n weight + bias

Ba, Kiros and Hinton 2016, "Layer Normalization", equations 3 and 4; Zhang and Sennrich 2019, "Root
Mean Square Layer Normalization", equation 4.  With g = weight dy, and mean(g) only in layer norm:

    dx = r (g - mean(g) - n mean(g n)),   dweight = sum of n dy,   dbias = sum of dy

With a residual x becomes s = x + residual, which is returned as well; x and residual both get the
gradient dx + ds.  With a gate y becomes sigmoid(gate) n weight.  With s = sigmoid(gate), the
gradients are as above with s dy in place of dy, and dgate = g n (1 - s) with g = weight s dy.

Everything is computed in float32 and rounded once at the end.  The variance takes two passes over
the row in registers, so x = 1000 + N(0, 1) stays accurate.  The forward pass saves r, and for layer
norm the mean in two parts: 12 bytes for each row are cheaper than two more rounds of reductions.
Each direction reads and writes every element once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.norms.kernels import backward, forward, given
from pallas_kernels.norms.tiles import MAX_COLS, MAX_GATED_COLS
from pallas_kernels.options import checked, with_gradient

Weight = Float[Array, "C"] | Float[Array, "H C"] | None
Rows = Float[Array, "... C"]


@checked
def layer_norm(
    x: Rows,
    weight: Weight = None,
    bias: Weight = None,
    *,
    residual: Rows | None = None,
    x_bias: Weight = None,
    gate: Rows | None = None,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Rows | Any:
    """(x - mean) / sqrt(variance + eps) weight + bias over the last axis, in x's dtype.

    weight, bias: (C,), or (H, C) with a row for each head of x (..., H, C), or None.  Each gradient
    has the dtype of its parameter.
    residual: is added to x first, and the result is (y, s) with s = x + residual, rounded to the
        residual's dtype before the norm.  This may be wider than x's (a float32 residual stream).
    x_bias: the bias of the matmul that makes x, shaped like weight; needs a residual.  It is added
        to x first, rounded to x's dtype; the backward pass sums its gradient in float32.
    gate: multiplies y by sigmoid(gate); without bias and residual.  The kernel needs x and gate in
        one dtype and C up to 1024.
    Beyond 1e16 squares leave the range of float32: gradients lose digits, then rows become 0.
    """
    return _run(True, implementation, eps, x, weight, bias, residual, x_bias, gate)


@checked
def rms_norm(
    x: Rows,
    weight: Weight = None,
    *,
    residual: Rows | None = None,
    x_bias: Weight = None,
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Rows | Any:
    """x / sqrt(mean(x^2) + eps) weight over the last axis, in x's dtype.

    Everything else is as in `layer_norm`.
    """
    return _run(False, implementation, eps, x, weight, None, residual, x_bias, None)


def _run(centered, implementation, eps, *arrays):
    """centered: whether it is the layer norm."""
    _check(*arrays)
    options = dict(centered=centered, eps=eps)
    op = "layer_norm" if centered else "rms_norm"
    y, s = dispatch.run(op, FORMS, implementation, *arrays, **options)
    return y if arrays[3] is None else (y, s)  # without a residual


@jax.custom_jvp
def rsqrt(x):
    """1 / sqrt(x), whose gradient never forms r^3: it underflows float32 for rows beyond 1e13."""
    return lax.rsqrt(x)


@rsqrt.defjvp
def _rsqrt_jvp(primals, tangents):
    r = rsqrt(*primals)
    return r, -0.5 * (r * (r * (r * tangents[0])))


def normed_in_jnp(x, weight, bias, residual, x_bias, gate, *, centered, eps):
    """The formula in jnp, in float32 (float64 for float64)."""
    s = x if x_bias is None else mosaic.rounded(mosaic.plus(x, x_bias), x.dtype)
    if residual is not None:
        # Without the barrier XLA would normalise the sum before it is rounded, unlike the gradient.
        s = lax.optimization_barrier(s + residual)
    z = s.astype(mosaic.stat_dtype(s.dtype))
    mean = lambda z: z.sum(-1, keepdims=True) / max(z.shape[-1], 1)  # without columns 0, not NaN
    z = z - mean(z) if centered else z
    y = z * rsqrt(mean(z * z) + eps)
    y = mosaic.plus(y if weight is None else y * weight.astype(y.dtype), bias)
    y = y if gate is None else y * jax.nn.sigmoid(gate.astype(y.dtype))
    return y.astype(x.dtype), s


def _check(x, weight, bias, residual, x_bias, gate):
    """Raises ValueError unless weights and biases are all (C,) or all (H, C) for x (..., H, C)."""
    if not x.ndim:
        raise ValueError("x has shape (), but needs the axis C that is normalised")
    weights = given(weight=weight, bias=bias, x_bias=x_bias)
    for name, w in weights.items():
        if w.shape != x.shape[x.ndim - w.ndim :]:
            raise ValueError(f"{name} has shape {w.shape}, not the last axes of x {x.shape}")
        if w.ndim not in (1, 2):
            raise ValueError(f"{name} has {w.ndim} axes, not 1 or 2")
    if len({w.ndim for w in weights.values()}) > 1:
        shapes = ", ".join(f"{name} {w.shape}" for name, w in weights.items())
        raise ValueError(f"{shapes}: all must be (C,) or all (H, C)")
    for name, a in (("residual", residual), ("gate", gate)):
        if a is not None and a.shape != x.shape:
            raise ValueError(f"{name} has shape {a.shape} but x has {x.shape}; they must be equal")
    if x_bias is not None and residual is None:
        raise ValueError("x_bias needs a residual: without one, add it to x")
    if gate is not None and (bias is not None or residual is not None):
        raise ValueError("a gate excludes bias and residual")


def why_not(x, weight, bias, residual, x_bias, gate, *, centered, eps) -> str | None:
    arrays = dict(x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    c, most = x.shape[-1], MAX_COLS if gate is None else MAX_GATED_COLS
    reason = mosaic.unsupported_dtype(**arrays) or mosaic.empty(x=x)
    if reason := reason or mosaic.too_many(rows=x.size // c) or mosaic.mixed_dtypes(x=x, gate=gate):
        return reason
    if c > most:
        return f"C={c} is more than {most}"
    if eps <= 0:
        return f"eps={eps} is not positive"
    if residual is not None and residual.dtype != jnp.promote_types(x.dtype, residual.dtype):
        return f"residual is {residual.dtype}, narrower than x ({x.dtype})"
    # Kernels that padded such rows had 0.16 to 1.04 of XLA's speed.
    return mosaic.not_a_multiple(64, C=c)


# The rules of both directions lie beside their kernels.
_norm = with_gradient(forward, backward, nondiff_argnums=(6, 7))

FORMS = Form("general", _norm, "sm_80", why_not), Form("xla", normed_in_jnp)
