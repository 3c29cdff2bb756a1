"""The intra-chunk kernel of the mLSTM cell on Hopper: loads and matmuls for the modes of intra.py.

    a block, tiles of edge L = 128: two warpgroups share a chunk, W stays in their registers

        B, X, states by TMA           ring[slots]             warpgroup 0: 64 rows of A, W, out
        one square a step  ------>  [L x L] [L x L] ...  -->  warpgroup 1: 64 rows of A, W, out
              ^                          full[slot]                      |
              |                                                          v
        the last warpgroup loads   <---------- free[slot] ------ both have used it
        the square of step n + slots

    tiles of edge L = 64: up to three teams of one warpgroup, each with its own chunk and ring

        a[thread]   loaded by TMA once for a chunk              a_full[thread]
        out[thread] loads Y and stores the result, both by TMA  y_full[thread]

The computing warpgroups also load; after the last square of a chunk they load the team's next
chunk.
"""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm import intra
from pallas_kernels.mlstm.intra import ChunkPlan, ChunkWorker, Inputs, sum_rows
from pallas_kernels.mlstm.reference import narrow
from pallas_kernels.mosaic import ROWS, WGMMA
from pallas_kernels.pipeline import Ring

PREFIX = ""  # of the kernels' names
SMEM = 224 * 1024  # bytes of a block's shared memory for its large buffers
TEAMS = 3  # chunks that a block of 64-row tiles computes at a time; 6% over 2 at DQK = DV = 64


def prepared(s: ChunkPlan, inputs: Inputs, sms: int) -> tuple[ChunkPlan, Inputs]:
    wgs, square = s.size // ROWS, s.size * s.size * s.dtype.itemsize
    slots = min(4, SMEM // square - s.parts - 1)
    # The tiles that dq keeps in registers leave no room for a third team.
    most = 2 if s.mode == "dq" and s.tiles > 2 else TEAMS
    teams = 1 if wgs > 1 else min(most, SMEM // ((slots + s.parts + 1) * square))
    blocks = min(mosaic.cdiv(s.items, teams), sms)
    return s._replace(wgs=wgs, teams=teams, slots=slots, blocks=blocks), inputs


def scratch(s: ChunkPlan, vectors) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    buffer, threads = functools.partial(mosaic.tiled, dtype=s.dtype), s.teams * s.wgs
    return dict(
        order=plgpu.SMEM((intra.ORDER,), jnp.int32),
        a=buffer(threads, s.parts, ROWS, s.size),
        ring=buffer(s.teams * s.slots, s.size, s.size),
        out=buffer(threads, ROWS, s.size),
        order_full=plgpu.Barrier(),
        a_full=plgpu.Barrier(num_barriers=threads, num_arrivals=s.parts),
        full=plgpu.Barrier(num_barriers=s.teams * s.slots),
        free=plgpu.Barrier(num_barriers=s.teams * s.slots, num_arrivals=s.wgs),
        y_full=plgpu.Barrier(num_barriers=threads),
    )


# Load: the ring, A and Y.


def load_square(w: ChunkWorker, n):
    """Starts to load the square of step n, counted over all chunks of the team."""
    s, inputs = w.schedule, w.inputs
    turn, step = mosaic.divide(n, len(s.order))
    c = w.at(w.first + turn * (s.blocks * s.teams))
    word = w.smem.order[step]
    kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
    rows = pl.ds(c.index * s.size, s.size)
    of_chunk = lambda x: lambda: x.array.at[c.b, rows, c.h * x.tiles + j]
    at = pl.ds(i * s.size, s.size), pl.ds(j * s.size, s.size)
    squares = [
        of_chunk(inputs.b),
        of_chunk(inputs.x),
        lambda: inputs.states.at[c.b, c.h, c.index, *at],
    ]
    into = w.ring.into(n, w.smem.ring)
    copies = [lambda at=at: plgpu.copy_gmem_to_smem(at(), *into) for at in squares]
    pl.when(c.item < s.items)(lambda: lax.switch(kind, copies))


def release(w: ChunkWorker, n):
    """Frees the slot of step n; after its last use a new square is loaded into it."""
    w.ring.release(n)
    w.ring.refill(n, functools.partial(load_square, w))


def load_a(w: ChunkWorker):
    @pl.when(w.item < w.schedule.items)
    def _():
        @pl.loop(0, w.schedule.parts)
        def _(part):
            source, into = rows_of(w, w.inputs.a, part), w.a.at[part]
            plgpu.copy_gmem_to_smem(source, into, w.smem.a_full.at[w.thread])


def load_y(w: ChunkWorker, tile):
    """Loads a tile of Y into the buffer of the result."""
    source, into = rows_of(w, w.inputs.y, tile), w.smem.out.at[w.thread]
    plgpu.copy_gmem_to_smem(source, into, w.smem.y_full.at[w.thread])


def rows_of(w: ChunkWorker, heads, tile):
    """The warpgroup's rows of a tile of A, Y or out."""
    return heads.at(w.b, pl.ds(w.row0, ROWS), w.h, tile)


# Multiply with the squares of the ring.


def multiply(w: ChunkWorker, acc, left, n, transpose=False):
    """acc += left @ the square of step n."""
    square = w.smem.ring.at[w.ring.wait(n)]
    plgpu.wgmma(acc, left, square.transpose((1, 0)) if transpose else square)


def a_times(w: ChunkWorker, n, tile):
    s, turned = w.schedule, w.schedule.transposes_state
    if tile is not None and turned:  # `y_times_x` has left the first tile of Y in its buffer

        @pl.when(tile > 0)
        def _():
            plgpu.commit_smem()  # waits until all four warps have read the buffer
            plgpu.wait_smem_to_gmem(0)
            load_y(w, tile)

    def run(acc):
        @pl.loop(0, s.parts)  # unrolling it would cost registers for 8 addresses of each part
        def _(part):
            multiply(w, acc, w.a.at[part], n + part, tile is None or turned)
            plgpu.wgmma_wait(1)
            pl.when(part > 0)(lambda: release(w, n + part - 1))

        plgpu.wgmma_wait(0)
        release(w, n + s.parts - 1)
        return acc[...]

    result = pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))
    if tile is not None:

        @pl.when(tile == s.tiles - 1)
        def _():
            plgpu.commit_smem()  # waits until all four warps have read A
            load_a(w.at(w.item + s.blocks * s.teams))

    return result


