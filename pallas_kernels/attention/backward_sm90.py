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
from typing import NamedTuple

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
    registers,
    rows_to,
    visible,
)


class Tiles(NamedTuple):
    """How a backward kernel is cut up."""

    wgs: int  # computing warpgroups of a block, 64 rows each
    step: int  # keys (dQ) or queries (dK/dV) of one step
    stages: int  # steps in flight


def dq_tiles(head_dim: int) -> Tiles:
    return Tiles(wgs=2, step=128, stages=2) if head_dim <= 64 else Tiles(wgs=2, step=64, stages=2)


def dkv_tiles(head_dim: int) -> Tiles:
    return Tiles(wgs=2, step=64, stages=2)


def backward(q, k, v, out, lse, dout, dlse, *, lengths, causal, scale, tiles=(None, None)):
    """(dq, dk, dv) in the dtypes of q, k, v.  lse, dlse (None: zero): (B, H, T) fp32.

    lengths: the true T and S, as in `forward`.  Rows of dout past T must be zero.
    """
    static = dict(lengths=lengths, causal=causal, scale=scale)
    dq, delta = _backward_dq(q, k, v, out, lse, dout, dlse, tile=tiles[0], **static)
    dk, dv = _backward_dkv(q, k, v, lse, dout, delta, tile=tiles[1], **static)
    return dq, dk, dv


