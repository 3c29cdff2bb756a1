"""Attention backward on Hopper, first kernel: dQ and delta (the formulas are in op.py).

A block owns queries and streams the keys that they see, from the diagonal downwards.

    Q, dO, O, lse, dlse, 64 rows a warpgroup  -- q_bars -->  warpgroup 0:  S = Q K^T, dP = dO V^T
                                                                           P, dS, dQ += dS K
    K ring  [n-1] [n] [n+1] [n+2]  -- k_full -->             warpgroup 1:  the same
    V ring        [n] [n+1] [n+2]  -- v_full -->                 ...
             <---------------------- free --   all warpgroups have left V of step n, and K of n - 1

A step's dQ += dS K still runs when the next step starts, so K has one more slot than V.  The last
warpgroup also loads the tiles of K and V.  Under a causal mask it sees the most keys and so is the
last to leave a step: it does not wait for the others.

K and V share `free`, but their rings differ in length, so each pipeline.Ring has only a `full`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import masks, schedule, steps
from pallas_kernels.flash_attention.schedule import Call, Schedule, Tiles, Worker, tiles_at
from pallas_kernels.flash_attention.steps import Item, Operand
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, WGMMA, along
from pallas_kernels.pipeline import Ring


def tiles(head_dim: int, segmented: bool) -> Tiles:
    """The fastest on an H100; docs/attention-tiles.md has the others."""
    if head_dim <= 80 and not segmented:
        return Tiles(2, 128, 3, True, 16)
    if head_dim <= 64:  # the ids of queries and keys share one array, so both have 64
        return Tiles(3, 64, 4, True, 16)
    if head_dim <= 96:
        return Tiles(2, 64, 3, not segmented, 16)
    # From 224 on as much as shared memory and registers hold.
    return Tiles(2, 64, 3, False, 8) if head_dim <= 192 else Tiles(2, 64, 2, False, 16)


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded, and how many slots V has: a step reads K longer."""
    return s.stages - 1


def frees_k_apart(s: Schedule) -> bool:
    """Whether K has separate barriers: loaded only one step early, it cannot wait for V's slot."""
    return ahead(s) == 1


def has_o_buffer(s: Schedule) -> bool:
    """Whether O has a buffer; otherwise it arrives in slots that K and V fill later."""
    return s.width <= 128


def multiplies_delta(s: Schedule) -> bool:
    """Whether a wgmma adds -delta to dP: where shared memory has room for its operands.

    Starting dP at -delta would take an instruction per element; starting it at 0 takes none.
    """
    return s.width * s.columns <= 2**13


def scratch(s: Schedule, has_dlse: bool) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    stats, operand = 1 + has_dlse, lambda n: mosaic.tiled(s.wgs, 1, n, 16, dtype=jnp.bfloat16)
    return dict(
        q=s.buffer(s.sides * s.wgs, ROWS),  # one per warpgroup, like do, stats, q_bars, o and dq
        do=s.buffer(s.sides * s.wgs, ROWS),
        kv=s.buffer(s.stages + ahead(s), s.columns),  # the ring of K, and then the ring of V
        delta=operand(ROWS) if multiplies_delta(s) else None,  # -delta in parts
        ones=operand(s.columns) if multiplies_delta(s) else None,
        stats=plgpu.SMEM((stats, s.wgs, ROWS), jnp.float32),  # lse, dlse
        q_bars=plgpu.Barrier(num_arrivals=3 * s.parts + stats + s.segmented, num_barriers=s.wgs),
        k_full=ring(num_arrivals=s.parts + s.segmented),
        v_full=plgpu.Barrier(num_arrivals=s.parts, num_barriers=ahead(s)),
        free=ring(num_arrivals=s.wgs),
        ids=s.ids(s.stages + s.wgs, ROWS),  # for each slot of K, and for each warpgroup's queries
        # With a `k_free`, `free` guards V alone; without a `dq` dQ leaves through the buffer of dO.
        k_free=ring(num_arrivals=s.wgs) if frees_k_apart(s) else None,
        o=s.buffer(s.wgs, ROWS) if has_o_buffer(s) else None,
        dq=s.buffer(s.wgs, ROWS) if s.persistent else None,
    )


def keys_of(w: Worker) -> Operand:
    s, smem = w.schedule, w.smem
    ids = w.inputs.k_ids, smem.ids
    return Operand(Ring(s.stages, smem.k_full), w.inputs.k, s.k_first, w.tma.kv, 0, ahead(s), ids)


def values_of(w: Worker) -> Operand:
    s, smem = w.schedule, w.smem
    buffers = tiles_at(w.tma.kv, pl.ds(s.stages, ahead(s)))
    return Operand(Ring(ahead(s), smem.v_full), w.inputs.v, s.v_first, buffers, 1, ahead(s))


