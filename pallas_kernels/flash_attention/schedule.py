"""A call of a kernel: which block works on what, in which order, for all three kernels.

An item is one block of rows (of queries; in the dK/dV kernel of keys) of one pair (batch, head),
past which all the columns stream that its rows see.  What streams should come from the L2 cache, no
block should wait for the busiest one, and a block should know its next item early.
"""

import functools
import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import Segments, Visits, segment_spans
from pallas_kernels.mosaic import ROWS


class Call(NamedTuple):
    """The static arguments of the op."""

    lengths: tuple[int, int]  # the true T and S; the arrays are padded
    causal: bool
    scale: float
    sms: int  # of the device
    window: int | None
    softcap: float | None
    general: bool = False  # for every GPU since Ampere, not for Hopper
    tight: bool = False  # in the general form: with its smaller tiles


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    wgs: int  # computing warpgroups of a block, 64 rows each
    step: int  # columns of one step: keys, or queries in the dK/dV kernel
    stages: int  # steps in flight
    # True: a block for each SM, which takes several work items and loads the next one's rows while
    # it works on this one's.  False: a block for each item, which the hardware hands out.
    persistent: bool
    section: int  # MiB of streamed operands of the heads worked on at a time; 0: of one head


class Items(NamedTuple):
    """The items of a kernel, and how its grid comes by them."""

    grid: int  # blocks of the kernel
    table: np.ndarray | None  # what `plan` gives each block; None: one item a block
    where: Callable  # item -> (first row of the block, (batch, head))

    @property
    def persistent(self) -> bool:
        """Whether a block takes several items, and loads the next one's rows meanwhile."""
        return self.table is not None


class Heads(NamedTuple):
    """Where the heads of q, k and v stand, if one array (B, T, H + 2 K, D) holds all of them."""

    q: int  # H, which come first
    kv: int  # K; the heads of k come next, then the heads of v


class Schedule(NamedTuple):
    """What is static in a call of a kernel: what it computes, how it is cut up, who does what."""

    visits: Visits
    items: Items
    tile: Tiles
    block: int  # rows of a block
    lead: int  # rows of the first block that do not exist, in whole warpgroups
    dtype: Any
    width: int  # D
    group: int  # query heads of a kv head
    k_first: int  # the first head of k in its array
    v_first: int
    scale: float
    softcap: float | None
    packed: bool  # there are segments

    @property
    def wgs(self) -> int:
        return self.tile.wgs

    @property
    def columns(self) -> int:
        """Columns of one step: keys, or queries in the dK/dV kernel."""
        return self.tile.step

    @property
    def ragged(self) -> bool:
        """Whether the last tile of keys is not full, where a block owns queries."""
        return self.visits.lengths[1] % self.columns != 0

    @property
    def stages(self) -> int:
        return self.tile.stages

    @property
    def sides(self) -> int:
        """Buffers of a block's own rows: of this item, and of the next one if there is one."""
        return 2 if self.items.persistent else 1

    def slot(self, n):
        """The slot of step n in a ring of `stages`."""
        return lax.rem(n, jnp.int32(self.stages))

    def limits(self, row, batch, segments):
        """The tiles that segments leave to the block that begins at `row`, see Visits.limits.

        segments: references to Segments, or None.
        """
        mine = lax.div(row + self.lead, jnp.int32(self.block))
        return self.visits.limits((lambda n: segments.spans[batch, mine, n]) if segments else None)

    def buffer(self, n: int, rows: int):
        """Shared memory for n tiles of that many rows, as TMA and wgmma want it."""
        tiling = mosaic.wgmma_tiles(self.width, self.dtype)
        return plgpu.SMEM((n, rows, self.width), self.dtype, transforms=tiling)


