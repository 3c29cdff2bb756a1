"""The inter-chunk states of the mLSTM cell: a recurrence over the chunks of a head.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

The kernel writes S and s as they are before each chunk.  (X, Y) = (k, v) gives C and n; (q, dh),
backward in time, gives dC and dn.  Here are the call, its work and what both forms share;
inter_chunk.py has the form for Hopper, general_states.py the one for every GPU since Ampere.

The recurrence is serial.  If batch, heads and tiles would leave SMs idle, the chunks are split into
spans: a first walk starts all spans from zero at once and finds what each adds to the state;
`join_spans` carries the state over the spans; a second walk starts each span from that state.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mosaic import ROWS, WGMMA

MIN_SPAN = 8  # chunks in a span; with fewer, two walks take longer than one
STAGES = 2  # chunks whose operands are in shared memory


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


def spans(blocks: int, chunks: int, at_once: int) -> int:
    """The number of spans; 1 unless splitting saves more than the first walk costs."""
    most = min(at_once // blocks, chunks // MIN_SPAN)
    return mosaic.cdiv(chunks, mosaic.cdiv(chunks, most)) if most > 2 else 1


@functools.partial(jax.jit, static_argnames=("form", "reverse", "last", "sms"))
def states(
    x: Heads, y: Heads, weight, vector, decay, first=None, other=None, *,
    form: ModuleType, reverse=False, last=True, sms: int,
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


def _kernel(s: Walk, inputs: WalkInputs, form: ModuleType) -> WalkOutputs:
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
        name=f"{form.PREFIX}vlstm_states",
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
    n, j, spanned = (
        jnp.arange(parts)[:, None, None],
        jnp.arange(parts)[:, None],
        jnp.arange(parts - 1),
    )
    crossed = jnp.where((j <= spanned) & (spanned < n), jnp.prod(decay, -1), 1)
    weights = jnp.where(j[:, 0] <= n[:, 0], jnp.prod(crossed, -1), 0)  # (B,H,n,j)
    sums = functools.partial(jnp.einsum, "bhnj,bhj...->bhn...", precision="highest")
    joined = tuple(sums(weights[..., 1:], z) for z in ends)
    if first is None:
        return joined
    return tuple(
        x + sums(weights[..., :1], z[:, :, None]) for x, z in zip(joined, first, strict=True)
    )
