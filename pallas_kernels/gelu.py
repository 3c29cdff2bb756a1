"""GELU in its tanh form, as GPT-2 uses it.

    gelu(x) = x (1 + tanh(u)) / 2,   u = sqrt(2/pi) (x + 0.044715 x^3)

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2.  The kernels use the equal form
x sigmoid(2 u), which takes fewer instructions and keeps its digits where tanh is close to -1.  The
backward pass recomputes the sigmoid from x, so nothing but x is saved.  Both directions move bytes
only: x is read once and y written once (backward: x and dy read, dx written).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import backend as _backend
from pallas_kernels import mosaic
from pallas_kernels.elementwise import elementwise, sigmoid
from pallas_kernels.elementwise import why_not as _elementwise_why_not

_TWO_ROOT = 2 * math.sqrt(2 / math.pi)


def gelu(x: Float[Array, "..."], *, backend: _backend.Backend = "auto") -> Float[Array, "..."]:
    """GELU (tanh form) of every element; computed in float32, returned in x's dtype.

    Raises NotImplementedError under backend="mosaic" for dtypes other than fp32, bf16, fp16.
    """
    if not _backend.use_kernel("gelu", backend, why_not(x)):
        return gelu_reference(x)
    return _gelu(x)


def gelu_reference(x):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = x.astype(mosaic.stat_dtype(x.dtype))
    u = math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)
    return (0.5 * z * (1 + jnp.tanh(u))).astype(x.dtype)


def why_not(x) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return _elementwise_why_not(x=x)


def _forward_tile(x):
    return (x * sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * (x * x))),)


def _backward_tile(x, dy):
    xx = x * x
    s = sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * xx))
    dz = _TWO_ROOT + 3 * _TWO_ROOT * 0.044715 * xx  # d(2 u)/dx
    return (dy * (s + s * (1 - s) * (x * dz)),)


@jax.custom_vjp
def _gelu(x):
    return elementwise(_forward_tile, x, name="gelu_forward")[0]


_gelu.defvjp(
    lambda x: (_gelu(x), x),
    lambda x, dy: elementwise(_backward_tile, x, dy, name="gelu_backward"),
)
