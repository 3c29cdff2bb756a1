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

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm import intra
from pallas_kernels.mlstm.intra import Chunk, Inputs, Schedule, Worker, sum_rows
from pallas_kernels.mlstm.walk import narrow, saturated
from pallas_kernels.mosaic import WGMMA

SIZE = 64  # positions of a chunk, and edge of all tiles


class GeneralScratch(NamedTuple):
    """Shared memory of a block (see the picture)."""

    order: Any  # (ORDER,)
    a: Any  # (parts,64,64)
    ring: Any  # (slots,64,64)
    vectors: dict[str, Any]


def prepared(s: Schedule, inputs: Inputs, sms: int) -> tuple[Schedule, Inputs]:
    del sms
    vectors = inputs.vectors.copy()
    for name, x in vectors.items():  # shared memory gets lines of float32
        vectors[name] = x.astype(jnp.float32).reshape(*x.shape[:2], -1)
    states = inputs.states.reshape(s.items, *inputs.states.shape[3:-1], -1, SIZE)
    return s._replace(rings_y=1), inputs._replace(states=states, vectors=vectors)


def scratch(s: Schedule, vectors) -> GeneralScratch:
    squares = lambda n: plgpu.SMEM(
        (n, SIZE, SIZE), s.dtype, transforms=mosaic.wgmma_tiles(SIZE, s.dtype)
    )
    lines = {name: plgpu.SMEM((x.shape[-1] // s.chunks,), x.dtype) for name, x in vectors.items()}
    return GeneralScratch(
        plgpu.SMEM((intra.ORDER,), jnp.int32), squares(s.parts), squares(s.slots), lines
    )


class GeneralWorker(Worker):
    """A block, whose vectors are in shared memory."""

    # Load.

    def begin(self):
        """Loads what comes first."""
        s, c, smem, inputs = self.schedule, self.chunk, self.smem, self.inputs
        words = plgpu.Layout.WG_STRIDED((intra.ORDER,), vec_size=1)
        mosaic.store(smem.order, plgpu.load(inputs.order, layout=words, optimized=False))
        for name, ref in inputs.vectors.items():
            target = smem.vectors[name]
            ampere.load_line(ref, target, c.b, c.h, c.index * target.shape[0])
        for part in range(s.parts):
            tile = inputs.a.tile(c.h, part)
            ampere.load_rows(inputs.a.array, self.a(part), c.b, tile, self.row0, s.length)
        ampere.meet()
        for n in range(s.slots - 1):
            self.load(jnp.int32(n))

    def load(self, n):
        """Starts to load the n-th square; past the last one zeros, which `wait` counts as well."""
        s, c, inputs, steps = self.schedule, self.chunk, self.inputs, len(self.schedule.order)
        word = self.smem.order[jnp.minimum(n, steps - 1)]
        kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
        slot, there = self.smem.ring.at[lax.rem(n, s.slots)], n < steps
        length, of_state = (jnp.where(there, end, 0) for end in (s.length, (i + 1) * SIZE))
        of_chunk = lambda x: (
            lambda: ampere.load_rows(x.array, slot, c.b, c.h * x.tiles + j, self.row0, length)
        )
        lax.switch(
            kind,
            [
                of_chunk(inputs.b),
                of_chunk(inputs.x),
                lambda: ampere.load_rows(inputs.states, slot, c.item, j, i * SIZE, of_state),
            ]
            + [of_chunk(inputs.y)] * s.transposes_state,
        )

    def square(self, n):
        """The n-th square.  All threads have done then with the one before it."""
        slots = self.schedule.slots
        ampere.wait(slots - 2)
        self.load(n + slots - 1)
        return self.smem.ring.at[lax.rem(n, slots)]

    # Multiply.

    def a(self, part):
        return self.smem.a.at[part]

    def a_times(self, n, transpose):
        multiply = ampere.times_columns if transpose else ampere.times_rows

        def one(part, acc):
            right = self.square(n + part)
            return multiply(acc, ampere.left(self.a(part)), right)

        return lax.fori_loop(0, self.schedule.parts, one, mosaic.zeros((SIZE, SIZE), WGMMA))

    def y_times_x(self, n):
        def one(tile, acc):
            y = ampere.left(self.square(n + 2 * tile))
            return ampere.times_columns(acc, y, self.square(n + 2 * tile + 1))

        return lax.fori_loop(0, self.schedule.tiles, one, mosaic.zeros((SIZE, SIZE), WGMMA))

    def sums_with_y(self, z, tile, n):
        return sum_rows(z * plgpu.load(self.square(n), layout=WGMMA).astype(jnp.float32))

    def anew(self):
        c = self.chunk
        return replace(self, chunk=c._replace(index=intra.materialize(c.index)))

    def left(self, weights):
        s = self.schedule
        weights = saturated(weights, s.dtype) if s.mode == "forward" else weights
        return ampere.as_left(weights, s.dtype)

    def finish(self, tile, start, weights, n):
        s, c, x = self.schedule, self.chunk, self.square(n)
        out = ampere.times_rows(start, weights, x)
        ampere.meet()  # all have read X, whose place the result takes
        x[...] = narrow(out, s.dtype, s.mode == "forward")
        ampere.meet()
        ampere.store_rows(x, self.out.array, c.b, self.out.tile(c.h, tile), self.row0, s.length)


def body(s: Schedule, inputs: Inputs, out, stat_refs, smem: GeneralScratch):
    item = lax.axis_index("block")
    b, h, index = intra.locate(s, item)
    c = Chunk(item, b, h, index, pl.ds(0, SIZE), ())
    w = GeneralWorker(s, inputs, inputs.joint or out, stat_refs, smem, smem.vectors, c)
    w.begin()
    intra.one_chunk(w, 0)
    ampere.wait()  # the zeros past the last square may still be under way


FORM = intra.ChunkForm("general_", prepared, scratch, body)
