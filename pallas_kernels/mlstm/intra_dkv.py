"""dk and dv of all chunks in one kernel on Hopper, where q and k are one square wide (DQK = 64).

intra_chunk.py has a kernel for each, and memory bounds both.  They share q, k, dh and dC; this one
also loads every square once.  With D as there, transposed, and the tiles t of DV:

    P = k q^T * D
    for each t:  dv_t = admit * (k dC_t) + P dh_t;   Z += v_t dC_t^T;   A += v_t dh_t^T
    W = (A + shift) * D,   dk = admit * (Z + dn) + W q,   di = sum(W * k q^T) + k . admit * (Z + dn)

Every sum has the order that it has in the two kernels, so the results have their bits.

    a block: up to three teams of one warpgroup, each with its own chunks and buffers

        q, k                once a chunk, by TMA    qk_full[team]
        v_t, dC_t, dh_t     a stage, by TMA         full[team, stage]
        out                 dv_t or dk, stored by TMA

A stage is loaded again as soon as its tile of dv is stored, and q and k at the end of the chunk.
The next squares of a team, also of its next chunk, are thus on their way.  A, Z, a tile of dv and P
take 112 of a thread's 168 registers; tiles of 128 or a wider q would need twice as many.
"""

import collections
import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mlstm.intra_schedule import Chunk, Schedule, locate, nth_square
from pallas_kernels.mlstm.intra_weights import (
    broadcast_columns,
    broadcast_rows,
    decays,
    load_along,
    load_rows,
    load_tile,
    materialize,
    store_stats,
    sum_rows,
)
from pallas_kernels.mosaic import COL, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

TEAMS = 3  # chunks that a block computes at a time; three teams leave 168 registers to a thread
STAGES = 2  # of a team; three teams with two stages take 216 of 227 KB of shared memory


class DkvInputs(NamedTuple):
    """References to global memory."""

    q: Heads
    k: Heads
    v: Heads
    dh: Heads
    states: Any  # dC
    joint: Any  # where dk and dv go, beside each other; None: to separate arrays
    positions: Any  # in a chunk, (L,) int32
    vectors: dict[str, Any]  # (B,H,N,L) each; "along", which is dn, (B,H,N,DQK)


class DkvScratch(NamedTuple):
    """Shared memory and barriers of a block (see the picture)."""

    q: Any  # (teams,L,L)
    k: Any
    v: Any  # (teams,STAGES,L,L)
    states: Any
    dh: Any
    out: Any  # (teams,L,L)
    qk_full: Any  # for each team
    full: Any  # for each stage of each team


class DkvWorker(NamedTuple):
    """A warpgroup of a block, which is a team, and its work."""

    schedule: Schedule
    inputs: DkvInputs
    dk: Heads
    dv: Heads
    stat_refs: tuple
    smem: DkvScratch
    team: Any
    first: Any  # the item of its first chunk

    @property
    def ring(self) -> Ring:
        slots = self.schedule.slots
        return Ring(slots, self.smem.full, first=self.team * slots)


# Load.


def load_qk(w: DkvWorker, item):
    s, smem = w.schedule, w.smem
    b, h, chunk = locate(s, item)

    @pl.when(item < s.items)
    def _():
        for heads, into in ((w.inputs.k, smem.k), (w.inputs.q, smem.q)):
            source = heads.at(b, nth_square(s, chunk), h, 0)
            plgpu.copy_gmem_to_smem(source, into.at[w.team], smem.qk_full.at[w.team])


def load_stage(w: DkvWorker, n):
    """Loads the n-th tiles, counted over all chunks of the team."""
    s, smem, inputs = w.schedule, w.smem, w.inputs
    turn, tile = mosaic.divide(n, s.parts)
    item = w.first + turn * (s.blocks * s.teams)
    b, h, chunk = locate(s, item)

    @pl.when(item < s.items)
    def _():
        rows = nth_square(s, chunk)
        of_state = inputs.states.at[b, h, chunk, nth_square(s, 0), nth_square(s, tile)]
        w.ring.send(n, of_state, smem.states.at[w.team])
        for heads, into in ((inputs.v, smem.v), (inputs.dh, smem.dh)):
            w.ring.send(n, heads.at(b, rows, h, tile), into.at[w.team])


