"""Rung 1: a kernel for each gradient, and P computed again from one number a row.

    S = c Q K^T,  P = exp(S - lse),  dP = dO V^T,  dS = P (dP - delta)          c = 1 / sqrt(D)
    dQ = c dS K      dK = c dS^T Q      dV = P^T dO      delta = sums of the rows of dO O

The forward pass has saved O and lse, the logarithm of each row's sum of exp(S): from it any block
computes any tile of P without a running softmax.  delta is a small kernel of XLA's.  dQ is a sum
over keys, so its blocks own 64 queries, and keys stream by; dK and dV are sums over queries, so
their blocks own keys, and queries stream by.  They compute S and dP transposed.  So one program
serves all three, with x, x2 for what a block owns and y, y2 for what streams:

    gradient   x, x2     y, y2     S or S^T, dP or dP^T     added in each step
    dQ         Q, dO     K, V      x y^T, x2 y2^T           dS y
    dK         K, V      Q, dO     x y^T, x2 y2^T           dS^T y
    dV         K, V      Q, dO     x y^T                    P^T y2

P or dS goes through shared memory to the tensor core.

Counted: dQ and dK take three matmuls, dV two.  With everything one after the other, some 4, 4 and
3 us for 64 x 64 scores; 66560 such tiles, two blocks on each of 132 SMs: 2.8 ms.

Measured: 1.40 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, LOG2E, ROW, WGMMA, along

TILE = 64  # rows of a block and of a step


def attention_backward(q, k, v, o, lse, do):
    """(dq, dk, dv) (B, T, H, D); lse (B, H, T) in float32."""
    delta = row_sums(o, do)
    dq = gradient("dq", q, do, k, v, lse, delta)
    return dq, *(gradient(of, k, v, q, do, lse, delta) for of in ("dk", "dv"))


def row_sums(o, do):
    """delta (B, H, T)."""
    return jnp.einsum("bthd,bthd->bht", o.astype(jnp.float32), do.astype(jnp.float32))


def times(a, b):
    """a b^T of two tiles in shared memory."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32))


def gradient(of, x, x2, y, y2, lse, delta):
    """dQ, dK or dV."""
    (b, t, h, d), by_keys = x.shape, of != "dq"
    tiles = t // TILE

    def body(x_ref, x2_ref, y_ref, y2_ref, lse_ref, delta_ref, out_ref, *, x_smem, x2_smem, y_smem,
             y2_smem, p_smem, x_bar, y_bar):  # fmt: skip
        batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]

        def statistic(ref, i):  # of the queries: for the columns of S^T, or the rows of S
            at = ref.at[batch, head, pl.ds((i if by_keys else row) * TILE, TILE)]
            return along(mosaic.load(at, COL if by_keys else ROW), (TILE, TILE), int(by_keys))

        def step(acc, i, diagonal):
            plgpu.copy_gmem_to_smem(tile_of(y_ref, i), y_smem, y_bar)
            plgpu.copy_gmem_to_smem(tile_of(y2_ref, i), y2_smem, y_bar)
            plgpu.barrier_wait(y_bar)
            s = times(x_smem, y_smem) * (d**-0.5 * LOG2E) - statistic(lse_ref, i) * LOG2E
            if diagonal:
                iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
                s = jnp.where(iota(by_keys) >= iota(1 - by_keys), s, -1e30)
            p = jnp.exp2(s)
            if of != "dv":
                p = p * (times(x2_smem, y2_smem) - statistic(delta_ref, i))
            p_smem[...] = p.astype(p_smem.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(acc, p_smem, y2_smem if of == "dv" else y_smem)
            plgpu.wgmma_wait(0)

        def add(acc):
            step(acc, row, True)
            pl.loop(*((row + 1, tiles) if by_keys else (0, row)))(lambda i: step(acc, i, False))
            return acc[...]

        plgpu.copy_gmem_to_smem(tile_of(x_ref, row), x_smem, x_bar)
        plgpu.copy_gmem_to_smem(tile_of(x2_ref, row), x2_smem, x_bar)
        plgpu.barrier_wait(x_bar)
        total = pl.run_scoped(add, plgpu.ACC((TILE, d), jnp.float32))
        mosaic.store(tile_of(out_ref, row), total * (1 if of == "dv" else d**-0.5))

    smem = lambda cols: plgpu.SMEM(
        (TILE, cols), x.dtype, transforms=mosaic.wgmma_tiles(cols, x.dtype)
    )
    bar = plgpu.Barrier(num_arrivals=2)
    return mosaic.kernel(
        body,
        name=of,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(x_smem=smem(d), x2_smem=smem(d), y_smem=smem(d), y2_smem=smem(d),
                           p_smem=smem(TILE), x_bar=bar, y_bar=bar),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(batch=b, head=h, row=tiles),
    )(x, x2, y, y2, lse, delta)  # fmt: skip
