"""The two kernels of the mLSTM cell for every NVIDIA GPU since Ampere, on mma and cp.async
(ampere.py), in chunks of 64 positions and squares of edge 64.

The states between chunks (states.py).  A block: one warpgroup, a square of S in registers

        X, Y: 64 positions x 64   --cp.async->  x[2], y[2]
        weight, vector            --cp.async->  weight[2], vector[2]     acc <- decay acc + X^T Y
        other                     --cp.async->  other[2]                  |
                                                                         out --> S before the chunk

    step n:  wait for chunk n     chunk n + 1 on its way     store S, multiply

Squares are a separate axis in global memory: X and Y are (B,T,tiles,64), states and `other`
(B H N,DX,y_tiles,64).  X is read transposed (ldmatrix can), and scaled in the registers where mma
wants its left operand.

The outputs of chunks, loads and matmuls for the modes of intra.py.  A block: one warpgroup and one
chunk; W and a square of out stay in registers

        A: 64 positions x DA       --cp.async->  a[DA / 64]
        vectors                    --cp.async->  vectors
        B, X, states, Y,           --cp.async->  ring[3]
        a square a step

    step n:  wait for square n     square n + 2 on its way     multiply

A result leaves through the slot of the last square that it needed.  As a result of mma W lies where
the next mma wants its left operand.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm import intra
from pallas_kernels.mlstm.intra import ChunkPlan, ChunkWorker, Inputs, sum_rows
from pallas_kernels.mlstm.reference import narrow, saturated
from pallas_kernels.mlstm.states import STAGES, StatesForm, Walk, Walker, WalkInputs
from pallas_kernels.mosaic import COL, ROW, WGMMA, along

PREFIX = "general_"  # of the kernels' names
SIZE = 64  # positions of a chunk, and edge of all squares

# ---- the states between chunks -------------------------------------------------------------------


def _states_prepared(s: Walk, inputs: WalkInputs, out_types):
    batch, heads, chunks = inputs.decay.shape
    squares = (batch * heads * chunks, s.x_tiles * SIZE, s.y_tiles, SIZE)
    flat = lambda z: z.reshape(batch, heads, -1)
    if s.keep:
        out_types = out_types._replace(before=jax.ShapeDtypeStruct(squares, s.dtype))
    other = None if inputs.other is None else inputs.other.reshape(squares)
    weight, vector = flat(inputs.weight), flat(inputs.vector)
    return inputs._replace(weight=weight, vector=vector, other=other), out_types


def states_scratch(s: Walk, with_other: bool) -> dict:
    """Shared memory of a block, see the picture."""
    tiles = mosaic.tiled(STAGES, SIZE, SIZE, dtype=s.dtype)
    buffers = dict(x=tiles, y=tiles, other=tiles if with_other else None)
    lines = dict.fromkeys(("weight", "vector"), plgpu.SMEM((STAGES, SIZE), jnp.float32))
    return buffers | lines | dict(out=mosaic.tiled(SIZE, SIZE, dtype=s.dtype))


def _walk(s: Walk, inputs, outputs, /, **smem):
    w = Walker.of(s, inputs, outputs, SimpleNamespace(**smem))
    _load_chunk(w, 0)
    carry = w.decay(0), *w.first(ROW)
    _, state, sums = lax.fori_loop(0, w.steps, functools.partial(_step, w), carry)
    w.store_end(state, sums)


def _item(w: Walker, n):
    """The number of step n's chunk among all sequences' and heads' chunks."""
    s = w.schedule
    return (w.b * s.heads + w.h) * s.chunks + w.chunk(n)


def _load_chunk(w: Walker, n):
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
    pl.when(n + 1 < w.steps)(lambda: _load_chunk(w, n + 1))
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


STATES = StatesForm(PREFIX, states_scratch, _walk, _states_prepared)

# ---- the outputs of chunks -----------------------------------------------------------------------


def prepared(s: ChunkPlan, inputs: Inputs, sms: int) -> tuple[ChunkPlan, Inputs]:
    del sms
    # Shared memory gets lines of float32.
    line = lambda x: x.astype(jnp.float32).reshape(*x.shape[:2], -1)
    vectors = jax.tree.map(line, inputs.vectors)
    states = inputs.states.reshape(s.items, *inputs.states.shape[3:-1], -1, SIZE)
    return s._replace(rings_y=1), inputs._replace(states=states, vectors=vectors)


