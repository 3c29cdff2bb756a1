"""Rung 1: every row of the table searches the text for its token.

    dwte[v] = sum of dy[b, t] over the places where tokens[b, t] = v
    dwpe[t] = sum of dy[b, t] over b

Several places may hold the same token, and then their gradients add up in the same row: they
"collide".  A block for each place that adds its row to dwte would read and write a row while
another block does ("a race"; collide.py in this folder has one, and the interpreter finds it).
Here each block owns a row of dwte instead.  It looks at all places in order, and adds those that
hold its token.  No two blocks write the same row, and the order of the sum is always the same.

dwpe has no collisions: each position gets a block, which adds up the sequences.

Counted: 50304 blocks look at 32768 places each, 1.6 billion loads of a token, each of which costs a
block about 40 cycles to wait for the L1 cache.  With 2112 blocks at a time: 18 ms.

Measured: 119 ms.  The count is of waiting, but the instructions are the limit: a turn takes some
15, and 64 warps of an SM with 4 of them a cycle take 240 cycles, not 40.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic


def row_layout(width):
    """Thread t holds columns 2t, 2t + 1, 256 + 2t, ... of a row."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=2)


def encoder_backward(tokens, dy, wte):
    """(dwte, dwpe) for tokens (batch, time), dy (batch, time, width); wte gives the shape."""
    places, layout = tokens.size, row_layout(dy.shape[2])

    def body(tokens_ref, dy_ref, dwte_ref):
        v = lax.axis_index("row")
        mosaic.store(dwte_ref.at[v], mosaic.zeros(dy_ref.shape[1:], layout))

        @pl.loop(0, places)
        def _(i):
            @pl.when(tokens_ref[i] == v)
            def _():
                total = mosaic.load(dwte_ref.at[v], layout) + mosaic.load(dy_ref.at[i], layout)
                mosaic.store(dwte_ref.at[v], total)

    dwte = mosaic.kernel(
        body,
        name="dwte",
        out_type=jax.ShapeDtypeStruct(wte.shape, wte.dtype),
        grid=(wte.shape[0],),
        grid_names=("row",),
    )(tokens.reshape(places), dy.reshape(places, -1))
    return dwte, position_sums(dy, wte.dtype)


def position_sums(dy, dtype):
    """dwpe (time, width): a block for each position loads its rows of all sequences together."""
    batch, time, width = dy.shape
    layout = row_layout(width)

    def body(dy_ref, dwpe_ref):
        t = lax.axis_index("position")
        rows = [mosaic.load(dy_ref.at[b, t], layout) for b in range(batch)]
        mosaic.store(dwpe_ref.at[t], sum(rows))

    return mosaic.kernel(
        body,
        name="dwpe",
        out_type=jax.ShapeDtypeStruct((time, width), dtype),
        grid=(time,),
        grid_names=("position",),
    )(dy)
