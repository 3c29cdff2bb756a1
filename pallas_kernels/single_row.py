"""Linear layers of a single row, with the norm before and the activation and sum after: row_linear.

    y = activation(norm(x) W + bias) + residual,   W (K, N) stored as its transpose (N, K)

A model that generates one row waits for memory, and for its kernels to start.  So this op computes
everything around a matmul in one kernel, and reads W at memory's speed: each warp requests all its
bytes of W before it looks at x.  Several matrices may share x (q, k and v).

    block        4 r rows of W, all of one matrix; for swiglu of both
    warpgroup    1 / wgs of K; its four warps have r rows each
    lane         16 bytes of every 512 of a row, all of them in flight at once

    W   (4, K / wgs) of bfloat16, r times  -> registers ----------------> sums over a warp
    x   all K, by each warp                -> mean, variance -> norm(x) ---^

Every warp computes the norm again, while its bytes of W are on their way: a separate kernel would
take longer.  All sums are in float32 and in a fixed order, so two runs are equal bit for bit.

Packed weights (K, N) have the kernel of quantized/gemv.py, with the same parts.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations.activation import finished, gelu_reference, swiglu_reference
from pallas_kernels.dispatch import Form
from pallas_kernels.norms.norm import normed_in_jnp
from pallas_kernels.options import checked
from pallas_kernels.quantized import gemv
from pallas_kernels.quantized.formats import QuantizedWeight, dequantize

Activation = Literal["gelu", "swiglu"]

_SPAN = 256  # columns that a warp loads at once: 16 bytes for each lane
_LINES = 4  # warps of a warpgroup, each with a row
_LAYOUT = mosaic.warp_rows(8)
_ALONG_K, _BY_ROW = _LAYOUT.reduce(0), _LAYOUT.reduce(1)
_LOADS = 16  # of 16 bytes for each lane: 64 registers
_FEW = 4  # loads of a row, if enough warpgroups can share it
_WGS = 8  # 1,024 threads
_LARGE = 16 << 20  # bytes of the weights
_NORMED = 8192  # the largest K of a norm, which each warp has in registers


@checked
def row_linear(
    x: Float[Array, "*ones K"],
    weights: Sequence[Float[Array, "_ K"] | QuantizedWeight],
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    *,
    norm_weight: Float[Array, " K"] | None = None,
    norm_bias: Float[Array, " K"] | None = None,
    norm_eps: float = 1e-5,
    centered: bool = True,
    activation: Activation | None = None,
    residual: Float[Array, "*ones N"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "*ones _"], ...]:
    """activation(norm(x) W + bias) + residual of one row x for each W, in the dtype of W.

    weights: transposed, (N, K), or packed ones of (K, N), whose results have the dtype of x; N may
        differ.
    biases: one for each weight, or None.
    norm_weight, norm_bias, norm_eps: of the norm of x, as in `layer_norm`; without a weight there
        is no norm.
    centered: False: an RMS norm, which does not subtract the mean.
    activation: None, "gelu" (its tanh form) or "swiglu": silu(x W_0) (x W_1) is the only result.
    residual: added to the only result, which then has its dtype.

    Norm, sums, bias and activation are in float32, and are rounded once; with packed weights
    norm(x) is rounded to x's dtype, too.  The kernel has no gradient.
    """
    weights = tuple(weights)
    biases = (None,) * len(weights) if biases is None else tuple(biases)
    _check(x, weights, biases, norm_weight, norm_bias, activation, residual)
    norm = None if norm_weight is None else (norm_weight, norm_bias)
    options = dict(norm=norm, eps=norm_eps, centered=centered, activation=activation)
    options |= dict(residual=residual)
    return dispatch.run("row_linear", FORMS, implementation, x, weights, biases, **options)


def _rows(x, weights, biases, *, residual, kernel=True, **options):
    options |= dict(residual=None if residual is None else residual.reshape(-1))
    arrays = x.reshape(-1), weights, biases
    if kernel and _packed(weights):
        ys = gemv.products(*arrays, tuple(_dtypes(x, weights, residual)), **options)
    else:
        ys = (_kernel if kernel else _in_jnp)(*arrays, **options)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


def why_not(x, weights, biases=None, *, norm=None, **options) -> str | None:
    k = x.shape[-1]
    if _packed(weights):
        if x.dtype != jnp.bfloat16:
            return f"x is {x.dtype}, not bfloat16"
        if len({(w.format, w.bits, w.group, w.offsets is None) for w in weights}) > 1:
            return "the weights have several formats"
        return gemv.why_no_norm(k, weights[0]) if norm else None
    named = {f"weights[{i}]": w for i, w in enumerate(weights)}
    reason = mosaic.unsupported_dtype(x=x, **named) or mosaic.mixed_dtypes(**named)
    for w in weights:
        reason = reason or mosaic.not_a_multiple(_LINES, N=w.shape[0])
    if reason := reason or mosaic.not_a_multiple(_SPAN, K=k):
        return reason
    if norm and k > _NORMED:
        return f"K={k} is more than {_NORMED} with a norm"
    if not _warpgroups(k, weights[0].dtype):
        return f"K={k} does not divide into at most {_WGS} parts for registers"
    return None


def _packed(weights) -> bool:
    return isinstance(weights[0], QuantizedWeight)


def why_slower(x, weights, *biases, **options) -> str | None:
    """Why XLA's sums are faster, or None: they read large matrices at more of memory's bandwidth.

    On an H100 67 MB take 26 us here and 22 in XLA, whose norm and SwiGLU take 4 us more; 34 MB with
    a residual 13 and 11 us; but 5 MB with a norm and GELU take 3.6 us here, and 5.4 in XLA.
    """
    if _packed(weights):
        return None
    size = sum(w.size * w.dtype.itemsize for w in weights)
    return f"XLA reads more than {_LARGE >> 20} MB at more of its speed" if size > _LARGE else None


def pays(dtype, weights, *, norm: bool, implementation: dispatch.Implementation | None) -> bool:
    """Whether the kernel takes one row of this dtype, and XLA would not be faster without it."""
    k = weights[0].shape[0 if _packed(weights) else 1]
    x = jax.ShapeDtypeStruct((k,), dtype)
    reason = why_not(x, weights, norm=norm or None) or why_slower(x, weights)
    return reason is None and implementation != "xla"


def _check(x, weights, biases, norm_weight, norm_bias, activation, residual):
    if not x.ndim or math.prod(x.shape[:-1]) != 1:
        raise ValueError(f"x has shape {x.shape}, which is not a single row")
    if not weights:
        raise ValueError("weights is empty: row_linear needs at least one")
    if len({isinstance(w, QuantizedWeight) for w in weights}) > 1:
        raise ValueError("some weights are packed and some are not")
    if len(biases) != len(weights):
        raise ValueError(f"there are {len(biases)} biases for {len(weights)} weights")
    k, packed = x.shape[-1], _packed(weights)
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        if packed:
            w.check()
        if len(w.shape) != 2 or w.shape[0 if packed else 1] != k:
            need = f"({k}, N)" if packed else f"(N, {k})"
            raise ValueError(f"weights[{i}] has shape {w.shape}, but x needs {need}")
        _check_shape(f"biases[{i}]", b, (w.shape[packed],))
    shapes = {w.shape for w in weights}
    if activation == "swiglu" and (len(weights) != 2 or len(shapes) != 1):
        raise ValueError(f"swiglu needs two weights of one shape, not {sorted(shapes)}")
    _check_shape("norm_weight", norm_weight, (k,))
    _check_shape("norm_bias", norm_bias, (k,))
    if norm_bias is not None and norm_weight is None:
        raise ValueError("norm_bias needs a norm_weight")
    if residual is not None and len(weights) > 1 and activation != "swiglu":
        raise ValueError(f"a residual needs one result, not {len(weights)}")
    _check_shape("residual", residual, (*x.shape[:-1], weights[0].shape[packed]))


def _check_shape(name: str, a, need: tuple) -> None:
    if a is not None and a.shape != need:
        raise ValueError(f"{name} has shape {a.shape}, but needs {need}")


def _in_jnp(x, weights, biases, *, norm, eps, centered, activation, residual):
    given, dtype = x, mosaic.stat_dtype(x.dtype)
    x = x.astype(dtype)
    if norm is not None:
        weight, bias = norm
        x, _ = normed_in_jnp(x, weight, bias, None, None, None, centered=centered, eps=eps)
    if _packed(weights):
        x = mosaic.rounded(x, given.dtype)
        ys = [jnp.matmul(x, dequantize(w, dtype), precision="highest") for w in weights]
    else:
        ys = [(w.astype(dtype) * x).sum(-1) for w in weights]
    ys = [mosaic.plus(y, b) for y, b in zip(ys, biases, strict=True)]
    if activation == "gelu":
        ys = [gelu_reference(y) for y in ys]
    elif activation == "swiglu":
        ys = [swiglu_reference(*ys)]
    ys[0] = mosaic.plus(ys[0], residual)
    return tuple(y.astype(t) for y, t in zip(ys, _dtypes(given, weights, residual), strict=False))


def _dtypes(x, weights, residual) -> list:
    own = [x.dtype if _packed(weights) else w.dtype for w in weights]
    return own if residual is None else [residual.dtype]


# ---- kernel ----------------------------------------------------------------------------------


class SingleRowPlan(NamedTuple):
    """How a call is split; see the picture."""

    rows: int  # r, of a warp
    wgs: int
    k: int
    eps: float
    centered: bool
    activation: Activation | None

    @property
    def lines(self) -> int:
        """The rows of W of a block."""
        return _LINES * self.rows

    @property
    def share(self) -> int:
        """The columns of a warpgroup."""
        return self.k // self.wgs


def _warpgroups(k: int, dtype) -> dict[int, int]:
    """The numbers of warpgroups that can divide K, each with a lane's loads of a row."""
    spans, size = k // _SPAN, dtype.itemsize // 2  # loads of a span
    most = lambda n: _LOADS if n <= 4 else _LOADS // 2  # of 1,024 threads each has 64 registers
    even = [n for n in range(1, _WGS + 1) if spans % n == 0]
    return {n: loads for n in even if (loads := spans // n * size) <= most(n)}


def plan(k: int, sizes: Sequence[int], dtype, eps, centered, activation) -> SingleRowPlan:
    """sizes: N of each weight."""
    fit = _warpgroups(k, dtype)
    wgs = next((n for n, loads in fit.items() if loads <= _FEW), max(fit))
    pairs = wgs == 1 and fit[wgs] * (4 if activation == "swiglu" else 2) <= _LOADS
    rows = 2 if pairs and not any(n % (2 * _LINES) for n in sizes) else 1
    return SingleRowPlan(rows, wgs, k, eps, centered, activation)


# Traced and lowered once for all layers.
@jax.jit(static_argnames=("eps", "centered", "activation"))
def _kernel(x, weights, biases, *, norm, eps, centered, activation, residual):
    p = plan(x.size, [len(w) for w in weights], weights[0].dtype, eps, centered, activation)
    # The parts: matrices of the same rows, whose result is one array.
    pairs = list(zip(weights, biases, strict=True))
    parts = [pairs] if activation == "swiglu" else [[pair] for pair in pairs]
    rows, dtypes = [len(part[0][0]) for part in parts], _dtypes(x, weights, residual)
    types = [jax.ShapeDtypeStruct((n,), t) for n, t in zip(rows, dtypes, strict=False)]
    scratch = dict(
        sums_smem=plgpu.SMEM((p.wgs, p.rows, len(parts[0]), _LINES), jnp.float32),
        bar=plgpu.Barrier(num_arrivals=p.wgs),
    )
    return mosaic.launch_parts(
        "row_linear", functools.partial(_part, p), p.wgs, scratch if p.wgs > 1 else {},
        [n // p.lines for n in rows], types, x, parts, norm, residual,
    )  # fmt: skip


def _part(p: SingleRowPlan, refs, n):
    weights, biases = zip(*refs.weights, strict=True)
    first, wg = n * p.lines, lax.axis_index("wg")
    columns = pl.ds(wg * p.share, p.share)
    at = [pl.ds(first + _LINES * i, _LINES) for i in range(p.rows)]
    by_row = lambda ref: [None if ref is None else mosaic.load(ref.at[r], _BY_ROW) for r in at]
    # These are the first instructions, so that the bytes arrive while x is normalised.
    tiles = [[mosaic.read(ref.at[rows, columns], _LAYOUT) for ref in weights] for rows in at]
    others = [by_row(ref) for ref in (refs.residual, *biases)]
    x = _normed(p, refs.x, refs.norm, columns)
    sums = [[jnp.sum(w.astype(jnp.float32) * x, axis=1) for w in tile] for tile in tiles]

    def finish(sums):
        for rows, ys, residual, *biases in zip(at, sums, *others, strict=True):
            mosaic.store(refs.out.at[rows], finished(p.activation, ys, biases, residual))

    if p.wgs == 1:
        finish(sums)
        return
    places = [(i, j) for i in range(p.rows) for j in range(len(weights))]
    for i, j in places:
        mosaic.store(refs.sums_smem.at[wg, i, j], sums[i][j])
    plgpu.barrier_arrive(refs.bar)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(refs.bar)
        part = lambda w, *place: mosaic.load(refs.sums_smem.at[w, *place], _BY_ROW)
        total = lambda *place: functools.reduce(jnp.add, [part(w, *place) for w in range(p.wgs)])
        finish([[total(i, j) for j in range(len(weights))] for i in range(p.rows)])


def _normed(p: SingleRowPlan, x_ref, norm, columns):
    """norm(x) of some columns, once for each warp: (4, columns) float32."""
    spread = lambda v: plgpu.layout_cast(mosaic.along(v, (_LINES, v.shape[0]), 1), _LAYOUT)
    own = lambda ref: spread(mosaic.load(ref.at[columns], _ALONG_K))
    if norm is None:
        return own(x_ref)
    shares = [pl.ds(i * p.share, p.share) for i in range(p.wgs)]
    whole = [spread(mosaic.load(x_ref.at[at], _ALONG_K)) for at in shares] if p.wgs > 1 else []
    x = own(x_ref)
    whole = whole or [x]
    mean_of = lambda terms: jnp.sum(functools.reduce(jnp.add, terms), axis=1) * (1 / p.k)
    if p.centered:
        mean = mosaic.along(mean_of(whole), x.shape, 0)
        whole, x = [a - mean for a in whole], x - mean
    scale = lax.rsqrt(mean_of([a * a for a in whole]) + p.eps)
    weight, bias = norm
    x = x * mosaic.along(scale, x.shape, 0) * own(weight)
    return x if bias is None else x + own(bias)


_ON_XLA = Form("xla", functools.partial(_rows, kernel=False))
FORMS = Form("general", _rows, "sm_80", why_not, why_slower), _ON_XLA
