"""Rung 4: TMA fetches the tiles.

TMA, the copy engine of an SM, copies a box of an array between global and shared memory, and
swizzles on the way.  A thread starts the copy in one instruction; nobody holds the tile in
registers, nobody computes addresses.  The copies of a and b arrive on one barrier, which counts to
two, and the warpgroup waits for it.

    copy a, copy b  ->  bar  ->  wgmma  ->  wait  ->  copy a, copy b  ->  ...

Counted: a step still does one thing after the other: about 1 us for the copies, 0.35 us for wgmma.
Two blocks on an SM fill each other's gaps in part: 32 x 4096 / 264 x 1.35 us = 0.67 ms.

Measured: 0.74 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA

TILE, STEP = 128, 64


def matmul(a, b, d):
    """a b^T + d, summed in float32."""
    (rows, depth), columns = a.shape, b.shape[0]

    def body(a_ref, b_ref, d_ref, y_ref, *, a_smem, b_smem, bar):
        of_a = pl.ds(lax.axis_index("row") * TILE, TILE)
        of_b = pl.ds(lax.axis_index("column") * TILE, TILE)

        def multiply(acc):
            @pl.loop(0, depth // STEP)
            def _(i):
                at = pl.ds(i * STEP, STEP)
                plgpu.copy_gmem_to_smem(a_ref.at[of_a, at], a_smem, bar)
                plgpu.copy_gmem_to_smem(b_ref.at[of_b, at], b_smem, bar)
                plgpu.barrier_wait(bar)
                plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
                plgpu.wgmma_wait(0)

            return acc[...]

        product = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))
        mosaic.store(y_ref.at[of_a, of_b], product + mosaic.load(d_ref.at[of_a, of_b], WGMMA))

    tile = plgpu.SMEM((TILE, STEP), a.dtype, transforms=mosaic.wgmma_tiles(STEP, a.dtype))
    return mosaic.kernel(
        body,
        name="matmul",
        out_type=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        scratch_types=dict(a_smem=tile, b_smem=tile, bar=plgpu.Barrier(num_arrivals=2)),
        **mosaic.grid(row=rows // TILE, column=columns // TILE),
    )(a, b, d)
