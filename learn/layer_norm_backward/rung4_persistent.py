"""Rung 4: blocks that stay keep the sums in registers.

Rung 3 writes a part of the sums for every four rows.  A block that stays ("persistent") takes every
`programs`-th four rows, keeps its sums in registers all the while, and writes them once at its end.
The parts are then as many as there are blocks, whatever the number of rows.

    program p   | tile p | tile p + programs | tile p + 2 programs | ...   ->  row p of the sums

A lane holds 24 numbers of each sum at 768 columns: the loop carries 48 registers.  Each warp has
sums of its rows; only at the end are the four added.

Counted: 3 x 50 MB, 51 us, and sums of 2 x 264 x 768 x 4 bytes = 1.6 MB, 1 us more: 52 us.  A block
that stays has a cost, too: its tiles come one after the other, and while it waits for one it has
nothing else to do.  With two blocks of 12 KB loads an SM has 24 KB on the way at most, and less
while they compute.

Measured: 66 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

ROWS, STEP = 4, 256
LAYOUT = mosaic.warp_rows(8)
LINES = plgpu.SMEM((ROWS, STEP), jnp.float32)
BLOCKS = 2 * 132  # two for each SM of an H100


def layer_norm_backward(x, weight, dy, mean, r):
    """(dx, dweight, dbias) for x, dy (rows, cols); mean, r (rows,) come from the forward pass."""
    rows, cols = x.shape
    programs = min(BLOCKS, rows // ROWS)
    partial = jax.ShapeDtypeStruct((programs, cols), weight.dtype)
    dx, *sums = mosaic.kernel(
        body,
        name="layer_norm_backward",
        scratch_types=dict(lines_smem=LINES),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype), partial, partial],
        grid=(programs,),
        grid_names=("program",),
    )(x, weight, dy, mean, r)
    return dx, *(total.sum(axis=0) for total in sums)


def body(x_ref, weight_ref, dy_ref, mean_ref, r_ref, dx_ref, dweight_ref, dbias_ref, *, lines_smem):
    """dx of this program's tiles, and their sums for dweight and dbias."""
    rows, cols = x_ref.shape
    program, programs = lax.axis_index("program"), dweight_ref.shape[0]
    chunks = [pl.ds(i * STEP, STEP) for i in range(cols // STEP)]
    along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)  # a number for each row
    row_mean = lambda terms: along_rows(jnp.sum(sum(terms), axis=1) / cols)

    def step(i, sums):
        mine = pl.ds((program + i * programs) * ROWS, ROWS)
        mean, r = (along_rows(mosaic.load(a.at[mine], LAYOUT.reduce(1))) for a in (mean_ref, r_ref))
        n, g = [], []
        sums = [list(sum_) for sum_ in sums]
        for c, at in enumerate(chunks):
            w = mosaic.load(weight_ref.at[at], LAYOUT.reduce(0))
            dy = mosaic.load(dy_ref.at[mine, at], LAYOUT)
            n.append((mosaic.load(x_ref.at[mine, at], LAYOUT) - mean) * r)
            g.append(dy * mosaic.along(w, (ROWS, STEP), 1))
            sums[0][c] += n[c] * dy
            sums[1][c] += dy
        mean_g = row_mean(g)
        mean_gn = row_mean([a * b for a, b in zip(g, n, strict=True)])
        for a, b, at in zip(g, n, chunks, strict=True):
            mosaic.store(dx_ref.at[mine, at], r * (a - mean_g - b * mean_gn))
        return sums

    zeros = [[mosaic.zeros((ROWS, STEP), LAYOUT) for _ in chunks] for _ in range(2)]
    steps = lax.div(rows // ROWS - 1 - program, jnp.int32(programs)) + 1
    sums = lax.fori_loop(0, steps, step, zeros)
    for totals, ref in zip(sums, (dweight_ref, dbias_ref), strict=True):
        for total, at in zip(totals, chunks, strict=True):
            mosaic.store(ref.at[program, at], column_sums(total, lines_smem))


def column_sums(total, lines_smem):
    """The sum of the four warps' lines: every warp writes its own, and then reads all four."""
    mosaic.store(lines_smem, total)
    return sum(mosaic.load(lines_smem.at[i], LAYOUT.reduce(0)) for i in range(ROWS))
