"""The inter-chunk states of the mLSTM cell: a recurrence over the chunks of a head.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

The kernel writes S and s as they are before each chunk.  (X, Y) = (k, v) gives C and n; (q, dh),
backward in time, gives dC and dn.

The recurrence is serial.  If batch, heads and tiles would leave SMs idle, the chunks are split into
spans: a first walk starts all spans from zero at once and finds what each adds to the state;
`join_spans` carries the state over the spans; a second walk starts each span from that state.

A block is one warpgroup, with a 64 x 64 tile of S in registers.  It runs on every NVIDIA GPU since
Ampere, by the copies and matmuls of ampere.py:

    X, Y: 64 positions x 64   --cp.async->  x[2], y[2]
    weight, vector            --cp.async->  weight[2], vector[2]     acc <- decay acc + X^T Y
    other                     --cp.async->  other[2]                  |
                                                                     out --> S before the chunk

    step n:  wait for chunk n     chunk n + 1 on its way     store S, multiply

X is read transposed (ldmatrix can), and scaled in the registers where mma wants its left operand.
"""

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.mlstm.reference import narrow
from pallas_kernels.mosaic import COL, ROW, WGMMA, along

SIZE = 64  # positions of a chunk, and edge of all tiles
MIN_SPAN = 8  # chunks in a span; with fewer, two walks take longer than one
STAGES = 2  # chunks whose operands are in shared memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Heads of one width, side by side in an array whose columns are cut into tiles of 64.

    Other columns may stand beside them: q, k and v may be parts of the same array.
    """

    array: Any  # (B,T,tiles,64), or a reference to it
    tiles: int = field(metadata=dict(static=True))  # across a head
    first: int = field(metadata=dict(static=True))  # the array's tile where the first head begins

    @classmethod
    def of(cls, x: jax.Array, width: int, start: int = 0) -> Self:
        """Heads of `width` columns, from column `start` of x on.

        x: (B,T,NH,D) or (B,T,P); it is not copied.
        """
        return cls(x.reshape(*x.shape[:2], -1, SIZE), width // SIZE, start // SIZE)

    def tile(self, head, n):
        """The array's tile that is the n-th of a head."""
        return head * self.tiles + n + self.first


class Walk(NamedTuple):
    """The static arguments of a walk, and the split of its work."""

    dtype: Any
    length: int  # T
    heads: int
    chunks: int  # per sequence
    x_tiles: int  # across X
    y_tiles: int  # across Y
    spans: int  # spans of the chunks
    walked: int  # spans of this walk
    span: int  # chunks in a span
    ends: int  # the last spans of this walk whose final states are stored
    keep: bool  # whether the states before the chunks are stored
    reverse: bool


class WalkOutputs(NamedTuple):
    """References to global memory; None if not requested."""

    before: Any  # S before each chunk
    s_before: Any
    last: Any  # S after the last spans
    s_last: Any
    dots: Any  # sums of S * other


class Walker(NamedTuple):
    """A block and its work."""

    schedule: Walk
    inputs: Any  # references to global memory, by name; None if not given
    outputs: WalkOutputs
    smem: Any
    b: Any
    h: Any
    x_tile: Any
    y_tile: Any
    start: Any  # chunk, in the order of the walk
    steps: Any  # chunks to walk
    mine: Any  # the block's rows of S, which are columns of X

    def chunk(self, n):
        """The chunk of the walk's step n."""
        s = self.schedule
        return s.chunks - 1 - self.start - n if s.reverse else self.start + n

    def item(self, n):
        """The number of step n's chunk among the chunks of all sequences and heads."""
        s = self.schedule
        return (self.b * s.heads + self.h) * s.chunks + self.chunk(n)

    def decay(self, n):
        """The decay of step n; past the last step, the decay of the last one."""
        # A step loads the next one's decay: a load from global memory takes as long as the matmul.
        n = jnp.minimum(n, self.steps - 1) if not isinstance(n, int) else n
        return self.inputs.decay[self.b, self.h, self.chunk(n)]


