"""Rung 4: the next tiles arrive during a step, and work goes on under matmuls.

Two stages of y and y2, filled by TMA: a step first starts the copies for the next one, into the
stage that the step before has left.  The statistics of the queries come along where queries stream.

S and dP are issued together, and everything else goes on under a matmul:

    tensor core   | S      | dP            | dV += P dO | dK += dS Q        | S of the next ...
    threads       | wait   | P from S      | dS         | wait              |

plgpu.wgmma_accumulator_load(s_acc, wait_n=1) takes S while dP may still run; wgmmas end in the
order of their start.  In the kernel of the queries there is no dV.

Counted: seven matmuls for 64 x 64 scores take 1.2 us of the tensor core.  Two blocks share an SM,
so one may multiply while the other one waits for its threads.  If 0.45 us are left, for the first
copies of a block, for what the threads do alone and for storing: 0.84 ms.

Measured: 878 us.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.attention_backward.rung1_kernel_each import row_sums
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
    accumulator = lambda cols: plgpu.ACC((TILE, cols), jnp.float32)

    def body(x_ref, x2_ref, y_ref, y2_ref, lse_ref, delta_ref, out_refs, *, x_smem, x2_smem, y_smem,
             y2_smem, lse_smem, delta_smem, x_bar, y_bars):  # fmt: skip
        batch, head, row = map(lax.axis_index, ("batch", "head", "row"))
        steps = tiles - row if by_keys else row + 1  # the first one is at the diagonal
        tile_of = lambda ref, i: ref.at[batch, pl.ds(i * TILE, TILE), head]
        numbers_of = lambda ref, i: ref.at[batch, head, pl.ds(i * TILE, TILE)]

        def fetch(n):
            stage, i = lax.rem(n, jnp.int32(2)), row + n if by_keys else row - n
            bar = y_bars.at[stage]
            plgpu.copy_gmem_to_smem(tile_of(y_ref, i), y_smem.at[stage], bar)
            plgpu.copy_gmem_to_smem(tile_of(y2_ref, i), y2_smem.at[stage], bar)
            if by_keys:
                plgpu.copy_gmem_to_smem(numbers_of(lse_ref, i), lse_smem.at[stage], bar)
                plgpu.copy_gmem_to_smem(numbers_of(delta_ref, i), delta_smem.at[stage], bar)

        def statistic(own, smem, stage):
            ours = mosaic.load(smem.at[stage], COL) if by_keys else own
            return along(ours, (TILE, TILE), int(by_keys))

        def step(own, accs, n, diagonal, s_acc, dp_acc):
            stage = lax.rem(n, jnp.int32(2))
            pl.when(n + 1 < steps)(lambda: fetch(n + 1))
            plgpu.barrier_wait(y_bars.at[stage])
            plgpu.wgmma(s_acc, x_smem, y_smem.at[stage].transpose((1, 0)))
            plgpu.wgmma(dp_acc, x2_smem, y2_smem.at[stage].transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1) * (d**-0.5 * LOG2E)
            s = s - statistic(own[0], lse_smem, stage) * LOG2E
            if diagonal:
                iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=WGMMA)
                s = jnp.where(iota(by_keys) >= iota(1 - by_keys), s, -1e30)
            p = jnp.exp2(s)
            if by_keys:
                plgpu.wgmma(accs[1], p.astype(x.dtype), y2_smem.at[stage])
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=int(by_keys))
            ds = p * (dp - statistic(own[1], delta_smem, stage))
            plgpu.wgmma(accs[0], ds.astype(x.dtype), y_smem.at[stage])
            plgpu.commit_smem()  # threads have read the statistics: TMA may write there
            plgpu.wgmma_wait(0)

        def add(*accs):
            refs = () if by_keys else (lse_ref, delta_ref)
            own = [mosaic.load(numbers_of(ref, row), ROW) for ref in refs] or [None] * 2
            one = lambda n, diagonal: pl.run_scoped(
                functools.partial(step, own, accs, n, diagonal), *[accumulator(TILE)] * 2
            )
            one(jnp.int32(0), True)
            pl.loop(1, steps)(lambda n: one(n, False))
            return [acc[...] for acc in accs]

        fetch(jnp.int32(0))
        plgpu.copy_gmem_to_smem(tile_of(x_ref, row), x_smem, x_bar)
        plgpu.copy_gmem_to_smem(tile_of(x2_ref, row), x2_smem, x_bar)
        plgpu.barrier_wait(x_bar)
        totals = pl.run_scoped(add, *[accumulator(d)] * (1 + by_keys))
        for ref, total, factor in zip(out_refs, totals, (d**-0.5, 1), strict=False):
            mosaic.store(tile_of(ref, row), total * factor)

    transforms = mosaic.wgmma_tiles(d, x.dtype)
    tile, ring = (plgpu.SMEM((*n, TILE, d), x.dtype, transforms=transforms) for n in ((), (2,)))
    numbers = plgpu.SMEM((2, TILE), jnp.float32)
    return mosaic.kernel(
        body,
        name="dk_dv" if by_keys else "dq",
        out_type=[[jax.ShapeDtypeStruct(x.shape, x.dtype)] * (1 + by_keys)],
        scratch_types=dict(x_smem=tile, x2_smem=tile, y_smem=ring, y2_smem=ring, lse_smem=numbers,
                           delta_smem=numbers, x_bar=plgpu.Barrier(num_arrivals=2),
                           y_bars=plgpu.Barrier(num_arrivals=2 + 2 * by_keys, num_barriers=2)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic.grid(batch=b, head=h, row=tiles),
    )(x, x2, y, y2, lse, delta)[0]  # fmt: skip
