"""Rows of a matrix streamed through shared memory: what layer norm and RMS norm share.

An op here reads every row once, needs one or two means over each row, and writes rows of the same
width; backward it also sums over all rows for dweight and dbias.  Nothing but bytes costs time, so
all that matters is to keep enough copies in flight.  Each block is persistent: it takes every
`programs`-th tile of rows, with several tiles on their way through TMA, overwrites the tile in
shared memory with its result, and lets TMA write that back while it works on the next one.  Narrow
rows are quicker forward without TMA, a small block for every tile, of which an SM holds many.

How rows are cut into tiles, lines and registers is in tiles.py.  Weights may be one row (C,) for
all, or one for each of H heads; a program works for one head only.
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
from pallas_kernels.norms.tiles import LINES, Plan, plan

_SUM_COLS = 32  # columns that one block of the sum over programs takes


class Norm(NamedTuple):
    """A norm of the rows of x, as functions of register arrays of some columns.

    statistics(plan, x, eps) are those of x(chunk), one number for each line.
    normalise(plan, x, *statistics) is n.
    With g = weight dy, differentiate(plan, n, g, means, *statistics) is dx, which takes the row
    means of averaged(n, g).
    """

    name: str
    statistics: Callable
    normalise: Callable
    averaged: Callable
    differentiate: Callable
    count: int  # of the statistics


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def norm(kind: Norm, eps, x, residual, weight, bias, x_bias=None):
    """(y, s): y = n weight + bias for the rows of x, or of s = x + residual (else s is None).

    With x_bias, which only goes with a residual, s = (x + x_bias) + residual.
    """
    return _save(kind, eps, x, residual, weight, bias, x_bias)[0]


def _save(kind, eps, x, residual, weight, bias, x_bias):
    if x_bias is not None:
        x = x + x_bias.astype(x.dtype)  # by XLA, within the matmul that makes x
    (y, s), stats = _forward(kind, eps, x, residual, weight, bias)
    return (y, s), (x if s is None else s, stats, weight, bias, x_bias)


def _gradients(kind, _, saved, cotangents):
    (dy, ds), (x, stats, *weights) = cotangents, saved
    dx, *dweights = _backward(kind, x, stats, dy, ds, *weights)
    return dx.astype(dy.dtype), None if ds is None else dx, *dweights


norm.defvjp(_save, _gradients)


def _flatten(x, weights, arrays) -> tuple[Any, ...]:
    """Every array of x's shape as (rows, heads, cols), and the weights as (heads, cols)."""
    heads = next((w.shape[0] for w in weights if w is not None and w.ndim == 2), 1)
    shape = (x.size // (heads * x.shape[-1]), heads, x.shape[-1])
    arrays = [a if a is None else a.reshape(shape) for a in arrays]
    return *arrays, *(w if w is None else w.reshape(shape[1:]) for w in weights)


def _given(**arrays):
    return {k: a for k, a in arrays.items() if a is not None}


def _deal(refs, *names):
    """Deals a flat list of refs out to one dictionary for each list of names."""
    refs = iter(refs)
    return [{k: next(refs) for k in group} for group in names]


def _buffers(p: Plan, streams, weights):
    """Shared memory for the tiles in flight and for the weights; each part has its own."""
    for a in streams.values():
        yield plgpu.SMEM((p.parts, p.slots, p.tile, p.blocks, p.block), a.dtype)
    for a in weights.values():
        yield plgpu.SMEM((p.parts, p.blocks, p.block), a.dtype)


def _barriers(p: Plan, streams, weights):
    """One for each slot, on which all its streams arrive, and one for the weights."""
    yield plgpu.Barrier(num_arrivals=len(streams), num_barriers=p.parts * p.slots)
    yield plgpu.Barrier(num_arrivals=max(len(weights), 1), num_barriers=p.parts)


def _columns(p: Plan):
    """The columns of this part.  0.12 refuses windows known to be too wide: start anywhere."""
    zero = lax.rem(lax.axis_index("head"), jnp.int32(1))
    return pl.ds(lax.axis_index("part") * p.blocks + zero, p.blocks), pl.ds(zero, p.block)


def _fetch_weights(p: Plan, source, buffer, weights, bar):
    """Copies this head's row of every weight (heads, blocks, block) to shared memory."""
    part = lax.axis_index("part")
    for k in weights:
        window = source[k].at[lax.axis_index("head"), *_columns(p)]
        plgpu.copy_gmem_to_smem(window, buffer[k].at[part], bar.at[part])


def _stream(p: Plan, step, carry, source, buffer, result, streams, weights, bars, weight_bar):
    """carry = step(slot, tile, carry) for every tile of this program, between its copies.

    `streams` are copied from source to buffer, slots - 1 tiles ahead of the step; whatever is in
    result is copied back from the buffer of that name after the step.
    """
    program, head, part = (lax.axis_index(axis) for axis in ("program", "head", "part"))
    steps = lax.div(p.tiles - 1 - program, jnp.int32(p.programs)) + 1
    slot_of = lambda i: lax.rem(i, jnp.int32(p.slots))
    tile_of = lambda i: program + i * p.programs
    window = lambda ref, i: ref.at[pl.ds(tile_of(i) * p.tile, p.tile), head, *_columns(p)]

    bar_of = lambda i: bars.at[part * p.slots + slot_of(i)]

    def fetch(i):
        for k in streams:
            slot = buffer[k].at[part, slot_of(i)]
            plgpu.copy_gmem_to_smem(window(source[k], i), slot, bar_of(i))

    for i in range(p.slots - 1):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i)))
    if weights:
        plgpu.barrier_wait(weight_bar.at[part])  # only now: the rows were not to wait for it

    def body(i, carry):
        slot = slot_of(i)
        plgpu.barrier_wait(bar_of(i))
        carry = step(slot, tile_of(i), carry)
        plgpu.commit_smem()
        for k, ref in result.items():
            plgpu.copy_smem_to_gmem(buffer[k].at[part, slot], window(ref, i))

        @pl.when(i + (p.slots - 1) < steps)
        def _():
            # The next tile replaces the last step's result; this step's may still be leaving.
            plgpu.wait_smem_to_gmem(len(result), wait_read_only=True)
            fetch(i + (p.slots - 1))

        return carry

    carry = lax.fori_loop(0, steps, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


def _kernel(body, name, p: Plan, out_type, scratch_types):
    body.__name__ = name
    return mosaic.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        **mosaic.grid(program=p.programs, head=p.heads),
        num_threads=p.parts,
        thread_name="part",
        # Every lane overwrites what it alone has read; between warps and copies stand the barriers
        # of commit_smem, barrier_wait and the reductions.  One at every load and store is too many.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all layers
def _forward(kind, eps, x, residual, weight, bias):
    """y = n weight + bias for the rows of x, or of s = x + residual, in one pass over memory.

    residual, weight and bias may be None.  Returns y in x's dtype, s in the residual's dtype (or
    None), and the statistics as float32 (heads, sets of rows, 4).
    """
    shape = x.shape
    name = f"{kind.name}_forward" if residual is None else f"add_{kind.name}_forward"
    x, residual, weight, bias = _flatten(x, (weight, bias), (x, residual))
    arrays = _given(x=x, residual=residual, weight=weight, bias=bias)
    streams, weights = _given(x=x, residual=residual), _given(weight=weight, bias=bias)
    p = plan("forward", x.shape, streams, weights)
    stats = [jax.ShapeDtypeStruct((p.heads, p.tiles * p.groups, LINES), jnp.float32)] * kind.count
    scratch_types = (
        [*_buffers(p, streams, weights), *_barriers(p, streams, weights)] if p.slots else []
    )

    def work(tile, source, result, weights, stat_refs):
        """From the tile's refs in source to those in result, which may be the same ones."""
        for group in range(p.groups):
            at = lambda refs, k, c, group=group: p.lines(refs[k], group, c)
            load = lambda k, at=at: [mosaic.load(at(source, k, c), p.layout) for c in p.chunks]
            data = load("x")
            if residual is not None:
                for c, r in enumerate(load("residual")):
                    s = (data[c] + r).astype(residual.dtype)  # y is the norm of the s returned
                    mosaic.store(at(result, "residual", c), s)
                    data[c] = s.astype(jnp.float32)
            values = kind.statistics(p, data.__getitem__, eps)
            for ref, value in zip(stat_refs.values(), values, strict=True):
                mosaic.store(ref.at[lax.axis_index("head"), tile * p.groups + group], value)
            for c in p.chunks:
                y = kind.normalise(p, data[c], *values)
                if weight is not None:
                    y = y * p.weight(weights["weight"], c)
                if bias is not None:
                    y = y + p.weight(weights["bias"], c)
                mosaic.store(at(result, "x", c), y)

    def body(*refs):
        scratch_names = (arrays, ["bars", "weight_bar"]) if p.slots else ()
        source, result, stat_refs, *scratch = _deal(
            refs, arrays, streams, range(kind.count), *scratch_names
        )
        if not scratch:
            tile, head = lax.axis_index("program"), lax.axis_index("head")
            rows_of = lambda ref: ref.at[pl.ds(tile * p.tile, p.tile), head]
            taken, made = ({k: rows_of(refs[k]) for k in streams} for refs in (source, result))
            work(tile, taken, made, {k: source[k].at[head] for k in weights}, stat_refs)
            return
        buffer, bars = scratch
        _fetch_weights(p, source, buffer, weights, bars["weight_bar"])
        part = lax.axis_index("part")

        def step(slot, tile, carry):
            rows = {k: buffer[k].at[part, slot] for k in streams}
            work(tile, rows, rows, {k: buffer[k].at[part] for k in weights}, stat_refs)
            return carry

        _stream(p, step, 0, source, buffer, result, streams, weights, **bars)

    (*out,) = _kernel(
        body,
        name,
        p,
        [jax.ShapeDtypeStruct(p.view_shape, a.dtype) for a in streams.values()] + stats,
        scratch_types,
    )(*(p.view(a) for a in arrays.values()))
    y, *s = (p.unview(a).reshape(shape) for a in out[: len(streams)])
    return (y, s[0] if s else None), tuple(out[len(streams) :])


@functools.partial(jax.jit, static_argnums=0)
def _backward(kind, x, stats, dy, ds, weight, bias, x_bias):
    """Gradients of `_forward` in one pass over memory, and a small one over the programs' sums.

    If there was a residual, x is s and ds its own gradient.  The gradient of x_bias is the sum of
    dx + ds over the rows, which XLA would have to read once more.
    Returns dx (+ ds) in x's dtype; those of weight, bias and x_bias in theirs (or None).
    """
    name = f"{kind.name}_backward" if ds is None else f"add_{kind.name}_backward"
    shape, original = x.shape, _given(weight=weight, bias=bias, x_bias=x_bias)
    x, dy, ds, weight, bias, x_bias = _flatten(x, (weight, bias, x_bias), (x, dy, ds))
    arrays = _given(x=x, dy=dy, ds=ds, weight=weight)
    streams, weights = _given(x=x, dy=dy, ds=ds), _given(weight=weight)
    sums = _given(weight=weight, bias=bias, x_bias=x_bias)
    p = plan("backward", x.shape, streams, weights)
    # Where these tiles are higher than those forward, rows past the last one have no statistics;
    # zeros, for n must be finite there.
    missing = max(p.tiles * p.groups - stats[0].shape[1], 0)
    if missing:
        stats = [jnp.pad(a, ((0, 0), (0, missing), (0, 0))) for a in stats]
    parts = (p.heads, p.programs + -p.programs % LINES, p.parts * p.blocks, p.block)

    def body(*refs):
        source, stat_refs, result, part_refs, buffer, scratch, meeting = _deal(
            refs,
            arrays,
            range(len(stats)),
            ["x"],
            sums,
            arrays,
            ["bars", "weight_bar"],
            ["lines", "means", "means_bar"],
        )
        stat_refs = stat_refs.values()
        _fetch_weights(p, source, buffer, weights, scratch["weight_bar"])
        program, head, part = (lax.axis_index(axis) for axis in ("program", "head", "part"))
        load_stats = lambda tile: [
            [mosaic.load(r.at[head, tile * p.groups + g], p.layout.reduce(1)) for r in stat_refs]
            for g in range(p.groups)
        ]

        def step(slot, tile, carry):
            values, total = carry
            # One tile ahead, for these few bytes come through no copy engine.
            ahead = load_stats(jnp.minimum(tile + p.programs, p.tiles - 1))
            at = lambda k, group, c: p.lines(buffer[k].at[part, slot], group, c)

            def operands(group, c):
                """n and g, and their dy."""
                n = kind.normalise(p, mosaic.load(at("x", group, c), p.layout), *values[group])
                g = dy = mosaic.load(at("dy", group, c), p.layout)
                if weight is not None:
                    g = dy * p.weight(buffer["weight"].at[part], c)
                return n, g, dy

            def add(c, n, dy):
                if weight is not None:
                    total["weight"][c] += dy * n
                if bias is not None:
                    total["bias"][c] += dy

            kept, averaged = {}, []
            for group in range(p.groups):
                parts = []
                for c in p.chunks:
                    n, g, dy = operands(group, c)
                    if p.keeps:
                        add(c, n, dy)
                        kept[group, c] = n, g
                    parts.append(kind.averaged(n, g))
                averaged.append([functools.reduce(jnp.add, x) for x in zip(*parts, strict=True)])
            means = _row_means(p, averaged, slot, meeting)
            for group in range(p.groups):
                for c in p.chunks:
                    if p.keeps:
                        n, g = kept[group, c]
                    else:
                        n, g, dy = operands(group, c)
                        add(c, n, dy)
                    d = kind.differentiate(p, n, g, means[group], *values[group])
                    if ds is not None:
                        d = d + mosaic.load(at("ds", group, c), p.layout)
                    if x_bias is not None:
                        total["x_bias"][c] += d
                    mosaic.store(at("x", group, c), d)
            return ahead, total

        carry = load_stats(program), {k: p.zeros() for k in sums}
        _, total = _stream(p, step, carry, source, buffer, result, streams, weights, **scratch)
        for k, ref in part_refs.items():
            _store_sums(p, total[k], meeting["lines"], ref.at[head, program])

    n_means = p.groups * len(kind.averaged(1.0, 1.0))
    (*out,) = _kernel(
        body,
        name,
        p,
        [jax.ShapeDtypeStruct(p.view_shape, x.dtype)]
        + [jax.ShapeDtypeStruct(parts, jnp.float32)] * len(sums),
        [
            *_buffers(p, streams, weights),
            *_barriers(p, streams, weights),
            plgpu.SMEM((LINES, p.block), jnp.float32),
            plgpu.SMEM((p.slots, n_means, p.parts, LINES), jnp.float32),
            plgpu.Barrier(num_arrivals=p.parts),
        ],
    )(*(p.view(a) for a in arrays.values()), *stats)
    dw = dict(zip(sums, _sum_programs(name, p, sums, out[1:]), strict=True))
    dw = {k: a.reshape(original[k].shape) for k, a in dw.items()}
    return p.unview(out[0]).reshape(shape), *map(dw.get, ("weight", "bias", "x_bias"))


def _row_means(p: Plan, sums, slot, meeting):
    """Row means for each set of rows, from lists of register arrays to be summed along the rows.

    The warps of a wide row meet once for all of them, in a place that changes with the slot, so
    that whoever is a step ahead overwrites nothing.
    """
    lines = [jnp.sum(x, axis=1) for group in sums for x in group]
    if p.wide:
        place = meeting["means"].at[slot]
        for i, x in enumerate(lines):
            mosaic.store(place.at[i, lax.axis_index("part")], x)
        plgpu.commit_smem()
        if p.parts > 1:
            plgpu.barrier_arrive(meeting["means_bar"])
            plgpu.barrier_wait(meeting["means_bar"])
        lines = [
            p.every_line(sum(place[i, part, w] for part in range(p.parts) for w in range(LINES)))
            for i in range(len(lines))
        ]
    means = iter([x / p.cols for x in lines])
    return [[next(means) for _ in group] for group in sums]


def _store_sums(p: Plan, total, lines, ref):
    """Writes the sums of this program's rows, chunk by chunk, to ref (blocks, block)."""
    for c in p.chunks:
        if p.wide:
            first = lax.axis_index("part") * p.blocks + c * LINES
            mosaic.store(ref.at[pl.ds(first, LINES)], total[c])
            continue
        mosaic.store(lines, total[c])  # the four warps hold different rows
        plgpu.commit_smem()
        layout = p.layout.reduce(0)
        value = sum(mosaic.load(lines.at[i], layout) for i in range(LINES))
        plgpu.commit_smem()
        mosaic.store(ref.at[c], value)


def _sum_programs(name, p: Plan, sums, parts):
    """Adds up (heads, programs, blocks, block) sums over the programs, always in one order."""
    if not parts:
        return []
    n = parts[0].shape[1]
    cols = p.parts * p.blocks * p.block
    shape, layout = (n, _SUM_COLS), mosaic.warp_rows(1)

    def body(*refs):
        which, head = lax.axis_index("which"), lax.axis_index("head")
        columns = pl.ds(lax.axis_index("column") * _SUM_COLS, _SUM_COLS)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        for i, (part, out) in enumerate(zip(refs[: len(parts)], refs[len(parts) :], strict=True)):

            @pl.when(which == i)
            def _(part=part, out=out):
                # All loads are in flight at once: this kernel is latency and nothing else.
                values = mosaic.load(part.at[head, :, columns], layout)
                values = jnp.where(row < p.programs, values, 0.0)  # the rest was never written
                mosaic.store(out.at[head, columns], jnp.sum(values, axis=0))

    body.__name__ = f"{name}_sum"
    out = mosaic.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((p.heads, cols), w.dtype) for w in sums.values()],
        **mosaic.grid(column=cols // _SUM_COLS, head=p.heads, which=len(parts)),
    )(*(a.reshape(p.heads, n, cols) for a in parts))
    return [a[:, : p.cols] for a in out]
