"""Rung 6: one warpgroup fetches, two multiply ("warp specialisation").

In rung 5 the warpgroup that multiplies also starts the copies, and only when it comes to it.  Here
a third warpgroup does nothing but start copies, as early as a stage is free.  Two others multiply:
the tile grows to 256 x 128, each takes 128 of its rows, and both use the same tile of b, so a byte
that comes to shared memory is used more often.

    warpgroup 2   | wait empty[s] | copy a (256, 64), b (128, 64) -> full[s] | next stage ...
    warpgroup 0   | wait full[s]  | wgmma of rows   0 .. 127 | arrive at empty[s] of the step before
    warpgroup 1   | wait full[s]  | wgmma of rows 128 .. 255 | arrive at empty[s] of the step before

full[s] counts two copies, empty[s] counts two warpgroups.

Counted: a step moves 48 KB for 4.2 MFLOP, where rung 5 moved 64 KB, so the L2 cache has a quarter
less to do.  0.34 ms inside the tiles; the start and the end of a tile still stop the tensor core,
now without another block on the SM to fill the gap: 3 us for each of 15.5 tiles an SM, 0.39 ms.

Measured: 0.50 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA

TILE, STEP = 128, 64  # of one warpgroup
STAGES = 4  # of 48 KB
LOADER = 2  # the warpgroup that starts the copies
SMALL = {"rows": 256, "columns": 128, "depth": 384}  # for the interpreter: six steps


def matmul(a, b, d):
    """a b^T + d, summed in float32."""
    rows, columns, steps = a.shape[0], b.shape[0], a.shape[1] // STEP

    def body(a_ref, b_ref, d_ref, y_ref, *, a_smem, b_smem, full, empty):
        wg = lax.axis_index("wg")
        row, of_b = lax.axis_index("row"), pl.ds(lax.axis_index("column") * TILE, TILE)
        stage_of = lambda i: lax.rem(i, jnp.int32(STAGES))

        @pl.when(wg == LOADER)
        def _():
            @pl.loop(0, steps)
            def _(i):
                stage, at = stage_of(i), pl.ds(i * STEP, STEP)
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(empty.at[stage]))
                of_a = pl.ds(row * 2 * TILE, 2 * TILE)
                plgpu.copy_gmem_to_smem(a_ref.at[of_a, at], a_smem.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(b_ref.at[of_b, at], b_smem.at[stage], full.at[stage])

        def multiply(acc):
            @pl.loop(0, steps)
            def _(i):
                stage = stage_of(i)
                plgpu.barrier_wait(full.at[stage])
                own = a_smem.at[stage, pl.ds(wg * TILE, TILE)]
                plgpu.wgmma(acc, own, b_smem.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(empty.at[stage_of(i - 1)]))

            return acc[...]

        @pl.when(wg < LOADER)
        def _():
            product = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))
            of_y = pl.ds((2 * row + wg) * TILE, TILE)
            mosaic.store(y_ref.at[of_y, of_b], product + mosaic.load(d_ref.at[of_y, of_b], WGMMA))

    tiles = lambda height: plgpu.SMEM(
        (STAGES, height, STEP), a.dtype, transforms=mosaic.wgmma_tiles(STEP, a.dtype)
    )
    return mosaic.kernel(
        body,
        name="matmul",
        out_type=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        scratch_types=dict(
            a_smem=tiles(2 * TILE),
            b_smem=tiles(TILE),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        **mosaic.grid(row=rows // (2 * TILE), column=columns // TILE),
        num_threads=3,
        thread_name="wg",
    )(a, b, d)
