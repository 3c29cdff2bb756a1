"""The feed-forward layer of a transformer: two matmuls with an activation between them, or three.

    GELU     y = gelu(x W_up + b) W_down         SwiGLU   y = (silu(x W_gate) * (x W_up)) W_down

Shazeer 2020, "GLU Variants Improve Transformer".  XLA multiplies, and the activation is a kernel
between its matmuls (activation.py).  On Hopper the backward pass of an activation begins with its
matmul, dh = dy W_down^T, and never writes dh (matmul_epilogue.py).

With precision="fp8" all matmuls take fp8 operands, as in fp8_linear (float8/linear.py).  Three of
their operands come from the activation, and are the widest arrays of a block, so the activation's
kernels write fp8, in both orders:

    g, u = x W           --> max |h|, |u|, |silu(g)|     and then h = silu(g) u, e4m3 h and h^T
    z = x W + b          --> h = gelu(z)                 e4m3 h and h^T
    dh = dy W_down^T     --> dg, du, or dz and the sum of its rows     e5m2, and transposed

Such a kernel needs its scale before it computes a value, so the scale comes from a bound.  By
Cauchy and Schwarz no element of a product exceeds the largest row norm of its left operand times
the largest column norm of its right one:

    |dh| <= c max_i ||dy_i|| max_j ||W_down_j||     |du| <= |dh| max |silu(g)|
    |z|  <= c max_i ||x_i|| max_j ||W_up_j|| + max |b|      |dg| <= 1.1 |dh| max |u|

c covers the rounding of the operands; docs/fp8.md says what a loose bound costs.  SwiGLU's h would
have too loose a bound, so a kernel computes its maximum first, which jax.checkpoint can save.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations import activation, matmul_epilogue
from pallas_kernels.activations.matmul_epilogue import matmul_with_epilogue
from pallas_kernels.dispatch import Form
from pallas_kernels.float8 import linear, quantize
from pallas_kernels.float8.quantize import cast, cast_results, norms
from pallas_kernels.options import checked, with_gradient
from pallas_kernels.totals import check_totals, summed

_ROUNDING = 1.25  # operands in e4m3 and e5m2: (1 + 2^-4) (1 + 2^-3), the product in bf16, and sums
_SLOPE, _SILU_SLOPE = 1.13, 1.1  # upper bounds on the slopes of gelu and silu


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
    totals: tuple[Float[Array, "_ _"], ...] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*rows C"]:
    """swiglu(x gate, x up) down, or without a gate gelu(x up + bias) down, in x's dtype.

    precision: of the matmuls' operands; None: x's and the weights' dtypes; "fp8": as in fp8_linear.
    row_norm: of x, as in fp8_linear; for fp8.
    totals: the sums of the gradients of (up, down, gate) or (up, down) so far (totals.py).

    jax.checkpoint can save the products x gate and x up by the name "mlp", and x up + bias by
    "gelu".  Hopper's backward kernel needs one of bfloat16 and float16 for x and weights, rows and
    F in multiples of 128 and C in multiples of 64; other calls run the backward kernels of `gelu`
    or `swiglu`.  The kernels for fp8 need rows, C and F in multiples of 64; other calls take
    fp8_linear, whose notes on speed, infinities and NaN hold here as well.
    """
    arrays, forms = (x, up, down, gate, bias), FORMS if precision is None else FP8
    _check(*arrays)
    if totals is not None:
        check_totals(totals, up, down, *([] if gate is None else [gate]))
    options = dict(precision=precision, row_norm=row_norm, totals=totals)
    options |= dict(implementation=implementation)  # for the ops inside
    return dispatch.run("mlp", forms, implementation, *arrays, **options).astype(x.dtype)


def _check(x, up, down, gate, bias):
    shapes = [up.shape, down.shape[::-1], *([] if gate is None else [gate.shape])]
    if up.ndim != 2 or not x.ndim or set(shapes) != {(x.shape[-1], up.shape[1])}:
        given = ", ".join(str(a.shape) for a in (x, up, down, gate) if a is not None)
        raise ValueError(f"x, up, down and gate {given} are not (..., C), (C, F), (F, C), (C, F)")
    if bias is not None and bias.shape != up.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}, not {up.shape[1:]}, up's columns")
    if gate is not None and bias is not None:
        raise ValueError("mlp takes a gate (SwiGLU) or a bias (GELU), not both")


def _in_parts(x, up, down, gate, bias, *, precision, row_norm, totals, implementation, fused=False):
    """Computes `mlp` by matmuls, and by the op of its activation.

    fused: the backward pass of the activation is a part of the matmul before it.
    """
    if totals is not None:
        up, down = map(summed, (up, down), totals)
        gate = None if gate is None else summed(gate, totals[2])
    first = times = jnp.matmul
    if precision is not None:
        times = functools.partial(linear.fp8_linear, implementation=implementation)
        first = functools.partial(times, row_norm=row_norm)
    if gate is not None:
        op, inputs = activation.swiglu, [checkpoint_name(first(x, w), "mlp") for w in (gate, up)]
    else:
        z = first(x, up)
        if precision is not None:
            # XLA would move GELU into cuBLASLt's fp8 matmul, with z as a second output, and then
            # refuse to compile this call ("RET_CHECK ... !has_aux_output", JAX 0.12.0.1).
            z = lax.optimization_barrier(z)
        op, inputs = activation.gelu, [z, bias]
    if fused:
        return _activated(gate is not None, inputs, down)
    return times(op(*inputs, implementation=implementation), down)


def _parts_why_not(x, up, down, gate, bias, **options) -> str | None:
    """Why the activation has no kernel, or None."""
    if gate is None:
        return activation.gelu_why_not(_hidden(x, up), bias)
    return activation.swiglu_why_not(_hidden(x, gate), _hidden(x, up))


def _hidden(x, w):
    return jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), jnp.result_type(x, w))


def why_not(x, up, down, gate, bias, **options) -> str | None:
    """Why Hopper's kernel does not support the backward pass of this call, or None."""
    return (
        mosaic.mixed_dtypes(x=x, up=up, gate=gate)
        or matmul_epilogue.why_not(down, _hidden(x, up))
        or mosaic.unsupported_dtype(bias=bias)
    )


