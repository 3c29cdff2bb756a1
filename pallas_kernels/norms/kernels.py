"""The kernels of layer norm and RMS norm.

They read every row once, compute one or two means over it, and write a row of the same width.  The
backward kernels also sum over all rows for dweight and dbias.  They are bound by memory, so they
must keep enough copies in flight: blocks are persistent, each takes every `programs`-th tile of
rows, and `stream` moves several tiles through shared memory at once (tiles.py defines the tiling):

    slot 0   | tile i                 wait for bars[0], compute in place, copy back |
    slot 1   | tile i + programs      arriving on bars[1]                           |
    slot 2   | tile i + 2 programs    arriving on bars[2]                           |

    forward    x (, residual)  ->  statistics  ->  y (, s)
    backward   x, dy (, ds)  ->  n, g  ->  means of g, g n  ->  dx;  sums over the rows in registers

For narrow rows the forward pass is faster without TMA, with many small blocks of one tile each.
Weights have one row (C,) for all heads or one for each of H heads; a program handles one head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.norms.tiles import (
    LINES,
    Ring,
    Tiling,
    choose_tiling,
    fetch_weights,
    ring_types,
    stream,
)

_SUM_COLS = 32  # columns of a block that sums over the programs


class Norm(NamedTuple):
    """A norm of the rows of x, as functions of register arrays.

    statistics(tiling, x, eps): from x(chunk), one number for each line.
    normalise(tiling, x, *statistics): n.
    differentiate(tiling, n, g, means, *statistics): dx from g = weight dy and the row means of
    averaged(n, g).
    """

    name: str
    statistics: Callable
    normalise: Callable
    averaged: Callable
    differentiate: Callable
    count: int  # number of statistics


# ---- forward -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers
def _forward(kind, eps, x, residual, weight, bias):
    """y = n weight + bias for the rows of x, or of s = x + residual, in one pass over memory.

    Returns y, s (None without a residual) and the statistics, float32 (heads, sets of rows, 4).
    """
    shape = x.shape
    name = f"{kind.name}_forward" if residual is None else f"add_{kind.name}_forward"
    x, residual, weight, bias = _flatten(x, (weight, bias), (x, residual))
    streams, weights = _given(x=x, residual=residual), _given(weight=weight, bias=bias)
    t = choose_tiling("forward", x.shape, streams, weights)
    like = lambda a: jax.ShapeDtypeStruct(t.view_shape, a.dtype)
    stat = jax.ShapeDtypeStruct((t.heads, t.tiles * t.groups, LINES), jnp.float32)
    y, s, stats = _kernel(
        functools.partial(_forward_tiles if t.slots else _forward_tile, kind, eps, t),
        name,
        t,
        [like(x), None if residual is None else like(residual), (stat,) * kind.count],
        ring_types(t, streams, weights) if t.slots else {},
    )(*jax.tree.map(t.view, (x, residual, weight, bias)))
    y, s = jax.tree.map(lambda a: t.unview(a).reshape(shape), (y, s))
    return (y, s), stats


def _forward_tile(
    kind, eps, t: Tiling, x_ref, residual_ref, weight_ref, bias_ref, y_ref, s_ref, stat_refs
):
    """A block without TMA normalises one tile from global memory to global memory."""
    tile, head = lax.axis_index("program"), lax.axis_index("head")
    rows_of = lambda ref: ref.at[pl.ds(tile * t.tile, t.tile), head]
    source = jax.tree.map(rows_of, _given(x=x_ref, residual=residual_ref))
    result = jax.tree.map(rows_of, _given(x=y_ref, residual=s_ref))
    weights = {k: ref.at[head] for k, ref in _given(weight=weight_ref, bias=bias_ref).items()}
    _normalise(kind, eps, t, tile, source, result, weights, stat_refs)


def _forward_tiles(
    kind, eps, t: Tiling, x_ref, residual_ref, weight_ref, bias_ref, y_ref, s_ref, stat_refs,
    *, bars, weight_bar, **smem,
):  # fmt: skip
    """A persistent block overwrites each of its tiles with the result in shared memory."""
    streams, weights = (
        _given(x=x_ref, residual=residual_ref),
        _given(weight=weight_ref, bias=bias_ref),
    )
    ring = Ring(streams, weights, _given(x=y_ref, residual=s_ref), smem, bars, weight_bar)
    fetch_weights(t, ring)
    part = lax.axis_index("part")

    def step(slot, tile, carry):
        rows = {k: smem[k].at[part, slot] for k in streams}
        of_part = {k: smem[k].at[part] for k in weights}
        _normalise(kind, eps, t, tile, rows, rows, of_part, stat_refs)
        return carry

    stream(t, ring, step, 0)


def _normalise(kind, eps, t: Tiling, tile, source, result, weights, stat_refs):
    """Normalises a tile from the refs in `source` to those in `result`, which may be the same."""
    for group in range(t.groups):
        at = lambda refs, k, c, group=group: t.lines(refs[k], group, c)
        load = lambda k, at=at: [mosaic.load(at(source, k, c), t.layout) for c in t.chunks]

        # Load x and add the residual.
        data = load("x")
        for c, r in enumerate(load("residual") if "residual" in source else ()):
            s = (data[c] + r).astype(source["residual"].dtype)  # y is the norm of the rounded s
            mosaic.store(at(result, "residual", c), s)
            data[c] = s.astype(jnp.float32)

        # Compute and save the statistics.
        stats = kind.statistics(t, data.__getitem__, eps)
        for ref, value in zip(stat_refs, stats, strict=True):
            mosaic.store(ref.at[lax.axis_index("head"), tile * t.groups + group], value)

        # Normalise and store.
        for c in t.chunks:
            y = kind.normalise(t, data[c], *stats)
            y = y * t.weight(weights["weight"], c) if "weight" in weights else y
            y = y + t.weight(weights["bias"], c) if "bias" in weights else y
            mosaic.store(at(result, "x", c), y)


# ---- backward ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def _backward(kind, x, stats, dy, ds, weight, bias, x_bias):
    """Gradients of `_forward` in one pass over memory and a small one over the programs' sums.

    With a residual, x is s and ds is the gradient of s; the gradient of x_bias is the sum of
    dx + ds over the rows, which would cost XLA another pass over memory.
    Returns dx (+ ds) in x's dtype; the gradients of weight, bias and x_bias in theirs (or None).
    """
    name = f"{kind.name}_backward" if ds is None else f"add_{kind.name}_backward"
    shape, original = x.shape, _given(weight=weight, bias=bias, x_bias=x_bias)
    x, dy, ds, weight, bias, x_bias = _flatten(x, (weight, bias, x_bias), (x, dy, ds))
    streams, weights = _given(x=x, dy=dy, ds=ds), _given(weight=weight)
    summed = _given(weight=weight, bias=bias, x_bias=x_bias)
    t = choose_tiling("backward", x.shape, streams, weights)
    # If these tiles are larger than the forward pass's, the rows past the last have no statistics.
    # Zeros keep n finite there.
    missing = max(t.tiles * t.groups - stats[0].shape[1], 0)
    if missing:
        stats = tuple(jnp.pad(a, ((0, 0), (0, missing), (0, 0))) for a in stats)
    sums = (t.heads, t.programs + -t.programs % LINES, t.parts * t.blocks, t.block)
    n_means = t.groups * len(kind.averaged(1.0, 1.0))
    dx, sums = _kernel(
        functools.partial(_backward_tiles, kind, t, tuple(summed)),
        name,
        t,
        [
            jax.ShapeDtypeStruct(t.view_shape, x.dtype),
            (jax.ShapeDtypeStruct(sums, jnp.float32),) * len(summed),
        ],
        ring_types(t, streams, weights)
        | dict(
            lines_smem=plgpu.SMEM((LINES, t.block), jnp.float32),
            means_smem=plgpu.SMEM((t.slots, n_means, t.parts, LINES), jnp.float32),
            means_bar=plgpu.Barrier(num_arrivals=t.parts),
        ),
    )(*jax.tree.map(t.view, (x, dy, ds, weight)), tuple(stats))
    dweights = dict(zip(summed, _sum_programs(name, t, summed, sums), strict=True))
    dweights = {k: a.reshape(original[k].shape) for k, a in dweights.items()}
    return t.unview(dx).reshape(shape), *map(dweights.get, ("weight", "bias", "x_bias"))


def _backward_tiles(
    kind, t: Tiling, summed, x_ref, dy_ref, ds_ref, weight_ref, stat_refs, dx_ref, sum_refs,
    *, bars, weight_bar, lines_smem, means_smem, means_bar, **smem,
):  # fmt: skip
    """A persistent block computes dx of its tiles, and the sums over their rows in `summed`."""
    streams, weights = _given(x=x_ref, dy=dy_ref, ds=ds_ref), _given(weight=weight_ref)
    ring = Ring(streams, weights, {"x": dx_ref}, smem, bars, weight_bar)
    fetch_weights(t, ring)
    program, head, part = (lax.axis_index(axis) for axis in ("program", "head", "part"))
    load_stats = lambda tile: [
        [mosaic.load(r.at[head, tile * t.groups + g], t.layout.reduce(1)) for r in stat_refs]
        for g in range(t.groups)
    ]

    def step(slot, tile, carry):
        stats, totals = carry
        # Load the next tile's statistics now: they do not come by TMA.
        ahead = load_stats(jnp.minimum(tile + t.programs, t.tiles - 1))
        rows = {k: smem[k].at[part, slot] for k in streams}
        weight = smem["weight"].at[part] if weights else None
        now = _Tile(kind, t, rows, weight, stats)
        kept, averaged = _first_pass(now, totals)
        means = _row_means(t, averaged, means_smem.at[slot], means_bar)
        _second_pass(now, kept, means, totals)
        return ahead, totals

    carry = load_stats(program), {k: t.zeros() for k in summed}
    _, totals = stream(t, ring, step, carry)
    for k, ref in zip(summed, sum_refs, strict=True):
        _store_sums(t, totals[k], lines_smem, ref.at[head, program])


class _Tile(NamedTuple):
    """A tile of the backward pass in shared memory."""

    kind: Norm
    t: Tiling
    rows: dict[str, Any]  # x, dy and perhaps ds; dx overwrites x
    weight: Any  # or None
    stats: list  # for each set of rows, in registers

    def load(self, k, group, c):
        return mosaic.load(self.t.lines(self.rows[k], group, c), self.t.layout)

    def operands(self, group, c):
        """n, g and dy of a chunk."""
        n = self.kind.normalise(self.t, self.load("x", group, c), *self.stats[group])
        g = dy = self.load("dy", group, c)
        if self.weight is not None:
            g = dy * self.t.weight(self.weight, c)
        return n, g, dy


def _first_pass(now: _Tile, totals):
    """(n and g of each chunk if the tiling keeps them, the terms of the row means)."""
    kept, averaged = {}, []
    for group in range(now.t.groups):
        terms = []
        for c in now.t.chunks:
            n, g, dy = now.operands(group, c)
            if now.t.keeps_operands:
                _add(totals, c, n, dy)
                kept[group, c] = n, g
            terms.append(now.kind.averaged(n, g))
        averaged.append([functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)])
    return kept, averaged


def _second_pass(now: _Tile, kept, means, totals):
    """Overwrites x with dx."""
    for group in range(now.t.groups):
        for c in now.t.chunks:
            if now.t.keeps_operands:
                n, g = kept[group, c]
            else:
                n, g, dy = now.operands(group, c)
                _add(totals, c, n, dy)
            dx = now.kind.differentiate(now.t, n, g, means[group], *now.stats[group])
            if "ds" in now.rows:
                dx = dx + now.load("ds", group, c)
            if "x_bias" in totals:
                totals["x_bias"][c] += dx
            mosaic.store(now.t.lines(now.rows["x"], group, c), dx)


def _add(totals, c, n, dy):
    """Adds a chunk of rows to the sums for dweight and dbias, if they are needed."""
    if "weight" in totals:
        totals["weight"][c] += dy * n
    if "bias" in totals:
        totals["bias"][c] += dy


def _row_means(t: Tiling, averaged, means_smem, means_bar):
    """The row means of `averaged`, lists of register arrays for each set of rows.

    The warps of a wide row synchronise once for all means.  Each slot has its own means_smem, so a
    warp that is a step ahead overwrites nothing.
    """
    sums = [jnp.sum(x, axis=1) for group in averaged for x in group]
    if t.wide:
        for i, x in enumerate(sums):
            mosaic.store(means_smem.at[i, lax.axis_index("part")], x)
        plgpu.commit_smem()
        if t.parts > 1:
            plgpu.barrier_arrive(means_bar)
            plgpu.barrier_wait(means_bar)
        warps = [(part, warp) for part in range(t.parts) for warp in range(LINES)]
        sums = [t.every_line(sum(means_smem[i, *at] for at in warps)) for i in range(len(sums))]
    means = iter([x / t.cols for x in sums])
    return [[next(means) for _ in group] for group in averaged]


def _store_sums(t: Tiling, total, lines_smem, ref):
    """Writes the sums over this program's rows to ref (blocks, block)."""
    for c in t.chunks:
        if t.wide:
            first = lax.axis_index("part") * t.blocks + c * LINES
            mosaic.store(ref.at[pl.ds(first, LINES)], total[c])
            continue
        mosaic.store(lines_smem, total[c])  # the four warps hold different rows
        plgpu.commit_smem()
        value = sum(mosaic.load(lines_smem.at[i], t.layout.reduce(0)) for i in range(LINES))
        plgpu.commit_smem()
        mosaic.store(ref.at[c], value)


