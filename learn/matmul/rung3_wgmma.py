"""Rung 3: the tensor core multiplies the tiles.

One instruction of a warpgroup, wgmma, multiplies tiles of a and b that lie in shared memory and
adds the product to an accumulator in the warpgroup's registers.  No thread loads an operand any
more.

    a_smem (128, 64)  |  wgmma  ->  acc (128, 128) += a_smem b_smem^T, 128 registers a thread
    b_smem (128, 64)  |

The tensor core wants the tiles in shared memory in an order that avoids bank conflicts: small tiles
of (8, 64), whose 16-byte pieces are exchanged ("swizzled").  `mosaic.wgmma_tiles` describes it, and
loads and stores then permute by themselves.  wgmma runs beside the threads ("asynchronously"):
commit_smem() makes their stores visible to it, and wgmma_wait(0) waits until it has finished,
before the next tiles overwrite these.

Counted: the tensor cores do 800 TFLOP/s in practice: 0.34 ms.  But they work only a part of the
time: a step loads 32 KB by 128 threads, waits for them, stores them, and only then multiplies.
With 1.5 us for that and two blocks an SM: 32 steps x 4096 tiles / 264 x 1.5 us = 0.75 ms.

Measured: 1.75 ms.  In this layout a load of a warp touches 8 rows, so it makes 8 requests for 128
bytes: 2048 for a step, which take an SM 2048 cycles, 1.2 us, for each of its two blocks.
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

    def body(a_ref, b_ref, d_ref, y_ref, *, a_smem, b_smem):
        of_a = pl.ds(lax.axis_index("row") * TILE, TILE)
        of_b = pl.ds(lax.axis_index("column") * TILE, TILE)

        def multiply(acc):
            @pl.loop(0, depth // STEP)
            def _(i):
                at = pl.ds(i * STEP, STEP)
                a_smem[...] = mosaic.read(a_ref.at[of_a, at], WGMMA)
                b_smem[...] = mosaic.read(b_ref.at[of_b, at], WGMMA)
                plgpu.commit_smem()
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
        scratch_types=dict(a_smem=tile, b_smem=tile),
        **mosaic.grid(row=rows // TILE, column=columns // TILE),
    )(a, b, d)
