"""The feed-forward layer of a transformer: two matmuls with an activation between them, or three.

    GELU     y = gelu(x W_up + b) W_down         SwiGLU   y = (silu(x W_gate) * (x W_up)) W_down

Shazeer 2020, "GLU Variants Improve Transformer".  On Hopper the forward pass is one kernel up to
the last matmul: it computes the activation h while it multiplies (activated_matmul.py); cuBLASLt
multiplies first.  It saves h and its derivatives instead of the products, so that the backward
kernel, which begins with dh = dy W_down^T, only multiplies dh with them and never writes it
(matmul_epilogue.py).  Where rows are many, SwiGLU's gradients lie side by side, [dg du]: one matmul
then sums dx = [dg du] [W_gate W_up]^T, and one has both weights' gradients, x^T [dg du].

With precision="fp8" all matmuls take fp8 operands, as in fp8_linear (float8/linear.py).  Three of
their operands come from the activation, and are the widest arrays of a block, so the activation's
kernels write fp8, in both orders:

    g, u = x W           --> max |h|, |u|, |silu(g)|     and then h = silu(g) u, e4m3 h and h^T
    z = x W + b          --> h = gelu(z)                 e4m3 h and h^T
    dh = dy W_down^T     --> dg, du, or dz and the sum of its rows     e5m2, and transposed

Such a kernel needs its scale before the first value is there, so it takes a bound of the largest
one.  By Cauchy and Schwarz no element of a product exceeds the largest row norm of its left operand
times the largest column norm of its right one:

    |dh| <= c max_i ||dy_i|| max_j ||W_down_j||     |du| <= |dh| max |silu(g)|
    |z|  <= c max_i ||x_i|| max_j ||W_up_j|| + max |b|      |dg| <= 1.1 |dh| max |u|

c covers the rounding of the operands.  A bound that is 2^n too large moves all values down by n of
the format's powers of 2 (e5m2 has 32 of them, e4m3 18); only values that become subnormal lose
digits.  For SwiGLU's h, a product of two such numbers, the bound would be too loose for e4m3, so a
kernel takes its maximum first, which jax.checkpoint can save.
Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations import activation, matmul_epilogue
from pallas_kernels.activations.activated_matmul import activated_matmul
from pallas_kernels.activations.activated_matmul import why_slower as few_tiles
from pallas_kernels.activations.elementwise import sigmoid
from pallas_kernels.dispatch import Form
from pallas_kernels.float8 import linear
from pallas_kernels.float8.quantize import TILE, cast, cast_results, named, norms, not_a_multiple
from pallas_kernels.options import checked, custom_vjp
from pallas_kernels.totals import summed

_ROUNDING = 1.25  # operands in e4m3 and e5m2: (1 + 2^-4) (1 + 2^-3), the product in bf16, and sums
_SLOPE = 1.13  # of gelu at most; 1.1 of silu
_STEP = 4096  # elements of a block of `_maxima`


@checked
def mlp(
    x: Float[Array, "*rows C"],
    up: Float[Array, "C F"],
    down: Float[Array, "F C"],
    *,
    gate: Float[Array, "C F"] | None = None,
    bias: Float[Array, " F"] | None = None,
    precision: Literal["fp8"] | None = None,
    row_norm: Float[Array, ""] | None = None,
    saves: Literal["derivatives", "products"] = "derivatives",
    totals: tuple | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """swiglu(x gate, x up) down, or without a gate gelu(x up + bias) down, in x's dtype.

    precision: of the matmuls' operands; None: x's and the weights' dtypes; "fp8": as in fp8_linear.
    row_norm: of x, as in fp8_linear; for fp8.
    saves: what the backward pass keeps beside h: its derivatives, or the products x gate and x up
        (GELU: x up + bias), which jax.checkpoint can save by the names "mlp" and "gelu".
    totals: of the gradients of (up, down, gate) or (up, down) so far (totals.py).

    Hopper's kernels need one of bfloat16 and float16 for x and weights, rows and F in multiples of
    128 and C in multiples of 64; GELU a bias.  The others run matmuls of XLA and the kernels of
    `gelu` or `swiglu`.  The kernels for fp8 need rows, C and F in multiples of 64; other calls take
    fp8_linear.  fp8 is fast only inside jit and with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false;
    an infinity or a NaN in x, a weight or dy makes each product that it enters NaN as a whole; with
    row_norm, one in x makes at least its row NaN.
    Raises ValueError for shapes that do not fit and for integers, NotImplementedError under
    implementation="mosaic" for a call that no kernel supports.
    """
    _check(x, up, down, gate, bias)
    y = dispatch.run(
        "mlp",
        FORMS if precision is None else FP8,
        implementation,
        *(x, up, down, gate, bias),
        precision=precision,
        row_norm=row_norm,
        saves=saves,
        totals=totals,
        implementation=implementation,
    )
    return y.astype(x.dtype)


def _summed(up, down, gate, totals):
    """The weights, whose gradients are added to the totals after they are computed."""
    if totals is None:
        return up, down, gate
    return *map(summed, (up, down), totals), None if gate is None else summed(gate, totals[2])


def _check(x, up, down, gate, bias):
    """Raises ValueError for arrays that do not fit."""
    for a in (x, up, down, gate, bias):
        if a is not None:
            mosaic.stat_dtype(a.dtype)  # raises for integers
    shapes = [up.shape, down.shape[::-1], *([] if gate is None else [gate.shape])]
    if up.ndim != 2 or not x.ndim or set(shapes) != {(x.shape[-1], up.shape[1])}:
        given = ", ".join(str(a.shape) for a in (x, up, down, gate) if a is not None)
        raise ValueError(f"x, up, down and gate {given} are not (..., C), (C, F), (F, C), (C, F)")
    if bias is not None and bias.shape != up.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {up.shape[1:]}, up's columns")
    if gate is not None and bias is not None:
        raise ValueError("mlp takes a gate (SwiGLU) or a bias (GELU), not both")


def mlp_reference(x, up, down, *, gate=None, bias=None, precision=None):
    """The formula in jnp; with fp8, of the rounded operands of fp8_linear_reference."""
    times = jnp.matmul if precision is None else linear.fp8_linear_reference
    if gate is None:
        return times(activation.gelu_reference(times(x, up), bias), down).astype(x.dtype)
    h = activation.swiglu_reference(times(x, gate), times(x, up))
    return times(h, down).astype(x.dtype)


def _in_parts(x, up, down, gate, bias, *, precision, row_norm, totals, implementation, **options):
    """The same by matmuls, and the activation by its own op."""
    up, down, gate = _summed(up, down, gate, totals)
    first = times = jnp.matmul
    if precision is not None:
        times = functools.partial(linear.fp8_linear, implementation=implementation)
        first = functools.partial(times, row_norm=row_norm)
    if gate is not None:
        g, u = (checkpoint_name(first(x, w), "mlp") for w in (gate, up))
        return times(activation.swiglu(g, u, implementation=implementation), down)
    z = first(x, up)
    if precision is not None:
        # XLA would move GELU into cuBLASLt's fp8 matmul, with z as a second output, which its own
        # compiler then refuses ("RET_CHECK ... !has_aux_output", JAX 0.12.0.1).
        z = lax.optimization_barrier(z)
    return times(activation.gelu(z, bias, implementation=implementation), down)


def _parts_why_not(x, up, down, gate, bias, **options) -> str | None:
    """Why the activation has no kernel, or None."""
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up.shape[1]), jnp.result_type(x, up))
    if gate is None:
        return activation.gelu_why_not(hidden, bias)
    return activation.swiglu_why_not(hidden, hidden)


def why_not(x, up, down, gate, bias, *, saves, **options) -> str | None:
    """Why Hopper's kernels do not support this call, or None."""
    if saves == "products":
        return "the kernel would multiply again for the activation: it saves derivatives"
    if gate is None and bias is None:
        return "without a gate the kernel needs a bias"
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up.shape[1]), x.dtype)
    return (
        mosaic.mixed_dtypes(x=x, up=up, gate=gate)
        or matmul_epilogue.linear_why_not(down, hidden)
        or mosaic.unsupported_dtype(bias=bias)
    )


