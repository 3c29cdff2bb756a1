"""The intra-chunk kernel of the mLSTM cell for every NVIDIA GPU since Ampere: loads and matmuls for
the modes of intra.py, on mma and cp.async (ampere.py), in chunks of 64 positions.

    a block: one warpgroup and one chunk; W (64 x 64) and a tile of out stay in registers

        A: 64 positions x DA       --cp.async->  a[DA / 64]
        vectors                    --cp.async->  vectors
        B, X, states, Y,           --cp.async->  ring[3]
        a 64 x 64 square a step

    step n:  wait for square n     square n + 2 on its way     multiply

A result leaves through the slot of the last square that it needed.  As a result of mma W lies where
the next mma wants its left operand.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm import intra
from pallas_kernels.mlstm.intra import ChunkPlan, ChunkWorker, Inputs, sum_rows
from pallas_kernels.mlstm.reference import narrow, saturated
from pallas_kernels.mosaic import WGMMA

PREFIX = "general_"  # of the kernels' names
SIZE = 64  # positions of a chunk, and edge of all tiles


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
