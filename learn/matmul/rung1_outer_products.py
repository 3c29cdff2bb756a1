"""Rung 1: outer products from global memory, on the ordinary arithmetic units.

    y = a b^T + d,   a (rows, depth), b (columns, depth), d and y (rows, columns), all bfloat16

d is what a transformer adds after the matmul: the residual stream.  A block computes a tile of y of
64 x 64: it walks along the depth, and at each step multiplies 64 numbers of a with 64 numbers of b,
every one with every one, and adds the 4096 products to its sums.

    step k     a^T[k, rows]   64 numbers  |  outer product: 64 x 64
               b^T[k, cols]   64 numbers  |  added to the sums in registers, 32 for each thread

The numbers of a step lie a row of a or b apart, so XLA transposes both first, which takes 0.05 ms.
The sums have the layout that the tensor core will want later; ROW and COL hold one number for each
of its rows or columns.

Counted: 2 x 8192 x 8192 x 2048 operations.  The multiply-add units of an H100 do 59 TFLOP/s at
1.755 GHz: 4.7 ms.  But each step waits for its 128 numbers, which come from the L2 cache, 0.3 us
away.  The registers allow seven blocks on an SM, so 2048 steps x 16384 tiles / (132 x 7) x 0.3 us =
10.9 ms.

Measured: 15.5 ms.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, WGMMA

TILE = 64
SMALL = {"rows": 64, "columns": 128, "depth": 16}  # for the interpreter


def matmul(a, b, d):
    """a b^T + d, summed in float32."""
    (rows, depth), columns = a.shape, b.shape[0]

    def body(a_ref, b_ref, d_ref, y_ref):
        of_a = pl.ds(lax.axis_index("row") * TILE, TILE)
        of_b = pl.ds(lax.axis_index("column") * TILE, TILE)

        def step(k, sums):
            left = mosaic.load(a_ref.at[k, of_a], ROW)
            right = mosaic.load(b_ref.at[k, of_b], COL)
            return sums + mosaic.along(left, sums.shape, 0) * mosaic.along(right, sums.shape, 1)

        sums = lax.fori_loop(0, depth, step, mosaic.zeros((TILE, TILE), WGMMA))
        mosaic.store(y_ref.at[of_a, of_b], sums + mosaic.load(d_ref.at[of_a, of_b], WGMMA))

    return mosaic.kernel(
        body,
        name="matmul",
        out_type=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        **mosaic.grid(row=rows // TILE, column=columns // TILE),
    )(a.T, b.T, d)
