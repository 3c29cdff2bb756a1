"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in backward_dq.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

    K, V, 64 rows a warpgroup       -- k_bars, v_bars -->  warpgroup 0:  S^T = K Q^T, dP^T = V dO^T
                                                                         P^T, dS^T
    Q, lse     ring [n] [n+1] [n+2] [ ]  -- q_full -->                   dV += P^T dO
    dO, delta  ring [n] [n+1] [n+2] [ ]  -- do_full -->                  dK += dS^T Q
             <---------------------------- free --         warpgroup 1:  the same

A head dimension of 256 leaves a warpgroup registers for one of dK and dV.  There two warpgroups
pair up over the same 64 keys, with P^T (fp32) handed over through shared memory:

    warpgroup 0:  S^T = K Q^T, P^T, dV += P^T dO   -- p_full -->   warpgroup 1:  dP^T = V dO^T,
                                                  <-- p_free --                  dS^T, dK += dS^T Q
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import (
    Segments,
    logits,
    same_segment,
    segment_spans,
    visible,
)
from pallas_kernels.flash_attention.schedule import (
    STATIC,
    Schedule,
    Tiles,
    schedule,
    work_items,
)
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, WGMMA, along


def dkv_tiles(head_dim: int) -> Tiles:
    """The fastest on an H100; docs/attention.md has the others."""
    if head_dim <= 96:
        return Tiles(2, 64, 4 if head_dim <= 64 else 3, True, 16)
    return Tiles(2, 64, 4 if head_dim <= 128 else 2, False, 32)


class Inputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    lse: Any
    do: Any
    delta: Any
    plan: Any  # None where the hardware hands out the items
    segments: Any  # Segments, or None
    joint: Any  # where both results go, or None


class Scratch(NamedTuple):
    """Shared memory and barriers of a block, see the picture."""

    k: Any  # (sides sets,64,D)
    v: Any  # (sides sets,64,D)
    q: Any  # (stages,columns,D)
    do: Any  # (stages,columns,D)
    lse: Any  # (stages,columns)
    delta: Any  # (stages,columns)
    k_bars: Any  # of each buffer of K
    v_bars: Any
    q_full: Any  # of each slot
    do_full: Any
    free: Any
    k_ids: Any = None  # (sides sets,64)
    q_ids: Any = None  # (stages,columns)
    p: Any = None  # (64,columns), of two warpgroups that pair up
    p_full: Any = None
    p_free: Any = None
    dv: Any = None  # (sets,64,D); None: dV and dK leave through the buffers of K and V
    dk: Any = None


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


class Worker(NamedTuple):
    """One warpgroup of a block."""

    schedule: Schedule
    inputs: Inputs
    dk_ref: Any
    dv_ref: Any
    smem: Scratch
    rings: tuple[Ring, Ring]
    wg: Any
    set: Any  # which 64 of the block's keys it works on


