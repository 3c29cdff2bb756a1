"""Attention without TMA and wgmma, for every NVIDIA GPU since Ampere: what its kernels share.

A block is one warpgroup of 128 threads.  It owns 64 or 128 rows (of queries; in the dK/dV kernel of
keys) of one head.  The tiles of columns that they see stream by through shared memory, from which
every matmul takes its operands (ampere.py).  Two blocks run on a processor at a time where shared
memory allows it: one's softmax runs under the other's matmuls.  The arrangement is
FlashAttention-2's (Dao 2023).  What a block sees (masks.py) and which block works on what
(schedule.py) is as on Hopper; every block has one item, and the hardware hands them out.

The tables `tiles` are sized by the 255 registers of a thread and by 99 KB of shared memory.  128
rows read an operand from shared memory once where 64 read it twice.  On an H100 the largest tiles
are fastest, though some spill up to 60 bytes; docs/attention.md has the sweep.  A100 and H100 take
them.  Elsewhere ("tight") ptxas spills more, and RTX has tensor cores half as fast, for which 64
rows read fast enough; nobody has timed those.
"""

import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.flash_attention.masks import Visits, same_segment, visible
from pallas_kernels.flash_attention.schedule import Call, Heads, Schedule, Tiles, share_out
from pallas_kernels.mosaic import COL, ROW

WIDTHS = (32, 64, 96, 128, 256)  # of tiles in shared memory; their columns past D are zeros
SECTION = 16  # MiB of what streams, of the heads that are worked on at a time


class Block(NamedTuple):
    """What a block works on; tiles of columns are counted from the sequence's start."""

    batch: Any
    head: Any  # of the queries; in the dK/dV kernel of the keys
    row: Any  # the first one
    low: Any  # the first tile that it sees
    high: Any  # the one after its last
    whole: tuple[Any, Any]  # the same of the tiles that each of its rows sees whole

    def rows(self, s: Schedule):
        return pl.ds(self.row, s.block)


class Worker(NamedTuple):
    """A block, with what its kernel's functions use."""

    schedule: Schedule
    inputs: Any  # the kernel's Inputs: references to global memory
    smem: Any  # what the kernel's `scratch` lists, by name
    block: Block


def width_of(head_dim: int) -> int:
    """Columns of the tiles of heads."""
    return next(width for width in WIDTHS if width >= head_dim)


def schedule(
    q, k, rows: int, step: int, call: Call, heads: Heads | None, *, packed: bool, by_keys=False
) -> Schedule:
    """The Schedule of a kernel whose blocks own `rows` rows and take `step` columns at a time.

    heads: q, k and v are the same array, which holds all three.  packed: there are segments.
    by_keys: a block owns keys, not queries.
    """
    b, _, h, d = q.shape
    kv_heads, k_first, v_first = k.shape[2], 0, 0
    if heads is not None:
        h, kv_heads, k_first, v_first = *heads, heads.q, heads.q + heads.kv
    (t, s), group, tile = call.lengths, h // kv_heads, Tiles(1, step, 1, False, SECTION)
    visits = Visits(call.lengths, call.causal, call.window, step, by_keys)
    if by_keys:
        first_row = lambda level: level * rows  # most queries see the first keys
        pairs, pair_bytes = (b, kv_heads), 4 * t * d * group  # Q and dO of a kv head
    else:
        blocks = mosaic.cdiv(t, rows)
        first_row = lambda level: (blocks - 1 - level) * rows  # most keys first
        pairs, pair_bytes = (b, h), 4 * s * d // group  # a head's share of K and V
    items = share_out(
        visits, rows, first_row, pairs, tile, sms=call.sms, pair_bytes=pair_bytes, packed=packed
    )
    return Schedule(
        visits, items, tile, rows, 0, q.dtype, width_of(d), group, k_first, v_first, call.scale,
        call.softcap, packed,
    )  # fmt: skip


def tight(call: Call, packed: bool) -> bool:
    """Whether a backward kernel takes its smaller tiles: segments and softcap need registers."""
    return call.tight or packed or call.softcap is not None


def block_of(s: Schedule, segments) -> Block:
    row, (batch, head) = s.items.where(lax.axis_index("block"))
    limits, same = s.limits(row, batch, segments)
    low, high = s.visits.seen(row, row + s.block, *limits)
    return Block(batch, head, row, low, high, s.visits.whole(row, row + s.block, *same))


def load_k(w: Worker, tile):
    """Starts to copy a tile of K for a block of queries."""
    _load(w, w.inputs.k, w.schedule.k_first, w.smem.k, tile)


def load_v(w: Worker, tile):
    """Starts to copy a tile of V for a block of queries."""
    _load(w, w.inputs.v, w.schedule.v_first, w.smem.v, tile)


def _load(w: Worker, ref, first_head, buffer, tile):
    s, b = w.schedule, w.block
    head, first = first_head + b.head // s.group, tile * s.columns
    ampere.load_rows(ref, buffer, b.batch, head, first, s.visits.lengths[1])


def mask(s: Schedule, b: Block, segments, tile, x):
    """Scores of a tile, with -inf where a query may not see a key; rows are as the Schedule's."""
    visits = s.visits
    ragged = s.ragged and not visits.by_keys  # keys past the last one are columns
    if not (visits.causal or ragged or s.packed):
        return x
    crosses = (tile < b.whole[0]) | (tile >= b.whole[1])
    if ragged:
        crosses |= tile == visits.tiles - 1

    def masked(x):
        column = tile * s.columns
        if s.packed:
            x = _in_segment(s, b, segments, column, x)
        if visits.by_keys:
            q0, k0 = column + visits.offset, b.row
        else:
            q0, k0 = b.row + visits.offset, column
        keys = visits.lengths[1] if ragged else None
        return visible(
            x, q0, k0, causal=visits.causal, window=visits.window, keys=keys,
            transposed=visits.by_keys,
        )  # fmt: skip

    return lax.cond(crosses, masked, lambda x: x, x)


def _in_segment(s: Schedule, b: Block, segments, column, x):
    ids = segments.q_ids, segments.k_ids
    rows, columns = reversed(ids) if s.visits.by_keys else ids
    read = functools.partial(plgpu.load, optimized=False)
    mine = read(rows.at[b.batch, b.rows(s)], layout=ROW)
    return same_segment(x, mine, read(columns.at[b.batch, pl.ds(column, s.columns)], layout=COL))
