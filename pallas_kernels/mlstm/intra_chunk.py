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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm import intra
from pallas_kernels.mlstm.intra import Chunk, Inputs, Schedule, Worker, locate, nth_square, sum_rows
from pallas_kernels.mlstm.walk import narrow
from pallas_kernels.mosaic import ROWS, WGMMA
from pallas_kernels.pipeline import Ring

SMEM = 224 * 1024  # bytes of a block's shared memory for its large buffers
TEAMS = 3  # chunks that a block of 64-row tiles computes at a time; 6% over 2 at DQK = DV = 64


class Scratch(NamedTuple):
    """Shared memory and barriers of a block (see the picture)."""

    order: Any  # (ORDER,)
    a: Any  # (threads,parts,64,L)
    ring: Any  # (teams slots,L,L)
    out: Any  # (threads,64,L)
    order_full: Any
    a_full: Any  # for each thread
    full: Any  # for each slot
    free: Any  # for each slot
    y_full: Any  # for each thread


def prepared(s: Schedule, inputs: Inputs, sms: int) -> tuple[Schedule, Inputs]:
    wgs, square = s.size // ROWS, s.size * s.size * s.dtype.itemsize
    slots = min(4, SMEM // square - s.parts - 1)
    # The tiles that dq keeps in registers leave no room for a third team.
    most = 2 if s.mode == "dq" and s.tiles > 2 else TEAMS
    teams = 1 if wgs > 1 else min(most, SMEM // ((slots + s.parts + 1) * square))
    blocks = min(mosaic.cdiv(s.items, teams), sms)
    return s._replace(wgs=wgs, teams=teams, slots=slots, blocks=blocks), inputs


def scratch(s: Schedule, vectors) -> Scratch:
    swizzled = mosaic.wgmma_tiles(s.size, s.dtype)
    buffer = lambda *shape: plgpu.SMEM(shape, s.dtype, transforms=swizzled)
    threads = s.teams * s.wgs
    return Scratch(
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


@dataclass(frozen=True)
class HopperWorker(Worker):
    """A warpgroup of a block; n counts the squares of all chunks of its team."""

    thread: Any  # index among all warpgroups of the block
    wg: Any  # index among the warpgroups that share a chunk
    first: Any  # the item of its team's first chunk
    ring: Ring  # of the team

    # Load: the ring, A and Y.

    def load_square(self, n):
        """Starts to load the square of step n."""
        s, inputs = self.schedule, self.inputs
        turn, step = mosaic.divide(n, len(s.order))
        item = self.first + turn * (s.blocks * s.teams)
        b, h, chunk = locate(s, item)
        word = self.smem.order[step]
        kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
        rows = nth_square(s, chunk)
        of_chunk = lambda x: lambda: x.array.at[b, rows, h * x.tiles + j]
        at = pl.ds(i * s.size, s.size), pl.ds(j * s.size, s.size)
        squares = [
            of_chunk(inputs.b),
            of_chunk(inputs.x),
            lambda: inputs.states.at[b, h, chunk, *at],
        ]
        into = self.ring.into(n, self.smem.ring)
        copies = [lambda at=at: plgpu.copy_gmem_to_smem(at(), *into) for at in squares]
        pl.when(item < s.items)(lambda: lax.switch(kind, copies))

    def release(self, n):
        """Frees the slot of step n; after its last use a new square is loaded into it."""
        self.ring.release(n)
        self.ring.refill(n, self.load_square)

    def load_a(self, item):
        s = self.schedule
        b, h, chunk = locate(s, item)

        @pl.when(item < s.items)
        def _():
            @pl.loop(0, s.parts)
            def _(part):
                rows = pl.ds(chunk * s.size + self.wg * ROWS, ROWS)
                source = self.inputs.a.at(b, rows, h, part)
                into = self.a(part), self.smem.a_full.at[self.thread]
                plgpu.copy_gmem_to_smem(source, *into)

    def a(self, part):
        return self.smem.a.at[self.thread, part]

    def done_with_a(self):
        plgpu.commit_smem()  # waits until all four warps have read A
        self.load_a(self.chunk.item + self.schedule.blocks * self.schedule.teams)

    def load_y(self, tile):
        """Loads a tile of Y into the buffer of the result."""

        @pl.when(tile > 0)
        def _():
            plgpu.commit_smem()  # waits until all four warps have read the buffer
            plgpu.wait_smem_to_gmem(0)
            self.start_y(tile)

    def start_y(self, tile):
        source, into = self.rows_of(self.inputs.y, tile), self.smem.out.at[self.thread]
        plgpu.copy_gmem_to_smem(source, into, self.smem.y_full.at[self.thread])

    def rows_of(self, heads, tile):
        """The warpgroup's rows of a tile of Y or out."""
        c = self.chunk
        return heads.at(c.b, pl.ds(self.row0, ROWS), c.h, tile)

    # Multiply with the squares of the ring.

    def multiply(self, acc, left, n, transpose=False):
        """acc += left @ the square of step n."""
        square = self.smem.ring.at[self.ring.wait(n)]
        plgpu.wgmma(acc, left, square.transpose((1, 0)) if transpose else square)

    def a_times(self, n, transpose):
        parts = self.schedule.parts

        def run(acc):
            @pl.loop(0, parts)  # unrolling it would cost registers for 8 addresses of each part
            def _(part):
                self.multiply(acc, self.a(part), n + part, transpose)
                plgpu.wgmma_wait(1)
                pl.when(part > 0)(lambda: self.release(n + part - 1))

            plgpu.wgmma_wait(0)
            self.release(n + parts - 1)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, self.schedule.size), jnp.float32))

    def y_times_x(self, n):
        tiles = self.schedule.tiles

        def run(acc):
            @pl.loop(0, tiles)
            def _(step):
                plgpu.barrier_wait(self.smem.y_full.at[self.thread])
                self.multiply(acc, self.smem.out.at[self.thread], n + step, transpose=True)
                plgpu.wgmma_wait(0)
                self.release(n + step)

                @pl.when(step < tiles - 1)
                def _():
                    plgpu.commit_smem()  # waits until all four warps have multiplied
                    self.start_y(tiles - 2 - step)

            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, self.schedule.size), jnp.float32))

    def sums_with_y(self, z, tile, n):
        pl.when(tile > 0)(lambda: plgpu.barrier_wait(self.smem.y_full.at[self.thread]))
        y = plgpu.load(self.smem.out.at[self.thread], layout=WGMMA).astype(jnp.float32)
        return sum_rows(z * y)

    # The epilogue adds W X to the part from the state, and stores the result tile by tile.

    def computed(self, x):
        return intra.materialize(x)

    def left(self, weights):
        return narrow(weights, self.schedule.dtype, self.schedule.mode == "forward")

    def finish(self, tile, start, weights, n):
        s, buffer = self.schedule, self.smem.out.at[self.thread]

        def run(acc):
            acc[...] = start
            self.multiply(acc, weights, n)
            out = acc[...]
            self.release(n)
            return out

        out = pl.run_scoped(run, plgpu.ACC((ROWS, s.size), jnp.float32))
        plgpu.wait_smem_to_gmem(0)  # the copy of the tile before must have read the buffer
        buffer[...] = narrow(out, s.dtype, s.mode == "forward")
        plgpu.commit_smem()

        @pl.when(self.row0 < s.length)
        def _():
            plgpu.copy_smem_to_gmem(buffer, self.rows_of(self.out, tile))


