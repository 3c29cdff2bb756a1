"""Rung 5: blocks that stay, and a ring of buffers that TMA fills ahead of them.

In rung 4 a block loads, computes, stores and ends; while it computes it loads nothing, and other
blocks must fill the gap.  Here a block stays ("persistent") and takes every `programs`-th tile of
four rows.  TMA, the copy engine of an SM, brings the tiles to shared memory: a thread starts a copy
in one instruction and goes on.  A barrier says when the copy has arrived.

    slot 0   | tile i                 wait for bars[0], compute in place, copy back |
    slot 1   | tile i + programs      arriving on bars[1]                           |
    slot 2   | tile i + 2 programs    arriving on bars[2]                           |

The weights come to shared memory once for all tiles of the block.  Three rules of TMA: a copy box
has at most 256 elements along an axis, so a row is seen as (cols / 256, 256); commit_smem() comes
between writes of threads and a copy that reads them; wait_smem_to_gmem() comes before a buffer
whose copy back may still run is filled again.

Counted: still 34 us, as the bytes are the same.  What changes is what is on the way while a block
computes.  At 768 columns nine blocks of rung 4 fit an SM (56 registers a thread), so eight others
load meanwhile, and little is to be gained.  At 4096 columns three fit (168 registers), and when all
of them compute, nothing is on the way; here two tiles of 32 KB are.

Measured: 38 us, and 102 us at 16384 x 4096 where 91 us were counted: no gain.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

ROWS = 4  # of a tile: one for each warp
SLOTS = 3  # tiles of a block in shared memory
SMALL = {"rows": 40}  # for the interpreter: five tiles for each of two blocks
BLOCKS = 4 * 132  # at most: four for each SM of an H100 (one fits at 4096 columns)
STEP = 256  # columns of one load of a warp: 16 bytes of bfloat16 for each lane
LAYOUT = mosaic.warp_rows(STEP // 32)
SHAPE = (ROWS, STEP)


def layer_norm(x, weight, bias, eps=1e-5):
    """y = (x - mean) r weight + bias for x (rows, cols); weight and bias (cols,) in float32."""
    rows, cols = x.shape
    chunks, tiles = range(cols // STEP), rows // ROWS
    programs = min(tiles, BLOCKS)

    def normalise(tile, w_smem, b_smem):
        """Overwrites a tile in shared memory: rung 4 between other places."""
        row_mean = lambda terms: jnp.sum(sum(terms), axis=1) / cols
        data = [mosaic.load(tile.at[:, c], LAYOUT) for c in chunks]
        mean = row_mean(data)
        data = [x - mosaic.along(mean, SHAPE, 0) for x in data]
        r = lax.rsqrt(row_mean([jnp.square(x) for x in data]) + eps)
        for c in chunks:
            w, b = (mosaic.load(a.at[c], LAYOUT.reduce(0)) for a in (w_smem, b_smem))
            y = data[c] * mosaic.along(r, SHAPE, 0) * mosaic.along(w, SHAPE, 1)
            mosaic.store(tile.at[:, c], y + mosaic.along(b, SHAPE, 1))

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

    split = lambda a: a.reshape(*a.shape[:-1], -1, STEP)
    return mosaic.kernel(
        body,
        name="layer_norm",
        out_type=jax.ShapeDtypeStruct(split(x).shape, x.dtype),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            x_smem=plgpu.SMEM((SLOTS, ROWS, len(chunks), STEP), x.dtype),
            w_smem=plgpu.SMEM((len(chunks), STEP), weight.dtype),
            b_smem=plgpu.SMEM((len(chunks), STEP), bias.dtype),
            bars=plgpu.Barrier(num_barriers=SLOTS),
            weight_bar=plgpu.Barrier(num_arrivals=2),
        ),
    )(split(x), split(weight), split(bias)).reshape(x.shape)
