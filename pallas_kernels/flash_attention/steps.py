"""The items of a block, their steps, and the copies of tiles that the steps start (Hopper).

A step takes one tile of columns.  A warpgroup sees the tiles of some of its block's steps:

    n0        first         unmasked          edge            last        end
    | others see | masked, if causal | seen whole | masked: window | others see |

A block of queries goes downwards from the diagonal: step n takes tile base - 1 - n, and n counts on
from item to item.  A block of keys goes upwards from the diagonal, once for each query head of its
group: step r of a head takes tile base + r, and first ... end are counted from 0 in each head.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, mosaic
from pallas_kernels.flash_attention.schedule import Schedule, Worker, copy_rows
from pallas_kernels.mosaic import ROWS
from pallas_kernels.pipeline import Ring


class Stream(NamedTuple):
    """What streams past an item."""

    batch: Any
    head: Any  # the kv head; for a block of keys, the group's first query head
    base: Any
    end: Any
    following: Any  # the block's next item, negative or None if there is none


class Item(NamedTuple):
    """A block of rows, as one warpgroup sees it; see the picture."""

    number: Any  # the argument of Schedule.where
    batch: Any
    head: Any
    row: Any  # the warpgroup's first one
    at: Any  # its buffer
    n0: Any
    stream: Stream
    first: Any
    unmasked: Any
    edge: Any
    last: Any
    count: Any  # how many items the block had before
    side: Any  # 0 and 1 by turns

    @property
    def end(self):
        return self.stream.end


def unsettled(i: Item, s: Schedule, n):
    """i.at, hidden from the compiler.

    If it saw that an operand stays in place from step to step, it would hold the descriptors of all
    its slices in registers, up to 64 of them.
    """
    return jnp.minimum(i.at, n + s.sides * s.sets)


def set_of(w: Worker):
    """Which 64 of the block's rows the warpgroup works on."""
    return w.wg if w.schedule.sets == w.schedule.wgs else 0


