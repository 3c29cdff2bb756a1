"""SwiGLU, the gated activation of Llama's feed-forward layer.

    swiglu(gate, up) = silu(gate) up,   silu(g) = g s,   s = sigmoid(g)
    d_up = dy g s,   d_gate = dy up (s + g s (1 - s))

Shazeer 2020, "GLU Variants Improve Transformer", equation 5 (the part between the matmuls).  The
backward pass recomputes s from the gate, and one kernel writes both gradients.  The forward pass
takes 2 reads and 1 write for each element, the backward pass 3 reads and 2 writes.

`swiglu_linear` multiplies the result by a weight.  Its backward pass starts with the matmul dy W^T,
whose result only the kernel above needs, so one kernel does both and never writes dy W^T.

`swiglu_mlp` is the whole layer.  In its forward pass one kernel does both matmuls and the
activation.  It saves the derivatives by gate and up instead of gate and up, so that the backward
kernel only multiplies dy W^T with them.  Where rows are many, this kernel writes both gradients
side by side, [dg du].  One matmul then sums dx = [dg du] [gate up]^T, and one has both weights'
gradients, x^T [dg du].
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations import matmul_epilogue
from pallas_kernels.activations.activated_matmul import activated_matmul
from pallas_kernels.activations.activated_matmul import why_slower as few_tiles
from pallas_kernels.activations.elementwise import (
    elementwise,
    fast_sigmoid,
    sigmoid,
    why_slower,
)
from pallas_kernels.activations.elementwise import why_not as _elementwise_why_not
from pallas_kernels.options import checked


@checked
def swiglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*shape"]:
    """silu(gate) up of every element; computed in float32, returned in the inputs' dtype.

    Inputs of different dtypes run on XLA, and the result has the wider one.
    Raises ValueError if the shapes differ, NotImplementedError under implementation="mosaic" for
    dtypes that differ or are not fp32, bf16 or fp16.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} but up has {up.shape}; they must be equal")
    reason, slower = why_not(gate, up), why_slower(gate)
    if not dispatch.use_kernel("swiglu", implementation, reason, slower=slower):
        return swiglu_reference(gate, up)
    return _swiglu(gate, up)


@checked
def swiglu_linear(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    weight: Float[Array, "F C"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """swiglu(gate, up) @ weight, with a kernel for its backward pass.

    The kernel needs all arrays in bfloat16 or float16 (one dtype), rows and F in multiples of 128
    and C in multiples of 64.  Other calls run `swiglu` and a matmul.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that the kernel does not support.
    """
    if gate.shape != up.shape or weight.ndim != 2 or gate.shape[-1:] != weight.shape[:1]:
        shapes = f"gate {gate.shape}, up {up.shape} and weight {weight.shape}"
        raise ValueError(f"{shapes} do not fit: they must be (..., F), (..., F) and (F, C)")
    reason = linear_why_not(gate, up, weight)
    if dispatch.use_kernel("swiglu_linear", implementation, reason, "sm_90a"):
        rows = (x.reshape(-1, weight.shape[0]) for x in (gate, up))
        return _swiglu_linear(*rows, weight).reshape(*gate.shape[:-1], -1)
    return swiglu(gate, up, implementation=implementation) @ weight


@checked
def swiglu_mlp(
    x: Float[Array, "*rows C"],
    gate: Float[Array, "C F"],
    up: Float[Array, "C F"],
    down: Float[Array, "F C"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """swiglu(x gate, x up) down, with kernels for the forward and the backward pass.

    The kernels need all arrays in bfloat16 or float16 (one dtype), rows and F in multiples of 128
    and C in multiples of 64.  Other calls run two matmuls, named "mlp" for a policy of
    jax.checkpoint, and `swiglu_linear`.
    Raises ValueError for shapes that do not fit and for integers, NotImplementedError under
    implementation="mosaic" for a call that the kernels do not support.
    """
    shapes = (gate.shape, up.shape, down.shape[::-1])
    if gate.ndim != 2 or set(shapes) != {(x.shape[-1], gate.shape[-1])}:
        given = f"x {x.shape}, gate {gate.shape}, up {up.shape} and down {down.shape}"
        raise ValueError(f"{given} do not fit: they must be (..., C), (C, F), (C, F) and (F, C)")
    for a in (x, gate, up, down):
        mosaic.stat_dtype(a.dtype)  # raises for integers
    reason = mlp_why_not(x, gate, up, down)
    slower = few_tiles(x, 2, gate.shape[1])
    if dispatch.use_kernel("swiglu_mlp", implementation, reason, "sm_90a", slower=slower):
        return _swiglu_mlp(x.reshape(-1, x.shape[-1]), gate, up, down).reshape(x.shape)
    g, u = (checkpoint_name(x @ w, "mlp") for w in (gate, up))
    return swiglu_linear(g, u, down, implementation=implementation)


def swiglu_mlp_reference(x, gate, up, down):
    return swiglu_linear_reference(x @ gate, x @ up, down)


def swiglu_linear_reference(gate, up, weight):
    return swiglu_reference(gate, up) @ weight


def swiglu_reference(gate, up):
    """The formula in jnp, in float32 (float64 for float64)."""
    dtype = mosaic.stat_dtype(gate.dtype)
    y = jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)
    return y.astype(jnp.promote_types(gate.dtype, up.dtype))


def why_not(gate, up) -> str | None:
    """Why the kernel does not support this call, or None."""
    return _elementwise_why_not(gate=gate, up=up)


def linear_why_not(gate, up, weight) -> str | None:
    """Why the kernel of `swiglu_linear` does not support this call, or None."""
    return matmul_epilogue.linear_why_not(weight, gate, up) or why_not(gate, up)


def mlp_why_not(x, gate, up, down) -> str | None:
    """Why the kernels of `swiglu_mlp` do not support this call, or None."""
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], gate.shape[-1]), x.dtype)
    return mosaic.mixed_dtypes(x=x, gate=gate, up=up) or linear_why_not(hidden, hidden, down)


