"""The inter-chunk states of the mLSTM cell: a recurrence over the chunks of a head.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

The kernel writes S and s as they are before each chunk.  (X, Y) = (k, v) gives C and n; (q, dh),
backward in time, gives dC and dn.  Here are the call, its work and the form for Hopper; general.py
has the one for every GPU since Ampere.

The recurrence is serial.  If batch, heads and tiles would leave SMs idle, the chunks are split into
spans: a first walk starts all spans from zero at once and finds what each adds to the state;
`join_spans` carries the state over the spans; a second walk starts each span from that state.

On Hopper a block has an L x L tile of S, in registers; for L = 128 two warpgroups of 64 rows each:

    X: L positions x 64     --TMA->  x[2][warpgroup]  --weight *-->  scaled[warpgroup]
    Y: L positions x L      --TMA->  y[2]                                   |
    weight, vector          --TMA->  vectors[2]               acc <- decay acc + scaled^T Y
                                        ^     |                             |
          the last warpgroup loads      |     | full[2]                     v
          two chunks ahead              +-----+------- free[2] --- out[warpgroup] --TMA-> S
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.reference import narrow
from pallas_kernels.mosaic import ROW, ROWS, WGMMA
from pallas_kernels.pipeline import Ring

MIN_SPAN = 8  # chunks in a span; with fewer, two walks take longer than one
STAGES = 2  # chunks whose operands are in shared memory
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED  # layout of a transposed square


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Heads of one width, side by side in an array whose columns are cut into tiles of L.

    Other columns may stand beside them: q, k and v may be parts of the same array.
    """

    array: Any  # (B,T,tiles,L), or a reference to it
    tiles: int = field(metadata=dict(static=True))  # across a head
    first: int = field(metadata=dict(static=True))  # tile of the array

    @classmethod
    def of(cls, x: jax.Array, width: int, size: int, start: int = 0) -> Self:
        """Heads of `width` columns, from column `start` of x on, in tiles of `size` columns.

        x: (B,T,NH,D) or (B,T,P); it is not copied.
        """
        return cls(x.reshape(*x.shape[:2], -1, size), width // size, start // size)

    def tile(self, head, n):
        """The array's tile that is the n-th of a head."""
        return head * self.tiles + n + self.first

    def at(self, batch, rows, head, n):
        """A reference to some rows of the n-th tile of a head."""
        return self.array.at[batch, rows, self.tile(head, n)]


class Walk(NamedTuple):
    """The static arguments of a walk, and the split of its work."""

    dtype: Any
    length: int  # T
    heads: int
    chunks: int  # of a sequence
    size: int  # L
    x_tiles: int  # across X
    y_tiles: int  # across Y
    spans: int  # spans of the chunks
    walked: int  # spans of this walk
    span: int  # chunks in a span
    ends: int  # the last spans of this walk whose final states are stored
    keep: bool  # whether the states before the chunks are stored
    reverse: bool

    @property
    def wgs(self) -> int:
        """Warpgroups of a block: each has 64 rows of a tile."""
        return self.size // ROWS


class WalkInputs(NamedTuple):
    """Arrays or references to global memory; None if not given."""

    x: Heads
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


class Walker(NamedTuple):
    """A warpgroup of a block and its work."""

    schedule: Walk
    inputs: WalkInputs
    outputs: WalkOutputs
    smem: Any
    wg: Any
    ring: Any  # on Hopper a Ring
    b: Any
    h: Any
    span: Any
    x_tile: Any
    y_tile: Any
    start: Any  # chunk, in the order of the walk
    steps: Any  # chunks to walk
    mine: Any  # the warpgroup's rows of S, which are columns of X
    here: tuple  # the warpgroup's part of S

    @classmethod
    def of(cls, s: Walk, inputs, outputs, smem, wg=0, ring=None):
        """The work of a warpgroup of this block."""
        block, y_tile = mosaic.divide(lax.axis_index("block"), s.y_tiles)
        block, x_tile = mosaic.divide(block, s.x_tiles)
        pair, span = mosaic.divide(block, s.walked)
        b, h = mosaic.divide(pair, s.heads)
        start = span * s.span
        steps = jnp.minimum(s.span, s.chunks - start) if s.spans > 1 else s.chunks
        mine = pl.ds(x_tile * s.size + wg * ROWS, ROWS)
        here = mine, pl.ds(y_tile * s.size, s.size)
        work = b, h, span, x_tile, y_tile, start, steps, mine, here
        return cls(s, inputs, outputs, smem, wg, ring, *work)

    def chunk(self, n):
        """The chunk of the walk's step n."""
        s = self.schedule
        return s.chunks - 1 - self.start - n if s.reverse else self.start + n

    def first(self, of_sums):
        """(S, s) before the span; of_sums: the layout of s."""
        s, first = self.schedule, self.inputs.first
        if first is None:
            return mosaic.zeros((ROWS, s.size), WGMMA), mosaic.zeros((ROWS,), of_sums)
        at = self.b, self.h, self.span
        state = mosaic.load(first[0].at[*at, *self.here], WGMMA)
        return state, mosaic.load(first[1].at[*at, self.mine], of_sums)

    def decay(self, n):
        """The decay of step n, the last one's past it."""
        # A step loads the next decay: from global memory it takes as long as the matmul.
        n = jnp.minimum(n, self.steps - 1) if not isinstance(n, int) else n
        return self.inputs.decay[self.b, self.h, self.chunk(n)]

    def store_before(self, n, sums):
        """Stores s before the chunk of step n."""
        at = self.outputs.s_before.at[self.b, self.h, self.chunk(n), self.mine]
        pl.when(self.y_tile == 0)(lambda: mosaic.store(at, sums))

    def multiply_other(self, n, state, other):
        """Stores the sums of S * other before the chunk of step n; other: in shared memory."""
        other = plgpu.load(other, layout=WGMMA).astype(jnp.float32)
        at = self.b, self.h, self.chunk(n), self.y_tile, self.mine
        mosaic.store(self.outputs.dots.at[*at], jnp.sum(state * other, axis=1))

    def store_end(self, state, sums):
        """Stores the state after the last chunk."""
        s, outputs = self.schedule, self.outputs
        if not s.ends:
            return
        end = self.span - (s.walked - s.ends)
        at = self.b, self.h, end

        @pl.when(end >= 0)
        def _():
            mosaic.store(outputs.last.at[*at, *self.here], state)
            s_last = lambda: mosaic.store(outputs.s_last.at[*at, self.mine], sums)
            pl.when(self.y_tile == 0)(s_last)


class StatesForm(NamedTuple):
    """The kernel, in one of its forms."""

    prefix: str  # of its name
    scratch: Callable  # of a Walk, and whether there is an `other`
    body: Callable
    # Arrays as it wants them, and the types of its results.
    prepared: Callable = lambda s, inputs, out_types: (inputs, out_types)


def spans(blocks: int, chunks: int, at_once: int) -> int:
    """The number of spans; 1 unless splitting saves more than the first walk costs."""
    most = min(at_once // blocks, chunks // MIN_SPAN)
    return mosaic.cdiv(chunks, mosaic.cdiv(chunks, most)) if most > 2 else 1


@functools.partial(jax.jit, static_argnames=("form", "reverse", "last", "sms"))
def states(
    x: Heads, y: Heads, weight, vector, decay, first=None, other=None, *,
    form: StatesForm, reverse=False, last=True, sms: int,
):  # fmt: skip
    """Returns the states (S before, s before, (S, s) after the last chunk, dots).

    x: H heads of DX columns, y: of DY.  weight, vector: (B,H,N,L), decay: (B,H,N).
    first: initial (S, s), or None for zero.
    Before each chunk S is (B,H,N,DX,DY) in x's dtype, s (B,H,N,DX) float32.  The final states are
    float32, None if not `last`.
    other: shaped like the states before.  dots are then (B,H,N,tiles,DX) float32, and their sums
    over the last two axes are the inner products of the unrounded S with `other`; else None.
    reverse: walks from the last chunk to the first; "before" and "last" refer to that order.  These
        are gradients, which do not saturate in float16: loss scaling relies on infinities.
    """
    (batch, heads, chunks, size), dtype = weight.shape, x.array.dtype
    at_once = sms * (2 if size == ROWS else 1)  # blocks that fit by registers and shared memory
    parts = spans(batch * heads * x.tiles * y.tiles, chunks, at_once)

    def walk_along(first, other, keep: bool, ends: int) -> WalkOutputs:
        """Walks along all spans at once, or without `keep` along all but the last."""
        s = Walk(
            dtype, x.array.shape[1], heads, chunks, size, x.tiles, y.tiles, parts,
            walked=parts if keep else ends, span=mosaic.cdiv(chunks, parts), ends=ends,
            keep=keep, reverse=reverse,
        )  # fmt: skip
        return _kernel(s, WalkInputs(x, y, weight, vector, decay, first, other), form)

    if parts > 1:
        ends = walk_along(None, None, keep=False, ends=parts - 1)
        first = join_spans(decay, (ends.last, ends.s_last), first, parts, reverse)
    elif first is not None:
        first = tuple(z[:, :, None] for z in first)
    out = walk_along(first, other, keep=True, ends=int(last))
    end = (out.last[:, :, 0], out.s_last[:, :, 0]) if last else None
    return out.before, out.s_before, end, out.dots


def _kernel(s: Walk, inputs: WalkInputs, form: StatesForm) -> WalkOutputs:
    batch, with_other = inputs.decay.shape[0], inputs.other is not None
    shape = lambda dtype, *shape: jax.ShapeDtypeStruct((batch, s.heads, *shape), dtype)
    of_head, dx, dy = functools.partial(shape, jnp.float32), s.x_tiles * s.size, s.y_tiles * s.size
    out_types = WalkOutputs(
        before=shape(s.dtype, s.chunks, dx, dy) if s.keep else None,
        s_before=of_head(s.chunks, dx) if s.keep else None,
        last=of_head(s.ends, dx, dy) if s.ends else None,
        s_last=of_head(s.ends, dx) if s.ends else None,
        dots=of_head(s.chunks, s.y_tiles, dx) if with_other else None,
    )
    inputs, made = form.prepared(s, inputs, out_types)
    (out,) = mosaic.kernel(
        functools.partial(form.body, s),
        name=f"{form.prefix}vlstm_states",
        out_type=(made,),
        scratch_types=form.scratch(s, with_other),
        **mosaic.grid(block=batch * s.heads * s.walked * s.x_tiles * s.y_tiles),
        num_threads=s.wgs,
        # No sum crosses warps, and Hopper's shared memory is full.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(inputs)
    return out._replace(before=out.before.reshape(out_types.before.shape)) if s.keep else out


def join_spans(decay, ends, first, parts, reverse):
    """Returns (S, s) before each span, (B,H,spans,...): of span n, with `first` as number 0,

        sum over j <= n of (product of the decays of spans j to n - 1) (state j)

    ends: the states that all spans but the last reach from zero; they are states 1, 2, ...
    """
    *pairs, chunks = decay.shape
    span = mosaic.cdiv(chunks, parts)
    decay = decay[:, :, ::-1] if reverse else decay
    decay = decay[:, :, : (parts - 1) * span].reshape(*pairs, 1, 1, parts - 1, span)
    part = jnp.arange(parts)
    n, j, spanned = part[:, None, None], part[:, None], part[:-1]
    crossed = jnp.where((j <= spanned) & (spanned < n), jnp.prod(decay, -1), 1)
    weights = jnp.where(j[:, 0] <= n[:, 0], jnp.prod(crossed, -1), 0)  # (B,H,n,j)
    sums = functools.partial(jnp.einsum, "bhnj,bhj...->bhn...", precision="highest")
    joined = tuple(sums(weights[..., 1:], z) for z in ends)
    if first is None:
        return joined
    from_first = lambda x, z: x + sums(weights[..., :1], z[:, :, None])
    return tuple(map(from_first, joined, first))


# ---- Hopper ----------------------------------------------------------------------------------


def scratch(s: Walk, with_other: bool) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    buffer = functools.partial(mosaic.tiled, dtype=s.dtype)
    return dict(
        x=buffer(STAGES, s.wgs, s.size, ROWS),
        y=buffer(STAGES, s.size, s.size),
        vectors=plgpu.SMEM((STAGES, 2, s.size), jnp.float32),  # weight, vector
        scaled=buffer(s.wgs, s.size, ROWS),  # weight * X
        out=buffer(s.wgs, ROWS, s.size),
        full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs + 3),
        free=plgpu.Barrier(num_barriers=STAGES, num_arrivals=s.wgs),
        other=buffer(s.wgs, ROWS, s.size) if with_other else None,
        other_full=plgpu.Barrier(num_barriers=s.wgs) if with_other else None,
    )


def body(s: Walk, inputs: WalkInputs, outputs, /, **smem):
    smem, wg = SimpleNamespace(**smem), lax.axis_index("wg")
    # The last warpgroup loads what all read; each loads its own columns of X.
    ring = Ring(STAGES, smem.full, smem.free, wg=wg, loader=s.wgs - 1)
    w = Walker.of(s, inputs, outputs, smem, wg, ring)

    # Load the first chunks.
    pl.loop(0, STAGES)(functools.partial(_load_x, w))
    pl.when(w.wg == s.wgs - 1)(lambda: pl.loop(0, STAGES)(functools.partial(_load_common, w)))

    def along_chunks(acc):
        acc[...], sums = w.first(TRANSPOSED.reduce(1))
        if inputs.other is not None:
            _load_other(w, 0)
        step = functools.partial(_step, w, acc)
        _, sums = lax.fori_loop(0, w.steps, step, (w.decay(0), sums))
        return acc[...], sums

    # Walk along the span.
    w.store_end(*pl.run_scoped(along_chunks, plgpu.ACC((ROWS, s.size), jnp.float32)))
    plgpu.wait_smem_to_gmem(0)


# Load.


def _load_x(w: Walker, n):
    """Loads the warpgroup's own columns of step n's X."""
    size = w.schedule.size

    @pl.when(n < w.steps)
    def _():
        x = w.inputs.x.at(w.b, pl.ds(w.chunk(n) * size, size), w.h, w.x_tile)
        w.ring.send(n, x.at[:, pl.ds(w.wg * ROWS, ROWS)], w.smem.x, w.wg)


def _load_common(w: Walker, n):
    """Loads what all warpgroups read in step n; the last warpgroup calls it."""
    size, chunk = w.schedule.size, w.chunk(n)

    @pl.when(n < w.steps)
    def _():
        y = w.inputs.y.at(w.b, pl.ds(chunk * size, size), w.h, w.y_tile)
        w.ring.send(n, y, w.smem.y)
        for place, ref in enumerate((w.inputs.weight, w.inputs.vector)):
            w.ring.send(n, ref.at[w.b, w.h, chunk], w.smem.vectors, place)


def _load_other(w: Walker, n):
    source = w.inputs.other.at[w.b, w.h, w.chunk(n), *w.here]
    plgpu.copy_gmem_to_smem(source, w.smem.other.at[w.wg], w.smem.other_full.at[w.wg])


# Walk.


def _step(w: Walker, acc, n, carry):
    decay, sums = carry
    smem, stage = w.smem, w.ring.slot(n)
    ahead = w.decay(n + 1)
    # Store the state before the chunk.
    state = acc[...]
    if w.outputs.before is not None:
        _store_state(w, n, state, sums)
    if w.inputs.other is not None:
        plgpu.barrier_wait(smem.other_full.at[w.wg])
        w.multiply_other(n, state, smem.other.at[w.wg])
        plgpu.commit_smem()
        pl.when(n + 1 < w.steps)(lambda: _load_other(w, n + 1))
    # Decay the state.
    acc[...] = state * decay
    pl.when(n > 0)(lambda: w.ring.refill(n - 1, functools.partial(_load_common, w)))
    # Load X and scale it.
    w.ring.wait(n)
    weight = mosaic.read(smem.vectors.at[stage, 0], ROW)
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


def _store_state(w: Walker, n, state, sums):
    out = w.smem.out
    plgpu.wait_smem_to_gmem(0)  # the copy of the state before must have read the buffer
    out[w.wg] = narrow(state, w.schedule.dtype, not w.schedule.reverse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out.at[w.wg], w.outputs.before.at[w.b, w.h, w.chunk(n), *w.here])
    w.store_before(n, sums)


def _sum_columns(w: Walker, stage):
    # Read X again, transposed: a column's sum is then in 4 lanes and not in all warps.
    square = w.smem.x.at[stage, w.wg].transpose((1, 0))
    x = plgpu.load(square, layout=TRANSPOSED).astype(jnp.float32)
    vector = mosaic.read(w.smem.vectors.at[stage, 1], TRANSPOSED.reduce(0))
    return jnp.sum(x * mosaic.along(vector, x.shape, 1), axis=1)


HOPPER = StatesForm("", scratch, body)
