"""The inter-chunk states of the mLSTM cell on Hopper: a recurrence over the chunks of a head.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

The kernel writes S and s as they are before each chunk.  (X, Y) = (k, v) gives C and n; (q, dh),
backward in time, gives dC and dn.

    a block: an L x L tile of S, in registers; for L = 128 two warpgroups of 64 rows each

        X: L positions x 64     --TMA->  x[2][warpgroup]  --weight *-->  scaled[warpgroup]
        Y: L positions x L      --TMA->  y[2]                                   |
        weight, vector          --TMA->  vectors[2]               acc <- decay acc + scaled^T Y
                                            ^     |                             |
              the last warpgroup loads      |     | full[2]                     v
              two chunks ahead              +-----+------- free[2] --- out[warpgroup] --TMA-> S

The recurrence is serial.  If batch, heads and tiles would leave SMs idle, the chunks are split into
spans: a first walk starts all spans from zero at once and finds what each adds to the state;
`join_spans` carries the state over the spans; a second walk starts each span from that state.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mlstm.join_spans import join_spans
from pallas_kernels.mosaic import ROW, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # layout of a transposed square
MIN_SPAN = 8  # chunks in a span; with fewer, three kernels take longer than one
STAGES = 2  # chunks whose operands are in shared memory


class Walk(NamedTuple):
    """The static arguments of a walk, of either form, and the split of its work."""

    dtype: Any
    length: int  # T
    heads: int
    chunks: int  # of a sequence
    size: int  # L
    wgs: int  # warpgroups of a block
    x_tiles: int  # across X
    y_tiles: int  # across Y
    spans: int  # spans of the chunks
    walked: int  # spans of this walk
    span: int  # chunks in a span
    ends: int  # the last spans of this walk whose final states are stored
    reverse: bool
    saturate: bool

    @property
    def tiles(self) -> int:
        """Tiles of a state."""
        return self.x_tiles * self.y_tiles


class WalkInputs(NamedTuple):
    """References to global memory; None if not given."""

    x: Heads  # in tiles of 64 columns
    y: Heads
    weight: Any
    vector: Any
    decay: Any
    first: tuple | None  # (S, s) before each span
    other: Any


class WalkOutputs(NamedTuple):
    """References to global memory; None if not requested."""

    before: Any  # S before each chunk
    s_before: Any
    last: Any  # S after the last spans
    s_last: Any
    dots: Any  # sums of S * other


class WalkScratch(NamedTuple):
    """Shared memory and barriers of a block (see the picture)."""

    x: Any  # (stages,wgs,L,64)
    y: Any  # (stages,L,L)
    vectors: Any  # (stages,2,L): weight, vector
    scaled: Any  # (wgs,L,64): weight * X
    out: Any  # (wgs,64,L)
    full: Any  # for each stage
    free: Any  # for each stage
    other: Any  # (wgs,64,L), None without `other`
    other_full: Any  # for each warpgroup


class Walker(NamedTuple):
    """A warpgroup of a block and its work."""

    schedule: Walk
    inputs: WalkInputs
    outputs: WalkOutputs
    smem: WalkScratch
    wg: Any
    b: Any
    h: Any
    span: Any
    x_tile: Any
    y_tile: Any
    start: Any  # chunk, in the order of the walk
    steps: Any  # chunks to walk
    mine: Any  # the warpgroup's rows of S
    here: tuple  # the warpgroup's part of S
    ring: Ring  # the last warpgroup loads what all read; each loads its own columns of X


def saturated(x, dtype):
    """x inside of what dtype can hold, if that is float16."""
    return jnp.clip(x, -65504.0, 65504.0) if dtype == jnp.float16 else x


def narrow(x, dtype, saturate=True):
    """x in dtype; float16 saturates if `saturate`."""
    return (saturated(x, dtype) if saturate else x).astype(dtype)


def spans(blocks: int, chunks: int, at_once: int) -> int:
    """The number of spans; 1 unless splitting saves more than the first walk costs."""
    most = min(at_once // blocks, chunks // MIN_SPAN)
    return mosaic.cdiv(chunks, mosaic.cdiv(chunks, most)) if most > 2 else 1


@functools.partial(jax.jit, static_argnames=("reverse", "saturate", "last", "sms"))
def states(
    x: Heads, y: Heads, weight, vector, decay, first=None, other=None, *,
    reverse=False, saturate=True, last=True, sms: int,
):  # fmt: skip
    """Returns the states (S before, s before, (S, s) after the last chunk, dots).

    x: H heads of DX columns, y: of DY.  weight, vector: (B,H,N,L), decay: (B,H,N).
    first: initial (S, s), or None for zero.
    Before each chunk S is (B,H,N,DX,DY) in x's dtype, s (B,H,N,DX) float32.  The final states are
    float32, None if not `last`.
    other: shaped like the states before.  dots are then (B,H,N,tiles,DX) float32, and their sums
    over the last two axes are the inner products of the unrounded S with `other`; else None.
    reverse: walks from the last chunk to the first; "before" and "last" refer to that order.
    """
    size, blocks = weight.shape[-1], math.prod(decay.shape[:2]) * x.tiles * y.tiles
    at_once = sms * (2 if size == ROWS else 1)  # blocks that fit by registers and shared memory
    parts = spans(blocks, decay.shape[-1], at_once)
    walk = functools.partial(
        _walk, x, y, weight, vector, decay, parts=parts, reverse=reverse, saturate=saturate
    )
    return in_spans(walk, decay, first, other, parts=parts, reverse=reverse, last=last)


def in_spans(walk, decay, first, other, *, parts: int, reverse: bool, last: bool):
    """Returns `states` from walks along `parts` spans."""
    if parts > 1:
        ends = walk(None, None, keep=False, ends=parts - 1)
        first = join_spans(decay, (ends.last, ends.s_last), first, parts, reverse)
    elif first is not None:
        first = tuple(z[:, :, None] for z in first)
    out = walk(first, other, keep=True, ends=int(last))
    end = (out.last[:, :, 0], out.s_last[:, :, 0]) if last else None
    return out.before, out.s_before, end, out.dots


def _walk(x, y, weight, vector, decay, first, other, *, parts, reverse, saturate, keep, ends):
    """Walks along all spans at once, or without `keep` along all but the last."""
    batch, heads, chunks, size = weight.shape
    s = walk_of(x, y, decay, size, parts, keep, ends, reverse, saturate)

    def vlstm_states(*refs):
        _body(s, *refs)

    square = (batch, heads, chunks, x.tiles * size, y.tiles * size)
    (out,) = mosaic.kernel(
        vlstm_states,
        out_type=(out_types(s, batch, square, keep, other is not None),),
        scratch_types=(_scratch(s, other is not None),),
        grid=(batch * heads * s.walked * s.tiles,),
        grid_names=("block",),
        num_threads=s.wgs,
        thread_name="wg",
        # No sum crosses warps, and shared memory is full.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(WalkInputs(x.cut(s.wgs), y, weight, vector, decay, first, other))
    return out


def walk_of(x: Heads, y: Heads, decay, size, parts, keep, ends, reverse, saturate) -> Walk:
    """The Walk along all `parts` spans, or without `keep` along `ends` of them."""
    (_, heads, chunks), (_, length, *_), dtype = decay.shape, x.array.shape, x.array.dtype
    return Walk(
        dtype, length, heads, chunks, size, size // ROWS, x.tiles, y.tiles, parts,
        walked=parts if keep else ends, span=mosaic.cdiv(chunks, parts), ends=ends,
        reverse=reverse, saturate=saturate,
    )  # fmt: skip


def out_types(s: Walk, batch: int, before: tuple, keep: bool, with_other: bool) -> WalkOutputs:
    """The arrays of a walk; before: shape of all S before a chunk."""
    of_head = lambda *shape: jax.ShapeDtypeStruct((batch, s.heads, *shape), jnp.float32)
    dx, dy = s.x_tiles * s.size, s.y_tiles * s.size
    return WalkOutputs(
        before=jax.ShapeDtypeStruct(before, s.dtype) if keep else None,
        s_before=of_head(s.chunks, dx) if keep else None,
        last=of_head(s.ends, dx, dy) if s.ends else None,
        s_last=of_head(s.ends, dx) if s.ends else None,
        dots=of_head(s.chunks, s.y_tiles, dx) if with_other else None,
    )


def _scratch(s: Walk, with_other: bool) -> WalkScratch:
    buffer = lambda *shape: plgpu.SMEM(
        shape, s.dtype, transforms=mosaic.wgmma_tiles(shape[-1], s.dtype)
    )
    return WalkScratch(
        x=buffer(STAGES, s.wgs, s.size, ROWS),
        y=buffer(STAGES, s.size, s.size),
        vectors=plgpu.SMEM((STAGES, 2, s.size), jnp.float32),
        scaled=buffer(s.wgs, s.size, ROWS),
        out=buffer(s.wgs, ROWS, s.size),
        full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs + 3),
        free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs),
        other=buffer(s.wgs, ROWS, s.size) if with_other else None,
        other_full=plgpu.Barrier(num_barriers=s.wgs) if with_other else None,
    )


def _worker(s: Walk, inputs: WalkInputs, outputs: WalkOutputs, smem: WalkScratch) -> Walker:
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    pair, span, tile = block // s.tiles // s.walked, block // s.tiles % s.walked, block % s.tiles
    b, h = pair // s.heads, pair % s.heads
    x_tile, y_tile = tile // s.y_tiles, tile % s.y_tiles
    start = span * s.span
    steps = jnp.minimum(s.span, s.chunks - start) if s.spans > 1 else s.chunks
    mine = pl.ds(x_tile * s.size + wg * ROWS, ROWS)
    here = mine, pl.ds(y_tile * s.size, s.size)
    ring = Ring(STAGES, smem.full, smem.free, wg=wg, loader=s.wgs - 1)
    return Walker(
        s, inputs, outputs, smem, wg, b, h, span, x_tile, y_tile, start, steps, mine, here, ring
    )  # fmt: skip


def _body(s: Walk, inputs: WalkInputs, outputs: WalkOutputs, smem: WalkScratch):
    w = _worker(s, inputs, outputs, smem)

    # Load the first chunks.
    pl.loop(0, STAGES)(functools.partial(_load_x, w))
    pl.when(w.wg == s.wgs - 1)(lambda: pl.loop(0, STAGES)(functools.partial(_load_common, w)))

    # Walk along the span.
    acc = plgpu.ACC((ROWS, s.size), jnp.float32)
    sums, state = pl.run_scoped(functools.partial(_along_chunks, w), acc)

    store_end(w, state, sums)
    plgpu.wait_smem_to_gmem(0)


def store_end(w, state, sums):
    """Stores the state after the last chunk; w: the worker of either form."""
    s, outputs = w.schedule, w.outputs
    if s.ends:
        end = w.span - (s.walked - s.ends)

        @pl.when(end >= 0)
        def _():
            mosaic.store(outputs.last.at[w.b, w.h, end, *w.here], state)
            s_last = outputs.s_last
            pl.when(w.y_tile == 0)(lambda: mosaic.store(s_last.at[w.b, w.h, end, w.mine], sums))


def _chunk_of(w: Walker, n):
    """The chunk of the walk's step n."""
    s = w.schedule
    return s.chunks - 1 - w.start - n if s.reverse else w.start + n


