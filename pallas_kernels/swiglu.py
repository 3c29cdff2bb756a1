"""SwiGLU: the gated activation of Llama's feed-forward layer.

    swiglu(gate, up) = silu(gate) up,   silu(g) = g s,   s = sigmoid(g)
    d_up = dy g s,   d_gate = dy up (s + g s (1 - s))

Shazeer 2020, "GLU Variants Improve Transformer", equation 5 (the part between the matmuls).  The
backward pass recomputes s from the gate, and one kernel writes both gradients: 2 reads and 1 write
an element forward, 3 reads and 2 writes backward.
"""

import jax
from jaxtyping import Array, Float

from pallas_kernels import backend as _backend
from pallas_kernels import mosaic
from pallas_kernels.elementwise import elementwise, sigmoid
from pallas_kernels.elementwise import why_not as _elementwise_why_not


def swiglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    *,
    backend: _backend.Backend = "auto",
) -> Float[Array, "*shape"]:
    """silu(gate) up of every element; computed in float32, returned in the inputs' dtype.

    Two different dtypes run on XLA and return the wider one.  Raises ValueError for two shapes,
    NotImplementedError under backend="mosaic" for dtypes that differ or are not fp32, bf16, fp16.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} but up has {up.shape}; they must be equal")
    if not _backend.use_kernel("swiglu", backend, why_not(gate, up)):
        return swiglu_reference(gate, up)
    return _swiglu(gate, up)


def swiglu_reference(gate, up):
    """The formula in jnp, in float32 (float64 for float64)."""
    dtype = mosaic.stat_dtype(gate.dtype)
    y = jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)
    return y.astype(jax.numpy.promote_types(gate.dtype, up.dtype))


def why_not(gate, up) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return _elementwise_why_not(gate=gate, up=up)


def _forward_tile(gate, up):
    return (gate * sigmoid(gate) * up,)


def _backward_tile(gate, up, dy):
    s = sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


@jax.custom_vjp
def _swiglu(gate, up):
    return elementwise(_forward_tile, gate, up, name="swiglu_forward")[0]


_swiglu.defvjp(
    lambda gate, up: (_swiglu(gate, up), (gate, up)),
    lambda saved, dy: elementwise(_backward_tile, *saved, dy, name="swiglu_backward", outputs=2),
)
