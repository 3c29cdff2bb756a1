"""Splits a matrix into tiles of rows, for the kernels.

A row is split into strips of up to 256 columns.  Registers hold (4, strip) arrays with one line for
each warp:

    narrow    line 0 | row r    , strip c |      wide    line 0 | row r, strip 4 c     |
              line 1 | row r + 1, strip c |              line 1 | row r, strip 4 c + 1 |
              line 2 | row r + 2, strip c |              line 2 | row r, strip 4 c + 2 |
              line 3 | row r + 3, strip c |              line 3 | row r, strip 4 c + 3 |

The mean of a *narrow* row takes five shuffles; for a *wide* row four warps reduce through shared
memory.  All other code is the same.
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

# Up to this width a warp takes a row: shares of a copy's bandwidth for layer norm of 32768x768
# bfloat16 rows on an H100 are then 1.01 forward and 0.86 backward, with four warps 0.88 and 0.80 to
# 0.85.  docs/performance.md has the alternatives.
_NARROW = 1024
# Backward, wide rows: columns, rows of a tile, blocks on an SM.  Shares: 4096x1600 0.72 (in L2),
# 16384x4096 0.88.  Nobody has timed the last line.
_WIDE = (2048, 2, 3), (2048, 1, 3), (4096, 1, 2), (MAX_COLS, 1, 1)
_BLOCKS = 3  # on an SM, backward, narrow rows
_SHORT = 2048  # narrow tiles of short rows grow up to this number of elements


class Tiling(NamedTuple):
    """How a (rows, heads, cols) array is split; every head has `rows` rows."""

    rows: int
    heads: int
    cols: int
    strip: int  # columns of a line
    strips: int  # per row
    wide: bool
    tile: int  # rows
    blocks: int  # per head; in the backward pass they are persistent

    @property
    def tiles(self) -> int:
        return mosaic.cdiv(self.rows, self.tile)

    @property
    def groups(self) -> int:
        """Sets of rows in a tile that are computed together: one wide row or four narrow rows."""
        return self.tile if self.wide else self.tile // LINES

    @property
    def chunks(self) -> range:
        """The register arrays of such a set."""
        return range(mosaic.cdiv(self.strips, LINES) if self.wide else self.strips)

    @property
    def shape(self) -> tuple[int, int]:
        return (LINES, self.strip)

    @property
    def layout(self) -> plgpu.Layout:
        return mosaic.warp_rows(self.strip // 32)

    def view(self, x):
        """Splits the columns into strips, after padding the rows to whole tiles.

        Returns (rows, heads, cols / strip, strip), of a weight (heads, cols / strip, strip).
        """
        x = mosaic.pad_axis(x, 0, self.tile) if x.ndim == 3 else x
        return x.reshape(*x.shape[:-1], self.strips, self.strip)

    def window(self, ref, tile):
        """A tile's rows of this block's head in an array.

        A gate may stand in a wider array; its heads are the last ones there.
        """
        head = lax.axis_index("head") + (ref.shape[1] - self.heads)
        return ref.at[pl.ds(tile * self.tile, self.tile), head]

    def unview(self, x):
        return x.reshape(*x.shape[:-2], self.cols)[: self.rows]

    def first_strip(self, chunk):
        """The first strip of a chunk of a wide row; the last chunk may repeat strips."""
        return min(chunk * LINES, self.strips - LINES)

    def lines(self, ref, group, chunk):
        if self.wide:
            return ref.at[group, pl.ds(self.first_strip(chunk), LINES)]
        return ref.at[pl.ds(group * LINES, LINES), chunk]

    def weight(self, ref, chunk):
        """The columns of a chunk of a (strips, strip) weight, broadcast to every row."""
        if self.wide:
            return mosaic.load(ref.at[pl.ds(self.first_strip(chunk), LINES)], self.layout)
        return self.broadcast(mosaic.load(ref.at[chunk], self.layout.reduce(0)), axis=1)

    def once(self, x, chunk):
        """Zeroes the elements that an earlier chunk also has, so that a sum counts them once."""
        repeated = chunk * LINES - self.first_strip(chunk) if self.wide else 0
        if not repeated:
            return x
        line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        return jnp.where(line >= repeated, x, 0.0)

    def broadcast(self, line, axis=0):
        """Broadcasts one number for each line (axis 0) or column (axis 1) to a register array."""
        return mosaic.along(line, self.shape, axis)


def choose_tiling(direction, shape, dtype) -> Tiling:
    """The tiling for arrays (rows, heads, cols); dtype: of x.

    Both directions keep the statistics in one order, so a row is narrow in both or in neither.
    """
    rows, heads, cols = shape
    # Rows are padded only if they are too short for four warps.
    wide = cols > _NARROW or (rows % LINES > 0 and cols >= 64 * LINES)
    tile, per_sm = LINES, _BLOCKS
    while not wide and 2 * tile * cols <= _SHORT and rows % (2 * tile) == 0:
        tile *= 2
    if wide:
        _, tile, per_sm = next(w for w in _WIDE if cols <= w[0] and rows % w[1] == 0)
        tile = tile if direction == "backward" else 1
    widest = 512 // dtype.itemsize  # each lane loads a vector of 16 bytes
    lines = LINES if wide else 1
    fitting = [b for b in (256, 128, 64) if cols % b == 0 and b <= widest]
    # The strip width with the least repetition in the last chunk; the widest, if several have it.
    strip = min(fitting, key=lambda b: mosaic.cdiv(cols, b * lines) * b * lines)
    blocks = mosaic.cdiv(rows, tile)
    if direction == "backward":
        blocks = min(blocks, mosaic.cdiv(per_sm * mosaic.sm_count(), heads))
    return Tiling(rows, heads, cols, strip, cols // strip, wide, tile, blocks)