# Load.


def _load_x(w: Walker, n):
    """Loads the warpgroup's own columns of step n's X."""
    size = w.schedule.size

    @pl.when(n < w.steps)
    def _():
        rows, part = pl.ds(_chunk_of(w, n) * size, size), w.x_tile * w.schedule.wgs + w.wg
        w.ring.send(n, w.inputs.x.at(w.b, rows, w.h, part), w.smem.x, w.wg)


def _load_common(w: Walker, n):
    """Loads what all warpgroups read in step n; the last warpgroup calls it."""
    size, chunk = w.schedule.size, _chunk_of(w, n)

    @pl.when(n < w.steps)
    def _():
        y = w.inputs.y.at(w.b, pl.ds(chunk * size, size), w.h, w.y_tile)
        w.ring.send(n, y, w.smem.y)
        for place, ref in enumerate((w.inputs.weight, w.inputs.vector)):
            w.ring.send(n, ref.at[w.b, w.h, chunk], w.smem.vectors, place)


def _load_other(w: Walker, n):
    source = w.inputs.other.at[w.b, w.h, _chunk_of(w, n), *w.here]
    plgpu.copy_gmem_to_smem(source, w.smem.other.at[w.wg], w.smem.other_full.at[w.wg])


# Walk.


def _along_chunks(w: Walker, acc):
    """Walks along the span's chunks; returns the final (s, S)."""
    s, inputs = w.schedule, w.inputs
    acc[...] = mosaic.zeros((ROWS, s.size), WGMMA)
    sums = mosaic.zeros((ROWS,), TRANSPOSED.reduce(1))
    if inputs.first is not None:
        load = functools.partial(plgpu.load, optimized=False)
        acc[...] = load(inputs.first[0].at[w.b, w.h, w.span, *w.here], layout=WGMMA)
        sums = load(inputs.first[1].at[w.b, w.h, w.span, w.mine], layout=TRANSPOSED.reduce(1))
    if inputs.other is not None:
        _load_other(w, 0)
    carry = inputs.decay[w.b, w.h, _chunk_of(w, 0)], sums
    _, sums = lax.fori_loop(0, w.steps, functools.partial(_step, w, acc), carry)
    return sums, acc[...]


