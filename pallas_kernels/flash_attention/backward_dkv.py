"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in backward.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

    K, V, 64 rows a warpgroup       -- k_bars, v_bars -->  warpgroup 0:  S^T = K Q^T, dP^T = V dO^T
                                                                         P^T, dS^T
    Q, lse2    ring [n] [n+1] [n+2] [ ]  -- q_full -->                   dV += P^T dO
    dO, -delta ring [n] [n+1] [n+2] [ ]  -- do_full -->                  dK += dS^T Q
             <---------------------------- free --         warpgroup 1:  the same

What a warpgroup computes in a step depends on the registers that it has for it: of 64 queries
(backward_dkv_alone.py), at a head dimension of 64 of 128 queries (backward_dkv_halves.py), and at
256 only one of dK and dV, while another warpgroup sums the other (backward_dkv_pair.py).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import column_sums
from pallas_kernels.flash_attention.keys import (
    Item,
    Ring,
    Step,
    Stream,
    ahead,
    item_of,
    pairs_up,
    runs_on,
    sets,
    stream_of,
    with_steps,
)
from pallas_kernels.flash_attention.masks import logits, same_segment, visible
from pallas_kernels.flash_attention.schedule import (
    Call,
    Heads,
    Schedule,
    Tiles,
    diagonal_crosses_tiles,
    launch,
    schedule,
    walk,
    with_spans,
    work_items,
)
from pallas_kernels.mosaic import COL, ROW, ROWS, along


def tiles(head_dim: int, group: int) -> Tiles:
    """The fastest on an H100; docs/attention.md has the others."""
    if head_dim <= 64:  # in halves; the heads of a group leave no registers for the next item
        return Tiles(2, 128, 3, group == 1, 16)
    if head_dim <= 96:
        return Tiles(2, 64, 3, True, 16)
    return Tiles(2, 64, 4 if head_dim <= 128 else 2, False, 32)


class Inputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    lse2: Any  # log-sum-exp in base 2
    do: Any
    minus_delta: Any
    plan: Any  # None where the hardware hands out the items
    segments: Any  # Segments, or None
    joint: Any  # where both results go, or None
    sums: Any  # where their partial sums go, or None


def scratch(s: Schedule, sums: bool) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    own, stat = s.sides * sets(s), plgpu.SMEM((s.stages, s.columns), jnp.float32)
    buffers = dict(
        k=s.buffer(own, ROWS),  # of each 64 keys of the block, like v and their barriers
        v=s.buffer(own, ROWS),
        q=s.buffer(s.stages, s.columns),  # of each slot, like do and the statistics
        do=s.buffer(s.stages, s.columns),
        lse2=stat,
        minus_delta=stat,
        k_bars=plgpu.Barrier(num_arrivals=1 + s.packed, num_barriers=own),
        v_bars=plgpu.Barrier(num_barriers=own),
        q_full=ring(num_arrivals=2 + s.packed),
        do_full=ring(num_arrivals=2),
        free=ring(num_arrivals=s.wgs),
    )
    if s.packed:
        buffers["k_ids"] = plgpu.SMEM((own, ROWS), jnp.int32)
        buffers["q_ids"] = plgpu.SMEM((s.stages, s.columns), jnp.int32)
    if pairs_up(s):  # P^T, on its way from one warpgroup to the other
        swizzled = mosaic.wgmma_tiles(s.columns, jnp.float32)
        buffers["p"] = plgpu.SMEM((ROWS, s.columns), jnp.float32, transforms=swizzled)
        buffers["p_full"] = buffers["p_free"] = plgpu.Barrier()
    if s.items.persistent:  # otherwise dV and dK leave through the buffers of K and V
        buffers["dv"] = buffers["dk"] = s.buffer(sets(s), ROWS)
    if sums:
        buffers["ones"] = column_sums.ones_buffers(s)
    return buffers


class Worker(NamedTuple):
    """One warpgroup of a block."""

    schedule: Schedule
    inputs: Inputs
    dk_ref: Any
    dv_ref: Any
    smem: Any  # what `scratch` lists, by name
    rings: tuple[Ring, Ring]
    wg: Any
    set: Any  # which 64 of the block's keys it works on
    differentiate: Callable  # (w, i): sums and stores dK and dV of an item, or its share of them


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


