"""Rung 4: a ring, one warpgroup that fetches, and two that compute, longest blocks first.

Rungs 5 and 6 of matmul, for attention.  A block has 128 queries, 64 for each of two warpgroups; a
third one fills a ring with tiles of 64 keys and values, which both use.  K and V have separate
barriers, so that S can start before the values have arrived.

    warpgroup 2   | wait free[s] | copy k -> k_in[s], v -> v_in[s] | next stage ...
    warpgroup 0   | wait k_in[s]: S, softmax | wait v_in[s]: O += P V | arrive at free[s]
    warpgroup 1   | the same for the other 64 queries

The keys of the diagonal are two tiles now, and both warpgroups mask both: for the first one the
last tile is hidden as a whole, which adds P = 0.  And since blocks with late queries take up to 32
times as long as the first ones, they start first: short blocks then fill the gaps at the end.

Counted: a byte of K and V serves 128 queries instead of 64, and nobody waits for copies.  128 x 128
scores take 1.4 us of the tensor core and, with two warpgroups that seldom meet in it, 0.9 us in
which nobody multiplies: 0.29 ms.

Measured: 349 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E, ROW, WGMMA, along

TILE = 64  # queries of a warpgroup, keys of a step
STAGES = 4  # of 32 KB
LOADER = 2  # the warpgroup that starts the copies
LOWEST = -1e30
SMALL = {"time": 384}  # for the interpreter: up to six steps


def attention(q, k, v):
    """O (B, T, H, D) for q, k, v (B, T, H, D)."""
    b, t, h, d = q.shape
    rows = t // (2 * TILE)  # of blocks

    def body(q_ref, k_ref, v_ref, o_ref, *, q_smem, k_smem, v_smem, q_in, k_in, v_in, free):
        wg, batch, head = (lax.axis_index(axis) for axis in ("wg", "batch", "head"))
        first = 2 * (rows - 1 - lax.axis_index("row"))  # tile of the block's first query
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]
        stage_of = lambda i: lax.rem(i, jnp.int32(STAGES))

        @pl.when(wg == LOADER)
        def _():
            for i in range(2):
                plgpu.copy_gmem_to_smem(tile_of(q_ref, first + i), q_smem.at[i], q_in.at[i])

            @pl.loop(0, first + 2)
            def _(i):
                stage = stage_of(i)
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
                plgpu.copy_gmem_to_smem(tile_of(k_ref, i), k_smem.at[stage], k_in.at[stage])
                plgpu.copy_gmem_to_smem(tile_of(v_ref, i), v_smem.at[stage], v_in.at[stage])

        def step(o_acc, diagonal, i, carry):
            (m, l), stage = carry, stage_of(i)
            plgpu.barrier_wait(k_in.at[stage])

            def scores(acc):
                plgpu.wgmma(acc, q_smem.at[wg], k_smem.at[stage].transpose((1, 0)))
                return acc[...]

            s = pl.run_scoped(scores, plgpu.ACC((TILE, TILE), jnp.float32))
            if diagonal:
                iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
                s = jnp.where(iota(1) + i * TILE <= iota(0) + (first + wg) * TILE, s, LOWEST)
            factor = d**-0.5 * LOG2E
            m_new = jnp.maximum(m, jnp.max(s, axis=1) * factor)
            p, alpha = jnp.exp2(s * factor - along(m_new, s.shape, 0)), jnp.exp2(m - m_new)
            l = l * alpha + jnp.sum(p, axis=1)
            o_acc[...] = o_acc[...] * along(alpha, (TILE, d), 0)
            plgpu.barrier_wait(v_in.at[stage])
            plgpu.wgmma(o_acc, p.astype(q.dtype), v_smem.at[stage])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[stage])
            return m_new, l

        def attend(o_acc):
            vector = lambda value: plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)
            whole, part = (functools.partial(step, o_acc, diagonal) for diagonal in (False, True))
            carry = lax.fori_loop(0, first, whole, (vector(LOWEST), vector(0)))
            _, l = part(first + 1, part(first, carry))
            return o_acc[...] * along(1 / l, (TILE, d), 0)

        @pl.when(wg < LOADER)
        def _():
            plgpu.barrier_wait(q_in.at[wg])
            o = pl.run_scoped(attend, plgpu.ACC((TILE, d), jnp.float32))
            mosaic.store(tile_of(o_ref, first + wg), o)

    tiles = lambda count: plgpu.SMEM(
        (count, TILE, d), q.dtype, transforms=mosaic.wgmma_tiles(d, q.dtype)
    )
    ring = functools.partial(plgpu.Barrier, num_barriers=STAGES)
    return mosaic.kernel(
        body,
        name="attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(q_smem=tiles(2), k_smem=tiles(STAGES), v_smem=tiles(STAGES),
                           q_in=plgpu.Barrier(num_barriers=2), k_in=ring(), v_in=ring(),
                           free=ring(num_arrivals=2)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        num_threads=3,
        thread_name="wg",
        **mosaic.grid(batch=b, head=h, row=rows),
    )(q, k, v)  # fmt: skip
