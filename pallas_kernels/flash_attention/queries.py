"""A block of queries past which keys stream, for the forward and the dQ kernel.

Step n of 0 ... end - 1 takes the tile top - 1 - n: from the diagonal downwards.  A warpgroup sees
some of them:

    0         first         unmasked          edge            last        end
    | others see | masked, if causal | seen whole | masked: window | others see |
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.masks import same_segment, visible
from pallas_kernels.flash_attention.schedule import Schedule, Worker
from pallas_kernels.mosaic import COL, ROWS
from pallas_kernels.pipeline import Ring


class Item(NamedTuple):
    """A block of queries, as one warpgroup sees it."""

    batch: Any
    head: Any
    kv_head: Any
    q0: Any  # the warpgroup's first query
    top: Any
    end: Any
    first: Any
    last: Any
    unmasked: Any
    edge: Any

    @property
    def rows(self):
        return pl.ds(self.q0, ROWS)


def item_of(w: Worker) -> Item:
    s, visits = w.schedule, w.schedule.visits
    row, (batch, head) = s.where(lax.axis_index("block"))
    q0 = row + w.wg * ROWS
    limits, same = s.limits(row, batch, w.inputs.segments)
    low, top = visits.seen(row, row + s.block, *limits)
    top += jnp.int32(0)  # a variable: JAX 0.12 rejects slices that are statically too wide
    own = visits.seen(q0, q0 + ROWS, *limits)
    whole = visits.whole(q0, q0 + ROWS, *same)
    first, last = top - own[1], top - own[0]
    unmasked = jnp.clip(top - whole[1], first + 1, last)
    edge = last
    if visits.window is not None or s.packed:
        edge = jnp.clip(top - whole[0], unmasked, last)
    kv_head = head // s.group
    return Item(batch, head, kv_head, q0, top, top - low, first, last, unmasked, edge)


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


def send(s: Schedule, i: Item, x: Keys, n):
    """Starts to copy the tile of step n."""
    keys = pl.ds((i.top - 1 - n) * s.columns, s.columns)
    x.ring.send(n, x.ref.at[i.batch, keys, x.first_head + i.kv_head], x.smem)
    if x.ids_ref is not None:
        x.ring.send(n, x.ids_ref.at[i.batch, keys], x.ids_smem)


def in_sight(s: Schedule, i: Item, x, n, q_ids: Any = None, k_ids: Any = None):
    """Scores x of step n, with -inf where the query may not see the key.

    q_ids: in registers; k_ids: in shared memory; None without segments.
    """
    visits = s.visits
    if s.packed:
        x = same_segment(x, q_ids, plgpu.load(k_ids, layout=COL, optimized=False))
    k0, keys = (i.top - 1 - n) * s.columns, visits.lengths[1] if s.ragged else None
    q0 = i.q0 + visits.offset
    return visible(x, q0, k0, causal=visits.causal, window=visits.window, keys=keys)
