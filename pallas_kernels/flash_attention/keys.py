"""A block of keys past which queries stream, for the dK/dV kernel: queries.py from the other side.

Steps are numbered across all items of a kernel block.  An item takes the same steps for each query
head of its group, one head after the other: tiles base, base + 1, ... from the diagonal on.  A
warpgroup sees some of them:

    0         first                 unmasked     edge            last        steps
    | others see | masked, if causal | seen whole | masked: window | others see |

This file has the numbers of a step and all copies: of K and V, and of the tiles of Q and dO.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.schedule import Schedule, Worker
from pallas_kernels.mosaic import ROWS
from pallas_kernels.pipeline import Ring


class QueryStream(NamedTuple):
    """What streams past an item: tiles base ... base + steps - 1 of each head of the group."""

    batch: Any
    head: Any  # the first one
    base: Any
    steps: Any


class Queries(NamedTuple):
    """Tiles of Q or of dO, the statistics that come along, their ring, and the warp that fills it.

    Q and dO share one `free`: a warpgroup leaves both at once.
    """

    ring: Ring
    ref: Any
    stats_ref: Any
    smem: Any
    stats_smem: Any
    warp: int
    ids_ref: Any = None  # with Q, if there are segments
    ids_smem: Any = None


class Step(NamedTuple):
    """One step: a tile of queries of one head."""

    n: Any  # counted over all items of the block
    g: Any  # the head of the group
    r: Any  # the tile of the head; past the last one come the next head's


class KeysItem(NamedTuple):
    """A block of keys, as one warpgroup sees it; its steps are n0, n0 + 1, ..."""

    batch: Any
    kv_head: Any
    k0: Any  # the warpgroup's first key
    at: Any  # its buffer of K and V
    n0: Any
    stream: QueryStream
    following: Any  # the block's next item, negative or None if there is none
    first: Any  # of each head the warpgroup's first step
    last: Any  # the one after its last
    unmasked: Any  # its first step without a mask
    edge: Any  # its first step after those

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

    That takes 2.92 instead of 3.16 ms at T = 16384 and D = 128 (H200).  D = 96 lacks the slot, and
    without a causal mask 4 bytes would spill.

    A slot then stays taken for a step more.  `add_halves` loads before it frees one, so its ring
    needs two slots more than `ahead`: with fewer, the warp that loads waits for its own warpgroup.
    """
    return in_halves(s) or pairs_up(s) or (s.stages > 3 and s.visits.causal)


def set_of(w: Worker):
    """Which 64 of the block's keys the warpgroup works on."""
    return 0 if pairs_up(w.schedule) else w.wg


def stream_of(w: Worker, item) -> QueryStream:
    s = w.schedule
    key0, (batch, kv_head) = s.where(item)
    low, high = s.visits.seen(key0, key0 + s.block, *s.limits(key0, batch, w.inputs.segments)[0])
    # The first tile is a variable because JAX 0.12 rejects slices that are statically too wide.
    base = low + lax.rem(w.wg, jnp.int32(1))
    return QueryStream(batch, kv_head * s.group, base, high - low)


def item_of(w: Worker, item, following, side, n0) -> KeysItem:
    s, visits, stream = w.schedule, w.schedule.visits, stream_of(w, item)
    key0, (batch, kv_head) = s.where(item)
    k0, base = key0 + set_of(w) * ROWS, stream.base
    limits, same = s.limits(key0, batch, w.inputs.segments)
    own = visits.seen(k0, k0 + ROWS, *limits)
    whole = visits.whole(k0, k0 + ROWS, *same)
    first, last = own[0] - base, own[1] - base
    unmasked, edge = first + 1, last
    if visits.causal or s.packed:
        unmasked = jnp.clip(whole[0] - base, first + 1, last)
    if visits.window is not None or s.packed:
        edge = jnp.clip(whole[1] - base, unmasked, last)
    at = side * sets(s) + set_of(w)
    return KeysItem(batch, kv_head, k0, at, n0, stream, following, first, last, unmasked, edge)


# ---- copies -------------------------------------------------------------------------------------


def scratch(s: Schedule) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    own, stat = s.sides * sets(s), plgpu.SMEM((s.stages, s.columns), jnp.float32)
    buffers = dict(
        k=s.buffer(own, ROWS),  # of each 64 keys of the block, like v and their barriers
        v=s.buffer(own, ROWS),
        q=s.buffer(s.stages, s.columns),  # of each slot, like do and the statistics
        do=s.buffer(s.stages, s.columns),
        minus_lse=stat,
        minus_delta=stat,
        k_bars=plgpu.Barrier(num_arrivals=1 + s.packed, num_barriers=own),
        v_bars=plgpu.Barrier(num_barriers=own),
        q_full=ring(num_arrivals=2 + s.packed),
        do_full=ring(num_arrivals=2),
        free=ring(num_arrivals=s.wgs),
        k_ids=s.ids(own, ROWS),
        q_ids=s.ids(s.stages, s.columns),
    )
    if pairs_up(s):  # P^T, on its way from one warpgroup to the other
        swizzled = mosaic.wgmma_tiles(s.columns, jnp.float32)
        buffers["p"] = plgpu.SMEM((ROWS, s.columns), jnp.float32, transforms=swizzled)
        buffers["p_full"] = buffers["p_free"] = plgpu.Barrier()
    if s.persistent:  # otherwise dV and dK leave through the buffers of K and V
        buffers["dv"] = buffers["dk"] = s.buffer(sets(s), ROWS)
    return buffers