def buffer_of_o(w: Worker, smem):
    """Without its own buffer, O comes through slots of K and V that are not in use yet."""
    s = w.schedule
    return (smem.o, w.wg) if has_o_buffer(s) else (smem.kv, ahead(s) * (w.wg + 1))


class Rows(NamedTuple):
    """What a warpgroup keeps of its rows in registers."""

    lse2: Any  # log-sum-exp in base 2
    minus_delta: Any  # the initial value of dP, or added to dP by a wgmma
    q_ids: Any  # None without segments


# Load: a warpgroup's rows, and the tiles of K and V.


def load_rows(w: Worker, item, side=0):
    s, inputs, smem, tma = w.schedule, w.inputs, w.smem, w.tma
    row, (batch, head) = s.where(item)
    rows = pl.ds(jnp.maximum(row + w.wg * ROWS, 0), ROWS)
    at, bar = side * s.wgs + w.wg, smem.q_bars.at[w.wg]
    places = (inputs.q, tma.q, at), (inputs.do, tma.do, at), (inputs.o, *buffer_of_o(w, tma))
    for ref, buffers, slot in places:
        schedule.copy_rows(w, ref, batch, rows, head, buffers, slot, bar)
    stats = (inputs.lse,) if inputs.dlse is None else (inputs.lse, inputs.dlse)
    for n, ref in enumerate(stats):
        plgpu.copy_gmem_to_smem(ref.at[batch, head, rows], smem.stats.at[n, w.wg], bar)
    if s.segmented:
        plgpu.copy_gmem_to_smem(inputs.q_ids.at[batch, rows], smem.ids.at[s.stages + w.wg], bar)


def load(w: Worker, i: Item, n, *tiles: Operand):
    """Loads the tiles of step n, if there is one; from the stream's end on, the next item's."""
    steps.send_any(w, n, i.stream, lambda stream: steps.send_keys(w, n, stream, *tiles))


def refill(w: Worker, i: Item, n, free, *tiles: Operand):
    """Loads tiles into the slots that all warpgroups leave at step n."""
    s = w.schedule

    def one(x):
        plgpu.barrier_wait(free.at[keys_of(w).ring.slot(n)])
        load(w, i, n + ahead(s), x)

    def by_warp(warp):  # only the warps that load wait until all warpgroups have left
        for x in tiles:
            pl.when(warp == x.warp)(lambda x=x: one(x))

    pl.when((w.wg == s.wgs - 1) & (n >= 0))(lambda: plgpu.warp_map(by_warp))


def load_first(w: Worker, i: Item):
    """Loads what no item before has loaded: it had fewer steps than `ahead`, or there is none."""
    s, k, v = w.schedule, keys_of(w), values_of(w)
    begin = jnp.where(i.n0 == 0, 0, i.end - i.n0) if s.persistent else 0

    @pl.loop(begin, ahead(s))
    def _(step):
        if has_o_buffer(s):
            load(w, i, i.n0 + step, k, v)
        else:  # O is in the last slot of V
            load(w, i, i.n0 + step, k)
            pl.when(step < ahead(s) - 1)(lambda: load(w, i, i.n0 + step, v))


def load_following(w: Worker, i: Item):
    """Loads the next item's rows, and the tile where O was: O and the statistics have been read."""
    s = w.schedule
    if not has_o_buffer(s):
        pl.when(w.wg == s.wgs - 1)(lambda: load(w, i, i.n0 + ahead(s) - 1, values_of(w)))
    if s.persistent:
        following = i.stream.following
        pl.when(following >= 0)(lambda: load_rows(w, following, 1 - i.side))


# Hand buffers back.


def release_k(w: Worker, i: Item, n):
    """Releases K of step n - 1, whose dQ += dS K is done."""
    if frees_k_apart(w.schedule):
        plgpu.barrier_arrive(w.smem.k_free.at[keys_of(w).ring.slot(n)])
        refill(w, i, n, w.smem.k_free, keys_of(w))


def refill_free(w: Worker, i: Item, n):
    """Loads into the slots that `free` guards."""
    tiles = (values_of(w),) if frees_k_apart(w.schedule) else (keys_of(w), values_of(w))
    refill(w, i, n, w.smem.free, *tiles)


def pass_by(w: Worker, i: Item, low, high):
    """Passes over steps in which only other warpgroups of the block see something."""

    @pl.loop(low, high)
    def _(n):
        slot = keys_of(w).ring.wait(n)
        values_of(w).ring.wait(n)
        release_k(w, i, n)
        plgpu.barrier_arrive(w.smem.free.at[slot])
        refill_free(w, i, n)


