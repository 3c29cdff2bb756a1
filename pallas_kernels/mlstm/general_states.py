"""The inter-chunk states of the mLSTM cell for every NVIDIA GPU since Ampere.

It computes what inter_chunk.py computes, on mma and cp.async (ampere.py):

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

    a block: one warpgroup, a 64 x 64 tile of S in registers

        X, Y: 64 positions x 64   --cp.async->  x[2], y[2]
        weight, vector            --cp.async->  weight[2], vector[2]     acc <- decay acc + X^T Y
        other                     --cp.async->  other[2]                  |
                                                                         out --> S before the chunk

    step n:  wait for chunk n     chunk n + 1 on its way     store S, multiply

Tiles of 64 columns are a separate axis in global memory: X and Y are (B,T,tiles,64), states
and `other` (B H N,DX,y_tiles,64).  X is read transposed (ldmatrix can), and scaled in the registers
where mma wants its left operand.
Long sequences are walked in spans, as on Hopper.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm.walk import STAGES, Walk, Walker, WalkInputs, narrow, walker
from pallas_kernels.mosaic import COL, ROW, WGMMA, along

SIZE = 64  # positions of a chunk, and edge of all tiles


class GeneralWalkScratch(NamedTuple):
    """Shared memory of a block (see the picture); the first axis is the stage."""

    x: Any
    y: Any
    other: Any  # None without `other`
    weight: Any
    vector: Any
    out: Any


def walk(s: Walk, inputs: WalkInputs, out_types):
    """The kernel of `walk.states` for chunks of 64 positions."""
    (batch, heads, chunks), dx = inputs.decay.shape, s.x_tiles * SIZE

    def general_vlstm_states(inputs, outputs, smem):
        _body(s, inputs, outputs, smem)

    squares = (batch * heads * chunks, dx, s.y_tiles, SIZE)
    flat = lambda z: z.reshape(batch, heads, -1)
    before, other = out_types.before, inputs.other
    if s.keep:
        out_types = out_types._replace(before=jax.ShapeDtypeStruct(squares, s.dtype))
    (out,) = mosaic.kernel(
        general_vlstm_states,
        out_type=(out_types,),
        scratch_types=(_scratch(s, other is not None),),
        **mosaic.grid(block=batch * heads * s.walked * s.tiles),
        # No sum crosses warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(
        inputs._replace(
            weight=flat(inputs.weight),
            vector=flat(inputs.vector),
            other=None if other is None else other.reshape(squares),
        )
    )
    return out._replace(before=out.before.reshape(before.shape)) if s.keep else out


def _scratch(s: Walk, with_other: bool) -> GeneralWalkScratch:
    tiles = plgpu.SMEM((STAGES, SIZE, SIZE), s.dtype, transforms=mosaic.wgmma_tiles(SIZE, s.dtype))
    line = plgpu.SMEM((STAGES, SIZE), jnp.float32)
    return GeneralWalkScratch(
        x=tiles,
        y=tiles,
        other=tiles if with_other else None,
        weight=line,
        vector=line,
        out=ampere.tile(SIZE, SIZE, s.dtype),
    )


def _body(s: Walk, inputs, outputs, smem: GeneralWalkScratch):
    w = walker(s, inputs, outputs, smem)

    # Load the first chunk and the state before it.
    _load(w, 0)
    state, sums = mosaic.zeros((SIZE, SIZE), WGMMA), mosaic.zeros((SIZE,), ROW)
    if inputs.first is not None:
        state = mosaic.load(inputs.first[0].at[w.b, w.h, w.span, *w.here], WGMMA)
        sums = mosaic.load(inputs.first[1].at[w.b, w.h, w.span, w.mine], ROW)

    # Walk along the span.
    carry = inputs.decay[w.b, w.h, w.chunk(0)], state, sums
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
    # Load the next decay now: from global memory it takes as long as the matmul.
    ahead = w.inputs.decay[w.b, w.h, w.chunk(jnp.minimum(n + 1, w.steps - 1))]
    ampere.wait()
    pl.when(n + 1 < w.steps)(lambda: _load(w, n + 1))
    # Store the state before the chunk.
    if w.outputs.before is not None:
        _store_state(w, n, state, sums)
    if w.inputs.other is not None:
        _multiply_other(w, n, state)
    # Decay the state and add X^T Y.
    x = plgpu.load(smem.x.at[stage].transpose((1, 0)), layout=WGMMA).astype(jnp.float32)
    across = lambda ref: along(_columns(ref.at[stage]), x.shape, 1)
    state = ampere.times_rows(state * decay, x * across(smem.weight), smem.y.at[stage])
    add = lambda: sums * decay + jnp.sum(x * across(smem.vector), axis=1)
    return ahead, state, lax.cond(w.y_tile == 0, add, lambda: sums)


def _columns(ref):
    return plgpu.load(ref, layout=COL, optimized=False)


def _store_state(w: Walker, n, state, sums):
    s, out, outputs = w.schedule, w.smem.out, w.outputs
    out[...] = narrow(state, s.dtype, s.saturate)
    ampere.meet()
    row, end = w.x_tile * SIZE, s.x_tiles * SIZE
    ampere.store_rows(out, outputs.before, _item(w, n), w.y_tile, row, end)
    w.store_before(n, sums)


def _multiply_other(w: Walker, n, state):
    other = plgpu.load(w.smem.other.at[lax.rem(n, STAGES)], layout=WGMMA).astype(jnp.float32)
    dots = w.outputs.dots.at[w.b, w.h, w.chunk(n), w.y_tile, w.mine]
    mosaic.store(dots, jnp.sum(state * other, axis=1))
