"""Attention backward on Hopper, first kernel: dQ and delta (the formulas are in op.py).

A block owns queries and streams the keys that they see, from the diagonal downwards.

    Q, dO, O, lse, dlse, 64 rows a warpgroup  -- q_bars -->  warpgroup 0:  S = Q K^T, dP = dO V^T
                                                                           P, dS, dQ += dS K
    K ring  [n-1] [n] [n+1] [n+2]  -- k_full -->             warpgroup 1:  the same
    V ring        [n] [n+1] [n+2]  -- v_full -->                 ...
             <---------------------- free --   all warpgroups have left V of step n, and K of n - 1

dQ += dS K of a step runs on under the next one, so K has a slot more than V.  The last warpgroup
also loads the tiles of K and V.  Under a causal mask it sees the most keys and so is the last to
leave a step: it does not wait for the others.

The copies do not use pipeline.Ring: one `free` guards K and V, whose rings differ in length.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import logits, same_segment
from pallas_kernels.flash_attention.queries import Item, Stream, in_sight, item_of, stream_of
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
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, WGMMA, along


def tiles(head_dim: int, packed: bool) -> Tiles:
    """The fastest on an H100; docs/attention.md has the others."""
    if head_dim <= 64:  # the ids of queries and keys share one array, so both have 64
        return Tiles(3, 64, 4, True, 16) if packed else Tiles(2, 128, 3, True, 16)
    if head_dim <= 96:
        return Tiles(2, 64, 3, True, 16)
    # At 256 as much as shared memory and registers hold.
    return Tiles(2, 64, 3 if head_dim <= 128 else 2, False, 0)


class DqInputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    do: Any
    plan: Any  # None where the hardware hands out the items
    dlse: Any  # None for zeros
    segments: Any  # Segments, or None


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded, and how many slots V has: a step reads K longer."""
    return s.stages - 1


def frees_k_apart(s: Schedule) -> bool:
    """Loaded only one step early, K cannot wait until V's slot is free as well."""
    return ahead(s) == 1


def has_o_buffer(s: Schedule) -> bool:
    """Whether O has its own buffer, and not slots that K and V fill later."""
    return s.width <= 128


def v_slot(s: Schedule, n):
    """The slot of step n in the ring of V."""
    return lax.rem(n, jnp.int32(ahead(s)))


def scratch(s: Schedule, has_dlse: bool) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    buffers = dict(
        q=s.buffer(s.sides * s.wgs, ROWS),  # of each warpgroup, like do, stats, q_bars, o and dq
        do=s.buffer(s.sides * s.wgs, ROWS),
        kv=s.buffer(s.stages + ahead(s), s.columns),  # the ring of K, and then the ring of V
        stats=plgpu.SMEM((1 + has_dlse, s.wgs, ROWS), jnp.float32),  # lse, dlse
        q_bars=plgpu.Barrier(num_arrivals=4 + has_dlse + s.packed, num_barriers=s.wgs),
        k_full=ring(num_arrivals=1 + s.packed),
        v_full=plgpu.Barrier(num_barriers=ahead(s)),
        free=ring(num_arrivals=s.wgs),
    )
    if s.packed:  # of each slot of K, and of each warpgroup's queries
        buffers["ids"] = plgpu.SMEM((s.stages + s.wgs, ROWS), jnp.int32)
    if frees_k_apart(s):  # then `free` guards V alone
        buffers["k_free"] = ring(num_arrivals=s.wgs)
    if has_o_buffer(s):
        buffers["o"] = s.buffer(s.wgs, ROWS)
    if s.items.persistent:  # otherwise dQ leaves through the buffer of dO
        buffers["dq"] = s.buffer(s.wgs, ROWS)
    return buffers


class DqWorker(NamedTuple):
    """One warpgroup of a block."""

    schedule: Schedule
    inputs: DqInputs
    dq_ref: Any
    stat_refs: Any  # lse in base 2, and -delta
    smem: Any  # what `scratch` lists, by name
    wg: Any
    o: Any  # its buffer of O


class Rows(NamedTuple):
    """What a warpgroup keeps of its rows in registers."""

    lse2: Any  # log-sum-exp in base 2
    minus_delta: Any  # what dP begins with
    q_ids: Any  # None without segments


# Load: a warpgroup's rows, and the tiles of K and V.


