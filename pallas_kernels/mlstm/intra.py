"""The intra-chunk kernel of the mLSTM cell: h, dq, dk and dv of all chunks at once.

The L x L matrix W is an elementwise function of A B^T, and out = W X + scale * (A states):

                A    B    X    states   W                        out
    forward     q    k    v    C        A B^T * D                h
    dq          dh   v    k    C^T      (A B^T + shift) * D      dq  (A states + shift n)
    dk          v    dh   q    dC^T     the same, transposed     dk  (A states + dn)
    dv          k    q    dh   dC       forward's W, transposed  dv

D[t,j] = exp2(row[t] + col[j]) for the j <= t in t's document.  The forward mode divides W by the
normaliser N; in the backward modes row[t] contains N.  shift = -sign(l) dh . h where l divides h,
else 0.  dq and dk also compute Y X^T (q k^T, transposed for dk), so that dh . h and the sums of
dP * P, which give the gates' gradients, use W before it is rounded.

All operands but the vectors are loaded as squares of edge L; A stays in shared memory, the others
pass through a ring in the order of `ChunkPlan.order`.  Here are the modes, their vectors and the
call; intra_chunk.py loads and multiplies on Hopper, general.py on every GPU since Ampere.
Such a form is a module with functions of w, a ChunkWorker, and n, a square's number in the ring:

    a_times(w, n, tile)                 A times the states of a tile, or for None A B^T
    y_times_x(w, n)                     Y X^T, from the last tile to the first
    sums_with_y(w, z, tile, n)          the sums of the rows of z * Y
    left(w, weights)                    W, rounded, as the left operand of a matmul
    finish(w, tile, start, weights, n)  stores a tile of start + W X
"""

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.states import Heads
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA

Mode = Literal["forward", "dq", "dk", "dv"]
# The vectors that a mode reads along the rows and the columns of W, and how many it writes.
OF_ROWS = {
    "forward": ("row", "scale", "one"),
    "dq": ("row", "scale", "sign"),
    "dk": ("col", "scale"),
    "dv": ("col", "scale"),
}
OF_COLUMNS = {"forward": ("col",), "dq": ("col",), "dk": ("row", "shift"), "dv": ("row",)}
STATS = {"forward": 2, "dq": 1, "dk": 2, "dv": 0}
B, X, STATES, Y = range(4)  # kinds of squares
ORDER = 128  # squares that the list in shared memory has room for


class ChunkPlan(NamedTuple):
    """The static arguments of a call and the split of its work."""

    form: ModuleType
    mode: Mode
    normalize: bool
    packed: bool  # several documents in a sequence
    dtype: Any
    length: int  # T
    heads: int
    chunks: int  # of a sequence
    items: int  # chunks of all sequences and heads
    size: int  # L
    parts: int  # squares across A and B
    tiles: int  # squares across X and out
    blocks: int
    slots: int  # squares in a team's ring
    wgs: int = 1  # warpgroups that share a chunk
    teams: int = 1  # chunks that a block computes at a time, each with its own buffers
    rings_y: int = 0  # 1 if Y passes through the ring

    @property
    def transposes_state(self):
        """Whether the state is transposed; these modes also read Y."""
        return self.mode in ("dq", "dk")

    @property
    def transposed(self):
        """Whether W is transposed: its rows are the positions that are seen."""
        return self.mode in ("dk", "dv")

    @property
    def of_rows(self):
        return OF_ROWS[self.mode] + ("start",) * (self.packed and not self.transposed)

    @property
    def of_columns(self):
        return OF_COLUMNS[self.mode] + ("start",) * (self.packed and self.transposed)

    @property
    def order(self) -> list[tuple[int, int, int]]:
        """(kind, row, column) of a chunk's squares in the order of their use."""
        tiles, parts, turned = range(self.tiles), range(self.parts), self.transposes_state
        x = [[(X, 0, tile)] for tile in tiles]
        y = [[(Y, 0, tile)] * (turned * self.rings_y) for tile in tiles]
        states = [
            [(STATES, tile, part) if turned else (STATES, part, tile) for part in parts]
            for tile in tiles
        ]
        order = [(B, 0, part) for part in parts]
        if turned:  # Y X^T starts at the last tile
            order += sum((y[tile] + x[tile] for tile in reversed(tiles)), [])
        if self.mode == "dq":
            return order + sum((states[tile] + y[tile] for tile in tiles), []) + sum(x, [])
        return order + sum((states[tile] + y[tile] + x[tile] for tile in tiles), [])


class Inputs(NamedTuple):
    """References to global memory."""

    order: Any  # (ORDER,): kind, row and column of each square, in 8, 8 and 16 bits
    a: Heads
    b: Heads
    x: Heads
    states: Any
    y: Any  # Heads; None unless transposes_state
    joint: Any  # Heads where the result goes; None: to a separate array
    vectors: dict[str, Any]  # (B,H,N,L) each; "along" is (B,H,N,DX)