class Stream(NamedTuple):
    """What streams past an item: tiles base ... base + steps - 1 of each head of the group."""

    batch: Any
    head: Any  # the first one
    base: Any
    steps: Any


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
    first: Any = None  # the warpgroup's first step of each head; the others may see further
    last: Any = None  # the one after its last
    unmasked: Any = None  # its first step without a mask
    edge: Any = None  # its first step after those

    def step(self, g, r) -> Step:
        return Step(self.n0 + g * self.stream.steps + r, g, r)


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded."""
    return s.stages - (2 if s.stages > 3 else 1)


def pairs_up(width: int) -> bool:
    """Whether two warpgroups work on the same 64 keys."""
    return width > 128


def runs_on(width: int) -> bool:
    """Whether a step adds to dV and dK under the next: P and dS have registers to wait in.

    A slot then stays taken for a step more.  `add_both` loads before it frees one, so its ring
    needs two slots more than `ahead`: with fewer, the warp that loads waits for its own warpgroup.
    """
    return width <= 64 or pairs_up(width)


def sets(s: Schedule) -> int:
    """How many times 64 keys a block owns."""
    return s.block // ROWS


# Load: K and V of a warpgroup, and the tiles of Q and dO.


def load_kv(w: Worker, item, side):
    s, smem = w.schedule, w.smem
    key0, (batch, kv_head) = s.items.where(item)
    rows = pl.ds(key0 + w.set * ROWS, ROWS)
    at = side * sets(s) + w.set
    k = w.inputs.k.at[batch, rows, s.k_first + kv_head]
    v = w.inputs.v.at[batch, rows, s.v_first + kv_head]
    plgpu.copy_gmem_to_smem(k, smem.k.at[at], smem.k_bars.at[at])
    plgpu.copy_gmem_to_smem(v, smem.v.at[at], smem.v_bars.at[at])
    if s.packed:
        ids = w.inputs.segments.k_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.k_ids.at[at], smem.k_bars.at[at])


def stream_of(w: Worker, item) -> Stream:
    s = w.schedule
    key0, (batch, kv_head) = s.items.where(item)
    low, high = s.visits.seen(key0, key0 + s.block, *s.limits(key0, batch, w.inputs.segments)[0])
    # The first tile is a variable because JAX 0.12 rejects slices that are statically too wide.
    base = low + lax.rem(w.wg, jnp.int32(1))
    return Stream(batch, kv_head * s.group, base, high - low)


def send(w: Worker, ring: Ring, n, g, r, stream: Stream):
    """Starts to copy tile r of head g for step n, once all warpgroups have left its buffer."""
    s = w.schedule
    if s.group > 1:  # no division, which would take longer than the copies
        over = jnp.where(stream.steps == 1, r, (r >= stream.steps).astype(jnp.int32))
        g, r = g + over, r - over * stream.steps
    slot, at = s.slot(n), pl.ds((stream.base + r) * s.columns, s.columns)
    pl.when(n >= s.stages)(lambda: plgpu.barrier_wait(w.smem.free.at[slot]))
    bar = ring.full.at[slot]
    tile = ring.ref.at[stream.batch, at, stream.head + g]
    plgpu.copy_gmem_to_smem(tile, ring.smem.at[slot], bar)
    stats = ring.stats_ref.at[stream.batch, stream.head + g, at]
    plgpu.copy_gmem_to_smem(stats, ring.stats_smem.at[slot], bar)
    if ring.ids_ref is not None:
        plgpu.copy_gmem_to_smem(ring.ids_ref.at[stream.batch, at], ring.ids_smem.at[slot], bar)


def load_one(w: Worker, ring: Ring, step: Step, i, stream: Stream, following):
    past = i - w.schedule.group * stream.steps

    def send_following():
        coming = stream_of(w, following)
        in_it = past < w.schedule.group * coming.steps
        pl.when(in_it)(lambda: send(w, ring, step.n, 0, past, coming))

    pl.when(past < 0)(lambda: send(w, ring, step.n, step.g, step.r, stream))
    if following is not None:
        pl.when((past >= 0) & (following >= 0))(send_following)


def load(w: Worker, step: Step, i, stream: Stream, following):
    """Loads the tiles of a step, the i-th of its item.

    It may lie up to `ahead` tiles past its head's last one; after those of the item's last head
    come those of the next item.  Two warps load, one Q and one dO; only they wait until all
    warpgroups have left the buffers.
    """

    def by_warp(warp):
        for ring in w.rings:
            pl.when((warp == ring.warp) & (w.wg == ring.wg))(
                lambda ring=ring: load_one(w, ring, step, i, stream, following)
            )

    plgpu.warp_map(by_warp)


def load_later(w: Worker, i: Item, g, r):
    """Loads what must be on its way after step r of head g."""
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
    plgpu.barrier_arrive(w.smem.free.at[w.schedule.slot(n)])


def pass_by(w: Worker, i: Item, g, low, high):
    """Steps in which other warpgroups of the block work, and this one sees nothing."""

    @pl.loop(low, high)
    def _(r):
        n = i.step(g, r).n
        load_later(w, i, g, r)
        slot = w.schedule.slot(n)
        plgpu.barrier_wait(w.smem.q_full.at[slot])
        plgpu.barrier_wait(w.smem.do_full.at[slot])
        plgpu.barrier_arrive(w.smem.free.at[slot])


# Compute P and dS, and add to dV and dK.


def across(w: Worker, acc, rows, ring, slot):
    """acc += rows times a tile of the ring, transposed."""
    plgpu.wgmma(acc, rows, ring.at[slot].transpose((1, 0)))


def column(w: Worker, ref, slot):
    """A statistic of the queries, over a tile of S^T."""
    stat = plgpu.load(ref.at[slot], layout=COL, optimized=False)
    return along(stat, (ROWS, w.schedule.columns), 1)


def probabilities(w: Worker, i: Item, k_ids, scores, step: Step, slot, masked):
    """P^T and d logits / d (scale S), None for 1, from K Q^T."""
    s, visits = w.schedule, w.schedule.visits
    x, slope = logits(scores, s.scale, s.softcap)
    if masked and s.packed:
        q_ids = plgpu.load(w.smem.q_ids.at[slot], layout=COL, optimized=False)
        x = same_segment(x, k_ids, q_ids)
    if masked:
        q0 = (i.stream.base + step.r) * s.columns + visits.offset
        x = visible(x, q0, i.k0, causal=visits.causal, window=visits.window, transposed=True)
    return jnp.exp2(x - column(w, w.smem.lse, slot) * LOG2E), slope


def add_both(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step, slot, masked, begins, s_acc, dp_acc):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    # Issue S^T = K Q^T and dP^T = V dO^T.  This minimum changes nothing.  But where the compiler
    # sees that an operand stays in place, it holds the descriptors of all its slices in registers.
    here = jnp.minimum(i.at, step.n + s.sides * sets(s))
    k, v = smem.k.at[here], smem.v.at[here]
    across(w, s_acc, k, smem.q, slot)
    plgpu.barrier_wait(smem.do_full.at[slot])
    across(w, dp_acc, v, smem.do, slot)
    load_later(w, i, step.g, step.r)
    # Compute P under dP, accumulate dV.
    scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    if runs_on(s.width) and not begins:
        release(w, step.n - 1)
    p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
    plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])
    # Compute dS under dV, accumulate dK.
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
    ds = p * (dp - column(w, smem.delta, slot))
    ds = (ds if slope is None else ds * slope).astype(s.dtype)
    plgpu.wgmma(dk_acc, ds, smem.q.at[slot])
    if not runs_on(s.width):
        plgpu.wgmma_wait(0)
        release(w, step.n)


def add_dv(w: Worker, i: Item, k_ids, dv_acc, step, slot, masked, begins, s_acc):
    """Of a pair the first warpgroup: hands P over, and adds P^T dO to dV."""
    s, smem = w.schedule, w.smem
    # Compute P.
    across(w, s_acc, smem.k.at[i.at], smem.q, slot)
    scores = s_acc[...]
    if not begins:
        release(w, step.n - 1)
    p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
    # Hand it over.
    plgpu.barrier_wait(smem.p_free)
    smem.p[...] = p if slope is None else p * slope
    plgpu.barrier_arrive(smem.p_full)
    # Accumulate dV, under the next step.
    plgpu.barrier_wait(smem.do_full.at[slot])
    plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])


def add_dk(w: Worker, i: Item, dk_acc, step, slot, begins, dp_acc):
    """Of a pair the second warpgroup: takes P, and adds dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    # Compute dP.
    plgpu.barrier_wait(smem.do_full.at[slot])
    across(w, dp_acc, smem.v.at[i.at], smem.do, slot)
    dp = dp_acc[...]
    if not begins:
        release(w, step.n - 1)
    load_later(w, i, step.g, step.r)
    # Take P, compute dS.
    plgpu.barrier_wait(smem.p_full)
    p = plgpu.load(smem.p, layout=WGMMA)
    ds = (p * (dp - column(w, smem.delta, slot))).astype(s.dtype)
    plgpu.barrier_arrive(smem.p_free)
    # Accumulate dK, under the next step.
    plgpu.wgmma(dk_acc, ds, smem.q.at[slot])


