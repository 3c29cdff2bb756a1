"""Splits a matrix into tiles of rows, for the kernels.

A row is split into blocks of up to 256 columns.  Registers hold (4, block) arrays with one line for
each warp:

    narrow    line 0 | row r    , block c |      wide    line 0 | row r, block 4 c     |
              line 1 | row r + 1, block c |              line 1 | row r, block 4 c + 1 |
              line 2 | row r + 2, block c |              line 2 | row r, block 4 c + 2 |
              line 3 | row r + 3, block c |              line 3 | row r, block 4 c + 3 |

The mean of a *narrow* row takes five shuffles; for a *wide* row four warps reduce through shared
memory.  A warp holds several rows of one short block side by side (bfloat16: two of 128 columns,
four of 64), so that each lane loads 16 bytes; an array has as many times four lines.  Two or four
warpgroups share the widest rows, and each takes a *part* of the columns.  All other code is the
same.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

LINES = 4  # lines of a register array: the warps of a warpgroup
MAX_COLS = 8192
MAX_GATED_COLS = 1024

# Tiles by direction and width: the first line that fits is used.  Columns, wide, rows, blocks on an
# SM (backward), warpgroups, whether the next rows are loaded ahead.  The comments give shares of a
# copy's bandwidth in the same run, for layer norm of bfloat16 rows on an H100.
# docs/performance.md has the alternatives.
_TILES = {
    "forward": [
        (1024, False, 4, 0, 1, False),  # 32768x768: 1.01
        (MAX_COLS, True, 1, 0, 1, False),  # 16384x4096: 1.01, 8192x8192: 0.98, 4096x1600: 0.78
    ],
    "backward": [
        (256, False, 4, 3, 1, False),
        (1024, True, 2, 4, 1, False),  # 32768x768: 0.80
        (2048, True, 2, 3, 1, False),  # 4096x1600: 0.72
        (4096, True, 1, 2, 2, True),  # 16384x4096: 0.95
        (4096, True, 1, 2, 1, True),  # for widths that two parts cannot share
        (MAX_COLS, True, 1, 1, 4, True),  # 8192x8192: 0.95
    ],
}
_SHORT = 2048  # narrow tiles of short rows grow up to this number of elements
_KEPT = 4096  # n and g stay in registers for up to this number of elements of a tile's part


class Tiling(NamedTuple):
    """How a (rows, heads, cols) array is split; every head has `rows` rows."""

    rows: int
    heads: int
    cols: int  # columns without padding
    width: int  # columns of the arrays that the kernel gets
    block: int  # columns of a line
    blocks: int  # of a row's part
    wide: bool
    tile: int  # rows
    programs: int  # for each head; backward they are persistent
    parts: int  # warpgroups of a program; they share the columns of every row
    ahead: bool  # whether the next tile is loaded ahead, to registers
    narrow_forward: bool  # backward: whether the forward pass has written narrow rows' statistics
    side_by_side: int = 1  # short rows that a warp holds at once

    @property
    def height(self) -> int:
        """Lines of a register array."""
        return LINES * self.side_by_side

    @property
    def tiles(self) -> int:
        return mosaic.cdiv(self.rows, self.tile)

    @property
    def groups(self) -> int:
        """Sets of rows in a tile that are computed together: one wide row or four narrow rows."""
        return self.tile if self.wide else self.tile // self.height

    @property
    def chunks(self) -> range:
        """The register arrays of such a set."""
        return range(mosaic.cdiv(self.blocks, LINES) if self.wide else self.blocks)

    @property
    def keeps_operands(self) -> bool:
        """Whether the backward kernel keeps n and g in registers between its passes over a tile.

        For narrow rows it is faster to compute them again.
        """
        return self.wide and self.tile * self.blocks * self.block <= _KEPT

    @property
    def shape(self) -> tuple[int, int]:
        return (self.height, self.block)

    @property
    def layout(self) -> plgpu.Layout:
        return mosaic.warp_rows(self.block * self.side_by_side // 32, self.side_by_side)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape that kernels copy: (rows, heads, width / block, block)."""
        return (self.tiles * self.tile, self.heads, self.width // self.block, self.block)

    def view(self, x):
        """Splits the columns into blocks, after padding what the kernel cannot copy otherwise."""
        x = mosaic.pad_axis(x, x.ndim - 1, self.width) if x.shape[-1] != self.width else x
        if x.ndim == 3:
            x = mosaic.pad_axis(x, 0, self.tile)
        return x.reshape(*x.shape[:-1], *self.view_shape[2:])

    def place(self, ref, tile):
        """Where an array has a tile's rows of this program's head.

        A gate may stand in a wider array; its heads are the last ones there.
        """
        head = lax.axis_index("head") + (ref.shape[1] - self.heads)
        return pl.ds(tile * self.tile, self.tile), head

    def unview(self, x):
        return x.reshape(*x.shape[:-2], self.width)[: self.rows, :, : self.cols]

    def first_block(self, chunk):
        """The first block of a chunk of a wide row; the last chunk may repeat blocks."""
        return min(chunk * LINES, self.blocks - LINES)

    def lines(self, ref, group, chunk):
        if self.wide:
            return ref.at[group, pl.ds(self.first_block(chunk), LINES)]
        return ref.at[pl.ds(group * self.height, self.height), chunk]

    def raw(self, ref, group, chunk):
        """A chunk in registers, in its own dtype."""
        return plgpu.load(self.lines(ref, group, chunk), layout=self.layout, optimized=False)

    def weight(self, ref, chunk):
        """The columns of a chunk of a (blocks, block) weight, broadcast to every row."""
        if self.wide:
            return mosaic.load(ref.at[pl.ds(self.first_block(chunk), LINES)], self.layout)
        return self.broadcast(mosaic.load(ref.at[chunk], self.layout.reduce(0)), axis=1)

    def once(self, x, chunk):
        """Sets to zero what an earlier chunk has, too, so that a sum counts it once."""
        repeated = chunk * LINES - self.first_block(chunk) if self.wide else 0
        if not repeated:
            return x
        line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        return jnp.where(line >= repeated, x, 0.0)

    def every_line(self, number):
        """Broadcasts a number to every line."""
        return plgpu.layout_cast(jnp.broadcast_to(number, (LINES,)), self.layout.reduce(1))

    def broadcast(self, line, axis=0):
        """Broadcasts one number for each line (axis 0) or column (axis 1) to a register array."""
        return mosaic.along(line, self.shape, axis)

    def zero_padding(self, x, chunk):
        """Sets the padding columns of the last blocks to zero."""
        start = self.first_block(chunk) if self.wide else chunk
        blocks = (self.parts - 1) * self.blocks + start + (LINES if self.wide else 1)
        if blocks * self.block <= self.cols:
            return x  # no part has padding in this chunk
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)
        if self.wide:
            line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            first = lax.axis_index("part") * self.blocks + start
            column = column + (line + first) * self.block
        else:
            column = column + chunk * self.block
        return jnp.where(column < self.cols, x, 0.0)

    def zeros(self):
        return [mosaic.zeros(self.shape, self.layout) for _ in self.chunks]


