"""Attention backward on Hopper: one kernel for dQ (and the row sums), one for dK and dV.

With P = exp(c S - lse) recomputed from the saved log-sum-exp,

    delta = rowsum(dO * O) - dlse        dP = dO V^T          dS = P * (dP - delta)
    dQ = c dS K                          dK = c dS^T Q        dV = P^T dO

The dQ kernel owns queries and streams keys, the dK/dV kernel owns keys and streams queries: seven
matmuls where one fused kernel would do five, but no sum crosses blocks, so the result is the same
bit for bit in every run.  The gradient of a kv head sums over its query heads inside the block.
Both work in the arrangement of the forward kernel: computing warpgroups with 64 rows each, one
warpgroup that only loads, P and dS handed to the tensor core in registers.  The dK/dV kernel
computes S and dP transposed, so that P^T and dS^T are already where a wgmma takes them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.attention.forward_sm90 import (
    COL,
    LOG2E,
    ROW,
    ROWS,
    WGMMA,
    Tiles,
    item_order,
    registers,
    rows_to,
    visible,
    work_items,
)


def dq_tiles(head_dim: int) -> Tiles:
    # H100, B4 T4096 32/8: D64 0.73 ms, two warpgroups 0.76, not persistent 0.80.  D128, by section:
    # one head at a time 1.27 ms, 4 MiB 1.33, 32 MiB 1.42, all 1.49; persistent 1.43.
    return Tiles(3, 64, 3, True, None) if head_dim <= 64 else Tiles(2, 64, 2, False, 0)


def dkv_tiles(head_dim: int) -> Tiles:
    # H100, B4 T4096 32/8: D64 1.11 ms, with two stages 1.17.  D128, by section: 32 MiB 1.65 ms,
    # 16 MiB 1.80, all 1.64 (but 3.13, not 3.07, at B1 T16384 16/16); persistent 1.97.
    return Tiles(2, 64, 3, True, None) if head_dim <= 64 else Tiles(2, 64, 2, False, 32)


def backward(q, k, v, out, lse, dout, dlse, *, lengths, causal, scale, sms):
    """(dq, dk, dv) in the dtypes of q, k, v.  lse, dlse (None: zero): (B, H, stat_rows(T)) fp32.

    lengths: the true T and S, as in `forward`.  Rows of dout past T must be zero.
    """
    static = dict(lengths=lengths, causal=causal, scale=scale, sms=sms)
    dq, delta = _backward_dq(q, k, v, out, lse, dout, dlse, **static)
    dk, dv = _backward_dkv(q, k, v, lse, dout, delta, **static)
    return dq, dk, dv


@functools.partial(jax.jit, static_argnames=("lengths", "causal", "scale", "tile", "sms"))
def _backward_dq(q, k, v, out, lse, dout, dlse, *, lengths, causal, scale, sms, tile=None):
    """(dq like q, delta (B, H, stat_rows(T)) fp32)."""
    b, _, h, d = q.shape
    t, s_len = lengths
    group, dtype = h // k.shape[2], q.dtype
    wgs, bkv, stages, persistent, section = tile or dq_tiles(d)
    block = wgs * ROWS
    blocks = mosaic.cdiv(t, block)
    items = blocks * b * h
    grid = min(sms, items) if persistent else items
    offset = s_len - t
    all_steps = mosaic.cdiv(s_len, bkv)
    ragged = s_len % bkv != 0
    has_dlse = dlse is not None

    pair_bytes = 4 * s_len * d // group  # a head's share of K and V
    order = item_order(blocks, b * h, pair_bytes, section)

    def where(item):  # -> block of queries, (batch, head); the longest causal blocks first
        level, pair = order(item)
        return (blocks - 1 - level if causal else level), (pair // h, pair % h)

    def steps_of(q_end):
        if not causal:
            return jnp.int32(all_steps)
        return jnp.clip((q_end + offset + bkv - 1) // bkv, 1, all_steps)

    def attention_backward_dq(q_ref, k_ref, v_ref, o_ref, lse_ref, do_ref, *rest):
        dlse_ref, dq_ref, delta_ref, *rest = rest if has_dlse else (None, *rest)
        # dQ leaves through the buffer of O, unless the next item's O is on its way into that.
        q_smem, do_smem, o_smem, dq_smem, *rest = rest if grid < items else (*rest[:3], *rest[2:])
        (k_smem, v_smem, lse_smem, dlse_smem, delta_smem,
         q_bars, k_full, v_full, k_free, v_free) = rest  # fmt: skip
        wg = lax.axis_index("wg")
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        @pl.when(wg < wgs)
        def _compute():
            plgpu.set_max_registers(registers(wgs)[0], action="increase")

            def load_rows(item):
                qi, (batch, head) = where(item)
                rows = pl.ds(qi * block + wg * ROWS, ROWS)
                loads = [(q_ref, q_smem), (do_ref, do_smem), (o_ref, o_smem)]
                stats = [(lse_ref, lse_smem)] + [(dlse_ref, dlse_smem)] * has_dlse
                for ref, smem in loads:
                    plgpu.copy_gmem_to_smem(ref.at[batch, rows, head], smem.at[wg], q_bars.at[wg])
                for ref, smem in stats:
                    plgpu.copy_gmem_to_smem(ref.at[batch, head, rows], smem.at[wg], q_bars.at[wg])

            def differentiate(item, n0):
                """One block of queries, from the diagonal downwards as in the forward kernel."""
                qi, (batch, head) = where(item)
                q0 = qi * block + wg * ROWS
                rows = pl.ds(q0, ROWS)
                steps = steps_of((qi + 1) * block)
                first = n0 + steps - steps_of(q0 + ROWS)
                unmasked = (
                    n0 + steps - jnp.minimum((q0 + offset + 1) // bkv, n0 + steps - 1 - first)
                )
                end = n0 + steps

                def pass_by(lo, hi):  # steps in which the block's other warpgroups work
                    @pl.loop(lo, hi)
                    def _(n):
                        for full, free in ((k_full, k_free), (v_full, v_free)):
                            plgpu.barrier_wait(full.at[slot_of(n)])
                            plgpu.barrier_arrive(free.at[slot_of(n)])

                def step(dq_acc, lse2, delta, n, masked, begins):
                    slot = slot_of(n)
                    plgpu.barrier_wait(k_full.at[slot])

                    def matmuls(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(v_full.at[slot])
                        plgpu.wgmma(dp_acc, do_smem.at[wg], v_smem.at[slot].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if not begins:  # dQ += dS K of the step before is done too
                            plgpu.barrier_arrive(k_free.at[slot_of(n - 1)])
                        if masked:
                            k0 = (end - 1 - n) * bkv
                            keys = s_len if ragged else None
                            s = visible(s, q0 + offset, k0, causal=causal, keys=keys)
                        p = jnp.exp2(s * (scale * LOG2E) - rows_to(lse2, s.shape))
                        dp = dp_acc[...]
                        plgpu.barrier_arrive(v_free.at[slot])
                        ds = (p * (dp - rows_to(delta, s.shape))).astype(dtype)
                        plgpu.wgmma(dq_acc, ds, k_smem.at[slot])  # runs on under the next step

                    acc = plgpu.ACC((ROWS, bkv), jnp.float32)
                    pl.run_scoped(matmuls, acc, acc)

                def all_steps_of(dq_acc):
                    plgpu.barrier_wait(q_bars.at[wg])
                    row = lambda ref: plgpu.load(ref.at[wg], layout=ROW, optimized=False)
                    tile_of = lambda ref: plgpu.load(ref.at[wg], layout=WGMMA).astype(jnp.float32)
                    lse2 = row(lse_smem) * LOG2E
                    delta = jnp.sum(tile_of(do_smem) * tile_of(o_smem), axis=1)
                    if has_dlse:
                        delta = delta - row(dlse_smem)
                    plgpu.wait_smem_to_gmem(1)  # the block before has left delta_smem
                    delta_smem[wg] = delta
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(delta_smem.at[wg], delta_ref.at[batch, head, rows])

                    do_step = functools.partial(step, dq_acc, lse2, delta)
                    do_step(first, causal or ragged, begins=True)
                    start = first + 1
                    if causal and (offset % ROWS or bkv % ROWS):  # the diagonal crosses two tiles
                        pl.loop(start, unmasked)(lambda n: do_step(n, True, begins=False))
                        start = unmasked
                    pl.loop(start, end)(lambda n: do_step(n, False, begins=False))
                    dq = dq_acc[...]
                    plgpu.barrier_arrive(k_free.at[slot_of(end - 1)])
                    pl.when(item + grid < items)(lambda: load_rows(item + grid))
                    return dq

                @pl.when(q0 < t)
                def _():
                    pass_by(n0, first)
                    dq = pl.run_scoped(all_steps_of, plgpu.ACC((ROWS, d), jnp.float32))
                    plgpu.wait_smem_to_gmem(1)  # the block before has left dq_smem
                    dq_smem[wg] = (dq * scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq_ref.at[batch, rows, head])

                if blocks * block - t >= ROWS:

                    @pl.when(q0 >= t)  # nothing but padding
                    def _():
                        plgpu.barrier_wait(q_bars.at[wg])
                        pl.when(item + grid < items)(lambda: load_rows(item + grid))
                        pass_by(n0, end)

                return end

            load_rows(lax.axis_index("block"))
            work_items(items, grid, differentiate)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            plgpu.set_max_registers(registers(wgs)[1], action="decrease")

            def load(item, n0):
                qi, (batch, head) = where(item)
                steps = steps_of((qi + 1) * block)

                @pl.loop(n0, n0 + steps)
                def _(n):
                    slot = slot_of(n)
                    keys = (batch, pl.ds((n0 + steps - 1 - n) * bkv, bkv), head // group)
                    for ref, smem, full, free in (
                        (k_ref, k_smem, k_full, k_free),
                        (v_ref, v_smem, v_full, v_free),
                    ):
                        pl.when(n >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                        plgpu.copy_gmem_to_smem(ref.at[keys], smem.at[slot], full.at[slot])

                return n0 + steps

            work_items(items, grid, load)

    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((wgs, ROWS), jnp.float32)
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    return plgpu.kernel(
        attention_backward_dq,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        ),
        scratch_types=[
            *[smem(wgs, ROWS)] * (4 if grid < items else 3),
            *[smem(stages, bkv)] * 2,
            *[stat] * 3,
            plgpu.Barrier(num_arrivals=4 + has_dlse, num_barriers=wgs),
            *[ring()] * 2,
            *[ring(num_arrivals=wgs)] * 2,
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, out, lse, dout, *([dlse] if has_dlse else []))


@functools.partial(jax.jit, static_argnames=("lengths", "causal", "scale", "tile", "sms"))
def _backward_dkv(q, k, v, lse, dout, delta, *, lengths, causal, scale, sms, tile=None):
    """(dk, dv) like (k, v)."""
    b, _, h, d = q.shape
    t, s_len = lengths
    kv_heads, dtype = k.shape[2], q.dtype
    group = h // kv_heads
    wgs, bq, stages, persistent, section = tile or dkv_tiles(d)
    block = wgs * ROWS
    blocks = mosaic.cdiv(s_len, block)
    items = blocks * b * kv_heads
    grid = min(sms, items) if persistent else items
    offset = s_len - t
    q_tiles = mosaic.cdiv(t, bq)
    # dK and dV of one step can run under the next one where P and dS have registers to wait in.
    lazy = d <= 64 and wgs <= 2

    pair_bytes = 4 * t * d * group  # Q and dO of a kv head
    order = item_order(blocks, b * kv_heads, pair_bytes, section)

    def where(item):  # -> first key, (batch, kv head); the first keys are seen by most queries
        level, pair = order(item)
        return level * block, (pair // kv_heads, pair % kv_heads)

    def first_tile(k0):  # the first tile of queries that see key k0 or a later one
        return jnp.clip((k0 - offset) // bq, 0, q_tiles - 1) if causal else jnp.int32(0)

    def attention_backward_dkv(
        q_ref, k_ref, v_ref, lse_ref, do_ref, delta_ref, dk_ref, dv_ref,
        k_smem, v_smem, dk_smem, dv_smem, q_smem, do_smem, lse_smem, delta_smem,
        kv_bars, q_full, do_full, free,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        @pl.when(wg < wgs)
        def _compute():
            plgpu.set_max_registers(registers(wgs)[0], action="increase")

            def load_kv(item):
                key0, (batch, kv_head) = where(item)
                here = (batch, pl.ds(key0 + wg * ROWS, ROWS), kv_head)
                plgpu.copy_gmem_to_smem(k_ref.at[here], k_smem.at[wg], kv_bars.at[wg])
                plgpu.copy_gmem_to_smem(v_ref.at[here], v_smem.at[wg], kv_bars.at[wg])

            def differentiate(item, n0):
                """One block of keys; its steps are n0, n0 + 1, ... of this kernel block."""
                key0, (batch, kv_head) = where(item)
                k0 = key0 + wg * ROWS
                here = (batch, pl.ds(k0, ROWS), kv_head)
                base = first_tile(key0)
                steps = q_tiles - base  # of each query head
                first = first_tile(k0) - base  # the queries before are all before this key
                unmasked = (k0 + ROWS - 1 - offset + bq - 1) // bq - base if causal else 0
                unmasked = jnp.clip(unmasked, first + 1, steps)

                def pass_by(lo, hi):  # steps in which the block's other warpgroups work
                    @pl.loop(lo, hi)
                    def _(n):
                        plgpu.barrier_wait(q_full.at[slot_of(n)])
                        plgpu.barrier_wait(do_full.at[slot_of(n)])
                        plgpu.barrier_arrive(free.at[slot_of(n)])

                def release(n):
                    plgpu.commit_smem()  # the statistics were read with plain loads
                    plgpu.barrier_arrive(free.at[slot_of(n)])

                def step(dk_acc, dv_acc, n_head, r, masked, begins):
                    """Query tile base + r of the head whose steps begin at n_head."""
                    n = n_head + r
                    slot = slot_of(n)
                    plgpu.barrier_wait(q_full.at[slot])
                    column = lambda ref: lax.broadcast_in_dim(
                        plgpu.load(ref.at[slot], layout=COL, optimized=False), (ROWS, bq), [1]
                    )

                    def matmuls(s_acc, dp_acc):
                        plgpu.wgmma(s_acc, k_smem.at[wg], q_smem.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(do_full.at[slot])
                        plgpu.wgmma(dp_acc, v_smem.at[wg], do_smem.at[slot].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        if lazy and not begins:
                            release(n - 1)
                        if masked:
                            q0 = (base + r) * bq + offset
                            s = visible(s, q0, k0, causal=causal, transposed=True)
                        p = jnp.exp2(s * (scale * LOG2E) - column(lse_smem) * LOG2E)
                        plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        ds = (p * (dp - column(delta_smem))).astype(dtype)
                        plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                        if not lazy:
                            plgpu.wgmma_wait(0)
                            release(n)

                    acc = plgpu.ACC((ROWS, bq), jnp.float32)
                    pl.run_scoped(matmuls, acc, acc)

                def all_heads(dk_acc, dv_acc):
                    plgpu.barrier_wait(kv_bars.at[wg])

                    @pl.loop(0, group)
                    def _(g):
                        n_head = n0 + g * steps
                        pass_by(n_head, n_head + first)
                        do_step = functools.partial(step, dk_acc, dv_acc, n_head)
                        do_step(first, causal, begins=True)
                        start = first + 1
                        if causal and (offset % ROWS or bq % ROWS):
                            pl.loop(start, unmasked)(lambda r: do_step(r, True, begins=False))
                            start = unmasked
                        pl.loop(start, steps)(lambda r: do_step(r, False, begins=False))
                        if lazy:
                            plgpu.wgmma_wait(0)
                            release(n_head + steps - 1)

                    pl.when(item + grid < items)(lambda: load_kv(item + grid))
                    return dk_acc[...], dv_acc[...]

                @pl.when(k0 < s_len)
                def _():
                    acc = plgpu.ACC((ROWS, d), jnp.float32)
                    dk, dv = pl.run_scoped(all_heads, acc, acc)
                    plgpu.wait_smem_to_gmem(0)  # the block before has left
                    dk_smem[wg] = (dk * scale).astype(dtype)
                    dv_smem[wg] = dv.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(dk_smem.at[wg], dk_ref.at[here])
                    plgpu.copy_smem_to_gmem(dv_smem.at[wg], dv_ref.at[here])

                if blocks * block - s_len >= ROWS:

                    @pl.when(k0 >= s_len)  # nothing but padding
                    def _():
                        plgpu.barrier_wait(kv_bars.at[wg])
                        pl.when(item + grid < items)(lambda: load_kv(item + grid))
                        pass_by(n0, n0 + group * steps)

                return n0 + group * steps

            load_kv(lax.axis_index("block"))
            work_items(items, grid, differentiate)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            plgpu.set_max_registers(registers(wgs)[1], action="decrease")

            def load(item, n0):
                key0, (batch, kv_head) = where(item)
                base = first_tile(key0)
                steps = q_tiles - base

                @pl.loop(0, group * steps)
                def _(i):
                    n, slot = n0 + i, slot_of(n0 + i)
                    head, at = kv_head * group + i // steps, pl.ds((base + i % steps) * bq, bq)
                    rows, stats = (batch, at, head), (batch, head, at)
                    pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for ref, index, smem, full in (
                        (q_ref, rows, q_smem, q_full),
                        (lse_ref, stats, lse_smem, q_full),
                        (do_ref, rows, do_smem, do_full),
                        (delta_ref, stats, delta_smem, do_full),
                    ):
                        plgpu.copy_gmem_to_smem(ref.at[index], smem.at[slot], full.at[slot])

                return n0 + group * steps

            work_items(items, grid, load)

    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((stages, bq), jnp.float32)
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    like = jax.ShapeDtypeStruct(k.shape, dtype)
    return plgpu.kernel(
        attention_backward_dkv,
        out_type=(like, like),
        scratch_types=[
            *[smem(wgs, ROWS)] * 4,
            *[smem(stages, bq)] * 2,
            *[stat] * 2,
            plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
            *[ring(num_arrivals=2)] * 2,
            ring(num_arrivals=wgs),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, lse, dout, delta)
