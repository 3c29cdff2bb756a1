"""Attention backward on Hopper: one kernel for dQ (and the row sums), one for dK and dV.

With P = exp(c S - lse) recomputed from the saved log-sum-exp,

    delta = rowsum(dO * O) - dlse        dP = dO V^T          dS = P * (dP - delta)
    dQ = c dS K                          dK = c dS^T Q        dV = P^T dO

The dQ kernel owns queries and streams keys, the dK/dV kernel owns keys and streams queries: seven
matmuls where one fused kernel would do five, but no sum crosses blocks, so the result is the same
bit for bit in every run.  The gradient of a kv head sums over its query heads inside the block.
Both work in warpgroups with 64 rows each, P and dS handed to the tensor core in registers.  Tiles
that no row of a block sees are never loaded (masks.py).  This file has the dQ kernel,
backward_dkv.py the other one.

The last warpgroup also issues the copies of K and V, for the steps to come.  Under a causal mask it
sees the most keys and so is the last to leave a step: it does not wait for the others.

Tried: one fused kernel with five matmuls, as in FlashAttention-3: dS through shared memory, dQ
added to fp32 in global memory by TMA.  At B1 T16384 16/16 D128 on an H100 it takes 4.7 ms where
blocks add in any order and 5.2 ms where semaphores order them, and 0.12 ms for delta before it and
the cast of dQ after it; these two kernels take 5.3 ms, and less than it at the shorter shapes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.backward_dkv import backward_dkv
from pallas_kernels.flash_attention.forward import (
    STATIC,
    heads_of,
    pad_segments,
    some_rows_see_nothing,
)
from pallas_kernels.flash_attention.masks import (
    Visits,
    logits,
    same_segment,
    segment_spans,
    take,
    visible,
)
from pallas_kernels.flash_attention.schedule import Tiles, share_out, work_items
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, WGMMA, along


def dq_tiles(head_dim: int) -> Tiles:
    # H100, B4 T4096 32/8: D64 0.73 ms, two warpgroups 0.76, not persistent 0.80.  D128, by section:
    # one head at a time 1.27 ms, 4 MiB 1.33, 32 MiB 1.42, all 1.49; persistent 1.43.
    # B8 T2048 16/16 D96: 0.268 ms, not persistent 0.301.
    if head_dim <= 64:
        return Tiles(3, 64, 4, True, 16)
    if head_dim <= 96:
        return Tiles(2, 64, 3, True, 16)
    # At 256 as much as shared memory and registers hold.
    return Tiles(2, 64, 3 if head_dim <= 128 else 2, False, 0)


def backward(
    q, k, v, out, lse, dout, dlse, segments=None, *, lengths, causal, scale, sms, window=None,
    softcap=None, heads=None,
):  # fmt: skip
    """(dq, dk, dv) in the dtypes of q, k, v.  lse, dlse (None: zero): (B, H, stat_rows(T)) fp32.

    lengths, segments: as in `forward`.  Rows of dout past T must be zero.
    heads: q, k and v are the same array; its gradient is one array too, the only result.
    """
    if segments is not None:
        segments = pad_segments(segments, lengths)
    if some_rows_see_nothing(window, segments is not None):
        # A row that sees no key: P = exp(-1e30) = 0, whatever cotangent came for its lse.
        blind = lse == -jnp.inf
        lse = jnp.where(blind, 1e30, lse)
        dlse = None if dlse is None else jnp.where(blind, 0, dlse)
    static = dict(
        lengths=lengths,
        causal=causal,
        scale=scale,
        sms=sms,
        window=window,
        softcap=softcap,
        heads=heads,
    )
    dq, delta = _backward_dq(q, k, v, out, lse, dout, dlse, segments, **static)
    if heads is None:
        return dq, *backward_dkv(q, k, v, lse, dout, delta, segments, **static)
    # No copy: the second kernel writes its own heads of dq.
    second = lambda joint, *arrays: backward_dkv(*arrays, joint, **static)
    return mosaic.in_place(second, dq, q, k, v, lse, dout, delta, segments)


@functools.partial(jax.jit, static_argnames=STATIC)
def _backward_dq(
    q, k, v, out, lse, dout, dlse, segments, *, lengths, causal, scale, sms, window=None,
    softcap=None, heads=None, tile=None,
):  # fmt: skip
    """(dq like q, delta (B, H, stat_rows(T)) fp32); with `heads` the others of dq are undefined."""
    b, _, _, d = q.shape
    h, kv_heads, k_first, v_first = heads_of(q, k, heads)
    t, s_len = lengths
    group, dtype = h // kv_heads, q.dtype
    tile = tile or dq_tiles(d)
    wgs, bkv, stages = tile[:3]
    ahead = stages - 1  # steps loaded ahead, and slots of V: K is read a step longer
    loader = wgs - 1  # the warpgroup that loads K and V
    # One step ahead K cannot wait until V's slot is free as well.
    split = ahead == 1
    apart = d <= 128  # O has a buffer of its own, and not slots that K and V fill later
    packed = segments is not None
    block = wgs * ROWS
    blocks = mosaic.cdiv(t, block)
    lead = (blocks * block - t) // ROWS * ROWS  # the block that is not full is the first one
    visits = Visits(lengths, causal, window, bkv)
    offset = visits.offset
    ragged, has_dlse = s_len % bkv != 0, dlse is not None

    first_row = lambda level: (blocks - 1 - level) * block - lead  # the longest causal blocks first
    pair_bytes = 4 * s_len * d // group  # a head's share of K and V
    items = share_out(
        visits, block, first_row, (b, h), tile, sms=sms, pair_bytes=pair_bytes, packed=packed
    )
    where, persistent = items.where, items.persistent
    sides = 2 if persistent else 1  # buffers of Q and dO: of this item and of the next one

    def attention_backward_dq(q_ref, k_ref, v_ref, o_ref, lse_ref, do_ref, *rest):
        (plan_ref,), rest = take(rest, 1, persistent)
        (dlse_ref,), rest = take(rest, 1, has_dlse)
        (q_ids_ref, k_ids_ref, spans_ref), rest = take(rest, 3, packed)
        (dq_ref, delta_ref, q_smem, do_smem, kv_smem, stats_smem,
         q_bars, k_full, v_full, free, *rest) = rest  # fmt: skip
        (ids_smem,), rest = take(rest, 1, packed)
        (k_free,), rest = take(rest, 1, split)
        (o_smem,), rest = take(rest, 1, apart)
        wg = lax.axis_index("wg")
        o_rows = o_smem.at[wg] if apart else kv_smem.at[ahead * (wg + 1)]
        # dQ leaves through the buffer of dO, unless the next item's is on its way into that.
        dq_smem = rest[0] if persistent else do_smem
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))
        v_slot_of = lambda n: lax.rem(n, jnp.int32(ahead))

        def load_rows(item, side):
            row, (batch, head) = where(item)
            rows = pl.ds(jnp.maximum(row + wg * ROWS, 0), ROWS)
            at, bar = side * wgs + wg, q_bars.at[wg]
            for ref, smem in (
                (q_ref, q_smem.at[at]), (do_ref, do_smem.at[at]), (o_ref, o_rows)
            ):  # fmt: skip
                plgpu.copy_gmem_to_smem(ref.at[batch, rows, head], smem, bar)
            for i, ref in enumerate((lse_ref, dlse_ref)[: 1 + has_dlse]):
                plgpu.copy_gmem_to_smem(ref.at[batch, head, rows], stats_smem.at[i, wg], bar)
            if packed:
                plgpu.copy_gmem_to_smem(q_ids_ref.at[batch, rows], ids_smem.at[stages + wg], bar)

        def tiles_of(item):  # (visited by the block, left to it by segments, of one segment)
            row, (batch, _) = where(item)
            mine = lax.div(row + lead, jnp.int32(block))
            limits, same = visits.limits((lambda i: spans_ref[batch, mine, i]) if packed else None)
            return visits.seen(row, row + block, *limits), limits, same

        def differentiate(item, following, side, n0):
            """One block of queries, from the diagonal downwards as in the forward kernel."""
            at = side * wgs + wg  # this item's Q and dO
            row, (batch, head) = where(item)
            q0 = row + wg * ROWS
            rows = pl.ds(q0, ROWS)
            (low, high), limits, same = tiles_of(item)
            own = visits.seen(q0, q0 + ROWS, *limits)
            whole = visits.whole(q0, q0 + ROWS, *same)
            top, end = n0 + high, n0 + high - low  # step n takes the tile top - 1 - n
            # This warpgroup's steps, and those without a mask inside them.
            first, last = top - own[1], top - own[0]
            unmasked = jnp.clip(top - whole[1], first + 1, last)
            edge = last
            if window is not None or packed:
                edge = jnp.clip(top - whole[0], unmasked, last)

            def load(n, of_k=True, of_v=True):
                """K and V of step n, if there is one: from `end` on of the following item."""

                def copy(its_top, batch, head):
                    keys, kv_head = pl.ds((its_top - 1 - n) * bkv, bkv), head // group
                    if of_k:
                        slot, k = slot_of(n), k_ref.at[batch, keys, k_first + kv_head]
                        plgpu.copy_gmem_to_smem(k, kv_smem.at[slot], k_full.at[slot])
                        if packed:
                            ids = k_ids_ref.at[batch, keys]
                            plgpu.copy_gmem_to_smem(ids, ids_smem.at[slot], k_full.at[slot])
                    if of_v:
                        slot, v = v_slot_of(n), v_ref.at[batch, keys, v_first + kv_head]
                        plgpu.copy_gmem_to_smem(v, kv_smem.at[stages + slot], v_full.at[slot])

                def of_following():
                    (low, high), *_ = tiles_of(following)
                    its_top, place = end + high, where(following)[1]
                    pl.when(n < its_top - low)(lambda: copy(its_top, *place))

                pl.when(n < end)(lambda: copy(top, batch, head))
                if persistent:
                    pl.when((n >= end) & (following >= 0))(of_following)

            def refill(n, bar, **what):  # the slots that all warpgroups have left at step n
                def by_warp(warp):  # only these two wait until all have left
                    for its, of in (("of_k", "of_v"), ("of_v", "of_k")):
                        if what.get(its, True):

                            @pl.when(warp == (its == "of_v"))
                            def _(of=of):
                                plgpu.barrier_wait(bar.at[slot_of(n)])
                                load(n + ahead, **what | {of: False})

                pl.when((wg == loader) & (n >= 0))(lambda: plgpu.warp_map(by_warp))

            def leave_k(n):  # of the step before: dQ += dS K is done
                if split:
                    plgpu.barrier_arrive(k_free.at[slot_of(n)])
                    refill(n, k_free, of_v=False)

            def pass_by(lo, hi):  # steps in which the block's other warpgroups work
                @pl.loop(lo, hi)
                def _(n):
                    plgpu.barrier_wait(k_full.at[slot_of(n)])
                    plgpu.barrier_wait(v_full.at[v_slot_of(n)])
                    leave_k(n)
                    plgpu.barrier_arrive(free.at[slot_of(n)])
                    refill(n, free, of_k=not split)

            def step(dq_acc, lse2, delta, q_ids, n, masked):
                slot, v_slot = slot_of(n), v_slot_of(n)

                def p_of(s):  # -> P, d logits / d (scale S)
                    x, slope = logits(s, scale, softcap)
                    if masked and packed:
                        k_ids = plgpu.load(ids_smem.at[slot], layout=COL, optimized=False)
                        x = same_segment(x, q_ids, k_ids)
                    if masked:
                        k0 = (top - 1 - n) * bkv
                        keys = s_len if ragged else None
                        x = visible(x, q0 + offset, k0, causal=causal, window=window, keys=keys)
                    return jnp.exp2(x - along(lse2, s.shape, 0)), slope

                def add_dq(s_acc, dp_acc):
                    # These minima change nothing.  But where the compiler sees that an operand
                    # stays in place, it holds the descriptors of all its slices in registers, up
                    # to 64 of them.
                    here = jnp.minimum(at, n + sides * wgs)
                    v = kv_smem.at[stages + jnp.minimum(v_slot, n)]
                    across = lambda acc, x, y: plgpu.wgmma(acc, x, y.transpose((1, 0)))
                    plgpu.barrier_wait(k_full.at[slot])
                    across(s_acc, q_smem.at[here], kv_smem.at[slot])
                    plgpu.barrier_wait(v_full.at[v_slot])
                    across(dp_acc, do_smem.at[here], v)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    leave_k(n)
                    p, slope = p_of(s)
                    dp = dp_acc[...]
                    if masked and packed:
                        plgpu.commit_smem()  # the ids were read with plain loads
                    plgpu.barrier_arrive(free.at[slot])
                    ds = p * (dp - along(delta, p.shape, 0))
                    ds = (ds if slope is None else ds * slope).astype(dtype)
                    plgpu.wgmma(dq_acc, ds, kv_smem.at[slot])  # runs on under the next step
                    refill(n, free, of_k=not split)

                acc = plgpu.ACC((ROWS, bkv), jnp.float32)
                pl.run_scoped(add_dq, acc, acc)

            def all_steps(dq_acc, *of_rows):
                do_step = functools.partial(step, dq_acc, *of_rows)
                go = lambda lo, hi, masked: pl.loop(lo, hi)(lambda n: do_step(n, masked))
                do_step(first, causal or ragged or packed)
                start = first + 1
                # The diagonal may cross two tiles, and segments may begin and end anywhere.
                if packed or (causal and (offset % ROWS or bkv % ROWS)):
                    go(start, unmasked, True)
                    start = unmasked
                go(start, edge, False)
                if window is not None or packed:
                    go(edge, last, True)
                dq = dq_acc[...]
                plgpu.wait_smem_to_gmem(0)  # the block before has left dq_smem
                dq_smem[wg] = (dq * scale).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq_ref.at[batch, rows, head])

            def all_rows():
                stat = lambda ref: plgpu.load(ref, layout=ROW, optimized=False)
                tile_of = lambda ref: plgpu.load(ref, layout=WGMMA)
                # Behind a barrier, or the product would be rounded with the logits, not before.
                lse2 = lax.optimization_barrier(stat(stats_smem.at[0, wg]) * LOG2E)
                q_ids = stat(ids_smem.at[stages + wg]) if packed else None
                do, out = (tile_of(x).astype(jnp.float32) for x in (do_smem.at[at], o_rows))
                delta = jnp.sum(do * out, axis=1)
                if has_dlse:
                    delta = delta - stat(stats_smem.at[1, wg])
                mosaic.store(delta_ref.at[batch, head, rows], delta)
                plgpu.commit_smem()  # O and the statistics were read with plain loads
                load_following()
                pass_by(n0, first)
                acc = plgpu.ACC((ROWS, d), jnp.float32)
                pl.run_scoped(lambda dq: all_steps(dq, lse2, delta, q_ids), acc)
                if window is not None:
                    pass_by(last, end)

            def load_following():  # where O and the statistics were
                if not apart:
                    pl.when(wg == loader)(lambda: load(n0 + ahead - 1, of_k=False))
                if persistent:
                    pl.when(following >= 0)(lambda: load_rows(following, 1 - side))

            @pl.when(wg == loader)
            def _():
                # What the item before has not loaded: it had less steps than `ahead`, or is none.
                @pl.loop(jnp.where(n0 == 0, 0, end - n0) if persistent else 0, ahead)
                def _(i):
                    load(n0 + i, of_v=apart)
                    if not apart:
                        pl.when(i < ahead - 1)(lambda: load(n0 + i, of_k=False))

            plgpu.barrier_wait(q_bars.at[wg])
            pl.when(q0 >= 0)(all_rows)
            if lead:

                @pl.when(q0 < 0)  # nothing but padding
                def _():
                    load_following()
                    pass_by(n0, end)

            return end

        work_items(plan_ref, lambda item: load_rows(item, 0), differentiate)
        plgpu.wait_smem_to_gmem(0)

    args = [items.table] if persistent else []
    args += [dlse] if has_dlse else []
    if packed:
        q_ids, k_ids = segments
        args += [q_ids, k_ids, segment_spans(q_ids, k_ids, visits, block, lead)]
    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    return mosaic.kernel(
        attention_backward_dq,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        ),
        scratch_types=[
            *[smem(sides * wgs, ROWS)] * 2,
            smem(stages + ahead, bkv),
            plgpu.SMEM((1 + has_dlse, wgs, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=4 + has_dlse + packed, num_barriers=wgs),
            ring(num_arrivals=1 + packed),
            plgpu.Barrier(num_barriers=ahead),
            ring(num_arrivals=wgs),
            *[plgpu.SMEM((stages + wgs, ROWS), jnp.int32)] * packed,
            *[ring(num_arrivals=wgs)] * split,
            *[smem(wgs, ROWS)] * (apart + persistent),
        ],
        grid=(items.grid,),
        grid_names=("block",),
        num_threads=wgs,
        thread_name="wg",
        # Sums of rows need no scratch, and a head dimension of 256 leaves none.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
    )(q, k, v, out, lse, dout, *args)
