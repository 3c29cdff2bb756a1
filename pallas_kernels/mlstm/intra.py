"""What both forms of the intra-chunk kernel share: schedule, D, vectors with one number a position.

w is a Worker of either form.
"""

import collections
import functools
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

SMEM = 224 * 1024  # bytes of a block's shared memory for its large buffers
TEAMS = 3  # chunks that a block of 64-row tiles computes at a time; 6% over 2 at DQK = DV = 64

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


class Schedule(NamedTuple):
    """The static arguments of a call and the split of its work."""

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
    wgs: int  # warpgroups that share a chunk
    teams: int  # chunks that a block computes at a time, each with its own buffers
    slots: int  # squares in a team's ring
    blocks: int

    @property
    def transposes_state(self):
        """Whether the state is transposed; these modes also read Y."""
        return self.mode in ("dq", "dk")

    @property
    def transposed(self):
        """Whether W is transposed: its rows are the positions that are seen."""
        return self.mode in ("dk", "dv")

    @property
    def steps(self):
        """Squares that a chunk loads."""
        return len(load_order(self.mode, self.parts, self.tiles))

    @property
    def of_rows(self):
        return OF_ROWS[self.mode] + ("start",) * (self.packed and not self.transposed)

    @property
    def of_columns(self):
        return OF_COLUMNS[self.mode] + ("start",) * (self.packed and self.transposed)


class Inputs(NamedTuple):
    """References to global memory."""

    order: Any  # (steps,4), from `load_order`
    a: Heads
    b: Heads
    x: Heads
    states: Any
    y: Any  # Heads; None unless transposes_state
    joint: Any  # Heads where the result goes; None: to a separate array
    vectors: dict[str, Any]  # (B,H,N,L) each; "along" is (B,H,N,DX)


class Scratch(NamedTuple):
    """Shared memory and barriers of a block (see the picture in intra_chunk.py)."""

    order: Any  # (steps,4)
    a: Any  # (threads,parts,64,L)
    ring: Any  # (teams slots,L,L)
    out: Any  # (threads,64,L)
    order_full: Any
    a_full: Any  # for each thread
    full: Any  # for each slot
    free: Any  # for each slot
    y_full: Any  # for each thread


class Worker(NamedTuple):
    """A warpgroup of a block and its work."""

    schedule: Schedule
    inputs: Inputs
    out: Heads
    stat_refs: tuple
    smem: Scratch
    thread: Any  # index among all warpgroups of the block
    team: Any
    wg: Any  # index among the warpgroups that share a chunk
    first: Any  # the item of its team's first chunk
    ring: Ring  # of the team


class Chunk(NamedTuple):
    """A chunk of a sequence and head, as one warpgroup sees it."""

    item: Any
    b: Any
    h: Any
    index: Any  # n of N
    row0: Any  # the warpgroup's first position in the sequence
    mine: Any  # the warpgroup's positions in the chunk
    at: tuple  # index of the chunk in the vectors of `Inputs`

    def tile(self, heads: Heads, n):
        """The warpgroup's rows of the n-th tile of Y or out."""
        return heads.at(self.b, pl.ds(self.row0, ROWS), self.h, n)


def locate(s: Schedule, item):
    """Sequence, head and chunk of an item."""
    pair, chunk = mosaic.divide(item, s.chunks)
    return *mosaic.divide(pair, s.heads), chunk


def nth_square(s: Schedule, n):
    """The n-th square along an axis."""
    return pl.ds(n * s.size, s.size)


def load_order(mode: Mode, parts: int, tiles: int) -> list[tuple[int, int, int, int]]:
    """A chunk's squares in the order of use: (0 B, 1 X, 2 states; row; column; 0 for 16 bytes)."""
    transposes_state = mode in ("dq", "dk")
    b = [(0, 0, part, 0) for part in range(parts)]
    x = [(1, 0, tile, 0) for tile in range(tiles)]
    states = [
        [(2, tile, part, 0) if transposes_state else (2, part, tile, 0) for part in range(parts)]
        for tile in range(tiles)
    ]
    order = b + x[::-1] * transposes_state  # Y X^T starts at the last tile
    if mode == "dq":
        return order + sum(states, []) + x
    return order + sum(([*states[tile], x[tile]] for tile in range(tiles)), [])


def prepared(s: Schedule, a: Heads, x: Heads, vectors, along, like: Heads | None, joint):
    """(the vectors that the mode reads; the shape and place of the result; the kernel's results).

    Takes the arguments of `intra_chunk.chunk_outputs`.
    """
    # JAX would sort the keys of a plain dict.
    given = collections.OrderedDict((name, vectors[name]) for name in (*s.of_rows, *s.of_columns))
    if along is not None:
        given["along"] = along
    batch, length, _, size = a.array.shape
    shape = (batch, length, s.heads * x.tiles, size) if like is None else like.array.shape
    array = jax.ShapeDtypeStruct(shape, s.dtype)
    place = Heads(array, x.tiles, 0) if like is None else replace(like, array=array)
    of_position = jax.ShapeDtypeStruct(vectors["row"].shape, jnp.float32)
    return given, place, (place if joint is None else None, (of_position,) * STATS[s.mode])


