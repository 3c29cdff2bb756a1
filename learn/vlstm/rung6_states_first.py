"""Rung 6: all states first, then all chunks at the same time.

In rung 5 a chunk waits for the chunk before it, although only its state depends on that.  Two
kernels separate what is serial from what is not:

    walk      C0 --> C1 --> C2 --> C3      a block for each head; it only makes states, and TMA
              |      |      |      |       writes each of them to memory while the next is made
              v      v      v      v
    outputs   h0     h1     h2     h3      a block for each chunk, all at the same time

`add_chunk` and `output` are rung 5's.  In `outputs` h takes the place of v in shared memory,
from where TMA writes whole lines.  A model in training gains twice, as the backward pass needs the
same states.

Counted: a step of the walk is shorter now, 1.2 us, but at T = 8192 24 blocks do 128 of them, 154
us; it moves 126 MB, 43 us, so bandwidth is the limit only if there are enough heads.  `outputs`
moves q, k, v, h and the states, 203 MB in 69 us.  With 20 us for XLA's kernels of the gates: 0.24
ms.  At T = 2048, with 96 heads of 32 chunks, 0.13 ms: the states cost more there than the waiting
did, because rung 5 moves 153 MB and this one 329.

Measured: 315 us, 161 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.vlstm import TILE, buffer, weights
from learn.vlstm.rung5_chunks import add_chunk, output
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, WGMMA

SMALL = {"T": 320}  # for the interpreter: five chunks


def walk(k_ref, v_ref, w, c_ref, n_ref, *, k_smem, v_smem, scaled, c_smem, bars):
    """Writes the states (C, n) before all chunks of a head."""
    chunks, (b, head) = w.decay.shape[2], mosaic.divide(lax.axis_index("head"), w.decay.shape[1])

    def fetch(t):
        for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
            source = ref.at[b, pl.ds(t * TILE, TILE), head]
            plgpu.copy_gmem_to_smem(source, smem.at[t % 2], bars.at[t % 2])

    def step(acc, t, n):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the state before has left c_smem
        c_smem[...] = acc[...].astype(c_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(c_smem, c_ref.at[b, head, t])
        mosaic.store(n_ref.at[b, head, t], n)
        plgpu.barrier_wait(bars.at[t % 2])
        n = add_chunk(acc, n, k_smem.at[t % 2], v_smem.at[t % 2], scaled, w, (b, head, t))
        pl.when(t + 2 < chunks)(lambda: fetch(t + 2))
        return n

    def steps(acc):
        acc[...] = mosaic.zeros(c_smem.shape, WGMMA)
        n = mosaic.zeros(n_ref.shape[3:], COL)
        lax.fori_loop(0, chunks, functools.partial(step, acc), n)

    pl.loop(0, min(2, chunks))(fetch)
    pl.run_scoped(steps, plgpu.ACC(c_smem.shape, jnp.float32))
    plgpu.wait_smem_to_gmem(0)


def outputs(q_ref, k_ref, v_ref, c_ref, n_ref, w, h_ref, *, q_smem, k_smem, v_smem, c_smem, bar):
    """Writes h of a chunk."""
    b, head = mosaic.divide(lax.axis_index("head"), w.decay.shape[1])
    t = lax.axis_index("chunk")
    own = lambda ref: ref.at[b, pl.ds(t * TILE, TILE), head]
    for ref, smem in ((q_ref, q_smem), (k_ref, k_smem), (v_ref, v_smem)):
        plgpu.copy_gmem_to_smem(own(ref), smem, bar)
    plgpu.copy_gmem_to_smem(c_ref.at[b, head, t], c_smem, bar)
    n = mosaic.load(n_ref.at[b, head, t], COL)
    plgpu.barrier_wait(bar)
    h = output(q_smem, k_smem, v_smem, c_smem, n, w, (b, head, t))
    v_smem[...] = h.astype(v_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(v_smem, own(h_ref))
    plgpu.wait_smem_to_gmem(0)


def vlstm(q, k, v, i, f):
    """h for q, k (B, T, NH, DQK), v (B, T, NH, DV), and the gates i, f (B, T, NH)."""
    (batch, _, heads, dqk), dv, chunks = q.shape, v.shape[-1], q.shape[1] // TILE
    w, grid = weights(i, f, TILE, dqk**-0.5), dict(head=batch * heads)
    tile = lambda *shape: buffer(q.dtype, *shape)
    k_v = lambda *stages: dict(k_smem=tile(*stages, TILE, dqk), v_smem=tile(*stages, TILE, dv))
    of_head = lambda dtype, *shape: jax.ShapeDtypeStruct((batch, heads, chunks, *shape), dtype)
    c, n = mosaic.kernel(
        walk,
        out_type=(of_head(q.dtype, dqk, dv), of_head(jnp.float32, dqk)),
        scratch_types=k_v(2)
        | dict(
            scaled=tile(TILE, dqk),
            c_smem=tile(dqk, dv),
            bars=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ),
        **mosaic.grid(**grid),
    )(k, v, w)
    return mosaic.kernel(
        outputs,
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types=dict(q_smem=tile(TILE, dqk), c_smem=tile(dqk, dv))
        | k_v()
        | dict(bar=plgpu.Barrier(num_arrivals=4)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(**grid, chunk=chunks),
    )(q, k, v, c, n, w)
