"""Rung 1: h = s (q k^T) v, every position with every position, on the ordinary units.

    h[t] = sum over j of s (q_t . k_j) v_j        s = DQK^-1/2, for each of B x NH heads

This is attention without its softmax: the sum of all v, weighted by the products of q and k.  The
gates i and f come in rung 3.  A block computes 64 rows of h.  For each tile of 64 keys it makes a
tile of weights, leaves it in shared memory, and adds the product with v to its sums:

    P^T (64 keys, 64 rows) = outer products of k and q, DQK steps      in registers
    p_smem  <-  P^T
    h (64 rows, DV)       += outer products of p_smem[key] and v[key], 64 steps

P is made transposed, so that a key's weights for all rows are neighbours in shared memory.  XLA
transposes q and k beforehand, for the same reason as in rung 1 of matmul.

Counted: at 4 x 8192 x 6 x 64 x 128 there are 24 heads x 128 x 128 pairs of tiles with 128 steps.
The multiply-adds are 309 G, 10 ms at the peak of the ordinary units.  But a step waits for numbers
from the L2 cache, 0.3 us away, and registers allow four blocks on an SM: 29 ms.  The time grows
with T^2; at T = 2048, with as many positions in 96 heads, it is 7 ms.  The bytes take 52 us.

Measured: 39.4 ms, 10.6 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.vlstm import TILE
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, WGMMA


def vlstm(q, k, v, i, f):
    """h for q, k (B, T, NH, DQK) and v (B, T, NH, DV)."""
    (batch, length, heads, dqk), dv = q.shape, v.shape[-1]

    def body(q_ref, k_ref, v_ref, h_ref, *, p_smem):
        b, head = mosaic.divide(lax.axis_index("head"), heads)
        rows = pl.ds(lax.axis_index("tile") * TILE, TILE)

        def add_tile(n, h):
            def add_to_weights(d, p):
                key = mosaic.load(k_ref.at[b, head, d, pl.ds(n * TILE, TILE)], ROW)
                query = mosaic.load(q_ref.at[b, head, d, rows], COL)
                return p + mosaic.along(key, p.shape, 0) * mosaic.along(query, p.shape, 1)

            def add_key(j, h):
                weight = mosaic.load(p_smem.at[j], ROW)
                value = mosaic.load(v_ref.at[b, n * TILE + j, head], COL)
                return h + mosaic.along(weight, h.shape, 0) * mosaic.along(value, h.shape, 1)

            p = lax.fori_loop(0, dqk, add_to_weights, mosaic.zeros((TILE, TILE), WGMMA))
            mosaic.store(p_smem, p * dqk**-0.5)
            return lax.fori_loop(0, TILE, add_key, h)

        h = lax.fori_loop(0, length // TILE, add_tile, mosaic.zeros((TILE, dv), WGMMA))
        mosaic.store(h_ref.at[b, rows, head], h)

    turned = lambda x: x.transpose(0, 2, 3, 1)  # (B, NH, DQK, T)
    return mosaic.kernel(
        body,
        name="vlstm",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(p_smem=plgpu.SMEM((TILE, TILE), jnp.float32)),
        **mosaic.grid(head=batch * heads, tile=length // TILE),
    )(turned(q), turned(k), v)