def one_chunk(w: HopperWorker, carry):
    s = w.schedule
    item, n = carry
    # If all chunks use the same slots (steps is a multiple of slots), the compiler would otherwise
    # compute the addresses of all squares once and keep them.
    n = intra.materialize(n)
    b, h, index = locate(s, item)
    w = replace(w, chunk=Chunk(item, b, h, index, pl.ds(w.wg * ROWS, ROWS), (b, h, index)))
    # Load Y and wait for A.
    if s.transposes_state:
        plgpu.wait_smem_to_gmem(0)
        w.start_y(s.tiles - 1)
    plgpu.barrier_wait(w.smem.a_full.at[w.thread])
    intra.one_chunk(w, n)
    return item + s.blocks * s.teams, n + len(s.order)


def body(s: Schedule, inputs: Inputs, out, stat_refs, smem: Scratch):
    thread = lax.axis_index("wg")
    team, wg = (thread, 0) if s.wgs == 1 else (0, thread)
    first = lax.axis_index("block") * s.teams + team
    ring = Ring(s.slots, smem.full, smem.free, team * s.slots, True, wg, s.wgs - 1)
    out = inputs.joint or out
    w = HopperWorker(
        s, inputs, out, stat_refs, smem, inputs.vectors, None, thread, wg, first, ring
    )  # fmt: skip

    # Fill the ring.
    w.load_a(first)

    @pl.when(thread == 0)
    def _():
        plgpu.copy_gmem_to_smem(inputs.order, smem.order, smem.order_full)

    plgpu.barrier_wait(smem.order_full)
    pl.when(wg == s.wgs - 1)(lambda: pl.loop(0, s.slots)(w.load_square))

    # Walk over the team's chunks.
    more = lambda carry: carry[0] < s.items
    lax.while_loop(more, functools.partial(one_chunk, w), (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


FORM = intra.ChunkForm("", prepared, scratch, body)
