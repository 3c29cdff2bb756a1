"""Rung 3: a lane loads four words at a time.

The constant VEC, as in rung 3 of layer norm: 16 bytes, which are now 32 weights.

    lane t   | words 4t, 4t + 1, 4t + 2, 4t + 3 |  x 8 planes

Counted: 32 KB on the way in an SM, so memory could give the 29 MB in 10 us.  But now the threads
have too much to do.  For each weight they shift, mask, subtract 8, convert to float32, convert x,
multiply and add: six instructions.  An SM executes 128 of them a cycle: 59 million weights x 6 /
(132 x 128) at 1.755 GHz = 12 us.

Measured: 17 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic

ROWS = 4  # outputs of a block: one for each of its four warps
PLANES, BITS = 8, 4  # levels in a word
VEC = 4  # neighbouring words that a lane holds: 16 bytes
STEP = 32 * VEC  # words of a load
LAYOUT = mosaic.warp_rows(VEC)


def prepare(x, levels, scales):
    """(x, words (N, K / 8), scales)."""
    k, n = levels.shape
    codes = (levels.astype(jnp.int32) + 8).reshape(PLANES, k // PLANES, n)
    words = sum(codes[j] << BITS * j for j in range(PLANES))
    return x, words.T, scales


def low_bit_gemv(x, words, scales):
    """y (N,) in bfloat16 for x (K,), words (N, K / 8) and scales (N,)."""
    n, columns = words.shape

    def body(x_ref, words_ref, scales_ref, y_ref):
        mine = pl.ds(lax.axis_index("block") * ROWS, ROWS)

        def step(i, sums):
            at = pl.ds(i * STEP, STEP)
            packed = mosaic.read(words_ref.at[mine, at], LAYOUT)
            for j in range(PLANES):
                at = pl.ds(j * columns + i * STEP, STEP)
                x = mosaic.along(mosaic.load(x_ref.at[at], LAYOUT.reduce(0)), (ROWS, STEP), 1)
                level = (lax.shift_right_logical(packed, BITS * j) & 15) - 8
                sums = sums + x * level.astype(jnp.float32)
            return sums

        sums = lax.fori_loop(0, columns // STEP, step, mosaic.zeros((ROWS, STEP), LAYOUT))
        scale = mosaic.load(scales_ref.at[mine], LAYOUT.reduce(1))
        mosaic.store(y_ref.at[mine], jnp.sum(sums, axis=1) * scale)

    return mosaic.kernel(
        body,
        name="gemv",
        out_type=jax.ShapeDtypeStruct((n,), x.dtype),
        grid=(n // ROWS,),
        grid_names=("block",),
    )(x, words, scales)
