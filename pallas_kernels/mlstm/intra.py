"""The intra-chunk kernel of the mLSTM cell: h, dq, dk and dv of all chunks at once.

The 64 x 64 matrix W is an elementwise function of A B^T, and out = W X + scale * (A states):

                A    B    X    states   W                        out
    forward     q    k    v    C        A B^T * D                h
    dq          dh   v    k    C^T      (A B^T + shift) * D      dq  (A states + shift n)
    dk          v    dh   q    dC^T     the same, transposed     dk  (A states + dn)
    dv          k    q    dh   dC       forward's W, transposed  dv

D[t,j] = exp2(row[t] + col[j]) for the j <= t in t's document.  The forward mode divides W by the
normaliser N; in the backward modes row[t] contains N.  shift = -sign(l) dh . h where l divides h,
else 0.  dq and dk also compute Y X^T (q k^T, transposed for dk), so that dh . h and the sums of
dP * P, which give the gates' gradients, use W before it is rounded.

All operands but the vectors are loaded as squares of edge 64; A stays in shared memory, the others
pass through a ring in the order of `ChunkPlan.order`.

A block is one warpgroup and computes one chunk; W and a square of out stay in registers.  It runs
on every NVIDIA GPU since Ampere, by the copies and matmuls of ampere.py:

    A: 64 positions x DA       --cp.async->  a[DA / 64]
    vectors                    --cp.async->  vectors
    B, X, states, Y,           --cp.async->  ring[3]
    a square a step

    step n:  wait for square n     square n + 2 on its way     multiply

A result leaves through the slot of the last square that it needed.  mma leaves W in the registers
where the next mma wants its left operand.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm.reference import narrow, saturated
from pallas_kernels.mlstm.states import SIZE, Heads
from pallas_kernels.mosaic import COL, ROW, WGMMA

Mode = Literal["forward", "dq", "dk", "dv"]
STATS = {"forward": 2, "dq": 1, "dk": 2, "dv": 0}  # vectors that a mode writes
B, X, STATES, Y = range(4)  # kinds of squares
ORDER = 128  # squares that the list in shared memory has room for
SLOTS = 3  # squares in the ring


class ChunkPlan(NamedTuple):
    """The static arguments of a call and the split of its work."""

    mode: Mode
    normalize: bool
    segmented: bool  # several documents in a sequence
    dtype: Any
    length: int  # T
    heads: int
    chunks: int  # per sequence
    parts: int  # squares across A and B
    tiles: int  # squares across X and out

    @property
    def transposes_state(self):
        """Whether the state is transposed; these modes also read Y."""
        return self.mode in ("dq", "dk")

    @property
    def transposed(self):
        """Whether W is transposed: its rows are the positions that are seen."""
        return self.mode in ("dk", "dv")

    @property
    def order(self) -> list[tuple[int, int, int]]:
        """(kind, row, column) of a chunk's squares in the order of their use."""
        tiles, parts, turned = range(self.tiles), range(self.parts), self.transposes_state
        x = [[(X, 0, t)] for t in tiles]
        y = [[(Y, 0, t)] * turned for t in tiles]
        states = [[(STATES, t, p) if turned else (STATES, p, t) for p in parts] for t in tiles]
        order = [(B, 0, part) for part in parts]
        if turned:
            order += sum((y[t] + x[t] for t in tiles), [])
        if self.mode == "dq":
            return order + sum((states[t] + y[t] for t in tiles), []) + sum(x, [])
        return order + sum((states[t] + y[t] + x[t] for t in tiles), [])


class ChunkWorker(NamedTuple):
    """A block, and its chunk of a sequence and head."""

    schedule: ChunkPlan
    inputs: Any  # references to global memory, by name
    out: Heads
    stat_refs: tuple
    smem: Any
    item: Any
    b: Any
    h: Any
    index: Any  # n of N

    @property
    def row0(self):
        """The chunk's first position in the sequence."""
        return self.index * SIZE


# Load.


