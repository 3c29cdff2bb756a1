"""A feed-forward layer whose matmuls take fp8 operands: fp8_mlp.

    SwiGLU   y = (silu(x W_gate) * (x W_up)) W_down      GELU   y = gelu(x W_up + b) W_down

The matmuls are those of fp8_linear (linear.py).  Three of their operands come from an activation,
and are the widest arrays of a block.  Cast on their own they would be written in bfloat16, read for
their maximum, and read again.  Here the activation's kernels write fp8, in both orders:

    g, u = x W           --> max |h|, |u|, |silu(g)|     and then h = silu(g) u, e4m3 h and h^T
    z = x W + b          --> h = gelu(z)                 e4m3 h and h^T
    dh = dy W_down^T     --> dg, du, or dz and the sum of its rows     e5m2, and transposed

A kernel that writes fp8 needs its scale before the first value is there, so it takes a bound of the
largest one instead.  By Cauchy and Schwarz no element of a product exceeds the largest norm of a
row of its left operand times that of a column of its right one, which are read with their maxima:

    |dh| <= c max_i ||dy_i|| max_j ||W_down_j||     |du| <= |dh| max |silu(g)|
    |z|  <= c max_i ||x_i|| max_j ||W_up_j|| + max |b|      |dg| <= 1.1 |dh| max |u|

c covers the rounding of the operands.  A bound that is 2^n too large moves all values down by n of
the format's powers of 2, and nothing else: e5m2 has 32 of them, e4m3 18.  Rounding errors are
relative and stay the same but for values that become subnormal.  No step's scale depends on another
step, and nothing saturates.  SwiGLU's h is a product of two such numbers, for which the bound would
be too loose for e4m3: a kernel takes its maximum first.  jax.checkpoint can save that number.

Shazeer 2020, "GLU Variants Improve Transformer"; Micikevicius et al. 2022, "FP8 Formats for Deep
Learning".
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations import gelu as _gelu
from pallas_kernels.activations import swiglu as _swiglu
from pallas_kernels.activations.elementwise import elementwise, sigmoid
from pallas_kernels.float8 import linear
from pallas_kernels.float8.quantize import (
    TILE,
    cast,
    cast_results,
    lost,
    named,
    norms,
    not_a_multiple,
)
from pallas_kernels.options import checked

_ROUNDING = 1.25  # operands in e4m3 and e5m2: (1 + 2^-4) (1 + 2^-3), the product in bf16, and sums
_SLOPE = 1.13  # of gelu at most; 1.1 of silu
_STEP = 4096  # elements of a block of `_maxima`


@checked
def fp8_mlp(
    x: Float[Array, "*rows C"],
    up: Float[Array, "C F"],
    down: Float[Array, "F C"],
    *,
    gate: Float[Array, "C F"] | None = None,
    bias: Float[Array, " F"] | None = None,
    row_norm: Float[Array, ""] | None = None,
    probes: tuple[Float[Array, "3 3"], ...] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """swiglu(x gate, x up) down, or gelu(x up + bias) down; x's dtype, fp8 operands (fp8_linear).

    Give either gate or bias.  The kernels need x and weights of one dtype (fp32, bf16 or fp16), and
    rows, C and F in multiples of 64.  Other calls take fp8_linear and the activation.
    row_norm: of x, as in fp8_linear.
    probes: one for each of gate (if given), up and down, as `probe` of fp8_linear.
    It is fast only inside jit and with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false.
    An infinity or a NaN in x, a weight or dy makes each product that it enters NaN as a whole.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that is not supported.
    """
    if (gate is None) == (bias is None):
        raise ValueError("fp8_mlp takes either gate (SwiGLU) or bias (GELU)")
    shapes = [up.shape, down.shape[::-1], *([] if gate is None else [gate.shape])]
    if up.ndim != 2 or set(shapes) != {(x.shape[-1], up.shape[1])}:
        given = ", ".join(str(a.shape) for a in (x, up, down, gate) if a is not None)
        raise ValueError(f"x, up, down and gate {given} are not (..., C), (C, F), (F, C), (C, F)")
    if bias is not None and bias.shape != up.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {up.shape[1:]}")
    if not dispatch.use_kernel("fp8_mlp", implementation, why_not(x, up, down, gate), "sm_89"):
        return _in_parts(x, up, down, gate, bias, row_norm, probes, implementation)
    linear.warn_of_flags()
    op, first = (_gelu_mlp, (up, bias)) if gate is None else (_swiglu_mlp, (gate, up))
    row_norm = None if row_norm is None else lax.stop_gradient(row_norm)
    return op(x.reshape(-1, x.shape[-1]), *first, down, row_norm, probes).reshape(x.shape)


def _in_parts(x, up, down, gate, bias, row_norm, probes, implementation):
    """The same by fp8_linear, and the activation by its own op."""
    probes = list(probes or (None,) * 3)
    times = lambda x, weight, row_norm=None: linear.fp8_linear(
        x, weight, row_norm=row_norm, probe=probes.pop(0), implementation=implementation
    )
    if gate is not None:
        g, u = (checkpoint_name(times(x, w, row_norm), "mlp") for w in (gate, up))
        return times(_swiglu.swiglu(g, u, implementation=implementation), down)
    # XLA would move GELU into cuBLASLt's fp8 matmul, with z as a second output, which its own
    # compiler then refuses ("RET_CHECK ... !has_aux_output", JAX 0.12.0.1).
    z = lax.optimization_barrier(times(x, up, row_norm))
    return times(_gelu.gelu(z, bias, implementation=implementation), down)


def fp8_mlp_reference(x, up, down, *, gate=None, bias=None):
    """The formula in jnp, with the rounded operands of fp8_linear_reference."""
    times = linear.fp8_linear_reference
    if gate is None:
        return times(_gelu.gelu_reference(times(x, up), bias), down)
    return times(_swiglu.swiglu_reference(times(x, gate), times(x, up)), down)


def why_not(x, up, down, gate=None) -> str | None:
    """Why the kernels do not support this call, or None."""
    (c, f), rows = up.shape, x.size // max(x.shape[-1], 1)
    return (
        mosaic.mixed_dtypes(x=x, up=up, down=down, gate=gate)
        or not_a_multiple(TILE, rows=rows, C=c, F=f)
        or mosaic.unsupported_dtype(x=x)
    )


def _cast(a, largest=None):
    return cast(a, linear.FORWARD, True, largest)


def _cast_gradient(dy, down_norm):
    """dy's cast, and a bound of |dy W_down^T|."""
    largest, norm = norms(dy)
    return cast(dy, linear.BACKWARD, True, largest), _ROUNDING * norm * down_norm


