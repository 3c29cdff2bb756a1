"""Rung 3: gates, a stabiliser and a normaliser: the vLSTM.

    h[t] = sum over j <= t of P[t, j] v_j / max(|sum of P[t, j]|, e^-m_t)
    P[t, j] = s (q_t . k_j) D[t, j],    D[t, j] = e^(b_t - b_j + i_j - m_t)

b is the running sum of log sigmoid(f), so e^(b_t - b_j) is the product of the forget gates between
j and t: how much of position j is left at t.  e^i_j is how much of it was let in.  i has no bound,
so exponentials would overflow; m_t, the largest exponent of row t, is subtracted from all of them.
It is at least b_t, the exponent of the empty state before the first token.
The denominator is scaled in the same way, so h is what it would be without m.

An exponent is a number of the row plus a number of the column, row_t = b_t - m_t and col_j = i_j -
b_j.  And m needs no pass over the keys: it is b_t plus the largest col so far, a running maximum
over T.  So `weights` in __init__.py, some lines of jnp, makes all that a gate is, once for each
position; the kernel adds two vectors, and takes one exponential for each pair (exp2: the hardware
has only powers of two).  In attention the exponent contains q . k, and the maximum must be found
on the way.

    col (keys)   \
    row (rows)   -> D^T = exp2(col + row)  ->  p_smem = P^T D^T  ->  h and the row sums, by key

Counted: 4096 exponentials for each pair of tiles, 256 cycles of an SM, beside 128 steps: 19.4 ms,
1% more than rung 2.  The gates cost nothing; the products do.

Measured: 27.8 ms, 7.77 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.vlstm import TILE, weights
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, WGMMA


def vlstm(q, k, v, i, f):
    """h for q, k (B, T, NH, DQK), v (B, T, NH, DV), and the gates i, f (B, T, NH)."""
    (batch, length, heads, dqk), dv = q.shape, v.shape[-1]

    def body(q_ref, k_ref, v_ref, row_ref, col_ref, least_ref, h_ref, *, p_smem):
        b, head = mosaic.divide(lax.axis_index("head"), heads)
        tile = length // TILE - 1 - lax.axis_index("tile")  # the longest first
        rows = pl.ds(tile * TILE, TILE)

        def add_tile(n, sums, on_diagonal=False):
            def add_to_weights(d, p):
                key = mosaic.load(k_ref.at[b, head, d, pl.ds(n * TILE, TILE)], ROW)
                query = mosaic.load(q_ref.at[b, head, d, rows], COL)
                return p + mosaic.along(key, p.shape, 0) * mosaic.along(query, p.shape, 1)

            def add_key(j, sums):
                h, total = sums
                weight = mosaic.load(p_smem.at[j], ROW)
                value = mosaic.load(v_ref.at[b, n * TILE + j, head], COL)
                h += mosaic.along(weight, h.shape, 0) * mosaic.along(value, h.shape, 1)
                return h, total + weight

            p = lax.fori_loop(0, dqk, add_to_weights, mosaic.zeros((TILE, TILE), WGMMA))
            col = mosaic.load(col_ref.at[b, head, pl.ds(n * TILE, TILE)], ROW)
            p *= jnp.exp2(mosaic.along(col, p.shape, 0) + mosaic.along(row, p.shape, 1))
            if on_diagonal:
                key, query = (
                    plgpu.broadcasted_iota(jnp.int32, p.shape, d, layout=WGMMA) for d in (0, 1)
                )
                p = jnp.where(key <= query, p, 0)
            mosaic.store(p_smem, p)
            return lax.fori_loop(0, TILE, add_key, sums)

        row = mosaic.load(row_ref.at[b, head, rows], COL)
        zeros = mosaic.zeros((TILE, dv), WGMMA), mosaic.zeros((TILE,), ROW)
        h, total = add_tile(tile, lax.fori_loop(0, tile, add_tile, zeros), on_diagonal=True)
        least = mosaic.load(least_ref.at[b, head, rows], ROW)
        norm = jnp.maximum(jnp.abs(total), least)
        mosaic.store(h_ref.at[b, rows, head], h / mosaic.along(norm, h.shape, 0))

    w = weights(i, f, length, dqk**-0.5)  # one chunk, the whole sequence
    turned = lambda x: x.transpose(0, 2, 3, 1)  # (B, NH, DQK, T)
    return mosaic.kernel(
        body,
        name="vlstm",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(p_smem=plgpu.SMEM((TILE, TILE), jnp.float32)),
        **mosaic.grid(head=batch * heads, tile=length // TILE),
    )(turned(q), turned(k), v, w.row[:, :, 0], w.col[:, :, 0], w.least[:, :, 0])