def _activated_forward(gated, inputs, down):
    """h down for h = swiglu(gate, up) if `gated`, else gelu(x + bias)."""
    h, saved = (activation.swiglu_forward if gated else activation.gelu_forward)(*inputs)
    return h @ down, (saved, h, down)


def _activated_backward(gated, saved, dy):
    saved, h, down = saved
    rows = lambda a: a.reshape(-1, a.shape[-1])
    backward = activation.swiglu_backward if gated else activation.gelu_backward
    name = f"{'swiglu' if gated else 'gelu'}_mlp_backward"

    def multiply(tile, *inputs):
        results = matmul_with_epilogue(rows(dy), down, tuple(map(rows, inputs)), tile, name=name)
        return [d.reshape(h.shape) for d in results]

    d_down = jnp.matmul(rows(h).T, rows(dy), preferred_element_type=down.dtype)
    return list(backward(saved, multiply)), d_down


_activated = with_gradient(_activated_forward, _activated_backward, nondiff_argnums=(0,))


def fp8_why_not(x, up, down, gate, bias, **options) -> str | None:
    (c, f), rows = up.shape, x.size // max(x.shape[-1], 1)
    if gate is None and bias is None:
        return "without a gate the kernel needs a bias"
    return (
        mosaic.mixed_dtypes(x=x, up=up, down=down, gate=gate)
        or mosaic.not_a_multiple(quantize.TILE, rows=rows, C=c, F=f)
        or mosaic.unsupported_dtype(x=x)
    )


def _fp8_whole(x, up, down, gate, bias, *, row_norm, totals, **options):
    linear.warn_of_flags()
    rows, row_norm = x.reshape(-1, x.shape[-1]), quantize.known_norm(row_norm)
    return _fp8(rows, up, down, gate, bias, row_norm, totals).reshape(x.shape)


# ---- fp8 ----------------------------------------------------------------------------------------

_cast = functools.partial(cast, dtype=linear.FORWARD, kernel=True)


