"""What both forms of the inter-chunk kernel share: the walk along a head's chunks, and its spans.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

The recurrence is serial.  If batch, heads and tiles would leave SMs idle, the chunks are split into
spans: a first walk starts all spans from zero at once and finds what each adds to the state;
`join_spans` carries the state over the spans; a second walk starts each span from that state:

    S before span n + 1 = (product of span n's decays) (S before span n) + what span n adds
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.heads import Heads
from pallas_kernels.mosaic import COL, ROWS

MIN_SPAN = 8  # chunks in a span; with fewer, three kernels take longer than one
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
    saturate: bool

    @property
    def wgs(self) -> int:
        """Warpgroups of a block: each has 64 rows of a tile."""
        return self.size // ROWS

    @property
    def tiles(self) -> int:
        """Tiles of a state."""
        return self.x_tiles * self.y_tiles


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
    b: Any
    h: Any
    span: Any
    x_tile: Any
    y_tile: Any
    start: Any  # chunk, in the order of the walk
    steps: Any  # chunks to walk
    mine: Any  # the warpgroup's rows of S, which are columns of X
    here: tuple  # the warpgroup's part of S
    ring: Any  # on Hopper a Ring

    def chunk(self, n):
        """The chunk of the walk's step n."""
        s = self.schedule
        return s.chunks - 1 - self.start - n if s.reverse else self.start + n

    def store_before(self, n, sums):
        """Stores s before the chunk of step n."""
        at = self.outputs.s_before.at[self.b, self.h, self.chunk(n), self.mine]
        pl.when(self.y_tile == 0)(lambda: mosaic.store(at, sums))

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


def walker(s: Walk, inputs, outputs, smem, wg=0, ring=None) -> Walker:
    """The work of a warpgroup of this block."""
    block, y_tile = mosaic.divide(lax.axis_index("block"), s.y_tiles)
    block, x_tile = mosaic.divide(block, s.x_tiles)
    pair, span = mosaic.divide(block, s.walked)
    b, h = mosaic.divide(pair, s.heads)
    start = span * s.span
    steps = jnp.minimum(s.span, s.chunks - start) if s.spans > 1 else s.chunks
    mine = pl.ds(x_tile * s.size + wg * ROWS, ROWS)
    here = mine, pl.ds(y_tile * s.size, s.size)
    return Walker(
        s, inputs, outputs, smem, wg, b, h, span, x_tile, y_tile, start, steps, mine, here, ring
    )  # fmt: skip


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


@functools.partial(jax.jit, static_argnames=("walk", "reverse", "saturate", "last", "sms"))
def states(
    x: Heads, y: Heads, weight, vector, decay, first=None, other=None, *,
    walk: Callable, reverse=False, saturate=True, last=True, sms: int,
):  # fmt: skip
    """Returns the states (S before, s before, (S, s) after the last chunk, dots).

    x: H heads of DX columns, y: of DY.  weight, vector: (B,H,N,L), decay: (B,H,N).
    first: initial (S, s), or None for zero.
    Before each chunk S is (B,H,N,DX,DY) in x's dtype, s (B,H,N,DX) float32.  The final states are
    float32, None if not `last`.
    other: shaped like the states before.  dots are then (B,H,N,tiles,DX) float32, and their sums
    over the last two axes are the inner products of the unrounded S with `other`; else None.
    walk: a form's kernel, walk(Walk, WalkInputs, out_types) -> WalkOutputs.
    reverse: walks from the last chunk to the first; "before" and "last" refer to that order.
    """
    (batch, heads, chunks, size), dtype = weight.shape, x.array.dtype
    at_once = sms * (2 if size == ROWS else 1)  # blocks that fit by registers and shared memory
    parts = spans(batch * heads * x.tiles * y.tiles, chunks, at_once)

    def walk_along(first, other, keep: bool, ends: int) -> WalkOutputs:
        """Walks along all spans at once, or without `keep` along all but the last."""
        s = Walk(
            dtype, x.array.shape[1], heads, chunks, size, x.tiles, y.tiles, parts,
            walked=parts if keep else ends, span=mosaic.cdiv(chunks, parts), ends=ends,
            keep=keep, reverse=reverse, saturate=saturate,
        )  # fmt: skip
        inputs = WalkInputs(x, y, weight, vector, decay, first, other)
        return walk(s, inputs, _out_types(s, batch, other is not None))

    if parts > 1:
        ends = walk_along(None, None, keep=False, ends=parts - 1)
        first = join_spans(decay, (ends.last, ends.s_last), first, parts, reverse)
    elif first is not None:
        first = tuple(z[:, :, None] for z in first)
    out = walk_along(first, other, keep=True, ends=int(last))
    end = (out.last[:, :, 0], out.s_last[:, :, 0]) if last else None
    return out.before, out.s_before, end, out.dots


