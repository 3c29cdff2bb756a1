"""The kernel for one row of x: activation(norm(x) w' + bias) + residual in one launch.

quantized_linear calls it with one weight, row_linear (single_row.py) with all that share x.

One row needs each weight once, so only memory's speed counts.  A block has 16 columns n, so many
blocks share the bytes of any layer, and its warps share K: no other block adds to its sums.

    block        16 columns n of all K, of one weight, for swiglu of both; as many warpgroups as let
                 one wave of blocks fill the GPU
    warpgroup    every `wgs`-th turn of four steps; each of its warps has one of the four
    lane         its words of the next `ahead` turns are in flight while it multiplies those before

    words of a step: 512 bytes in a row -> registers -> operands of mma m16n8k16
    x of a step -> shared memory        -> registers -> mma's eight columns, all equal
    sums of a group of k                -> acc += s sum, and offset sum of x

Shared memory holds x, or norm(x) as bfloat16, and at the end the sums of the warps in float32.
Each warpgroup loads a part of x while the first words are on their way.  For layer norm the first
warpgroup loads all of x, because it needs the mean.  RMS norm is a factor that multiplies the sums
at the end; before that, x is only multiplied by the norm's weight.

Sums are added in a fixed order, so two runs are equal bit for bit.  w' is never rounded: its levels
are exact in bfloat16, and scales multiply sums.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.activations.activation import finished
from pallas_kernels.mosaic import ROW, read
from pallas_kernels.quantized.formats import COLUMNS, LANES, TURN, WORDS, Format, QuantizedWeight
from pallas_kernels.quantized.unpack import dot, load_words

_SMS = 132  # of an H100
_WGS = 8  # per SM, whose registers suffice for 64 a thread
# 32 warps of an SM then have 32 KB in flight.  More turns need more registers and gain nothing:
# with 2, 3, 4 and 6 an H100 takes 13.0, 13.9, 14.2 and 18.4 us for 4096 x 14336 of 4 bits.
_AHEAD = 2
_STAGED = 16384  # the largest K of x in shared memory, 32 KB; beyond, a turn loads its x
_BROUGHT = 16  # numbers of x, or half as many with a norm, that a thread requests at once
_NORMED = 64  # numbers of a row that a thread normalises, at most

_TILED, _Any = plgpu.Layout.TILED, plgpu.Replicated
# (4, 8 i) of x: a warp has a row, and lanes 4 r + j the neighbours 2 j and 2 j + 1, for any r.
_X = _TILED(plgpu.Tiling(((TURN, 8), (2,))), (-3,), (_Any(8), -2), -1)
# (4, 32 i) of x for 2:4: lanes 4 r + j have two fours.
_X_FOURS = _TILED(plgpu.Tiling(((TURN, 32), (8,))), (-3,), (_Any(8), -2), -1)
_COLUMNS = _TILED(plgpu.Tiling(((COLUMNS,), (1,))), (_Any(4),), (_Any(2), -2), -1)


class RowPlan(NamedTuple):
    """How a product is split; see the picture."""

    step: int  # k of a step
    bits: int
    format: Format
    group: int  # k in a group
    turns: int
    wgs: int
    ahead: int
    each: int  # weights of a block
    activation: str | None
    eps: float  # of the norm
    staged: bool  # x is in shared memory
    late: bool  # the norm is a factor of the sums
    centered: bool

    @property
    def rows(self) -> int:
        """The rows of scales of a turn: one for each warp, or fewer if warps share a group."""
        return max(1, min(TURN, TURN * self.step // self.group))

    @property
    def groups(self) -> int:
        """The groups of a step."""
        return max(1, self.step // self.group)

    @property
    def x_layout(self) -> plgpu.Layout:
        """Of (4, step) of x."""
        return _X_FOURS if self.format == "2:4" else _X  # pyrefly: ignore[bad-return]

    @property
    def scales_layout(self) -> plgpu.Layout:
        """Of (rows, 16 groups) scales; n = r and r + 8 are in a register."""
        warps = {1: (_Any(4),), 2: (-3, _Any(2)), 4: (-3,)}[self.rows]
        tiling = plgpu.Tiling(((self.rows, COLUMNS), (2,)))
        return _TILED(tiling, warps, (-2, _Any(4)), -1)  # pyrefly: ignore[bad-return]

    @property
    def even(self) -> bool:
        """Whether all warpgroups have equally many turns."""
        return self.turns % self.wgs == 0

    @property
    def share(self) -> int:
        """Turns of a warpgroup; the last turn of some warpgroups is past the end."""
        return mosaic.cdiv(self.turns, self.wgs)


def plan(weights, activation=None, norm=None, eps: float = 0.0, centered=False) -> RowPlan:
    """weights: of equal K and format.  A block works on one of them, for swiglu on all."""
    weight, each = weights[0], len(weights) if activation == "swiglu" else 1
    tiles = sum(w.words.shape[0] for w in weights) // each
    turns = weight.steps // TURN
    group = weight.group or turns * TURN * weight.step
    blocks = mosaic.cdiv(tiles, _SMS)  # per SM
    wgs = max(1, min(_WGS // blocks, turns))
    ahead = min(_AHEAD // each, mosaic.cdiv(turns, wgs))
    late = norm is not None and not centered and norm[1] is None
    staged = norm is not None or turns * TURN * weight.step <= _STAGED
    kind = weight.step, weight.bits, weight.format, group
    return RowPlan(*kind, turns, wgs, ahead, each, activation, eps, staged, late, centered)


def why_no_norm(k: int, weight: QuantizedWeight) -> str | None:
    """Why the kernel cannot normalise x (K,) before it multiplies, or None."""
    if k % (TURN * weight.step):
        return f"K={k} is not a multiple of {TURN * weight.step} with a norm"
    if k > _NORMED * LANES * TURN:
        return f"K={k} is more than {_NORMED * LANES * TURN} with a norm"
    return None


# Traced and lowered once for all layers.
@jax.jit(static_argnames=("dtypes", "eps", "centered", "activation"))
def products(
    x, weights: tuple[QuantizedWeight, ...], biases, dtypes, *,
    norm=None, eps=0.0, centered=False, activation=None, residual=None,
) -> list:  # fmt: skip
    """activation(norm(x) w' + bias) + residual for each weight, (N,) in its dtype of `dtypes`.

    x: (K,) bfloat16.  norm: its weight and its bias or None, (K,).  activation: None, "gelu" or
    "swiglu", which makes one result of two weights.
    """
    p = plan(weights, activation, norm, eps, centered)
    wide = lambda a: None if a is None else mosaic.pad_axis(a, 0, COLUMNS)
    flat = lambda a: None if a is None else a.reshape(len(a), -1, p.groups * COLUMNS)
    words = lambda w: w.words.reshape(*w.words.shape[:3], LANES * WORDS)
    by_step = lambda w, bias: (words(w), flat(w.scales), flat(w.offsets), wide(bias))
    own = [by_step(*pair) for pair in zip(weights, biases, strict=True)]
    parts = [own[i : i + p.each] for i in range(0, len(own), p.each)]
    step, blocks = p.step, [len(part[0][0]) for part in parts]
    scratch = dict(
        sums_smem=plgpu.SMEM((p.wgs, p.each, TURN * COLUMNS), jnp.float32),
        bar=plgpu.Barrier(num_arrivals=p.wgs),
    )
    if p.staged:
        # By default Mosaic (JAX 0.12) would swizzle tiles of four rows, and a store of more rows
        # would swizzle differently from the loads of four rows.
        tiles = (plgpu.TilingTransform((TURN, step)),)
        scratch |= dict(
            x_smem=plgpu.SMEM((p.turns * TURN, step), jnp.bfloat16, transforms=tiles),
            norm_smem=plgpu.SMEM((p.wgs if p.late else 2, TURN), jnp.float32),
            norm_bar=plgpu.Barrier(),
            x_bar=plgpu.Barrier(num_arrivals=p.wgs if norm is None or p.late else 1),
        )
    line = lambda count, dtype: jax.ShapeDtypeStruct((count * COLUMNS,), dtype)
    types = list(map(line, blocks, dtypes))
    ys = mosaic.launch_parts(
        "quantized_linear_row", functools.partial(_part, p), p.wgs, scratch, blocks, types,
        mosaic.pad_axis(x, 0, p.turns * TURN * step).reshape(-1, step),
        parts,
        jax.tree.map(lambda a: a.astype(jnp.float32).reshape(-1, step), norm),
        wide(residual),
    )  # fmt: skip
    return [y[: w.shape[1]] for y, w in zip(ys, weights[:: p.each], strict=True)]


def _part(p: RowPlan, refs, n):
    wg = lax.axis_index("wg")
    turn = lambda i: i * p.wgs + wg
    fetch = lambda i: [_fetch(p, n, turn(i), *arrays) for *arrays, _ in refs.weights]
    fetched = [fetch(i) for i in range(p.ahead)]
    here = pl.ds(n * COLUMNS, COLUMNS)
    own = lambda ref: None if ref is None else mosaic.load(ref.at[here], _COLUMNS)
    added = [own(bias) for *_, bias in refs.weights], own(refs.residual)  # before `_finish` waits
    if p.staged:
        if p.late or refs.norm is None:
            _bring(p, refs, wg)
        else:
            pl.when(wg == 0)(lambda: _normalize(p, refs))
        plgpu.barrier_wait(refs.x_bar)

    def advance(i, carry):
        (first, *others), accs = carry
        others.append(fetch(i + p.ahead))
        return others, _multiply(p, refs, turn(i), first, accs)

    accs = [mosaic.zeros((TURN * COLUMNS,), ROW)] * p.each
    fetched, accs = lax.fori_loop(0, p.share - p.ahead, advance, (fetched, accs))
    for i, arrays in enumerate(fetched, p.share - p.ahead):
        accs = _multiply(p, refs, turn(i), arrays, accs)
    for i, acc in enumerate(accs):
        mosaic.store(refs.sums_smem.at[wg, i], acc)
    plgpu.barrier_arrive(refs.bar)
    pl.when(wg == 0)(lambda: _finish(p, refs, here, *added))


def _existing(p: RowPlan, turn):
    return turn if p.even else jnp.minimum(turn, p.turns - 1)


def _fetch(p: RowPlan, n, turn, words, scales, offsets):
    """The words, scales and offsets of a turn; past the last turn, the last turn's again."""
    turn, parts = _existing(p, turn), words.shape[2]
    steps = pl.ds(turn * TURN, TURN)
    loaded = [load_words(words.at[n, steps, i], parts) for i in range(parts)]
    shared = max(1, p.group // (TURN * p.step))  # turns with the same group
    groups = pl.ds(lax.div(turn, jnp.int32(shared)) * p.rows, p.rows)
    rows = [a for a in (scales, offsets) if a is not None]
    return loaded, [read(a.at[n, groups], p.scales_layout) for a in rows]


def _multiply(p: RowPlan, refs, turn, fetched, accs):
    """accs + the products of a turn; past the last turn accs."""
    steps = pl.ds(_existing(p, turn) * TURN, TURN)
    x = read((refs.x_smem if p.staged else refs.x).at[steps], p.x_layout)
    totals = [dot(p, acc, x, *arrays) for acc, arrays in zip(accs, fetched, strict=True)]
    if p.even:
        return totals
    exists = jnp.broadcast_to(turn < p.turns, (TURN * COLUMNS,))
    return [jnp.where(exists, total, acc) for total, acc in zip(totals, accs, strict=True)]


def _bring(p: RowPlan, refs, wg):
    """Writes a warpgroup's share of the turns of x to shared memory.

    With RMS norm it writes x times the norm's weight, and each warp's sums of x^2.
    """
    layout = mosaic.warp_rows(p.step // LANES)
    at_once = _BROUGHT // (p.step // LANES) // (1 if refs.norm is None else 2)
    squares = []
    for start in range(0, p.share, at_once):
        turns = range(start, min(start + at_once, p.share))
        if p.even:
            parts = [(wg * p.share + start, len(turns))]
        else:
            parts = [(i * p.wgs + wg, 1) for i in turns]
        at = [pl.ds(_existing(p, turn) * TURN, n * TURN) for turn, n in parts]
        # All loads come before the stores: a warpgroup's warps wait for each other at a store.
        ys = [read(refs.x.at[rows], layout) for rows in at]
        if refs.norm is not None:
            weights = [read(refs.norm[0].at[rows], layout) for rows in at]
            xs = [y.astype(jnp.float32) for y in ys]
            for (turn, n), x in zip(parts, xs, strict=True):
                some = [x[i * TURN : (i + 1) * TURN] for i in range(n)]
                exists = [jnp.broadcast_to(turn + i < p.turns, some[0].shape) for i in range(n)]
                squares += [jnp.where(e, x * x, 0.0) for e, x in zip(exists, some, strict=True)]
            ys = [x * w for x, w in zip(xs, weights, strict=True)]
        for (turn, _), rows, y in zip(parts, at, ys, strict=True):
            store = functools.partial(mosaic.store, refs.x_smem.at[rows], y)
            store() if p.even else pl.when(turn < p.turns)(store)
    if squares:
        mosaic.store(refs.norm_smem.at[wg], jnp.sum(functools.reduce(jnp.add, squares), axis=1))
    plgpu.barrier_arrive(refs.x_bar)


def _normalize(p: RowPlan, refs):
    """Writes norm(x) to shared memory, by the first warpgroup; each warp has a step of a turn."""
    layout = mosaic.warp_rows(p.step // LANES)
    load = lambda ref: read(ref, layout).astype(jnp.float32)
    x, weight = load(refs.x), load(refs.norm[0])
    bias = None if refs.norm[1] is None else load(refs.norm[1])
    k = p.turns * TURN * p.step

    def mean(x, slot):
        """The mean of all numbers, from the sums of the warps."""
        part = refs.norm_smem.at[slot]
        turns = [x[i * TURN : (i + 1) * TURN] for i in range(p.turns)]
        mosaic.store(part, jnp.sum(functools.reduce(jnp.add, turns), axis=1))
        plgpu.barrier_arrive(refs.norm_bar)
        plgpu.barrier_wait(refs.norm_bar)
        return functools.reduce(jnp.add, [part[i] for i in range(TURN)]) * (1 / k)

    if p.centered:
        x = x - mean(x, 0)
    y = x * lax.rsqrt(mean(x * x, 1) + p.eps) * weight
    mosaic.store(refs.x_smem, y if bias is None else y + bias)
    plgpu.barrier_arrive(refs.x_bar)


def _finish(p: RowPlan, refs, here, biases, residual):
    """Adds the sums of the warps in order, then bias, activation and residual; stores."""
    plgpu.barrier_wait(refs.bar)
    warps = [(w, pl.ds(s * COLUMNS, COLUMNS)) for w in range(p.wgs) for s in range(TURN)]
    sums = lambda i: [read(refs.sums_smem.at[w, i, own], _COLUMNS) for w, own in warps]
    ys = [functools.reduce(jnp.add, sums(i)) for i in range(p.each)]
    if p.late:
        parts = [refs.norm_smem[w, i] for w in range(p.wgs) for i in range(TURN)]
        k = p.turns * TURN * p.step
        scale = lax.rsqrt(functools.reduce(jnp.add, parts) * (1 / k) + p.eps)
        ys = [y * scale for y in ys]
    mosaic.store(refs.out.at[here], finished(p.activation, ys, biases, residual))
