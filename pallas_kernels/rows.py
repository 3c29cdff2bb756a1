"""Rows of a matrix streamed through shared memory: what layer norm and RMS norm share.

An op here reads every row once, needs one or two means over each row, and writes rows of the same
width; backward it also sums over all rows for dweight and dbias.  Nothing but bytes costs time, so
all that matters is to keep enough copies in flight.  Each block is persistent: it takes every
`programs`-th tile of rows, with several tiles on their way through TMA, overwrites the tile in
shared memory with its result, and lets TMA write that back while it works on the next one.

A row lies in shared memory as blocks of up to 256 columns.  Registers hold (4, block) arrays, one
line for each warp: in a *narrow* row the four lines are the same columns of four rows, so that a
mean is five shuffles; in a *wide* row they are four blocks of one row, and the four warps meet in
shared memory.  Everything else is the same code.  Columns and rows that are missing at the edge are
filled with zeros by TMA on the way in and dropped on the way out.

Weights may be one row (C,) for all, or one for each of H heads; a program works for one head only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

LINES = 4  # lines of a register array: the warps of a warpgroup
SMS = 132  # of an H100; a constant, so that sums do not depend on the GPU they run on
MAX_COLS = 8192

_SMEM = 220 * 1024  # of 227 KB; the rest is for barriers and the scratch of reductions
_SUM_COLS = 32  # columns that one block of the sum over programs takes

# Tiles by direction and width: the first line whose width is enough.  Measured on an H100 80GB HBM3
# with JAX 0.11.2: layer norm, bfloat16 rows, float32 weight and bias, as shares of C = 2.94 TB/s (a
# copy in the same run).  In brackets what else was tried: (rows, slots, blocks on an SM).
_TILES = {
    "forward": [  # columns, wide, rows, slots, blocks on an SM
        (1024, False, 4, 2, 8),  # 32768x768: 0.91  [(8,4,2) 0.86, (8,2,6) 0.84, (16,4,2) 0.85]
        (2048, True, 2, 3, 5),  # 4096x1600: 0.94  [(2,4,2) 0.68, (2,4,4) 0.87, (2,2,6) 0.88]
        (4096, True, 2, 2, 3),  # 16384x4096: 0.92  [before awaiting the weights last 0.90;
        #                           then (1,2,4) 0.88, (1,4,3) 0.85, (1,5,2) 0.84]
        (MAX_COLS, True, 1, 4, 1),  # 8192x8192: 0.95  [(1,8,1) 0.90, (2,4,1) 0.85, (1,2,2) 0.80]
    ],
    "backward": [
        (1024, False, 4, 4, 2),  # 32768x768: 0.87  [(4,6,2) 0.86, (8,3,2) 0.88, (4,4,3) 0.87]
        (4096, True, 1, 4, 2),  # 16384x4096: 0.98  [2 rows 0.02 less]; 4096x1600, which has to take
        #                           2 rows: 0.72  [(2,2,4) 0.72, (4,2,3) 0.65, narrow 0.59]
        (MAX_COLS, True, 1, 2, 2),  # 8192x8192: 0.83  [(1,5,1) 0.79, (1,4,1) 0.77]
    ],
}
_SHORT = 2048  # elements up to which narrow tiles of short rows grow


class Plan(NamedTuple):
    """How a (rows, heads, cols) array is cut up; `rows` are those of each head."""

    rows: int
    heads: int
    cols: int  # columns that count
    width: int  # columns of the arrays that the kernel is given
    block: int  # columns of a line
    blocks: int  # blocks of a row in shared memory, those past `width` included
    wide: bool
    tile: int  # rows of one TMA copy
    slots: int  # tiles of one program in shared memory
    programs: int  # persistent programs for each head

    @property
    def tiles(self) -> int:
        return mosaic.cdiv(self.rows, self.tile)

    @property
    def groups(self) -> int:
        """Sets of rows in a tile that are worked on together: one wide row or four narrow ones."""
        return self.tile if self.wide else self.tile // LINES

    @property
    def chunks(self) -> range:
        """Register arrays that such a set needs."""
        return range(self.blocks // LINES if self.wide else self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        return (LINES, self.block)

    @property
    def layout(self) -> plgpu.Layout:
        return mosaic.warp_rows(self.block // 32)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """(rows, heads, width) as (rows, heads, width / block, block), the form that TMA copies."""
        block = min(self.block, self.width)
        return (self.rows, self.heads, self.width // block, block)

    def view(self, x):
        """Pads the columns where TMA needs it, which is for few widths, and splits them."""
        x = mosaic.pad_axis(x, x.ndim - 1, self.width) if x.shape[-1] != self.width else x
        return x.reshape(*x.shape[:-1], *self.view_shape[2:])

    def unview(self, x):
        return x.reshape(*x.shape[:-2], self.width)[..., : self.cols]

    def lines(self, smem, group, chunk):
        if self.wide:
            return smem.at[group, pl.ds(chunk * LINES, LINES)]
        return smem.at[pl.ds(group * LINES, LINES), chunk]

    def weight(self, smem, chunk):
        """Columns of a chunk of an (blocks, block) weight, the same in every row."""
        if self.wide:
            return mosaic.load(smem.at[pl.ds(chunk * LINES, LINES)], self.layout)
        return self.spread(mosaic.load(smem.at[chunk], self.layout.reduce(0)), axis=1)

    def mean(self, f):
        """Row means of f(chunk), or of every member of a tuple: one number for each line."""
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), map(f, self.chunks))
        return jax.tree.map(self._line_mean, total)

    def _line_mean(self, x):
        sums = jnp.sum(x, axis=1)
        if self.wide:  # the four lines are of one row
            sums = plgpu.layout_cast(
                jnp.broadcast_to(jnp.sum(sums), (LINES,)), self.layout.reduce(1)
            )
        return sums / self.cols

    def spread(self, line, axis=0):
        """One number for each line (axis 0) or column (axis 1) as a full register array."""
        return mosaic.along(line, self.shape, axis)

    def inside(self, x, chunk):
        """x with zeros in the columns that only fill up the last block."""
        if self.cols == self.blocks * self.block:
            return x
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)
        if self.wide:
            line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            column = column + (line + chunk * LINES) * self.block
        else:
            column = column + chunk * self.block
        return jnp.where(column < self.cols, x, 0.0)

    def zeros(self):
        return [mosaic.zeros(self.shape, self.layout) for _ in self.chunks]


def why_not(x, weight, bias, residual=None, *, eps) -> str | None:
    """Why the kernels cannot normalise the rows of x, or None."""
    if reason := mosaic.unsupported_dtype(x=x, residual=residual, weight=weight, bias=bias):
        return reason
    if reason := mosaic.empty(x=x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"C={x.shape[-1]} is more than {MAX_COLS}"
    s = x if residual is None else residual
    streams = x.dtype.itemsize + s.dtype.itemsize * (1 if residual is None else 2)
    row = 2 * streams + (0 if weight is None else weight.dtype.itemsize)
    if row * (x.shape[-1] + -x.shape[-1] % 1024) > _SMEM and x.shape[-1] > 4096:
        return f"two rows of C={x.shape[-1]} for the backward pass do not fit into shared memory"
    if eps <= 0:
        return f"eps={eps} is not positive"
    if residual is not None and residual.dtype != jnp.promote_types(x.dtype, residual.dtype):
        return f"residual is {residual.dtype}, narrower than x ({x.dtype})"
    return None


def check_shapes(x, weight, bias, residual=None):
    """ValueError unless weight and bias are (C,) or (H, C) for x (..., H, C)."""
    for name, w in (("weight", weight), ("bias", bias)):
        if w is not None and w.shape != x.shape[x.ndim - w.ndim :]:
            raise ValueError(f"{name} has shape {w.shape}, not that of the last axes of {x.shape}")
        if w is not None and w.ndim not in (1, 2):
            raise ValueError(f"{name} has {w.ndim} axes, not 1 or 2")
    if weight is not None and bias is not None and weight.ndim != bias.ndim:
        raise ValueError(f"weight has shape {weight.shape} but bias has {bias.shape}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {residual.shape}, x has {x.shape}")


def plan(direction, shape, streams, weights) -> Plan:
    """Chooses the tiles for arrays (rows, heads, cols) that are read row by row, and weights."""
    rows, heads, cols = shape
    if cols <= 256:
        width = cols + -cols % 8  # TMA wants strides of 16 bytes
        block = next(b for b in (64, 128, 256) if b >= cols)
    else:
        # Past 4096 so that a row fills its buffer: two rows at a time would not fit (see below).
        width = cols + -cols % (64 if cols <= 4096 else 1024)
        widest = 512 // streams["x"].dtype.itemsize  # a vector of 16 bytes in each lane
        block = next(b for b in (256, 128, 64) if width % b == 0 and b <= widest)
    blocks = mosaic.cdiv(width, block)
    _, wide, tile, slots, per_sm = next(t for t in _TILES[direction] if t[0] >= width)
    if wide:
        blocks += -blocks % LINES
    row = blocks * block * sum(a.dtype.itemsize for a in streams.values())
    fixed = blocks * block * sum(a.dtype.itemsize for a in weights.values())
    # A copy of one row to global memory is not clipped at the row's end, a box of several is.
    least = LINES if not wide else 1 if width == blocks * block else 2
    tile = max(tile, least)
    while not wide and 2 * tile * blocks * block <= _SHORT:
        tile *= 2
    while (room := (_SMEM // per_sm - fixed) // (tile * row)) < 2 and (tile > least or per_sm > 1):
        # Narrow tiles keep their height: those of the backward pass may not be the higher ones.
        if tile > least and (wide or per_sm <= 2):
            tile //= 2
        else:
            per_sm -= 1
    programs = min(mosaic.cdiv(rows, tile), mosaic.cdiv(per_sm * SMS, heads))
    return Plan(rows, heads, cols, width, block, blocks, wide, tile, min(slots, room), programs)


def _flatten(x, weight, bias, arrays):
    """Every array of x's shape as (rows, heads, cols), and weight and bias as (heads, cols)."""
    heads = next((w.shape[0] for w in (weight, bias) if w is not None and w.ndim == 2), 1)
    shape = (x.size // (heads * x.shape[-1]), heads, x.shape[-1])
    arrays = [a if a is None else a.reshape(shape) for a in arrays]
    return *arrays, *(w if w is None else w.reshape(shape[1:]) for w in (weight, bias))


def _given(**arrays):
    return {k: a for k, a in arrays.items() if a is not None}


def _deal(refs, *names):
    """Deals a flat list of refs out to one dictionary for each list of names."""
    refs = iter(refs)
    return [{k: next(refs) for k in group} for group in names]


def _buffers(p: Plan, streams, weights):
    """Shared memory for the tiles in flight and for the weights."""
    for a in streams.values():
        yield plgpu.SMEM((p.slots, p.tile, p.blocks, p.block), a.dtype)
    for a in weights.values():
        yield plgpu.SMEM((p.blocks, p.block), a.dtype)


def _barriers(p: Plan, streams, weights):
    """One for each slot, on which all its streams arrive, and one for the weights."""
    yield plgpu.Barrier(num_arrivals=len(streams), num_barriers=p.slots)
    yield plgpu.Barrier(num_arrivals=max(len(weights), 1))


def _columns(p: Plan):
    """All columns in shared memory.  0.12 refuses windows known to be too wide: start anywhere."""
    zero = lax.rem(lax.axis_index("head"), jnp.int32(1))
    return pl.ds(zero, p.blocks), pl.ds(zero, p.block)


def _fetch_weights(p: Plan, source, buffer, weights, bar):
    """Copies this head's row of every weight (heads, blocks, block) to shared memory."""
    for k in weights:
        window = source[k].at[lax.axis_index("head"), *_columns(p)]
        plgpu.copy_gmem_to_smem(window, buffer[k], bar)


def _stream(p: Plan, step, carry, source, buffer, result, streams, weights, bars, weight_bar):
    """carry = step(slot, tile, carry) for every tile of this program, between its copies.

    `streams` are copied from source to buffer, slots - 1 tiles ahead of the step; whatever is in
    result is copied back from the buffer of that name after the step.
    """
    program, head = lax.axis_index("program"), lax.axis_index("head")
    steps = lax.div(p.tiles - 1 - program, jnp.int32(p.programs)) + 1
    slot_of = lambda i: lax.rem(i, jnp.int32(p.slots))
    tile_of = lambda i: program + i * p.programs
    window = lambda ref, i: ref.at[pl.ds(tile_of(i) * p.tile, p.tile), head, *_columns(p)]

    def fetch(i):
        slot = slot_of(i)
        for k in streams:
            plgpu.copy_gmem_to_smem(window(source[k], i), buffer[k].at[slot], bars.at[slot])

    for i in range(p.slots - 1):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i)))
    if weights:
        plgpu.barrier_wait(weight_bar)  # only now: the rows were not to wait for it

    def body(i, carry):
        slot = slot_of(i)
        plgpu.barrier_wait(bars.at[slot])
        carry = step(slot, tile_of(i), carry)
        plgpu.commit_smem()
        for k, ref in result.items():
            plgpu.copy_smem_to_gmem(buffer[k].at[slot], window(ref, i))

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
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(p.programs, p.heads),
        grid_names=("program", "head"),
        # Every lane overwrites what it alone has read; between warps and copies stand the barriers
        # of commit_smem, barrier_wait and the reductions.  One at every load and store is too many.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # traced and lowered once for all layers