class ChunkWorker(NamedTuple):
    """A warpgroup of a block, and its chunk of a sequence and head."""

    schedule: ChunkPlan
    inputs: Inputs
    out: Heads
    stat_refs: tuple
    smem: Any
    a: Any  # its rows of A's squares, in shared memory
    wg: Any = 0  # index among the warpgroups that share a chunk
    thread: Any = 0  # index among all warpgroups of the block
    first: Any = None  # the item of its team's first chunk
    ring: Any = None  # of its team, on Hopper
    item: Any = None
    b: Any = None
    h: Any = None
    index: Any = None  # n of N
    vectors: Any = None  # of the chunk: name -> reference

    def at(self, item):
        """The same for another chunk."""
        pair, index = mosaic.divide(item, self.schedule.chunks)
        b, h = mosaic.divide(pair, self.schedule.heads)
        return self._replace(item=item, b=b, h=h, index=index)

    @property
    def mine(self):
        """Its positions in the chunk."""
        return pl.ds(self.wg * ROWS, ROWS)

    @property
    def row0(self):
        """Its first position in the sequence."""
        return self.index * self.schedule.size + self.wg * ROWS


# Vectors and tiles of W.

sum_rows = functools.partial(jnp.sum, axis=1)
# Without the barrier the compiler delays a product and keeps its factors in registers.
materialize = lax.optimization_barrier


def broadcast_rows(w: ChunkWorker, vector):
    """Broadcasts one number for each row to a tile of W."""
    return mosaic.along(vector, (ROWS, w.schedule.size), 0)


def load_rows(w: ChunkWorker, name):
    """Loads a vector at the warpgroup's rows."""
    return mosaic.read(w.vectors[name].at[w.mine], ROW)


def load_columns(w: ChunkWorker, name, tile=0):
    """Loads a vector at a tile's columns and broadcasts it to all rows."""
    size = w.schedule.size
    vector = mosaic.read(w.vectors[name].at[pl.ds(tile * size, size)], COL)
    return mosaic.along(vector, (ROWS, size), 1)


def load_tile(w: ChunkWorker, name):
    """Loads a vector and broadcasts it to a tile of W, along rows or columns as the mode needs."""
    if name in w.schedule.of_rows:
        return broadcast_rows(w, load_rows(w, name))
    return load_columns(w, name)


def store_stats(w: ChunkWorker, *stats):
    for ref, value in zip(w.stat_refs, stats, strict=True):
        mosaic.store(ref.at[w.b, w.h, w.index, w.mine], value)


def decays(w: ChunkWorker):
    """Computes D of the warpgroup's rows; keeping it would cost 64 registers."""
    s, start = w.schedule, w.index * w.schedule.size
    # Positions in a chunk are the same for all chunks, so the compiler would keep them in 40
    # registers throughout the kernel.  Positions in the sequence are not.
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, s.size))
    i, j = w.row0 + iota(0, layout=WGMMA), start + iota(1, layout=WGMMA)
    seeing, position = (j, i) if s.transposed else (i, j)
    visible = position <= seeing
    if s.packed:
        visible = visible & (position >= load_tile(w, "start").astype(jnp.int32) + start)
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
            q = plgpu.load(w.a.at[part], layout=WGMMA).astype(jnp.float32)
            return sums + sum_rows(q * load_columns(w, "along", part))

        qn = lax.fori_loop(0, s.parts, q_times_n, mosaic.zeros((ROWS,), ROW))
        l = sum_rows(weights) + scale * qn
        below = jnp.abs(l) <= norm  # not of NaN
        norm = 1 / jnp.where(below, norm, jnp.abs(l))
        sign = jnp.where(below, 0.0, jnp.where(l > 0, -1.0, 1.0))
    store_stats(w, norm, sign)
    # Add the values of the chunk and the part from the state, and store.
    finish_all(w, s.form.left(w, weights * broadcast_rows(w, norm)), scale * norm, n)


def backward_dv(w: ChunkWorker, ab, n):
    finish_all(w, w.schedule.form.left(w, ab * decays(w)), load_rows(w, "scale"), n)


def finish_all(w: ChunkWorker, weights, scale, n):
    """Stores W X + scale * (A states)."""
    s = w.schedule

    @pl.loop(0, s.tiles)
    def _(tile):
        step = n + tile * (s.parts + 1)
        through = s.form.a_times(w, step, tile) * broadcast_rows(w, scale)
        s.form.finish(w, tile, through, weights, step + s.parts)


def backward_dk(w: ChunkWorker, ab, n):
    s = w.schedule
    # Weight the scores by their decays.
    weights = materialize((ab + load_tile(w, "shift")) * decays(w))
    scale = load_rows(w, "scale")
    # Sum the input gate's gradient from the chunk.
    inside = sum_rows(weights * s.form.y_times_x(w, n))
    weights, n = s.form.left(w, weights), n + s.tiles * (1 + s.rings_y)

    # Compute and store dk, and sum the input gate's gradient from the state.
    def one_tile(tile, sums):
        step = n + tile * (s.parts + s.rings_y + 1)
        through = s.form.a_times(w, step, tile) + load_columns(w, "along", tile)
        through = through * broadcast_rows(w, scale)
        sums += s.form.sums_with_y(w, through, tile, step + s.parts)
        s.form.finish(w, tile, through, weights, step + s.parts + s.rings_y)
        return sums

    outside = lax.fori_loop(0, s.tiles, one_tile, mosaic.zeros((ROWS,), ROW))
    store_stats(w, inside, outside)


