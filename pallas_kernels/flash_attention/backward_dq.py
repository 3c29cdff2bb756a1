"""Attention backward on Hopper: one kernel for dQ (and the row sums), one for dK and dV.

With P = exp(c S - lse) recomputed from the saved log-sum-exp,

    delta = rowsum(dO * O) - dlse        dP = dO V^T          dS = P * (dP - delta)
    dQ = c dS K                          dK = c dS^T Q        dV = P^T dO

The dQ kernel owns queries and streams keys, the dK/dV kernel owns keys and streams queries: seven
matmuls where one fused kernel would do five, but no sum crosses blocks, so the result is the same
bit for bit in every run.  The gradient of a kv head sums over its query heads inside the block.
Both work in the arrangement of the forward kernel: computing warpgroups with 64 rows each, one
warpgroup that only loads, P and dS handed to the tensor core in registers.  This file has the dQ
kernel, backward_dkv.py the other one.

At a head dimension of 256 dQ alone fills a warpgroup's registers.  There two of them share the
rows of a block: one computes S and P, the other dP, dS and dQ, with P (fp32) handed over through
shared memory.  Tiles that no row of a block sees are never loaded (masks.py).

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
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, WGMMA, along, registers


def dq_tiles(head_dim: int) -> Tiles:
    # H100, B4 T4096 32/8: D64 0.73 ms, two warpgroups 0.76, not persistent 0.80.  D128, by section:
    # one head at a time 1.27 ms, 4 MiB 1.33, 32 MiB 1.42, all 1.49; persistent 1.43.
    # B8 T2048 16/16 D96: 0.268 ms, not persistent 0.301.
    if head_dim <= 96:
        return Tiles(3 if head_dim <= 64 else 2, 64, 3, True, 16)
    return Tiles(2, 64, 2, False, 0)  # at 256 as much as shared memory and registers hold


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
    shared = d > 128  # two warpgroups share the rows
    v_stages = 1 if shared else stages  # as many as shared memory holds
    sets = 1 if shared else wgs  # of 64 rows
    packed = segments is not None
    block = sets * ROWS
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

    def limits_of(row, batch, spans_ref):  # the tiles that segments leave to a block
        mine = lax.div(row + lead, jnp.int32(block))
        return visits.limits((lambda i: spans_ref[batch, mine, i]) if packed else None)

    def attention_backward_dq(q_ref, k_ref, v_ref, o_ref, lse_ref, do_ref, *rest):
        (plan_ref,), rest = take(rest, 1, persistent)
        (dlse_ref,), rest = take(rest, 1, has_dlse)
        (q_ids_ref, k_ids_ref, spans_ref), rest = take(rest, 3, packed)
        dq_ref, delta_ref, *rest = rest
        # dQ leaves through the buffer of O, unless the next item's O is on its way into that.
        q_smem, do_smem, o_smem, dq_smem, *rest = rest if persistent else (*rest[:3], *rest[2:])
        (k_smem, v_smem, lse_smem, dlse_smem, delta_smem,
         q_bars, k_full, v_full, k_free, v_free, *rest) = rest  # fmt: skip
        (q_ids_smem, k_ids_smem), rest = take(rest, 2, packed)
        (p_smem, p_full, p_free), _ = take(rest, 3, shared)
        wg = lax.axis_index("wg")
        mine = 0 if shared else wg
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))
        v_slot_of = lambda n: lax.rem(n, jnp.int32(v_stages))

        @pl.when(wg < wgs)
        def _compute():
            plgpu.set_max_registers(registers(wgs)[0], action="increase")

            def load_rows(item, side):
                row, (batch, head) = where(item)
                rows = pl.ds(jnp.maximum(row + mine * ROWS, 0), ROWS)
                at = side * sets + mine
                loads = [(q_ref, q_smem.at[at]), (do_ref, do_smem.at[at])]
                loads += [(o_ref, o_smem.at[mine])]
                stats = [(lse_ref, lse_smem)] + [(dlse_ref, dlse_smem)] * has_dlse
                bar = q_bars.at[mine]
                for ref, smem in loads:
                    plgpu.copy_gmem_to_smem(ref.at[batch, rows, head], smem, bar)
                for ref, smem in stats:
                    plgpu.copy_gmem_to_smem(ref.at[batch, head, rows], smem.at[mine], bar)
                if packed:
                    plgpu.copy_gmem_to_smem(q_ids_ref.at[batch, rows], q_ids_smem.at[mine], bar)

            def differentiate(item, following, side, n0):
                """One block of queries, from the diagonal downwards as in the forward kernel."""
                at = side * sets + mine  # this item's Q and dO
                row, (batch, head) = where(item)
                q0 = row + mine * ROWS
                rows = pl.ds(q0, ROWS)
                limits, same = limits_of(row, batch, spans_ref)
                low, high = visits.seen(row, row + block, *limits)
                own = visits.seen(q0, q0 + ROWS, *limits)
                whole = visits.whole(q0, q0 + ROWS, *same)
                top, end = n0 + high, n0 + high - low  # step n takes the tile top - 1 - n
                # This warpgroup's steps, and those without a mask inside them.
                first, last = top - own[1], top - own[0]
                unmasked = jnp.clip(top - whole[1], first + 1, last)
                edge = last
                if window is not None or packed:
                    edge = jnp.clip(top - whole[0], unmasked, last)

                def pass_by(lo, hi):  # steps in which the block's other warpgroups work
                    @pl.loop(lo, hi)
                    def _(n):
                        for full, free, slot in (
                            (k_full, k_free, slot_of(n)),
                            (v_full, v_free, v_slot_of(n)),
                        ):
                            plgpu.barrier_wait(full.at[slot])
                            plgpu.barrier_arrive(free.at[slot])

                def free_keys(n):
                    if packed:
                        plgpu.commit_smem()  # the ids were read with plain loads
                    plgpu.barrier_arrive(k_free.at[slot_of(n)])

                def step(dq_acc, lse2, delta, q_ids, n, masked, begins):
                    slot, v_slot = slot_of(n), v_slot_of(n)
                    plgpu.barrier_wait(k_full.at[slot])
                    scores = lambda acc: plgpu.wgmma(
                        acc, q_smem.at[at], k_smem.at[slot].transpose((1, 0))
                    )

                    def p_of(s):  # -> P, d logits / d (scale S)
                        x, slope = logits(s, scale, softcap)
                        if masked and packed:
                            k_ids = plgpu.load(k_ids_smem.at[slot], layout=COL, optimized=False)
                            x = same_segment(x, q_ids, k_ids)
                        if masked:
                            k0 = (top - 1 - n) * bkv
                            keys = s_len if ragged else None
                            x = visible(x, q0 + offset, k0, causal=causal, window=window, keys=keys)
                        return jnp.exp2(x - along(lse2, s.shape, 0)), slope

                    def start_dp(acc):
                        plgpu.barrier_wait(v_full.at[v_slot])
                        plgpu.wgmma(acc, do_smem.at[at], v_smem.at[v_slot].transpose((1, 0)))

                    def free_before():  # dQ += dS K of the step before is done
                        if not begins:
                            free_keys(n - 1)

                    def add_dq(p, slope, dp):
                        plgpu.barrier_arrive(v_free.at[v_slot])
                        ds = p * (dp - along(delta, p.shape, 0))
                        ds = (ds if slope is None else ds * slope).astype(dtype)
                        plgpu.wgmma(dq_acc, ds, k_smem.at[slot])  # runs on under the next step

                    def all_of_it(s_acc, dp_acc):
                        scores(s_acc)
                        start_dp(dp_acc)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        free_before()
                        p, slope = p_of(s)
                        add_dq(p, slope, dp_acc[...])

                    def only_p(s_acc):
                        scores(s_acc)
                        p, slope = p_of(s_acc[...])
                        free_keys(n)
                        plgpu.barrier_wait(p_free)
                        p_smem[...] = p if slope is None else p * slope
                        plgpu.barrier_arrive(p_full)

                    def only_dq(dp_acc):
                        start_dp(dp_acc)
                        dp = dp_acc[...]
                        free_before()
                        plgpu.barrier_wait(p_full)
                        p = plgpu.load(p_smem, layout=WGMMA)
                        plgpu.barrier_arrive(p_free)
                        add_dq(p, None, dp)

                    acc = plgpu.ACC((ROWS, bkv), jnp.float32)
                    if not shared:
                        pl.run_scoped(all_of_it, acc, acc)
                    else:
                        pl.run_scoped(only_p if dq_acc is None else only_dq, acc)

                def load_following():  # O and the statistics of this item were read
                    if following is not None:
                        pl.when(following >= 0)(lambda: load_rows(following, 1 - side))

                def all_steps_of(dq_acc):
                    plgpu.barrier_wait(q_bars.at[mine])
                    stat = lambda ref: plgpu.load(ref.at[mine], layout=ROW, optimized=False)
                    tile_of = lambda ref: plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
                    lse2 = stat(lse_smem) * LOG2E
                    q_ids = stat(q_ids_smem) if packed else None
                    delta = None
                    if dq_acc is not None:
                        delta = jnp.sum(tile_of(do_smem.at[at]) * tile_of(o_smem.at[mine]), axis=1)
                        if has_dlse:
                            delta = delta - stat(dlse_smem)
                        plgpu.wait_smem_to_gmem(1)  # the block before has left delta_smem
                        delta_smem[mine] = delta
                        plgpu.commit_smem()
                        here = delta_ref.at[batch, head, rows]
                        plgpu.copy_smem_to_gmem(delta_smem.at[mine], here)
                        load_following()

                    do_step = functools.partial(step, dq_acc, lse2, delta, q_ids)
                    go = lambda lo, hi, masked: pl.loop(lo, hi)(
                        lambda n: do_step(n, masked, begins=False)
                    )
                    do_step(first, causal or ragged or packed, begins=True)
                    start = first + 1
                    # The diagonal may cross two tiles, and segments may begin and end anywhere.
                    if packed or (causal and (offset % ROWS or bkv % ROWS)):
                        go(start, unmasked, True)
                        start = unmasked
                    go(start, edge, False)
                    if window is not None or packed:
                        go(edge, last, True)

                def all_rows(dq_acc):
                    pass_by(n0, first)
                    all_steps_of(dq_acc)
                    dq = dq_acc[...]
                    free_keys(last - 1)
                    plgpu.wait_smem_to_gmem(1)  # the block before has left dq_smem
                    dq_smem[mine] = (dq * scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(dq_smem.at[mine], dq_ref.at[batch, rows, head])
                    if window is not None:
                        pass_by(last, end)

                @pl.when(q0 >= 0)
                def _():
                    with_dq = lambda: pl.run_scoped(all_rows, plgpu.ACC((ROWS, d), jnp.float32))
                    if not shared:
                        with_dq()
                    else:
                        pl.when(wg == 0)(lambda: all_steps_of(None))
                        pl.when(wg == 1)(with_dq)

                if lead:

                    @pl.when(q0 < 0)  # nothing but padding
                    def _():
                        plgpu.barrier_wait(q_bars.at[mine])
                        load_following()
                        pass_by(n0, end)

                return end

            if shared:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(p_free))
            begin = lambda item: pl.when(wg < sets)(lambda: load_rows(item, 0))
            work_items(plan_ref, begin, differentiate)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            plgpu.set_max_registers(registers(wgs)[1], action="decrease")

            def load(item, _following, _side, n0):
                row, (batch, head) = where(item)
                limits, _ = limits_of(row, batch, spans_ref)
                low, high = visits.seen(row, row + block, *limits)

                @pl.loop(0, high - low)
                def _(i):
                    n, slot = n0 + i, slot_of(n0 + i)
                    at = pl.ds((high - 1 - i) * bkv, bkv)
                    for ref, begin, smem, full, free, count in (
                        (k_ref, k_first, k_smem, k_full, k_free, stages),
                        (v_ref, v_first, v_smem, v_full, v_free, v_stages),
                    ):
                        keys = ref.at[batch, at, begin + head // group]
                        at_slot = lax.rem(n, jnp.int32(count))
                        wait = functools.partial(plgpu.barrier_wait, free.at[at_slot])
                        pl.when(n >= count)(wait)
                        plgpu.copy_gmem_to_smem(keys, smem.at[at_slot], full.at[at_slot])
                    if packed:
                        ids = k_ids_ref.at[batch, at]
                        plgpu.copy_gmem_to_smem(ids, k_ids_smem.at[slot], k_full.at[slot])

                return n0 + high - low

            work_items(plan_ref, lambda _item: None, load)

    args = [items.table] if persistent else []
    args += [dlse] if has_dlse else []
    if packed:
        q_ids, k_ids = segments
        args += [q_ids, k_ids, segment_spans(q_ids, k_ids, visits, block, lead)]
    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((sets, ROWS), jnp.float32)
    handed = plgpu.SMEM((ROWS, bkv), jnp.float32, transforms=mosaic.wgmma_tiles(bkv, jnp.float32))
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    return mosaic.kernel(
        attention_backward_dq,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        ),
        scratch_types=[
            *[smem(sides * sets, ROWS)] * 2,
            *[smem(sets, ROWS)] * sides,
            smem(stages, bkv),
            smem(v_stages, bkv),
            *[stat] * 3,
            plgpu.Barrier(num_arrivals=4 + has_dlse + packed, num_barriers=sets),
            ring(num_arrivals=1 + packed),
            plgpu.Barrier(num_barriers=v_stages),
            ring(num_arrivals=wgs),
            plgpu.Barrier(num_arrivals=sets, num_barriers=v_stages),
            *[plgpu.SMEM(x, jnp.int32) for x in ((sets, ROWS), (stages, bkv)) if packed],
            *([handed, plgpu.Barrier(), plgpu.Barrier()] if shared else []),
        ],
        grid=(items.grid,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, out, lse, dout, *args)
