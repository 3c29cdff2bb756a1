"""GELU in the tanh form that GPT-2 uses, and SwiGLU, the gated activation of Llama.

    gelu(z) = z (1 + tanh(u)) / 2,   u = sqrt(2/pi) (z + 0.044715 z^3),   z = x + bias
    swiglu(gate, up) = silu(gate) up,   silu(g) = g s,   s = sigmoid(g)

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2; Shazeer 2020, "GLU Variants
Improve Transformer", equation 5 (the part between the matmuls).  The kernels of GELU use the
equivalent z sigmoid(2 u), which takes fewer instructions and stays accurate where tanh is close to
-1.  The backward pass recomputes the sigmoid, so only the inputs are saved:

    dz = dy (s + z s (1 - s) d(2 u)/dz)
    d_up = dy g s,   d_gate = dy up (s + g s (1 - s))

Both are bound by memory, and share a kernel: a block of 128 threads loads `_BLOCK` consecutive
elements of each array, computes in float32, and stores the results.  The fewer instructions an
element takes, the closer the kernel comes to a plain copy.

With a bias, GELU's x comes from a matmul, and cuBLASLt can add the bias and apply GELU while the
product is in registers, if the formula follows the matmul directly, in x's dtype.  So the forward
pass in bf16 is that formula and no kernel: it saves 0.4 of GPT-2 124M's 57.4 ms a step on an H100.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.mosaic import sigmoid
from pallas_kernels.options import checked, with_gradient

# 1024 to 8192 elements are within 1% on an H100; loops and TMA are slower (docs/performance.md).
_BLOCK = 4096  # 128 threads x 4 vectors of 8
_TWO_ROOT = 2 * math.sqrt(2 / math.pi)
# From x = 100 on the sigmoid is 0 or 1, whatever x^2 is; the overflow of x^2, or of x^3, times the
# sigmoid's slope of 0 would make the gradient NaN.
_FLAT = 1e4


@checked
def gelu(
    x: Float[Array, "*rows F"],
    bias: Float[Array, " F"] | None = None,
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows F"]:
    """GELU(x + bias) (tanh form, Hendrycks and Gimpel 2016); computed in float32, in x's dtype.

    x + bias is rounded to x's dtype.  The gradient of the bias is summed in float32.
    """
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {x.shape[-1:]}, x's last axis")
    return dispatch.run("gelu", GELU, implementation, x, bias)


@checked
def swiglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*shape"]:
    """silu(gate) up (Shazeer 2020); computed in float32, returned in the inputs' dtype.

    Inputs of different dtypes run on XLA, and the result has the dtype to which JAX promotes them.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} but up has {up.shape}; they must be equal")
    return dispatch.run("swiglu", SWIGLU, implementation, gate, up)


def gelu_reference(x, bias=None):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = mosaic.rounded(_plus(x, bias).astype(mosaic.stat_dtype(x.dtype)), x.dtype)  # rounds dz, too
    w = jnp.clip(z, -100, 100)  # beyond, tanh(u) is constant and z^3 may overflow
    u = math.sqrt(2 / math.pi) * (w + 0.044715 * w * w * w)
    return (0.5 * z * (1 + jnp.tanh(u))).astype(x.dtype)


def swiglu_reference(gate, up):
    """The formula in jnp, in float32 (float64 for float64)."""
    dtype = mosaic.stat_dtype(gate.dtype)
    g = gate.astype(dtype)
    # Beyond 150 s has no slope, with which an overflow of dy up g would make dgate NaN.  dgate of
    # an infinity is NaN, in the kernel as well.
    s = jnp.where((jnp.abs(g) < 150) | jnp.isinf(g), jax.nn.sigmoid(g), g > 0)
    return (g * s * up.astype(dtype)).astype(jnp.promote_types(gate.dtype, up.dtype))


def gelu_why_not(x, bias=None) -> str | None:
    return mosaic.unsupported_dtype(x=x, bias=bias) or mosaic.empty(x=x)


def swiglu_why_not(gate, up) -> str | None:
    reason = mosaic.mixed_dtypes(gate=gate, up=up) or mosaic.unsupported_dtype(gate=gate)
    return reason or mosaic.empty(gate=gate)


def why_slower(x, *others) -> str | None:
    """Why XLA is faster, or None.  In generation the number of kernels decides the time."""
    if x.size % _BLOCK:
        return f"the kernel would pad {x.size} elements to a multiple of {_BLOCK}"
    few = x.ndim > 0 and x.size <= 64 * x.shape[-1]
    return "XLA fuses 64 rows or fewer with other ops" if few else None


# ---- the kernel --------------------------------------------------------------------------------


