"""The inter-chunk states of the mLSTM cell (walk.py) for every NVIDIA GPU since Ampere, on mma and
cp.async (ampere.py).

    a block: one warpgroup, a 64 x 64 tile of S in registers

        X, Y: 64 positions x 64   --cp.async->  x[2], y[2]
        weight, vector            --cp.async->  weight[2], vector[2]     acc <- decay acc + X^T Y
        other                     --cp.async->  other[2]                  |
                                                                         out --> S before the chunk

    step n:  wait for chunk n     chunk n + 1 on its way     store S, multiply

Tiles of 64 columns are a separate axis in global memory: X and Y are (B,T,tiles,64), states
and `other` (B H N,DX,y_tiles,64).  X is read transposed (ldmatrix can), and scaled in the registers
where mma wants its left operand.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm.reference import narrow
from pallas_kernels.mlstm.walk import STAGES, Walk, Walker, WalkInputs
from pallas_kernels.mosaic import COL, ROW, WGMMA, along

PREFIX = "general_"  # of the kernel's name
SIZE = 64  # positions of a chunk, and edge of all tiles


def prepared(s: Walk, inputs: WalkInputs, out_types):
    batch, heads, chunks = inputs.decay.shape
    squares = (batch * heads * chunks, s.x_tiles * SIZE, s.y_tiles, SIZE)
    flat = lambda z: z.reshape(batch, heads, -1)
    if s.keep:
        out_types = out_types._replace(before=jax.ShapeDtypeStruct(squares, s.dtype))
    other = None if inputs.other is None else inputs.other.reshape(squares)
    weight, vector = flat(inputs.weight), flat(inputs.vector)
    return inputs._replace(weight=weight, vector=vector, other=other), out_types


def scratch(s: Walk, with_other: bool) -> dict:
    """Shared memory of a block, see the picture."""
    tiles = mosaic.tiled(STAGES, SIZE, SIZE, dtype=s.dtype)
    line = plgpu.SMEM((STAGES, SIZE), jnp.float32)
    return dict(
        x=tiles,
        y=tiles,
        other=tiles if with_other else None,
        weight=line,
        vector=line,
        out=mosaic.tiled(SIZE, SIZE, dtype=s.dtype),
    )


def body(s: Walk, inputs, outputs, /, **smem):
    w = Walker.of(s, inputs, outputs, SimpleNamespace(**smem))
    _load(w, 0)
    carry = w.decay(0), *w.first(ROW)
    _, state, sums = lax.fori_loop(0, w.steps, functools.partial(_step, w), carry)
    w.store_end(state, sums)


def _item(w: Walker, n):
    """The number of step n's chunk among all sequences' and heads' chunks."""
    s = w.schedule
    return (w.b * s.heads + w.h) * s.chunks + w.chunk(n)


def _load(w: Walker, n):
    """Starts to copy the operands of step n."""
    s, inputs, smem, stage = w.schedule, w.inputs, w.smem, lax.rem(n, STAGES)
    first = w.chunk(n) * SIZE
    for source, target in ((inputs.weight, smem.weight), (inputs.vector, smem.vector)):
        ampere.load_line(source, target.at[stage], w.b, w.h, first)
    for heads, tile, target in ((inputs.x, w.x_tile, smem.x), (inputs.y, w.y_tile, smem.y)):
        there = heads.tile(w.h, tile)
        ampere.load_rows(heads.array, target.at[stage], w.b, there, first, s.length)
    if inputs.other is not None:
        row, end = w.x_tile * SIZE, s.x_tiles * SIZE
        ampere.load_rows(inputs.other, smem.other.at[stage], _item(w, n), w.y_tile, row, end)


def _step(w: Walker, n, carry):
    decay, state, sums = carry
    smem, stage = w.smem, lax.rem(n, STAGES)
    ahead = w.decay(n + 1)
    ampere.wait()
    pl.when(n + 1 < w.steps)(lambda: _load(w, n + 1))
    # Store the state before the chunk.
    if w.outputs.before is not None:
        _store_state(w, n, state, sums)
    if w.inputs.other is not None:
        w.multiply_other(n, state, smem.other.at[stage])
    # Decay the state and add X^T Y.
    x = plgpu.load(smem.x.at[stage].transpose((1, 0)), layout=WGMMA).astype(jnp.float32)
    across = lambda ref: along(mosaic.load(ref.at[stage], COL), x.shape, 1)
    state = ampere.times_rows(state * decay, x * across(smem.weight), smem.y.at[stage])
    add = lambda: sums * decay + jnp.sum(x * across(smem.vector), axis=1)
    return ahead, state, lax.cond(w.y_tile == 0, add, lambda: sums)


def _store_state(w: Walker, n, state, sums):
    s, out, outputs = w.schedule, w.smem.out, w.outputs
    out[...] = narrow(state, s.dtype, not s.reverse)
    ampere.meet()
    row, end = w.x_tile * SIZE, s.x_tiles * SIZE
    ampere.store_rows(out, outputs.before, _item(w, n), w.y_tile, row, end)
    w.store_before(n, sums)
