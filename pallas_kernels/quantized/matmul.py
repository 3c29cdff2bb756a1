"""The kernel of quantized_linear for 2 to 64 rows: y^T = W^T x^T, and W is unpacked in registers.

wgmma multiplies at least 64 rows, so the columns n of W are its rows, and the M rows of x are its
columns, padded to 8 or more.  wgmma reads its left operand from registers, where a thread unpacks W
(unpack.py), and x^T from shared memory.

    block (n, split)   64 columns n, turns [split T / splits, (split + 1) T / splits) of K
    warpgroup wg       every `wgs`-th of these turns, and its own ring of `stages` buffers:

    words  (4, span parts, 128) -> registers -> tile: 64 x 64 bfloat16 -> wgmma += w x^T
    scales (4, groups, 16)      -> registers ---^                            |
    x      (rows, span steps)   -> shared memory ---------------------------+

A turn is `span` steps of 64 k or more; a step is one or two steps of the packed form.  A turn ends
once its wgmmas are done.

The warpgroups then add their sums in a fixed order (the last one passes its sum to the one before),
and the first writes the block's sum, in float32.  XLA adds the splits, in order, in the kernel that
also adds the bias.  There are no atomics, so two runs are equal bit for bit.

No sweep has chosen the constants; docs/decoding.md has the times.
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
from pallas_kernels.mosaic import WGMMA, read
from pallas_kernels.quantized import unpack
from pallas_kernels.quantized.formats import QuantizedWeight
from pallas_kernels.quantized.unpack import EDGE, LANE_WORDS, SCALES, TILES

MAX_ROWS = 64
_WGS = 4
_STAGES = 4
_SPAN = 2  # short steps of a turn, which has about 100 instructions besides unpacking its weights
_SMEM = 112 * 1024  # per block, so that an SM (227 KB) holds two blocks
_BLOCKS = 2 * 132  # per wave: two blocks for each SM of an H100
_MOST_SPLITS = 16


class FewPlan(NamedTuple):
    """How a product is split; see the picture."""

    rows: int  # of x, with padding
    sets: int  # of four tiles, 64 columns n
    turns: int  # of K
    span: int  # steps of a turn
    step: int  # k of a step
    parts: int  # per step, which has one or two packed steps
    groups: int  # per turn, or 1
    group: int  # k in a group
    wgs: int
    stages: int
    splits: int


def plan(m: int, weight: QuantizedWeight) -> FewPlan:
    rows = next(r for r in (8, 16, 32, 64) if r >= m)
    asymmetric = weight.offsets is not None
    steps = max(1, EDGE // weight.step)  # packed steps of a step
    step, parts = weight.step * steps, weight.parts * steps
    sets = mosaic.cdiv(weight.words.shape[0], TILES)
    span = _SPAN if step <= 128 else 1
    turns = mosaic.cdiv(weight.steps, steps * span)
    group = weight.group or turns * span * step
    groups = max(1, span * step // group)
    turn = 2048 * parts * span + 128 * groups * (1 + asymmetric) + 2 * rows * span * step
    # Two blocks on an SM, or one where a turn is large; two turns in flight for each warpgroup.
    wgs, others = min(_WGS, turns), 4 * EDGE * rows + 2048  # the sum; barriers and alignment
    if (room := (_SMEM - others) // turn) < 2 * wgs:
        room = (2 * _SMEM - others) // turn
    while room < 2 * wgs and wgs > 1:
        wgs //= 2
    stages = min(_STAGES, room // wgs)
    splits = max(1, min(_BLOCKS // sets, turns // wgs, _MOST_SPLITS))
    return FewPlan(rows, sets, turns, span, step, parts, groups, group, wgs, stages, splits)


@jax.jit
def product(x, weight: QuantizedWeight):
    """x w' as float32 parts (splits, N, rows), to be added, for x (M, K) bfloat16."""
    p, asymmetric = plan(x.shape[0], weight), weight.offsets is not None
    slots = p.wgs * p.stages
    return mosaic.kernel(
        functools.partial(_body, p, (weight.bits, weight.format)),
        name="quantized_linear",
        out_type=jax.ShapeDtypeStruct((p.splits, p.sets * EDGE, p.rows), jnp.float32),
        scratch_types=dict(
            **unpack.buffers(slots, TILES, p.span * p.parts, p.groups, asymmetric),
            x_smem=mosaic.tiled(slots, p.span, p.rows, p.step, dtype=jnp.bfloat16),
            sum_smem=plgpu.SMEM((EDGE, p.rows), jnp.float32),
            bars=plgpu.Barrier(num_arrivals=2 + asymmetric + p.span, num_barriers=slots),
            turn_bars=plgpu.Barrier(num_barriers=p.wgs),
        ),
        **mosaic.grid(split=p.splits, n=p.sets),
        num_threads=p.wgs,
    )(*unpack.by_tile(weight), unpack.right_operand(x, weight.format))