def spans(blocks: int, chunks: int, at_once: int) -> int:
    """The number of spans; 1 unless splitting saves more than the first walk costs."""
    most = min(at_once // blocks, chunks // MIN_SPAN)
    return mosaic.cdiv(chunks, mosaic.cdiv(chunks, most)) if most > 2 else 1


@jax.jit(static_argnames=("reverse", "last"))
def states(
    x: Heads, y: Heads, weight, vector, decay, first=None, other=None, *, reverse=False, last=True
):  # fmt: skip
    """Returns the states (S before, s before, (S, s) after the last chunk, dots).

    x: H heads of DX columns, y: of DY.  weight, vector: (B,H,N,64), decay: (B,H,N).
    first: initial (S, s), or None for zero.
    Before each chunk S is (B,H,N,DX,DY) in x's dtype, s (B,H,N,DX) float32.  The final states are
    float32, None if not `last`.
    other: shaped like the states before.  dots are then (B,H,N,tiles,DX) float32, and their sums
    over the last two axes are the inner products of the unrounded S with `other`; else None.
    reverse: walks from the last chunk to the first; "before" and "last" refer to that order.  The
        states are then gradients and do not saturate in float16: loss scaling needs infinities.
    """
    (batch, heads, chunks, _), dtype = weight.shape, x.array.dtype
    # Two blocks fit an SM, by registers and shared memory.
    parts = spans(batch * heads * x.tiles * y.tiles, chunks, 2 * mosaic.sm_count())

    def walk_along(first, other, keep: bool, ends: int) -> WalkOutputs:
        """Walks along all spans at once, or without `keep` along all but the last."""
        s = Walk(
            dtype, x.array.shape[1], heads, chunks, x.tiles, y.tiles, parts,
            walked=parts if keep else ends, span=mosaic.cdiv(chunks, parts), ends=ends,
            keep=keep, reverse=reverse,
        )  # fmt: skip
        return _kernel(s, x, y, weight, vector, decay, first, other)

    if parts > 1:
        ends = walk_along(None, None, keep=False, ends=parts - 1)
        first = join_spans(decay, (ends.last, ends.s_last), first, parts, reverse)
    elif first is not None:
        first = tuple(z[:, :, None] for z in first)
    out = walk_along(first, other, keep=True, ends=int(last))
    end = (out.last[:, :, 0], out.s_last[:, :, 0]) if last else None
    return out.before, out.s_before, end, out.dots


def _kernel(s: Walk, x: Heads, y: Heads, weight, vector, decay, first, other) -> WalkOutputs:
    """first: (S, s) before each span."""
    batch, with_other = decay.shape[0], other is not None
    shape = lambda *shape: jax.ShapeDtypeStruct((batch, s.heads, *shape), jnp.float32)
    dx, dy = s.x_tiles * SIZE, s.y_tiles * SIZE
    squares = (batch * s.heads * s.chunks, dx, s.y_tiles, SIZE)  # a tile's rows are copied as X's
    types = WalkOutputs(
        before=jax.ShapeDtypeStruct(squares, s.dtype) if s.keep else None,
        s_before=shape(s.chunks, dx) if s.keep else None,
        last=shape(s.ends, dx, dy) if s.ends else None,
        s_last=shape(s.ends, dx) if s.ends else None,
        dots=shape(s.chunks, s.y_tiles, dx) if with_other else None,
    )
    flat = lambda z: z.reshape(batch, s.heads, -1)
    other = other.reshape(squares) if with_other else None
    (out,) = mosaic.kernel(
        functools.partial(_walk, s),
        name="vlstm_states",
        out_type=(types,),
        scratch_types=scratch(s, with_other),
        **mosaic.grid(block=batch * s.heads * s.walked * s.x_tiles * s.y_tiles),
        num_threads=1,
        # No sum crosses warps.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(x, y, flat(weight), flat(vector), decay, first, other)
    before = (batch, s.heads, s.chunks, dx, dy)
    return out._replace(before=out.before.reshape(before)) if s.keep else out


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


# ---- the kernel ------------------------------------------------------------------------------


def scratch(s: Walk, with_other: bool) -> dict:
    """Shared memory of a block, see the picture."""
    tiles = mosaic.tiled(STAGES, SIZE, SIZE, dtype=s.dtype)
    buffers = dict(x=tiles, y=tiles, other=tiles if with_other else None)
    lines = dict.fromkeys(("weight", "vector"), plgpu.SMEM((STAGES, SIZE), jnp.float32))
    return buffers | lines | dict(out=mosaic.tiled(SIZE, SIZE, dtype=s.dtype))


def _walk(s: Walk, x, y, weight, vector, decay, first, other, outputs, /, **smem):
    inputs = SimpleNamespace(x=x, y=y, weight=weight, vector=vector, decay=decay, other=other)
    block, y_tile = mosaic.divide(lax.axis_index("block"), s.y_tiles)
    block, x_tile = mosaic.divide(block, s.x_tiles)
    pair, span = mosaic.divide(block, s.walked)
    start = span * s.span
    steps = jnp.minimum(s.span, s.chunks - start) if s.spans > 1 else s.chunks
    mine = pl.ds(x_tile * SIZE, SIZE)
    here = mine, pl.ds(y_tile * SIZE, SIZE)  # the block's part of S
    b, h = mosaic.divide(pair, s.heads)
    refs = inputs, outputs, SimpleNamespace(**smem)
    w = Walker(s, *refs, b, h, x_tile, y_tile, start, steps, mine)
    _load_chunk(w, 0)
    decay, state, sums = w.decay(0), mosaic.zeros((SIZE, SIZE), WGMMA), mosaic.zeros((SIZE,), ROW)
    if first is not None:
        state = mosaic.load(first[0].at[b, h, span, *here], WGMMA)
        sums = mosaic.load(first[1].at[b, h, span, mine], ROW)
    _, state, sums = lax.fori_loop(0, steps, functools.partial(_step, w), (decay, state, sums))
    if not s.ends:
        return
    # Store the state after the last chunk.
    end = span - (s.walked - s.ends)

    @pl.when(end >= 0)
    def _():
        mosaic.store(outputs.last.at[b, h, end, *here], state)
        pl.when(y_tile == 0)(lambda: mosaic.store(outputs.s_last.at[b, h, end, mine], sums))


def _load_chunk(w: Walker, n):
    """Starts to copy the operands of step n."""
    s, inputs, smem, stage = w.schedule, w.inputs, w.smem, lax.rem(n, STAGES)
    first = w.chunk(n) * SIZE
    for source, target in ((inputs.weight, smem.weight), (inputs.vector, smem.vector)):
        ampere.load_line(source, target.at[stage], w.b, w.h, first)
    for heads, tile, target in ((inputs.x, w.x_tile, smem.x), (inputs.y, w.y_tile, smem.y)):
        there = heads.tile(w.h, tile)
        ampere.load_rows(heads.array, target.at[stage], w.b, there, first, s.length)
    if inputs.other is not None:
        row, end = w.x_tile * SIZE, s.x_tiles * SIZE
        ampere.load_rows(inputs.other, smem.other.at[stage], w.item(n), w.y_tile, row, end)


def _step(w: Walker, n, carry):
    decay, state, sums = carry
    s, smem, stage = w.schedule, w.smem, lax.rem(n, STAGES)
    ahead = w.decay(n + 1)
    ampere.wait()
    pl.when(n + 1 < w.steps)(lambda: _load_chunk(w, n + 1))
    # Store the state before the chunk, and its products with `other`.
    if w.outputs.before is not None:
        smem.out[...] = narrow(state, s.dtype, not s.reverse)
        ampere.meet()
        row, end = w.x_tile * SIZE, s.x_tiles * SIZE
        ampere.store_rows(smem.out, w.outputs.before, w.item(n), w.y_tile, row, end)
        at = w.outputs.s_before.at[w.b, w.h, w.chunk(n), w.mine]
        pl.when(w.y_tile == 0)(lambda: mosaic.store(at, sums))
    if w.inputs.other is not None:
        other = plgpu.load(smem.other.at[stage], layout=WGMMA).astype(jnp.float32)
        at = w.b, w.h, w.chunk(n), w.y_tile, w.mine
        mosaic.store(w.outputs.dots.at[*at], jnp.sum(state * other, axis=1))
    # Decay the state and add X^T Y.
    x = plgpu.load(smem.x.at[stage].transpose((1, 0)), layout=WGMMA).astype(jnp.float32)
    across = lambda ref: along(mosaic.load(ref.at[stage], COL), x.shape, 1)
    state = ampere.times_rows(state * decay, x * across(smem.weight), smem.y.at[stage])
    add = lambda: sums * decay + jnp.sum(x * across(smem.vector), axis=1)
    return ahead, state, lax.cond(w.y_tile == 0, add, lambda: sums)
