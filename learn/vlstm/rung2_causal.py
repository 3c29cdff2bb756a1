"""Rung 2: causal: a position sees itself and those before it.

    h[t] = sum over j <= t of s (q_t . k_j) v_j

This is what makes it a model of text, and it halves the work, if one does not compute what is then
thrown away: the block of rows 64 n to 64 n + 63 stops after the tile of keys n.  Only in this last
tile, on the diagonal, are some keys in the future; their weights become 0.

      keys    0   1   2   3
    rows 0  | / |   |   |   |      / masked, * whole, the rest is never computed
    rows 1  | * | / |   |   |
    rows 2  | * | * | / |   |
    rows 3  | * | * | * | / |

The mask compares two arrays of indices, which `plgpu.broadcasted_iota` makes in registers.  They
would take 48 registers of each thread during the whole loop, so the last tile comes after it.

Counted: 24 heads x 128 x 129 / 2 pairs of tiles with 128 steps of 0.3 us.  The compiler takes 146
registers, so only three blocks fit an SM, not four: 19 ms.  Blocks have different lengths now.  The
longest ones should start first, or the last of them runs alone; so tiles are numbered from the end.

Measured: 28.5 ms, 7.93 ms.
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
        tile = length // TILE - 1 - lax.axis_index("tile")  # the longest first
        rows = pl.ds(tile * TILE, TILE)

        def add_tile(n, h, on_diagonal=False):
            def add_to_weights(d, p):
                key = mosaic.load(k_ref.at[b, head, d, pl.ds(n * TILE, TILE)], ROW)
                query = mosaic.load(q_ref.at[b, head, d, rows], COL)
                return p + mosaic.along(key, p.shape, 0) * mosaic.along(query, p.shape, 1)

            def add_key(j, h):
                weight = mosaic.load(p_smem.at[j], ROW)
                value = mosaic.load(v_ref.at[b, n * TILE + j, head], COL)
                return h + mosaic.along(weight, h.shape, 0) * mosaic.along(value, h.shape, 1)

            p = lax.fori_loop(0, dqk, add_to_weights, mosaic.zeros((TILE, TILE), WGMMA))
            if on_diagonal:
                key, row = (
                    plgpu.broadcasted_iota(jnp.int32, p.shape, d, layout=WGMMA) for d in (0, 1)
                )
                p = jnp.where(key <= row, p, 0)
            mosaic.store(p_smem, p * dqk**-0.5)
            return lax.fori_loop(0, TILE, add_key, h)

        h = lax.fori_loop(0, tile, add_tile, mosaic.zeros((TILE, dv), WGMMA))
        h = add_tile(tile, h, on_diagonal=True)
        mosaic.store(h_ref.at[b, rows, head], h)

    turned = lambda x: x.transpose(0, 2, 3, 1)  # (B, NH, DQK, T)
    return mosaic.kernel(
        body,
        name="vlstm",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(p_smem=plgpu.SMEM((TILE, TILE), jnp.float32)),
        **mosaic.grid(head=batch * heads, tile=length // TILE),
    )(turned(q), turned(k), v)
