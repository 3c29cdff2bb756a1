"""Rung 6: four warps for each row, for wide rows.

A warp that holds a row of 4096 columns needs 128 registers a lane for it.  Here the four warps of
the block share a row, so a lane holds a quarter of that.  Registers hold (4, block) arrays, one
line for each warp, and the four lines are neighbours in the same row:

    line 0 (warp 0)   | row r, block 4 c     |
    line 1 (warp 1)   | row r, block 4 c + 1 |       c = 0, 1, ...: the chunks of a row
    line 2 (warp 2)   | row r, block 4 c + 2 |
    line 3 (warp 3)   | row r, block 4 c + 3 |

The mean now takes two steps: shuffles within each warp (the sum over axis 1), then the four warps
add their numbers through shared memory (the sum over axis 0), which makes them wait for each other.
Everything else is rung 5; a tile has fewer rows, so more tiles fit the ring.

Counted: the bytes, so 34 us at 32768 x 768 and 91 us at 16384 x 4096.  At 4096 columns a row costs
32 registers a lane instead of 128, and a tile of two rows has 16 KB instead of 32, so two blocks
of 80 KB fit an SM where rung 5 fits one of 128: one computes while the other waits.  At 768 columns
a block of a row has only 64 columns, a lane loads 4 bytes at a time, and each row pays for four
waits: there rung 4 should stay ahead.

Measured: 43 us and 100 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

ROWS = 2  # of a tile
SLOTS = 3  # tiles of a block in shared memory
SMALL = {"rows": 24, "cols": 768}  # for the interpreter: six tiles a block, of three chunks
BLOCKS = 4 * 132  # at most: four for each SM of an H100 (two fit at 4096 columns)
WARPS = 4  # that share a row


def layer_norm(x, weight, bias, eps=1e-5):
    """y = (x - mean) r weight + bias for x (rows, cols); weight and bias (cols,) in float32."""
    rows, cols = x.shape
    block = next(b for b in (256, 128, 64) if cols % (WARPS * b) == 0)  # columns of a line
    layout = mosaic.warp_rows(block // 32)
    chunks, tiles = range(cols // block // WARPS), rows // ROWS
    programs = min(tiles, BLOCKS)

    def normalise(tile, w_smem, b_smem):
        """Overwrites a tile in shared memory, row by row."""
        row_mean = lambda terms: jnp.sum(jnp.sum(sum(terms), axis=1)) / cols
        lines = [pl.ds(c * WARPS, WARPS) for c in chunks]
        for row in range(ROWS):
            data = [mosaic.load(tile.at[row, here], layout) for here in lines]
            mean = row_mean(data)
            data = [x - mean for x in data]
            r = lax.rsqrt(row_mean([jnp.square(x) for x in data]) + eps)
            for x, here in zip(data, lines, strict=True):
                w, b = (mosaic.load(a.at[here], layout) for a in (w_smem, b_smem))
                mosaic.store(tile.at[row, here], x * r * w + b)

    def body(x_ref, w_ref, b_ref, y_ref, *, x_smem, w_smem, b_smem, bars, weight_bar):
        program = lax.axis_index("program")
        steps = lax.div(tiles - 1 - program, jnp.int32(programs)) + 1
        slot_of = lambda i: lax.rem(i, jnp.int32(SLOTS))
        tile_of = lambda ref, i: ref.at[pl.ds((program + i * programs) * ROWS, ROWS)]

        def fetch(i):  # starts a copy; it arrives on the slot's barrier
            slot = slot_of(i)
            plgpu.copy_gmem_to_smem(tile_of(x_ref, i), x_smem.at[slot], bars.at[slot])

        plgpu.copy_gmem_to_smem(w_ref, w_smem, weight_bar)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, weight_bar)
        for i in range(SLOTS - 1):  # fill all slots but one
            pl.when(i < steps)(lambda i=i: fetch(jnp.int32(i)))
        plgpu.barrier_wait(weight_bar)

        @pl.loop(0, steps)
        def _(i):
            slot = slot_of(i)
            plgpu.barrier_wait(bars.at[slot])
            normalise(x_smem.at[slot], w_smem, b_smem)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_smem.at[slot], tile_of(y_ref, i))

            @pl.when(i + (SLOTS - 1) < steps)
            def _():  # the slot of the step before is free once its result has been read
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(i + (SLOTS - 1))

        plgpu.wait_smem_to_gmem(0)

    split = lambda a: a.reshape(*a.shape[:-1], -1, block)
    return mosaic.kernel(
        body,
        name="layer_norm",
        out_type=jax.ShapeDtypeStruct(split(x).shape, x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            x_smem=plgpu.SMEM((SLOTS, ROWS, cols // block, block), x.dtype),
            w_smem=plgpu.SMEM((cols // block, block), weight.dtype),
            b_smem=plgpu.SMEM((cols // block, block), bias.dtype),
            bars=plgpu.Barrier(num_barriers=SLOTS),
            weight_bar=plgpu.Barrier(num_arrivals=2),
        ),
    )(split(x), split(weight), split(bias)).reshape(x.shape)
