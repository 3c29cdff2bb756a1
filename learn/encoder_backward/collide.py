"""Not a rung: what goes wrong when blocks add to the same row.

    python -m learn check encoder_backward 1 learn/encoder_backward/collide.py

A block for each place adds its row of dy to dwte.  Where two places hold the same token, both
blocks may read the row before either has written it, and one of the two is lost.  Whether that
happens is up to chance on a GPU.  The interpreter finds it always: it knows which accesses nothing
has put in an order, and calls two of them to the same address a race.
"""

import jax.numpy as jnp
from jax import lax

from learn.encoder_backward.rung1_search import position_sums, row_layout
from pallas_kernels import mosaic


def encoder_backward(tokens, dy, wte):
    places, layout = tokens.size, row_layout(dy.shape[2])

    def body(tokens_ref, dy_ref, dwte_ref):
        i = lax.axis_index("place")
        row = dwte_ref.at[tokens_ref[i]]
        mosaic.store(row, mosaic.load(row, layout) + mosaic.load(dy_ref.at[i], layout))

    call = mosaic.kernel(
        body, name="dwte", out_type=[], grid=(1,), cluster=(places,), cluster_names=("place",),
        grid_names=("one",),
    )  # fmt: skip
    dwte = mosaic.in_place(
        lambda row, *arrays: call(*arrays, row),
        jnp.zeros_like(wte),
        tokens.reshape(places),
        dy.reshape(places, -1),
    )
    return dwte, position_sums(dy, wte.dtype)
