"""Rung 1: the formula, kernel by kernel, with the scores in memory.

    S = c Q K^T,   P = softmax of the rows of S,   O = P V       c = 1 / sqrt(D)

Three kernels, one for each line of the formula: a matmul (rung 4 of matmul, 64 x 64 tiles), a
softmax with a warp for each row that stays in registers (rung 4 of layer norm), and a matmul.  A
query sees only keys up to its own position, so the first kernel leaves out tiles above the
diagonal, the second one gives probability 0 to what is later, and the third one stops there.

    Q, K  ->  | scores |  ->  S (T, T) float32  ->  | softmax |  ->  P (T, T) bfloat16
                                                       P, V  ->  | values |  ->  O

Counted: with 32 heads of 4096 queries half of S is written, 1.1 GB, and all of it read, 2.1 GB; P
is written, 1.1 GB, and half of it read, 0.5 GB.  That is 4.8 GB at 2.95 TB/s: 1.6 ms, for matmuls
of 0.17 ms.

Measured: 1.84 ms.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

TILE, STEP = 64, 128
SMALL = {"batch": 1, "heads": 1}  # for the interpreter
LAYOUT = mosaic.warp_rows(4)  # a warp's load: 128 columns of a row


def attention(q, k, v):
    """O (B, T, H, D) for q, k, v (B, T, H, D)."""
    (b, t, h, d), tiles = q.shape, q.shape[1] // TILE
    heads = dict(batch=b, head=h)
    smem = lambda cols: plgpu.SMEM(
        (TILE, cols), q.dtype, transforms=mosaic.wgmma_tiles(cols, q.dtype)
    )
    bar = plgpu.Barrier(num_arrivals=2)
    s = mosaic.kernel(
        scores,
        name="scores",
        out_type=jax.ShapeDtypeStruct((b, h, t, t), jnp.float32),
        scratch_types=dict(q_smem=smem(d), k_smem=smem(d), bar=bar),
        **mosaic.grid(**heads, row=tiles, column=tiles),
    )(q, k)
    p = mosaic.kernel(
        softmax,
        name="softmax",
        out_type=jax.ShapeDtypeStruct(s.shape, q.dtype),
        **mosaic.grid(**heads, row=t // 4),
    )(s)
    return mosaic.kernel(
        values,
        name="values",
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=dict(p_smem=smem(TILE), v_smem=smem(d), bar=bar),
        **mosaic.grid(**heads, row=tiles),
    )(p, v)


def scores(q_ref, k_ref, s_ref, *, q_smem, k_smem, bar):
    """A tile of S."""
    batch, head, row, column = map(lax.axis_index, ("batch", "head", "row", "column"))
    of_q, of_k = pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)

    @pl.when(column <= row)
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[batch, of_q, head], q_smem, bar)
        plgpu.copy_gmem_to_smem(k_ref.at[batch, of_k, head], k_smem, bar)
        plgpu.barrier_wait(bar)

        def multiply(acc):
            plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))
        mosaic.store(s_ref.at[batch, head, of_q, of_k], s * q_ref.shape[-1] ** -0.5)


def softmax(s_ref, p_ref):
    """Four rows of P."""
    batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
    mine, shape = pl.ds(row * 4, 4), (4, STEP)
    at = lambda ref, i: ref.at[batch, head, mine, pl.ds(i * STEP, STEP)]
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)
    data = []
    for i in range(s_ref.shape[-1] // STEP):
        seen = iota(1) + i * STEP <= iota(0) + row * 4
        data.append(jnp.where(seen, mosaic.load(at(s_ref, i), LAYOUT), -1e30))
    top = mosaic.along(jnp.max(functools.reduce(jnp.maximum, data), axis=1), shape, 0)
    data = [jnp.exp(x - top) for x in data]
    inverse = mosaic.along(1 / jnp.sum(sum(data), axis=1), shape, 0)
    for i, x in enumerate(data):
        mosaic.store(at(p_ref, i), x * inverse)


def values(p_ref, v_ref, o_ref, *, p_smem, v_smem, bar):
    """64 rows of O."""
    batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
    of_q = pl.ds(row * TILE, TILE)

    def multiply(acc):
        @pl.loop(0, row + 1)
        def _(i):
            of_k = pl.ds(i * TILE, TILE)
            plgpu.copy_gmem_to_smem(p_ref.at[batch, head, of_q, of_k], p_smem, bar)
            plgpu.copy_gmem_to_smem(v_ref.at[batch, of_k, head], v_smem, bar)
            plgpu.barrier_wait(bar)
            plgpu.wgmma(acc, p_smem, v_smem)
            plgpu.wgmma_wait(0)

        return acc[...]

    o = pl.run_scoped(multiply, plgpu.ACC(v_smem.shape, jnp.float32))
    mosaic.store(o_ref.at[batch, of_q, head], o)
