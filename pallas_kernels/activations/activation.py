"""GELU in the tanh form that GPT-2 uses, and SwiGLU, the gated activation of Llama.

    gelu(z) = z (1 + tanh(u)) / 2,   u = sqrt(2/pi) (z + 0.044715 z^3),   z = x + bias
    swiglu(gate, up) = silu(gate) up,   silu(g) = g s,   s = sigmoid(g)

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2; Shazeer 2020, "GLU Variants
Improve Transformer", equation 5 (the part between the matmuls).  The kernels of GELU use the
equivalent z sigmoid(2 u), which takes fewer instructions and stays accurate where tanh is close to
-1.  The backward pass recomputes the sigmoid, so only the inputs are saved:

    dz = dy (s + z s (1 - s) d(2 u)/dz)
    d_up = dy g s,   d_gate = dy up (s + g s (1 - s))

Both are bound by memory: GELU reads z (and dy) and writes y (or dx), SwiGLU reads gate and up (and
dy) and writes y (or both gradients, in one kernel).

With a bias, GELU's x comes from a matmul, and cuBLASLt can add the bias and apply GELU while the
product is in registers.  XLA uses this epilogue if the formula follows the matmul directly, in x's
dtype.  The forward pass in bf16 is therefore that formula and not a kernel, which saves a pass over
x: 0.4 of GPT-2 124M's 57.4 ms a step on an H100.  The backward kernel sums dx over the rows, the
gradient of the bias, while dx is in registers; XLA would read dx again, for a third of the kernel's
time.

feed_forward.py has the layer around them, and elementwise.py the kernel without a bias.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations import elementwise as kernel
from pallas_kernels.activations.elementwise import elementwise, fast_sigmoid, sigmoid
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked

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
    """GELU (tanh form) of every element of x + bias; computed in float32, returned in x's dtype.

    x + bias is rounded to x's dtype.  The gradient of the bias is summed in float32.
    Raises ValueError for a bias of another width than x, NotImplementedError under
    implementation="mosaic" for dtypes other than fp32, bf16 and fp16, or for a bias if F is not a
    multiple of 128.
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
    """silu(gate) up of every element; computed in float32, returned in the inputs' dtype.

    Inputs of different dtypes run on XLA, and the result has the wider one.
    Raises ValueError if the shapes differ, NotImplementedError under implementation="mosaic" for
    dtypes that differ or are not fp32, bf16 or fp16.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape} but up has {up.shape}; they must be equal")
    return dispatch.run("swiglu", SWIGLU, implementation, gate, up)


def gelu_reference(x, bias=None):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = x if bias is None else _plus(x, bias)
    z = z.astype(mosaic.stat_dtype(x.dtype))
    w = jnp.clip(z, -100, 100)  # beyond, tanh(u) is constant and z^3 may overflow
    u = math.sqrt(2 / math.pi) * (w + 0.044715 * w * w * w)
    return (0.5 * z * (1 + jnp.tanh(u))).astype(x.dtype)


def swiglu_reference(gate, up):
    """The formula in jnp, in float32 (float64 for float64)."""
    dtype = mosaic.stat_dtype(gate.dtype)
    y = jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)
    return y.astype(jnp.promote_types(gate.dtype, up.dtype))


def gelu_why_not(x, bias=None) -> str | None:
    """Why the kernel does not support this call, or None."""
    if bias is None:
        return kernel.why_not(x=x)
    if bias.size % 128:
        return f"with a bias, the width F={bias.size} is not a multiple of 128"
    if x.dtype != jnp.bfloat16 and (reason := kernel.why_not(x=x)):
        return reason  # from the forward kernel
    return mosaic.unsupported_dtype(x=x, bias=bias) or mosaic.empty(x=x)


def _gelu_why_slower(x, bias=None) -> str | None:
    """Why XLA's form is faster, or None."""
    return kernel.why_slower(x)


def swiglu_why_not(gate, up) -> str | None:
    """Why the kernel does not support this call, or None."""
    return kernel.why_not(gate=gate, up=up)


def _swiglu_why_slower(gate, up) -> str | None:
    return kernel.why_slower(gate)


# ---- element by element ------------------------------------------------------------------------


def gelu_forward_tile(x):
    return (x * sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * (x * x))),)


def _gelu_parts(x, sigmoid):
    """sigmoid(2 u) and d(2 u)/dx."""
    xx = jnp.minimum(x * x, _FLAT)
    s = sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * xx))
    return s, _TWO_ROOT + 3 * _TWO_ROOT * 0.044715 * xx


def gelu_backward_tile(x, dy):
    s, dz = _gelu_parts(x, sigmoid)
    return (dy * (s + s * (1 - s) * x * dz),)


def gelu_derivative_tile(x):
    """GELU and its derivative."""
    s, dz = _gelu_parts(x, fast_sigmoid)
    y = x * s
    return y, s + y * (1 - s) * dz


def swiglu_forward_tile(gate, up):
    return (gate * sigmoid(gate) * up,)


def swiglu_backward_tile(gate, up, dy):
    s = sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


def swiglu_derivative_tile(gate, up):
    """The result and its derivatives by gate and by up."""
    s = fast_sigmoid(gate)
    silu = gate * s
    return silu * up, up * (s + silu * (1 - s)), silu


