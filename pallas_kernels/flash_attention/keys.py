"""A block of keys past which queries stream, for the dK/dV kernel: queries.py from the other side.

Steps are numbered across all items of a kernel block.  An item takes the same steps for each query
head of its group, one head after the other: tiles base, base + 1, ... from the diagonal on.  A
warpgroup sees some of them:

    0         first                 unmasked     edge            last        steps
    | others see | masked, if causal | seen whole | masked: window | others see |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.flash_attention.schedule import Schedule
from pallas_kernels.mosaic import ROWS


class Stream(NamedTuple):
    """What streams past an item: tiles base ... base + steps - 1 of each head of the group."""

    batch: Any
    head: Any  # the first one
    base: Any
    steps: Any


class Ring(NamedTuple):
    """Tiles of Q or of dO, the statistics that come along, and who loads them."""

    ref: Any
    stats_ref: Any
    ids_ref: Any  # None for dO, and without segments
    smem: Any
    stats_smem: Any
    ids_smem: Any
    full: Any
    wg: int
    warp: int


class Step(NamedTuple):
    """One step: a tile of queries of one head."""

    n: Any  # counted over all items of the block
    g: Any  # the head of the group
    r: Any  # the tile of the head; past the last one stand those of the next head


class Item(NamedTuple):
    """A block of keys, as one warpgroup sees it; its steps are n0, n0 + 1, ..."""

    batch: Any
    kv_head: Any
    key0: Any  # the block's first key
    k0: Any  # the warpgroup's
    at: Any  # its buffer of K and V
    n0: Any
    stream: Stream
    following: Any  # the block's next item, negative or None if there is none
    first: Any = None  # of each head the warpgroup's first step
    last: Any = None  # the one after its last
    unmasked: Any = None  # its first step without a mask
    edge: Any = None  # its first step after those

    def step(self, g, r) -> Step:
        return Step(self.n0 + g * self.stream.steps + r, g, r)


def sets(s: Schedule) -> int:
    """How many times 64 keys a block owns."""
    return s.block // ROWS


def in_halves(s: Schedule) -> bool:
    """Whether a step has 128 queries, of which a warpgroup takes 64 at a time."""
    return s.columns > ROWS


def pairs_up(s: Schedule) -> bool:
    """Whether two warpgroups work on the same 64 keys."""
    return s.wgs > sets(s)


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded.

    A slot to spare, where there is one, lets a warpgroup run a step ahead of the other.
    """
    return s.stages - (2 if in_halves(s) or s.stages > 3 else 1)


def runs_on(s: Schedule) -> bool:
    """Whether a step adds to dV and dK under the next: P and dS have registers to wait in.

    A slot then stays taken for a step more.  `add_halves` loads before it frees one, so its ring
    needs two slots more than `ahead`: with fewer, the warp that loads waits for its own warpgroup.
    """
    return in_halves(s) or pairs_up(s)


def stream_of(s: Schedule, segments, wg, item) -> Stream:
    key0, (batch, kv_head) = s.items.where(item)
    low, high = s.visits.seen(key0, key0 + s.block, *s.limits(key0, batch, segments)[0])
    # The first tile is a variable because JAX 0.12 rejects slices that are statically too wide.
    base = low + lax.rem(wg, jnp.int32(1))
    return Stream(batch, kv_head * s.group, base, high - low)


def item_of(s: Schedule, segments, wg, nth, item, following, side, n0) -> Item:
    """The Item without its steps.  nth: which 64 of the block's keys the warpgroup works on."""
    at = side * sets(s) + nth
    key0, (batch, kv_head) = s.items.where(item)
    k0 = key0 + nth * ROWS
    return Item(
        batch, kv_head, key0, k0, at, n0, stream_of(s, segments, wg, item), following
    )  # fmt: skip


def with_steps(s: Schedule, segments, i: Item) -> Item:
    visits, base = s.visits, i.stream.base
    limits, same = s.limits(i.key0, i.batch, segments)
    own = visits.seen(i.k0, i.k0 + ROWS, *limits)
    whole = visits.whole(i.k0, i.k0 + ROWS, *same)
    first, last = own[0] - base, own[1] - base
    unmasked, edge = first + 1, last
    if visits.causal or s.packed:
        unmasked = jnp.clip(whole[0] - base, first + 1, last)
    if visits.window is not None or s.packed:
        edge = jnp.clip(whole[1] - base, unmasked, last)
    return i._replace(first=first, last=last, unmasked=unmasked, edge=edge)