def queries_of(w: Worker) -> tuple[Queries, Queries]:
    """Q and dO.  The last warpgroup loads Q and the first one dO; of a pair the last loads both."""
    s, inputs, smem, last = w.schedule, w.inputs, w.smem, w.schedule.wgs - 1
    ring = functools.partial(Ring, s.stages, free=smem.free)
    q, do = ring(smem.q_full, loader=last), ring(smem.do_full, loader=last if pairs_up(s) else 0)
    ids = (inputs.segments.q_ids, smem.q_ids) if s.packed else (None, None)
    return (
        Queries(q, inputs.q, inputs.minus_lse, smem.q, smem.minus_lse, 0, *ids),
        Queries(do, inputs.do, inputs.minus_delta, smem.do, smem.minus_delta, 1),
    )


# Load: K and V of a warpgroup, and the tiles of Q and dO.


def load_kv(w: Worker, item, side):
    s, smem = w.schedule, w.smem
    key0, (batch, kv_head) = s.where(item)
    rows = pl.ds(key0 + set_of(w) * ROWS, ROWS)
    at = side * sets(s) + set_of(w)
    k = w.inputs.k.at[batch, rows, s.k_first + kv_head]
    v = w.inputs.v.at[batch, rows, s.v_first + kv_head]
    plgpu.copy_gmem_to_smem(k, smem.k.at[at], smem.k_bars.at[at])
    plgpu.copy_gmem_to_smem(v, smem.v.at[at], smem.v_bars.at[at])
    if s.packed:
        ids = w.inputs.segments.k_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.k_ids.at[at], smem.k_bars.at[at])


def send(w: Worker, x: Queries, n, g, r, stream: QueryStream):
    """Starts to copy tile r of head g for step n, once all warpgroups have left its buffer."""
    s = w.schedule
    if s.group > 1:  # no division, which would take longer than the copies
        ends = [heads * stream.steps for heads in range(1, ahead(s) + 1)]
        over = sum((r >= end).astype(jnp.int32) for end in ends)
        g, r = g + over, r - over * stream.steps
    at = pl.ds((stream.base + r) * s.columns, s.columns)
    x.ring.claim(n)
    x.ring.send(n, x.ref.at[stream.batch, at, stream.head + g], x.smem)
    x.ring.send(n, x.stats_ref.at[stream.batch, stream.head + g, at], x.stats_smem)
    if x.ids_ref is not None:
        x.ring.send(n, x.ids_ref.at[stream.batch, at], x.ids_smem)


def load(w: Worker, step: Step, i, stream: QueryStream, following):
    """Loads the tiles of a step, the i-th of its item.

    It may lie up to `ahead` tiles past its head's last one; the tiles of the next item follow the
    last head's.  Two warps load, one Q and one dO; only they wait until all warpgroups have left
    the buffers.
    """

    def one(x):
        past = i - w.schedule.group * stream.steps

        def send_following():
            coming = stream_of(w, following)
            in_it = past < w.schedule.group * coming.steps
            pl.when(in_it)(lambda: send(w, x, step.n, 0, past, coming))

        pl.when(past < 0)(lambda: send(w, x, step.n, step.g, step.r, stream))
        if following is not None:
            pl.when((past >= 0) & (following >= 0))(send_following)

    def by_warp(warp):
        for x in queries_of(w):
            pl.when((warp == x.warp) & (w.wg == x.ring.loader))(lambda x=x: one(x))

    plgpu.warp_map(by_warp)


def load_later(w: Worker, i: KeysItem, g, r):
    """Loads what must be on its way after step r of head g."""
    # Without the barriers the compiler would compute indices ahead, and hold them in registers.
    g, r = lax.optimization_barrier(g), lax.optimization_barrier(r)
    nth = g * i.stream.steps + r + ahead(w.schedule)
    step = Step(i.n0 + nth, g, r + ahead(w.schedule))
    load(w, step, nth, i.stream, i.following)


def begin(w: Worker, item):
    """Loads what the first item of a block needs at once."""
    pl.when(w.wg < sets(w.schedule))(lambda: load_kv(w, item, 0))
    stream = stream_of(w, item)
    pl.loop(0, ahead(w.schedule))(lambda n: load(w, Step(n, 0, n), n, stream, None))


# Hand buffers back.


def release(w: Worker, n):
    """This warpgroup has read the tiles of step n."""
    plgpu.commit_smem()  # plain loads have read the statistics
    queries_of(w)[0].ring.release(n)


def pass_by(w: Worker, i: KeysItem, g, low, high):
    """Steps in which other warpgroups of the block work, and this one sees nothing."""

    @pl.loop(low, high)
    def _(r):
        n, (q, do) = i.step(g, r).n, queries_of(w)
        load_later(w, i, g, r)
        q.ring.wait(n)
        do.ring.wait(n)
        q.ring.release(n)