@jax.custom_vjp
def _swiglu(gate, up):
    return elementwise(swiglu_forward_tile, gate, up, name="swiglu_forward")[0]


_swiglu.defvjp(
    lambda gate, up: (_swiglu(gate, up), (gate, up)),
    lambda saved, dy: elementwise(
        swiglu_backward_tile, *saved, dy, name="swiglu_backward", outputs=2
    ),
)


@jax.custom_vjp
def _gelu(x):
    return elementwise(gelu_forward_tile, x, name="gelu_forward")[0]


_gelu.defvjp(
    lambda x: (_gelu(x), x),
    lambda x, dy: elementwise(gelu_backward_tile, x, dy, name="gelu_backward"),
)


# ---- with a bias -----------------------------------------------------------------------------

_BLOCK_ROWS = 64  # a block's partial sums for the bias' gradient are then 1% of its bytes
_IN_FLIGHT = 4  # rows whose loads a thread issues before it computes


@jax.jit  # lowered once per shape
def _backward_and_sum(z, dy):
    """dx from z and dy (N, F), and the sum of dx over the rows in float32 (F,).

    A block takes a panel of up to 1024 columns and 64 rows, a few rows at a time.  Every thread
    keeps to the same columns, so that it can hold their sums in registers.
    """
    n, f = z.shape
    vec = math.gcd(f // 128, 16 // z.dtype.itemsize)  # 16-byte loads, if they divide the row
    width, blocks = 128 * vec, mosaic.cdiv(n, _BLOCK_ROWS)
    dx, sums = mosaic.kernel(
        functools.partial(_panel, vec),
        name="gelu_backward",
        out_type=[
            jax.ShapeDtypeStruct(z.shape, z.dtype),
            jax.ShapeDtypeStruct((blocks, f), jnp.float32),
        ],
        **mosaic.grid(rows=blocks, panel=f // width),
        compiler_params=plgpu.CompilerParams(approx_math=z.dtype.itemsize == 2),
    )(z, dy)
    return dx, sums.sum(0)


def _panel(vec, z_ref, dy_ref, dx_ref, sums_ref):
    """A block computes dx of its panel and the sums of dx over the panel's rows."""
    n, width = z_ref.shape[0], 128 * vec
    layout = plgpu.Layout.WG_STRIDED((width,), vec)
    block = lax.axis_index("rows")
    columns = pl.ds(lax.axis_index("panel") * width, width)
    z, dy, dx = (ref.at[:, columns] for ref in (z_ref, dy_ref, dx_ref))
    add = functools.partial(_rows_of_panel, layout, z, dy, dx)

    # Compute several rows at a time.
    start = block * _BLOCK_ROWS
    end = jnp.minimum(start + _BLOCK_ROWS, n) if n % _BLOCK_ROWS else start + _BLOCK_ROWS
    steps = (end - start) // _IN_FLIGHT
    several = lambda i, total: add(start + i * _IN_FLIGHT, _IN_FLIGHT, total)
    total = lax.fori_loop(0, steps, several, mosaic.zeros((width,), layout))

    # Compute the remaining rows one at a time.
    rest = start + steps * _IN_FLIGHT
    total = lax.fori_loop(rest, end, lambda row, total: add(row, 1, total), total)
    mosaic.store(sums_ref.at[block, columns], total)


def _rows_of_panel(layout, z_ref, dy_ref, dx_ref, first, count, total):
    """Writes dx of `count` rows from `first` on, and adds it to `total`."""
    load = lambda ref, row: mosaic.load(ref.at[row], layout)
    pairs = [(load(z_ref, first + i), load(dy_ref, first + i)) for i in range(count)]
    for i, pair in enumerate(pairs):
        (dx,) = gelu_backward_tile(*pair)
        mosaic.store(dx_ref.at[first + i], dx)
        total += dx
    return total


@jax.custom_vjp
def _gelu_of_sum(x, bias):
    return _forward_of_sum(x, bias)[0]


def _forward_of_sum(x, bias):
    z = _plus(x, bias)
    y = _in_the_matmul(z) if x.dtype == jnp.bfloat16 else _gelu(z)
    return y, (z, jnp.zeros((), bias.dtype))


def _plus(x, bias):
    # A jax.checkpoint policy can save z by name.  Saving x would keep XLA from adding the bias in
    # the matmul.
    return checkpoint_name(x + bias.astype(x.dtype), "gelu")


def _in_the_matmul(z):
    """GELU in z's dtype, in the form that XLA recognises after a matmul."""
    return z * (0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * (z * z * z)))))


def _backward_of_sum(saved, dy):
    z, like_bias = saved
    dx, dbias = _backward_and_sum(z, dy)
    return dx, dbias.astype(like_bias.dtype)


_gelu_of_sum.defvjp(_forward_of_sum, _backward_of_sum)


def _gelu_kernels(x, bias):
    if bias is None:
        return _gelu(x)
    return _gelu_of_sum(x.reshape(-1, bias.size), bias).reshape(x.shape)


GELU = (
    Form("general", _gelu_kernels, "sm_80", gelu_why_not, _gelu_why_slower),
    Form("xla", gelu_reference),
)
SWIGLU = (
    Form("general", _swiglu, "sm_80", swiglu_why_not, _swiglu_why_slower),
    Form("xla", swiglu_reference),
)