def forward_tile(gate, up):
    return (gate * sigmoid(gate) * up,)


def backward_tile(gate, up, dy, sigmoid=sigmoid):
    s = sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


def derivative_tile(gate, up):
    """The result and its derivatives by gate and by up."""
    s = fast_sigmoid(gate)
    silu = gate * s
    return silu * up, up * (s + silu * (1 - s)), silu


@jax.custom_vjp
def _swiglu(gate, up):
    return elementwise(forward_tile, gate, up, name="swiglu_forward")[0]


_swiglu.defvjp(
    lambda gate, up: (_swiglu(gate, up), (gate, up)),
    lambda saved, dy: elementwise(backward_tile, *saved, dy, name="swiglu_backward", outputs=2),
)


_AFTER_MATMUL = functools.partial(backward_tile, sigmoid=fast_sigmoid)


@jax.custom_vjp
def _swiglu_linear(gate, up, weight):
    return _linear_forward(gate, up, weight)[0]


def _linear_forward(gate, up, weight):
    h = _swiglu(gate, up)
    return h @ weight, (gate, up, weight, h)


def _linear_backward(saved, dy):
    gate, up, weight, h = saved
    options = dict(outputs=2, name="swiglu_linear_backward")
    return matmul_epilogue.linear_backward((gate, up), h, weight, dy, _AFTER_MATMUL, **options)


_swiglu_linear.defvjp(_linear_forward, _linear_backward)


@jax.custom_vjp
def _swiglu_mlp(x, gate, up, down):
    return _mlp_forward(x, gate, up, down)[0]


def _mlp_forward(x, gate, up, down):
    options = dict(name="swiglu_mlp_forward", sms=mosaic.sm_count())
    h, *slopes = activated_matmul(x, (gate, up), None, derivative_tile, **options)
    return h @ down, (x, gate, up, down, h, slopes)


def _mlp_backward(saved, dy):
    x, gate, up, down, h, slopes = saved
    # The gradients side by side save 4 N C bytes of dx, and cost 8 C F for [gate up].
    joint = x.shape[0] >= 2 * gate.shape[1]
    options = dict(outputs=2, joint=joint, name="swiglu_mlp_backward")
    times = matmul_epilogue.times
    *dh, d_down = matmul_epilogue.linear_backward(slopes, h, down, dy, times, **options)
    weights = gate, up
    if joint:
        # Without the barrier XLA may concatenate the weights of all layers when the step starts.
        dh, gate, up = jax.lax.optimization_barrier((dh, gate, up))
        weights = (jnp.concatenate([gate, up], axis=1),)
    # XLA's second matmul adds the first one's result.
    dx = sum(d @ w.T for d, w in zip(dh, weights, strict=True))
    # XLA reads the halves of a joint gradient where they are used, without a copy.  But if
    # gradients are summed over several calls, it adds these after the matmul instead of inside it:
    # each is rounded first.
    d_weights = [jnp.matmul(x.T, d, preferred_element_type=x.dtype) for d in dh]
    d_gate, d_up = jnp.split(d_weights[0], 2, axis=1) if joint else d_weights
    return dx, d_gate, d_up, d_down


_swiglu_mlp.defvjp(_mlp_forward, _mlp_backward)