def _out_types(s: Walk, batch: int, with_other: bool) -> WalkOutputs:
    shape = lambda dtype, *shape: jax.ShapeDtypeStruct((batch, s.heads, *shape), dtype)
    of_head, dx, dy = functools.partial(shape, jnp.float32), s.x_tiles * s.size, s.y_tiles * s.size
    return WalkOutputs(
        before=shape(s.dtype, s.chunks, dx, dy) if s.keep else None,
        s_before=of_head(s.chunks, dx) if s.keep else None,
        last=of_head(s.ends, dx, dy) if s.ends else None,
        s_last=of_head(s.ends, dx) if s.ends else None,
        dots=of_head(s.chunks, s.y_tiles, dx) if with_other else None,
    )


def join_spans(decay, ends, first, parts, reverse):
    """Returns (S, s) before each span, (B,H,spans,...).

    ends: the states that all spans but the last reach from zero.  A block of the kernel walks along
    the spans with some elements of the state in registers.
    """
    *pairs, chunks = decay.shape
    span = mosaic.cdiv(chunks, parts)
    decay = decay[:, :, ::-1] if reverse else decay
    decay = decay[:, :, : (parts - 1) * span].reshape(*pairs, parts - 1, span)
    if first is None:
        first = tuple(jnp.zeros((*pairs, *z.shape[3:])) for z in ends)
    first = tuple(z.reshape(-1, *z.shape[2:]) for z in first)
    dx, dy = first[0].shape[1:]
    width = 512  # 4 numbers for each thread, with 8 spans in flight
    wide = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def vlstm_join(decay_ref, ends_ref, s_ends_ref, first_ref, s_first_ref, out_ref, s_out_ref):
        pair, block = lax.axis_index("pair"), lax.axis_index("block")
        carry = functools.partial(_carry, pair, decay_ref)
        carry(ends_ref, first_ref, out_ref, pl.ds(block * width, width), wide)

        @pl.when(block < dx // ROWS)
        def _():
            carry(s_ends_ref, s_first_ref, s_out_ref, pl.ds(block * ROWS, ROWS), COL)

    out = mosaic.kernel(
        vlstm_join,
        out_type=(
            jax.ShapeDtypeStruct((len(first[0]), parts, dx * dy), jnp.float32),
            jax.ShapeDtypeStruct((len(first[0]), parts, dx), jnp.float32),
        ),
        grid=(len(first[0]), dx * dy // width),
        grid_names=("pair", "block"),
    )(
        jnp.prod(decay, -1).reshape(-1, parts - 1),
        ends[0].reshape(-1, parts - 1, dx * dy),
        ends[1].reshape(-1, parts - 1, dx),
        first[0].reshape(-1, dx * dy),
        first[1],
    )
    return out[0].reshape(*pairs, parts, dx, dy), out[1].reshape(*pairs, parts, dx)


def _carry(pair, decay_ref, ends_ref, first_ref, out_ref, at, layout):
    """Carries the elements `at` of a state over all spans; the loads of eight are in flight."""
    state = mosaic.load(first_ref.at[pair, at], layout)
    mosaic.store(out_ref.at[pair, 0, at], state)
    joined = ends_ref.shape[1]
    for n in range(0, joined, 8):
        group = range(n, min(n + 8, joined))
        loaded = [
            (decay_ref[pair, n], mosaic.load(ends_ref.at[pair, n, at], layout)) for n in group
        ]
        for n, (decay, end) in zip(group, loaded, strict=True):
            state = state * decay + end
            mosaic.store(out_ref.at[pair, n + 1, at], state)