def _sum_programs(name, t: Tiling, summed, sums):
    """Sums (heads, programs, blocks, block) over the programs, always in the same order."""
    if not sums:
        return []
    n, cols = sums[0].shape[1], t.parts * t.blocks * t.block
    out = mosaic.kernel(
        functools.partial(_sum_columns, t),
        name=f"{name}_sum",
        out_type=[tuple(jax.ShapeDtypeStruct((t.heads, cols), w.dtype) for w in summed.values())],
        **mosaic.grid(column=cols // _SUM_COLS, head=t.heads, which=len(sums)),
    )([a.reshape(t.heads, n, cols) for a in sums])
    return [a[:, : t.cols] for a in out[0]]


def _sum_columns(t: Tiling, sources, targets):
    """A block sums some columns of one array over the programs."""
    shape, layout = (sources[0].shape[1], _SUM_COLS), mosaic.warp_rows(1)
    which, head = lax.axis_index("which"), lax.axis_index("head")
    columns = pl.ds(lax.axis_index("column") * _SUM_COLS, _SUM_COLS)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):

        @pl.when(which == i)
        def _(source=source, target=target):
            # All loads are in flight at once, because only latency matters here.
            values = mosaic.load(source.at[head, :, columns], layout)
            values = jnp.where(row < t.programs, values, 0.0)  # the other rows were never written
            mosaic.store(target.at[head, columns], jnp.sum(values, axis=0))