def _why_slower(x, up, down, gate, bias, **options) -> str | None:
    return few_tiles(x, 1 if gate is None else 2, up.shape[1])


def _whole(x, up, down, gate, bias, *, totals, **options):
    rows = x.reshape(-1, x.shape[-1])
    up, down, gate = _summed(up, down, gate, totals)
    if gate is None:
        return _gelu_layer(rows, up, bias, down).reshape(x.shape)
    # Gradients side by side save 4 N C bytes of dx, and cost 8 C F for [gate up].  To a total, XLA
    # adds inside the matmul of one weight's gradient, but not of two.
    joint = totals is None and len(rows) >= 2 * gate.shape[1]
    return _swiglu_layer(rows, gate, up, down, joint).reshape(x.shape)


def fp8_why_not(x, up, down, gate, bias, **options) -> str | None:
    """Why the kernels for fp8 do not support this call, or None."""
    (c, f), rows = up.shape, x.size // max(x.shape[-1], 1)
    if gate is None and bias is None:
        return "without a gate the kernel needs a bias"
    return (
        mosaic.mixed_dtypes(x=x, up=up, down=down, gate=gate)
        or not_a_multiple(TILE, rows=rows, C=c, F=f)
        or mosaic.unsupported_dtype(x=x)
    )


def _fp8_whole(x, up, down, gate, bias, *, row_norm, totals, **options):
    linear.warn_of_flags()
    op, first = (_gelu_fp8, (up, bias)) if gate is None else (_swiglu_fp8, (up, gate))
    row_norm = None if row_norm is None else lax.stop_gradient(jnp.float32(row_norm))
    return op(x.reshape(-1, x.shape[-1]), *first, down, row_norm, totals).reshape(x.shape)


