"""The kernel of quantized_linear for many rows: y^T = w'^T x^T, and w' is unpacked in registers.

The gradient dx^T = w' dy^T is the same kernel with `back`: rows of its wgmmas are k, it sums over
n, and the unpacked registers are transposed on their way (unpack.py).  Then swap K and N in what
follows: y is dx, x is dy, 64 columns n are 64 k, and a turn of 256 k is a turn of 256 n.

As in matmul.py 64 columns n of w' are the rows of a wgmma, its left operand in registers, and rows
of x its columns.  Here the tensor core is the limit, so it must never wait for unpacking:

    block (n, m, split)   128 columns n, `rows` rows m of x, turns [split T / splits, ...) of K
    warpgroup wg          64 of these columns; sums (64, rows) in registers

    words, scales   of a turn, 256 k   ring of `slots` buffers of each warpgroup   word_bars
    x (rows, 64)    of a step, 64 k    ring of `stages` buffers that both read     x_bars, free_bars

    step s    words -> registers -> w' of s      while the tensor core multiplies s - 1
              start the wgmma of s; wait for the wgmma of s - 1, which frees its buffer
              warpgroup 0 refills the buffer of s - 2, once both warpgroups have freed it

A warpgroup has at most two wgmmas in flight, whose w' take 32 registers; docs/decoding.md counts
the instructions of a step.

Without splits the block transposes its tile in the buffers of x, and writes y.  With splits, or
with a bias, it writes float32 sums, which XLA adds in order.  There are no atomics, so two runs are
equal bit for bit.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import read
from pallas_kernels.pipeline import Ring
from pallas_kernels.quantized import unpack
from pallas_kernels.quantized.formats import COLUMNS, LANES, WORDS, QuantizedWeight
from pallas_kernels.quantized.unpack import EDGE, TILES

_WGS = 2
_BLOCKS = 4  # per turn; each is a step
_TURN = _BLOCKS * EDGE  # k per turn: the longest step of the packed form
_CHUNK = 64  # rows of x that the epilogue transposes at once
_SMEM = 226 * 1024  # per block; the rest of an SM's 227 KB is for barriers
_MOST_SLOTS, _MOST_SPLITS = 3, 8

# For `_clocks`, counted.  With this _START seven of eight calls in docs/decoding.md took 0.94 to
# 1.13 of the estimate; the short K of 6144 x 2048 took 0.75.
_SMS = 132  # of an H100
_START = 15000  # clocks of a block besides its steps
_FINISH = 4000  # clocks of the kernel that adds the sums of splits
_BYTES = 1500  # of these sums per clock


class ManyPlan(NamedTuple):
    """How a product is split; see the picture."""

    rows: int  # of x per block
    sets: int  # of 128 columns n
    turns: int  # of K
    parts: int  # per turn
    groups: int  # per turn, or 1
    step: int  # k of a packed step, or of the two of 8 bits in a block
    slots: int
    stages: int
    splits: int
    tiles: int  # of 16 n per slot
    back: bool  # dx, not y
    group: int | None  # k in a group; None: one scale for each column


def plan(m: int, weight: QuantizedWeight, most_splits=_MOST_SPLITS, *, back=False) -> ManyPlan:
    """The plan for M rows of x (of dy for `back`) that should take least time."""
    turns = mosaic.cdiv(weight.steps * weight.step, _TURN)
    sets = mosaic.cdiv(weight.words.shape[0], TILES * _WGS)
    parts = weight.parts * (_TURN // weight.step)
    groups = max(1, _TURN // (weight.group or _TURN))
    if back:
        turns, sets = mosaic.cdiv(weight.words.shape[0], _TURN // COLUMNS), turns * _TURN // 128
        parts, groups = EDGE // weight.step, 1
    asymmetric = weight.offsets is not None
    splits = range(1, min(most_splits, turns) + 1)
    choices = [(rows, n) for rows in (256, 192, 128) for n in splits]
    rows, splits = min(choices, key=lambda choice: _clocks(m, sets, turns, *choice))
    tiles = _TURN // COLUMNS if back else TILES
    slot = _WGS * tiles * (LANES * WORDS * 4 * parts + 2 * COLUMNS * groups * (1 + asymmetric))
    stages = 8 if rows == 128 else 4  # powers of two: a remainder is one instruction
    slots = min(_MOST_SLOTS, (_SMEM - stages * 2 * EDGE * rows) // slot)
    sizes = rows, sets, turns, parts, groups, max(weight.step, EDGE), slots, stages, splits
    return ManyPlan(*sizes, tiles, back, weight.group)


def _clocks(m: int, sets: int, turns: int, rows: int, splits: int) -> float:
    """The clocks that a product should take: the waves of blocks, and the sums of splits."""
    blocks = sets * mosaic.cdiv(m, rows)
    # A wgmma of 64 x rows x 64 takes 2 * rows clocks, and each warpgroup has one in a step.
    steps = mosaic.cdiv(turns, splits) * _BLOCKS * 2 * _WGS * rows
    sums = 2 * 4 * splits * blocks * rows * EDGE * _WGS  # bytes written and read
    others = _FINISH + sums / _BYTES if splits > 1 else 0
    return mosaic.cdiv(blocks * splits, _SMS) * (_START + steps) + others


def linear(x, weight: QuantizedWeight, *, back: bool = False):
    """x w' as bfloat16 (M, N), for x (M, K) bfloat16, without splits.

    back: x w'^T (M, K) for x (M, N) instead.
    """
    p, columns = plan(x.shape[0], weight, most_splits=1, back=back), weight.shape[not back]
    # Mosaic wants whole swizzle tiles.  A warpgroup past the last tile copies nothing; but if there
    # is a single tile, Mosaic (0.12) drops the coordinate, and the copy would land on this tile.
    width = max(_WGS, mosaic.cdiv(columns, EDGE)) * EDGE
    out = jax.ShapeDtypeStruct((mosaic.cdiv(len(x), 8) * 8, width), jnp.bfloat16)
    return _product(x, weight, out, p)[: len(x), :columns]


def has_gradient(weight: QuantizedWeight) -> bool:
    """Whether `back` takes this weight: a warp has whole words and one group of its 64 k."""
    return weight.bits in (4, 8) and weight.format != "2:4" and (weight.group or EDGE) % EDGE == 0


def sums(x, weight: QuantizedWeight):
    """x w' as float32 parts (splits, N, rows), to be added, for x (M, K) bfloat16."""
    p = plan(x.shape[0], weight)
    shape = p.splits, p.sets * _WGS * EDGE, mosaic.cdiv(len(x), p.rows) * p.rows
    return _product(x, weight, jax.ShapeDtypeStruct(shape, jnp.float32), p)