def load_rows(w: DqWorker, item, side):
    s, inputs, smem = w.schedule, w.inputs, w.smem
    row, (batch, head) = s.items.where(item)
    rows = pl.ds(jnp.maximum(row + w.wg * ROWS, 0), ROWS)
    at, bar = side * s.wgs + w.wg, smem.q_bars.at[w.wg]
    buffers = (inputs.q, smem.q.at[at]), (inputs.do, smem.do.at[at]), (inputs.o, w.o)
    for ref, buffer in buffers:
        plgpu.copy_gmem_to_smem(ref.at[batch, rows, head], buffer, bar)
    stats = (inputs.lse,) if inputs.dlse is None else (inputs.lse, inputs.dlse)
    for n, ref in enumerate(stats):
        plgpu.copy_gmem_to_smem(ref.at[batch, head, rows], smem.stats.at[n, w.wg], bar)
    if s.packed:
        ids = inputs.segments.q_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.ids.at[s.stages + w.wg], bar)


def send_k(w: DqWorker, n, stream: Stream):
    s, smem = w.schedule, w.smem
    keys, kv_head = pl.ds((stream.top - 1 - n) * s.columns, s.columns), stream.head // s.group
    slot, k = s.slot(n), w.inputs.k.at[stream.batch, keys, s.k_first + kv_head]
    plgpu.copy_gmem_to_smem(k, smem.kv.at[slot], smem.k_full.at[slot])
    if s.packed:
        ids = w.inputs.segments.k_ids.at[stream.batch, keys]
        plgpu.copy_gmem_to_smem(ids, smem.ids.at[slot], smem.k_full.at[slot])


def send_v(w: DqWorker, n, stream: Stream):
    s, smem = w.schedule, w.smem
    keys, kv_head = pl.ds((stream.top - 1 - n) * s.columns, s.columns), stream.head // s.group
    slot, v = v_slot(s, n), w.inputs.v.at[stream.batch, keys, s.v_first + kv_head]
    plgpu.copy_gmem_to_smem(v, smem.kv.at[s.stages + slot], smem.v_full.at[slot])


WARPS = {send_k: 0, send_v: 1}  # the warps of the last warpgroup that load K and V


def load(w: DqWorker, i: Item, n, *sends):
    """Loads K or V or both of step n, if there is one: from the stream's end on of the next item.

    sends: send_k, send_v or both.
    """

    def send_all(stream):
        for send in sends:
            send(w, n, stream)

    def send_following():
        coming = stream_of(w.schedule, w.inputs.segments, i.following, i.end)
        pl.when(n < coming.end)(lambda: send_all(coming))

    pl.when(n < i.end)(lambda: send_all(i.stream))
    if w.schedule.items.persistent:
        pl.when((n >= i.end) & (i.following >= 0))(send_following)


def refill(w: DqWorker, i: Item, n, free, *sends):
    """Loads tiles into the slots that all warpgroups leave at step n."""
    s = w.schedule

    def one(send):
        plgpu.barrier_wait(free.at[s.slot(n)])
        load(w, i, n + ahead(s), send)

    def by_warp(warp):  # only these two wait until all have left
        for send in sends:
            pl.when(warp == WARPS[send])(lambda send=send: one(send))

    pl.when((w.wg == s.wgs - 1) & (n >= 0))(lambda: plgpu.warp_map(by_warp))


def load_first(w: DqWorker, i: Item):
    """Loads what the item before has not loaded: it had fewer steps than `ahead`, or is none."""
    s = w.schedule
    begin = jnp.where(i.n0 == 0, 0, i.end - i.n0) if s.items.persistent else 0

    @pl.loop(begin, ahead(s))
    def _(step):
        if has_o_buffer(s):
            load(w, i, i.n0 + step, send_k, send_v)
        else:  # O is in the last slot of V
            load(w, i, i.n0 + step, send_k)
            pl.when(step < ahead(s) - 1)(lambda: load(w, i, i.n0 + step, send_v))


def load_following(w: DqWorker, i: Item):
    """Loads the next item's rows, and the tile where O was: O and the statistics have been read."""
    s = w.schedule
    if not has_o_buffer(s):
        pl.when(w.wg == s.wgs - 1)(lambda: load(w, i, i.n0 + ahead(s) - 1, send_v))
    if s.items.persistent:
        pl.when(i.following >= 0)(lambda: load_rows(w, i.following, 1 - i.side))


# Hand buffers back.


def release_k(w: DqWorker, i: Item, n):
    """dQ += dS K of the step before n is done."""
    if frees_k_apart(w.schedule):
        plgpu.barrier_arrive(w.smem.k_free.at[w.schedule.slot(n)])
        refill(w, i, n, w.smem.k_free, send_k)


