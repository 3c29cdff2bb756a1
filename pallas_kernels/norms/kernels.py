"""The kernels of layer norm and RMS norm, for every NVIDIA GPU since Ampere.

They read every row once, compute one or two means over it, and write a row of the same width.  The
backward kernels also sum over all rows for dweight and dbias.  Registers get rows straight from
global memory (tiling: tiles.py):

    forward    a new block for each tile       x (, residual, gate)  ->  statistics  ->  y (, s)
    backward   persistent blocks share an SM   x, dy (, ds, gate)  ->  n, g  ->  means of g, g n
               ->  dx (, dgate);  sums over the rows in registers, which XLA adds up

Weights have one row (C,) for all heads or one for each of H heads; a block handles one head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.norms.tiles import LINES, Tiling, choose_tiling

# ---- the formulas ------------------------------------------------------------------------------


def statistics(centered: bool, t, mean, x, eps):
    """One or three numbers for each line, from x(chunk); mean(f): the row means of f(chunk)."""
    if not centered:
        return (lax.rsqrt(mean(lambda c: jnp.square(x(c))) + eps),)
    average = mean(x)
    from_mean = lambda c: x(c) - t.broadcast(average)
    # The mean of x = 1000 + N(0, 1) has a rounding error of 3e-5, which this pass corrects.
    error, square = mean(lambda c: (from_mean(c), jnp.square(from_mean(c))))
    # Beyond 1e26 both squares may be infinite: r is then 0, as without the correction.
    square = jnp.where(square == jnp.inf, square, square - jnp.square(error))
    r = lax.rsqrt(square + eps)
    return r, average, -error * r


def normalise(t, x, r, *of_mean):
    """n, from x and the statistics."""
    if not of_mean:
        return x * t.broadcast(r)
    mean, shift = of_mean
    return (x - t.broadcast(mean)) * t.broadcast(r) + t.broadcast(shift)


def differentiate(t, n, g, means, r, *_):
    """dx from g = weight dy, the row means of g n and perhaps of g, and the statistics."""
    mean_gn, *mean_g = means
    dx = t.broadcast(r) * g
    dx = dx - t.broadcast(r * mean_g[0]) if mean_g else dx
    return dx - n * t.broadcast(r * mean_gn)


# ---- forward -----------------------------------------------------------------------------------


@jax.jit(static_argnums=(6, 7))  # traced and lowered once for all layers
def forward(x, weight, bias, residual, x_bias, gate, centered, eps):
    """y = n weight + bias for the rows of x, or of s = x + residual, in one pass over memory.

    x_bias: is added to x first; if it has heads, the backward pass sums its gradient by heads, and
    needs the statistics in this order.
    gate: may be the last heads of a wider array, which is read in place.
    Returns (y, s), where s is None without a residual, and what the backward pass needs; the
    statistics in it are float32 (heads, sets of rows, lines).
    """
    x, params = mosaic.plus(x, x_bias), (weight, bias, x_bias)
    rows, of_residual, of_gate, *own = flatten(x, params, (x, residual, gate))
    t = choose_tiling("forward", rows.shape, x.dtype)
    inputs = rows, of_residual, *_ = jax.tree.map(t.view, (rows, of_residual, of_gate, *own[:2]))
    stat = jax.ShapeDtypeStruct((t.heads, t.tiles * t.groups, LINES), jnp.float32)
    types = like(rows), like(of_residual), (stat,) * (3 if centered else 1)
    means = plgpu.SMEM((2 * t.groups * (1 + centered), LINES), jnp.float32)
    body = functools.partial(_normalise, centered, eps, t)
    call = launch("forward", body, t, types, dict(means_smem=means), centered, residual, gate)
    y, s, stats = call(*inputs)
    y, s = jax.tree.map(lambda a: t.unview(a).reshape(x.shape), (y, s))
    return (y, s), (x if s is None else s, stats, *params, gate)


def _normalise(
    centered, eps, t: Tiling, x_ref, residual_ref, gate_ref, weight_ref, bias_ref, y_ref, s_ref,
    stat_refs, *, means_smem,
):  # fmt: skip
    """A block normalises one tile."""
    tile, head = lax.axis_index("block"), lax.axis_index("head")
    rows_of = lambda ref: t.window(ref, tile)
    source = jax.tree.map(rows_of, given(x=x_ref, residual=residual_ref, gate=gate_ref))
    result = jax.tree.map(rows_of, given(x=y_ref, residual=s_ref))
    most = 1 + centered  # means at once
    places = iter(range(0, means_smem.shape[0], most))

    def mean(f):
        """Row means of f(chunk), or of each array of a tuple."""
        parts = [jax.tree.map(lambda x, c=c: t.once(x, c), f(c)) for c in t.chunks]
        add = functools.partial(jax.tree.map, jnp.add)
        total, tree = jax.tree.flatten(functools.reduce(add, parts))
        return tree.unflatten(row_means(t, total, means_smem.at[pl.ds(next(places), most)]))

    def load(group):
        each = lambda ref: [mosaic.load(t.lines(ref, group, c), t.layout) for c in t.chunks]
        return {k: each(ref) for k, ref in source.items()}

    # The compiler moves no load before a store, so all loads come first.
    for group, rows in enumerate([load(group) for group in range(t.groups)]):
        at = lambda refs, k, c, group=group: t.lines(refs[k], group, c)

        # Add the residual to x.
        data = rows["x"]
        for c, r in enumerate(rows.get("residual", ())):
            s = (data[c] + r).astype(source["residual"].dtype)  # y is the norm of the rounded s
            mosaic.store(at(result, "residual", c), s)
            data[c] = s.astype(jnp.float32)

        # Compute and save the statistics.
        stats = statistics(centered, t, mean, data.__getitem__, eps)
        for ref, value in zip(stat_refs, stats, strict=True):
            mosaic.store(ref.at[lax.axis_index("head"), tile * t.groups + group], value)

        # Normalise and store.
        for c in t.chunks:
            y = normalise(t, data[c], *stats)
            y = y if weight_ref is None else y * t.weight(weight_ref.at[head], c)
            y = y if bias_ref is None else y + t.weight(bias_ref.at[head], c)
            y = y * mosaic.sigmoid(rows["gate"][c]) if "gate" in rows else y
            mosaic.store(at(result, "x", c), y)


# ---- both directions ---------------------------------------------------------------------------


def row_means(t: Tiling, arrays, means_smem):
    """The row means of register arrays; the warps of a wide row synchronise once for all of them.

    means_smem: (number of arrays or more, LINES).
    """
    sums = [jnp.sum(x, axis=1) for x in arrays]
    if t.wide:
        for i, x in enumerate(sums):
            mosaic.store(means_smem.at[i], x)
        ampere.meet()
        totals = (sum(means_smem[i, w] for w in range(LINES)) for i in range(len(sums)))
        spread = lambda x: plgpu.layout_cast(jnp.broadcast_to(x, (LINES,)), t.layout.reduce(1))
        sums = [spread(x) for x in totals]
    return [x / t.cols for x in sums]


def launch(direction, body, t: Tiling, out_type, scratch_types, centered: bool, add, gate):
    """A kernel; add: the residual or its gradient, or None."""
    fused = ("" if add is None else "add_") + ("" if gate is None else "gated_")
    return mosaic.kernel(
        body,
        name=f"{fused}{'layer_norm' if centered else 'rms_norm'}_{direction}",
        out_type=out_type,
        scratch_types=scratch_types,
        **mosaic.grid(block=t.blocks, head=t.heads),
        # A barrier at every load and store is too slow; the reductions synchronise the warps.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            # The exp of the sigmoid in two instructions; 16-bit results hide its error.
            approx_math=gate is not None and gate.dtype.itemsize == 2,
        ),
    )


def flatten(x, weights, arrays) -> tuple[Any, ...]:
    """Reshapes `arrays` to (rows, heads, cols) and `weights` to (heads, cols).

    All arrays have x's shape; only a gate may have more heads.
    """
    heads = next((w.shape[0] for w in weights if w is not None and w.ndim == 2), 1)
    rows, cols = x.size // (heads * x.shape[-1]), x.shape[-1]
    arrays = [a if a is None else a.reshape(rows, -1, cols) for a in arrays]
    return *arrays, *(w if w is None else w.reshape(heads, cols) for w in weights)


def given(**arrays):
    return {k: a for k, a in arrays.items() if a is not None}


def like(a):
    return None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype)


# ---- backward ----------------------------------------------------------------------------------


@jax.jit(static_argnums=(0, 1))
def backward(centered, _, saved, cotangents):
    """Gradients of `forward`'s arrays in one pass over memory; XLA adds up the blocks' sums.

    The gradient of x_bias is x's, summed over the rows, for which XLA would need another pass.
    A gate needs a forward pass without a bias.  If the gate is a part of a wider array, its
    gradient is the same part of such an array, whose other columns are undefined.
    """
    (x, stats, *params, gate), (dy, ds) = saved, cotangents
    shapes, dtype = (x.shape, None if gate is None else gate.shape), dy.dtype
    original = given(**dict(zip(("weight", "bias", "x_bias"), params, strict=True)))
    x, dy, ds, gate, weight, *_ = flatten(x, params, (x, dy, ds, gate))
    t = choose_tiling("backward", x.shape, x.dtype)
    sums = jax.ShapeDtypeStruct((t.heads, t.blocks, t.strips, t.strip), jnp.float32)
    # Steps alternate between two buffers, so a warp that is a step ahead overwrites nothing.
    means = plgpu.SMEM((2, t.groups * (1 + centered), LINES), jnp.float32)
    x, dy, ds, gate, weight = jax.tree.map(t.view, (x, dy, ds, gate, weight))
    types = like(x), like(gate), (sums,) * len(original)
    scratch = dict(lines_smem=plgpu.SMEM(t.shape, jnp.float32), means_smem=means)
    body = functools.partial(_backward_tiles, centered, t, tuple(original))
    call = launch("backward", body, t, types, scratch, centered, ds, gate)
    dx, dgate, sums = call(x, dy, ds, gate, weight, tuple(stats))
    pairs = zip(original.items(), sums, strict=True)
    of_params = {k: a.sum(1).reshape(w.shape).astype(w.dtype) for (k, w), a in pairs}
    dx = t.unview(dx).reshape(shapes[0])
    dgate = None if dgate is None else t.unview(dgate).reshape(shapes[1])
    dweight, dbias, dx_bias = map(of_params.get, ("weight", "bias", "x_bias"))
    return dx.astype(dtype), dweight, dbias, None if ds is None else dx, dx_bias, dgate


def _backward_tiles(
    centered, t: Tiling, summed, x_ref, dy_ref, ds_ref, gate_ref, weight_ref, stat_refs,
    dx_ref, dgate_ref, sum_refs, *, lines_smem, means_smem,
):  # fmt: skip
    """A persistent block computes dx of its tiles, and the sums over their rows in `summed`."""
    block, head = lax.axis_index("block"), lax.axis_index("head")
    weight = None if weight_ref is None else weight_ref.at[head]
    raw = lambda ref, g, c: mosaic.read(t.lines(ref, g, c), t.layout)

    def step(i, totals):
        tile = block + i * t.blocks
        rows = {
            k: [[raw(t.window(ref, tile), g, c) for c in t.chunks] for g in range(t.groups)]
            for k, ref in given(x=x_ref, dy=dy_ref, ds=ds_ref, gate=gate_ref).items()
        }
        load = lambda ref, g: mosaic.load(ref.at[head, tile * t.groups + g], t.layout.reduce(1))
        stats = [[load(ref, g) for ref in stat_refs] for g in range(t.groups)]
        dx, dgate = jax.tree.map(lambda ref: t.window(ref, tile), (dx_ref, dgate_ref))
        now = _Tile(centered, t, rows, dx, dgate, weight, stats)
        first = _first_pass(now, totals, means_smem.at[lax.rem(i, jnp.int32(2))])
        _second_pass(now, totals, *first)
        return totals

    steps = lax.div(t.tiles - 1 - block, jnp.int32(t.blocks)) + 1
    zeros = {k: [mosaic.zeros(t.shape, t.layout) for _ in t.chunks] for k in summed}
    totals = lax.fori_loop(0, steps, step, zeros)
    for k, ref in zip(summed, sum_refs, strict=True):
        _store_sums(t, totals[k], lines_smem, ref.at[head, block])


_KEPT = 4096  # elements of a tile of wide rows whose n and g stay in registers, at most


class _Tile(NamedTuple):
    centered: bool
    t: Tiling
    rows: dict[str, list]  # x, dy, perhaps ds, gate, in registers
    dx: Any
    dgate: Any  # or None
    weight: Any  # or None
    stats: list  # for each set of rows, in registers

    def load(self, k, group, c):
        return self.rows[k][group][c].astype(jnp.float32)

    @property
    def keeps_operands(self) -> bool:
        """Whether n and g stay in registers between the passes over the tile.

        For narrow rows it is faster to compute them again, but not a gate's sigmoid.
        """
        few = self.t.wide and self.t.tile * self.t.cols <= _KEPT
        return few or self.dgate is not None

    def operands(self, group, c):
        """n, g and dy of a chunk; with a gate dy is the norm's gradient, and dgate is written."""
        n = normalise(self.t, self.load("x", group, c), *self.stats[group])
        dy = self.load("dy", group, c)
        gate = None if self.dgate is None else mosaic.sigmoid(self.load("gate", group, c))
        dy = dy if gate is None else dy * gate
        g = dy if self.weight is None else dy * self.t.weight(self.weight, c)
        if gate is not None:
            mosaic.store(self.t.lines(self.dgate, group, c), g * n * (1 - gate))
        return n, g, dy