def _body(p: FewPlan, kind, words, scales, offsets, x, out, **smem):
    refs = SimpleNamespace(words=words, scales=scales, offsets=offsets, x=x, out=out, **smem)
    wg, split = lax.axis_index("wg"), lax.axis_index("split")
    first = lax.div(split * p.turns, jnp.int32(p.splits))
    last = lax.div((split + 1) * p.turns, jnp.int32(p.splits))
    count = lax.div(last - first - wg + p.wgs - 1, jnp.int32(p.wgs))  # turns of this warpgroup
    fetch = lambda i: _fetch(p, refs, i, first + wg + i * p.wgs)
    for i in range(p.stages):
        pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))

    def multiply(acc):
        @pl.loop(0, count)
        def _(i):
            _multiply(p, kind, refs, i, acc)
            plgpu.commit_smem()  # the copies overwrite what the threads have read
            pl.when(i + p.stages < count)(lambda: fetch(i + p.stages))

        return acc[...]

    total = pl.run_scoped(multiply, plgpu.ACC((EDGE, p.rows), jnp.float32))
    for w in reversed(range(p.wgs)):
        pl.when(wg == w)(functools.partial(_pass_on, p, refs, w, total))


def _fetch(p: FewPlan, refs, i, turn):
    """Starts the copies of this warpgroup's i-th turn; past K and M they are zeros."""
    ring, zero = unpack.ring_of(p.stages, refs.bars), lax.rem(turn, jnp.int32(1))
    tiles = pl.ds(lax.axis_index("n") * TILES, TILES)
    k = turn * p.span * p.step
    group = pl.ds(lax.div(k, jnp.int32(p.group)), p.groups)
    parts = p.span * p.parts
    unpack.send(ring, i, refs, tiles, pl.ds(turn * parts, parts), group)
    # JAX 0.12 rejects slices that are statically too wide, so the first row is a variable.
    for s in range(p.span):
        x = refs.x.at[pl.ds(zero * 8, p.rows), pl.ds(k + s * p.step, p.step)]
        ring.send(i, x, refs.x_smem, s)


def _multiply(p: FewPlan, kind, refs, i, acc):
    """acc += w x^T of this warpgroup's i-th turn; kind: bits and format of w."""
    slot = unpack.ring_of(p.stages, refs.bars).wait(i)
    per = max(1, p.groups // p.span)  # groups of a step

    @pl.loop(0, p.span)
    def _(s):
        here = [refs.words_smem.at[slot, :, s * p.parts + j] for j in range(p.parts)]
        words = [read(ref, LANE_WORDS) for ref in here]
        for block in range(p.step // EDGE):
            k = block * EDGE
            own = range(k * per // p.step, (k + EDGE - 1) * per // p.step + 1)
            own = [(slot, slice(None), lax.div(s * p.groups, jnp.int32(p.span)) + g) for g in own]
            scales = unpack.read_scales(refs, SCALES, *own)
            w = unpack.tile(words, *scales, block, *kind)
            x = refs.x_smem.at[slot, s, :, pl.ds(k, EDGE)]
            plgpu.wgmma(acc, w, x.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # each one in flight needs 16 registers
        plgpu.wgmma_wait(0)


def _pass_on(p: FewPlan, refs, w: int, total):
    """Adds the sum of the warpgroups after w, and passes the result to w - 1, or to memory."""
    if w < p.wgs - 1:
        plgpu.barrier_wait(refs.turn_bars.at[w])
        total = total + read(refs.sum_smem, WGMMA)
    if w:
        mosaic.store(refs.sum_smem, total)
        plgpu.barrier_arrive(refs.turn_bars.at[w - 1])
        return
    target = refs.out.at[lax.axis_index("split"), pl.ds(lax.axis_index("n") * EDGE, EDGE)]
    mosaic.store(target, total)