def send(w: Worker, ring: Ring, n, g, r, stream: Stream):
    """Starts to copy tile r of head g for step n, once all warpgroups have left its buffer."""
    s = w.schedule
    if s.group > 1:  # no division, which would take longer than the copies
        ends = [heads * stream.steps for heads in range(1, ahead(s) + 1)]
        over = sum((r >= end).astype(jnp.int32) for end in ends)
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
        coming = stream_of(w.schedule, w.inputs.segments, w.wg, following)
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
    # Without the barriers the compiler would compute indices ahead, and hold them in registers.
    g, r = lax.optimization_barrier(g), lax.optimization_barrier(r)
    nth = g * i.stream.steps + r + ahead(w.schedule)
    step = Step(i.n0 + nth, g, r + ahead(w.schedule))
    load(w, step, nth, i.stream, i.following)


def begin(w: Worker, item):
    """Loads what the first item of a block needs at once."""
    pl.when(w.wg < sets(w.schedule))(lambda: load_kv(w, item, 0))
    stream = stream_of(w.schedule, w.inputs.segments, w.wg, item)
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


def across(acc, rows, tile):
    """acc += rows times a tile, transposed."""
    plgpu.wgmma(acc, rows, tile.transpose((1, 0)))


def column(w: Worker, ref, slot, half=0):
    """A statistic of 64 queries, over a tile of S^T.  half: which 64 of a step."""
    stat = plgpu.load(ref.at[slot, pl.ds(half * ROWS, ROWS)], layout=COL, optimized=False)
    return along(stat, (ROWS, ROWS), 1)


def probabilities(w: Worker, i: Item, k_ids, scores, step: Step, slot, masked, half=0):
    """P^T and d logits / d (scale S), None for 1, from K Q^T of 64 queries."""
    s, visits = w.schedule, w.schedule.visits
    x, slope = logits(scores, s.scale, s.softcap)
    if masked and s.packed:
        ids = w.smem.q_ids.at[slot, pl.ds(half * ROWS, ROWS)]
        q_ids = plgpu.load(ids, layout=COL, optimized=False)
        x = same_segment(x, k_ids, q_ids)
    if masked:
        # Without the barrier the compiler would hold the positions, which are those of all heads.
        tile = lax.optimization_barrier(i.stream.base + step.r)
        q0 = tile * s.columns + half * ROWS + visits.offset
        x = visible(x, q0, i.k0, causal=visits.causal, window=visits.window, transposed=True)
    return jnp.exp2(x - column(w, w.smem.lse2, slot, half)), slope


def own(w: Worker, i: Item, step: Step):
    """The buffer of the warpgroup's keys and values.

    The minimum changes nothing.  But where the compiler sees that an operand stays in place, it
    holds the descriptors of all its slices in registers.
    """
    return jnp.minimum(i.at, step.n + w.schedule.sides * sets(w.schedule))


def one_head(w: Worker, i: Item, add, g):
    """Walks over the steps of one query head that the warpgroup sees."""
    s, visits, late = w.schedule, w.schedule.visits, runs_on(w.schedule)

    def one(r, masked, begins=False):
        step = i.step(g, r)
        slot = s.slot(step.n)
        plgpu.barrier_wait(w.smem.q_full.at[slot])
        add(step, slot, masked, begins)

    pass_by(w, i, g, 0, i.first)
    if late:
        one(i.first, visits.causal or s.packed, begins=True)
    crosses = diagonal_crosses_tiles(s) if late else visits.causal
    walk(s, i, i.first + late, one, crosses=crosses)
    if late:
        plgpu.wgmma_wait(0)
        release(w, i.step(g, i.last - 1).n)
    if visits.window is not None:
        pass_by(w, i, g, i.last, i.stream.steps)


def all_heads(w: Worker, i: Item, add):
    """Calls add(step, slot, masked, begins) for the steps of all heads of the group."""
    pl.loop(0, w.schedule.group)(lambda g: one_head(w, i, add, lax.optimization_barrier(g)))


def wait_for_k(w: Worker, i: Item):
    """Returns the ids of the keys, None without segments."""
    plgpu.barrier_wait(w.smem.k_bars.at[i.at])
    if w.schedule.packed:
        return plgpu.load(w.smem.k_ids.at[i.at], layout=ROW, optimized=False)
    return None


# The epilogue scales dK, and stores both.


def buffers(w: Worker):
    """Those through which dK and dV leave."""
    smem = w.smem
    # Of two warpgroups that pair up each is the only reader of one of K and V.
    return (smem.dk, smem.dv) if w.schedule.items.persistent else (smem.v, smem.k)


def store(w: Worker, x, smem, target):
    plgpu.commit_smem()  # all warps have read what was there
    smem[w.set] = x.astype(w.schedule.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.at[w.set], target)


def store_dk(w: Worker, i: Item, dk):
    s, (smem, _) = w.schedule, buffers(w)
    store(w, dk * s.scale, smem, w.dk_ref.at[i.batch, pl.ds(i.k0, ROWS), s.k_first + i.kv_head])


