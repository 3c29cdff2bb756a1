"""What both forms of the intra-chunk kernel share: D, and vectors with one number a position.

w is a Worker of either form.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.intra_schedule import Chunk, nth_square
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA

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
