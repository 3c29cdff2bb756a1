"""Rung 3: every load takes 16 bytes, so that more bytes are on the way.

Rung 2 waited for memory, so there must be more bytes on the way at once.  The widest load of a
thread is 16 bytes: 8 numbers of bfloat16.  The only change to the code is VEC = 8.

    warp 0   | row 0:  lane 0: 0..7 | lane 1: 8..15 | ... | lane 31: 248..255 | lane 0: 256..263 ...

Counted: an SM now has 2048 x 16 bytes = 32 KB on the way.  Its share of memory's speed, 22 bytes a
nanosecond, needs 22 x 600 = 13 KB, so memory itself is the limit at last.  The first walk and the
stores move 50 MB each at 2.95 TB/s, 17 us each.  The other two walks read the same 50 MB from the
L2 cache at about 5.5 TB/s, 9 us each: 52 us.

Measured: 36 us, and 183 us at 16384 x 4096 where 140 us were counted.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic

ROWS = 4  # of a block: one for each of its four warps
VEC = 8  # neighbouring columns that a lane holds: 16 bytes of bfloat16
STEP = 32 * VEC  # columns of one load of a warp
LAYOUT = mosaic.warp_rows(VEC)


def layer_norm(x, weight, bias, eps=1e-5):
    """y = (x - mean) r weight + bias for x (rows, cols); weight and bias (cols,) in float32."""
    rows, cols = x.shape

    def body(x_ref, weight_ref, bias_ref, y_ref):
        mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)
        load = lambda i: mosaic.load(x_ref.at[mine, pl.ds(i * STEP, STEP)], LAYOUT)
        along_rows = lambda v: mosaic.along(v, (ROWS, STEP), 0)  # a number for each row
        along_columns = lambda v: mosaic.along(v, (ROWS, STEP), 1)  # a number for each column
        zeros = mosaic.zeros((ROWS, STEP), LAYOUT)

        # Each lane adds up its own columns; the shuffles come once, after the loop.
        total = lambda i, sums: sums + load(i)
        mean = jnp.sum(lax.fori_loop(0, cols // STEP, total, zeros), axis=1) / cols

        squares = lambda i, sums: sums + jnp.square(load(i) - along_rows(mean))
        variance = jnp.sum(lax.fori_loop(0, cols // STEP, squares, zeros), axis=1) / cols
        r = lax.rsqrt(variance + eps)

        @pl.loop(0, cols // STEP)
        def _(i):
            columns = pl.ds(i * STEP, STEP)
            n = (load(i) - along_rows(mean)) * along_rows(r)
            w, b = (mosaic.load(a.at[columns], LAYOUT.reduce(0)) for a in (weight_ref, bias_ref))
            mosaic.store(y_ref.at[mine, columns], n * along_columns(w) + along_columns(b))

    return mosaic.kernel(
        body,
        name="layer_norm",
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // ROWS,),
        grid_names=("block",),
    )(x, weight, bias)