# ---- GELU ---------------------------------------------------------------------------------------


@custom_vjp
def _gelu_layer(x, up, bias, down):
    return _gelu_layer_forward(x, up, bias, down)[0]


def _gelu_layer_forward(x, up, bias, down):
    options = dict(name="gelu_mlp_forward", sms=mosaic.sm_count())
    h, slope = activated_matmul(x, (up,), bias, activation.gelu_derivative_tile, **options)
    return h @ down, (x, up, jnp.zeros((), bias.dtype), down, h, slope)


def _gelu_layer_backward(saved, dy):
    x, up, like_bias, down, h, slope = saved
    options = dict(sums=True, name="gelu_mlp_backward")
    dz, d_bias, d_down = matmul_epilogue.linear_backward((slope,), h, down, dy, **options)
    d_up = jnp.matmul(x.T, dz, preferred_element_type=x.dtype)
    return dz @ up.T, d_up, d_bias.astype(like_bias.dtype), d_down


_gelu_layer.defvjp(_gelu_layer_forward, _gelu_layer_backward)


# ---- SwiGLU -------------------------------------------------------------------------------------


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def _swiglu_layer(x, gate, up, down, joint):
    """joint: the gradients of both products lie side by side."""
    return _swiglu_layer_forward(x, gate, up, down, joint)[0]


def _swiglu_layer_forward(x, gate, up, down, joint):
    options = dict(name="swiglu_mlp_forward", sms=mosaic.sm_count())
    h, *slopes = activated_matmul(x, (gate, up), None, activation.swiglu_derivative_tile, **options)
    return h @ down, (x, gate, up, down, h, slopes)


def _swiglu_layer_backward(joint, saved, dy):
    x, gate, up, down, h, slopes = saved
    options = dict(joint=joint, name="swiglu_mlp_backward")
    *dh, d_down = matmul_epilogue.linear_backward(slopes, h, down, dy, **options)
    weights = gate, up
    if joint:
        # Without the barrier XLA may concatenate the weights of all layers when the step starts.
        dh, gate, up = jax.lax.optimization_barrier((dh, gate, up))
        weights = (jnp.concatenate([gate, up], axis=1),)
    # XLA's second matmul adds the first one's result.
    dx = sum(d @ w.T for d, w in zip(dh, weights, strict=True))
    # XLA reads the halves of a joint gradient where they are used, without a copy.
    d_weights = [jnp.matmul(x.T, d, preferred_element_type=x.dtype) for d in dh]
    d_gate, d_up = jnp.split(d_weights[0], 2, axis=1) if joint else d_weights
    return dx, d_gate, d_up, d_down


_swiglu_layer.defvjp(_swiglu_layer_forward, _swiglu_layer_backward)


# ---- fp8 ----------------------------------------------------------------------------------------


def _cast(a, largest=None):
    return cast(a, linear.FORWARD, True, largest)


def _cast_gradient(dy, down_norm):
    """dy's cast, and a bound of |dy W_down^T|."""
    largest, norm = norms(dy)
    return cast(dy, linear.BACKWARD, True, largest), _ROUNDING * norm * down_norm


# ---- SwiGLU, fp8 --------------------------------------------------------------------------------


@custom_vjp
def _swiglu_fp8(x, up, gate, down, row_norm, totals):
    return _swiglu_fp8_forward(x, up, gate, down, row_norm, totals)[0]


def _swiglu_fp8_forward(x, up, gate, down, row_norm, totals):
    x8, gate8, up8 = _cast(x, row_norm), _cast(gate), _cast(up)
    # model.remat saves these by name.
    g, u = (checkpoint_name(linear.times(x8, w, x.dtype), "mlp") for w in (gate8, up8))
    h_largest, *largest = map(named, _maxima(g, u))
    options = dict(name="swiglu_fp8", approx=x.dtype.itemsize == 2)
    (h8,), _ = cast_results(
        activation.swiglu_forward_tile, [g, u], [h_largest], linear.FORWARD, **options
    )
    down_largest, down_norm = norms(down)
    down8 = _cast(down, down_largest)
    kept = *map(linear.kept_input, (x8, h8)), *map(linear.kept_weight, (gate8, up8, down8))
    return linear.times(h8, down8, x.dtype), (g, u, largest, down_norm, *kept, totals)