@jax.jit(static_argnums=(2, 3))
def _product(x, weight: QuantizedWeight, out, p: ManyPlan):
    asymmetric = weight.offsets is not None
    return mosaic.kernel(
        functools.partial(_body, p, (weight.bits, weight.format)),
        name="quantized_linear_dx" if p.back else "quantized_linear_many",
        out_type=out,
        scratch_types=dict(
            **unpack.buffers(_WGS * p.slots, p.tiles, p.parts, p.groups, asymmetric),
            x_smem=mosaic.tiled(p.stages, p.rows, EDGE, dtype=jnp.bfloat16),
            word_bars=plgpu.Barrier(num_arrivals=2 + asymmetric, num_barriers=_WGS * p.slots),
            x_bars=plgpu.Barrier(num_barriers=p.stages),
            free_bars=plgpu.Barrier(num_arrivals=_WGS, num_barriers=p.stages),
            done_bar=plgpu.Barrier(num_arrivals=_WGS),
        ),
        **mosaic.grid(split=p.splits, n=p.sets, m=mosaic.cdiv(len(x), p.rows)),
        num_threads=_WGS,
    )(*unpack.by_tile(weight), unpack.right_operand(x, weight.format))


def _body(p: ManyPlan, kind, words, scales, offsets, x, out, **smem):
    refs = SimpleNamespace(words=words, scales=scales, offsets=offsets, x=x, out=out, **smem)
    wg, split = lax.axis_index("wg"), lax.axis_index("split")
    first = lax.div(split * p.turns, jnp.int32(p.splits))
    count = lax.div((split + 1) * p.turns, jnp.int32(p.splits)) - first
    fetch = lambda i: pl.when(i < count)(lambda: _fetch_words(p, refs, i, first + i))
    load = lambda s: pl.when(s < count * _BLOCKS)(lambda: _load_x(p, refs, s, first * _TURN))
    for i in range(p.slots):
        fetch(jnp.int32(i))

    @pl.when(wg == 0)
    def _():
        for s in range(p.stages):
            load(jnp.int32(s))

    def multiply(acc):
        @pl.loop(0, count)
        def _(i):
            _multiply(p, kind, refs, i, acc, load)
            plgpu.commit_smem()  # the copies overwrite what the threads have read
            fetch(i + p.slots)

        return acc[...]

    total = pl.run_scoped(multiply, plgpu.ACC((EDGE, p.rows), jnp.float32))
    if refs.out.dtype == jnp.float32:
        rows = pl.ds(lax.axis_index("m") * p.rows, p.rows)
        mosaic.store(refs.out.at[split, pl.ds(_columns(), EDGE), rows], total)
    else:
        _store_turned(p, refs, total)