@jax.jit(static_argnames=("tile", "name", "outputs"))  # lowered once per shape
def elementwise(tile, *arrays, name, outputs=1):
    """Applies tile(*blocks) -> tuple of `outputs` blocks, in float32, to whole arrays.

    The arrays have one shape and dtype, and so have the results, a tuple.
    """
    x = arrays[0]
    flat = [mosaic.pad_axis(a.reshape(a.size), 0, _BLOCK).reshape(-1, _BLOCK) for a in arrays]
    (results,) = mosaic.kernel(
        functools.partial(_body, tile),
        name=name,
        out_type=[[jax.ShapeDtypeStruct(flat[0].shape, x.dtype)] * outputs],
        **mosaic.grid(block=len(flat[0])),
        # approx_math computes exp in two instructions, not seven; 16-bit results hide its error.
        compiler_params=plgpu.CompilerParams(approx_math=x.dtype.itemsize == 2),
    )(flat)
    return tuple(y.reshape(y.size)[: x.size].reshape(x.shape) for y in results)


def _body(tile, sources, targets):
    """A block loads its elements of every source, computes, and stores to every target."""
    layout = plgpu.Layout.WG_STRIDED((_BLOCK,), 16 // sources[0].dtype.itemsize)  # 16-byte loads
    block = lax.axis_index("block")
    results = tile(*(mosaic.load(ref.at[block], layout) for ref in sources))
    for ref, result in zip(targets, results, strict=True):
        mosaic.store(ref.at[block], result)


# ---- inside the kernels ------------------------------------------------------------------------


def gelu_forward_tile(x):
    return (x * sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * (x * x))),)


def gelu_backward_tile(x, dy):
    xx = jnp.minimum(x * x, _FLAT)
    s = sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * xx))
    dz = _TWO_ROOT + 3 * _TWO_ROOT * 0.044715 * xx
    return (dy * (s + s * (1 - s) * x * dz),)


def swiglu_forward_tile(gate, up):
    return (gate * sigmoid(gate) * up,)


def swiglu_backward_tile(gate, up, dy):
    s = sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


def finished(activation, ys, biases, residual):
    """Adds the biases, applies the activation and adds the residual, for some rows of a result."""
    ys = [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]
    tile = {"gelu": gelu_forward_tile, "swiglu": swiglu_forward_tile}.get(activation)
    (y,) = tile(*ys) if tile else ys
    return y if residual is None else y + residual


# ---- both passes -------------------------------------------------------------------------------


# A forward pass returns the result and what the backward pass needs.  A backward pass takes
# apply(tile, *inputs), which computes the gradients from the inputs and dy: `elementwise`, or the
# kernel whose matmul computes dy first (feed_forward.py).


def _with_kernel(name, forward, backward):
    """The op with these passes, by `elementwise`; name: of the backward kernel."""

    def run(saved, dy):
        apply = lambda tile, *xs: elementwise(tile, *xs, dy, name=name, outputs=len(xs))
        return backward(saved, apply)

    return with_gradient(forward, run)


def swiglu_forward(gate, up):
    return elementwise(swiglu_forward_tile, gate, up, name="swiglu_forward")[0], (gate, up)


def swiglu_backward(saved, apply):
    return tuple(apply(swiglu_backward_tile, *saved))


def gelu_forward(x, bias):
    z = _plus(x, bias)
    if bias is not None and x.dtype == jnp.bfloat16:  # the form that XLA recognises after a matmul
        y = z * (0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * (z * z * z)))))
    else:
        y = elementwise(gelu_forward_tile, z, name="gelu_forward")[0]
    return y, (z, None if bias is None else bias[:0])


def gelu_backward(saved, apply):
    z, like_bias = saved
    (dz,) = apply(gelu_backward_tile, z)
    if like_bias is None:
        return dz, None
    # XLA reads dz again: by its bytes 0.07 ms for GPT-2's 32768 x 3072, less than 2% of a step.
    return dz, dz.astype(jnp.float32).sum(tuple(range(dz.ndim - 1))).astype(like_bias.dtype)


def _plus(x, bias):
    # A jax.checkpoint policy can save z by name.  Saving x would keep XLA from adding the bias in
    # the matmul.
    return x if bias is None else checkpoint_name(mosaic.plus(x, bias), "gelu")


_gelu = _with_kernel("gelu_backward", gelu_forward, gelu_backward)
_swiglu = _with_kernel("swiglu_backward", swiglu_forward, swiglu_backward)

GELU = Form("general", _gelu, "sm_80", gelu_why_not, why_slower), Form("xla", gelu_reference)
SWIGLU = (
    Form("general", _swiglu, "sm_80", swiglu_why_not, why_slower),
    Form("xla", swiglu_reference),
)