def _step(w: Walker, acc, n, carry):
    decay, sums = carry
    smem, chunk, stage = w.smem, _chunk_of(w, n), w.ring.slot(n)
    # Load the next decay now: from global memory it takes as long as the matmul.
    ahead = w.inputs.decay[w.b, w.h, _chunk_of(w, jnp.minimum(n + 1, w.steps - 1))]
    # Store the state before the chunk.
    state = acc[...]
    if w.outputs.before is not None:
        _store_state(w, chunk, state, sums)
    if w.inputs.other is not None:
        _multiply_other(w, n, state)
    # Decay the state.
    acc[...] = state * decay
    pl.when(n > 0)(lambda: w.ring.refill(n - 1, functools.partial(_load_common, w)))
    # Load X and scale it.
    w.ring.wait(n)
    weight = plgpu.load(smem.vectors.at[stage, 0], layout=ROW, optimized=False)
    x = plgpu.load(smem.x.at[stage, w.wg], layout=WGMMA).astype(jnp.float32)
    smem.scaled[w.wg] = (x * mosaic.along(weight, x.shape, 0)).astype(w.schedule.dtype)
    plgpu.commit_smem()
    # Accumulate.
    plgpu.wgmma(acc, smem.scaled.at[w.wg].transpose((1, 0)), smem.y.at[stage])
    sums = lax.cond(w.y_tile == 0, lambda: sums * decay + _sum_columns(w, stage), lambda: sums)
    plgpu.commit_smem()  # waits until all four warps have read x and its vectors
    _load_x(w, n + STAGES)
    plgpu.wgmma_wait(0)
    w.ring.release(n)
    return ahead, sums


