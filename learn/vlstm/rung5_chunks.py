"""Rung 5: chunks and a state: time that grows with T, not with T^2.

A row needs the keys of earlier chunks only through one matrix, the state: C, the sum of k_j v_j^T
with their weights, and n, the sum of k_j with the same weights.  Two forms of the cell meet here:
between chunks it is a recurrence, and inside a chunk it is the tile on the diagonal of rung 4.

    h = (carried * q C  +  (q k^T * D) v) / max(|carried * q . n + sum of P|, e^-m)
    C <- decay C + (admit * k)^T v            n <- decay n + sum of admit * k

    chunk 0     chunk 1     chunk 2           a block walks along a head; C is an accumulator in
       h           h           h              its registers, and wgmma reads a copy in bfloat16
    C --> C ----------> C ----------> C       (c_smem), as well as admit * k, transposed (scaled)

b is now a sum over 64 positions.  As a sum over all T it was large, and b_t - b_j had lost digits.

Counted: one pair of tiles for each chunk, and two products with C, instead of 64 pairs: 14 us of
the tensor core.  But a head is one block, whose phases follow one another, about 2.5 us a chunk: at
T = 8192 24 blocks do 128 chunks, 0.32 ms.  At T = 2048, 96 blocks of 32 chunks: 80 us.

Measured: 553 us, 157 us.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.vlstm import TILE, buffer, weights
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, WGMMA

SMALL = {"T": 320}  # for the interpreter: five chunks
SQUARE = TILE, TILE


def output(q_smem, k_smem, v_smem, c_smem, n, w, at):
    """h of the chunk `at` from its tiles and the state before it, (c_smem, n)."""
    row, carried, least = (mosaic.load(x.at[at], ROW) for x in (w.row, w.carried, w.least))
    col = mosaic.load(w.col.at[at], COL)
    d = jnp.exp2(mosaic.along(row, SQUARE, 0) + mosaic.along(col, SQUARE, 1))
    query, key = (plgpu.broadcasted_iota(jnp.int32, SQUARE, a, layout=WGMMA) for a in (0, 1))

    def multiply_qk(acc):
        plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        return acc[...]  # waits for wgmma

    def add_products(acc):
        plgpu.wgmma(acc, q_smem, c_smem)
        acc[...] = acc[...] * mosaic.along(carried, acc.shape, 0)
        plgpu.wgmma(acc, p.astype(v_smem.dtype), v_smem)
        return acc[...]

    p = jnp.where(key <= query, d * pl.run_scoped(multiply_qk, plgpu.ACC(SQUARE, jnp.float32)), 0)
    queries = plgpu.load(q_smem, layout=WGMMA).astype(jnp.float32)
    q_n = jnp.sum(queries * mosaic.along(n, queries.shape, 1), axis=1)
    norm = jnp.maximum(jnp.abs(carried * q_n + jnp.sum(p, axis=1)), least)
    h = pl.run_scoped(add_products, plgpu.ACC(v_smem.shape, jnp.float32))
    return h / mosaic.along(norm, h.shape, 0)


def add_chunk(acc, n, k_smem, v_smem, scaled, w, at):
    """Makes the state after the chunk `at`, in acc, from the one before it; returns n."""
    decay, admit = w.decay[at], mosaic.load(w.admit.at[at], ROW)
    keys = plgpu.load(k_smem, layout=WGMMA).astype(jnp.float32)
    keys *= mosaic.along(admit, keys.shape, 0)
    scaled[...] = keys.astype(scaled.dtype)
    plgpu.commit_smem()
    acc[...] = acc[...] * decay
    plgpu.wgmma(acc, scaled.transpose((1, 0)), v_smem)
    plgpu.wgmma_wait(0)
    return n * decay + jnp.sum(keys, axis=0)


def vlstm(q, k, v, i, f):
    """h for q, k (B, T, NH, DQK), v (B, T, NH, DV), and the gates i, f (B, T, NH)."""
    (batch, length, heads, dqk), dv = q.shape, v.shape[-1]

    def body(q_ref, k_ref, v_ref, w, h_ref, *, q_smem, k_smem, v_smem, scaled, c_smem, bars):
        b, head = mosaic.divide(lax.axis_index("head"), heads)
        pairs = (q_ref, q_smem), (k_ref, k_smem), (v_ref, v_smem)

        def fetch(t):
            for ref, smem in pairs:
                source = ref.at[b, pl.ds(t * TILE, TILE), head]
                plgpu.copy_gmem_to_smem(source, smem.at[t % 2], bars.at[t % 2])

        def step(acc, t, n):
            q, k, v = (smem.at[t % 2] for _, smem in pairs)
            c_smem[...] = acc[...].astype(c_smem.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(bars.at[t % 2])
            h = output(q, k, v, c_smem, n, w, (b, head, t))
            mosaic.store(h_ref.at[b, pl.ds(t * TILE, TILE), head], h)
            n = add_chunk(acc, n, k, v, scaled, w, (b, head, t))
            pl.when(t + 2 < length // TILE)(lambda: fetch(t + 2))
            return n

        def walk(acc):
            acc[...] = mosaic.zeros((dqk, dv), WGMMA)
            next_n = lambda t, n: step(acc, t, n)
            lax.fori_loop(0, length // TILE, next_n, mosaic.zeros((dqk,), COL))

        pl.loop(0, min(2, length // TILE))(fetch)
        pl.run_scoped(walk, plgpu.ACC((dqk, dv), jnp.float32))

    tile = lambda *shape: buffer(q.dtype, *shape)
    return mosaic.kernel(
        body,
        name="vlstm",
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(q_smem=tile(2, TILE, dqk), k_smem=tile(2, TILE, dqk),
                           v_smem=tile(2, TILE, dv), scaled=tile(TILE, dqk), c_smem=tile(dqk, dv),
                           bars=plgpu.Barrier(num_arrivals=3, num_barriers=2)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(head=batch * heads),
    )(q, k, v, weights(i, f, TILE, dqk**-0.5))  # fmt: skip
