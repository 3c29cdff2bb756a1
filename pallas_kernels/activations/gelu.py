"""GELU in the tanh form that GPT-2 uses, with the bias of the matmul before it.

    gelu(z) = z (1 + tanh(u)) / 2,   u = sqrt(2/pi) (z + 0.044715 z^3),   z = x + bias

Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2.  The kernels use the equivalent
z sigmoid(2 u), which takes fewer instructions and stays accurate where tanh is close to -1.  The
backward pass recomputes the sigmoid from z, so only z is saved.  Both directions are bound by
memory: forward reads z and writes y, backward reads z and dy and writes dx.

With a bias, x comes from a matmul, and cuBLASLt can add the bias and apply GELU while the product
is in registers.  XLA uses this epilogue if the formula follows the matmul directly, in x's dtype.
The forward pass in bf16 is therefore that formula and not a kernel, which saves a pass over x: 0.4
of GPT-2 124M's 57.4 ms a step on an H100.  The backward kernel sums dx over the rows, the gradient
of the bias, while dx is in registers; XLA would read dx again, for a third of the kernel's time.

`gelu_linear` multiplies the result by a weight.  Its backward pass starts with the matmul dy W^T,
whose result only the kernel above needs, so one kernel does both and never writes dy W^T.

`gelu_mlp` is the whole layer.  Its forward pass is one kernel, too, which computes while it
multiplies; cuBLASLt multiplies first.  It saves the derivative of GELU instead of z, so that the
backward kernel only multiplies dy W^T with it.
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

_TWO_ROOT = 2 * math.sqrt(2 / math.pi)


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
    if not dispatch.use_kernel("gelu", implementation, why_not(x, bias), slower=why_slower(x)):
        return gelu_reference(x, bias)
    if bias is None:
        return _gelu(x)
    _record_forward("gelu", x)
    return _gelu_of_sum(x.reshape(-1, bias.size), bias).reshape(x.shape)


@checked
def gelu_linear(
    x: Float[Array, "*rows F"],
    bias: Float[Array, " F"],
    weight: Float[Array, "F C"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """gelu(x, bias) @ weight, with a kernel for its backward pass.

    The kernel needs x and weight in bfloat16 or float16 (one dtype), rows and F in multiples of 128
    and C in multiples of 64.  Other calls run `gelu` and a matmul.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that the kernel does not support.
    """
    if bias.shape != x.shape[-1:] or weight.ndim != 2 or weight.shape[:1] != x.shape[-1:]:
        shapes = f"x {x.shape}, bias {bias.shape} and weight {weight.shape}"
        raise ValueError(f"{shapes} do not fit: they must be (..., F), (F,) and (F, C)")
    reason = linear_why_not(x, bias, weight)
    if dispatch.use_kernel("gelu_linear", implementation, reason, "sm_90a"):
        _record_forward("gelu_linear", x)
        y = _gelu_linear(x.reshape(-1, bias.size), bias, weight)
        return y.reshape(*x.shape[:-1], -1)
    return gelu(x, bias, implementation=implementation) @ weight


@checked
def gelu_mlp(
    x: Float[Array, "*rows C"],
    up: Float[Array, "C F"],
    bias: Float[Array, " F"],
    down: Float[Array, "F C"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """gelu(x up + bias) down, with kernels for the forward and the backward pass.

    The kernels need x, up and down in bfloat16 or float16 (one dtype), rows and F in multiples of
    128 and C in multiples of 64.  Other calls run a matmul and `gelu_linear`.
    Raises ValueError for shapes that do not fit and for integers, NotImplementedError under
    implementation="mosaic" for a call that the kernels do not support.
    """
    c, f = x.shape[-1], bias.shape[-1]
    if (up.shape, bias.shape, down.shape) != ((c, f), (f,), (f, c)):
        given = f"x {x.shape}, up {up.shape}, bias {bias.shape} and down {down.shape}"
        raise ValueError(f"{given} do not fit: they must be (..., C), (C, F), (F,) and (F, C)")
    for a in (x, up, bias, down):
        mosaic.stat_dtype(a.dtype)  # raises for integers
    reason = mlp_why_not(x, up, bias, down)
    slower = few_tiles(x, 1, f)
    if dispatch.use_kernel("gelu_mlp", implementation, reason, "sm_90a", slower=slower):
        return _gelu_mlp(x.reshape(-1, c), up, bias, down).reshape(x.shape)
    return gelu_linear(x @ up, bias, down, implementation=implementation)


def gelu_mlp_reference(x, up, bias, down):
    return gelu_linear_reference(x @ up, bias, down)


def gelu_linear_reference(x, bias, weight):
    return gelu_reference(x, bias) @ weight


def gelu_reference(x, bias=None):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = x if bias is None else _plus(x, bias)
    z = z.astype(mosaic.stat_dtype(x.dtype))
    u = math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)
    return (0.5 * z * (1 + jnp.tanh(u))).astype(x.dtype)


def why_not(x, bias=None) -> str | None:
    """Why the kernel does not support this call, or None."""
    if bias is None:
        return _elementwise_why_not(x=x)
    if bias.size % 128:
        return f"with a bias, the width F={bias.size} is not a multiple of 128"
    if x.dtype != jnp.bfloat16 and (reason := _elementwise_why_not(x=x)):
        return reason  # from the forward kernel
    return mosaic.unsupported_dtype(x=x, bias=bias) or mosaic.empty(x=x)


def linear_why_not(x, bias, weight) -> str | None:
    """Why the kernel of `gelu_linear` does not support this call, or None."""
    return matmul_epilogue.linear_why_not(weight, x) or why_not(x, bias)


def mlp_why_not(x, up, bias, down) -> str | None:
    """Why the kernels of `gelu_mlp` do not support this call, or None."""
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], bias.shape[-1]), x.dtype)
    return mosaic.mixed_dtypes(x=x, up=up) or linear_why_not(hidden, bias, down)


def forward_tile(x):
    return (x * sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * (x * x))),)


def backward_tile(x, dy, sigmoid=sigmoid):
    xx = x * x
    s = sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * xx))
    dz = _TWO_ROOT + 3 * _TWO_ROOT * 0.044715 * xx  # d(2 u)/dx
    return (dy * (s + s * (1 - s) * (x * dz)),)


def derivative_tile(x):
    """GELU and its derivative."""
    xx = x * x
    s = fast_sigmoid(x * (_TWO_ROOT + _TWO_ROOT * 0.044715 * xx))
    y, dz = x * s, _TWO_ROOT + 3 * _TWO_ROOT * 0.044715 * xx
    return y, s + y * (1 - s) * dz


@jax.custom_vjp
def _gelu(x):
    return elementwise(forward_tile, x, name="gelu_forward")[0]


_gelu.defvjp(
    lambda x: (_gelu(x), x),
    lambda x, dy: elementwise(backward_tile, x, dy, name="gelu_backward"),
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
        (dx,) = backward_tile(*pair)
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


def _record_forward(op, x):
    if x.dtype == jnp.bfloat16:
        why = "forward, bf16 with a bias: cuBLASLt fuses it with the matmul before"
        dispatch.record(dispatch.Decision(op, "xla", why))


def _backward_of_sum(saved, dy):
    z, like_bias = saved
    dx, dbias = _backward_and_sum(z, dy)
    return dx, dbias.astype(like_bias.dtype)


_gelu_of_sum.defvjp(_forward_of_sum, _backward_of_sum)


# ---- and a weight ----------------------------------------------------------------------------

_AFTER_MATMUL = functools.partial(backward_tile, sigmoid=fast_sigmoid)


@jax.custom_vjp
def _gelu_linear(x, bias, weight):
    return _linear_forward(x, bias, weight)[0]


def _linear_forward(x, bias, weight):
    y, (z, like_bias) = _forward_of_sum(x, bias)
    return y @ weight, (z, like_bias, weight, y)


def _linear_backward(saved, dy):
    z, like_bias, weight, y = saved
    options = dict(sums=True, name="gelu_linear_backward")
    gradients = matmul_epilogue.linear_backward((z,), y, weight, dy, _AFTER_MATMUL, **options)
    dx, dbias, d_weight = gradients
    return dx, dbias.astype(like_bias.dtype), d_weight


_gelu_linear.defvjp(_linear_forward, _linear_backward)


# ---- and the matmul before it ----------------------------------------------------------------


@jax.custom_vjp
def _gelu_mlp(x, up, bias, down):
    return _mlp_forward(x, up, bias, down)[0]


def _mlp_forward(x, up, bias, down):
    options = dict(name="gelu_mlp_forward", sms=mosaic.sm_count())
    h, slope = activated_matmul(x, (up,), bias, derivative_tile, **options)
    return h @ down, (x, up, jnp.zeros((), bias.dtype), down, h, slope)


def _mlp_backward(saved, dy):
    x, up, like_bias, down, h, slope = saved
    dz, d_bias, d_down = matmul_epilogue.linear_backward(
        (slope,), h, down, dy, matmul_epilogue.times, sums=True, name="gelu_mlp_backward"
    )
    d_up = jnp.matmul(x.T, dz, preferred_element_type=x.dtype)
    return dz @ up.T, d_up, d_bias.astype(like_bias.dtype), d_down


_gelu_mlp.defvjp(_mlp_forward, _mlp_backward)