def schedule(
    q, k, tile: Tiles, call: Call, heads: Heads | None, *, packed: bool, by_keys=False, sets: int
) -> Schedule:
    """The Schedule of a kernel.

    heads: q, k and v are the same array, which holds all three.  packed: there are segments.
    by_keys: a block owns keys, not queries.  sets: of 64 rows, which a block owns.
    """
    b, _, h, d = q.shape
    kv_heads, k_first, v_first = k.shape[2], 0, 0
    if heads is not None:
        h, kv_heads, k_first, v_first = *heads, heads.q, heads.q + heads.kv
    (t, s), group, block = call.lengths, h // kv_heads, sets * ROWS
    visits = Visits(call.lengths, call.causal, call.window, tile.step, by_keys)
    if by_keys:
        lead = 0
        first_row = lambda level: level * block  # most queries see the first keys
        batch_heads, pair_bytes = (b, kv_heads), 4 * t * d * group  # Q and dO of a kv head
    else:
        blocks = mosaic.cdiv(t, block)
        # The block that is not full is the first one, which sees the fewest keys: its first
        # warpgroups have nothing to do.  (At T = 1024 it has 64 of 192 rows; at the end it took 8
        # of 32 steps.)
        lead = (blocks * block - t) // ROWS * ROWS
        first_row = lambda level: (blocks - 1 - level) * block - lead  # most keys first
        batch_heads, pair_bytes = (b, h), 4 * s * d // group  # a head's share of K and V
    items = share_out(
        visits, block, first_row, batch_heads, tile, sms=call.sms, pair_bytes=pair_bytes,
        packed=packed,
    )  # fmt: skip
    return Schedule(
        visits, items, tile, block, lead, q.dtype, d, group, k_first, v_first, call.scale,
        call.softcap, packed,
    )  # fmt: skip


def launch(s: Schedule, name: str, body, inputs, out_type, scratch: dict, **parameters):
    """Calls a kernel with body(s, inputs, *results, smem).

    inputs: a NamedTuple of arrays, of which the body gets references.  scratch: shared memory and
    barriers by name, which are the attributes of smem.  parameters: further CompilerParams.
    """

    def run(inputs, *results, **smem):
        body(s, inputs, *results, SimpleNamespace(**smem))

    return mosaic.kernel(
        run,
        name=name,
        out_type=out_type,
        scratch_types=scratch,
        grid=(s.items.grid,),
        grid_names=("block",),
        num_threads=s.wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, **parameters
        ),
    )(inputs)


def stat_rows(t: int) -> int:
    """Length of the arrays of row statistics (lse, delta) for t queries.

    It is a whole number of blocks of every kernel: a copy of a contiguous row is a plain bulk copy,
    which nothing clips at the end of the row.
    """
    return mosaic.cdiv(t, 6 * ROWS) * 6 * ROWS


def pad_segments(segments, lengths):
    """Ids of queries and keys as the kernels copy them: whole tiles of every kernel."""
    return tuple(
        mosaic.pad_axis(ids[:, :n], 1, stat_rows(1))
        for ids, n in zip(segments, lengths, strict=True)
    )


def with_spans(s: Schedule, ids) -> Segments | None:
    """What a kernel reads of segments; ids: of the queries and of the keys, or None."""
    if ids is None:
        return None
    q_ids, k_ids = ids
    rows, columns = (k_ids, q_ids) if s.visits.by_keys else (q_ids, k_ids)
    return Segments(q_ids, k_ids, segment_spans(rows, columns, s.visits, s.block, s.lead))


def share_out(
    visits: Visits, block: int, first_row: Callable, batch_heads: tuple[int, int],
    tile: Tiles, *, sms: int, pair_bytes: int, packed: bool,
) -> Items:  # fmt: skip
    """The Items of blocks of `block` rows, which begin at first_row(level), the longest at 0.

    pair_bytes: of what streams past a pair.  packed: there are segments.
    """
    blocks, (batch, heads) = mosaic.cdiv(visits.rows, block), batch_heads
    pairs = batch * heads
    section = section_pairs(pairs, pair_bytes, tile.section)
    order, table = item_order(blocks, pairs, section), None
    if tile.persistent and worth_planning(blocks, blocks * pairs, sms, packed):
        costs = block_costs(visits, first_row(np.arange(blocks)), block)
        table = plan(costs, pairs, section, sms)

    def where(item):
        level, pair = order(item) if table is None else mosaic.divide(item, pairs)
        return first_row(level), mosaic.divide(pair, heads)

    return Items(blocks * pairs if table is None else sms, table, where)


