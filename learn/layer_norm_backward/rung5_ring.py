"""Rung 5: a ring of tiles of x and dy, filled by TMA ahead of the block.

What rung 4 lacks is work for memory while a block computes.  As in rung 5 of layer norm, TMA brings
the next tiles to shared memory meanwhile.  A tile is now two arrays, and both copies arrive on the
same barrier, which therefore counts to two.  dx overwrites x in its buffer.

    slot 0   | x, dy of tile i                wait for bars[0], sums and dx, copy dx back |
    slot 1   | x, dy of tile i + programs     arriving on bars[1]                         |
    slots 2 and 3: the tiles after that

n and g are not kept in registers between the two passes over a tile: the second pass reads them
again from shared memory, which leaves registers for the sums.

Counted: the bytes of rung 4, 52 us; on the way now are 2 blocks x 3 tiles x 12 KB = 72 KB an SM,
all the time.

Measured: 64 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

ROWS, STEP = 4, 256
SHAPE = (ROWS, STEP)
LAYOUT = mosaic.warp_rows(8)
LINES = plgpu.SMEM((ROWS, STEP), jnp.float32)
BLOCKS = 2 * 132  # two for each SM of an H100
SLOTS = 4  # tiles of a block in shared memory
SMALL = {"rows": 40}  # for the interpreter: five tiles for each of two blocks


def layer_norm_backward(x, weight, dy, mean, r):
    """(dx, dweight, dbias) for x, dy (rows, cols); mean, r (rows,) come from the forward pass."""
    rows, cols = x.shape
    chunks, programs = range(cols // STEP), min(BLOCKS, rows // ROWS)
    tile = plgpu.SMEM((SLOTS, ROWS, len(chunks), STEP), x.dtype)
    split = lambda a: a.reshape(*a.shape[:-1], -1, STEP)
    partial = jax.ShapeDtypeStruct((programs, len(chunks), STEP), weight.dtype)
    dx, *sums = mosaic.kernel(
        body,
        name="layer_norm_backward",
        out_type=[jax.ShapeDtypeStruct(split(x).shape, x.dtype), partial, partial],
        grid=(programs,),
        grid_names=("program",),
        scratch_types=dict(
            x_smem=tile,
            dy_smem=tile,
            bars=plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            lines_smem=LINES,
        ),
    )(split(x), split(weight), split(dy), mean, r)
    return dx.reshape(x.shape), *(total.sum(axis=0).reshape(cols) for total in sums)


def body(
    x_ref, w_ref, dy_ref, mean_ref, r_ref, dx_ref, dweight_ref, dbias_ref,
    *, x_smem, dy_smem, bars, lines_smem,
):  # fmt: skip
    """dx of this program's tiles, and their sums for dweight and dbias."""
    chunks, program, programs = range(x_ref.shape[1]), lax.axis_index("program"), dbias_ref.shape[0]
    steps = lax.div(x_ref.shape[0] // ROWS - 1 - program, jnp.int32(programs)) + 1
    slot_of = lambda i: lax.rem(i, jnp.int32(SLOTS))
    rows_of = lambda ref, i: ref.at[pl.ds((program + i * programs) * ROWS, ROWS)]
    along_rows = lambda v: mosaic.along(v, SHAPE, 0)  # a number for each row
    row_mean = lambda terms: along_rows(jnp.sum(sum(terms), axis=1) / (len(chunks) * STEP))

    def fetch(i):
        slot = slot_of(i)
        plgpu.copy_gmem_to_smem(rows_of(x_ref, i), x_smem.at[slot], bars.at[slot])
        plgpu.copy_gmem_to_smem(rows_of(dy_ref, i), dy_smem.at[slot], bars.at[slot])

    def step(i, sums):
        slot = slot_of(i)
        stats = (mosaic.load(rows_of(a, i), LAYOUT.reduce(1)) for a in (mean_ref, r_ref))
        mean, r = map(along_rows, stats)

        def operands(c):  # n, g, dy
            n = (mosaic.load(x_smem.at[slot, :, c], LAYOUT) - mean) * r
            dy = mosaic.load(dy_smem.at[slot, :, c], LAYOUT)
            w = mosaic.load(w_ref.at[c], LAYOUT.reduce(0))
            return n, dy * mosaic.along(w, SHAPE, 1), dy

        plgpu.barrier_wait(bars.at[slot])
        terms = [operands(c) for c in chunks]
        mean_g, mean_gn = row_mean([g for _, g, _ in terms]), row_mean([g * n for n, g, _ in terms])
        sums = [list(sum_) for sum_ in sums]
        for c in chunks:
            n, g, dy = operands(c)
            sums[0][c] += n * dy
            sums[1][c] += dy
            mosaic.store(x_smem.at[slot, :, c], r * (g - mean_g - n * mean_gn))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem.at[slot], rows_of(dx_ref, i))

        @pl.when(i + (SLOTS - 1) < steps)
        def _():  # the slot of the step before is free once its dx has been read
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            fetch(i + (SLOTS - 1))

        return sums

    for i in range(SLOTS - 1):  # fill all slots but one
        pl.when(i < steps)(lambda i=i: fetch(jnp.int32(i)))
    zeros = [[mosaic.zeros(SHAPE, LAYOUT) for _ in chunks] for _ in range(2)]
    sums = lax.fori_loop(0, steps, step, zeros)
    plgpu.wait_smem_to_gmem(0)
    for totals, ref in zip(sums, (dweight_ref, dbias_ref), strict=True):
        for c in chunks:
            mosaic.store(ref.at[program, c], column_sums(totals[c], lines_smem))


def column_sums(total, lines_smem):
    """The sum of the four warps' lines: every warp writes its own, and then reads all four."""
    mosaic.store(lines_smem, total)
    return sum(mosaic.load(lines_smem.at[i], LAYOUT.reduce(0)) for i in range(ROWS))
