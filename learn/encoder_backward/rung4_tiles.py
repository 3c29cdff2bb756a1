"""Rung 4: long runs are split over many blocks, in two kernels.

The sorted places are cut into tiles of 32.  A tile that holds a single token is a piece of a long
run, and a first kernel adds up each such tile in its own block.  The second kernel, a block
for each row of the table as before, adds the sums of whole tiles and the places before and after:

    sorted tokens   | 3 3 3 3 | 3 3 3 3 | 3 5 5 8 | 8 8 8 8 |       tiles (of 4 here, of 32 there)
    kernel 1          sum       sum                 sum             of tiles with a single token
    kernel 2          dwte[3] = sum + sum + 1 place, dwte[8] = 1 place + sum, dwte[5] = 2 places

The tiles are always the same for the same tokens, so the sums have the same bits in every run.

Counted: the run of 2,100 places is 65 tiles, which 65 blocks add at the same time, 4 turns of 1.2
us each; then one block adds 65 sums and at most 62 places, 17 turns: 25 us, while others write
their rows.  What remains is memory: 70 us.

Measured: 170 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from learn.encoder_backward.rung1_search import position_sums, row_layout
from learn.encoder_backward.rung2_sort import sort
from learn.encoder_backward.rung3_in_flight import add_rows
from pallas_kernels import mosaic

TILE = 32  # places
SMALL = {"time": 128}  # for the interpreter: the most common token fills several tiles


def encoder_backward(tokens, dy, wte):
    """(dwte, dwpe) for tokens (batch, time), dy (batch, time, width); wte gives the shape."""
    ids, order, start = sort(tokens, wte.shape[0])
    rows = dy.reshape(tokens.size, -1)
    layout, width = row_layout(rows.shape[1]), rows.shape[1:]

    def sum_tile(ids_ref, order_ref, dy_ref, sums_ref):
        tile = lax.axis_index("tile")
        first, last = tile * TILE, (tile + 1) * TILE

        @pl.when(ids_ref[first] == ids_ref[last - 1])  # they are sorted: all between are equal
        def _():
            load = lambda i: mosaic.load(dy_ref.at[order_ref[i]], layout)
            zeros = mosaic.zeros(width, layout)
            mosaic.store(sums_ref.at[tile], add_rows(load, first, last, zeros))

    def sum_run(order_ref, start_ref, dy_ref, sums_ref, dwte_ref):
        v = lax.axis_index("row")
        start, stop = start_ref[v], start_ref[v + 1]
        # [start, stop) = [start, head), whole tiles, [tail, stop)
        head = jnp.minimum((start + TILE - 1) // TILE * TILE, stop)
        tail = jnp.maximum(stop // TILE * TILE, head)
        load = lambda i: mosaic.load(dy_ref.at[order_ref[i]], layout)
        load_sum = lambda i: mosaic.load(sums_ref.at[i], layout)
        total = add_rows(load, start, head, mosaic.zeros(width, layout))
        total = add_rows(load_sum, head // TILE, tail // TILE, total)
        mosaic.store(dwte_ref.at[v], add_rows(load, tail, stop, total))

    sums = mosaic.kernel(
        sum_tile,
        name="tiles",
        out_type=jax.ShapeDtypeStruct((tokens.size // TILE, *width), jnp.float32),
        grid=(tokens.size // TILE,),
        grid_names=("tile",),
    )(ids, order, rows)
    dwte = mosaic.kernel(
        sum_run,
        name="dwte",
        out_type=jax.ShapeDtypeStruct(wte.shape, wte.dtype),
        grid=(wte.shape[0],),
        grid_names=("row",),
    )(order, start, rows, sums)
    return dwte, position_sums(dy, wte.dtype)