# Compute P, dS and dQ.


def in_parts(x):
    """Splits each row's float32 into (rows, 16) bfloat16 that sum to it: 3 x 8 bits hold its 24."""
    shape = *x.shape, 16
    column = along(plgpu.broadcasted_iota(jnp.int32, (16,), 0, layout=COL), shape, 1)
    y = mosaic.zeros(shape, WGMMA)
    for n in range(3):
        part = x.astype(jnp.bfloat16).astype(jnp.float32)
        y, x = jnp.where(column == n, along(part, shape, 0), y), x - part
    return y.astype(jnp.bfloat16)


def rows_of(w: Worker, i: Item) -> Rows:
    """Computes delta = rowsum(dO * O) - dlse; stores what the dK/dV kernel reads of the rows."""
    s, smem = w.schedule, w.smem
    stat = lambda ref: mosaic.read(ref, ROW)
    # Without the barrier the compiler would round the product with the logits, not before.
    lse = stat(smem.stats.at[0, w.wg])
    lse2 = lax.optimization_barrier(lse * LOG2E)
    minus_lse = lse * (-1 / s.scale) if s.begins_with_lse else -lse2
    q_ids = stat(smem.ids.at[s.stages + w.wg]) if s.segmented else None
    wide = lambda ref: plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
    do, o = (schedule.blocks(tiles_at(*x)) for x in ((smem.do, i.at), buffer_of_o(w, smem)))
    pairs = zip(do, o, strict=True)
    minus_delta = -mosaic.folded(jnp.add, [jnp.sum(wide(x) * wide(y), axis=1) for x, y in pairs])
    if w.inputs.dlse is not None:
        minus_delta = minus_delta + stat(smem.stats.at[1, w.wg])
    for ref, value in zip(w.results[1:], (minus_lse, minus_delta), strict=True):
        mosaic.store(ref.at[i.batch, i.head, pl.ds(i.row, ROWS)], value)
    if multiplies_delta(s):
        smem.delta[w.wg, 0] = in_parts(minus_delta)
    plgpu.commit_smem()  # plain loads have read O and the statistics
    return Rows(lse2, minus_delta, q_ids)


def probabilities(w: Worker, i: Item, rows: Rows, scores, n, masked, first):
    """P and d logits / d (scale S), None for 1, from Q K^T of step n."""
    s, slot = w.schedule, keys_of(w).ring.slot(n)
    x, slope = masks.logits(scores, s.scale, s.softcap)
    if masked:
        ids = (rows.q_ids, mosaic.read(w.smem.ids.at[slot], COL)) if s.segmented else None
        x = masks.visible(x, s.visits, i.row, (i.stream.base - 1 - n) * s.columns, ids, first)
    return jnp.exp2(x - along(rows.lse2, x.shape, 0)), slope


def waits_after_p(s: Schedule) -> bool:
    """Whether a step waits for the next one's keys between P and dP.

    The loop of that wait keeps ptxas from moving the wait for dP up into the computation of P.  On
    an H200 dQ takes 2.03 instead of 2.09 ms at T = 16384 and D = 128, but 0.173 instead of 0.168
    at T = 1024 and D = 64, where P takes as long as the matmuls and is better begun late.
    """
    return s.width > 96


def wait_for_keys(w: Worker, i: Item, n):
    """Waits for the keys of step n, if it is one of this item."""
    bar = w.smem.k_full.at[keys_of(w).ring.slot(n)]
    pl.when(n < i.last)(lambda: plgpu.barrier_wait(bar))