def _kernel(body, name, t: Tiling, out_type, scratch_types):
    return mosaic.kernel(
        body,
        name=name,
        out_type=out_type,
        scratch_types=scratch_types,
        **mosaic.grid(program=t.programs, head=t.heads),
        num_threads=t.parts,
        thread_name="part",
        # A barrier at every load and store is too slow.  A lane overwrites only what it has read
        # itself; commit_smem, barrier_wait and the reductions synchronise warps and copies.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


def _flatten(x, weights, arrays) -> tuple[Any, ...]:
    """Reshapes `arrays` (of x's shape) to (rows, heads, cols) and `weights` to (heads, cols)."""
    heads = next((w.shape[0] for w in weights if w is not None and w.ndim == 2), 1)
    shape = (x.size // (heads * x.shape[-1]), heads, x.shape[-1])
    arrays = [a if a is None else a.reshape(shape) for a in arrays]
    return *arrays, *(w if w is None else w.reshape(shape[1:]) for w in weights)


def _given(**arrays):
    return {k: a for k, a in arrays.items() if a is not None}


# ---- both --------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm(kind: Norm, eps, x, residual, weight, bias, x_bias=None):
    """(y, s): y = n weight + bias for the rows of x (then s is None) or of s = x + residual.

    x_bias needs a residual: s = (x + x_bias) + residual.
    """
    return _save(kind, eps, x, residual, weight, bias, x_bias)[0]


def _save(kind, eps, x, residual, weight, bias, x_bias):
    if x_bias is not None:
        x = x + x_bias.astype(x.dtype)  # XLA fuses this with the matmul that makes x
    (y, s), stats = _forward(kind, eps, x, residual, weight, bias)
    return (y, s), (x if s is None else s, stats, weight, bias, x_bias)


def _gradients(kind, _, saved, cotangents):
    (dy, ds), (x, stats, *weights) = cotangents, saved
    dx, *dweights = _backward(kind, x, stats, dy, ds, *weights)
    return dx.astype(dy.dtype), None if ds is None else dx, *dweights


norm.defvjp(_save, _gradients)
