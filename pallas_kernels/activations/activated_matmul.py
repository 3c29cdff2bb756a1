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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.activations.matmul_epilogue import Schedule, multiply

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


class _Refs(NamedTuple):
    """The references of a block, and its position."""

    tiles: _Tiles
    x: Any
    weights: Any
    bias: Any  # or None
    outputs: Any  # h and its derivatives
    x_smem: Any
    weight_smems: Any
    out_smems: Any
    step_bars: Any
    wg: Any
    block: Any
    count: Any  # number of this block's tiles

    def columns(self, column):
        """The columns of both products of a tile."""
        if len(self.weights) == 2:
            return (pl.ds(column * _COLUMNS, _COLUMNS),) * 2
        return [pl.ds((2 * column + i) * _COLUMNS, _COLUMNS) for i in range(2)]


def _body(s: Schedule, t: _Tiles, tile, x, weights, bias, *outputs, **scratch):
    """A block fills the ring, then its warpgroups alternate over its tiles."""
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = s.tiles_of(block)
    refs = _Refs(t, x, weights, bias, outputs, **scratch, wg=wg, block=block, count=count)

    @pl.when(wg == 0)
    def _():
        first = s.place(0, block, count)
        pl.loop(0, s.stages)(lambda step: _copy_step(s, refs, 0, *first, step))

    @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
    def _(j):
        i = 2 * j + wg
        here = s.place(i, block, count)
        acc = plgpu.ACC((_COLUMNS, t.rows), jnp.float32)
        run = functools.partial(multiply, s, refs, _copy_step, _start_step, i, here)
        _epilogue(s, refs, tile, j, here, pl.run_scoped(run, acc, acc))

    plgpu.wait_smem_to_gmem(0)


def _copy_step(s: Schedule, refs: _Refs, i, row, column, step):
    """Starts the copies of one step of x and of both products' weights of the i-th tile."""
    ring, n = s.ring(refs.step_bars, i), i * s.steps + step
    rows = pl.ds(row * refs.tiles.rows, refs.tiles.rows)
    at = pl.ds(step * _STEP, _STEP)
    ring.send(n, refs.x.at[rows, at], refs.x_smem)
    both = refs.weights[0], refs.weights[-1]
    for ref, columns, smem in zip(both, refs.columns(column), refs.weight_smems, strict=True):
        ring.send(n, ref.at[at, columns], smem)


def _start_step(refs: _Refs, stage, *accs):
    """Starts to add one step of both products W^T x^T."""
    for acc, smem in zip(accs, refs.weight_smems, strict=True):
        x_step = refs.x_smem.at[stage].transpose((1, 0))
        plgpu.wgmma(acc, smem.at[stage].transpose((1, 0)), x_step)


def _epilogue(s: Schedule, refs: _Refs, tile, j, here, products):
    """Stores the results of the warpgroup's j-th tile, a part of the rows at a time."""
    row, column = here
    both, t, dtype = refs.columns(column), refs.tiles, refs.x.dtype
    parts = t.rows // t.part
    biases = []
    if refs.bias is not None:
        biases = [mosaic.load(refs.bias.at[c], mosaic.WGMMA.reduce(1)) for c in both]
    for p in range(parts):
        # The buffers of this part are free once only the stores of the other slots are pending.
        slot = refs.wg * s.slots + lax.rem(j * parts + p, jnp.int32(s.slots))
        plgpu.wait_smem_to_gmem(len(refs.out_smems) * (s.slots - 1), wait_read_only=True)
        sums = [x[:, p * t.part : (p + 1) * t.part] for x in products]
        if biases:
            sums = [x + mosaic.along(b, x.shape, 0) for x, b in zip(sums, biases, strict=True)]
        results = tile(*sums) if len(refs.weights) == 2 else [y for x in sums for y in tile(x)]
        smems = [smem.at[slot] for smem in refs.out_smems]
        for smem, result in zip(smems, results, strict=True):
            smem.transpose((1, 0))[...] = result.astype(dtype)
        plgpu.commit_smem()

        rows, each = pl.ds(row * t.rows + p * t.part, t.part), len(refs.outputs)
        for k, smem in enumerate(smems):
            target = refs.outputs[k % each].at[rows, both[k // each]]
            plgpu.copy_smem_to_gmem(smem, target)