def _shares(inputs, weights):
    """What the casts of the forward pass lost, for each layer."""
    return [(lost(*x), lost(*w)) for x, w in zip(inputs, weights, strict=True)]


def _with_gradients(shares, *gradients):
    """The gradients of the probes."""
    return tuple(jnp.stack([*both, lost(*dy)]) for both, dy in zip(shares, gradients, strict=True))


# ---- SwiGLU ------------------------------------------------------------------------------------


@jax.custom_vjp
def _swiglu_mlp(x, gate, up, down, row_norm, probes):
    return _swiglu_mlp_forward(x, gate, up, down, row_norm, probes)[0]


def _swiglu_mlp_forward(x, gate, up, down, row_norm, probes):
    x8, gate8, up8 = _cast(x, row_norm), _cast(gate), _cast(up)
    # model.remat saves these by name.
    g, u = (checkpoint_name(linear.times(x8, w, x.dtype), "mlp") for w in (gate8, up8))
    h_largest, *largest = map(named, _maxima(g, u))
    options = dict(name="swiglu_fp8", approx=x.dtype.itemsize == 2)
    (h8,), _ = cast_results(_swiglu.forward_tile, [g, u], [h_largest], linear.FORWARD, **options)
    down_largest, down_norm = norms(down)
    down8 = _cast(down, down_largest)
    shares = None
    if probes is not None:
        (h,) = elementwise(_swiglu.forward_tile, g, u, name="swiglu_forward")
        weights = (gate, gate8), (up, up8), (down, down8)
        shares = _shares(((x, x8), (x, x8), (h, h8)), weights)
    kept = *map(linear.kept_input, (x8, h8)), *map(linear.kept_weight, (gate8, up8, down8))
    return linear.times(h8, down8, x.dtype), (g, u, largest, down_norm, *kept, shares)


