"""Two matmuls on Hopper, of one array with two weights, and an elementwise function of both.

    gate = x W_gate,   up = x W_up,   h = tile(gate, up)

Of XLA's kernels the matmuls write gate and up, and a third reads them again; here one kernel writes
all three.  It is built as that of matmul_epilogue.py: a persistent block on each SM, whose two
warpgroups alternate between the matmul of a tile and the epilogue of their previous one.

A tile has `_ROWS` rows of x and 64 columns of each weight.  wgmma computes it transposed, W^T x^T,
so each product is as wide as the tile has rows.  x W of both weights in one wgmma would need their
steps interleaved in one buffer, which TMA cannot do as the weights are stored, (C, F); a wgmma for
each would be 64 wide and read x more often.  Stores to shared memory transpose the results back.

    step s of C      x (rows, 64)  w_gate (64, 64)  w_up (64, 64)   ring of `stages` buffers
    part p of rows   gate, up, h (part, 64)                         `slots` buffers a warpgroup

h is computed from gate and up as they are stored, rounded to 16 bits, because the backward pass
starts from those.
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

_COLUMNS = 64  # of each weight in a tile: the rows of one wgmma, and one swizzle
_STEP = 64  # of C: 128 bytes, one swizzle

# Not swept yet.
_ROWS = 128  # of x in a tile: as many accumulators a thread
_STAGES = 5  # buffers for steps, 32 KB each with 128 rows
_PART = 64  # rows of a tile that are computed and stored at a time
_SLOTS = 1  # buffers of a warpgroup for parts, 24 KB each with 64 rows
_GROUP = 8  # rows of tiles in a group; blocks work on one group at a time


@functools.partial(jax.jit, static_argnames=("tile", "name", "sms"))
def gated_matmul(x, w_gate, w_up, tile, *, name, sms: int):
    """(gate, up, h), arrays (N, F) of x's dtype; x: (N, C), weights: (C, F).

    tile(gate, up): a tuple of h, in float32.
    sms: number of blocks.
    """
    (n, c), f = x.shape, w_gate.shape[1]
    rows, columns, steps = mosaic.cdiv(n, _ROWS), f // _COLUMNS, c // _STEP
    blocks = min(sms, rows * columns)
    s = Schedule(rows, columns, steps, min(_STAGES, steps), _SLOTS, blocks, _GROUP)
    smem = lambda count, rows: plgpu.SMEM(
        (count, rows, 64), x.dtype, transforms=mosaic.wgmma_tiles(64, x.dtype)
    )
    return mosaic.kernel(
        functools.partial(_body, s, tile),
        name=name,
        out_type=[jax.ShapeDtypeStruct((n, f), x.dtype)] * 3,
        scratch_types=dict(
            x_smem=smem(s.stages, _ROWS),
            gate_smem=smem(s.stages, _STEP),
            up_smem=smem(s.stages, _STEP),
            out_smems=(smem(2 * s.slots, _PART),) * 3,
            step_bars=plgpu.Barrier(num_arrivals=3, num_barriers=2 * s.stages),
        ),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, w_gate, w_up)


class _Refs(NamedTuple):
    """The references of a block, and its position."""

    x: Any
    w_gate: Any
    w_up: Any
    outputs: Any  # gate, up, h
    x_smem: Any
    gate_smem: Any
    up_smem: Any
    out_smems: Any
    step_bars: Any
    wg: Any
    block: Any
    count: Any  # number of this block's tiles


def _body(s: Schedule, tile, x, w_gate, w_up, *outputs, **scratch):
    """A block fills the ring, then its warpgroups alternate over its tiles."""
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(s.rows * s.columns - 1 - block, jnp.int32(s.blocks)) + 1
    refs = _Refs(x, w_gate, w_up, outputs, **scratch, wg=wg, block=block, count=count)

    @pl.when(wg == 0)
    def _():
        first = s.place(0, block, count)
        pl.loop(0, s.stages)(lambda step: _copy_step(s, refs, 0, *first, step))

    @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
    def _(j):
        i = 2 * j + wg
        here = s.place(i, block, count)
        acc = plgpu.ACC((_COLUMNS, _ROWS), jnp.float32)
        run = functools.partial(multiply, s, refs, _copy_step, _start_step, i, here)
        _epilogue(s, refs, tile, j, here, pl.run_scoped(run, acc, acc))

    plgpu.wait_smem_to_gmem(0)


def _copy_step(s: Schedule, refs: _Refs, i, row, column, step):
    """Starts the copies of one step of x and both weights of the i-th tile."""
    stage = s.stage(i, step)
    bar = refs.step_bars.at[lax.rem(i, jnp.int32(2)) * s.stages + stage]
    rows, columns = pl.ds(row * _ROWS, _ROWS), pl.ds(column * _COLUMNS, _COLUMNS)
    at = pl.ds(step * _STEP, _STEP)
    plgpu.copy_gmem_to_smem(refs.x.at[rows, at], refs.x_smem.at[stage], bar)
    for ref, smem in (refs.w_gate, refs.gate_smem), (refs.w_up, refs.up_smem):
        plgpu.copy_gmem_to_smem(ref.at[at, columns], smem.at[stage], bar)


def _start_step(refs: _Refs, stage, *accs):
    """Starts to add one step of W^T x^T of both weights."""
    for acc, smem in zip(accs, (refs.gate_smem, refs.up_smem), strict=True):
        x_step = refs.x_smem.at[stage].transpose((1, 0))
        plgpu.wgmma(acc, smem.at[stage].transpose((1, 0)), x_step)


def _epilogue(s: Schedule, refs: _Refs, tile, j, here, products):
    """Stores gate, up and h of the warpgroup's j-th tile, a part of the rows at a time."""
    row, column = here
    parts = _ROWS // _PART
    for p in range(parts):
        # The buffers of this part are free once only the stores of the other slots are pending.
        slot = refs.wg * s.slots + lax.rem(j * parts + p, jnp.int32(s.slots))
        plgpu.wait_smem_to_gmem(3 * (s.slots - 1), wait_read_only=True)
        dtype, columns = refs.x.dtype, slice(p * _PART, (p + 1) * _PART)
        gate, up = (product[:, columns].astype(dtype) for product in products)
        (h,) = tile(gate.astype(jnp.float32), up.astype(jnp.float32))
        smems = [smem.at[slot] for smem in refs.out_smems]
        for smem, y in zip(smems, (gate, up, h.astype(dtype)), strict=True):
            smem.transpose((1, 0))[...] = y
        plgpu.commit_smem()

        at = pl.ds(row * _ROWS + p * _PART, _PART), pl.ds(column * _COLUMNS, _COLUMNS)
        for smem, target in zip(smems, refs.outputs, strict=True):
            plgpu.copy_smem_to_gmem(smem, target.at[at])
