"""Rung 2: dK and dV in one kernel, which computes S and P once for both.

The blocks of dK and of dV own the same keys and see the same queries, and both need P.  So one
kernel makes both gradients, with two accumulators: four matmuls for a tile instead of five, half
the copies, and one exp for each score instead of two.

    S^T = K Q^T   ->  P^T   ->  p_smem    ->  dV += P^T dO
    dP^T = V dO^T ->  dS^T  ->  ds_smem   ->  dK += dS^T Q

dQ stays a separate kernel, with S and dP once more: seven matmuls in all.  One kernel for all
three would need only five.  But its blocks would own keys, and each would have a part of every dQ:
to add the parts up, blocks must wait for each other or add in the order in which they come, which
changes the last bits from run to run.

Counted: dQ takes 4 us for 64 x 64 scores as before, and dK and dV together 5 instead of 7: 2.3 ms.

Measured: 1.16 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.attention_backward.rung1_kernel_each import gradient, row_sums, times
from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, LOG2E, WGMMA, along

TILE = 64  # keys of a block, queries of a step


def attention_backward(q, k, v, o, lse, do):
    """(dq, dk, dv) (B, T, H, D); lse (B, H, T) in float32."""
    delta = row_sums(o, do)
    return gradient("dq", q, do, k, v, lse, delta), *by_keys(q, k, v, do, lse, delta)


def by_keys(q, k, v, do, lse, delta):
    """dK and dV."""
    (b, _, h, d), tiles = q.shape, q.shape[1] // TILE

    def body(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, k_smem, v_smem,
             q_smem, do_smem, p_smem, ds_smem, kv_bar, bar):  # fmt: skip
        batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]

        def statistic(ref, i):  # a number for each column of S^T
            at = ref.at[batch, head, pl.ds(i * TILE, TILE)]
            return along(mosaic.load(at, COL), (TILE, TILE), 1)

        def step(dk_acc, dv_acc, i, diagonal):
            plgpu.copy_gmem_to_smem(tile_of(q_ref, i), q_smem, bar)
            plgpu.copy_gmem_to_smem(tile_of(do_ref, i), do_smem, bar)
            plgpu.barrier_wait(bar)
            s = times(k_smem, q_smem) * (d**-0.5 * LOG2E) - statistic(lse_ref, i) * LOG2E
            if diagonal:
                iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
                s = jnp.where(iota(1) >= iota(0), s, -1e30)
            p = jnp.exp2(s)
            p_smem[...] = p.astype(p_smem.dtype)
            ds = p * (times(v_smem, do_smem) - statistic(delta_ref, i))
            ds_smem[...] = ds.astype(ds_smem.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(dv_acc, p_smem, do_smem)
            plgpu.wgmma(dk_acc, ds_smem, q_smem)
            plgpu.wgmma_wait(0)

        def add(dk_acc, dv_acc):
            step(dk_acc, dv_acc, row, True)
            pl.loop(row + 1, tiles)(lambda i: step(dk_acc, dv_acc, i, False))
            return dk_acc[...], dv_acc[...]

        plgpu.copy_gmem_to_smem(tile_of(k_ref, row), k_smem, kv_bar)
        plgpu.copy_gmem_to_smem(tile_of(v_ref, row), v_smem, kv_bar)
        plgpu.barrier_wait(kv_bar)
        dk, dv = pl.run_scoped(add, *[plgpu.ACC((TILE, d), jnp.float32)] * 2)
        mosaic.store(tile_of(dk_ref, row), dk * d**-0.5)
        mosaic.store(tile_of(dv_ref, row), dv)

    smem = lambda cols: plgpu.SMEM(
        (TILE, cols), q.dtype, transforms=mosaic.wgmma_tiles(cols, q.dtype)
    )
    bar = plgpu.Barrier(num_arrivals=2)
    return mosaic.kernel(
        body,
        name="dk_dv",
        out_type=[jax.ShapeDtypeStruct(q.shape, q.dtype)] * 2,
        scratch_types=dict(k_smem=smem(d), v_smem=smem(d), q_smem=smem(d), do_smem=smem(d),
                           p_smem=smem(TILE), ds_smem=smem(TILE), kv_bar=bar, bar=bar),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(batch=b, head=h, row=tiles),
    )(q, k, v, do, lse, delta)  # fmt: skip
