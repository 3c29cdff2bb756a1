"""A block of queries past which keys stream, for the forward and the dQ kernel.

Steps are numbered across all items of a kernel block.  Of a block of queries with steps n0 ... end
- 1, step n takes the tile top - 1 - n: from the diagonal downwards.  A warpgroup sees some of them:

    n0        first         unmasked          edge            last        end
    | others see | masked, if causal | seen whole | masked: window | others see |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import same_segment, visible
from pallas_kernels.flash_attention.schedule import Schedule, Worker
from pallas_kernels.mosaic import COL, ROWS
from pallas_kernels.pipeline import Ring


class Stream(NamedTuple):
    """What streams past an item: step n takes the tile top - 1 - n, up to the step end - 1."""

    batch: Any
    kv_head: Any
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


def stream_of(w: Worker, item, n0) -> Stream:
    """The Stream of an item whose first step is n0."""
    s = w.schedule
    row, (batch, head) = s.where(item)
    low, high = s.visits.seen(row, row + s.block, *s.limits(row, batch, w.inputs.segments)[0])
    return Stream(batch, head // s.group, n0 + high, n0 + high - low)


def item_of(w: Worker, item, following, side, n0) -> Item:
    s, visits, at = w.schedule, w.schedule.visits, side * w.schedule.wgs + w.wg
    row, (batch, head) = s.where(item)
    q0 = row + w.wg * ROWS
    limits, same = s.limits(row, batch, w.inputs.segments)
    stream = stream_of(w, item, n0)
    own = visits.seen(q0, q0 + ROWS, *limits)
    whole = visits.whole(q0, q0 + ROWS, *same)
    first, last = stream.top - own[1], stream.top - own[0]
    unmasked = jnp.clip(stream.top - whole[1], first + 1, last)
    edge = last
    if visits.window is not None or s.packed:
        edge = jnp.clip(stream.top - whole[0], unmasked, last)
    return Item(
        batch, head, q0, at, n0, stream, first, last, unmasked, edge, following, side
    )  # fmt: skip


class Keys(NamedTuple):
    """K or V, its ring, and which warp fills it."""

    ring: Ring
    ref: Any
    first_head: int
    smem: Any
    ahead: int  # how many steps early a tile is loaded
    warp: int
    ids_ref: Any = None  # the ids that come along with each tile
    ids_smem: Any = None


def send(s: Schedule, x: Keys, n, stream: Stream):
    """Starts to copy the tile of step n."""
    keys = pl.ds((stream.top - 1 - n) * s.columns, s.columns)
    x.ring.send(n, x.ref.at[stream.batch, keys, x.first_head + stream.kv_head], x.smem)
    if x.ids_ref is not None:
        x.ring.send(n, x.ids_ref.at[stream.batch, keys], x.ids_smem)


def send_any(w: Worker, n, stream: Stream, following, send):
    """send(the stream of step n): from the stream's end on the next item's, if there is one."""

    def send_following():
        coming = stream_of(w, following, stream.end)
        pl.when(n < coming.end)(lambda: send(coming))

    pl.when(n < stream.end)(lambda: send(stream))
    if following is not None:
        pl.when((n >= stream.end) & (following >= 0))(send_following)


def in_sight(s: Schedule, i: Item, x, n, q_ids: Any = None, k_ids: Any = None):
    """Scores x of step n, with -inf where the query may not see the key.

    q_ids: in registers; k_ids: in shared memory; None without segments.
    """
    visits = s.visits
    if s.packed:
        x = same_segment(x, q_ids, mosaic.read(k_ids, COL))
    k0, keys = (i.stream.top - 1 - n) * s.columns, visits.lengths[1] if s.ragged else None
    q0 = i.q0 + visits.offset
    return visible(x, q0, k0, causal=visits.causal, window=visits.window, keys=keys)
