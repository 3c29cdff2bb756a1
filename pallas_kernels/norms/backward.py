"""The backward kernels of layer norm and RMS norm."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.activations.elementwise import sigmoid
from pallas_kernels.norms.forward import (
    Norm,
    flatten,
    given,
    launch,
    means_type,
    name_of,
    row_means,
)
from pallas_kernels.norms.ring import Ring, fetch_weights, ring_types, stream
from pallas_kernels.norms.tiles import LINES, Tiling, choose_general_tiling, choose_tiling

_SUM_COLS = 32  # columns of a block that sums over the programs


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(kind, general, x, stats, dy, ds, weight, bias, x_bias, gate):
    """Gradients of `forward` in one pass over memory and a small one over the programs' sums.

    With a residual, x is s and ds is the gradient of s; the gradient of x_bias is the sum of
    dx + ds over the rows, which would cost XLA another pass over memory.
    Returns dx (+ ds) in x's dtype; the gradients of weight, bias, x_bias and gate in theirs (or
    None).  A gate needs a forward pass without a bias.  If it is a part of a wider array, its
    gradient stands where it stands in an array like that, whose other columns are undefined.
    """
    name = name_of(kind, "backward", ds, gate, general)
    shapes = x.shape, None if gate is None else gate.shape
    original = given(weight=weight, bias=bias, x_bias=x_bias)
    x, dy, ds, gate, *params = flatten(x, (weight, bias, x_bias), (x, dy, ds, gate))
    weight, bias, x_bias = params
    streams, weights = given(x=x, dy=dy, ds=ds, gate=gate), given(weight=weight)
    summed = given(weight=weight, bias=bias, x_bias=x_bias)
    if general:
        t = choose_general_tiling("backward", x.shape, x.dtype)
    else:
        t = choose_tiling("backward", x.shape, streams, weights)
    stats = tuple(_as_tiled(t, a) for a in stats)
    sums = (t.heads, t.programs + -t.programs % LINES, t.parts * t.blocks, t.block)
    n_means = t.groups * len(kind.averaged(1.0, 1.0))
    x, dy, ds, gate, weight = jax.tree.map(t.view, (x, dy, ds, gate, weight))
    like = lambda a: None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype)
    dx, dgate, sums = launch(
        functools.partial(_backward_tiles if t.slots else _backward_rows, kind, t, tuple(summed)),
        name,
        t,
        [
            like(x),
            like(gate),
            (jax.ShapeDtypeStruct(sums, jnp.float32),) * len(summed),
        ],
        (ring_types(t, streams, weights) if t.slots else {})
        | dict(
            lines_smem=plgpu.SMEM(t.shape, jnp.float32),
            means_smem=means_type(t, n_means),
            means_bar=plgpu.Barrier(num_arrivals=t.parts),
        ),
        gate,
    )(x, dy, ds, gate, weight, tuple(stats))
    dweights = dict(zip(summed, _sum_programs(name, t, summed, sums), strict=True))
    dweights = {k: a.reshape(original[k].shape) for k, a in dweights.items()}
    unview = lambda a, shape: None if a is None else t.unview(a).reshape(shape)
    dx, dgate = map(unview, (dx, dgate), shapes)
    return dx, *map(dweights.get, ("weight", "bias", "x_bias")), dgate


def _backward_tiles(
    kind, t: Tiling, summed, x_ref, dy_ref, ds_ref, gate_ref, weight_ref, stat_refs,
    dx_ref, dgate_ref, sum_refs, *, bars, weight_bar, lines_smem, means_smem, means_bar, **smem,
):  # fmt: skip
    """A persistent block computes dx of its tiles, and the sums over their rows in `summed`."""
    streams = given(x=x_ref, dy=dy_ref, ds=ds_ref, gate=gate_ref)
    weights, results = given(weight=weight_ref), given(x=dx_ref, gate=dgate_ref)
    ring = Ring(streams, weights, results, smem, bars, weight_bar)
    fetch_weights(t, ring)
    program, head, part = (lax.axis_index(axis) for axis in ("program", "head", "part"))

    def step(slot, tile, carry):
        stats, totals = carry
        # Load the next tile's statistics now: they do not come by TMA.
        ahead = _load_stats(t, stat_refs, jnp.minimum(tile + t.programs, t.tiles - 1))
        rows = {k: smem[k].at[part, slot] for k in streams}
        weight = smem["weight"].at[part] if weights else None
        now = _Tile(kind, t, rows, rows["x"], rows.get("gate"), weight, stats)
        _differentiate(now, totals, means_smem.at[slot], means_bar)
        return ahead, totals

    carry = _load_stats(t, stat_refs, program), {k: t.zeros() for k in summed}
    _, totals = stream(t, ring, step, carry)
    for k, ref in zip(summed, sum_refs, strict=True):
        _store_sums(t, totals[k], lines_smem, ref.at[head, program])


def _backward_rows(
    kind, t: Tiling, summed, x_ref, dy_ref, ds_ref, gate_ref, weight_ref, stat_refs,
    dx_ref, dgate_ref, sum_refs, *, lines_smem, means_smem, means_bar,
):  # fmt: skip
    """The same in the general form: the rows of the next tile are on their way to registers."""
    program, head, part = (lax.axis_index(axis) for axis in ("program", "head", "part"))
    blocks = pl.ds(part * t.blocks, t.blocks) if t.parts > 1 else slice(None)
    weight = None if weight_ref is None else weight_ref.at[head, blocks]
    window = lambda ref, tile: ref.at[*t.place(ref, tile), blocks]

    def fetch(tile):
        rows = {
            k: [[t.raw(window(ref, tile), g, c) for c in t.chunks] for g in range(t.groups)]
            for k, ref in given(x=x_ref, dy=dy_ref, ds=ds_ref, gate=gate_ref).items()
        }
        return rows, _load_stats(t, stat_refs, tile)

    def step(i, carry):
        tile = program + i * t.programs
        if t.ahead:
            (rows, stats), totals = carry
            ahead = fetch(jnp.minimum(tile + t.programs, t.tiles - 1))
        else:
            ahead, totals = carry
            rows, stats = fetch(tile)
        dx, dgate = jax.tree.map(lambda ref: window(ref, tile), (dx_ref, dgate_ref))
        now = _Tile(kind, t, rows, dx, dgate, weight, stats)
        _differentiate(now, totals, means_smem.at[lax.rem(i, jnp.int32(2))], means_bar)
        return ahead, totals

    steps = lax.div(t.tiles - 1 - program, jnp.int32(t.programs)) + 1
    first = fetch(program) if t.ahead else ()
    _, totals = lax.fori_loop(0, steps, step, (first, {k: t.zeros() for k in summed}))
    for k, ref in zip(summed, sum_refs, strict=True):
        _store_sums(t, totals[k], lines_smem, ref.at[head, program])


def _as_tiled(t: Tiling, stat):
    """A statistic of the forward pass in sets of rows of this tiling."""
    stat = stat.reshape(t.heads, -1)
    # If these tiles are larger than the forward pass's, the rows past the last have no statistics.
    # Zeros keep n finite there.
    need = t.tiles * t.tile * (LINES if t.wide and not t.narrow_forward else 1)
    stat = jnp.pad(stat, ((0, 0), (0, max(need - stat.shape[1], 0))))
    return mosaic.pad_axis(stat, 1, t.height).reshape(t.heads, -1, t.height)


def _load_stats(t: Tiling, refs, tile):
    """The statistics of each set of rows of a tile."""
    head = lax.axis_index("head")

    def load(ref, group):
        i = tile * t.groups + group
        if t.wide and t.narrow_forward:
            return t.every_line(ref[head, i // LINES, i % LINES])
        return mosaic.load(ref.at[head, i], t.layout.reduce(1))

    return [[load(ref, g) for ref in refs] for g in range(t.groups)]


class _Tile(NamedTuple):
    """A tile of the backward pass."""

    kind: Norm
    t: Tiling
    rows: dict[str, Any]  # x, dy, perhaps ds, gate: in shared memory or, as lists, in registers
    dx: Any  # in shared memory, where it overwrites x, or global
    dgate: Any  # likewise, or None
    weight: Any  # or None
    stats: list  # for each set of rows, in registers

    def load(self, k, group, c):
        if not self.t.slots:
            return self.rows[k][group][c].astype(jnp.float32)
        return mosaic.load(self.t.lines(self.rows[k], group, c), self.t.layout)

    @property
    def keeps_operands(self) -> bool:
        """As of the tiling; with a gate always, because the sigmoid takes longest."""
        return self.t.keeps_operands or self.dgate is not None

    def operands(self, group, c):
        """n, g and dy of a chunk; with a gate dy is that of the norm, and dgate is written."""
        n = self.kind.normalise(self.t, self.load("x", group, c), *self.stats[group])
        g = dy = self.load("dy", group, c)
        gate = None if self.dgate is None else sigmoid(self.load("gate", group, c))
        if gate is not None:
            g = dy = dy * gate
        if self.weight is not None:
            g = dy * self.t.weight(self.weight, c)
        if gate is not None:
            mosaic.store(self.t.lines(self.dgate, group, c), g * n * (1 - gate))
        return n, g, dy


def _differentiate(now: _Tile, totals, means_smem, means_bar):
    """Writes dx of a tile and adds its rows to the sums."""
    kept, averaged = _first_pass(now, totals)
    means = iter(row_means(now.t, [x for g in averaged for x in g], means_smem, means_bar))
    means = [[next(means) for _ in group] for group in averaged]
    _second_pass(now, kept, means, totals)


def _first_pass(now: _Tile, totals):
    """(n and g of each chunk if the tiling keeps them, the terms of the row means)."""
    kept, averaged = {}, []
    for group in range(now.t.groups):
        terms = []
        for c in now.t.chunks:
            n, g, dy = now.operands(group, c)
            if now.keeps_operands:
                _add(totals, c, n, dy)
                kept[group, c] = n, g
            terms.append([now.t.once(x, c) for x in now.kind.averaged(n, g)])
        averaged.append([functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)])
    return kept, averaged


def _second_pass(now: _Tile, kept, means, totals):
    """Writes dx."""
    for group in range(now.t.groups):
        for c in now.t.chunks:
            if now.keeps_operands:
                n, g = kept[group, c]
            else:
                n, g, dy = now.operands(group, c)
                _add(totals, c, n, dy)
            dx = now.kind.differentiate(now.t, n, g, means[group], *now.stats[group])
            if "ds" in now.rows:
                dx = dx + now.load("ds", group, c)
            if "x_bias" in totals:
                totals["x_bias"][c] += dx
            mosaic.store(now.t.lines(now.dx, group, c), dx)
        if not now.t.wide and not now.t.slots:
            # Without it ptxas -c for 8.x takes 185 registers at C = 128, not 80.
            ampere.meet()


def _add(totals, c, n, dy):
    """Adds a chunk of rows to the sums for dweight and dbias, if they are needed."""
    if "weight" in totals:
        totals["weight"][c] += dy * n
    if "bias" in totals:
        totals["bias"][c] += dy


def _store_sums(t: Tiling, total, lines_smem, ref):
    """Writes the sums over this program's rows to ref (blocks, block)."""
    for c in t.chunks:
        if t.wide:
            first = lax.axis_index("part") * t.blocks + t.first_block(c)
            mosaic.store(ref.at[pl.ds(first, LINES)], total[c])
            continue
        mosaic.store(lines_smem, total[c])  # the lines are different rows
        ampere.meet()
        value = sum(mosaic.load(lines_smem.at[i], t.layout.reduce(0)) for i in range(t.height))
        ampere.meet()
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
