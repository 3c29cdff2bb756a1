"""Rung 7: blocks that stay, in an order that the L2 cache likes.

One block for each SM takes every 132nd tile.  The ring never stops: while the two computing
warpgroups add d and store y of one tile, the loading one already fills the stages for the next.
y goes to shared memory first, from where TMA writes it in whole lines while the next tile begins.

    warpgroup 2   | steps of tile 0 | steps of tile 1, until the ring is full | ...
    warpgroup 0   | wgmma, tile 0            | add d, store | wgmma, tile 1 ...
    warpgroup 1   | wgmma, tile 0            | add d, store | wgmma, tile 1 ...

The 132 tiles that run at the same time should share rows of a and b, because these then come from
the L2 cache.  So tiles are numbered down groups of four rows of tiles: 132 tiles are 4 x 33, and
need 4 x 256 rows of a and 33 x 128 of b, 21 MB.  Row by row they would need 3 and 64: 37 MB.

Counted: 0.34 ms, and 2 us for each of 15.5 tiles an SM, while both computing warpgroups are at the
end of a tile and the tensor core stands still: 0.37 ms.

Measured: 0.48 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA

TILE, STEP = 128, 64  # of one warpgroup
STAGES = 3  # of 48 KB; y takes 64 KB
LOADER = 2  # the warpgroup that starts the copies
GROUP = 4  # rows of tiles in a group
BLOCKS = 132  # SMs of an H100
SMALL = {"rows": 512, "columns": 256, "depth": 256}  # for the interpreter: two tiles a block


def matmul(a, b, d):
    """a b^T + d, summed in float32."""
    rows, columns, steps = a.shape[0] // (2 * TILE), b.shape[0] // TILE, a.shape[1] // STEP
    blocks, group = min(BLOCKS, rows * columns), min(GROUP, rows)

    def place(i):  # (row, column) of the block's i-th tile
        tile = lax.axis_index("block") + i * blocks
        above, rest = mosaic.divide(tile, group * columns)
        column, row = mosaic.divide(rest, group)
        return above * group + row, column

    def body(a_ref, b_ref, d_ref, y_ref, *, a_smem, b_smem, y_smem, full, empty):
        wg = lax.axis_index("wg")
        tiles = lax.div(rows * columns - 1 - lax.axis_index("block"), jnp.int32(blocks)) + 1
        stage_of = lambda step: lax.rem(step, jnp.int32(STAGES))

        @pl.when(wg == LOADER)
        def _():
            @pl.loop(0, tiles * steps)
            def _(step):  # of all tiles, one after the other
                stage, (i, k) = stage_of(step), mosaic.divide(step, steps)
                (row, column), at = place(i), pl.ds(k * STEP, STEP)
                of_a, of_b = pl.ds(row * 2 * TILE, 2 * TILE), pl.ds(column * TILE, TILE)
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(empty.at[stage]))
                plgpu.copy_gmem_to_smem(a_ref.at[of_a, at], a_smem.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(b_ref.at[of_b, at], b_smem.at[stage], full.at[stage])

        def multiply(i, acc):
            @pl.loop(0, steps)
            def _(k):
                step = i * steps + k
                stage = stage_of(step)
                plgpu.barrier_wait(full.at[stage])
                own = a_smem.at[stage, pl.ds(wg * TILE, TILE)]
                plgpu.wgmma(acc, own, b_smem.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[stage_of(step - 1)]))

            return acc[...]  # waits for the last wgmma

        @pl.when(wg < LOADER)
        def _():
            @pl.loop(0, tiles)
            def _(i):
                acc = plgpu.ACC((TILE, TILE), jnp.float32)
                product = pl.run_scoped(lambda acc: multiply(i, acc), acc)
                plgpu.barrier_arrive(empty.at[stage_of((i + 1) * steps - 1)])
                row, column = place(i)
                at = pl.ds((2 * row + wg) * TILE, TILE), pl.ds(column * TILE, TILE)
                y = product + mosaic.load(d_ref.at[at], WGMMA)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left y_smem
                y_smem[wg] = y.astype(y_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(y_smem.at[wg], y_ref.at[at])

            plgpu.wait_smem_to_gmem(0)

    smem = lambda count, *shape: plgpu.SMEM(
        (count, *shape), a.dtype, transforms=mosaic.wgmma_tiles(shape[-1], a.dtype)
    )
    return mosaic.kernel(
        body,
        name="matmul",
        out_type=jax.ShapeDtypeStruct(d.shape, a.dtype),
        scratch_types=dict(
            a_smem=smem(STAGES, 2 * TILE, STEP),
            b_smem=smem(STAGES, TILE, STEP),
            y_smem=smem(2, TILE, TILE),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        **mosaic.grid(block=blocks),
        num_threads=3,
        thread_name="wg",
    )(a, b, d)
