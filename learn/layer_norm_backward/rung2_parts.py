"""Rung 2: many blocks for the columns, each with some of the rows.

The second kernel of rung 1 keeps 24 of 132 SMs busy.  So the rows are split into PARTS, and each
part of the rows and each 256 columns get a block.  A block writes its sums to memory ("partial
sums"), and a third, small kernel (XLA's) adds the parts, always in the same order, so two runs give
the same bits.  Adding with atomics instead would save that kernel, and change bits from run to run.
Loads are 16 bytes wide, as in rung 3 of layer norm.

    rows of part 0     | block (0, 0) | block (0, 1) | block (0, 2) |
    rows of part 1     | block (1, 0) | block (1, 1) | block (1, 2) |     sums: (PARTS, cols)

Counted: both kernels read x and dy and one writes dx: 5 x 50 MB at 2.95 TB/s, 85 us, of which a
third is for reading twice.  The sums take 2 x 352 x 768 x 4 bytes = 2 MB.

Measured: 92 us.
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
PARTS = 352  # 8 blocks for each of 132 SMs at 768 columns


def layer_norm_backward(x, weight, dy, mean, r):
    """(dx, dweight, dbias) for x, dy (rows, cols); mean, r (rows,) come from the forward pass."""
    dx = mosaic.kernel(
        rows_kernel,
        name="dx",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS,),
        grid_names=("block",),
    )(x, weight, dy, mean, r)
    parts = min(PARTS, x.shape[0] // ROWS)
    sums = mosaic.kernel(
        columns_kernel,
        name="dweight_dbias",
        scratch_types=dict(lines_smem=LINES),
        out_type=[jax.ShapeDtypeStruct((parts, weight.size), weight.dtype)] * 2,
        grid=(parts, x.shape[1] // STEP),
        grid_names=("part", "column"),
    )(x, dy, mean, r)
    return dx, *(total.sum(axis=0) for total in sums)


def rows_kernel(x_ref, weight_ref, dy_ref, mean_ref, r_ref, dx_ref):
    """dx of four rows."""
    cols = x_ref.shape[1]
    mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)
    along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)  # a number for each row
    row_mean = lambda terms: along_rows(jnp.sum(sum(terms), axis=1) / cols)
    mean, r = (along_rows(mosaic.load(a.at[mine], LAYOUT.reduce(1))) for a in (mean_ref, r_ref))

    chunks = [pl.ds(i * STEP, STEP) for i in range(cols // STEP)]
    n, g = [], []
    for at in chunks:
        w = mosaic.load(weight_ref.at[at], LAYOUT.reduce(0))
        n.append((mosaic.load(x_ref.at[mine, at], LAYOUT) - mean) * r)
        g.append(mosaic.load(dy_ref.at[mine, at], LAYOUT) * mosaic.along(w, (ROWS, STEP), 1))
    mean_g = row_mean(g)
    mean_gn = row_mean([a * b for a, b in zip(g, n, strict=True)])
    for a, b, at in zip(g, n, chunks, strict=True):
        mosaic.store(dx_ref.at[mine, at], r * (a - mean_g - b * mean_gn))


def columns_kernel(x_ref, dy_ref, mean_ref, r_ref, dweight_ref, dbias_ref, *, lines_smem):
    """The sums for dweight and dbias over every `parts`-th four rows, of 256 columns."""
    part, parts = lax.axis_index("part"), dweight_ref.shape[0]
    at = pl.ds(lax.axis_index("column") * STEP, STEP)
    along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)

    def step(i, sums):
        rows = pl.ds((part + i * parts) * ROWS, ROWS)
        mean, r = (along_rows(mosaic.load(a.at[rows], LAYOUT.reduce(1))) for a in (mean_ref, r_ref))
        dy = mosaic.load(dy_ref.at[rows, at], LAYOUT)
        n = (mosaic.load(x_ref.at[rows, at], LAYOUT) - mean) * r
        return sums[0] + n * dy, sums[1] + dy

    zeros = mosaic.zeros((ROWS, STEP), LAYOUT)
    steps = lax.div(x_ref.shape[0] // ROWS - 1 - part, jnp.int32(parts)) + 1
    sums = lax.fori_loop(0, steps, step, (zeros, zeros))
    for total, ref in zip(sums, (dweight_ref, dbias_ref), strict=True):
        mosaic.store(ref.at[part, at], column_sums(total, lines_smem))


def column_sums(total, lines_smem):
    """The sum of the four warps' lines: every warp writes its own, and then reads all four."""
    mosaic.store(lines_smem, total)
    return sum(mosaic.load(lines_smem.at[i], LAYOUT.reduce(0)) for i in range(ROWS))