def refill_free(w: DqWorker, i: Item, n):
    """Loads into the slots that `free` guards."""
    sends = (send_v,) if frees_k_apart(w.schedule) else (send_k, send_v)
    refill(w, i, n, w.smem.free, *sends)


def pass_by(w: DqWorker, i: Item, low, high):
    """Steps in which other warpgroups of the block work, and this one sees nothing."""
    s, smem = w.schedule, w.smem

    @pl.loop(low, high)
    def _(n):
        plgpu.barrier_wait(smem.k_full.at[s.slot(n)])
        plgpu.barrier_wait(smem.v_full.at[v_slot(s, n)])
        release_k(w, i, n)
        plgpu.barrier_arrive(smem.free.at[s.slot(n)])
        refill_free(w, i, n)


# Compute P, dS and dQ.


def rows_of(w: DqWorker, i: Item) -> Rows:
    """Computes delta = rowsum(dO * O) - dlse; stores what the dK/dV kernel reads of the rows."""
    s, smem = w.schedule, w.smem
    stat = lambda ref: plgpu.load(ref, layout=ROW, optimized=False)
    tile_of = lambda ref: plgpu.load(ref, layout=WGMMA)
    # Without the barrier the compiler would round the product with the logits, not before.
    lse2 = lax.optimization_barrier(stat(smem.stats.at[0, w.wg]) * LOG2E)
    q_ids = stat(smem.ids.at[s.stages + w.wg]) if s.packed else None
    do, out = (tile_of(x).astype(jnp.float32) for x in (smem.do.at[i.at], w.o))
    minus_delta = -jnp.sum(do * out, axis=1)
    if w.inputs.dlse is not None:
        minus_delta = minus_delta + stat(smem.stats.at[1, w.wg])
    for ref, value in zip(w.stat_refs, (lse2, minus_delta), strict=True):
        mosaic.store(ref.at[i.batch, i.head, i.rows], value)
    plgpu.commit_smem()  # plain loads have read O and the statistics
    return Rows(lse2, minus_delta, q_ids)


def probabilities(w: DqWorker, i: Item, rows: Rows, scores, n, masked):
    """P and d logits / d (scale S), None for 1, from Q K^T of step n."""
    s = w.schedule
    x, slope = logits(scores, s.scale, s.softcap)
    if masked and s.packed:
        k_ids = plgpu.load(w.smem.ids.at[s.slot(n)], layout=COL, optimized=False)
        x = same_segment(x, rows.q_ids, k_ids)
    if masked:
        x = in_sight(s, i, x, n)
    return jnp.exp2(x - along(rows.lse2, x.shape, 0)), slope


def waits_after_p(s: Schedule) -> bool:
    """Whether a step waits for the next one's keys between P and dP.

    The loop of that wait keeps ptxas from moving the wait for dP up into the computation of P.  On
    an H200 dQ takes 2.03 instead of 2.09 ms at T = 16384 and D = 128, but 0.173 instead of 0.168
    at T = 1024 and D = 64, where P takes as long as the matmuls and is better begun late.
    """
    return s.width > 96


def wait_for_keys(w: DqWorker, i: Item, n):
    """Waits for the keys of step n, if it is one of this item."""
    bar = w.smem.k_full.at[w.schedule.slot(n)]
    pl.when(n < i.last)(lambda: plgpu.barrier_wait(bar))


def step(w: DqWorker, i: Item, rows: Rows, dq_acc, n, masked):
    """Adds dS K of step n to dQ."""
    s, smem = w.schedule, w.smem
    slot, slot_of_v = s.slot(n), v_slot(s, n)
    across = lambda acc, x, y: plgpu.wgmma(acc, x, y.transpose((1, 0)))

    def add_dq(s_acc, dp_acc):
        # Issue S = Q K^T and dP = dO V^T.  These minima change nothing.  But where the compiler
        # sees that an operand stays in place, it holds the descriptors of all its slices in
        # registers, up to 64 of them.
        here = jnp.minimum(i.at, n + s.sides * s.wgs)
        v = smem.kv.at[s.stages + jnp.minimum(slot_of_v, n)]
        if not waits_after_p(s):
            plgpu.barrier_wait(smem.k_full.at[slot])
        across(s_acc, smem.q.at[here], smem.kv.at[slot])
        plgpu.barrier_wait(smem.v_full.at[slot_of_v])
        dp_acc[...] = along(rows.minus_delta, (ROWS, s.columns), 0)
        across(dp_acc, smem.do.at[here], v)
        # Compute P under dP.
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        release_k(w, i, n)
        p, slope = probabilities(w, i, rows, scores, n, masked)
        if waits_after_p(s):
            wait_for_keys(w, i, n + 1)
        # Compute dS.
        dp = dp_acc[...]  # less delta
        if masked and s.packed:
            plgpu.commit_smem()  # plain loads have read the ids
        plgpu.barrier_arrive(smem.free.at[slot])
        ds = p * dp
        ds = (ds if slope is None else ds * slope).astype(s.dtype)
        # Accumulate dQ, under the next step.
        plgpu.wgmma(dq_acc, ds, smem.kv.at[slot])
        refill_free(w, i, n)

    acc = plgpu.ACC((ROWS, s.columns), jnp.float32)
    pl.run_scoped(add_dq, acc, acc)


