"""A matmul on Hopper and the activation after it; for a gated activation two matmuls.

    one weight     z = x W + bias                      h, dh/dz = tile(z)
    two weights    gate = x W_gate,   up = x W_up,     h, dh/dgate, dh/dup = tile(gate, up)

The derivatives are what the backward pass multiplies with.  They take as many bytes as the
products, share most of their arithmetic with h, and leave the backward kernel a product instead of
a sigmoid.  XLA's matmuls write gate and up, and a third kernel reads them again; here one kernel
writes all.  The blocks, warpgroups and schedule are matmul_epilogue.py's.

A tile has 160 or 192 rows of x and 64 columns of each weight, or 128 of the only one.  wgmma
computes its two products of 64 columns transposed, W^T x^T, so each is as wide as the tile has
rows.  (One wgmma for both weights would need their steps interleaved in one buffer, which TMA
cannot do; x W in a wgmma for each would be 64 wide and read x more often.)  Stores to shared memory
transpose the results back.  Only results are rounded to 16 bits; the products never are.

    step s of C      x (rows, 64)   two of weights (64, 64)      ring of `stages` buffers
    part p of rows   three results, or twice two (part, 64)      `slots` buffers a warpgroup
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.activations.matmul_epilogue import BlockTiles, Schedule, alternate

_COLUMNS = 64  # of a product: the rows of one wgmma, and one swizzle
_STEP = 64  # of C: 128 bytes, one swizzle


class _Tiles(NamedTuple):
    """How a tile is cut."""

    rows: int  # of x in a tile: as many accumulators a thread
    stages: int  # buffers for steps, 36 KB each with 160 rows, 40 with 192
    part: int  # rows of a tile that are computed and stored at a time
    slots: int  # buffers of a warpgroup for parts
    group: int  # rows of tiles in a group; blocks work on one group at a time


# By the number of weights: the best of the sweep in docs/performance.md that spill no registers.
_TILES = {1: _Tiles(160, 5, 16, 2, 8), 2: _Tiles(192, 4, 32, 1, 8)}
_FEWEST = 4  # tiles for each SM; the shapes that were timed have 40 and more


def why_slower(x, weights: int, f: int) -> str | None:
    """Why XLA's matmuls of x (..., C) and one or two weights (C, f) are faster, or None."""
    rows, columns = _grid(x.size // max(x.shape[-1], 1), f, weights)
    tiles, sms = rows * columns, mosaic.sm_count()
    few = tiles < _FEWEST * sms  # counted, not timed
    return f"{tiles} tiles of the kernel divide badly among {sms} SMs" if few else None


def _grid(n: int, f: int, weights: int) -> tuple[int, int]:
    """Rows and columns of tiles."""
    return mosaic.cdiv(n, _TILES[weights].rows), weights * f // (2 * _COLUMNS)


@functools.partial(jax.jit, static_argnames=("tile", "name", "sms"))
def activated_matmul(x, weights, bias, tile, *, name, sms: int):
    """tile of the products: h and its derivatives, arrays (N, F) of x's dtype.

    x: (N, C).  weights: one or two arrays (C, F), one with F a multiple of 128.
    bias: (F,) of one weight, or None.
    tile(*products): a tuple of h and its derivative by each product, in float32.
    sms: number of blocks.
    """
    (n, c), f, t = x.shape, weights[0].shape[1], _TILES[len(weights)]
    rows, columns = _grid(n, f, len(weights))
    steps, blocks = c // _STEP, min(sms, rows * columns)
    s = Schedule(rows, columns, steps, min(t.stages, steps), t.slots, blocks, t.group)
    smem = lambda count, rows: plgpu.SMEM(
        (count, rows, 64), x.dtype, transforms=mosaic.wgmma_tiles(64, x.dtype)
    )
    return mosaic.kernel(
        functools.partial(_body, s, t, tile),
        name=name,
        out_type=[jax.ShapeDtypeStruct((n, f), x.dtype)] * (len(weights) + 1),
        scratch_types=dict(
            x_smem=smem(s.stages, t.rows),
            weight_smems=(smem(s.stages, _STEP),) * 2,
            out_smems=(smem(2 * s.slots, t.part),) * (5 - len(weights)),
            step_bars=plgpu.Barrier(num_arrivals=3, num_barriers=2 * s.stages),
        ),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weights, bias)


def _body(s: Schedule, t: _Tiles, tile, x, weights, bias, *outputs, **scratch):
    """Fills the ring; then the warpgroups alternate."""
    x_smem, weight_smems, out_smems, step_bars = scratch.values()

    def columns_of(column):  # of both products
        if len(weights) == 2:
            return (pl.ds(column * _COLUMNS, _COLUMNS),) * 2
        return [pl.ds((2 * column + i) * _COLUMNS, _COLUMNS) for i in range(2)]

    def copy_step(ring, n, row, column, step):
        rows, at = pl.ds(row * t.rows, t.rows), pl.ds(step * _STEP, _STEP)
        ring.send(n, x.at[rows, at], x_smem)
        both = weights[0], weights[-1]
        for ref, columns, smem in zip(both, columns_of(column), weight_smems, strict=True):
            ring.send(n, ref.at[at, columns], smem)

    def start_step(stage, *accs):  # of both products W^T x^T
        for acc, smem in zip(accs, weight_smems, strict=True):
            x_step = x_smem.at[stage].transpose((1, 0))
            plgpu.wgmma(acc, smem.at[stage].transpose((1, 0)), x_step)

    def epilogue(mine: BlockTiles, _, j, here, *products):  # a part of the rows at a time
        row, column = here
        both, parts, biases = columns_of(column), t.rows // t.part, []
        if bias is not None:
            biases = [mosaic.load(bias.at[c], mosaic.WGMMA.reduce(1)) for c in both]
        for p in range(parts):
            # This part's buffers are free once only the stores of the other slots are pending.
            slot = mine.wg * s.slots + lax.rem(j * parts + p, jnp.int32(s.slots))
            plgpu.wait_smem_to_gmem(len(out_smems) * (s.slots - 1), wait_read_only=True)
            sums = [y[:, p * t.part : (p + 1) * t.part] for y in products]
            if biases:
                sums = [y + mosaic.along(b, y.shape, 0) for y, b in zip(sums, biases, strict=True)]
            results = tile(*sums) if len(weights) == 2 else [z for y in sums for z in tile(y)]
            smems = [smem.at[slot] for smem in out_smems]
            for smem, result in zip(smems, results, strict=True):
                smem.transpose((1, 0))[...] = result.astype(x.dtype)
            plgpu.commit_smem()

            rows, each = pl.ds(row * t.rows + p * t.part, t.part), len(outputs)
            for k, smem in enumerate(smems):
                target = outputs[k % each].at[rows, both[k // each]]
                plgpu.copy_smem_to_gmem(smem, target)

    accs = [plgpu.ACC((_COLUMNS, t.rows), jnp.float32)] * 2
    alternate(s, step_bars, accs, copy_step, start_step, epilogue)
