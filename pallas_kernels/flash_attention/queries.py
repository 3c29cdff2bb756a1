"""A block of queries past which keys stream, for the forward and the dQ kernel.

Steps are numbered across all items of a kernel block.  Of a block of queries with steps n0 ... end
- 1, step n takes the tile top - 1 - n: from the diagonal downwards.  A warpgroup sees some of them:

    n0        first         unmasked          edge            last        end
    | others see | masked, if causal | seen whole | masked: window | others see |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.masks import visible
from pallas_kernels.flash_attention.schedule import Schedule
from pallas_kernels.mosaic import ROWS


class Stream(NamedTuple):
    """What streams past an item: step n takes the tile top - 1 - n, up to the step end - 1."""

    batch: Any
    head: Any  # of the queries; the forward kernel turns it into the head of the keys
    top: Any
    end: Any


class Item(NamedTuple):
    """A block of queries, as one warpgroup sees it."""

    batch: Any
    head: Any
    q0: Any  # the warpgroup's first query
    at: Any  # the warpgroup's buffer
    n0: Any
    stream: Stream
    first: Any
    last: Any
    unmasked: Any
    edge: Any
    following: Any  # the block's next item, negative or None if there is none
    side: Any  # 0 and 1 by turns

    @property
    def end(self):
        return self.stream.end

    @property
    def rows(self):
        return pl.ds(self.q0, ROWS)


def stream_of(s: Schedule, segments, item, n0) -> Stream:
    """The Stream of an item whose first step is n0."""
    row, (batch, head) = s.items.where(item)
    low, high = s.visits.seen(row, row + s.block, *s.limits(row, batch, segments)[0])
    return Stream(batch, head, n0 + high, n0 + high - low)


def item_of(s: Schedule, segments, wg, item, following, side, n0) -> Item:
    visits, at = s.visits, side * s.wgs + wg
    row, (batch, head) = s.items.where(item)
    q0 = row + wg * ROWS
    limits, same = s.limits(row, batch, segments)
    low, high = visits.seen(row, row + s.block, *limits)
    top, end = n0 + high, n0 + high - low
    own = visits.seen(q0, q0 + ROWS, *limits)
    whole = visits.whole(q0, q0 + ROWS, *same)
    first, last = top - own[1], top - own[0]
    unmasked = jnp.clip(top - whole[1], first + 1, last)
    edge = last
    if visits.window is not None or s.packed:
        edge = jnp.clip(top - whole[0], unmasked, last)
    return Item(
        batch, head, q0, at, n0, Stream(batch, head, top, end), first, last, unmasked, edge,
        following, side,
    )  # fmt: skip


def in_sight(s: Schedule, i: Item, x, n):
    """Scores x of step n, with -inf where the query may not see the key, of whatever segment."""
    visits = s.visits
    k0, keys = (i.stream.top - 1 - n) * s.columns, visits.lengths[1] if s.ragged else None
    q0 = i.q0 + visits.offset
    return visible(x, q0, k0, causal=visits.causal, window=visits.window, keys=keys)