def schedule(a: Heads, x: Heads, row, *, mode, normalize, packed, sms) -> Schedule:
    """row: a vector, (B,H,N,L)."""
    (batch, heads, chunks, size), parts, tiles = row.shape, a.tiles, x.tiles
    dtype, length, wgs = a.array.dtype, a.array.shape[1], size // ROWS
    square = size * size * dtype.itemsize
    slots = min(4, SMEM // square - parts - 1)
    # The tiles that dq keeps in registers leave no room for a third team.
    most = 2 if mode == "dq" and tiles > 2 else TEAMS
    teams = 1 if wgs > 1 else min(most, SMEM // ((slots + parts + 1) * square))
    items = batch * heads * chunks
    blocks = min(mosaic.cdiv(items, teams), sms)
    return Schedule(
        mode, normalize, packed, dtype, length, heads, chunks, items, size, parts, tiles,
        wgs, teams, slots, blocks,
    )  # fmt: skip


def scratch(s: Schedule) -> Scratch:
    swizzled = mosaic.wgmma_tiles(s.size, s.dtype)
    buffer = lambda *shape: plgpu.SMEM(shape, s.dtype, transforms=swizzled)
    threads = s.teams * s.wgs
    return Scratch(
        order=plgpu.SMEM((s.steps, 4), jnp.int32),
        a=buffer(threads, s.parts, ROWS, s.size),
        ring=buffer(s.teams * s.slots, s.size, s.size),
        out=buffer(threads, ROWS, s.size),
        order_full=plgpu.Barrier(),
        a_full=plgpu.Barrier(num_barriers=threads, num_arrivals=s.parts),
        full=plgpu.Barrier(num_barriers=s.teams * s.slots),
        free=plgpu.Barrier(num_barriers=s.teams * s.slots, num_arrivals=s.wgs),
        y_full=plgpu.Barrier(num_barriers=threads),
    )


# Vectors and tiles of W.

sum_rows = functools.partial(jnp.sum, axis=1)
# Without the barrier the compiler delays a product and keeps its factors in registers.
materialize = lax.optimization_barrier


def broadcast_rows(vector, size):
    """Broadcasts one number for each row to a tile of W."""
    return mosaic.along(vector, (ROWS, size), 0)


def broadcast_columns(vector, size):
    """Broadcasts one number for each column to a tile of W."""
    return mosaic.along(vector, (ROWS, size), 1)


def load_rows(w, c: Chunk, name):
    """Loads a vector at the warpgroup's rows."""
    return plgpu.load(w.inputs.vectors[name].at[*c.at, c.mine], layout=ROW, optimized=False)


def load_tile(w, c: Chunk, name):
    """Loads a vector and broadcasts it to a tile of W, along rows or columns as the mode needs."""
    s = w.schedule
    if name in s.of_rows:
        return broadcast_rows(load_rows(w, c, name), s.size)
    at = w.inputs.vectors[name].at[*c.at, pl.ds(0, s.size)]
    return broadcast_columns(plgpu.load(at, layout=COL, optimized=False), s.size)


def load_along(w, c: Chunk, tile):
    """Loads n or dn at a tile's columns and broadcasts it to all rows."""
    at = w.inputs.vectors["along"].at[*c.at, nth_square(w.schedule, tile)]
    return broadcast_columns(plgpu.load(at, layout=COL, optimized=False), w.schedule.size)


def store_stats(w, c: Chunk, *stats):
    for ref, value in zip(w.stat_refs, stats, strict=True):
        mosaic.store(ref.at[c.b, c.h, c.index, c.mine], value)


def positions(w, c: Chunk):
    """Positions of W's rows and columns in the sequence.

    Positions in a chunk are the same for all chunks, so the compiler would keep them in 40
    registers throughout the kernel.
    """
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, w.schedule.size))
    return c.row0 + iota(0, layout=WGMMA), c.index * w.schedule.size + iota(1, layout=WGMMA)


def decays(w, c: Chunk):
    """Computes D of the warpgroup's rows; keeping it would cost 64 registers."""
    s = w.schedule
    i, j = positions(w, c)
    seeing, position = (j, i) if s.transposed else (i, j)
    visible = position <= seeing
    if s.packed:
        start = load_tile(w, c, "start").astype(jnp.int32)
        visible = visible & (position >= start + c.index * s.size)
    return jnp.exp2(jnp.where(visible, load_tile(w, c, "row") + load_tile(w, c, "col"), -jnp.inf))


def normaliser(weights, scale, qn, one):
    """1 / N of each row, and -sign(l), or 0 where l does not divide h."""
    l = sum_rows(weights) + scale * qn
    above = jnp.abs(l) > one
    norm = 1 / jnp.where(above, jnp.abs(l), one)
    return norm, jnp.where(above, jnp.where(l > 0, -1.0, 1.0), 0.0)
