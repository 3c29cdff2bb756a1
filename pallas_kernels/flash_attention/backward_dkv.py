"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in backward_dq.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

A head dimension of 256 leaves a warpgroup registers for one of dK and dV.  There two warpgroups
share 64 keys: one computes S, P and dV, the other dP, dS and dK, with P (fp32) handed over through
shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.forward import STATIC, heads_of
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


def dkv_tiles(head_dim: int) -> Tiles:
    # H100, B4 T4096 32/8: D64 1.11 ms, with two stages 1.17.  D128, by section: 32 MiB 1.65 ms,
    # 16 MiB 1.80, all 1.64 (but 3.13, not 3.07, at B1 T16384 16/16); persistent 1.97.
    # B8 T2048 16/16 D96: 0.387 ms, not persistent 0.452.
    if head_dim <= 96:
        return Tiles(2, 64, 4 if head_dim <= 64 else 3, True, 16)
    return Tiles(2, 64, 4 if head_dim <= 128 else 2, False, 32)


@functools.partial(jax.jit, static_argnames=STATIC)
def backward_dkv(
    q, k, v, lse, dout, delta, segments, joint=None, *, lengths, causal, scale, sms, window=None,
    softcap=None, heads=None, tile=None,
):  # fmt: skip
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there."""
    b, _, _, d = q.shape
    h, kv_heads, k_first, v_first = heads_of(q, k, heads)
    t, s_len = lengths
    group, dtype = h // kv_heads, q.dtype
    tile = tile or dkv_tiles(d)
    wgs, bq, stages = tile[:3]
    ahead = stages - (2 if stages > 3 else 1)  # steps before theirs that tiles are sent for
    shared = d > 128  # two warpgroups share the keys
    sets = 1 if shared else wgs  # of 64 keys
    packed = segments is not None
    block = sets * ROWS
    blocks = mosaic.cdiv(s_len, block)
    visits = Visits(lengths, causal, window, bq, by_keys=True)
    offset = visits.offset
    # dK and dV of one step can run under the next one where P and dS have registers to wait in.
    lazy = shared
    # K and V in registers would spare shared memory half of S and dP (D64: 0.9 of the time), but
    # ptxas gives these registers away while a later step needs them: wrong dK on an H100, with
    # ptxas 12.9 for one step a head, with nvJitLink 13.0 for several.

    first_key = lambda level: level * block  # the first keys are seen by most queries
    pair_bytes = 4 * t * d * group  # Q and dO of a kv head
    items = share_out(
        visits, block, first_key, (b, kv_heads), tile, sms=sms, pair_bytes=pair_bytes, packed=packed
    )
    where, persistent = items.where, items.persistent
    sides = 2 if persistent else 1  # buffers of K and V: of this item and of the next one

    def limits_of(key0, batch, spans_ref):  # the tiles that segments leave to a block
        mine = lax.div(key0, jnp.int32(block))
        return visits.limits((lambda i: spans_ref[batch, mine, i]) if packed else None)

    def attention_backward_dkv(q_ref, k_ref, v_ref, lse_ref, do_ref, delta_ref, *rest):
        (plan_ref,), rest = take(rest, 1, persistent)
        (q_ids_ref, k_ids_ref, spans_ref), rest = take(rest, 3, packed)
        dk_ref, dv_ref, *rest = rest if joint is None else (rest[0], *rest)
        (k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
         k_bars, v_bars, q_full, do_full, free, *rest) = rest  # fmt: skip
        (k_ids_smem, q_ids_smem), rest = take(rest, 2, packed)
        (p_smem, p_full, p_free), rest = take(rest, 3, shared)
        # dV and dK leave through the buffers of K and V (of two warpgroups that share keys each is
        # the only reader of one), unless the next item's are on their way.
        dv_smem, dk_smem = rest if persistent else (k_smem, v_smem)
        wg = lax.axis_index("wg")
        mine = 0 if shared else wg
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        def stream_of(item):
            """What streams past an item: (batch, first head, first tile, tiles of each head)."""
            key0, (batch, kv_head) = where(item)
            low, high = visits.seen(key0, key0 + block, *limits_of(key0, batch, spans_ref)[0])
            return batch, kv_head * group, low, high - low

        do_sender = wgs - 1 if shared else 0  # of two that share keys the second sends for all

        def load_step(n, i, g, r, stream, following):
            """Sends for the tiles of step n of this kernel block: i of an item, r of its head g.

            Step r may lie up to `ahead` past the head's last one, and after those of the item's
            last head come those of the next item.  Two warps do, one for Q and one for dO; only
            they wait until all warpgroups have left the buffers.
            """
            q_arrays = (q_ref, lse_ref, q_smem, lse_smem, q_full)
            do_arrays = (do_ref, delta_ref, do_smem, delta_smem, do_full)

            def send(arrays):
                tile_ref, stats_ref, smem, stats_smem, full = arrays

                def copy(g, r, batch, head, base, steps):
                    if group > 1:  # no division, which would take longer than the copies
                        over = jnp.where(steps == 1, r, (r >= steps).astype(jnp.int32))
                        g, r = g + over, r - over * steps
                    slot, at = slot_of(n), pl.ds((base + r) * bq, bq)
                    pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    bar = full.at[slot]
                    plgpu.copy_gmem_to_smem(tile_ref.at[batch, at, head + g], smem.at[slot], bar)
                    stats = stats_ref.at[batch, head + g, at]
                    plgpu.copy_gmem_to_smem(stats, stats_smem.at[slot], bar)
                    if packed and arrays is q_arrays:
                        plgpu.copy_gmem_to_smem(q_ids_ref.at[batch, at], q_ids_smem.at[slot], bar)

                def of_following():
                    coming = stream_of(following)
                    pl.when(past < group * coming[3])(lambda: copy(0, past, *coming))

                past = i - group * stream[3]
                pl.when(past < 0)(lambda: copy(g, r, *stream))
                if following is not None:
                    pl.when((past >= 0) & (following >= 0))(of_following)

            def by_warp(warp):
                pl.when((warp == 0) & (wg == wgs - 1))(lambda: send(q_arrays))
                pl.when((warp == 1) & (wg == do_sender))(lambda: send(do_arrays))

            plgpu.warp_map(by_warp)

        def load_kv(item, side):
            key0, (batch, kv_head) = where(item)
            rows = pl.ds(key0 + mine * ROWS, ROWS)
            at = side * sets + mine
            k, v = (
                ref.at[batch, rows, first + kv_head]
                for ref, first in ((k_ref, k_first), (v_ref, v_first))
            )
            plgpu.copy_gmem_to_smem(k, k_smem.at[at], k_bars.at[at])
            plgpu.copy_gmem_to_smem(v, v_smem.at[at], v_bars.at[at])
            if packed:
                ids = k_ids_ref.at[batch, rows]
                plgpu.copy_gmem_to_smem(ids, k_ids_smem.at[at], k_bars.at[at])

        def differentiate(item, following, side, n0):
            """One block of keys; its steps are n0, n0 + 1, ... of this kernel block."""
            if following is not None:
                pl.when(following >= 0)(lambda: load_kv(following, 1 - side))
            at = side * sets + mine  # this item's K and V
            key0, (batch, kv_head) = where(item)
            k0 = key0 + mine * ROWS
            limits, same = limits_of(key0, batch, spans_ref)
            stream = stream_of(item)
            base, steps = stream[2:]  # steps: of each query head
            total = group * steps

            def load_later(g, r):
                i = g * steps + r + ahead
                load_step(n0 + i, i, g, r + ahead, stream, following)

            if persistent:  # of an item of fewer steps than are on their way when it begins
                pl.loop(total, ahead)(lambda i: load_step(n0 + i, i, 0, i, stream, following))
            own = visits.seen(k0, k0 + ROWS, *limits)
            whole = visits.whole(k0, k0 + ROWS, *same)
            # This warpgroup's steps, and those without a mask inside them.
            first, last = own[0] - base, own[1] - base
            unmasked, edge = first + 1, last
            if causal or packed:
                unmasked = jnp.clip(whole[0] - base, first + 1, last)
            if window is not None or packed:
                edge = jnp.clip(whole[1] - base, unmasked, last)

            def pass_by(g, lo, hi):  # steps in which the block's other warpgroups work
                @pl.loop(lo, hi)
                def _(r):
                    n = n0 + g * steps + r
                    load_later(g, r)
                    plgpu.barrier_wait(q_full.at[slot_of(n)])
                    plgpu.barrier_wait(do_full.at[slot_of(n)])
                    plgpu.barrier_arrive(free.at[slot_of(n)])

            def release(n):
                plgpu.commit_smem()  # the statistics were read with plain loads
                plgpu.barrier_arrive(free.at[slot_of(n)])

            def step(dk_acc, dv_acc, k, v, k_ids, g, r, masked, begins):
                """Query tile base + r of the head g."""
                n = n0 + g * steps + r
                slot = slot_of(n)
                plgpu.barrier_wait(q_full.at[slot])
                column = lambda ref: along(
                    plgpu.load(ref.at[slot], layout=COL, optimized=False), (ROWS, bq), 1
                )
                across = lambda acc, rows, tile: plgpu.wgmma(
                    acc, rows, tile.at[slot].transpose((1, 0))
                )

                def p_of(s):  # -> P, d logits / d (scale S)
                    x, slope = logits(s, scale, softcap)
                    if masked and packed:
                        q_ids = plgpu.load(q_ids_smem.at[slot], layout=COL, optimized=False)
                        x = same_segment(x, k_ids, q_ids)
                    if masked:
                        q0 = (base + r) * bq + offset
                        x = visible(x, q0, k0, causal=causal, window=window, transposed=True)
                    return jnp.exp2(x - column(lse_smem) * LOG2E), slope

                def release_before():  # the step before is done
                    if lazy and not begins:
                        release(n - 1)

                def dv_and_dk(s_acc, dp_acc):
                    # This minimum changes nothing.  But where the compiler sees that an operand
                    # stays in place, it holds the descriptors of all its slices in registers.
                    here = jnp.minimum(at, n + sides * sets)
                    k, v = k_smem.at[here], v_smem.at[here]
                    across(s_acc, k, q_smem)
                    plgpu.barrier_wait(do_full.at[slot])
                    across(dp_acc, v, do_smem)
                    load_later(g, r)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    release_before()
                    p, slope = p_of(s)
                    plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    ds = p * (dp - column(delta_smem))
                    ds = (ds if slope is None else ds * slope).astype(dtype)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                    if not lazy:
                        plgpu.wgmma_wait(0)
                        release(n)

                def only_dv(s_acc):
                    across(s_acc, k, q_smem)
                    s = s_acc[...]
                    release_before()
                    p, slope = p_of(s)
                    plgpu.barrier_wait(p_free)
                    p_smem[...] = p if slope is None else p * slope
                    plgpu.barrier_arrive(p_full)
                    plgpu.barrier_wait(do_full.at[slot])
                    plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])

                def only_dk(dp_acc):
                    plgpu.barrier_wait(do_full.at[slot])
                    across(dp_acc, v, do_smem)
                    dp = dp_acc[...]
                    release_before()
                    load_later(g, r)
                    plgpu.barrier_wait(p_full)
                    p = plgpu.load(p_smem, layout=WGMMA)
                    ds = (p * (dp - column(delta_smem))).astype(dtype)
                    plgpu.barrier_arrive(p_free)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])

                acc = plgpu.ACC((ROWS, bq), jnp.float32)
                if not shared:
                    pl.run_scoped(dv_and_dk, acc, acc)
                else:
                    pl.run_scoped(only_dv if dk_acc is None else only_dk, acc)

            def all_heads(dk_acc, dv_acc):
                k_ids = None
                if dv_acc is not None:
                    plgpu.barrier_wait(k_bars.at[at])
                    if packed:
                        k_ids = plgpu.load(k_ids_smem.at[at], layout=ROW, optimized=False)
                if dk_acc is not None:
                    plgpu.barrier_wait(v_bars.at[at])
                k, v = k_smem.at[at], v_smem.at[at]

                @pl.loop(0, group)
                def _(g):
                    pass_by(g, 0, first)
                    do_step = functools.partial(step, dk_acc, dv_acc, k, v, k_ids, g)
                    go = lambda lo, hi, masked: pl.loop(lo, hi)(
                        lambda r: do_step(r, masked, begins=False)
                    )
                    if lazy:
                        do_step(first, causal or packed, begins=True)
                    start = first + lazy
                    # The diagonal may cross two tiles, and segments may begin anywhere.
                    diagonal = causal and (not lazy or offset % ROWS or bq % ROWS)
                    if packed or diagonal:
                        go(start, unmasked, True)
                        start = unmasked
                    go(start, edge, False)
                    if window is not None or packed:
                        go(edge, last, True)
                    if lazy:
                        plgpu.wgmma_wait(0)
                        release(n0 + g * steps + last - 1)
                    if window is not None:
                        pass_by(g, last, steps)

            def store_dk(dk):
                store(dk * scale, dk_smem, dk_ref.at[batch, pl.ds(k0, ROWS), k_first + kv_head])

            def store_dv(dv):
                store(dv, dv_smem, dv_ref.at[batch, pl.ds(k0, ROWS), v_first + kv_head])

            def store(x, smem, target):
                plgpu.commit_smem()  # all warps have read what was there
                smem[mine] = x.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[mine], target)

            def both(dk_acc, dv_acc):
                all_heads(dk_acc, dv_acc)
                dk, dv = dk_acc[...], dv_acc[...]
                plgpu.wait_smem_to_gmem(0)  # the block before has left
                store_dk(dk)
                store_dv(dv)

            def one(dk_acc, dv_acc):
                all_heads(dk_acc, dv_acc)
                if dk_acc is not None:
                    store_dk(dk_acc[...])
                else:
                    store_dv(dv_acc[...])

            @pl.when(k0 < s_len)
            def _():
                acc = plgpu.ACC((ROWS, d), jnp.float32)
                if not shared:
                    pl.run_scoped(both, acc, acc)
                else:
                    pl.when(wg == 0)(lambda: pl.run_scoped(lambda x: one(None, x), acc))
                    pl.when(wg == 1)(lambda: pl.run_scoped(lambda x: one(x, None), acc))

            if blocks * block - s_len >= ROWS:

                @pl.when(k0 >= s_len)  # nothing but padding
                def _():
                    plgpu.barrier_wait(k_bars.at[at])
                    plgpu.barrier_wait(v_bars.at[at])
                    pl.loop(0, group)(lambda g: pass_by(g, 0, steps))

            return n0 + total

        def begin(item):
            pl.when(wg < sets)(lambda: load_kv(item, 0))
            stream = stream_of(item)
            pl.loop(0, ahead)(lambda n: load_step(n, n, 0, n, stream, None))

        if shared:
            pl.when(wg == 1)(lambda: plgpu.barrier_arrive(p_free))
        work_items(plan_ref, begin, differentiate)
        plgpu.wait_smem_to_gmem(0)

    args = [items.table] if persistent else []
    if packed:
        q_ids, k_ids = segments
        args += [q_ids, k_ids, segment_spans(k_ids, q_ids, visits, block)]
    args += [joint] if heads else []
    smem = lambda n: plgpu.SMEM((n, ROWS, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((stages, bq), jnp.float32)
    handed = plgpu.SMEM((ROWS, bq), jnp.float32, transforms=mosaic.wgmma_tiles(bq, jnp.float32))
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    like = jax.ShapeDtypeStruct(k.shape, dtype)
    return mosaic.kernel(
        attention_backward_dkv,
        out_type=() if heads else (like, like),
        scratch_types=[
            *[smem(sides * sets)] * 2,
            *[smem(stages)] * 2,
            *[stat] * 2,
            plgpu.Barrier(num_arrivals=1 + packed, num_barriers=sides * sets),
            plgpu.Barrier(num_barriers=sides * sets),
            ring(num_arrivals=2 + packed),
            ring(num_arrivals=2),
            ring(num_arrivals=wgs),
            *[plgpu.SMEM(x, jnp.int32) for x in ((sides * sets, ROWS), (stages, bq)) if packed],
            *([handed, plgpu.Barrier(), plgpu.Barrier()] if shared else []),
            *[smem(sets)] * (2 if persistent else 0),
        ],
        grid=(items.grid,),
        grid_names=("block",),
        num_threads=wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(q, k, v, lse, dout, delta, *args)
