"""Rung 2: sort the tokens, so that a row knows its places.

A stable sort of the tokens puts the places of each token next to each other, in their old order:

    tokens   | 7 | 3 | 7 | 3 | 0 |      sorted   | 0 | 3 | 3 | 7 | 7 |
    place      0   1   2   3   4        order    | 4 | 1 | 3 | 0 | 2 |
    start[v]: how many tokens are smaller than v, so row 3 adds the places order[1], order[2]

XLA sorts and counts, in some small kernels.  A block for each row of the table then adds its run in
registers, and writes its row once, zeros included.

Counted: dy is read once, 50 MB, and dwte written, 155 MB: 70 us.  But a run is added place after
place, and the most common token of the text has 2,100 places: its block takes 2 x 0.6 us for each,
since the address of a row must arrive before the row can be asked for: 2.5 ms in all, and the other
blocks are long done.

Measured: 0.68 ms.  The compiler has two places on the way at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax

from learn.encoder_backward.rung1_search import position_sums, row_layout
from pallas_kernels import mosaic


def sort(tokens, vocab):
    """(ids, order, start): the sorted tokens, their places, and where each token's run starts."""
    flat = tokens.reshape(-1)
    ids, order = lax.sort((flat, lax.iota(jnp.int32, flat.size)), num_keys=1, is_stable=True)
    count = jnp.zeros(vocab, jnp.int32).at[flat].add(1)  # integers: the order does not matter
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    return ids, order, start


def encoder_backward(tokens, dy, wte):
    """(dwte, dwpe) for tokens (batch, time), dy (batch, time, width); wte gives the shape."""
    _, order, start = sort(tokens, wte.shape[0])
    layout = row_layout(dy.shape[2])

    def body(order_ref, start_ref, dy_ref, dwte_ref):
        v = lax.axis_index("row")
        add = lambda i, total: total + mosaic.load(dy_ref.at[order_ref[i]], layout)
        zeros = mosaic.zeros(dy_ref.shape[1:], layout)
        mosaic.store(dwte_ref.at[v], lax.fori_loop(start_ref[v], start_ref[v + 1], add, zeros))

    dwte = mosaic.kernel(
        body,
        name="dwte",
        out_type=jax.ShapeDtypeStruct(wte.shape, wte.dtype),
        grid=(wte.shape[0],),
        grid_names=("row",),
    )(order, start, dy.reshape(tokens.size, -1))
    return dwte, position_sums(dy, wte.dtype)
