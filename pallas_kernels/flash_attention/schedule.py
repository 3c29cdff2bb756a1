"""Which block of a kernel works on what, and in which order; the call of a kernel.

An item is one block of rows (of queries; in the dK/dV kernel of keys) of one pair (batch, head),
past which all the columns stream that its rows see.  What streams should come from the L2 cache, no
block should wait for the busiest one, and a block should know its next item early.
"""

import functools
import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
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


class Heads(NamedTuple):
    """Where the heads of q, k and v stand, if one array (B, T, H + 2 K, D) holds all of them."""

    q: int  # H, which come first
    kv: int  # K; the heads of k come next, then the heads of v


class Schedule(NamedTuple):
    """What is static in a call of a kernel: what it computes, how it is cut up, who does what."""

    visits: Visits
    wgs: int  # warpgroups of a block
    columns: int  # of one step: keys, or queries in the dK/dV kernel
    stages: int  # steps in flight
    block: int  # rows of a block
    lead: int  # rows of the first block that do not exist, in whole warpgroups
    grid: int  # blocks of the kernel
    table: np.ndarray | None  # what `plan` gives each block; None: one item a block
    where: Callable  # item -> (first row of the block, (batch, head))
    dtype: Any
    width: int  # D
    group: int  # query heads of a kv head
    k_first: int  # the first head of k in its array
    v_first: int
    scale: float
    softcap: float | None
    packed: bool  # there are segments

    @property
    def ragged(self) -> bool:
        """Whether the last tile of keys is not full, where a block owns queries."""
        return self.visits.lengths[1] % self.columns != 0

    @property
    def persistent(self) -> bool:
        """Whether a block takes several items, and loads the next one's rows meanwhile."""
        return self.table is not None

    @property
    def sides(self) -> int:
        """Buffers of a block's own rows: of this item, and of the next one if there is one."""
        return 2 if self.persistent else 1

    @property
    def diagonal_crosses_tiles(self) -> bool:
        """Whether the diagonal of a warpgroup's rows may cross a second tile."""
        return self.visits.causal and bool(self.visits.offset % ROWS or self.columns % ROWS)

    @property
    def weighs_early(self) -> bool:
        """Whether P is computed before it is known whether m stays: 7% faster, given registers.

        At D = 64 a thread has 168, at 256 O takes 128 of them, and a window's mask takes some.
        """
        return 64 < self.width <= 128 and self.visits.window is None

    def slot(self, n):
        """The slot of step n in a ring of `stages`."""
        return lax.rem(n, jnp.int32(self.stages))

    def limits(self, row, batch, segments):
        """What segments leave to the block of rows that begins at `row`.

        Returns (tiles to see, tiles that hold its one segment alone), each first and end.
        segments: references to Segments, or None.
        """
        if segments is None:
            return (0, self.visits.tiles), (0, self.visits.tiles)
        mine = lax.div(row + self.lead, jnp.int32(self.block))
        low, high, first, end = (segments.spans[batch, mine, n] for n in range(4))
        return (low, high), (first, end)

    def buffer(self, n: int, rows: int):
        """Shared memory for n tiles of that many rows, as TMA and wgmma want it."""
        tiling = mosaic.wgmma_tiles(self.width, self.dtype)
        return plgpu.SMEM((n, rows, self.width), self.dtype, transforms=tiling)

    def ids(self, n: int, rows: int):
        """Shared memory for n times that many ids, or None without segments."""
        return plgpu.SMEM((n, rows), jnp.int32) if self.packed else None