def accumulate(w: DqWorker, i: Item, rows: Rows, dq_acc):
    """Walks over the steps that the warpgroup sees, and stores dQ."""
    s = w.schedule
    one = functools.partial(step, w, i, rows, dq_acc)
    if waits_after_p(s):
        wait_for_keys(w, i, i.first)
    one(i.first, s.visits.causal or s.ragged or s.packed)
    walk(s, i, i.first + 1, one, crosses=diagonal_crosses_tiles(s))
    store(w, i, dq_acc[...])


def store(w: DqWorker, i: Item, dq):
    # The next item's dO may be on its way into the buffer of dO.
    smem = w.smem.dq if w.schedule.items.persistent else w.smem.do
    plgpu.wait_smem_to_gmem(0)  # the block before has left it
    smem[w.wg] = (dq * w.schedule.scale).astype(w.schedule.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.at[w.wg], w.dq_ref.at[i.batch, i.rows, i.head])


def differentiate(w: DqWorker, item, following, side, n0):
    """One block of queries, from the diagonal downwards; returns the step after its last."""
    s = w.schedule
    i = item_of(s, w.inputs.segments, w.wg, item, following, side, n0)
    # Load.
    pl.when(w.wg == s.wgs - 1)(lambda: load_first(w, i))
    plgpu.barrier_wait(w.smem.q_bars.at[w.wg])

    @pl.when(i.q0 >= 0)
    def _():
        rows = rows_of(w, i)
        load_following(w, i)
        # Compute, while others may see tiles before these and after them.
        pass_by(w, i, n0, i.first)
        accumulator = plgpu.ACC((ROWS, s.width), jnp.float32)
        pl.run_scoped(functools.partial(accumulate, w, i, rows), accumulator)
        if s.visits.window is not None:
            pass_by(w, i, i.last, i.end)

    if s.lead:

        @pl.when(i.q0 < 0)  # nothing but padding
        def _():
            load_following(w, i)
            pass_by(w, i, n0, i.end)

    return i.end


def body(s: Schedule, inputs: DqInputs, dq_ref, lse2_ref, minus_delta_ref, smem):
    wg = lax.axis_index("wg")
    # Without its own buffer, O comes through slots of K and V that are not in use yet.
    o = smem.o.at[wg] if has_o_buffer(s) else smem.kv.at[ahead(s) * (wg + 1)]
    w = DqWorker(s, inputs, dq_ref, (lse2_ref, minus_delta_ref), smem, wg, o)
    work_items(inputs.plan, lambda item: load_rows(w, item, 0), functools.partial(differentiate, w))
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def backward_dq(q, k, v, out, lse, dout, dlse, segments, *, call: Call, heads: Heads | None = None):
    """(dq like q, lse in base 2, -delta); with `heads` the others of dq are undefined.

    The last two are (B, H, stat_rows(T)) fp32.
    """
    packed = segments is not None
    tile = tiles(q.shape[-1], packed)
    s = schedule(q, k, tile, call, heads, packed=packed, sets=tile.wgs)
    segments = with_spans(s, segments)
    inputs = DqInputs(q, k, v, out, lse, dout, s.items.table, dlse, segments)
    stat = jax.ShapeDtypeStruct(lse.shape, jnp.float32)
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype), stat, stat]
    # Sums of rows need no scratch, and a head dimension of 256 leaves none.
    return launch(
        s, "attention_backward_dq", body, inputs, out_type, scratch(s, dlse is not None),
        reduction_scratch_bytes=0,
    )  # fmt: skip