def _swiglu_fp8_backward(saved, dy):
    g, u, (u_largest, silu_largest), down_norm, x8, h8, gate8, up8, down8, totals = saved
    dy8, dh_largest = _cast_gradient(dy, down_norm)
    dh = linear.times_weight(dy8, down8, dy.dtype)
    (dg8, du8), _ = cast_results(
        activation.swiglu_backward_tile,
        [g, u, dh],
        [1.1 * dh_largest * u_largest, dh_largest * silu_largest],
        linear.BACKWARD,
        name="swiglu_backward_fp8",
        approx=dy.dtype.itemsize == 2,
    )
    dx = linear.times_weight(dg8, gate8, dy.dtype) + linear.times_weight(du8, up8, dy.dtype)
    pairs = (x8, du8), (h8, dy8), (x8, dg8)
    (d_up, d_down, d_gate), totals = linear.weight_gradients(totals, dy.dtype, *pairs)
    return dx, d_up, d_gate, d_down, None, totals


_swiglu_fp8.defvjp(_swiglu_fp8_forward, _swiglu_fp8_backward)


def _maxima(g, u):
    """The largest |silu(g) u|, |u| and |silu(g)|."""
    return mosaic.kernel(
        _maxima_of_block,
        name="swiglu_maxima",
        out_type=jax.ShapeDtypeStruct((3, g.size // _STEP), jnp.float32),
        **mosaic.grid(block=g.size // _STEP),
        compiler_params=plgpu.CompilerParams(approx_math=g.dtype.itemsize == 2),
    )(g.reshape(-1, _STEP), u.reshape(-1, _STEP)).max(1)


def _maxima_of_block(g_ref, u_ref, largest_ref):
    block = lax.axis_index("block")
    layout = plgpu.Layout.WG_STRIDED((_STEP,), 16 // g_ref.dtype.itemsize)  # 16-byte loads
    g, u = (mosaic.load(ref.at[block], layout) for ref in (g_ref, u_ref))
    silu = g * sigmoid(g)
    for i, a in enumerate((silu * u, u, silu)):
        largest_ref[i, block] = abs(a).max()


# ---- GELU, fp8 ----------------------------------------------------------------------------------


@custom_vjp
def _gelu_fp8(x, up, bias, down, row_norm, totals):
    return _gelu_fp8_forward(x, up, bias, down, row_norm, totals)[0]


def _gelu_fp8_forward(x, up, bias, down, row_norm, totals):
    x_largest, x_norm = norms(x) if row_norm is None else (row_norm, row_norm)
    up_largest, up_norm = norms(up, axis=0)
    x8, up8 = _cast(x, x_largest), _cast(up, up_largest)
    z = checkpoint_name(linear.times(x8, up8, x.dtype) + bias.astype(x.dtype), "gelu")
    z_largest = _ROUNDING * (x_norm * up_norm + abs(bias).max().astype(jnp.float32))
    options = dict(name="gelu_fp8", approx=x.dtype.itemsize == 2)
    (h8,), _ = cast_results(
        activation.gelu_forward_tile, [z], [z_largest], linear.FORWARD, **options
    )
    down_largest, down_norm = norms(down)
    down8 = _cast(down, down_largest)
    kept = *map(linear.kept_input, (x8, h8)), *map(linear.kept_weight, (up8, down8))
    return linear.times(h8, down8, x.dtype), (z, down_norm, bias[:0], *kept, totals)


def _gelu_fp8_backward(saved, dy):
    z, down_norm, like_bias, x8, h8, up8, down8, totals = saved
    dy8, dh_largest = _cast_gradient(dy, down_norm)
    dh = linear.times_weight(dy8, down8, dy.dtype)
    (dz8,), (dbias,) = cast_results(
        activation.gelu_backward_tile,
        [z, dh],
        [_SLOPE * dh_largest],
        linear.BACKWARD,
        sums=True,
        name="gelu_backward_fp8",
        approx=dy.dtype.itemsize == 2,
    )
    pairs = (x8, dz8), (h8, dy8)
    (d_up, d_down), totals = linear.weight_gradients(totals, dy.dtype, *pairs)
    dx, dbias = linear.times_weight(dz8, up8, dy.dtype), dbias.astype(like_bias.dtype)
    return dx, d_up, dbias, d_down, None, totals


_gelu_fp8.defvjp(_gelu_fp8_forward, _gelu_fp8_backward)


FORMS = (
    Form("hopper", _whole, "sm_90a", why_not, _why_slower),
    Form("general", _in_parts, "sm_80", _parts_why_not),
    Form("xla", _in_parts),
)
FP8 = (
    Form("general", _fp8_whole, "sm_89", fp8_why_not),
    Form("xla", _in_parts),
)