def y_times_x(w: ChunkWorker, n):
    tiles, y = w.schedule.tiles, w.smem.out.at[w.thread]

    def run(acc):
        @pl.loop(0, tiles)
        def _(step):
            plgpu.barrier_wait(w.smem.y_full.at[w.thread])
            multiply(w, acc, y, n + step, transpose=True)
            plgpu.wgmma_wait(0)
            release(w, n + step)

            @pl.when(step < tiles - 1)
            def _():
                plgpu.commit_smem()  # waits until all four warps have multiplied
                load_y(w, tiles - 2 - step)

        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))


def sums_with_y(w: ChunkWorker, z, tile, n):
    pl.when(tile > 0)(lambda: plgpu.barrier_wait(w.smem.y_full.at[w.thread]))
    y = plgpu.load(w.smem.out.at[w.thread], layout=WGMMA).astype(jnp.float32)
    return sum_rows(z * y)


# The epilogue adds W X to the part from the state, and stores the result tile by tile.


def left(w: ChunkWorker, weights):
    return narrow(weights, w.schedule.dtype, w.schedule.mode == "forward")


def finish(w: ChunkWorker, tile, start, weights, n):
    s, buffer = w.schedule, w.smem.out.at[w.thread]

    def run(acc):
        acc[...] = start
        multiply(w, acc, weights, n)
        out = acc[...]
        release(w, n)
        return out

    out = pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))
    plgpu.wait_smem_to_gmem(0)  # the copy of the tile before must have read the buffer
    buffer[...] = narrow(out, s.dtype, s.mode == "forward")
    plgpu.commit_smem()

    @pl.when(w.row0 < s.length)
    def _():
        plgpu.copy_smem_to_gmem(buffer, rows_of(w, w.out, tile))


def one_chunk(w: ChunkWorker, carry):
    s = w.schedule
    item, n = carry
    # If all chunks use the same slots (steps is a multiple of slots), the compiler would otherwise
    # compute the addresses of all squares once and keep them.
    n, w = intra.materialize(n), w.at(item)
    vectors = {name: ref.at[w.b, w.h, w.index] for name, ref in w.inputs.vectors.items()}
    # Load Y and wait for A.
    if s.transposes_state:
        plgpu.wait_smem_to_gmem(0)
        load_y(w, s.tiles - 1)
    plgpu.barrier_wait(w.smem.a_full.at[w.thread])
    intra.one_chunk(w._replace(vectors=vectors), n)
    return item + s.blocks * s.teams, n + len(s.order)


def body(s: ChunkPlan, inputs: Inputs, out, stat_refs, /, **smem):
    smem, thread = SimpleNamespace(**smem), lax.axis_index("wg")
    team, wg = (thread, 0) if s.wgs == 1 else (0, thread)
    first = lax.axis_index("block") * s.teams + team
    ring = Ring(s.slots, smem.full, smem.free, team * s.slots, True, wg, s.wgs - 1)
    a = smem.a.at[thread]
    w = ChunkWorker(s, inputs, inputs.joint or out, stat_refs, smem, a, wg, thread, first, ring)

    # Fill the ring.
    load_a(w.at(first))

    @pl.when(thread == 0)
    def _():
        plgpu.copy_gmem_to_smem(inputs.order, smem.order, smem.order_full)

    plgpu.barrier_wait(smem.order_full)
    pl.when(wg == s.wgs - 1)(lambda: pl.loop(0, s.slots)(functools.partial(load_square, w)))

    # Walk over the team's chunks.
    more = lambda carry: carry[0] < s.items
    lax.while_loop(more, functools.partial(one_chunk, w), (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)
