"""How a matrix is cut up for kernels that stream its rows through shared memory (kernels.py).

A row lies in shared memory as blocks of up to 256 columns.  Registers hold (4, block) arrays, one
line for each warp: in a *narrow* row the four lines are the same columns of four rows, so that a
mean is five shuffles; in a *wide* row they are four blocks of one row, and the four warps meet in
shared memory.  The widest rows are shared by two warpgroups, each with a *part* of the columns.
Everything else is the same code.  Columns and rows that are missing at the edge are filled with
zeros by TMA on the way in and dropped on the way out.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

LINES = 4  # lines of a register array: the warps of a warpgroup
SMS = 132  # of an H100; a constant, so that sums do not depend on the GPU they run on
MAX_COLS = 8192

_SMEM = 220 * 1024  # of 227 KB; the rest is for barriers and the scratch of reductions

# Tiles by direction and width: the first line whose width is enough.  Measured on an H100 80GB HBM3
# with JAX 0.11.2: layer norm, bfloat16 rows, float32 weight and bias, as shares of C = 2.92 TB/s (a
# copy in the same run).  In brackets what else was tried: (rows, slots, blocks on an SM).
_TILES = {
    "forward": [  # columns, wide, rows, slots, blocks on an SM, parts
        (256, False, 4, 2, 8, 1),
        (1024, False, 4, 0, 0, 1),  # 32768x768: 0.95; no slots: no TMA, a new block for each tile
        #                           [8 rows 0.92; with TMA 0.90; that in blocks of 4 x 4 rows 0.88]
        (1024, False, 4, 2, 8, 1),  # where that cannot be  [(8,4,2), (8,2,6), (16,4,2) 0.05 less]
        (2048, True, 2, 3, 5, 1),  # 4096x1600: 0.94  [(2,4,2) 0.68, (2,4,4) 0.87, (2,2,6) 0.88]
        (4096, True, 2, 2, 3, 1),  # 16384x4096: 0.92  [before awaiting the weights last 0.90;
        #                           then (1,2,4) 0.88, (1,4,3) 0.85, (1,5,2) 0.84]
        (MAX_COLS, True, 1, 4, 1, 1),  # 8192x8192: 0.94  [(1,8,1) 0.90, (2,4,1) 0.85, (1,2,2) 0.80]
    ],
    "backward": [
        (1024, False, 4, 4, 2, 1),  # 32768x768: 0.88  [(4,6,2) 0.86, (8,3,2) 0.88, (4,4,3) 0.87;
        #                           n and g kept 0.85; without TMA 0.79 to 0.88]
        (2048, True, 2, 3, 2, 1),  # 4096x1600: 0.81  [n and g not kept and (2,4,2) 0.71, (2,2,4)
        #                           0.72; four warpgroups that share their sums 0.79]
        (4096, True, 1, 4, 2, 1),  # 16384x4096: 0.99  [n and g not kept 0.97; two parts 0.86]
        (MAX_COLS, True, 1, 4, 1, 2),  # 8192x8192: 0.97; fused, where three slots fit, 1.00
        #                           [one part: (1,3,2) 0.82, (1,5,1) 0.79; four parts 0.97; eight
        #                           0.95; three or five slots the same]
    ],
}
_SHORT = 2048  # elements up to which narrow tiles of short rows grow
_KEPT = 4096  # elements of a tile, of one part, up to which n and g stay in registers


class Plan(NamedTuple):
    """How a (rows, heads, cols) array is cut up; `rows` are those of each head."""

    rows: int
    heads: int
    cols: int  # columns that count
    width: int  # columns of the arrays that the kernel is given
    block: int  # columns of a line
    blocks: int  # blocks of a part of a row in shared memory, those past `width` included
    wide: bool
    tile: int  # rows of one TMA copy
    slots: int  # tiles of one program in shared memory; 0: none, every tile has its own program
    programs: int  # persistent programs for each head
    parts: int  # warpgroups of a program, which share the columns of every row

    @property
    def tiles(self) -> int:
        return mosaic.cdiv(self.rows, self.tile)

    @property
    def groups(self) -> int:
        """Sets of rows in a tile that are worked on together: one wide row or four narrow ones."""
        return self.tile if self.wide else self.tile // LINES

    @property
    def chunks(self) -> range:
        """Register arrays that such a set needs."""
        return range(self.blocks // LINES if self.wide else self.blocks)

    @property
    def keeps(self) -> bool:
        """Whether the backward pass has registers for n and g between its two passes over a tile.

        A narrow row reads both from shared memory again, which is quicker there.
        """
        return self.wide and self.tile * self.blocks * self.block <= _KEPT

    @property
    def shape(self) -> tuple[int, int]:
        return (LINES, self.block)

    @property
    def layout(self) -> plgpu.Layout:
        return mosaic.warp_rows(self.block // 32)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """(rows, heads, width) as (rows, heads, width / block, block), the form that TMA copies."""
        block = min(self.block, self.width)
        return (self.rows, self.heads, self.width // block, block)

    def view(self, x):
        """Pads the columns where TMA needs it, which is for few widths, and splits them."""
        x = mosaic.pad_axis(x, x.ndim - 1, self.width) if x.shape[-1] != self.width else x
        return x.reshape(*x.shape[:-1], *self.view_shape[2:])

    def unview(self, x):
        return x.reshape(*x.shape[:-2], self.width)[..., : self.cols]

    def lines(self, smem, group, chunk):
        if self.wide:
            return smem.at[group, pl.ds(chunk * LINES, LINES)]
        return smem.at[pl.ds(group * LINES, LINES), chunk]

    def weight(self, smem, chunk):
        """Columns of a chunk of an (blocks, block) weight, the same in every row."""
        if self.wide:
            return mosaic.load(smem.at[pl.ds(chunk * LINES, LINES)], self.layout)
        return self.spread(mosaic.load(smem.at[chunk], self.layout.reduce(0)), axis=1)

    def mean(self, f):
        """Row means of f(chunk), or of every member of a tuple: one number for each line.

        For one warpgroup, which has the whole row.
        """
        total = functools.reduce(functools.partial(jax.tree.map, jnp.add), map(f, self.chunks))
        return jax.tree.map(self._line_mean, total)

    def _line_mean(self, x):
        sums = jnp.sum(x, axis=1)
        if self.wide:  # the four lines are of one row
            sums = self.every_line(jnp.sum(sums))
        return sums / self.cols

    def every_line(self, number):
        """One number as that of every line."""
        return plgpu.layout_cast(jnp.broadcast_to(number, (LINES,)), self.layout.reduce(1))

    def spread(self, line, axis=0):
        """One number for each line (axis 0) or column (axis 1) as a full register array."""
        return mosaic.along(line, self.shape, axis)

    def inside(self, x, chunk):
        """x with zeros in the columns that only fill up the last blocks."""
        blocks = (self.parts - 1) * self.blocks + (chunk + 1) * LINES if self.wide else chunk + 1
        if blocks * self.block <= self.cols:
            return x  # in every part
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=self.layout)
        if self.wide:
            line = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
            first = lax.axis_index("part") * self.blocks + chunk * LINES
            column = column + (line + first) * self.block
        else:
            column = column + chunk * self.block
        return jnp.where(column < self.cols, x, 0.0)

    def zeros(self):
        return [mosaic.zeros(self.shape, self.layout) for _ in self.chunks]


def why_not(x, weight, bias, residual=None, x_bias=None, *, eps) -> str | None:
    """Why the kernels cannot normalise the rows of x, or None."""
    arrays = dict(x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    if reason := mosaic.unsupported_dtype(**arrays):
        return reason
    if reason := mosaic.empty(x=x):
        return reason
    if x.shape[-1] > MAX_COLS:
        return f"C={x.shape[-1]} is more than {MAX_COLS}"
    s = x if residual is None else residual
    streams = x.dtype.itemsize + s.dtype.itemsize * (1 if residual is None else 2)
    row = 2 * streams + (0 if weight is None else weight.dtype.itemsize)
    if row * (x.shape[-1] + -x.shape[-1] % 1024) > _SMEM and x.shape[-1] > 4096:
        return f"two rows of C={x.shape[-1]} for the backward pass do not fit into shared memory"
    if eps <= 0:
        return f"eps={eps} is not positive"
    if residual is not None and residual.dtype != jnp.promote_types(x.dtype, residual.dtype):
        return f"residual is {residual.dtype}, narrower than x ({x.dtype})"
    return None


def why_slower(x) -> str | None:
    """Why XLA's form is faster than the kernels, or None: rows have to be padded in a copy.

    Speed of the kernels relative to XLA, layer and RMS norm, alone and with a residual, H100, JAX
    0.11.2 (python -m pallas_kernels.benchmark --untuned); both: forward and backward:

        rows that are padded, C = 3 to 8191   forward 0.16 to 0.60, both 0.26 to 1.04 (1.33: C = 33)
        65536 x 72, which is not              forward 0.52, both 1.50; with a residual 0.88, 1.49
    """
    c = x.shape[-1]
    if c % (multiple := _multiple(c)):
        return f"the kernel would pad C={c} to a multiple of {multiple}"
    return None


def _multiple(cols: int) -> int:
    """What the columns of the arrays are a multiple of that the kernels are given."""
    if cols <= 256:
        return 8  # TMA wants strides of 16 bytes
    # Past 4096 so that a row fills its buffer: two rows at a time would not fit (see `plan`).
    return 64 if cols <= 4096 else 1024


def check_shapes(x, weight, bias, residual=None, x_bias=None):
    """ValueError unless weights and biases are all (C,) or all (H, C) for x (..., H, C)."""
    if not x.ndim:
        raise ValueError("x has shape (), it needs the axis C that is normalised")
    weights = {"weight": weight, "bias": bias, "x_bias": x_bias}
    weights = {name: w for name, w in weights.items() if w is not None}
    for name, w in weights.items():
        if w.shape != x.shape[x.ndim - w.ndim :]:
            raise ValueError(f"{name} has shape {w.shape}, not that of the last axes of {x.shape}")
        if w.ndim not in (1, 2):
            raise ValueError(f"{name} has {w.ndim} axes, not 1 or 2")
    if len({w.ndim for w in weights.values()}) > 1:
        shapes = ", ".join(f"{name} {w.shape}" for name, w in weights.items())
        raise ValueError(f"all must be of one row or all of a row for each head: {shapes}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {residual.shape}, x has {x.shape}")


def plan(direction, shape, streams, weights) -> Plan:
    """Chooses the tiles for arrays (rows, heads, cols) that are read row by row, and weights."""
    rows, heads, cols = shape
    lines = (t for t in _TILES[direction] if t[0] >= cols)
    _, wide, tile, slots, per_sm, parts = next(t for t in lines if t[3] or rows % t[2] == 0)
    width = cols + -cols % _multiple(cols)
    if cols <= 256:
        block = next(b for b in (64, 128, 256) if b >= cols)
    else:
        widest = 512 // streams["x"].dtype.itemsize  # a vector of 16 bytes in each lane
        fill = 1 if cols <= 4096 else LINES * parts
        block = next(b for b in (256, 128, 64) if width % (b * fill) == 0 and b <= widest)
    blocks = mosaic.cdiv(width, block * parts)
    if not slots:
        return Plan(rows, heads, cols, width, block, blocks, wide, tile, 0, rows // tile, parts)
    if wide:
        blocks += -blocks % LINES
    row_cols = parts * blocks * block
    row = row_cols * sum(a.dtype.itemsize for a in streams.values())
    fixed = row_cols * sum(a.dtype.itemsize for a in weights.values())
    # A copy of one row to global memory is not clipped at the row's end, a box of several is.
    least = LINES if not wide else 1 if width == row_cols else 2
    tile = max(tile, least)
    while not wide and 2 * tile * blocks * block <= _SHORT:
        tile *= 2
    while (room := (_SMEM // per_sm - fixed) // (tile * row)) < 2 and (tile > least or per_sm > 1):
        # Narrow tiles keep their height: those of the backward pass may not be the higher ones.
        if tile > least and (wide or per_sm <= 2):
            tile //= 2
        else:
            per_sm -= 1
    programs = min(mosaic.cdiv(rows, tile), mosaic.cdiv(per_sm * SMS, heads))
    slots = min(slots, room)
    return Plan(rows, heads, cols, width, block, blocks, wide, tile, slots, programs, parts)
