"""Rung 5: the softmax runs under matmuls, in two ways ("ping-pong", FlashAttention-3).

In rung 4 both warpgroups may compute their softmax at the same time, without work for the tensor
core.  Now a warpgroup issues S of the next tile together with O += P V of this one, and begins with
the softmax as soon as S is there (wait_n=1), while P V still runs.  And the two issue their matmuls
in turns: the tensor core works for one of them while the other one computes its softmax.

    warpgroup 0   | S1, P0 V0 issued | softmax of S1 | wait for the turn | S2, P1 V1 issued | ...
    warpgroup 1   | softmax ...      | S1, P0 V0 issued | softmax of S1 | wait for the turn ...

The tiles go from the diagonal down to key 0 now, so the first two steps have the mask.

Counted: 128 x 128 scores take 1.4 us of the tensor core; the softmax, 0.9 us, is hidden.  What is
not: the first S and the last P V of a block, some 3 us for each of 1024 blocks: 0.20 ms.

Measured: 296 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E, ROW, WGMMA, along

TILE, STAGES, LOADER, LOWEST = 64, 4, 2, -1e30  # as in rung 4
START = -1e20  # m before any key: far above LOWEST, so a tile that is hidden as a whole has P = 0
SMALL = {"time": 384}  # for the interpreter: up to six steps


def body(q_ref, k_ref, v_ref, o_ref, *, q_smem, k_smem, v_smem, q_in, k_in, v_in, free, turn):
    rows, d = q_ref.shape[1] // (2 * TILE), q_ref.shape[3]
    wg, batch, head = (lax.axis_index(axis) for axis in ("wg", "batch", "head"))
    first = 2 * (rows - 1 - lax.axis_index("row"))  # tile of the block's first query
    tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]
    stage_of = lambda n: lax.rem(n, jnp.int32(STAGES))
    s_acc, o_acc = (plgpu.ACC((TILE, cols), jnp.float32) for cols in (TILE, d))

    @pl.when(wg == LOADER)
    def _():
        plgpu.barrier_arrive(turn.at[0])  # warpgroup 0 begins
        for i in range(2):
            plgpu.copy_gmem_to_smem(tile_of(q_ref, first + i), q_smem.at[i], q_in.at[i])

        @pl.loop(0, first + 2)
        def _(n):
            stage, i = stage_of(n), first + 1 - n
            pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
            plgpu.copy_gmem_to_smem(tile_of(k_ref, i), k_smem.at[stage], k_in.at[stage])
            plgpu.copy_gmem_to_smem(tile_of(v_ref, i), v_smem.at[stage], v_in.at[stage])

    def scores(n, before, s_acc):
        """S of step n; before(): issues P V of the step before."""
        plgpu.barrier_wait(k_in.at[stage_of(n)])
        plgpu.barrier_wait(turn.at[wg])
        plgpu.wgmma(s_acc, q_smem.at[wg], k_smem.at[stage_of(n)].transpose((1, 0)))
        under_way = before()
        plgpu.barrier_arrive(turn.at[1 - wg])
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=under_way)

    def softmax(s, n, diagonal, m, l):
        if diagonal:
            iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
            s = jnp.where(iota(1) + (1 - n) * TILE <= iota(0) + wg * TILE, s, LOWEST)
        factor = d**-0.5 * LOG2E
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * factor)
        p, alpha = jnp.exp2(s * factor - along(m_new, s.shape, 0)), jnp.exp2(m - m_new)
        return p.astype(q_ref.dtype), m_new, l * alpha + jnp.sum(p, axis=1), alpha

    def times_values(o_acc, n, p):
        plgpu.barrier_wait(v_in.at[stage_of(n)])
        plgpu.wgmma(o_acc, p, v_smem.at[stage_of(n)])
        return 1

    def step(o_acc, diagonal, n, carry):
        p, m, l = carry
        before = functools.partial(times_values, o_acc, n - 1, p)
        s = pl.run_scoped(functools.partial(scores, n, before), s_acc)
        p, m, l, alpha = softmax(s, n, diagonal, m, l)
        o = o_acc[...]  # waits for P V of the step before
        plgpu.barrier_arrive(free.at[stage_of(n - 1)])
        o_acc[...] = o * along(alpha, o.shape, 0)
        return p, m, l

    def attend(o_acc):
        vector = lambda value: plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)
        s = pl.run_scoped(functools.partial(scores, jnp.int32(0), lambda: 0), s_acc)
        carry = softmax(s, 0, True, vector(START), vector(0))[:3]
        carry = step(o_acc, True, jnp.int32(1), carry)
        p, _, l = lax.fori_loop(2, first + 2, functools.partial(step, o_acc, False), carry)
        times_values(o_acc, first + 1, p)
        return o_acc[...] * along(1 / l, (TILE, d), 0)

    @pl.when(wg < LOADER)
    def _():
        plgpu.barrier_wait(q_in.at[wg])
        mosaic.store(tile_of(o_ref, first + wg), pl.run_scoped(attend, o_acc))


def attention(q, k, v):
    """O (B, T, H, D) for q, k, v (B, T, H, D)."""
    b, t, h, d = q.shape
    transforms = mosaic.wgmma_tiles(d, q.dtype)
    tiles = lambda count: plgpu.SMEM((count, TILE, d), q.dtype, transforms=transforms)
    ring = functools.partial(plgpu.Barrier, num_barriers=STAGES)
    return mosaic.kernel(
        body,
        name="attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(q_smem=tiles(2), k_smem=tiles(STAGES), v_smem=tiles(STAGES),
                           q_in=plgpu.Barrier(num_barriers=2), k_in=ring(), v_in=ring(),
                           free=ring(num_arrivals=2), turn=plgpu.Barrier(num_barriers=2)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=3, thread_name="wg",
        **mosaic.grid(batch=b, head=h, row=t // (2 * TILE)),
    )(q, k, v)  # fmt: skip
