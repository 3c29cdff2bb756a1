"""Rung 1: one kernel for the rows, one for the columns.

The gradient of x needs sums along a row, like the forward pass, and its kernel is rung 4 of layer
norm with two means.  The gradients of weight and bias need sums along a column, over all rows:

    dx = r (g - mean(g) - n mean(g n)),  g = weight dy,  n = (x - mean) r
    dweight = sum over the rows of n dy,  dbias = sum over the rows of dy

So a second kernel gives every 32 columns to a block.  Each of its four warps walks down every
fourth row; at the end the four partial sums are added.  Both kernels read x and dy.

Counted: 768 columns make 24 blocks, so 108 of 132 SMs have nothing to do.  A block waits for 4 rows
x 32 columns x 2 arrays x 2 bytes = 512 bytes at a time, 600 ns, and 8192 times: 4.9 ms.

Measured: 1.9 ms.  The compiler has two steps of the loop on the way, and a nearly idle memory
answers faster than in 600 ns.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic

ROWS, STEP, COLUMNS = 4, 256, 32
WIDE, NARROW = mosaic.warp_rows(8), mosaic.warp_rows(1)  # a warp's load: 256 or 32 columns


def layer_norm_backward(x, weight, dy, mean, r):
    """(dx, dweight, dbias) for x, dy (rows, cols); mean, r (rows,) come from the forward pass."""
    dx = mosaic.kernel(
        rows_kernel,
        name="dx",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // ROWS,),
        grid_names=("block",),
    )(x, weight, dy, mean, r)
    sums = mosaic.kernel(
        columns_kernel,
        name="dweight_dbias",
        out_type=[jax.ShapeDtypeStruct(weight.shape, weight.dtype)] * 2,
        grid=(x.shape[1] // COLUMNS,),
        grid_names=("block",),
    )(x, dy, mean, r)
    return dx, *sums


def rows_kernel(x_ref, weight_ref, dy_ref, mean_ref, r_ref, dx_ref):
    """dx of four rows."""
    cols = x_ref.shape[1]
    mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)
    along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)  # a number for each row
    row_mean = lambda terms: along_rows(jnp.sum(sum(terms), axis=1) / cols)
    mean, r = (along_rows(mosaic.load(a.at[mine], WIDE.reduce(1))) for a in (mean_ref, r_ref))

    chunks = [pl.ds(i * STEP, STEP) for i in range(cols // STEP)]
    n, g = [], []
    for at in chunks:
        w = mosaic.load(weight_ref.at[at], WIDE.reduce(0))
        n.append((mosaic.load(x_ref.at[mine, at], WIDE) - mean) * r)
        g.append(mosaic.load(dy_ref.at[mine, at], WIDE) * mosaic.along(w, (ROWS, STEP), 1))
    mean_g = row_mean(g)
    mean_gn = row_mean([a * b for a, b in zip(g, n, strict=True)])
    for a, b, at in zip(g, n, chunks, strict=True):
        mosaic.store(dx_ref.at[mine, at], r * (a - mean_g - b * mean_gn))


def columns_kernel(x_ref, dy_ref, mean_ref, r_ref, dweight_ref, dbias_ref):
    """dweight and dbias of 32 columns."""
    at = pl.ds(lax.axis_index("block") * COLUMNS, COLUMNS)
    along_rows = lambda v: mosaic.along(v, (ROWS, COLUMNS), 0)

    def step(i, sums):
        rows = pl.ds(i * ROWS, ROWS)
        mean, r = (along_rows(mosaic.load(a.at[rows], NARROW.reduce(1))) for a in (mean_ref, r_ref))
        dy = mosaic.load(dy_ref.at[rows, at], NARROW)
        n = (mosaic.load(x_ref.at[rows, at], NARROW) - mean) * r
        return sums[0] + n * dy, sums[1] + dy

    zeros = mosaic.zeros((ROWS, COLUMNS), NARROW)
    sums = lax.fori_loop(0, x_ref.shape[0] // ROWS, step, (zeros, zeros))
    for total, ref in zip(sums, (dweight_ref, dbias_ref), strict=True):
        mosaic.store(ref.at[at], jnp.sum(total, axis=0))
