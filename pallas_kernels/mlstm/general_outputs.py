"""The intra-chunk kernel of the mLSTM cell for every NVIDIA GPU since Ampere.

It computes what intra_chunk.py computes (whose table has the modes), on mma and cp.async
(ampere.py), in chunks of 64 positions:

    W is an elementwise function of A B^T, and out = W X + scale * (A states)

    a block: one warpgroup and one chunk; W (64 x 64) and a tile of out stay in registers

        A: 64 positions x DA       --cp.async->  a[DA / 64]
        vectors                    --cp.async->  vectors
        B, X, states, Y,           --cp.async->  ring[3]
        a 64 x 64 square a step

    step n:  wait for square n     square n + 2 on its way     multiply

`load_order` lists the squares of a chunk in the order of their use.  A result leaves through the
slot of the last square that it needed.  As a result of mma W lies where the next mma wants its left
operand.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mlstm.intra import (
    Chunk,
    Inputs,
    Mode,
    Schedule,
    broadcast_rows,
    decays,
    load_along,
    load_rows,
    load_tile,
    locate,
    materialize,
    normaliser,
    prepared,
    store_stats,
    sum_rows,
)  # fmt: skip
from pallas_kernels.mlstm.walk import narrow, saturated
from pallas_kernels.mosaic import ROW, WGMMA

SIZE = 64  # positions of a chunk, and edge of all tiles
SLOTS = 3  # squares in the ring
B, X, STATES, Y = range(4)  # kinds of squares
ORDER = 128  # squares that the list in shared memory has room for


class GeneralOutputsScratch(NamedTuple):
    """Shared memory of a block (see the picture)."""

    order: Any  # (ORDER,): kind, row and column of each square, in 8, 8 and 16 bits
    a: Any  # (parts,64,64)
    ring: Any  # (SLOTS,64,64)
    vectors: dict[str, Any]


class GeneralOutputsWorker(NamedTuple):
    """A block and its work; its vectors are those in shared memory."""

    schedule: Schedule
    inputs: Inputs
    out: Heads
    stat_refs: tuple
    smem: GeneralOutputsScratch
    chunk: Chunk


def load_order(s: Schedule) -> list[tuple[int, int, int]]:
    """(kind, row, column) of a chunk's squares in the order of their use."""
    parts, tiles = range(s.parts), range(s.tiles)
    scores = [(B, 0, part) for part in parts]
    x = [[(X, 0, tile)] for tile in tiles]
    if not s.transposes_state:
        through = [[(STATES, part, tile) for part in parts] for tile in tiles]
    else:
        scores += [(kind, 0, tile) for tile in tiles for kind in (Y, X)]
        through = [[(STATES, tile, part) for part in parts] + [(Y, 0, tile)] for tile in tiles]
    if s.mode == "dq":
        return scores + sum(through, []) + sum(x, [])
    return scores + sum((through[tile] + x[tile] for tile in tiles), [])


# Load.