def scratch(s: ChunkPlan, vectors) -> dict:
    """Shared memory of a block, see the picture."""
    squares = lambda n: mosaic.tiled(n, SIZE, SIZE, dtype=s.dtype)
    lines = {name: plgpu.SMEM((x.shape[-1] // s.chunks,), x.dtype) for name, x in vectors.items()}
    order = plgpu.SMEM((ORDER,), jnp.int32)
    return dict(order=order, a=squares(s.parts), ring=squares(SLOTS), vectors=lines)


def begin(w: ChunkWorker):
    s, smem, inputs = w.schedule, w.smem, w.inputs
    words = plgpu.Layout.WG_STRIDED((ORDER,), vec_size=1)
    mosaic.store(smem.order, mosaic.read(inputs.order, words))
    for name, ref in inputs.vectors.items():
        target = smem.vectors[name]
        ampere.load_line(ref, target, w.b, w.h, w.index * target.shape[0])
    for part in range(s.parts):
        tile = inputs.a.tile(w.h, part)
        ampere.load_rows(inputs.a.array, smem.a.at[part], w.b, tile, w.row0, s.length)
    ampere.meet()
    for n in range(SLOTS - 1):
        load_square(w, jnp.int32(n))


def load_square(w: ChunkWorker, n):
    """Starts to load the n-th square; past the last one zeros, which `wait` counts as well."""
    s, inputs, steps = w.schedule, w.inputs, len(w.schedule.order)
    word = w.smem.order[jnp.minimum(n, steps - 1)]
    kind, i, j = word >> 24, (word >> 16) & 255, word & 65535
    slot, there = w.smem.ring.at[lax.rem(n, SLOTS)], n < steps
    length, of_state = (jnp.where(there, end, 0) for end in (s.length, (i + 1) * SIZE))
    of_chunk = lambda x: ampere.load_rows(x.array, slot, w.b, w.h * x.tiles + j, w.row0, length)
    b, x, y = (functools.partial(of_chunk, part) for part in (inputs.b, inputs.x, inputs.y))
    state = lambda: ampere.load_rows(inputs.states, slot, w.item, j, i * SIZE, of_state)
    lax.switch(kind, [b, x, state] + [y] * s.transposes_state)


def square(w: ChunkWorker, n):
    """Waits for the n-th square.  All threads are then done with the square before it."""
    ampere.wait(SLOTS - 2)
    load_square(w, n + SLOTS - 1)
    return w.smem.ring.at[lax.rem(n, SLOTS)]


# Multiply.


def a_times(w: ChunkWorker, n, turned: bool):
    """A times the squares from number n on, or with `turned` times the transposed squares."""
    multiply = ampere.times_columns if turned else ampere.times_rows

    def one(part, acc):
        right = square(w, n + part)
        return multiply(acc, ampere.left(w.smem.a.at[part]), right)

    return lax.fori_loop(0, w.schedule.parts, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def y_times_x(w: ChunkWorker, n):
    """Y X^T, summed in the order of the forward's A B^T: where a row has a single weight, l / N
    must be exactly 1 again, or the remainder dP - dh . h may far exceed the gradient."""

    def one(tile, acc):
        y = ampere.left(square(w, n + 2 * tile))
        return ampere.times_columns(acc, y, square(w, n + 2 * tile + 1))

    return lax.fori_loop(0, w.schedule.tiles, one, mosaic.zeros((SIZE, SIZE), WGMMA))


def sums_with_y(w: ChunkWorker, z, n):
    """The sums of the rows of z * Y."""
    return sum_rows(z * plgpu.load(square(w, n), layout=WGMMA).astype(jnp.float32))


def left(w: ChunkWorker, weights):
    """W, rounded, as the left operand of a matmul."""
    s = w.schedule
    weights = saturated(weights, s.dtype) if s.mode == "forward" else weights
    return ampere.as_left(weights, s.dtype)


def finish(w: ChunkWorker, tile, start, weights, n):
    """Stores a tile of start + W X."""
    s, x = w.schedule, square(w, n)
    out = ampere.times_rows(start, weights, x)
    ampere.meet()  # all have read X, whose place the result takes
    x[...] = narrow(out, s.dtype, s.mode == "forward")
    ampere.meet()
    ampere.store_rows(x, w.out.array, w.b, w.out.tile(w.h, tile), w.row0, s.length)


# Vectors and tiles of W.

broadcast_rows = lambda vector: mosaic.along(vector, (SIZE, SIZE), 0)  # one number for each row
sum_rows = functools.partial(jnp.sum, axis=1)
# Without the barrier the compiler delays a product and keeps its factors in registers.
materialize = lax.optimization_barrier


def load_rows(w: ChunkWorker, name):
    """Loads a vector at the chunk's positions."""
    return mosaic.read(w.smem.vectors[name], ROW)


def load_columns(w: ChunkWorker, name, tile=0):
    """Loads a vector at a tile's columns and broadcasts it to all rows."""
    vector = mosaic.read(w.smem.vectors[name].at[pl.ds(tile * SIZE, SIZE)], COL)
    return mosaic.along(vector, (SIZE, SIZE), 1)


def load_tile(w: ChunkWorker, name):
    """Loads a vector and broadcasts it to a tile of W; all but col belong to the rows that see."""
    if (name == "col") == w.schedule.transposed:
        return broadcast_rows(load_rows(w, name))
    return load_columns(w, name)


def store_stats(w: ChunkWorker, *stats):
    for ref, value in zip(w.stat_refs, stats, strict=True):
        mosaic.store(ref.at[w.b, w.h, w.index], value)


def decays(w: ChunkWorker):
    """Computes D; keeping it would cost 64 registers."""
    s, iota = w.schedule, functools.partial(plgpu.broadcasted_iota, jnp.int32, (SIZE, SIZE))
    # Positions in the sequence: `backward_dq` has them computed again from another index.
    i, j = w.row0 + iota(0, layout=WGMMA), w.row0 + iota(1, layout=WGMMA)
    seeing, position = (j, i) if s.transposed else (i, j)
    visible = position <= seeing
    if s.segmented:
        visible = visible & (position >= load_tile(w, "start").astype(jnp.int32) + w.row0)
    return jnp.exp2(jnp.where(visible, load_tile(w, "row") + load_tile(w, "col"), -jnp.inf))


# Each mode has a function of the scores A B^T.  n is the next square.


def forward(w: ChunkWorker, ab, n):
    s = w.schedule
    # Weight the scores by their decays.
    weights, scale, norm = ab * decays(w), load_rows(w, "scale"), load_rows(w, "one")
    # Compute the normaliser from the chunk and from the state.
    sign = norm * 0.0
    if s.normalize:

        def q_times_n(part, sums):
            q = plgpu.load(w.smem.a.at[part], layout=WGMMA).astype(jnp.float32)
            return sums + sum_rows(q * load_columns(w, "along", part))

        qn = lax.fori_loop(0, s.parts, q_times_n, mosaic.zeros((SIZE,), ROW))
        l = sum_rows(weights) + scale * qn
        below = jnp.abs(l) <= norm  # False for NaN
        norm = 1 / jnp.where(below, norm, jnp.abs(l))
        sign = jnp.where(below, 0.0, jnp.where(l > 0, -1.0, 1.0))
    store_stats(w, norm, sign)
    # Add the values of the chunk and the part from the state, and store.
    finish_all(w, left(w, weights * broadcast_rows(norm)), scale * norm, n)


def backward_dv(w: ChunkWorker, ab, n):
    finish_all(w, left(w, ab * decays(w)), load_rows(w, "scale"), n)


def finish_all(w: ChunkWorker, weights, scale, n):
    """Stores W X + scale * (A states)."""
    s = w.schedule

    @pl.loop(0, s.tiles)
    def _(tile):
        step = n + tile * (s.parts + 1)
        through = a_times(w, step, False) * broadcast_rows(scale)
        finish(w, tile, through, weights, step + s.parts)


def backward_dk(w: ChunkWorker, ab, n):
    s = w.schedule
    # Weight the scores by their decays.
    weights = materialize((ab + load_tile(w, "shift")) * decays(w))
    scale = load_rows(w, "scale")
    # Sum the input gate's gradient from the chunk.
    inside = sum_rows(weights * y_times_x(w, n))
    weights, n = left(w, weights), n + 2 * s.tiles

    # Compute and store dk, and sum the input gate's gradient from the state.
    def one_tile(tile, sums):
        step = n + tile * (s.parts + 2)
        through = a_times(w, step, True) + load_columns(w, "along", tile)
        through = through * broadcast_rows(scale)
        sums += sums_with_y(w, through, step + s.parts)
        finish(w, tile, through, weights, step + s.parts + 1)
        return sums

    outside = lax.fori_loop(0, s.tiles, one_tile, mosaic.zeros((SIZE,), ROW))
    store_stats(w, inside, outside)


def backward_dq(w: ChunkWorker, ab, n):
    """Computes dq.  W needs the shift, to which the state contributes."""
    s = w.schedule
    # Weight the scores by their decays.
    weights, scale = ab * decays(w), load_rows(w, "scale")
    # Sum dh . h from the chunk and from the state, whose tiles all stay in registers.
    dot = sum_rows(weights * y_times_x(w, n))
    n, through = n + 2 * s.tiles, []
    for _ in range(s.tiles):
        through.append(a_times(w, n, True))
        dot += scale * sums_with_y(w, through[-1], n + s.parts)
        n += s.parts + 1
    store_stats(w, dot)
    # Add the normaliser's part of the gradient of every weight in a row.  A new index makes the
    # compiler compute D again; the first D would not fit in the registers.
    w = w._replace(index=materialize(w.index))
    shift = load_rows(w, "sign") * dot
    weights = materialize(left(w, weights + decays(w) * broadcast_rows(shift)))
    # Compute and store dq.
    for tile, part in enumerate(through):
        part = part + broadcast_rows(shift) * load_columns(w, "along", tile)
        finish(w, tile, part * broadcast_rows(scale), weights, n + tile)


MODES = {"forward": forward, "dq": backward_dq, "dk": backward_dk, "dv": backward_dv}


def body(s: ChunkPlan, order, a, b, x, states, y, joint, vectors, out, stat_refs, /, **smem):
    item = lax.axis_index("block")
    pair, index = mosaic.divide(item, s.chunks)
    inputs = SimpleNamespace(order=order, a=a, b=b, x=x, states=states, y=y, vectors=vectors)
    refs = inputs, joint or out, stat_refs, SimpleNamespace(**smem)
    w = ChunkWorker(s, *refs, item, *mosaic.divide(pair, s.heads), index)
    begin(w)
    MODES[s.mode](w, a_times(w, 0, True), s.parts)
    ampere.wait()  # the zeros past the last square may still be under way


# ---- the call --------------------------------------------------------------------------------


@jax.jit(static_argnames=("mode", "normalize"))
def chunk_outputs(
    a: Heads, b: Heads, x: Heads, chunk_states, vectors, along=None, like: Heads | None = None,
    joint=None, *, mode: Mode, normalize=True,
):  # fmt: skip
    """Computes one line of the table above: out, then by mode, in float32 of (B,H,N,64),

    forward  1 / N of each row; -sign(l), or 0 where l does not divide h
    dq       dh . h of each row
    dk       k . dk of each row: the part from the chunk; the part from the state

    vectors: name -> (B,H,N,64) float32: row, col and scale; one (forward), sign (dq) or shift (dk);
        and start, which is None if every sequence is one document.
    along: (B,H,N,DX) float32, n or dn.
    like: q for dq and k for dk (which read it as Y), v for dv.  The result has the shape of like's
        array and the columns of `like`; the other columns are undefined.
    joint: a reference to an array of that shape.  The result is then written there, not returned.
    """
    (batch, heads, chunks, _), length = vectors["row"].shape, a.array.shape[1]
    items, kind = batch * heads * chunks, (mode, normalize, vectors["start"] is not None)
    s = ChunkPlan(*kind, a.array.dtype, length, heads, chunks, a.tiles, x.tiles)
    # Shared memory gets lines of float32.
    line = lambda z: z.astype(jnp.float32).reshape(batch, heads, -1)
    given = {k: line(z) for k, z in dict(vectors, along=along).items() if z is not None}
    states = chunk_states.reshape(items, *chunk_states.shape[3:-1], -1, SIZE)
    shape = (batch, length, heads * x.tiles, SIZE) if like is None else like.array.shape
    array = jax.ShapeDtypeStruct(shape, s.dtype)
    place = Heads(array, x.tiles, 0) if like is None else replace(like, array=array)
    of_position = jax.ShapeDtypeStruct(vectors["row"].shape, jnp.float32)
    y = like if s.transposes_state else None
    out = None if joint is None else replace(place, array=joint)
    firsts = {B: b.first, X: x.first, STATES: 0, Y: place.first}
    # Kind, row and column of each square, in 8, 8 and 16 bits.
    order = [kind << 24 | i << 16 | (j + firsts[kind]) for kind, i, j in s.order]
    order = jnp.array(order + [0] * (ORDER - len(order)), jnp.int32)
    out, stats = mosaic.kernel(
        functools.partial(body, s),
        name=f"vlstm_{'' if mode == 'forward' else 'backward_'}{mode}",
        out_type=(place if joint is None else None, (of_position,) * STATS[mode]),
        scratch_types=scratch(s, given),
        **mosaic.grid(block=items),
        num_threads=1,
        # No sum crosses warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(order, a, b, x, states, y, out, given)
    return stats if joint is not None else (out.array, *stats)