def one_step(w: Worker, i: Item, k_ids, dk_acc, dv_acc, g, r, masked, begins=False):
    step, tile = i.step(g, r), plgpu.ACC((ROWS, w.schedule.columns), jnp.float32)
    slot = w.schedule.slot(step.n)
    plgpu.barrier_wait(w.smem.q_full.at[slot])
    if not pairs_up(w.schedule.width):
        add = functools.partial(add_both, w, i, k_ids, dk_acc, dv_acc, step, slot, masked, begins)
        pl.run_scoped(add, tile, tile)
    elif dk_acc is None:
        add = functools.partial(add_dv, w, i, k_ids, dv_acc, step, slot, masked, begins)
        pl.run_scoped(add, tile)
    else:
        pl.run_scoped(functools.partial(add_dk, w, i, dk_acc, step, slot, begins), tile)


def one_head(w: Worker, i: Item, k_ids, dk_acc, dv_acc, g):
    """Walks over the steps of one query head that the warpgroup sees."""
    s, visits = w.schedule, w.schedule.visits
    one = functools.partial(one_step, w, i, k_ids, dk_acc, dv_acc, g)
    walk = lambda low, high, masked: pl.loop(low, high)(lambda r: one(r, masked))
    late = runs_on(s.width)
    pass_by(w, i, g, 0, i.first)
    if late:
        one(i.first, visits.causal or s.packed, begins=True)
    start = i.first + late
    # The diagonal may cross two tiles, and segments may begin anywhere.
    diagonal = visits.causal and (not late or visits.offset % ROWS or s.columns % ROWS)
    if s.packed or diagonal:
        walk(start, i.unmasked, True)
        start = i.unmasked
    walk(start, i.edge, False)
    if visits.window is not None or s.packed:
        walk(i.edge, i.last, True)
    if late:
        plgpu.wgmma_wait(0)
        release(w, i.step(g, i.last - 1).n)
    if visits.window is not None:
        pass_by(w, i, g, i.last, i.stream.steps)


