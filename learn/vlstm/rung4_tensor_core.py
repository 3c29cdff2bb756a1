"""Rung 4: the tensor core, TMA and two stages.

Both products of a pair of tiles are matrix products, so wgmma does them.  The weights never leave
the registers: the accumulator of q k^T has the layout that wgmma wants for its left operand.

    q_smem (64, DQK)                         loaded once
    k_smem[stage] (64, DQK)  |  wgmma  ->  S  --* D-->  P in registers, bfloat16
    v_smem[stage] (64, DV)   |  wgmma  ->  h += P v_smem[stage], 64 registers a thread

The rows of P are the queries again, as no key's weights must be neighbours any more; the row sums
then add the numbers of four lanes.  k and v come by TMA into two stages: while one tile is in use,
the next one arrives.  approx_math lets exp2 be one instruction; its error is far below the rounding
of P.

Counted: 309 GFLOP at 800 TFLOP/s are 386 us.  The exponentials, one for each pair of positions, are
16 a cycle for each SM: 220 us.  A block does one after the other, and the three blocks that fit an
SM overlap them only in part: 0.6 ms, 30 times less than rung 3.  At T = 2048 it would be 0.15 ms.
The time still grows with T^2.

Measured: 671 us, 216 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.vlstm import TILE, buffer, weights
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, WGMMA

STAGES = 2
SMALL = {"T": 320}  # for the interpreter: five tiles


def vlstm(q, k, v, i, f):
    """h for q, k (B, T, NH, DQK), v (B, T, NH, DV), and the gates i, f (B, T, NH)."""
    (batch, length, heads, dqk), dv = q.shape, v.shape[-1]

    def body(q_ref, k_ref, v_ref, row_ref, col_ref, least_ref, h_ref, *, q_smem, k_smem, v_smem,
             q_bar, bars):  # fmt: skip
        b, head = mosaic.divide(lax.axis_index("head"), heads)
        tile = length // TILE - 1 - lax.axis_index("tile")  # the longest first
        rows, stage_of = pl.ds(tile * TILE, TILE), lambda n: lax.rem(n, jnp.int32(STAGES))

        def fetch(n):
            stage, keys = stage_of(n), pl.ds(n * TILE, TILE)
            plgpu.copy_gmem_to_smem(k_ref.at[b, keys, head], k_smem.at[stage], bars.at[stage])
            plgpu.copy_gmem_to_smem(v_ref.at[b, keys, head], v_smem.at[stage], bars.at[stage])

        def multiply_qk(stage, acc):
            plgpu.wgmma(acc, q_smem, k_smem.at[stage].transpose((1, 0)))
            return acc[...]  # waits for wgmma

        def add_tile(acc, n, total, on_diagonal=False):
            stage = stage_of(n)
            col = mosaic.load(col_ref.at[b, head, pl.ds(n * TILE, TILE)], COL)
            d = jnp.exp2(mosaic.along(row, (TILE, TILE), 0) + mosaic.along(col, (TILE, TILE), 1))
            plgpu.barrier_wait(bars.at[stage])
            scores = plgpu.ACC((TILE, TILE), jnp.float32)
            p = pl.run_scoped(lambda acc: multiply_qk(stage, acc), scores) * d
            if on_diagonal:
                query, key = (
                    plgpu.broadcasted_iota(jnp.int32, p.shape, a, layout=WGMMA) for a in (0, 1)
                )
                p = jnp.where(key <= query, p, 0)
            plgpu.wgmma(acc, p.astype(v.dtype), v_smem.at[stage])
            plgpu.wgmma_wait(0)
            pl.when(n + STAGES <= tile)(lambda: fetch(n + STAGES))
            return total + jnp.sum(p, axis=1)

        def add_tiles(acc):
            add = lambda n, total: add_tile(acc, n, total)
            total = lax.fori_loop(0, tile, add, mosaic.zeros((TILE,), ROW))
            total = add_tile(acc, tile, total, on_diagonal=True)
            return acc[...], total

        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem, q_bar)
        for n in range(STAGES):
            pl.when(n <= tile)(lambda n=n: fetch(jnp.int32(n)))
        row = mosaic.load(row_ref.at[b, head, rows], ROW)
        least = mosaic.load(least_ref.at[b, head, rows], ROW)
        plgpu.barrier_wait(q_bar)
        h, total = pl.run_scoped(add_tiles, plgpu.ACC((TILE, dv), jnp.float32))
        norm = jnp.maximum(jnp.abs(total), least)
        mosaic.store(h_ref.at[b, rows, head], h / mosaic.along(norm, h.shape, 0))

    tile = lambda *shape: buffer(q.dtype, *shape)
    w = weights(i, f, length, dqk**-0.5)  # one chunk, the whole sequence
    return mosaic.kernel(
        body,
        name="vlstm",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(
            q_smem=tile(TILE, dqk),
            k_smem=tile(STAGES, TILE, dqk),
            v_smem=tile(STAGES, TILE, dv),
            q_bar=plgpu.Barrier(),
            bars=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(head=batch * heads, tile=length // TILE),
    )(q, k, v, w.row[:, :, 0], w.col[:, :, 0], w.least[:, :, 0])
