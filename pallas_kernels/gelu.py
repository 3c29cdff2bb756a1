"""GELU in its tanh form, as GPT-2 uses it.

    gelu(x) = x (1 + tanh(u)) / 2,   u = sqrt(2/pi) (x + 0.044715 x^3)

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2.  The backward pass recomputes
tanh(u) from x, so nothing but x is saved.  Both directions move bytes only: x is read once, y (or
x and dy, then dx) once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import backend as _backend
from pallas_kernels import mosaic

_BLOCK = 4096  # elements of one step of a block: 128 threads x 4 vectors of 8


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
    return (0.5 * z * (1 + jnp.tanh(_u(z)))).astype(x.dtype)


def why_not(x) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return mosaic.unsupported_dtype(x=x) or mosaic.empty(x=x)


def _u(z):
    return math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)


def _forward_tile(x):
    return 0.5 * x * (1 + jnp.tanh(_u(x)))


def _backward_tile(x, dy):
    t = jnp.tanh(_u(x))
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du)


@functools.partial(jax.jit, static_argnums=0)  # traced and lowered once for all layers
def _elementwise(tile, *arrays):
    """tile(*blocks) over flat arrays of one shape, in float32; the result has arrays[0]'s dtype."""
    x = arrays[0]
    flat = [mosaic.pad_axis(a.reshape(-1), 0, _BLOCK) for a in arrays]
    layout = plgpu.Layout.WG_STRIDED((_BLOCK,), 16 // x.dtype.itemsize)

    def body(*refs):
        block = pl.ds(lax.axis_index("block") * _BLOCK, _BLOCK)
        mosaic.store(refs[-1].at[block], tile(*(mosaic.load(r.at[block], layout) for r in refs[:-1])))

    body.__name__ = f"gelu{tile.__name__.removesuffix('_tile')}"
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(flat[0].shape, x.dtype),
        grid=(flat[0].size // _BLOCK,),
        grid_names=("block",),
    )(*flat)
    return y[: x.size].reshape(x.shape)


@jax.custom_vjp
def _gelu(x):
    return _elementwise(_forward_tile, x)


_gelu.defvjp(
    lambda x: (_gelu(x), x),
    lambda x, dy: (_elementwise(_backward_tile, x, dy),),
)