def scratch(s: ChunkPlan, vectors) -> dict:
    """Shared memory of a block, see the picture."""
    squares = lambda n: mosaic.tiled(n, SIZE, SIZE, dtype=s.dtype)
    lines = {name: plgpu.SMEM((x.shape[-1] // s.chunks,), x.dtype) for name, x in vectors.items()}
    order = plgpu.SMEM((intra.ORDER,), jnp.int32)
    return dict(order=order, a=squares(s.parts), ring=squares(s.slots), vectors=lines)


# Load.


def begin(w: ChunkWorker):
    """Loads what comes first."""
    s, smem, inputs = w.schedule, w.smem, w.inputs
    words = plgpu.Layout.WG_STRIDED((intra.ORDER,), vec_size=1)
    mosaic.store(smem.order, mosaic.read(inputs.order, words))
    for name, ref in inputs.vectors.items():
        target = smem.vectors[name]
        ampere.load_line(ref, target, w.b, w.h, w.index * target.shape[0])
    for part in range(s.parts):
        tile = inputs.a.tile(w.h, part)
        ampere.load_rows(inputs.a.array, w.a.at[part], w.b, tile, w.row0, s.length)
    ampere.meet()
    for n in range(s.slots - 1):
        load(w, jnp.int32(n))


def load(w: ChunkWorker, n):
    """Starts to load the n-th square; past the last one zeros, which `wait` counts as well."""
    s, inputs, steps = w.schedule, w.inputs, len(w.schedule.order)
    word = w.smem.order[jnp.minimum(n, steps - 1)]
    kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
    slot, there = w.smem.ring.at[lax.rem(n, s.slots)], n < steps
    length, of_state = (jnp.where(there, end, 0) for end in (s.length, (i + 1) * SIZE))
    of_chunk = lambda x: (
        lambda: ampere.load_rows(x.array, slot, w.b, w.h * x.tiles + j, w.row0, length)
    )
    squares = [
        of_chunk(inputs.b),
        of_chunk(inputs.x),
        lambda: ampere.load_rows(inputs.states, slot, w.item, j, i * SIZE, of_state),
    ]
    lax.switch(kind, squares + [of_chunk(inputs.y)] * s.transposes_state)


def square(w: ChunkWorker, n):
    """The n-th square.  All threads have done then with the one before it."""
    slots = w.schedule.slots
    ampere.wait(slots - 2)
    load(w, n + slots - 1)
    return w.smem.ring.at[lax.rem(n, slots)]


# Multiply.


def a_times(w: ChunkWorker, n, tile):
    turned = tile is None or w.schedule.transposes_state
    multiply = ampere.times_columns if turned else ampere.times_rows

    def one(part, acc):
        right = square(w, n + part)
        return multiply(acc, ampere.left(w.a.at[part]), right)

    return lax.fori_loop(0, w.schedule.parts, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def y_times_x(w: ChunkWorker, n):
    def one(tile, acc):
        y = ampere.left(square(w, n + 2 * tile))
        return ampere.times_columns(acc, y, square(w, n + 2 * tile + 1))

    return lax.fori_loop(0, w.schedule.tiles, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def sums_with_y(w: ChunkWorker, z, tile, n):
    return sum_rows(z * plgpu.load(square(w, n), layout=WGMMA).astype(jnp.float32))


def left(w: ChunkWorker, weights):
    s = w.schedule
    weights = saturated(weights, s.dtype) if s.mode == "forward" else weights
    return ampere.as_left(weights, s.dtype)


def finish(w: ChunkWorker, tile, start, weights, n):
    s, x = w.schedule, square(w, n)
    out = ampere.times_rows(start, weights, x)
    ampere.meet()  # all have read X, whose place the result takes
    x[...] = narrow(out, s.dtype, s.mode == "forward")
    ampere.meet()
    ampere.store_rows(x, w.out.array, w.b, w.out.tile(w.h, tile), w.row0, s.length)


def body(s: ChunkPlan, inputs: Inputs, out, stat_refs, /, **smem):
    smem = SimpleNamespace(**smem)
    w = ChunkWorker(s, inputs, inputs.joint or out, stat_refs, smem, smem.a, vectors=smem.vectors)
    w = w.at(lax.axis_index("block"))
    begin(w)
    intra.one_chunk(w, 0)
    ampere.wait()  # the zeros past the last square may still be under way