def stream_of(w: Worker, item, n0=0, following=None) -> Stream:
    """The Stream of an item; n0: the first step of a block of queries."""
    s = w.schedule
    row, (batch, head) = s.where(item)
    low, high = s.range_of_block(row, batch, w.inputs.spans)
    if not s.visits.by_keys:
        return Stream(batch, head // s.group, n0 + high, n0 + high - low, following)
    # The first tile is a variable because JAX 0.12 rejects slices that are statically too wide.
    return Stream(batch, head * s.group, low + lax.rem(w.wg, jnp.int32(1)), high - low, following)


def item_of(w: Worker, item, following, count, n0) -> Item:
    s, visits = w.schedule, w.schedule.visits
    side = lax.rem(count, jnp.int32(2)) if s.persistent else 0
    at = side * s.sets + set_of(w)
    row, (batch, head) = s.where(item)
    row += set_of(w) * ROWS
    own, whole = s.ranges(row, batch, w.inputs.spans)
    stream = stream_of(w, item, n0, following)
    if visits.by_keys:
        step = lambda tile: tile - stream.base
    else:
        step, own, whole = (lambda tile: stream.base - tile), own[::-1], whole[::-1]
    first, last = map(step, own)
    unmasked = jnp.clip(step(whole[0]), first + 1, last) if s.masks_first else first + 1
    edge = last
    if s.masks_last:
        edge = jnp.clip(step(whole[1]), unmasked, last)
    return Item(item, batch, head, row, at, n0, stream, first, unmasked, edge, last, count, side)


def work_items(w: Worker, begin, body) -> None:
    """begin(w, number of the first item), then n = body(w, Item) for each item of this block.

    n: the step after the item's last.  Where the hardware hands out the items, a block has one, and
    `following` is None.
    """
    s, block, zero = w.schedule, lax.axis_index("block"), jnp.int32(0)
    begin(w, block)
    if not s.persistent:
        body(w, item_of(w, block, None, zero, zero))
    else:

        def one(carry):
            count, item, following, n = carry
            n = body(w, item_of(w, item, following, count, n))
            return count + 1, following, w.smem.items[numbers_of(w).wait(count)], n

        carry = zero, block, or_none(s, block + s.grid), zero
        lax.while_loop(lambda carry: carry[1] >= 0, one, carry)
    plgpu.wait_smem_to_gmem(0)


def numbers_of(w: Worker) -> Ring:
    return Ring(w.smem.items.shape[0], w.smem.item_full)


def or_none(s: Schedule, item):
    """An item, or -1 past the last: as items are not negative, they are divided unsigned."""
    return jnp.where(item < s.items, item, -1)


def finish(w: Worker, i: Item, store) -> None:
    """Calls store(); meanwhile the block takes the item that comes after its following one.

    Whichever block finishes first takes the next item (the interpreter hands them out in turn).
    The first thread counts, and hands the number over when it has stored.
    """
    s = w.schedule
    if not s.persistent:
        return store()
    taken = i.number if dispatch.interpreting() else mosaic.count(w.inputs.counter)
    store()

    @pl.when(w.wg == 0)
    def _():
        at = numbers_of(w).slot(i.count)
        mosaic.store_number(w.smem.items.at[pl.ds(at, 1)], or_none(s, taken + 2 * s.grid))
        plgpu.barrier_arrive(w.smem.item_full.at[at])


class Operand(NamedTuple):
    """A streamed operand of the matmuls: its ring, and the loader's warp that fills the ring."""

    ring: Ring
    ref: Any
    first_head: int
    smem: Any
    warp: int
    ahead: int  # how many steps early a tile is loaded
    # Loaded with each tile, as (reference, shared memory): the ids and the statistics of its rows.
    ids: tuple = (None, None)
    stats: tuple = (None, None)

    def send(self, w: Worker, n, batch, head, columns):
        """Starts to copy these columns for step n."""
        (stats, stats_smem), (ids, ids_smem) = self.stats, self.ids
        at, bars = self.ring.slot(n), self.ring.full
        copy_rows(w, self.ref, batch, columns, self.first_head + head, self.smem, at, bars.at[at])
        if stats is not None:
            self.ring.send(n, stats.at[batch, head, columns], stats_smem)
        if ids is not None:
            self.ring.send(n, ids.at[batch, columns], ids_smem)


def send_keys(w: Worker, n, stream: Stream, *operands: Operand):
    """Starts to copy the tiles of step n."""
    keys = pl.ds((stream.base - 1 - n) * w.schedule.columns, w.schedule.columns)
    for x in operands:
        x.send(w, n, stream.batch, stream.head, keys)


def send_any(w: Worker, n, stream: Stream, send):
    """send(the stream that has step n): this one, or after its end the next item's, if any."""

    def send_following():
        coming = stream_of(w, stream.following, stream.end)
        pl.when(n < coming.end)(lambda: send(coming))

    pl.when(n < stream.end)(lambda: send(stream))
    if stream.following is not None:
        pl.when((n >= stream.end) & (stream.following >= 0))(send_following)


class Step(NamedTuple):
    """A step of a block of keys: a tile of queries of one head."""

    n: Any  # counted over all items of the block
    g: Any  # the head of the group
    r: Any  # the tile of the head; past the last one come the next head's


def step_of(i: Item, g, r) -> Step:
    return Step(i.n0 + g * i.end + r, g, r)


def send_queries(w: Worker, step: Step, nth, stream: Stream, x: Operand):
    """Starts to copy the tile of a step, the nth of its item, once all have left its buffer.

    The tile may lie up to `x.ahead` tiles past its head's last one: it then belongs to the next
    head or, after the last head, to the next item.
    """
    s = w.schedule
    past = nth - s.group * stream.end

    def send(n, g, r, stream):
        if s.group > 1:  # no division, which would take longer than the copies
            ends = [heads * stream.end for heads in range(1, x.ahead + 1)]
            over = sum((r >= end).astype(jnp.int32) for end in ends)
            g, r = g + over, r - over * stream.end
        at = pl.ds((stream.base + r) * s.columns, s.columns)
        x.ring.claim(n)
        x.send(w, n, stream.batch, stream.head + g, at)

    def send_following():
        coming = stream_of(w, stream.following)
        pl.when(past < s.group * coming.end)(lambda: send(step.n, 0, past, coming))

    pl.when(past < 0)(lambda: send(*step, stream))
    if stream.following is not None:
        pl.when((past >= 0) & (stream.following >= 0))(send_following)


def walk(s: Schedule, i, start, step, *, crosses: bool) -> None:
    """Runs step(n, masked) for the steps start ... i.last - 1 of an item i.

    start: i.first or later.  crosses: the diagonal may cross the tiles of steps before i.unmasked.
    """
    steps = lambda low, high, masked: pl.loop(low, high)(lambda n: step(n, masked))
    if crosses or s.segmented:  # segments may begin and end anywhere
        steps(start, i.unmasked, True)
        start = i.unmasked
    steps(start, i.edge, False)
    if s.masks_last:
        steps(i.edge, i.last, True)