def forward(name, normalise, n_stats, eps, x, residual, weight, bias):
    """y = n weight + bias for the rows of x, or of s = x + residual, in one pass over memory.

    normalise(plan, x, eps) is given x(chunk) and returns `n_stats` statistics, one number for each
    line, and n(chunk).  residual, weight and bias may be None.
    Returns y in x's dtype, s in the residual's dtype (or None), and the statistics as float32
    (heads, sets of rows, 4).
    """
    shape = x.shape
    x, residual, weight, bias = _flatten(x, weight, bias, (x, residual))
    arrays = _given(x=x, residual=residual, weight=weight, bias=bias)
    streams, weights = _given(x=x, residual=residual), _given(weight=weight, bias=bias)
    # pyrefly: ignore[missing-attribute]
    p = plan("forward", x.shape, streams, weights)
    stats = jax.ShapeDtypeStruct((p.heads, p.tiles * p.groups, LINES), jnp.float32)

    def body(*refs):
        source, result, stat_refs, buffer, scratch = _deal(
            refs, arrays, streams, range(n_stats), arrays, ["bars", "weight_bar"]
        )
        _fetch_weights(p, source, buffer, weights, scratch["weight_bar"])
        head = lax.axis_index("head")

        def step(slot, tile, carry):
            for group in range(p.groups):
                at = lambda k, c, group=group: p.lines(buffer[k].at[slot], group, c)
                data = [mosaic.load(at("x", c), p.layout) for c in p.chunks]
                if residual is not None:
                    for c in p.chunks:
                        s = data[c] + mosaic.load(at("residual", c), p.layout)
                        s = s.astype(residual.dtype)  # y is the norm of the s that is returned
                        mosaic.store(at("residual", c), s)
                        data[c] = s.astype(jnp.float32)
                values, n = normalise(p, data.__getitem__, eps)
                for ref, value in zip(stat_refs.values(), values, strict=True):
                    mosaic.store(ref.at[head, tile * p.groups + group], value)
                for c in p.chunks:
                    y = n(c)
                    if weight is not None:
                        y = y * p.weight(buffer["weight"], c)
                    if bias is not None:
                        y = y + p.weight(buffer["bias"], c)
                    mosaic.store(at("x", c), y)
            return carry

        _stream(p, step, 0, source, buffer, result, streams, weights, **scratch)

    (*out,) = _kernel(
        body,
        name,
        p,
        [jax.ShapeDtypeStruct(p.view_shape, a.dtype) for a in streams.values()] + [stats] * n_stats,
        [*_buffers(p, streams, weights), *_barriers(p, streams, weights)],
    )(*(p.view(a) for a in arrays.values()))
    y, *s = (p.unview(a).reshape(shape) for a in out[: len(streams)])
    return (y, s[0] if s else None), tuple(out[len(streams) :])


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(name, differentiate, x, stats, dy, ds, weight, bias):
    """Gradients of `forward` in one pass over memory, and a small one over the programs' sums.

    differentiate(plan, x, g, *stats) is given x(chunk), g(chunk) = weight dy and the statistics,
    and returns n(chunk) and dx(chunk).  If there was a residual, x is s and ds its own gradient.
    Returns dx (+ ds) in x's dtype, dweight and dbias in theirs (or None).
    """
    shape, original = x.shape, _given(weight=weight, bias=bias)
    x, dy, ds, weight, bias = _flatten(x, weight, bias, (x, dy, ds))
    arrays = _given(x=x, dy=dy, ds=ds, weight=weight)
    streams, weights = _given(x=x, dy=dy, ds=ds), _given(weight=weight)
    sums = _given(weight=weight, bias=bias)
    # pyrefly: ignore[missing-attribute]
    p = plan("backward", x.shape, streams, weights)
    assert all(a.shape[1] >= p.tiles * p.groups for a in stats), "a set without statistics"
    parts = (p.heads, p.programs + -p.programs % LINES, p.blocks, p.block)

    def body(*refs):
        source, stat_refs, result, part_refs, buffer, scratch = _deal(
            refs, arrays, range(len(stats)), ["x"], sums, arrays, ["bars", "weight_bar", "lines"]
        )
        stat_refs = stat_refs.values()
        _fetch_weights(p, source, buffer, weights, scratch["weight_bar"])
        program, head = lax.axis_index("program"), lax.axis_index("head")
        load_stats = lambda tile: [
            [mosaic.load(r.at[head, tile * p.groups + g], p.layout.reduce(1)) for r in stat_refs]
            for g in range(p.groups)
        ]

        def step(slot, tile, carry):
            values, total = carry
            # One tile ahead, for these few bytes come through no copy engine.
            ahead = load_stats(jnp.minimum(tile + p.programs, p.tiles - 1))
            for group in range(p.groups):
                at = lambda k, c, group=group: p.lines(buffer[k].at[slot], group, c)
                load = lambda k, c, at=at: mosaic.load(at(k, c), p.layout)
                dy = g = functools.partial(load, "dy")
                if weight is not None:
                    g = lambda c, dy=dy: dy(c) * p.weight(buffer["weight"], c)
                n, dx = differentiate(p, functools.partial(load, "x"), g, *values[group])
                for c in p.chunks:
                    if weight is not None:
                        total["weight"][c] += dy(c) * n(c)
                    if bias is not None:
                        total["bias"][c] += dy(c)
                    d = dx(c)
                    if ds is not None:
                        d = d + load("ds", c)
                    mosaic.store(at("x", c), d)
            return ahead, total

        carry = load_stats(program), {k: p.zeros() for k in sums}
        lines = scratch.pop("lines")
        _, total = _stream(p, step, carry, source, buffer, result, streams, weights, **scratch)
        for k, ref in part_refs.items():
            _store_sums(p, total[k], lines, ref.at[head, program])

    (*out,) = _kernel(
        body,
        name,
        p,
        # pyrefly: ignore[missing-attribute]
        [jax.ShapeDtypeStruct(p.view_shape, x.dtype)]
        + [jax.ShapeDtypeStruct(parts, jnp.float32)] * len(sums),
        [
            *_buffers(p, streams, weights),
            *_barriers(p, streams, weights),
            plgpu.SMEM((LINES, p.block), jnp.float32),
        ],
    )(*(p.view(a) for a in arrays.values()), *stats)
    dw = dict(zip(sums, _sum_programs(name, p, sums, out[1:]), strict=True))
    dw = {k: a.reshape(original[k].shape) for k, a in dw.items()}
    return p.unview(out[0]).reshape(shape), dw.get("weight"), dw.get("bias")


def _store_sums(p: Plan, total, lines, ref):
    """Writes the sums of this program's rows, chunk by chunk, to ref (blocks, block)."""
    for c in p.chunks:
        if p.wide:
            mosaic.store(ref.at[pl.ds(c * LINES, LINES)], total[c])
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
    cols = p.blocks * p.block
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
    out = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((p.heads, cols), w.dtype) for w in sums.values()],
        grid=(cols // _SUM_COLS, p.heads, len(parts)),
        grid_names=("column", "head", "which"),
    )(*(a.reshape(p.heads, n, cols) for a in parts))
    return [a[:, : p.cols] for a in out]