def why_not(x, weight, bias, residual, x_bias, gate, *, kind, eps) -> str | None:
    """Why the kernels do not support this call, or None."""
    arrays = dict(x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    if reason := mosaic.unsupported_dtype(**arrays) or mosaic.empty(x=x):
        return reason
    c, most = x.shape[-1], MAX_COLS
    if reason := mosaic.too_many(rows=x.size // c):
        return reason
    if gate is not None:
        if reason := mosaic.mixed_dtypes(x=x, gate=gate):
            return reason
        most = MAX_GATED_COLS
    if c > most:
        return f"C={c} is more than {most}"
    if eps <= 0:
        return f"eps={eps} is not positive"
    if residual is not None and residual.dtype != jnp.promote_types(x.dtype, residual.dtype):
        return f"residual is {residual.dtype}, narrower than x ({x.dtype})"
    return None


def why_slower(x, *arrays, **options) -> str | None:
    """Why XLA's form is faster than the kernels (they would copy the rows to pad them), or None.

    Kernels that padded had 0.16 to 0.60 of XLA's speed forward, 0.26 to 1.04 in both directions, at
    C = 3 to 8191 (H100, JAX 0.11.2).
    """
    c = x.shape[-1]
    if c % (multiple := _multiple(c)):
        return f"the kernel would pad C={c} to a multiple of {multiple}"
    return None


def _multiple(cols: int) -> int:
    """The multiple to which the kernels need the columns padded."""
    return 64 if cols <= 4096 else 1024  # 64 in each line of four parts


def choose_tiling(direction, shape, dtype) -> Tiling:
    """The tiling for arrays (rows, heads, cols); dtype: of x."""
    rows, heads, cols = shape
    width = cols + -cols % _multiple(cols)
    # Rows are padded only if they are too short for four warps.
    fits = lambda t: (
        (t[4] == 1 or width % (64 * LINES * t[4]) == 0)
        and (rows % t[2] == 0 or width < 64 * LINES)
        and t[0] >= cols
    )
    _, wide, tile, per_sm, parts, ahead = next(t for t in _TILES[direction] if fits(t))
    tile = _grow(tile, wide, width, rows)
    widest = 512 // dtype.itemsize  # each lane loads a vector of 16 bytes
    lines = LINES * parts if wide else 1
    fitting = [b for b in (256, 128, 64) if width % b == 0 and b <= widest]
    # The widest of the blocks with which the last chunk repeats the least.
    block = min(fitting, key=lambda b: mosaic.cdiv(width, b * lines) * b * lines)
    blocks = width // (block * parts)
    tiles = programs = mosaic.cdiv(rows, tile)
    if per_sm:
        programs = min(tiles, mosaic.cdiv(per_sm * mosaic.sm_count(), heads))
    narrow = direction == "backward" and not choose_tiling("forward", shape, dtype).wide
    t = Tiling(rows, heads, cols, width, block, blocks, wide, tile, programs, parts, ahead, narrow)
    return _side_by_side(t, dtype)


def _grow(tile: int, wide: bool, width: int, rows: int) -> int:
    """Doubles a tile of narrow rows while it is short and divides the rows."""
    while not wide and 2 * tile * width <= _SHORT and rows % (2 * tile) == 0:
        tile *= 2
    return tile


def _side_by_side(t: Tiling, dtype) -> Tiling:
    """Puts short rows side by side in a warp until each lane loads a vector of 16 bytes."""
    n = 1
    if t.blocks == 1 and not t.wide:
        while 2 * n * t.block * dtype.itemsize <= 512 and t.tile % (2 * n * LINES) == 0:
            n *= 2
    return t._replace(side_by_side=n)
