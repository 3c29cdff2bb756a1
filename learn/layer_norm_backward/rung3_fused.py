"""Rung 3: one kernel reads x and dy once and makes all three gradients.

The block that has four rows of x and dy in registers, for dx, also has all that dweight and dbias
need from these rows.  So it adds up its four rows and writes the sums as its part; the kernel for
the columns is gone.

    block b   | rows 4b .. 4b + 3 of x, dy |  ->  dx of these rows
                                              ->  row b of the sums (rows / 4, cols)

Counted: x and dy in, dx out: 3 x 50 MB, 51 us, the floor.  But there are now 8192 parts, and their
sums of 2 x 8192 x 768 x 4 bytes = 50 MB are written and read again, which takes 34 us more:
85 us.

Measured: 130 us, slower than rung 2 (the page says why).
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


def layer_norm_backward(x, weight, dy, mean, r):
    """(dx, dweight, dbias) for x, dy (rows, cols); mean, r (rows,) come from the forward pass."""
    rows, cols = x.shape
    blocks = rows // ROWS
    partial = jax.ShapeDtypeStruct((blocks, cols), weight.dtype)
    dx, *sums = mosaic.kernel(
        body,
        name="layer_norm_backward",
        scratch_types=dict(lines_smem=LINES),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype), partial, partial],
        grid=(blocks,),
        grid_names=("block",),
    )(x, weight, dy, mean, r)
    return dx, *(total.sum(axis=0) for total in sums)


def body(x_ref, weight_ref, dy_ref, mean_ref, r_ref, dx_ref, dweight_ref, dbias_ref, *, lines_smem):
    """dx of four rows, and their sums for dweight and dbias."""
    cols, block = x_ref.shape[1], lax.axis_index("block")
    mine = pl.ds(block * ROWS, ROWS)
    along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)  # a number for each row
    row_mean = lambda terms: along_rows(jnp.sum(sum(terms), axis=1) / cols)
    mean, r = (along_rows(mosaic.load(a.at[mine], LAYOUT.reduce(1))) for a in (mean_ref, r_ref))

    chunks = [pl.ds(i * STEP, STEP) for i in range(cols // STEP)]
    n, g = [], []
    for at in chunks:
        w = mosaic.load(weight_ref.at[at], LAYOUT.reduce(0))
        dy = mosaic.load(dy_ref.at[mine, at], LAYOUT)
        n.append((mosaic.load(x_ref.at[mine, at], LAYOUT) - mean) * r)
        g.append(dy * mosaic.along(w, (ROWS, STEP), 1))
        # The four warps add up their rows through shared memory.
        mosaic.store(dweight_ref.at[block, at], column_sums(n[-1] * dy, lines_smem))
        mosaic.store(dbias_ref.at[block, at], column_sums(dy, lines_smem))
    mean_g = row_mean(g)
    mean_gn = row_mean([a * b for a, b in zip(g, n, strict=True)])
    for a, b, at in zip(g, n, chunks, strict=True):
        mosaic.store(dx_ref.at[mine, at], r * (a - mean_g - b * mean_gn))


def column_sums(total, lines_smem):
    """The sum of the four warps' lines: every warp writes its own, and then reads all four."""
    mosaic.store(lines_smem, total)
    return sum(mosaic.load(lines_smem.at[i], LAYOUT.reduce(0)) for i in range(ROWS))