def _swiglu_mlp_backward(saved, dy):
    g, u, (u_largest, silu_largest), down_norm, x8, h8, gate8, up8, down8, shares = saved
    dy8, dh_largest = _cast_gradient(dy, down_norm)
    dh = linear.times_weight(dy8, down8, dy.dtype)
    (dg8, du8), _ = cast_results(
        _swiglu.backward_tile,
        [g, u, dh],
        [1.1 * dh_largest * u_largest, dh_largest * silu_largest],
        linear.BACKWARD,
        name="swiglu_backward_fp8",
        approx=dy.dtype.itemsize == 2,
    )
    dx = linear.times_weight(dg8, gate8, dy.dtype) + linear.times_weight(du8, up8, dy.dtype)
    of_weight = functools.partial(linear.weight_gradient, dtype=dy.dtype)
    if shares is not None:
        dg, du = elementwise(_swiglu.backward_tile, g, u, dh, name="swiglu_backward", outputs=2)
        shares = _with_gradients(shares, (dg, dg8), (du, du8), (dy, dy8))
    return dx, of_weight(x8, dg8), of_weight(x8, du8), of_weight(h8, dy8), None, shares


_swiglu_mlp.defvjp(_swiglu_mlp_forward, _swiglu_mlp_backward)


def _maxima(g, u):
    """The largest |silu(g) u|, |u| and |silu(g)|."""
    return mosaic.kernel(
        _maxima_of_block,
        name="swiglu_maxima",
        out_type=jax.ShapeDtypeStruct((3, g.size // _STEP), jnp.float32),
        grid=(g.size // _STEP,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=g.dtype.itemsize == 2),
    )(g.reshape(-1, _STEP), u.reshape(-1, _STEP)).max(1)


def _maxima_of_block(g_ref, u_ref, largest_ref):
    block = lax.axis_index("block")
    layout = plgpu.Layout.WG_STRIDED((_STEP,), 16 // g_ref.dtype.itemsize)  # 16-byte loads
    g, u = (mosaic.load(ref.at[block], layout) for ref in (g_ref, u_ref))
    silu = g * sigmoid(g)
    for i, a in enumerate((silu * u, u, silu)):
        largest_ref[i, block] = abs(a).max()


# ---- GELU --------------------------------------------------------------------------------------


@jax.custom_vjp
def _gelu_mlp(x, up, bias, down, row_norm, probes):
    return _gelu_mlp_forward(x, up, bias, down, row_norm, probes)[0]


def _gelu_mlp_forward(x, up, bias, down, row_norm, probes):
    x_largest, x_norm = norms(x) if row_norm is None else (row_norm, row_norm)
    up_largest, up_norm = norms(up, axis=0)
    x8, up8 = _cast(x, x_largest), _cast(up, up_largest)
    z = checkpoint_name(linear.times(x8, up8, x.dtype) + bias.astype(x.dtype), "gelu")
    z_largest = _ROUNDING * (x_norm * up_norm + abs(bias).max().astype(jnp.float32))
    options = dict(name="gelu_fp8", approx=x.dtype.itemsize == 2)
    (h8,), _ = cast_results(_gelu.forward_tile, [z], [z_largest], linear.FORWARD, **options)
    down_largest, down_norm = norms(down)
    down8 = _cast(down, down_largest)
    shares = None
    if probes is not None:
        (h,) = elementwise(_gelu.forward_tile, z, name="gelu_forward")
        shares = _shares(((x, x8), (h, h8)), ((up, up8), (down, down8)))
    kept = *map(linear.kept_input, (x8, h8)), *map(linear.kept_weight, (up8, down8))
    return linear.times(h8, down8, x.dtype), (z, down_norm, bias[:0], *kept, shares)


def _gelu_mlp_backward(saved, dy):
    z, down_norm, like_bias, x8, h8, up8, down8, shares = saved
    dy8, dh_largest = _cast_gradient(dy, down_norm)
    dh = linear.times_weight(dy8, down8, dy.dtype)
    (dz8,), (dbias,) = cast_results(
        _gelu.backward_tile,
        [z, dh],
        [_SLOPE * dh_largest],
        linear.BACKWARD,
        sums=True,
        name="gelu_backward_fp8",
        approx=dy.dtype.itemsize == 2,
    )
    of_weight = functools.partial(linear.weight_gradient, dtype=dy.dtype)
    dx, dbias = linear.times_weight(dz8, up8, dy.dtype), dbias.astype(like_bias.dtype)
    if shares is not None:
        (dz,) = elementwise(_gelu.backward_tile, z, dh, name="gelu_backward")
        shares = _with_gradients(shares, (dz, dz8), (dy, dy8))
    return dx, of_weight(x8, dz8), dbias, of_weight(h8, dy8), None, shares


_gelu_mlp.defvjp(_gelu_mlp_forward, _gelu_mlp_backward)