# One of the passes over a tile adds its rows to the sums: the first one if it keeps n and g.


def _first_pass(now: _Tile, totals, means_smem):
    """(n and g of each chunk if the tile keeps them, the row means of each group)."""
    kept, averaged = {}, []
    for group in range(now.t.groups):
        terms = []
        for c in now.t.chunks:
            n, g, dy = now.operands(group, c)
            if now.keeps_operands:
                _add(totals, c, n, dy)
                kept[group, c] = n, g
            means = (g * n, g) if now.centered else (g * n,)
            terms.append([now.t.once(x, c) for x in means])
        averaged.append([functools.reduce(jnp.add, x) for x in zip(*terms, strict=True)])
    means = iter(row_means(now.t, [x for g in averaged for x in g], means_smem))
    return kept, [[next(means) for _ in group] for group in averaged]


def _second_pass(now: _Tile, totals, kept, means):
    for group in range(now.t.groups):
        for c in now.t.chunks:
            if now.keeps_operands:
                n, g = kept[group, c]
            else:
                n, g, dy = now.operands(group, c)
                _add(totals, c, n, dy)
            dx = differentiate(now.t, n, g, means[group], *now.stats[group])
            if "ds" in now.rows:
                dx = dx + now.load("ds", group, c)
            if "x_bias" in totals:
                totals["x_bias"][c] += dx
            mosaic.store(now.t.lines(now.dx, group, c), dx)
        if not now.t.wide:
            # Without this barrier ptxas -c for 8.x takes 185 registers at C = 128, not 80.
            ampere.meet()


def _add(totals, c, n, dy):
    """Adds a chunk of rows to the sums for dweight and dbias, if they are needed."""
    if "weight" in totals:
        totals["weight"][c] += dy * n
    if "bias" in totals:
        totals["bias"][c] += dy


def _store_sums(t: Tiling, total, lines_smem, ref):
    """Writes the sums over this block's rows to ref (strips, strip)."""
    for c in t.chunks:
        if t.wide:
            mosaic.store(ref.at[pl.ds(t.first_strip(c), LINES)], total[c])
            continue
        mosaic.store(lines_smem, total[c])  # the lines are different rows
        ampere.meet()
        value = sum(mosaic.load(lines_smem.at[i], t.layout.reduce(0)) for i in range(LINES))
        ampere.meet()
        mosaic.store(ref.at[c], value)