@functools.partial(jax.jit, static_argnames=("lengths", "causal", "scale", "tile"))
def _backward_dq(q, k, v, out, lse, dout, dlse, *, lengths, causal, scale, tile):
    """(dq like q, delta (B, H, T) fp32)."""
    b, _, h, d = q.shape
    t, s_len = lengths
    group, dtype = h // k.shape[2], q.dtype
    wgs, bkv, stages = tile or dq_tiles(d)
    block = wgs * ROWS
    blocks = mosaic.cdiv(t, block)
    offset = s_len - t
    all_steps = mosaic.cdiv(s_len, bkv)
    ragged = s_len % bkv != 0
    has_dlse = dlse is not None

    def attention_backward_dq(
        q_ref, k_ref, v_ref, o_ref, lse_ref, do_ref, *rest
    ):  # fmt: skip
        dlse_ref, dq_ref, delta_ref, *rest = rest if has_dlse else (None, *rest)
        (q_smem, do_smem, o_smem, k_smem, v_smem, lse_smem, dlse_smem, delta_smem,
         q_bars, k_full, v_full, k_free, v_free) = rest  # fmt: skip
        head, batch, wg = (lax.axis_index(x) for x in ("head", "batch", "wg"))
        qi = (blocks - 1) - lax.axis_index("q") if causal else lax.axis_index("q")

        def steps_of(q_end):
            if not causal:
                return jnp.int32(all_steps)
            return jnp.clip((q_end + offset + bkv - 1) // bkv, 1, all_steps)

        # From the diagonal downwards, as in the forward kernel.
        block_steps = steps_of((qi + 1) * block)
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        @pl.when(wg < wgs)
        def _compute():
            plgpu.set_max_registers(registers(wgs)[0], action="increase")
            q0 = qi * block + wg * ROWS
            here, stats = (batch, pl.ds(q0, ROWS), head), (batch, head, pl.ds(q0, ROWS))
            loads = [(q_ref, here, q_smem), (do_ref, here, do_smem), (o_ref, here, o_smem),
                     (lse_ref, stats, lse_smem)]  # fmt: skip
            if has_dlse:
                loads.append((dlse_ref, stats, dlse_smem))
            for ref, index, smem in loads:
                plgpu.copy_gmem_to_smem(ref.at[index], smem.at[wg], q_bars.at[wg])
            first = block_steps - steps_of(q0 + ROWS)
            unmasked = block_steps - jnp.minimum((q0 + offset + 1) // bkv, block_steps - first - 1)

            @pl.loop(0, first)  # tiles that only the block's later warpgroups see
            def _(n):
                for full, free in ((k_full, k_free), (v_full, v_free)):
                    plgpu.barrier_wait(full.at[slot_of(n)])
                    plgpu.barrier_arrive(free.at[slot_of(n)])

            plgpu.barrier_wait(q_bars.at[wg])
            row = lambda ref: plgpu.load(ref.at[wg], layout=ROW, optimized=False)
            tile_of = lambda ref: plgpu.load(ref.at[wg], layout=WGMMA).astype(jnp.float32)
            delta = jnp.sum(tile_of(do_smem) * tile_of(o_smem), axis=1)
            if has_dlse:
                delta = delta - row(dlse_smem)
            delta_smem[wg] = delta
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(delta_smem.at[wg], delta_ref.at[stats])
            lse2 = row(lse_smem) * LOG2E

            def step(dq_acc, n, masked, begins):
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
                        k0 = (block_steps - 1 - n) * bkv
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
                step(dq_acc, first, causal or ragged, begins=True)
                start = first + 1
                if causal and (offset % ROWS or bkv % ROWS):  # the diagonal crosses two tiles
                    pl.loop(start, unmasked)(lambda n: step(dq_acc, n, True, begins=False))
                    start = unmasked
                pl.loop(start, block_steps)(lambda n: step(dq_acc, n, False, begins=False))
                return dq_acc[...]

            dq = pl.run_scoped(all_steps_of, plgpu.ACC((ROWS, d), jnp.float32))
            q_smem[wg] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            plgpu.set_max_registers(registers(wgs)[1], action="decrease")

            @pl.loop(0, block_steps)
            def _(n):
                slot = slot_of(n)
                keys = (batch, pl.ds((block_steps - 1 - n) * bkv, bkv), head // group)
                for ref, smem, full, free in (
                    (k_ref, k_smem, k_full, k_free),
                    (v_ref, v_smem, v_full, v_free),
                ):
                    pl.when(n >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[keys], smem.at[slot], full.at[slot])

    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((wgs, ROWS), jnp.float32)
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    return plgpu.kernel(
        attention_backward_dq,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((b, h, q.shape[1]), jnp.float32),
        ),
        scratch_types=[
            smem(wgs, ROWS),
            smem(wgs, ROWS),
            smem(wgs, ROWS),
            smem(stages, bkv),
            smem(stages, bkv),
            stat,
            stat,
            stat,
            plgpu.Barrier(num_arrivals=4 + has_dlse, num_barriers=wgs),
            ring(),
            ring(),
            ring(num_arrivals=wgs),
            ring(num_arrivals=wgs),
        ],
        grid=(h, b, blocks),
        grid_names=("head", "batch", "q"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, out, lse, dout, *([dlse] if has_dlse else []))


@functools.partial(jax.jit, static_argnames=("lengths", "causal", "scale", "tile"))
def _backward_dkv(q, k, v, lse, dout, delta, *, lengths, causal, scale, tile):
    """(dk, dv) like (k, v)."""
    b, _, h, d = q.shape
    t, s_len = lengths
    kv_heads, dtype = k.shape[2], q.dtype
    group = h // kv_heads
    wgs, bq, stages = tile or dkv_tiles(d)
    block = wgs * ROWS
    offset = s_len - t
    q_tiles = mosaic.cdiv(t, bq)

    def attention_backward_dkv(
        q_ref, k_ref, v_ref, lse_ref, do_ref, delta_ref, dk_ref, dv_ref,
        k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bars, q_full, do_full, free,
    ):  # fmt: skip
        kv_head, batch, wg = (lax.axis_index(x) for x in ("head", "batch", "wg"))
        key0 = lax.axis_index("k") * block  # the first blocks see the most queries

        def first_tile(k0):  # the first tile of queries that see key k0 or a later one
            return jnp.clip((k0 - offset) // bq, 0, q_tiles - 1) if causal else jnp.int32(0)

        base = first_tile(key0)
        steps = q_tiles - base  # of each query head
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        @pl.when(wg < wgs)
        def _compute():
            plgpu.set_max_registers(registers(wgs)[0], action="increase")
            k0 = key0 + wg * ROWS
            here = (batch, pl.ds(k0, ROWS), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[here], k_smem.at[wg], kv_bars.at[wg])
            plgpu.copy_gmem_to_smem(v_ref.at[here], v_smem.at[wg], kv_bars.at[wg])
            first = first_tile(k0) - base  # the queries before are all before this key
            unmasked = (k0 + ROWS - 1 - offset + bq - 1) // bq - base if causal else 0
            unmasked = jnp.clip(unmasked, first + 1, steps)
            plgpu.barrier_wait(kv_bars.at[wg])

            def step(dk_acc, dv_acc, r, n, masked):
                """Query tile base + r, step n of the block."""
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
                    if masked:
                        q0 = (base + r) * bq + offset
                        s = visible(s, q0, k0, causal=causal, transposed=True)
                    p = jnp.exp2(s * (scale * LOG2E) - column(lse_smem) * LOG2E)
                    plgpu.wgmma(dv_acc, p.astype(dtype), do_smem.at[slot])
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    ds = (p * (dp - column(delta_smem))).astype(dtype)
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # the statistics were read with plain loads
                    plgpu.barrier_arrive(free.at[slot])

                acc = plgpu.ACC((ROWS, bq), jnp.float32)
                pl.run_scoped(matmuls, acc, acc)

            def all_heads(dk_acc, dv_acc):
                @pl.loop(0, group)
                def _(g):
                    n0 = g * steps

                    @pl.loop(0, first)  # queries that only the block's earlier keys are seen by
                    def _(r):
                        plgpu.barrier_wait(q_full.at[slot_of(n0 + r)])
                        plgpu.barrier_wait(do_full.at[slot_of(n0 + r)])
                        plgpu.barrier_arrive(free.at[slot_of(n0 + r)])

                    do_step = functools.partial(step, dk_acc, dv_acc)
                    do_step(first, n0 + first, causal)
                    start = first + 1
                    if causal and (offset % ROWS or bq % ROWS):
                        pl.loop(start, unmasked)(lambda r: do_step(r, n0 + r, True))
                        start = unmasked
                    pl.loop(start, steps)(lambda r: do_step(r, n0 + r, False))

                return dk_acc[...], dv_acc[...]

            acc = plgpu.ACC((ROWS, d), jnp.float32)
            dk, dv = pl.run_scoped(all_heads, acc, acc)
            k_smem[wg] = (dk * scale).astype(dtype)
            v_smem[wg] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem.at[wg], dk_ref.at[here])
            plgpu.copy_smem_to_gmem(v_smem.at[wg], dv_ref.at[here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            plgpu.set_max_registers(registers(wgs)[1], action="decrease")

            @pl.loop(0, group)
            def _(g):
                head = kv_head * group + g

                @pl.loop(0, steps)
                def _(r):
                    n = g * steps + r
                    slot = slot_of(n)
                    at = pl.ds((base + r) * bq, bq)
                    rows, stats = (batch, at, head), (batch, head, at)
                    pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    for ref, index, smem, full in (
                        (q_ref, rows, q_smem, q_full),
                        (lse_ref, stats, lse_smem, q_full),
                        (do_ref, rows, do_smem, do_full),
                        (delta_ref, stats, delta_smem, do_full),
                    ):
                        plgpu.copy_gmem_to_smem(ref.at[index], smem.at[slot], full.at[slot])

    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    stat = plgpu.SMEM((stages, bq), jnp.float32)
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    like = jax.ShapeDtypeStruct(k.shape, dtype)
    return plgpu.kernel(
        attention_backward_dkv,
        out_type=(like, like),
        scratch_types=[
            smem(wgs, ROWS),
            smem(wgs, ROWS),
            smem(stages, bq),
            smem(stages, bq),
            stat,
            stat,
            plgpu.Barrier(num_arrivals=2, num_barriers=wgs),
            ring(num_arrivals=2),
            ring(num_arrivals=2),
            ring(num_arrivals=wgs),
        ],
        grid=(kv_heads, b, mosaic.cdiv(s_len, block)),
        grid_names=("head", "batch", "k"),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, k, v, lse, dout, delta)