def _x_ring(p: ManyPlan, refs, wg=0) -> Ring:
    """The ring of x, which warpgroup 0 fills."""
    return Ring(p.stages, refs.x_bars, refs.free_bars, wg=wg)


def _fetch_words(p: ManyPlan, refs, i, turn):
    """Starts the copies of this warpgroup's words and scales of the i-th turn."""
    ring, zero = unpack.ring_of(p.slots, refs.word_bars), lax.rem(turn, jnp.int32(1))
    if p.back:
        tile, part = turn * p.tiles, _columns() // EDGE * p.parts
        group = lax.div(_columns(), jnp.int32(p.group or 1))
    else:
        tile, part, group = _columns() // COLUMNS, turn * p.parts, turn * p.groups
    tiles, group = pl.ds(tile, p.tiles), pl.ds(group if p.group else zero, p.groups)
    unpack.send(ring, i, refs, tiles, pl.ds(part, p.parts), group)


def _load_x(p: ManyPlan, refs, s, k):
    """Starts the copy of x of step s of the block, whose K begins at k; zeros past M and K."""
    rows = pl.ds(lax.axis_index("m") * p.rows, p.rows)
    _x_ring(p, refs).send(s, refs.x.at[rows, pl.ds(k + s * EDGE, EDGE)], refs.x_smem)


def _columns():
    """The first column n of this warpgroup."""
    return (lax.axis_index("n") * _WGS + lax.axis_index("wg")) * EDGE


def _multiply(p: ManyPlan, kind, refs, i, acc, load):
    """acc += w' x^T of the i-th turn; kind: bits and format of w."""
    slot = unpack.ring_of(p.slots, refs.word_bars).wait(i)
    unpacked = (_transposed if p.back else _columns_of)(p, kind, refs, slot)
    for block, w in enumerate(unpacked):
        s = i * _BLOCKS + block
        plgpu.wgmma(acc, w, refs.x_smem.at[_x_ring(p, refs).wait(s)].transpose((1, 0)))
        plgpu.wgmma_wait(1)
        pl.when(s >= 1)(lambda s=s: _x_ring(p, refs).release(s - 1))
        refill = lambda s=s: _x_ring(p, refs, lax.axis_index("wg")).refill(s - 2, load)
        pl.when(s >= 2)(refill)


def _columns_of(p: ManyPlan, kind, refs, slot):
    """w' of each step of a turn, 64 n x 64 k."""
    per = p.step // EDGE  # blocks of a step of the packed form
    parts, words = p.parts * per // _BLOCKS, []
    for block in range(_BLOCKS):
        if block % per == 0:
            own = range(block // per * parts, (block // per + 1) * parts)
            words = [read(refs.words_smem.at[slot, :, j], unpack.LANE_WORDS) for j in own]
        groups = range(block * p.groups // _BLOCKS, ((block + 1) * p.groups - 1) // _BLOCKS + 1)
        scales = unpack.read_scales(refs, unpack.SCALES, *((slot, slice(None), g) for g in groups))
        yield unpack.tile(words, *scales, block % per, *kind)


def _transposed(p: ManyPlan, kind, refs, slot):
    """w' of each step of a turn, 64 k x 64 n."""
    for block in range(_BLOCKS):
        tiles = range(block * TILES, (block + 1) * TILES)
        words = [read(refs.words_smem.at[slot, t], unpack.PLANE_WORDS[kind[0]]) for t in tiles]
        scales = unpack.read_scales(refs, unpack.COLUMN_SCALES, *((slot, t) for t in tiles))
        yield unpack.transposed_tile(words, *scales, *kind)


def _store_turned(p: ManyPlan, refs, total):
    """Transposes the tile and stores it."""
    plgpu.barrier_arrive(refs.done_bar)
    plgpu.barrier_wait(refs.done_bar)  # both have read x, whose buffers now take y
    y_smem = refs.x_smem.at[lax.axis_index("wg")]
    for c in range(0, p.rows, _CHUNK):
        y = total[:, c : c + _CHUNK].astype(jnp.bfloat16)
        y_smem.at[pl.ds(c, _CHUNK)].transpose((1, 0))[...] = y
    plgpu.commit_smem()
    rows = pl.ds(lax.axis_index("m") * p.rows, p.rows)
    plgpu.copy_smem_to_gmem(y_smem, refs.out.at[rows, pl.ds(_columns(), EDGE)])
    plgpu.wait_smem_to_gmem(0)
