"""fp8_linear as a formula in jnp: operands rounded to fp8, and a matmul in float32."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.float8.linear import BACKWARD, FORWARD
from pallas_kernels.float8.quantize import cast
from pallas_kernels.options import with_gradient


def fp8_linear_reference(x, weight, bias=None):
    """float64 is not rounded: it is the truth."""
    y = jnp.matmul(_rounded(x), _rounded(weight), precision=lax.Precision.HIGHEST)
    return mosaic.plus(_round_gradient(y.astype(x.dtype)), bias)


def _rounded(a):
    """a rounded to e4m3, in float32; its gradient passes unchanged."""
    wide = a.astype(mosaic.stat_dtype(a.dtype))
    return wide + lax.stop_gradient(_as_rounded(a, FORWARD) - wide)


def _as_rounded(a, dtype):
    """a as the cast rounds it, in float32; float64 as it is."""
    if a.dtype == jnp.float64:
        return a
    rounded = cast(lax.stop_gradient(a), dtype, kernel=False)
    return rounded.values.astype(jnp.float32) * rounded.inverse


_round_gradient = with_gradient(
    lambda y: (y, None), lambda _, dy: (_as_rounded(dy, BACKWARD).astype(dy.dtype),)
)