def store_dv(w: Worker, i: Item, dv):
    s, (_, smem) = w.schedule, buffers(w)
    store(w, dv, smem, w.dv_ref.at[i.batch, pl.ds(i.k0, ROWS), s.v_first + i.kv_head])


def store_sums(w: Worker, i: Item):
    """Stores the sums of the rows of dK and dV, which are in their buffers."""
    at = jnp.minimum(w.set, i.at)  # w.set, but the compiler may not know it, as in `own`
    heads = w.schedule.k_first + i.kv_head, w.schedule.v_first + i.kv_head
    tiles = [smem.at[at] for smem in buffers(w)]
    column_sums.store(w.inputs.sums, w.smem.ones.at[at], tiles, i.batch, i.k0, heads)


def one_item(w: Worker, item, following, side, n0):
    """One block of keys; returns the step after its last."""
    s, keys = w.schedule, w.schedule.visits.lengths[1]
    if following is not None:
        pl.when(following >= 0)(lambda: load_kv(w, following, 1 - side))
    segments = w.inputs.segments
    i = item_of(s, segments, w.wg, w.set, item, following, side, n0)
    total = s.group * i.stream.steps
    if s.items.persistent:  # of an item of fewer steps than are on their way when it begins
        pl.loop(total, ahead(s))(
            lambda nth: load(w, Step(n0 + nth, 0, nth), nth, i.stream, following)
        )
    i = with_steps(s, segments, i)

    pl.when(i.k0 < keys)(lambda: w.differentiate(w, i))
    if mosaic.cdiv(keys, s.block) * s.block - keys >= ROWS:

        @pl.when(i.k0 >= keys)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.k_bars.at[i.at])
            plgpu.barrier_wait(w.smem.v_bars.at[i.at])
            pl.loop(0, s.group)(lambda g: pass_by(w, i, g, 0, i.stream.steps))

    return n0 + total


def body(work, s: Schedule, inputs: Inputs, *refs):
    *results, smem = refs
    dk_ref, dv_ref = results or (inputs.joint, inputs.joint)
    pair = pairs_up(s)
    wg = lax.axis_index("wg")
    q_ids, q_ids_smem = (inputs.segments.q_ids, smem.q_ids) if s.packed else (None, None)
    # The last warpgroup loads Q and the first one dO; of a pair the second one loads both.
    last = s.wgs - 1
    q = Ring(inputs.q, inputs.lse2, q_ids, smem.q, smem.lse2, q_ids_smem, smem.q_full, last, warp=0)
    do = Ring(
        inputs.do, inputs.minus_delta, None, smem.do, smem.minus_delta, None, smem.do_full,
        last if pair else 0, warp=1,
    )  # fmt: skip
    w = Worker(s, inputs, dk_ref, dv_ref, smem, (q, do), wg, 0 if pair else wg, work)
    if inputs.sums is not None:
        column_sums.fill(smem.ones.at[wg])
    if pair:
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(smem.p_free))
    work_items(inputs.plan, functools.partial(begin, w), functools.partial(one_item, w))
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("work", "call", "heads"))
def backward_dkv(
    work: Callable, q, k, v, lse2, dout, minus_delta, segments, joint=None, sums=None, *,
    call: Call, heads: Heads | None = None,
):  # fmt: skip
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there.

    work(w, item): what a warpgroup does with an item.  lse2, minus_delta: from the dQ kernel.
    sums: a ref for the partial sums of dk and dv (column_sums.py), or None.
    """
    # K and V must not stay in registers: ptxas gives these away too early (docs/attention.md).
    packed, group = segments is not None, q.shape[2] // k.shape[2]
    tile = tiles(q.shape[-1], heads.q // heads.kv if heads else group)
    owned = 1 if q.shape[-1] > 128 else tile.wgs
    s = schedule(q, k, tile, call, heads, packed=packed, by_keys=True, sets=owned)
    written = mosaic.cdiv(call.lengths[0], ROWS) * ROWS  # by the dQ kernel
    if written % s.columns:  # the last step has a half without queries, so its P must be 0
        lse2 = lse2.at[:, :, written:].set(1e30)
        minus_delta = minus_delta.at[:, :, written:].set(0)
    segments = with_spans(s, segments)
    inputs = Inputs(q, k, v, lse2, dout, minus_delta, s.items.table, segments, joint, sums)
    like = jax.ShapeDtypeStruct(k.shape, q.dtype)
    out_type = () if heads else (like, like)
    run = functools.partial(body, work)
    return launch(s, "attention_backward_dkv", run, inputs, out_type, scratch(s, sums is not None))
