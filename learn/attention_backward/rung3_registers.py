"""Rung 3: P and dS stay in registers.

As in rung 3 of attention: the result of a wgmma is where the next one wants its left operand.  This
is why S and dP are computed transposed in the kernel of the keys: P^T and dS^T are left operands of
dV += P^T dO and dK += dS^T Q as they are.  Computed as S = Q K^T, they would have to be transposed
through shared memory.

    by queries    S = Q K^T,    dP = dO V^T     dQ += dS K
    by keys       S^T = K Q^T,  dP^T = V dO^T   dK += dS^T Q,  dV += P^T dO

Both kernels are now one program again, with x, x2 for what a block owns and y, y2 for what streams.
The one by keys holds two accumulators of 64 numbers a thread and two tiles of 32: it needs nearly
all of the 255 registers that a thread may have.

Counted: no way through shared memory and no wait for it: 3 us for a tile by queries and 3.5 by keys
instead of 4 and 5: 1.6 ms.

Measured: 1.09 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.attention_backward.rung1_kernel_each import row_sums, times
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, LOG2E, ROW, WGMMA, along

TILE = 64  # rows of a block and of a step


def attention_backward(q, k, v, o, lse, do):
    """(dq, dk, dv) (B, T, H, D); lse (B, H, T) in float32."""
    delta = row_sums(o, do)
    dq = gradients(False, q, do, k, v, lse, delta)
    return *dq, *gradients(True, k, v, q, do, lse, delta)


def gradients(by_keys, x, x2, y, y2, lse, delta):
    """[dQ], or [dK, dV]."""
    (b, _, h, d), tiles = x.shape, x.shape[1] // TILE

    def body(x_ref, x2_ref, y_ref, y2_ref, lse_ref, delta_ref, out_refs, *, x_smem, x2_smem, y_smem,
             y2_smem, x_bar, y_bar):  # fmt: skip
        batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]

        def statistic(ref, i):  # of the queries: for the columns of S^T, or the rows of S
            at = ref.at[batch, head, pl.ds((i if by_keys else row) * TILE, TILE)]
            return along(mosaic.load(at, COL if by_keys else ROW), (TILE, TILE), int(by_keys))

        def step(accs, i, diagonal):
            plgpu.copy_gmem_to_smem(tile_of(y_ref, i), y_smem, y_bar)
            plgpu.copy_gmem_to_smem(tile_of(y2_ref, i), y2_smem, y_bar)
            plgpu.barrier_wait(y_bar)
            s = times(x_smem, y_smem) * (d**-0.5 * LOG2E) - statistic(lse_ref, i) * LOG2E
            if diagonal:
                iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
                s = jnp.where(iota(by_keys) >= iota(1 - by_keys), s, -1e30)
            p = jnp.exp2(s)
            if by_keys:
                plgpu.wgmma(accs[1], p.astype(x.dtype), y2_smem)
            ds = p * (times(x2_smem, y2_smem) - statistic(delta_ref, i))
            plgpu.wgmma(accs[0], ds.astype(x.dtype), y_smem)
            plgpu.wgmma_wait(0)

        def add(*accs):
            step(accs, row, True)
            pl.loop(*((row + 1, tiles) if by_keys else (0, row)))(lambda i: step(accs, i, False))
            return [acc[...] for acc in accs]

        plgpu.copy_gmem_to_smem(tile_of(x_ref, row), x_smem, x_bar)
        plgpu.copy_gmem_to_smem(tile_of(x2_ref, row), x2_smem, x_bar)
        plgpu.barrier_wait(x_bar)
        totals = pl.run_scoped(add, *[plgpu.ACC((TILE, d), jnp.float32)] * (1 + by_keys))
        for ref, total, factor in zip(out_refs, totals, (d**-0.5, 1), strict=False):
            mosaic.store(tile_of(ref, row), total * factor)

    tile = plgpu.SMEM((TILE, d), x.dtype, transforms=mosaic.wgmma_tiles(d, x.dtype))
    bar = plgpu.Barrier(num_arrivals=2)
    return mosaic.kernel(
        body,
        name="dk_dv" if by_keys else "dq",
        out_type=[[jax.ShapeDtypeStruct(x.shape, x.dtype)] * (1 + by_keys)],
        scratch_types=dict(x_smem=tile, x2_smem=tile, y_smem=tile, y2_smem=tile, x_bar=bar,
                           y_bar=bar),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(batch=b, head=h, row=tiles),
    )(x, x2, y, y2, lse, delta)[0]  # fmt: skip