def step(w: Worker, i: Item, rows: Rows, dq_acc, n, masked, first=False):
    """Adds dS K of step n to dQ."""
    s, smem, values = w.schedule, w.smem, values_of(w)
    slot, slot_of_v, joint = keys_of(w).ring.slot(n), values.ring.slot(n), multiplies_delta(s)

    def add_dq(acc, dp_acc: Any = None):
        # Issue S = Q K^T and dP = dO V^T - delta.
        s_acc = acc
        if joint:  # one accumulator for both: of two, ptxas would store the zeros of one
            s_acc, dp_acc = (acc.at[:, pl.ds(at, s.columns)] for at in (0, s.columns))
        here = steps.unsettled(i, s, n)
        # The minimum changes nothing, for the same reason.
        v = tiles_at(smem.kv, s.stages + jnp.minimum(slot_of_v, n))
        schedule.over_columns(s_acc, tiles_at(smem.q, here), tiles_at(smem.kv, slot))
        if not joint:
            values.ring.wait(n)
            dp_acc[...] = along(rows.minus_delta, (ROWS, s.columns), 0)
        schedule.over_columns(dp_acc, tiles_at(smem.do, here), v)
        if joint:
            schedule.over_columns(dp_acc, [smem.delta.at[w.wg]], [smem.ones.at[w.wg]])
        # Compute P while dP runs.
        scores = plgpu.wgmma_accumulator_load(acc, wait_n=s.parts + joint)[:, : s.columns]
        release_k(w, i, n)
        p, slope = probabilities(w, i, rows, scores, n, masked, first)
        if waits_after_p(s):
            wait_for_keys(w, i, n + 1)
        # Compute dS.
        dp = acc[...][:, s.columns :] if joint else dp_acc[...]  # dP - delta
        if masked and s.segmented:
            plgpu.commit_smem()  # plain loads have read the ids
        plgpu.barrier_arrive(smem.free.at[slot])
        ds = masks.d_scores(p, dp, slope).astype(s.dtype)
        # Accumulate dQ; the matmul runs on during the next step.
        mosaic.multiply(dq_acc, ds, tiles_at(smem.kv, slot))
        refill_free(w, i, n)

    if not waits_after_p(s):  # outside: with a wait before the wgmma ptxas would store its zeros
        plgpu.barrier_wait(smem.k_full.at[slot])
    if joint:
        values.ring.wait(n)
    widths = [2 * s.columns] if joint else [s.columns] * 2
    pl.run_scoped(add_dq, *[plgpu.ACC((ROWS, width), jnp.float32) for width in widths])


def accumulate(w: Worker, i: Item, rows: Rows, dq_acc):
    """Walks over the steps that the warpgroup sees, and stores dQ."""
    s = w.schedule
    one = functools.partial(step, w, i, rows, dq_acc)
    if waits_after_p(s):
        wait_for_keys(w, i, i.first)
    one(i.first, s.masks_first, first=True)
    steps.walk(s, i, i.first + 1, one, crosses=s.visits.diagonal_crosses_tiles)
    steps.finish(w, i, lambda: store(w, i, dq_acc[...]))


def store(w: Worker, i: Item, dq):
    # The next item's dO may be on its way into the buffer of dO.
    name, dq = "dq" if w.schedule.persistent else "do", dq * w.schedule.scale
    plgpu.wait_smem_to_gmem(0)  # the previous item's dQ has left it
    schedule.store_rows(w, name, w.wg, dq, w.results[0], i.batch, i.row, i.head)


def differentiate(w: Worker, i: Item):
    """One block of queries, from the diagonal downwards; returns the step after its last."""
    s = w.schedule
    # Load.
    pl.when(w.wg == s.wgs - 1)(lambda: load_first(w, i))
    plgpu.barrier_wait(w.smem.q_bars.at[w.wg])

    @pl.when(i.row >= 0)
    def _():
        rows = rows_of(w, i)
        load_following(w, i)
        # Compute, while others may see tiles before these and after them.
        pass_by(w, i, i.n0, i.first)
        acc = plgpu.ACC((ROWS, s.width), jnp.float32)
        pl.run_scoped(functools.partial(accumulate, w, i, rows), acc)
        if s.masks_last:
            pass_by(w, i, i.last, i.end)

    if s.lead:

        @pl.when(i.row < 0)  # nothing but padding
        def _():
            load_following(w, i)
            pass_by(w, i, i.n0, i.end)
            steps.finish(w, i, lambda: None)

    return i.end


def body(w: Worker):
    if multiplies_delta(w.schedule):
        ones = jnp.ones(w.smem.ones.shape[1:], jnp.bfloat16)
        w.smem.ones[w.wg] = plgpu.layout_cast(ones, WGMMA)
        plgpu.commit_smem()
    steps.work_items(w, load_rows, differentiate)


@functools.partial(jax.jit, static_argnames="call")
def backward_dq(q, k, v, out, lse, dout, dlse, segments, *, call: Call):
    """(dq like q, -lse, -delta); if q, k and v are one array, dq's other heads are undefined.

    -lse is divided by scale, which makes it a score, if `Schedule.begins_with_lse`; otherwise it is
    in base 2.  The last two are (B, H, schedule.stat_rows(T)) fp32.
    """
    tile = tiles(sum(schedule.blocks_of(q, k)), call.segmented)
    inputs = dict(q=q, k=k, v=v, o=out, lse=lse, do=dout, dlse=dlse)
    stat = jax.ShapeDtypeStruct(lse.shape, jnp.float32)
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype), stat, stat]
    memory = functools.partial(scratch, has_dlse=dlse is not None)
    return schedule.launch(
        "attention_backward_dq", body, tile, call, inputs, segments, out_type, memory
    )