def backward_dq(w: ChunkWorker, ab, n):
    """Computes dq.  W needs the shift, to which the state contributes."""
    s, on_hopper = w.schedule, w.ring is not None
    # Weight the scores by their decays.
    weights, scale = ab * decays(w), load_rows(w, "scale")
    weights = materialize(weights) if on_hopper else weights
    # Sum dh . h from the chunk and from the state, whose tiles all stay in registers.
    dot = sum_rows(weights * s.form.y_times_x(w, n))
    n, through = n + s.tiles * (1 + s.rings_y), []
    for tile in range(s.tiles):
        through.append(s.form.a_times(w, n, tile))
        dot += scale * s.form.sums_with_y(w, through[-1], tile, n + s.parts)
        n += s.parts + s.rings_y
    store_stats(w, dot)
    # Add the normaliser's part of the gradient of every weight in a row.  From another index the
    # general form computes D again, instead of keeping the first one in registers.
    w = w if on_hopper else w._replace(index=materialize(w.index))
    shift = load_rows(w, "sign") * dot
    weights = materialize(s.form.left(w, weights + decays(w) * broadcast_rows(w, shift)))
    # Compute and store dq.
    for tile, part in enumerate(through):
        part = part + broadcast_rows(w, shift) * load_columns(w, "along", tile)
        s.form.finish(w, tile, part * broadcast_rows(w, scale), weights, n + tile)


MODES = {"forward": forward, "dq": backward_dq, "dk": backward_dk, "dv": backward_dv}


def one_chunk(w: ChunkWorker, n):
    """Computes a chunk, whose first square has the number n."""
    s = w.schedule
    MODES[s.mode](w, s.form.a_times(w, n, None), n + s.parts)


@functools.partial(jax.jit, static_argnames=("form", "mode", "normalize", "sms"))
def chunk_outputs(
    a: Heads, b: Heads, x: Heads, chunk_states, vectors, along=None, like: Heads | None = None,
    joint=None, *, form: ModuleType, mode: Mode, normalize=True, sms: int,
):  # fmt: skip
    """Computes one line of the table above: out, then by mode, in float32 of (B,H,N,L),

    forward  1 / N of each row; -sign(l), or 0 where l does not divide h
    dq       dh . h of each row
    dk       k . dk of each row: the part from the chunk; the part from the state

    vectors: name -> (B,H,N,L) float32, the names of OF_ROWS and OF_COLUMNS, and "start", or None if
        every sequence is one document.
    along: (B,H,N,DX) float32, n or dn.
    like: q for dq (which reads it as Y), k for dk (too), v for dv.  The result is shaped like its
        array and stands where it stands; the array's other columns are undefined.
    joint: a reference to an array of that shape.  The result is then written there, not returned.
    """
    (batch, heads, chunks, size), length = vectors["row"].shape, a.array.shape[1]
    items = batch * heads * chunks
    s = ChunkPlan(
        form, mode, normalize, vectors["start"] is not None, a.array.dtype, length, heads, chunks,
        items, size, a.tiles, x.tiles, blocks=items, slots=3,
    )  # fmt: skip
    given = {name: vectors[name] for name in (*s.of_rows, *s.of_columns)}
    if along is not None:
        given["along"] = along
    shape = (batch, length, heads * x.tiles, size) if like is None else like.array.shape
    array = jax.ShapeDtypeStruct(shape, s.dtype)
    place = Heads(array, x.tiles, 0) if like is None else replace(like, array=array)
    of_position = jax.ShapeDtypeStruct(vectors["row"].shape, jnp.float32)
    y = like if s.transposes_state else None
    out = None if joint is None else replace(place, array=joint)
    s, inputs = form.prepared(s, Inputs(None, a, b, x, chunk_states, y, out, given), sms)
    firsts = {B: b.first, X: x.first, STATES: 0, Y: place.first}
    order = [kind << 24 | i << 16 | (j + firsts[kind]) for kind, i, j in s.order]
    order = jnp.array(order + [0] * (ORDER - len(order)), jnp.int32)
    out, stats = mosaic.kernel(
        functools.partial(form.body, s),
        name=f"{form.PREFIX}vlstm_{'' if mode == 'forward' else 'backward_'}{mode}",
        out_type=(place if joint is None else None, (of_position,) * STATS[mode]),
        scratch_types=form.scratch(s, inputs.vectors),
        **mosaic.grid(block=s.blocks),
        num_threads=s.teams * s.wgs,
        # No sum crosses warps, and Hopper's shared memory is full.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(inputs._replace(order=order))
    return stats if joint is not None else (out.array, *stats)
