"""Sums of dQ, dK and dV over their rows, the gradient of a bias before attention, on Hopper.

A warpgroup stores 64 rows of a gradient through a buffer in shared memory.  From there the tensor
core sums its columns, in float32, as a product of which all columns are alike:

    buffer^T (D, 64)  x  ones (64, 8)

Each buffer leaves one row of partial sums, 1/32 of its bytes, and XLA adds these up: always in the
same order.  It would otherwise read the whole gradient again, for 52 us a layer of GPT-2 124M (32 x
1024 tokens) on an H100.  Rows past T are zero: their dO is, and no query sees their keys.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.schedule import Schedule
from pallas_kernels.mosaic import ROWS, WGMMA

_COLUMNS = 8  # of the narrowest wgmma


def sums_columns(general: bool, width: int) -> bool:
    """Whether the backward kernels can sum gradients of that head dimension.

    wgmma sums 64 columns at a time.  At D = 256 shared memory is full.
    """
    return not general and width in (64, 128)


def partial_sums(qkv) -> jax.ShapeDtypeStruct:
    """The partial sums of the gradient of qkv (B, T, P, D): (B, blocks of 64 rows, P, D)."""
    b, t, *heads = qkv.shape
    return jax.ShapeDtypeStruct((b, mosaic.cdiv(t, ROWS), *heads), jnp.float32)


def ones_buffers(s: Schedule):
    """Shared memory for the ones; each warpgroup has its own, so that none waits for another."""
    tiling = mosaic.wgmma_tiles(ROWS, s.dtype)
    return plgpu.SMEM((s.wgs, _COLUMNS, ROWS), s.dtype, transforms=tiling)


def fill(ones) -> None:
    """Fills the warpgroup's buffer of ones."""
    value = plgpu.layout_cast(jnp.ones((ROWS, _COLUMNS), ones.dtype), WGMMA)
    ones.transpose((1, 0))[...] = value
    plgpu.commit_smem()


def store(sums_ref, ones, buffers, batch, row, heads) -> None:
    """Stores the sums of the columns of committed buffers, which begin at row `row`.

    buffers, heads: the tiles (64, D) of a gradient, and the head of each.
    """

    def multiply(*accs):
        for acc, buffer in zip(accs, buffers, strict=True):
            plgpu.wgmma(acc, buffer.transpose((1, 0)), ones.transpose((1, 0)))
        for acc, head in zip(accs, heads, strict=True):
            target = sums_ref.at[batch, lax.div(row, jnp.int32(ROWS)), head]
            mosaic.store(target, jnp.max(acc[...], axis=1))

    acc = plgpu.ACC((buffers[0].shape[1], _COLUMNS), jnp.float32)
    pl.run_scoped(multiply, *[acc] * len(buffers))
