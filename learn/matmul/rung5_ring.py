"""Rung 5: a ring of buffers, so that copies and products overlap.

Three stages of 32 KB: while the tensor core multiplies one, TMA fills the others.

    stage 0   | step 0: wgmma      | step 3 arriving ...
    stage 1   | step 1 arriving    | step 1: wgmma       | step 4 arriving ...
    stage 2   | step 2 arriving                          | step 2: wgmma

A wgmma also overlaps the next one's start: wgmma_wait(1) waits until at most one is under way, so
the product of the step before has been added, and its stage can be filled again.  With
wgmma_wait(0) the tensor core would stand still between two steps.

Counted: the tensor core is the limit inside a tile, 0.35 us a step, 11 us a tile: 0.34 ms.  Outside
it has nothing to do: at the start of a tile while the first copies come, about 1 us, and at its end
while the warpgroup adds d and stores y, about 2 us.  The other block on the SM fills most of that;
with 0.5 us left for each of 31 tiles an SM: 0.36 ms.

Measured: 0.57 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA

TILE, STEP = 128, 64
STAGES = 3  # of 32 KB: two blocks fit an SM
SMALL = {"rows": 128, "columns": 128, "depth": 384}  # for the interpreter: six steps


def matmul(a, b, d):
    """a b^T + d, summed in float32."""
    rows, columns, steps = a.shape[0], b.shape[0], a.shape[1] // STEP

    def body(a_ref, b_ref, d_ref, y_ref, *, a_smem, b_smem, bars):
        of_a = pl.ds(lax.axis_index("row") * TILE, TILE)
        of_b = pl.ds(lax.axis_index("column") * TILE, TILE)
        stage_of = lambda i: lax.rem(i, jnp.int32(STAGES))

        def fetch(i):
            stage, at = stage_of(i), pl.ds(i * STEP, STEP)
            plgpu.copy_gmem_to_smem(a_ref.at[of_a, at], a_smem.at[stage], bars.at[stage])
            plgpu.copy_gmem_to_smem(b_ref.at[of_b, at], b_smem.at[stage], bars.at[stage])

        def multiply(acc):
            @pl.loop(0, steps)
            def _(i):
                stage = stage_of(i)
                plgpu.barrier_wait(bars.at[stage])
                plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                # The step before is done, so its stage is free.
                pl.when((i > 0) & (i - 1 + STAGES < steps))(lambda: fetch(i - 1 + STAGES))

            return acc[...]

        for i in range(min(STAGES, steps)):
            fetch(jnp.int32(i))
        product = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))
        mosaic.store(y_ref.at[of_a, of_b], product + mosaic.load(d_ref.at[of_a, of_b], WGMMA))

    tiles = plgpu.SMEM((STAGES, TILE, STEP), a.dtype, transforms=mosaic.wgmma_tiles(STEP, a.dtype))
    return mosaic.kernel(
        body,
        name="matmul",
        out_type=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        scratch_types=dict(
            a_smem=tiles,
            b_smem=tiles,
            bars=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        **mosaic.grid(row=rows // TILE, column=columns // TILE),
    )(a, b, d)