def all_heads(w: Worker, i: Item, dk_acc, dv_acc):
    """Waits for K and V as far as the warpgroup needs them, and walks over the group's heads."""
    k_ids = None
    if dv_acc is not None:
        plgpu.barrier_wait(w.smem.k_bars.at[i.at])
        if w.schedule.packed:
            k_ids = plgpu.load(w.smem.k_ids.at[i.at], layout=ROW, optimized=False)
    if dk_acc is not None:
        plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    pl.loop(0, w.schedule.group)(lambda g: one_head(w, i, k_ids, dk_acc, dv_acc, g))


# The epilogue scales dK, and stores both.


def store(w: Worker, x, smem, target):
    plgpu.commit_smem()  # all warps have read what was there
    smem[w.set] = x.astype(w.schedule.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.at[w.set], target)


def store_dk(w: Worker, i: Item, dk):
    # Of two warpgroups that pair up each is the only reader of one of K and V.
    s, smem = w.schedule, w.smem.v if w.smem.dk is None else w.smem.dk
    store(w, dk * s.scale, smem, w.dk_ref.at[i.batch, pl.ds(i.k0, ROWS), s.k_first + i.kv_head])


def store_dv(w: Worker, i: Item, dv):
    s, smem = w.schedule, w.smem.k if w.smem.dv is None else w.smem.dv
    store(w, dv, smem, w.dv_ref.at[i.batch, pl.ds(i.k0, ROWS), s.v_first + i.kv_head])


def both(w: Worker, i: Item, dk_acc, dv_acc):
    all_heads(w, i, dk_acc, dv_acc)
    dk, dv = dk_acc[...], dv_acc[...]
    plgpu.wait_smem_to_gmem(0)  # the block before has left
    store_dk(w, i, dk)
    store_dv(w, i, dv)


def only_dk(w: Worker, i: Item, dk_acc):
    all_heads(w, i, dk_acc, None)
    store_dk(w, i, dk_acc[...])


def only_dv(w: Worker, i: Item, dv_acc):
    all_heads(w, i, None, dv_acc)
    store_dv(w, i, dv_acc[...])


def item_of(w: Worker, item, following, side, n0) -> Item:
    """The Item, without its steps."""
    s, at = w.schedule, side * sets(w.schedule) + w.set
    key0, (batch, kv_head) = s.items.where(item)
    return Item(
        batch, kv_head, key0, key0 + w.set * ROWS, at, n0, stream_of(w, item), following
    )  # fmt: skip


def with_steps(w: Worker, i: Item) -> Item:
    visits, packed = w.schedule.visits, w.schedule.packed
    limits, same = w.schedule.limits(i.key0, i.batch, w.inputs.segments)
    own = visits.seen(i.k0, i.k0 + ROWS, *limits)
    whole = visits.whole(i.k0, i.k0 + ROWS, *same)
    first, last = own[0] - i.stream.base, own[1] - i.stream.base
    unmasked, edge = first + 1, last
    if visits.causal or packed:
        unmasked = jnp.clip(whole[0] - i.stream.base, first + 1, last)
    if visits.window is not None or packed:
        edge = jnp.clip(whole[1] - i.stream.base, unmasked, last)
    return i._replace(first=first, last=last, unmasked=unmasked, edge=edge)


def differentiate(w: Worker, item, following, side, n0):
    """One block of keys; returns the step after its last."""
    s, keys = w.schedule, w.schedule.visits.lengths[1]
    if following is not None:
        pl.when(following >= 0)(lambda: load_kv(w, following, 1 - side))
    i = item_of(w, item, following, side, n0)
    total = s.group * i.stream.steps
    if s.items.persistent:  # of an item of fewer steps than are on their way when it begins
        pl.loop(total, ahead(s))(
            lambda nth: load(w, Step(n0 + nth, 0, nth), nth, i.stream, following)
        )
    i = with_steps(w, i)

    @pl.when(i.k0 < keys)
    def _():
        acc = plgpu.ACC((ROWS, s.width), jnp.float32)
        if pairs_up(s.width):
            pl.when(w.wg == 0)(lambda: pl.run_scoped(functools.partial(only_dv, w, i), acc))
            pl.when(w.wg == 1)(lambda: pl.run_scoped(functools.partial(only_dk, w, i), acc))
        else:
            pl.run_scoped(functools.partial(both, w, i), acc, acc)

    if mosaic.cdiv(keys, s.block) * s.block - keys >= ROWS:

        @pl.when(i.k0 >= keys)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.k_bars.at[i.at])
            plgpu.barrier_wait(w.smem.v_bars.at[i.at])
            pl.loop(0, s.group)(lambda g: pass_by(w, i, g, 0, i.stream.steps))

    return n0 + total