def section_pairs(pairs: int, pair_bytes: int, section: int) -> int:
    """Of how many pairs a section of that many MiB consists; all sections are about as long."""
    fit = max(1, (section << 20) // max(1, pair_bytes))
    return mosaic.cdiv(pairs, mosaic.cdiv(pairs, fit))


def item_order(levels: int, pairs: int, section: int):
    """item -> (level, pair): which block of rows (0: the longest) of which (batch, head).

    Longest first, so that the short blocks fill the gaps at the end; but one section of the pairs
    after the other, so that what the running blocks stream stays in the L2 cache (50 MB).
    """

    def decode(item):
        start = item // (section * levels) * section  # the first pair of the section
        width = jnp.minimum(section, pairs - start)  # the last section may be a narrow one
        rest = item - start * levels
        return rest // width, start + rest % width

    return decode


def worth_planning(blocks: int, items: int, sms: int, packed: bool) -> bool:
    """Whether it pays that a block of the grid takes several items, which `plan` gives it.

    blocks: items of a pair.  What segments leave of an item is not known when it is planned.  Many
    blocks may then differ much from what they were taken for: by simulation the forward pass gains
    0 to 20% up to 16 blocks, and loses 10% at 32 and 20% at 64, in some cases 60%.
    """
    return items > sms and not (packed and blocks > 16)


@functools.cache
def plan(costs: tuple[int, ...], pairs: int, section: int, blocks: int) -> np.ndarray:
    """What each block of a persistent grid works on: (blocks, n) int32, rows of n_items, items, -1.

    The item level * pairs + pair takes about the time costs[level].  In the order of `item_order`
    each goes to the block that is free first: what the hardware does with a block for each item.
    Taken in turns, at B32 T1024 12/12 D64 the busiest block would have 3 to 13% more than another.
    """
    rows = [[] for _ in range(blocks)]
    free = [(0, block) for block in range(blocks)]
    for start in range(0, pairs, section):
        for level, cost in enumerate(costs):
            for pair in range(start, min(start + section, pairs)):
                time, block = free[0]
                rows[block].append(level * pairs + pair)
                heapq.heapreplace(free, (time + cost, block))
    table = np.full((blocks, max(map(len, rows)) + 3), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row) + 1] = len(row), *row
    return table


def block_costs(visits: Visits, first_rows, block: int) -> tuple[int, ...]:
    """About what a block costs that begins at each of first_rows: columns of the tiles visited.

    128 more for what no other work of the block runs under.  What segments leave out is not known.
    """
    low, high = visits.seen(first_rows, first_rows + block, 0, visits.tiles)
    return tuple(np.broadcast_to((high - low) * visits.size + 128, first_rows.shape).tolist())


def work_items(plan_ref, begin, body) -> None:
    """begin(first item), then n = body(item, following, side, n) for each item of this block.

    following: the item after this one, negative if there is none; side: 0 and 1 by turns.
    plan_ref: None where the hardware hands out the items, one a block; then following is None too.
    """
    block = lax.axis_index("block")
    if plan_ref is None:
        begin(block)
        body(block, None, 0, jnp.int32(0))
        return

    def one(i, carry):
        item, following, n = carry
        later = plan_ref[block, i + 3]  # an item early: nobody waits for it
        return following, later, body(item, following, lax.rem(i, jnp.int32(2)), n)

    first = plan_ref[block, 1]
    begin(first)
    carry = first, plan_ref[block, 2], jnp.int32(0)
    lax.fori_loop(jnp.int32(0), plan_ref[block, 0], one, carry)


def diagonal_crosses_tiles(s: Schedule) -> bool:
    """Whether the diagonal of a warpgroup's rows may cross a second tile."""
    return s.visits.causal and bool(s.visits.offset % ROWS or s.columns % ROWS)


def walk(s: Schedule, i, start, step, *, crosses: bool) -> None:
    """Runs step(n, masked) for the steps start ... i.last - 1 of an item i.

    start: after i.first.  crosses: the diagonal may cross those before i.unmasked.
    """
    steps = lambda low, high, masked: pl.loop(low, high)(lambda n: step(n, masked))
    if crosses or s.packed:  # segments may begin and end anywhere
        steps(start, i.unmasked, True)
        start = i.unmasked
    steps(start, i.edge, False)
    if s.visits.window is not None or s.packed:
        steps(i.edge, i.last, True)