# Compute.


def product(w: DkvWorker, left, right, start=None):
    """(start +) left @ right."""

    def run(acc):
        if start is not None:
            acc[...] = start
        plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))


def scores(w: DkvWorker):
    """k q^T.  It is computed twice; keeping it would cost 32 registers."""
    return product(w, w.smem.k.at[w.team], w.smem.q.at[w.team].transpose((1, 0)))


def decays_of(w: DkvWorker, c: Chunk):
    """D.  Its columns' positions come from memory: computed, they would stay in 17 registers."""
    size = w.schedule.size
    i = plgpu.broadcasted_iota(jnp.int32, (ROWS, size), 0, layout=WGMMA)
    j = plgpu.load(w.inputs.positions.at[pl.ds(0, size)], layout=COL, optimized=False)
    return decays(w, c._replace(index=0), (i, broadcast_columns(j, size)))


def store(w: DkvWorker, c: Chunk, heads: Heads, tile, value):
    """Stores a tile.  All four warps have then done with what they read before."""
    plgpu.wait_smem_to_gmem(0)  # the copy of the tile before must have read the buffer
    w.smem.out[w.team] = value.astype(w.schedule.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(w.smem.out.at[w.team], c.tile(heads, tile))


def add_tiles(w: DkvWorker, c: Chunk, weights, scale, n, of_scores, of_states):
    """Stores dv, and adds v dh^T and v dC^T to the accumulators.  n is the team's next tile."""
    s, smem = w.schedule, w.smem

    @pl.loop(0, s.parts)
    def _(tile):
        stage = w.ring.wait(n + tile)
        v, states, dh = (x.at[w.team, stage] for x in (smem.v, smem.states, smem.dh))
        plgpu.wgmma(of_states, v, states.transpose((1, 0)))
        plgpu.wgmma(of_scores, v, dh.transpose((1, 0)))
        through = product(w, smem.k.at[w.team], states) * broadcast_rows(scale, s.size)
        store(w, c, w.dv, tile, product(w, weights, dh, through))
        load_stage(w, n + tile + s.slots)


def in_new_registers(w: DkvWorker) -> DkvWorker:
    """The compiler would otherwise keep the addresses of all buffers throughout the kernel."""
    return w._replace(team=materialize(w.team))


def one_chunk(w: DkvWorker, carry):
    s = w.schedule
    item, n0 = carry
    w, n = in_new_registers(w), materialize(n0)
    b, h, index = locate(s, item)
    c = Chunk(item, b, h, index, index * s.size, pl.ds(0, s.size), (b, h, index))
    scale = load_rows(w, c, "scale")
    # Weight the scores of dv, and store dv.
    plgpu.barrier_wait(w.smem.qk_full.at[w.team])
    weights = materialize((scores(w) * decays_of(w, c)).astype(s.dtype))

    def run(of_scores, of_states):
        add_tiles(w, c, weights, scale, n, of_scores, of_states)
        return of_scores[...], of_states[...]

    acc = plgpu.ACC((ROWS, s.size), jnp.float32)
    ab, through = pl.run_scoped(run, acc, acc)
    w = in_new_registers(w)
    # Sum the input gate's gradient from the state.
    through = (through + load_along(w, c, 0)) * broadcast_rows(scale, s.size)
    k = plgpu.load(w.smem.k.at[w.team], layout=WGMMA).astype(jnp.float32)
    outside = sum_rows(through * k)
    plgpu.commit_smem()  # a barrier: loads from below would otherwise move up and cost registers
    # Weight the scores of dk, and store dk.
    weights = materialize((ab + load_tile(w, c, "shift")) * decays_of(w, c))
    dk = product(w, weights.astype(s.dtype), w.smem.q.at[w.team], through)
    store(w, c, w.dk, 0, dk)
    # Sum the input gate's gradient from the chunk, now that dk has left the registers.
    inside = sum_rows(weights * scores(w))
    store_stats(w, c, inside, outside)
    plgpu.commit_smem()  # waits until all four warps have multiplied
    item += s.blocks * s.teams
    load_qk(w, item)
    return item, n0 + s.parts


def body(s: Schedule, inputs: DkvInputs, out, stat_refs, smem: DkvScratch):
    team = lax.axis_index("wg")
    first = lax.axis_index("block") * s.teams + team
    if inputs.joint is None:
        dk, dv = out
    else:
        dk, dv = (replace(x, array=inputs.joint) for x in (inputs.k, inputs.v))
    w = DkvWorker(s, inputs, dk, dv, stat_refs, smem, team, first)
    load_qk(w, first)
    pl.loop(0, s.slots)(functools.partial(load_stage, w))
    # Walk over the team's chunks.
    more = lambda carry: carry[0] < s.items
    lax.while_loop(more, functools.partial(one_chunk, w), (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


def schedule(v: Heads, row, *, packed, sms) -> Schedule:
    """row: a vector, (B,H,N,L)."""
    batch, heads, chunks, size = row.shape
    items = batch * heads * chunks
    # The vectors that dk needs; dv's are among them.
    return Schedule(
        "dk", True, packed, v.array.dtype, v.array.shape[1], heads, chunks, items, size,
        parts=v.tiles, tiles=1, wgs=1, teams=TEAMS, slots=STAGES,
        blocks=min(mosaic.cdiv(items, TEAMS), sms),
    )  # fmt: skip


def scratch(s: Schedule) -> DkvScratch:
    swizzled = mosaic.wgmma_tiles(s.size, s.dtype)
    squares = lambda *n: plgpu.SMEM((*n, s.size, s.size), s.dtype, transforms=swizzled)
    once, staged = squares(s.teams), squares(s.teams, s.slots)
    return DkvScratch(
        q=once, k=once, v=staged, states=staged, dh=staged, out=once,
        qk_full=plgpu.Barrier(num_barriers=s.teams, num_arrivals=2),
        full=plgpu.Barrier(num_barriers=s.teams * s.slots, num_arrivals=3),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("packed", "sms"))
def backward_dkv(
    q: Heads, k: Heads, v: Heads, dh: Heads, chunk_states, vectors, dn, joint=None, *,
    packed=False, sms: int,
):  # fmt: skip
    """Computes dk and dv, then the two parts of k . dk (`intra_chunk.chunk_outputs`, mode "dk").

    q and k are one tile of 64 wide.  chunk_states: dC.  vectors: as in mode "dk".
    dk and dv are shaped like the arrays of k and v and stand where these stand, or in `joint`, a
    reference to an array of that shape; they are then not returned.
    """
    row = vectors["row"]
    s = schedule(v, row, packed=packed, sms=sms)
    # JAX would sort the keys of a plain dict.
    given = collections.OrderedDict((name, vectors[name]) for name in (*s.of_rows, *s.of_columns))
    given["along"] = dn
    like = lambda x: replace(x, array=jax.ShapeDtypeStruct(x.array.shape, x.array.dtype))
    of_position = jax.ShapeDtypeStruct(row.shape, jnp.float32)
    out, stats = mosaic.kernel(
        functools.partial(body, s),
        name="vlstm_backward_dkv",
        out_type=((like(k), like(v)) if joint is None else None, (of_position,) * 2),
        scratch_types=(scratch(s),),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=s.teams,
        thread_name="wg",
        # No sum crosses warps, and shared memory is full.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(DkvInputs(q, k, v, dh, chunk_states, joint, jnp.arange(s.size, dtype=jnp.int32), given))
    return stats if joint is not None else (*(heads.array for heads in out), *stats)