def body(s: Schedule, inputs: Inputs, dk_ref, dv_ref, smem: Scratch):
    wg, pair = lax.axis_index("wg"), pairs_up(s.width)
    q_ids = inputs.segments.q_ids if s.packed else None
    q = Ring(
        inputs.q, inputs.lse, q_ids, smem.q, smem.lse, smem.q_ids, smem.q_full, s.wgs - 1, warp=0
    )
    # Of two warpgroups that pair up, the second loads both rings.
    sender = s.wgs - 1 if pair else 0
    do = Ring(
        inputs.do, inputs.delta, None, smem.do, smem.delta, None, smem.do_full, sender, warp=1
    )
    w = Worker(s, inputs, dk_ref, dv_ref, smem, (q, do), wg, 0 if pair else wg)
    if pair:
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.p_free))
    work_items(inputs.plan, functools.partial(begin, w), functools.partial(differentiate, w))
    plgpu.wait_smem_to_gmem(0)


def scratch(s: Schedule) -> dict:
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    n, stat = s.sides * sets(s), plgpu.SMEM((s.stages, s.columns), jnp.float32)
    buffers = dict(
        k=s.buffer(n, ROWS),
        v=s.buffer(n, ROWS),
        q=s.buffer(s.stages, s.columns),
        do=s.buffer(s.stages, s.columns),
        lse=stat,
        delta=stat,
        k_bars=plgpu.Barrier(num_arrivals=1 + s.packed, num_barriers=n),
        v_bars=plgpu.Barrier(num_barriers=n),
        q_full=ring(num_arrivals=2 + s.packed),
        do_full=ring(num_arrivals=2),
        free=ring(num_arrivals=s.wgs),
    )
    if s.packed:
        buffers["k_ids"] = plgpu.SMEM((n, ROWS), jnp.int32)
        buffers["q_ids"] = plgpu.SMEM((s.stages, s.columns), jnp.int32)
    if pairs_up(s.width):
        swizzled = mosaic.wgmma_tiles(s.columns, jnp.float32)
        buffers["p"] = plgpu.SMEM((ROWS, s.columns), jnp.float32, transforms=swizzled)
        buffers["p_full"] = buffers["p_free"] = plgpu.Barrier()
    if s.items.persistent:
        buffers["dv"] = buffers["dk"] = s.buffer(sets(s), ROWS)
    return buffers


@functools.partial(jax.jit, static_argnames=STATIC)
def backward_dkv(
    q, k, v, lse, dout, delta, segments, joint=None, *, lengths, causal, scale, sms, window=None,
    softcap=None, heads=None, tile=None,
):  # fmt: skip
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there."""
    width, packed = q.shape[-1], segments is not None
    tile = tile or dkv_tiles(width)
    # K and V in registers would spare shared memory half of S and dP (D64: 0.9 of the time), but
    # ptxas gives these registers away while a later step needs them: wrong dK on an H100, with
    # ptxas 12.9 for one step a head, with nvJitLink 13.0 for several.
    s = schedule(
        q, k, tile, lengths=lengths, causal=causal, scale=scale, sms=sms, window=window,
        softcap=softcap, heads=heads, packed=packed, by_keys=True,
        sets=1 if pairs_up(width) else tile.wgs,
    )  # fmt: skip
    if packed:
        q_ids, k_ids = segments
        segments = Segments(q_ids, k_ids, segment_spans(k_ids, q_ids, s.visits, s.block))

    def attention_backward_dkv(inputs, *results, **smem):
        dk_ref, dv_ref = results or (inputs.joint, inputs.joint)
        body(s, inputs, dk_ref, dv_ref, Scratch(**smem))

    like = jax.ShapeDtypeStruct(k.shape, q.dtype)
    return mosaic.kernel(
        attention_backward_dkv,
        out_type=() if heads else (like, like),
        scratch_types=scratch(s),
        grid=(s.items.grid,),
        grid_names=("block",),
        num_threads=s.wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(Inputs(q, k, v, lse, dout, delta, s.items.table, segments, joint))
