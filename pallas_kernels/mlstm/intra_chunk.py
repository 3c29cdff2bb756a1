"""The intra-chunk kernel of the mLSTM cell on Hopper: h, dq, dk and dv of all chunks at once.

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

All operands are loaded as squares of edge L.  The computing warpgroups also load; after the last
square of a chunk they load the team's next chunk.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mlstm.intra import (
    Chunk,
    Inputs,
    Mode,
    Schedule,
    Scratch,
    Worker,
    broadcast_rows,
    decays,
    load_along,
    load_order,
    load_rows,
    load_tile,
    locate,
    materialize,
    normaliser,
    nth_square,
    prepared,
    schedule,
    scratch,
    store_stats,
    sum_rows,
)  # fmt: skip
from pallas_kernels.mlstm.walk import narrow
from pallas_kernels.mosaic import ROW, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

# Load: the ring, A and Y.


def load_square(w: Worker, n):
    """Starts to load the square of step n, counted over all chunks of the team."""
    s = w.schedule
    turn, step = mosaic.divide(n, s.steps)
    item = w.first + turn * (s.blocks * s.teams)
    b, h, chunk = locate(s, item)
    kind, i, j = (w.smem.order[step, place] for place in range(3))
    squares = [
        lambda: w.inputs.b.at(b, nth_square(s, chunk), h, j),
        lambda: w.inputs.x.at(b, nth_square(s, chunk), h, j),
        lambda: w.inputs.states.at[b, h, chunk, nth_square(s, i), nth_square(s, j)],
    ]
    into = w.ring.into(n, w.smem.ring)
    copies = [lambda at=at: plgpu.copy_gmem_to_smem(at(), *into) for at in squares]
    pl.when(item < s.items)(lambda: lax.switch(kind, copies))


def release(w: Worker, n):
    """Frees the slot of step n; after its last use a new square is loaded into it."""
    w.ring.release(n)
    w.ring.refill(n, functools.partial(load_square, w))


def load_a(w: Worker, item):
    s = w.schedule
    b, h, chunk = locate(s, item)

    @pl.when(item < s.items)
    def _():
        @pl.loop(0, s.parts)
        def _(part):
            rows = pl.ds(chunk * s.size + w.wg * ROWS, ROWS)
            source = w.inputs.a.at(b, rows, h, part)
            into = w.smem.a.at[w.thread, part], w.smem.a_full.at[w.thread]
            plgpu.copy_gmem_to_smem(source, *into)


def load_next_a(w: Worker, item):
    plgpu.commit_smem()  # waits until all four warps have read A
    load_a(w, item + w.schedule.blocks * w.schedule.teams)


def load_y(w: Worker, c: Chunk, tile):
    """Loads a tile of Y into the buffer of the result."""
    source = c.tile(w.inputs.y, tile)
    plgpu.copy_gmem_to_smem(source, w.smem.out.at[w.thread], w.smem.y_full.at[w.thread])


# Multiply with the squares of the ring.


def multiply(w: Worker, acc, left, n, transpose=False):
    """acc += left @ the square of step n."""
    square = w.smem.ring.at[w.ring.wait(n)]
    plgpu.wgmma(acc, left, square.transpose((1, 0)) if transpose else square)


def a_times(w: Worker, n, transpose):
    """A @ `parts` squares of the ring, from step n on."""
    parts = w.schedule.parts

    def run(acc):
        @pl.loop(0, parts)  # unrolling it would cost registers for 8 addresses of each part
        def _(part):
            multiply(w, acc, w.smem.a.at[w.thread, part], n + part, transpose)
            plgpu.wgmma_wait(1)
            pl.when(part > 0)(lambda: release(w, n + part - 1))

        plgpu.wgmma_wait(0)
        release(w, n + parts - 1)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))


def y_times_x(w: Worker, c: Chunk, n):
    """Y X^T, from the last tile to the first, whose Y then stays in shared memory."""
    tiles = w.schedule.tiles

    def run(acc):
        @pl.loop(0, tiles)
        def _(step):
            plgpu.barrier_wait(w.smem.y_full.at[w.thread])
            multiply(w, acc, w.smem.out.at[w.thread], n + step, transpose=True)
            plgpu.wgmma_wait(0)
            release(w, n + step)

            @pl.when(step < tiles - 1)
            def _():
                plgpu.commit_smem()  # waits until all four warps have multiplied
                load_y(w, c, tiles - 2 - step)

        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, w.schedule.size), jnp.float32))


def sums_with_y(w: Worker, z):
    y = plgpu.load(w.smem.out.at[w.thread], layout=WGMMA).astype(jnp.float32)
    return sum_rows(z * y)


# The epilogue adds W X to the part from the state, and stores the result tile by tile.


def finish(w: Worker, c: Chunk, tile, start, weights, n, meanwhile=lambda: ()):
    """Stores a tile of start + W X; returns meanwhile(), which overlaps with the matmul."""
    s, out_smem = w.schedule, w.smem.out

    def run(acc):
        acc[...] = start
        multiply(w, acc, weights, n)
        extra = meanwhile()
        out = acc[...]
        release(w, n)
        return out, extra

    out, extra = pl.run_scoped(run, plgpu.ACC((ROWS, s.size), jnp.float32))
    plgpu.wait_smem_to_gmem(0)  # the copy of the tile before must have read the buffer
    out_smem[w.thread] = narrow(out, s.dtype, s.mode == "forward")
    plgpu.commit_smem()

    @pl.when(c.row0 < s.length)
    def _():
        plgpu.copy_smem_to_gmem(out_smem.at[w.thread], c.tile(w.out, tile))

    return extra


def finish_all(w: Worker, c: Chunk, weights, scale, n):
    s = w.schedule

    @pl.loop(0, s.tiles)
    def _(tile):
        step = n + tile * (s.parts + 1)
        through = a_times(w, step, s.transposes_state) * broadcast_rows(scale, s.size)
        pl.when(tile == s.tiles - 1)(lambda: load_next_a(w, c.item))
        finish(w, c, tile, through, weights, step + s.parts)


# Each mode has a function of the scores A B^T.  n is the ring's next step.


def forward(w: Worker, c: Chunk, ab, n):
    s = w.schedule
    # Weight the scores by their decays.
    weights, scale, norm = ab * decays(w, c), load_rows(w, c, "scale"), load_rows(w, c, "one")
    # Compute the normaliser from the chunk and from the state.
    sign = norm * 0.0
    if s.normalize:

        def q_times_n(part, sums):
            q = plgpu.load(w.smem.a.at[w.thread, part], layout=WGMMA)
            return sums + sum_rows(q.astype(jnp.float32) * load_along(w, c, part))

        qn = lax.fori_loop(0, s.parts, q_times_n, mosaic.zeros((ROWS,), ROW))
        norm, sign = normaliser(weights, scale, qn, norm)
    store_stats(w, c, norm, sign)
    # Add the values of the chunk and the part from the state, and store.
    finish_all(w, c, narrow(weights * broadcast_rows(norm, s.size), s.dtype), scale * norm, n)


def backward_dv(w: Worker, c: Chunk, ab, n):
    finish_all(w, c, (ab * decays(w, c)).astype(w.schedule.dtype), load_rows(w, c, "scale"), n)


def backward_dk(w: Worker, c: Chunk, ab, n):
    s = w.schedule
    # Weight the scores by their decays.
    weights = materialize((ab + load_tile(w, c, "shift")) * decays(w, c))
    scale = load_rows(w, c, "scale")
    # Sum the input gate's gradient from the chunk.
    inside = sum_rows(weights * y_times_x(w, c, n))
    weights, n = weights.astype(s.dtype), n + s.tiles

    # Compute and store dk, and sum the input gate's gradient from the state.
    def one_tile(tile, sums):
        @pl.when(tile > 0)  # Y of the first tile is loaded already
        def _():
            plgpu.wait_smem_to_gmem(0)
            load_y(w, c, tile)

        step = n + tile * (s.parts + 1)
        through = a_times(w, step, True) + load_along(w, c, tile)
        through = through * broadcast_rows(scale, s.size)
        pl.when(tile == s.tiles - 1)(lambda: load_next_a(w, c.item))
        pl.when(tile > 0)(lambda: plgpu.barrier_wait(w.smem.y_full.at[w.thread]))
        meanwhile = lambda: sums + sums_with_y(w, through)
        return finish(w, c, tile, through, weights, step + s.parts, meanwhile)

    outside = lax.fori_loop(0, s.tiles, one_tile, mosaic.zeros((ROWS,), ROW))
    store_stats(w, c, inside, outside)


def backward_dq(w: Worker, c: Chunk, ab, n):
    """Computes dq.  W needs the shift, to which the state contributes."""
    s = w.schedule
    # Weight the scores by their decays.
    weights, scale = materialize(ab * decays(w, c)), load_rows(w, c, "scale")
    # Sum dh . h from the chunk and from the state, whose tiles all stay in registers.
    dot = sum_rows(weights * y_times_x(w, c, n))
    n, through = n + s.tiles, []
    for tile in range(s.tiles):
        if tile:
            plgpu.commit_smem()  # waits until the previous Y has been read
            load_y(w, c, tile)
        part = a_times(w, n, True)
        if tile:
            plgpu.barrier_wait(w.smem.y_full.at[w.thread])
        dot += scale * sums_with_y(w, part)
        through.append(part)
        n += s.parts
    load_next_a(w, c.item)
    store_stats(w, c, dot)
    # Add the normaliser's part of the gradient of every weight in a row.
    shift = load_rows(w, c, "sign") * dot
    weights = materialize((weights + decays(w, c) * broadcast_rows(shift, s.size)).astype(s.dtype))
    # Compute and store dq.
    for tile, part in enumerate(through):
        part = part + broadcast_rows(shift, s.size) * load_along(w, c, tile)
        finish(w, c, tile, part * broadcast_rows(scale, s.size), weights, n + tile)


MODES = {"forward": forward, "dq": backward_dq, "dk": backward_dk, "dv": backward_dv}


def one_chunk(w: Worker, carry):
    s = w.schedule
    item, n0 = carry
    # If all chunks use the same slots (steps is a multiple of slots), the compiler would otherwise
    # compute the addresses of all squares once and keep them.
    n0 = materialize(n0)
    b, h, index = locate(s, item)
    mine = w.wg * ROWS
    c = Chunk(item, b, h, index, index * s.size + mine, pl.ds(mine, ROWS), (b, h, index))
    # Load Y and wait for A.
    if s.transposes_state:
        plgpu.wait_smem_to_gmem(0)
        load_y(w, c, s.tiles - 1)
    plgpu.barrier_wait(w.smem.a_full.at[w.thread])
    # Compute the scores A B^T and continue with the mode's function.
    ab, n = a_times(w, n0, True), n0 + s.parts
    MODES[s.mode](w, c, ab, n)
    return item + s.blocks * s.teams, n0 + s.steps


def body(s: Schedule, inputs: Inputs, out, stat_refs, smem: Scratch):
    thread = lax.axis_index("wg")
    team, wg = (thread, 0) if s.wgs == 1 else (0, thread)
    first = lax.axis_index("block") * s.teams + team
    ring = Ring(s.slots, smem.full, smem.free, team * s.slots, True, wg, s.wgs - 1)
    w = Worker(s, inputs, inputs.joint or out, stat_refs, smem, thread, team, wg, first, ring)

    # Fill the ring.
    load_a(w, first)

    @pl.when(thread == 0)
    def _():
        plgpu.copy_gmem_to_smem(inputs.order, smem.order, smem.order_full)

    plgpu.barrier_wait(smem.order_full)

    @pl.when(wg == s.wgs - 1)
    def _():
        pl.loop(0, s.slots)(functools.partial(load_square, w))

    # Walk over the team's chunks.
    more = lambda carry: carry[0] < s.items
    lax.while_loop(more, functools.partial(one_chunk, w), (first, jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("mode", "normalize", "packed", "sms"))
def chunk_outputs(
    a: Heads, b: Heads, x: Heads, chunk_states, vectors, along=None, like: Heads | None = None,
    joint=None, *, mode: Mode, normalize=True, packed=False, sms: int,
):  # fmt: skip
    """Computes one line of the table above: out, then by mode, in float32 of (B,H,N,L),

    forward  1 / N of each row; -sign(l), or 0 where l does not divide h
    dq       dh . h of each row
    dk       k . dk of each row: the part from the chunk; the part from the state

    vectors: name -> (B,H,N,L) float32, the names of OF_ROWS and OF_COLUMNS, and "start" if packed.
    along: (B,H,N,DX) float32, n or dn.
    like: q for dq (which reads it as Y), k for dk (too), v for dv.  The result is shaped like its
        array and stands where it stands; the array's other columns are undefined.
    joint: a reference to an array of that shape.  The result is then written there, not returned.
    """
    s = schedule(a, x, vectors["row"], mode=mode, normalize=normalize, packed=packed, sms=sms)
    given, place, out_type = prepared(s, a, x, vectors, along, like, joint)
    out, stats = mosaic.kernel(
        functools.partial(body, s),
        name="vlstm_forward" if mode == "forward" else f"vlstm_backward_{mode}",
        out_type=out_type,
        scratch_types=(scratch(s),),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=s.teams * s.wgs,
        thread_name="wg",
        # No sum crosses warps, and shared memory is full.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(
        Inputs(
            jnp.array(load_order(mode, s.parts, s.tiles), jnp.int32),
            a, b, x, chunk_states, like if s.transposes_state else None,
            None if joint is None else replace(place, array=joint), given,
        )
    )  # fmt: skip
    return stats if joint is not None else (out.array, *stats)