def _store_state(w: Walker, chunk, state, sums):
    out = w.smem.out
    plgpu.wait_smem_to_gmem(0)  # the copy of the state before must have read the buffer
    out[w.wg] = narrow(state, w.schedule.dtype, w.schedule.saturate)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[w.wg], w.outputs.before.at[w.b, w.h, chunk, *w.here])

    @pl.when(w.y_tile == 0)
    def _():
        mosaic.store(w.outputs.s_before.at[w.b, w.h, chunk, w.mine], sums)


def _multiply_other(w: Walker, n, state):
    plgpu.barrier_wait(w.smem.other_full.at[w.wg])
    other = plgpu.load(w.smem.other.at[w.wg], layout=WGMMA).astype(jnp.float32)
    dot = jnp.sum(state * other, axis=1)
    mosaic.store(w.outputs.dots.at[w.b, w.h, _chunk_of(w, n), w.y_tile, w.mine], dot)
    plgpu.commit_smem()
    pl.when(n + 1 < w.steps)(lambda: _load_other(w, n + 1))


def _sum_columns(w: Walker, stage):
    # Read X again, transposed: a column's sum is then in 4 lanes and not in all warps.
    square = w.smem.x.at[stage, w.wg].transpose((1, 0))
    x = plgpu.load(square, layout=TRANSPOSED).astype(jnp.float32)
    vector = plgpu.load(w.smem.vectors.at[stage, 1], layout=TRANSPOSED.reduce(0), optimized=False)
    return jnp.sum(x * mosaic.along(vector, x.shape, 1), axis=1)