def load(w: GeneralOutputsWorker, n):
    """Starts to load the n-th square; past the last one zeros, which `wait` counts as well."""
    s, c, inputs = w.schedule, w.chunk, w.inputs
    steps = len(load_order(s))
    word = w.smem.order[jnp.minimum(n, steps - 1)]
    kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
    slot, there = w.smem.ring.at[lax.rem(n, SLOTS)], n < steps
    length, of_state = (jnp.where(there, end, 0) for end in (s.length, (i + 1) * SIZE))
    # j counts from the array's start: adding x.first here would cost registers (168 -> 172 in dk).
    of_chunk = lambda x: (
        lambda: ampere.load_rows(x.array, slot, c.b, c.h * x.tiles + j, c.row0, length)
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


def square(w: GeneralOutputsWorker, n):
    """The n-th square.  All threads have done then with the one before it."""
    ampere.wait(SLOTS - 2)
    load(w, n + SLOTS - 1)
    return w.smem.ring.at[lax.rem(n, SLOTS)]


def begin(w: GeneralOutputsWorker, vectors, order_ref):
    """Loads what comes first."""
    s, c, smem = w.schedule, w.chunk, w.smem
    words = plgpu.Layout.WG_STRIDED((ORDER,), vec_size=1)
    mosaic.store(smem.order, plgpu.load(order_ref, layout=words, optimized=False))
    for name, ref in vectors.items():
        target = smem.vectors[name]
        ampere.load_line(ref, target, c.b, c.h, c.index * target.shape[0])
    for part in range(s.parts):
        a = w.inputs.a
        ampere.load_rows(a.array, smem.a.at[part], c.b, a.tile(c.h, part), c.row0, s.length)
    ampere.meet()
    for n in range(SLOTS - 1):
        load(w, jnp.int32(n))


# Multiply.


def a_times(w: GeneralOutputsWorker, n, transpose):
    """A times `parts` squares, from the n-th on."""

    def one(part, acc):
        right = square(w, n + part)
        multiply = ampere.times_columns if transpose else ampere.times_rows
        return multiply(acc, ampere.left(w.smem.a.at[part]), right)

    return lax.fori_loop(0, w.schedule.parts, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def y_times_x(w: GeneralOutputsWorker, n):
    """Y X^T."""

    def one(tile, acc):
        y = ampere.left(square(w, n + 2 * tile))
        return ampere.times_columns(acc, y, square(w, n + 2 * tile + 1))

    return lax.fori_loop(0, w.schedule.tiles, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def sums_with_y(w: GeneralOutputsWorker, z, n):
    return sum_rows(z * plgpu.load(square(w, n), layout=WGMMA).astype(jnp.float32))


def finish(w: GeneralOutputsWorker, tile, out, weights, n):
    """Stores a tile of out + W X."""
    s, c, x = w.schedule, w.chunk, square(w, n)
    out = ampere.times_rows(out, weights, x)
    ampere.meet()  # all have read X, whose place the result takes
    x[...] = narrow(out, s.dtype, s.mode == "forward")
    ampere.meet()
    ampere.store_rows(x, w.out.array, c.b, w.out.tile(c.h, tile), c.row0, s.length)


def finish_all(w: GeneralOutputsWorker, weights, scale, n):
    s = w.schedule

    @pl.loop(0, s.tiles)
    def _(tile):
        step = n + tile * (s.parts + 1)
        through = a_times(w, step, False) * broadcast_rows(scale, SIZE)
        finish(w, tile, through, weights, step + s.parts)


# Each mode has a function of the scores A B^T.  n is the next square.


def forward(w: GeneralOutputsWorker, ab, n):
    s, c = w.schedule, w.chunk
    # Weight the scores by their decays.
    weights, scale, norm = ab * decays(w, c), load_rows(w, c, "scale"), load_rows(w, c, "one")
    # Compute the normaliser from the chunk and from the state.
    sign = norm * 0.0
    if s.normalize:

        def q_times_n(part, sums):
            q = plgpu.load(w.smem.a.at[part], layout=WGMMA).astype(jnp.float32)
            return sums + sum_rows(q * load_along(w, c, part))

        qn = lax.fori_loop(0, s.parts, q_times_n, mosaic.zeros((SIZE,), ROW))
        norm, sign = normaliser(weights, scale, qn, norm)
    store_stats(w, c, norm, sign)
    # Add the values of the chunk and the part from the state, and store.
    weights = saturated(weights * broadcast_rows(norm, SIZE), s.dtype)
    finish_all(w, ampere.as_left(weights, s.dtype), scale * norm, n)


def backward_dv(w: GeneralOutputsWorker, ab, n):
    weights = ampere.as_left(ab * decays(w, w.chunk), w.schedule.dtype)
    finish_all(w, weights, load_rows(w, w.chunk, "scale"), n)


def backward_dk(w: GeneralOutputsWorker, ab, n):
    s, c = w.schedule, w.chunk
    # Weight the scores by their decays.
    weights = (ab + load_tile(w, c, "shift")) * decays(w, c)
    # Sum the input gate's gradient from the chunk.
    inside = sum_rows(weights * y_times_x(w, n))
    weights, n = ampere.as_left(weights, s.dtype), n + 2 * s.tiles

    # Compute and store dk, and sum the input gate's gradient from the state.
    def one_tile(tile, sums):
        step = n + tile * (s.parts + 2)
        through = a_times(w, step, True) + load_along(w, c, tile)
        through = through * broadcast_rows(load_rows(w, c, "scale"), SIZE)
        sums += sums_with_y(w, through, step + s.parts)
        finish(w, tile, through, weights, step + s.parts + 1)
        return sums

    outside = lax.fori_loop(0, s.tiles, one_tile, mosaic.zeros((SIZE,), ROW))
    store_stats(w, c, inside, outside)


def backward_dq(w: GeneralOutputsWorker, ab, n):
    """Computes dq.  W needs the shift, to which the state contributes."""
    s, c = w.schedule, w.chunk
    # Weight the scores by their decays.
    weights, scale = ab * decays(w, c), load_rows(w, c, "scale")
    # Sum dh . h from the chunk and from the state, whose tiles all stay in registers.
    dot = sum_rows(weights * y_times_x(w, n))
    n, through = n + 2 * s.tiles, []
    for _ in range(s.tiles):
        through.append(a_times(w, n, True))
        dot += scale * sums_with_y(w, through[-1], n + s.parts)
        n += s.parts + 1
    store_stats(w, c, dot)
    # Add the normaliser's part of the gradient of every weight in a row.
    shift = load_rows(w, c, "sign") * dot
    # The compiler would otherwise keep the positions of the first D in registers.
    c = c._replace(index=materialize(c.index), row0=materialize(c.row0))
    weights = ampere.as_left(weights + decays(w, c) * broadcast_rows(shift, SIZE), s.dtype)
    # Compute and store dq.
    for tile, part in enumerate(through):
        part = part + broadcast_rows(shift, SIZE) * load_along(w, c, tile)
        finish(w, tile, part * broadcast_rows(scale, SIZE), weights, n + tile)


MODES = {"forward": forward, "dq": backward_dq, "dk": backward_dk, "dv": backward_dv}


def body(s: Schedule, inputs: Inputs, out, stat_refs, smem: GeneralOutputsScratch):
    item = lax.axis_index("block")
    b, h, index = locate(s, item)
    c = Chunk(item, b, h, index, index * SIZE, pl.ds(0, SIZE), ())
    out = inputs.joint or out
    w = GeneralOutputsWorker(s, inputs._replace(vectors=smem.vectors), out, stat_refs, smem, c)
    begin(w, inputs.vectors, inputs.order)
    # Compute the scores A B^T and continue with the mode's function.
    MODES[s.mode](w, a_times(w, 0, True), s.parts)
    ampere.wait()  # the zeros past the last square may still be under way


def scratch(s: Schedule, vectors) -> GeneralOutputsScratch:
    squares = lambda n: plgpu.SMEM(
        (n, SIZE, SIZE), s.dtype, transforms=mosaic.wgmma_tiles(SIZE, s.dtype)
    )
    lines = {name: plgpu.SMEM((x.shape[-1] // s.chunks,), x.dtype) for name, x in vectors.items()}
    return GeneralOutputsScratch(
        plgpu.SMEM((ORDER,), jnp.int32), squares(s.parts), squares(SLOTS), lines
    )


@functools.partial(jax.jit, static_argnames=("mode", "normalize", "packed", "sms"))
def chunk_outputs(
    a: Heads, b: Heads, x: Heads, chunk_states, vectors, along=None, like: Heads | None = None,
    joint=None, *, mode: Mode, normalize=True, packed=False, sms: int,
):  # fmt: skip
    """Computes `intra_chunk.chunk_outputs` for chunks of 64 positions."""
    length, dtype = a.array.shape[1], a.array.dtype
    batch, heads, chunks, _ = vectors["row"].shape
    items = batch * heads * chunks
    s = Schedule(
        mode, normalize, packed, dtype, length, heads, chunks, items, SIZE, a.tiles, x.tiles,
        wgs=1, teams=1, slots=SLOTS, blocks=items,
    )  # fmt: skip
    given, place, out_type = prepared(s, a, x, vectors, along, like, joint)
    for name, vector in given.items():  # shared memory gets lines of float32
        given[name] = vector.astype(jnp.float32).reshape(batch, heads, -1)
    firsts = {B: b.first, X: x.first, STATES: 0, Y: place.first}
    order = [kind << 24 | i << 16 | (j + firsts[kind]) for kind, i, j in load_order(s)]
    out, stats = mosaic.kernel(
        functools.partial(body, s),
        name=f"general_vlstm_{'' if mode == 'forward' else 'backward_'}{mode}",
        out_type=out_type,
        scratch_types=(scratch(s, given),),
        **mosaic.grid(block=items),
        # No sum crosses warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(
        Inputs(
            jnp.array(order + [0] * (ORDER - len(order)), jnp.int32),
            a, b, x, chunk_states.reshape(items, *chunk_states.shape[3:-1], -1, SIZE),
            like if s.transposes_state else None,
            None if joint is None else replace(place, array=joint), given,
        )
    )  # fmt: skip
    return stats if joint is not None else (out.array, *stats)