def schedule_of(
    q, k, tile: Tiles, call: Call, heads: Heads | None, *, block: int, packed: bool, by_keys=False
) -> Schedule:
    """The Schedule of a kernel.

    heads: q, k and v are the same array, which holds all three.  block: rows that a block owns, of
    queries, or by_keys of keys.  packed: there are segments.
    """
    b, _, h, d = q.shape
    kv_heads, k_first, v_first = k.shape[2], 0, 0
    if heads is not None:
        h, kv_heads, k_first, v_first = *heads, heads.q, heads.q + heads.kv
    (t, s), group = call.lengths, h // kv_heads
    visits = Visits(call.lengths, call.causal, call.window, tile.step, by_keys)
    levels, lead = mosaic.cdiv(visits.rows, block), 0
    if by_keys:
        first_row = lambda level: level * block  # most queries see the first keys
        owners, pair_bytes = kv_heads, 4 * t * d * group  # Q and dO of a kv head
    else:
        # The block that is not full is the first one, which sees the fewest keys: its first
        # warpgroups have nothing to do.  (At T = 1024 it has 64 of 192 rows; at the end it took 8
        # of 32 steps.)
        lead = 0 if call.general else (levels * block - t) // ROWS * ROWS
        first_row = lambda level: (levels - 1 - level) * block - lead  # most keys first
        owners, pair_bytes = h, 4 * s * d // group  # a head's share of K and V
    pairs = b * owners
    fit = max(1, (tile.section << 20) // max(1, pair_bytes))  # pairs of a section, at most
    sections, table = mosaic.cdiv(pairs, fit), None
    if tile.persistent and worth_planning(levels, levels * pairs, call.sms, packed):
        costs = block_costs(visits, first_row(np.arange(levels)), block)
        table = plan(costs, pairs, mosaic.cdiv(pairs, sections), call.sms)
    # All sections are equal.  To divide by the width of a narrower last one ptxas would call a
    # function, and serialize every wgmma of a kernel with a call (C7509, compiled relocatably).
    while pairs % sections:
        sections += 1

    def where(item):
        planned = table is not None
        split = mosaic.divide(item, pairs) if planned else order(item, levels, pairs // sections)
        level, pair = split
        return first_row(level), mosaic.divide(pair, owners)

    grid = levels * pairs if table is None else call.sms
    width = width_of(d) if call.general else d
    return Schedule(
        visits, tile.wgs, tile.step, tile.stages, block, lead, grid, table, where, q.dtype, width,
        group, k_first, v_first, call.scale, call.softcap, packed,
    )  # fmt: skip


def width_of(head_dim: int) -> int:
    """Columns of the general form's tiles in shared memory; those past D are zeros."""
    return next(width for width in (32, 64, 96, 128, 256) if width >= head_dim)


class Worker(NamedTuple):
    """One warpgroup of a block, with what its kernel's functions use."""

    schedule: Schedule
    inputs: Any  # references to global memory, by name; `plan` and `segments` may be None
    results: tuple
    smem: Any  # what the kernel's `scratch` lists, by name
    wg: Any


def launch(
    s: Schedule, name: str, body, inputs: dict, segments, out_type, scratch: dict, **parameters
):
    """Calls a kernel with body(a Worker).

    inputs: arrays by name.  segments: ids of the queries and of the keys, or None.  scratch: shared
    memory and barriers by name.  parameters: further CompilerParams.
    """
    if segments is not None:
        q_ids, k_ids = segments
        rows, columns = (k_ids, q_ids) if s.visits.by_keys else (q_ids, k_ids)
        spans = segment_spans(rows, columns, s.visits, s.block, s.lead)
        segments = Segments(q_ids, k_ids, spans)
    inputs = inputs | {"plan": s.table, "segments": segments}

    def run(arrays, *results, **smem):
        refs = SimpleNamespace(**dict(zip(inputs, arrays, strict=True)))
        body(Worker(s, refs, results, SimpleNamespace(**smem), lax.axis_index("wg")))

    return mosaic.kernel(
        run,
        name=name,
        out_type=out_type,
        scratch_types=scratch,
        **mosaic.grid(block=s.grid),
        num_threads=s.wgs,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, **parameters
        ),
    )(tuple(inputs.values()))


def forward_results(q, call: Call, heads: Heads | None):
    """The types of O (B, T, H, D) and of the log-sum-exp (B, H, stat_rows(T))."""
    (b, t, h, d), stats = q.shape, stat_rows(call.lengths[0])
    h = h if heads is None else heads.q
    lse = jax.ShapeDtypeStruct((b, h, stats), jnp.float32)
    return jax.ShapeDtypeStruct((b, t, h, d), q.dtype), lse


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


def order(item, levels: int, section: int):
    """The (level, pair) of an item: which block of rows (0: the longest) of which (batch, head).

    Longest first, so that the short blocks fill the gaps at the end; but one section of the pairs
    after the other, so that what the running blocks stream stays in the L2 cache (50 MB).
    """
    number, rest = mosaic.divide(item, section * levels)
    level, pair = mosaic.divide(rest, section)
    return level, number * section + pair


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

    The item level * pairs + pair takes about the time costs[level].  In the order of `order`
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