def _fp8_forward(x, up, down, gate, bias, row_norm, totals):
    if gate is None:
        name, tile = "gelu_fp8", activation.gelu_forward_tile
        x8, weights8, inputs, largest, slopes = _gelu_inputs(x, up, bias, row_norm)
    else:
        name, tile = "swiglu_fp8", activation.swiglu_forward_tile
        x8, weights8, inputs, largest, slopes = _swiglu_inputs(x, gate, up, row_norm)
    options = dict(name=name, approx=x.dtype.itemsize == 2)
    (h8,), _ = cast_results(tile, inputs, [largest], linear.FORWARD, **options)
    down_largest, down_norm = norms(down)
    down8 = _cast(down, largest=down_largest)
    like_bias = None if bias is None else bias[:0]
    of_weights = [w._replace(transposed=None) for w in (down8, *weights8)]
    kept = *(x._replace(values=None) for x in (x8, h8)), *of_weights
    saved = inputs, slopes, down_norm, like_bias, totals, *kept
    return linear.times(h8, down8, x.dtype), saved


def _fp8_backward(saved, dy):
    inputs, slopes, down_norm, like_bias, totals, x8, h8, down8, *weights8 = saved
    name, tile = "swiglu_backward_fp8", activation.swiglu_backward_tile
    if like_bias is not None:
        name, tile = "gelu_backward_fp8", activation.gelu_backward_tile
    # The cast of dy, and an upper bound on |dy W_down^T|.
    largest, norm = norms(dy)
    dy8, dh_largest = cast(dy, linear.BACKWARD, True, largest), _ROUNDING * norm * down_norm
    dh = linear.times_weight(dy8, down8, dy.dtype)
    bounds = [dh_largest * slope for slope in slopes]
    options = dict(sums=like_bias is not None, name=name, approx=dy.dtype.itemsize == 2)
    d8, sums = cast_results(tile, [*inputs, dh], bounds, linear.BACKWARD, **options)
    dx = [linear.times_weight(d, w, dy.dtype) for d, w in zip(d8, weights8, strict=True)]
    *of_gate, of_up = ((x8, d) for d in d8)
    pairs = of_up, (h8, dy8), *of_gate
    (d_up, d_down, *d_gate), totals = linear.weight_gradients(totals, dy.dtype, *pairs)
    dbias = sums[0].astype(like_bias.dtype) if sums else None
    d_gate = d_gate[0] if d_gate else None
    return functools.reduce(jnp.add, dx), d_up, d_down, d_gate, dbias, None, totals


_fp8 = with_gradient(_fp8_forward, _fp8_backward)


# For each activation a function returns what its kernels start from: (casts of x and of the
# weights, the products, a bound on |h|, bounds on the derivatives of h by the products).


def _gelu_inputs(x, up, bias, row_norm):
    x_largest, x_norm = norms(x) if row_norm is None else (row_norm, row_norm)
    up_largest, up_norm = norms(up, axis=0)
    x8, up8 = _cast(x, largest=x_largest), _cast(up, largest=up_largest)
    z = checkpoint_name(linear.times(x8, up8, x.dtype) + bias.astype(x.dtype), "gelu")
    largest = _ROUNDING * (x_norm * up_norm + abs(bias).max().astype(jnp.float32))
    return x8, [up8], [z], largest, [_SLOPE]


def _swiglu_inputs(x, gate, up, row_norm):
    x8, weights8 = _cast(x, largest=row_norm), [_cast(gate), _cast(up)]
    # model.remat saves these by name.
    g, u = (checkpoint_name(linear.times(x8, w, x.dtype), "mlp") for w in weights8)
    found = quantize.maxima(_factors, [g, u], 3, "swiglu_maxima").max(1)
    largest, u_largest, silu_largest = map(quantize.named, found)
    return x8, weights8, [g, u], largest, [_SILU_SLOPE * u_largest, silu_largest]


def _factors(g, u):
    """swiglu(g, u) and its factors."""
    silu = g * mosaic.sigmoid(g)
    return silu * u, u, silu


_parts_why_slower = lambda x, up, *others, **options: activation.why_slower(_hidden(x, up))

FORMS = (
    Form("hopper", functools.partial(_in_parts, fused=True), "sm_90a", why_not),
    Form("general", _in_parts, "sm_80", _parts_why_not, _parts_why_slower),
    Form("xla", _in_parts),
)
FP8 = Form("general", _fp8_whole, "sm_89", fp8_why_not), Form("xla", _in_parts)
