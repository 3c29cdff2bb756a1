"""Rung 2: one kernel with a running softmax, so the scores stay on the SM.

A softmax needs the largest score of the row, and a block that walks over the keys has seen only
some.  So it keeps, for each query, the largest score so far m, the sum l of exp(S - m), and O.  If
a new tile raises m to m', everything so far was too large by exp(m' - m), and is multiplied by
exp(m - m') (Milakov and Gimelshein 2018; Dao et al. 2022):

    S = c Q K^T of 64 queries and 64 keys    P = exp(S - m')        l = exp(m - m') l + sum of P
                                                                    O = exp(m - m') O + P V
    at the end   O / l

A block has 64 queries of a head, and TMA brings tiles of K and V.  P goes through shared memory,
where wgmma finds its operands.  m starts at a large negative number; -inf - (-inf) would be NaN.

Counted: Q, K, V and O are 134 MB, 45 us, so memory is no limit.  For each of 64 x 64 scores at D =
128 the matmuls take 0.34 us of an SM, and all else comes one after the other: copies, S, softmax, P
to shared memory, P V, some 3 us for a tile.  66560 tiles on 132 SMs with two blocks each: 0.76 ms.

Measured: 485 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import ROW, WGMMA, along

TILE = 64  # queries of a block, keys of a step
LOWEST = -1e30


def attention(q, k, v):
    """O (B, T, H, D) for q, k, v (B, T, H, D)."""
    b, t, h, d = q.shape

    def body(q_ref, k_ref, v_ref, o_ref, *, q_smem, k_smem, v_smem, p_smem, q_bar, bar):
        batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]

        def scores(acc):
            plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
            return acc[...]  # waits for it

        def step(o_acc, i, carry):
            m, l = carry
            plgpu.copy_gmem_to_smem(tile_of(k_ref, i), k_smem, bar)
            plgpu.copy_gmem_to_smem(tile_of(v_ref, i), v_smem, bar)
            plgpu.barrier_wait(bar)
            s = pl.run_scoped(scores, plgpu.ACC((TILE, TILE), jnp.float32)) * d**-0.5
            iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
            s = jnp.where(iota(1) + i * TILE <= iota(0) + row * TILE, s, LOWEST)
            m_new = jnp.maximum(m, jnp.max(s, axis=1))
            p, alpha = jnp.exp(s - along(m_new, s.shape, 0)), jnp.exp(m - m_new)
            p_smem[...] = p.astype(q.dtype)
            o_acc[...] = o_acc[...] * along(alpha, (TILE, d), 0)
            plgpu.commit_smem()
            plgpu.wgmma(o_acc, p_smem, v_smem)
            plgpu.wgmma_wait(0)
            return m_new, l * alpha + jnp.sum(p, axis=1)

        def attend(o_acc):
            vector = lambda value: plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)
            start = vector(LOWEST), vector(0)
            _, l = lax.fori_loop(0, row + 1, lambda i, carry: step(o_acc, i, carry), start)
            return o_acc[...] * along(1 / l, (TILE, d), 0)

        plgpu.copy_gmem_to_smem(tile_of(q_ref, row), q_smem, q_bar)
        plgpu.barrier_wait(q_bar)
        o = pl.run_scoped(attend, plgpu.ACC((TILE, d), jnp.float32))
        mosaic.store(tile_of(o_ref, row), o)

    smem = lambda cols: plgpu.SMEM(
        (TILE, cols), q.dtype, transforms=mosaic.wgmma_tiles(cols, q.dtype)
    )
    return mosaic.kernel(
        body,
        name="attention",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(
            q_smem=smem(d),
            k_smem=smem(d),
            v_smem=smem(d),
            p_smem=smem(TILE),
            q_bar=plgpu.Barrier(),
            bar=plgpu.Barrier(num_arrivals=2),
        ),
        **mosaic.grid(batch=b, head=h, row=t // TILE),
    )(q, k, v)
