"""Splits a matrix into tiles of rows, for the kernels.

Shared memory holds a row as blocks of up to 256 columns.  Registers hold (4, block) arrays with
one line for each warp:

    narrow    line 0 | row r    , block c |      wide    line 0 | row r, block 4 c     |
              line 1 | row r + 1, block c |              line 1 | row r, block 4 c + 1 |
              line 2 | row r + 2, block c |              line 2 | row r, block 4 c + 2 |
              line 3 | row r + 3, block c |              line 3 | row r, block 4 c + 3 |

The mean of a *narrow* row takes five shuffles; for a *wide* row four warps reduce through shared
memory.  Without TMA a warp holds several rows of one short block side by side (bfloat16: two of 128
columns, four of 64), so that each lane loads 16 bytes; an array has as many times four lines.  Two
warpgroups share the widest rows, and each takes a *part* of the columns.  All other code is the
same.  For rows and columns past the edges TMA reads zeros and writes nothing.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.pipeline import Ring

LINES = 4  # lines of a register array: the warps of a warpgroup
SMS = 132  # of an H100; a constant, so that sums do not depend on the GPU
MAX_COLS = 8192
MAX_GATED_COLS = 1024

_SMEM = 220 * 1024  # of 227 KB; barriers and reductions use the rest

# Tiles by direction and width: the first line that is wide enough is used.  The comments give
# shares of a copy's bandwidth in the same run, for layer norm of bfloat16 rows on an H100.
# docs/performance.md has the alternatives.
_TILES = {
    "forward": [  # columns, wide, rows, slots, blocks on an SM, parts
        (256, False, 4, 2, 8, 1),
        (1024, False, 4, 0, 0, 1),  # 32768x768: 0.95; no slots: no TMA, a new block for each tile
        (1024, False, 4, 2, 8, 1),  # for numbers of rows that are not a multiple of the tile
        (2048, True, 2, 3, 5, 1),  # 4096x1600: 0.94
        (4096, True, 2, 2, 3, 1),  # 16384x4096: 0.92
        (MAX_COLS, True, 1, 4, 1, 1),  # 8192x8192: 0.94
    ],
    "backward": [
        (1024, False, 4, 4, 2, 1),  # 32768x768: 0.88
        (2048, True, 2, 3, 2, 1),  # 4096x1600: 0.81
        (4096, True, 1, 4, 2, 1),  # 16384x4096: 0.99
        (MAX_COLS, True, 1, 4, 1, 2),  # 8192x8192: 0.97; fused (three slots fit) 1.00
    ],
    # With a gate, for narrow rows.
    "gated forward": [
        (1024, False, 4, 0, 0, 1),  # 196608x128: 0.94
        (1024, False, 4, 2, 8, 1),
    ],
    "gated backward": [
        (256, False, 4, 3, 4, 1),  # 196608x128: 0.97; a fifth block of 112 registers would not fit
        (1024, False, 4, 4, 2, 1),
    ],
}
# The same of the general form, which needs neither TMA nor much shared memory: registers get rows
# from global memory.  Columns, wide, rows, blocks on an SM (backward), parts, whether the next rows
# are loaded ahead.
_GENERAL = {
    "forward": [(1024, False, 4, 0, 1, False), (MAX_COLS, True, 1, 0, 1, False)],
    "backward": [
        (256, False, 4, 3, 1, False),
        (1024, True, 2, 4, 1, False),
        (2048, True, 2, 3, 1, False),
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
    blocks: int  # blocks of a row's part in shared memory, including those past `width`
    wide: bool
    tile: int  # rows of one TMA copy
    slots: int  # tiles of a program in shared memory; 0: no TMA, from global memory to registers
    programs: int  # persistent programs for each head
    parts: int  # warpgroups of a program; they share the columns of every row
    ahead: bool = False  # without slots: whether the next tile is loaded ahead, to registers
    narrow_forward: bool = False  # whether the forward pass has written narrow rows' statistics
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

        For narrow rows it is faster to compute them again from shared memory.
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
        block = min(self.block, self.width)
        rows = self.rows if self.slots else self.tiles * self.tile
        return (rows, self.heads, self.width // block, block)

    def view(self, x):
        """Splits the columns into blocks, after padding what the kernel cannot copy otherwise."""
        x = mosaic.pad_axis(x, x.ndim - 1, self.width) if x.shape[-1] != self.width else x
        if x.ndim == 3 and not self.slots:
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


def why_not(x, weight, bias, residual, x_bias, gate, *, kind, eps, general: bool) -> str | None:
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
    s = x if residual is None else residual
    streams = x.dtype.itemsize + s.dtype.itemsize * (1 if residual is None else 2)
    row = 2 * streams + (0 if weight is None else weight.dtype.itemsize)
    if not general and c > 4096 and row * (c + -c % 1024) > _SMEM:
        return f"two rows of C={c} exceed shared memory in the backward pass"
    if eps <= 0:
        return f"eps={eps} is not positive"
    if residual is not None and residual.dtype != jnp.promote_types(x.dtype, residual.dtype):
        return f"residual is {residual.dtype}, narrower than x ({x.dtype})"
    return None


def why_slower(x, *arrays, general: bool, **options) -> str | None:
    """Why XLA's form is faster than the kernels (they would copy the rows to pad them), or None.

    Speed of the kernels relative to XLA, layer and RMS norm, alone and with a residual, H100, JAX
    0.11.2 (python -m pallas_kernels.benchmark --untuned); "both" is forward and backward:

        padded rows, C = 3 to 8191   forward 0.16 to 0.60, both 0.26 to 1.04 (C = 33: 1.33)
        65536 x 72, not padded       forward 0.52, both 1.50; with a residual 0.88, 1.49
    """
    c = x.shape[-1]
    if c % (multiple := _multiple(c, general)):
        return f"the kernel would pad C={c} to a multiple of {multiple}"
    return None


def _multiple(cols: int, general: bool) -> int:
    """The multiple to which the kernels need the columns padded."""
    if general:
        return 64 if cols <= 4096 else 1024  # 64 in each line of four parts
    if cols <= 256:
        return 8  # TMA needs strides that are multiples of 16 bytes
    # Past 4096 a row must fill its buffer, because two rows would not fit (see `choose_tiling`).
    return 64 if cols <= 4096 else 1024


def _general_tiling(direction, shape, dtype) -> Tiling:
    """The tiling of the general form."""
    rows, heads, cols = shape
    width = cols + -cols % _multiple(cols, True)
    # Rows are padded only if they are too short for four warps.
    fits = lambda t: (
        (t[4] == 1 or width % (64 * LINES * t[4]) == 0)
        and (rows % t[2] == 0 or width < 64 * LINES)
        and t[0] >= cols
    )
    _, wide, tile, per_sm, parts, ahead = next(t for t in _GENERAL[direction] if fits(t))
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
    narrow = direction == "backward" and not _general_tiling("forward", shape, dtype).wide
    t = Tiling(
        rows, heads, cols, width, block, blocks, wide, tile, 0, programs, parts, ahead, narrow
    )
    return _side_by_side(t, dtype)


def choose_tiling(direction, general: bool, shape, streams, weights) -> Tiling:
    """The tiling for `streams` (rows, heads, cols), read row by row, and their `weights`."""
    if general:
        return _general_tiling(direction, shape, streams["x"].dtype)
    return _hopper_tiling(direction, shape, streams, weights)


def _hopper_tiling(direction, shape, streams, weights) -> Tiling:
    rows, heads, cols = shape
    gated = "gated " if "gate" in streams else ""
    lines = (t for t in _TILES[gated + direction] if t[0] >= cols)
    short = next((b for b in (64, 128, 256) if b >= cols), None)  # the only block of a short row
    # Only TMA fills the rest of a block with zeros, and leaves out the rest of a tile.
    whole = lambda t: rows % t[2] == 0 and short in (None, cols)
    _, wide, tile, slots, per_sm, parts = next(t for t in lines if t[3] or whole(t))
    width = cols + -cols % _multiple(cols, False)
    if short:
        block = short
        # Mosaic takes a store of rows as wide as their stride for contiguous and clips no row: it
        # would write the next head.
        if any(a.shape[1] * width == block for a in streams.values()):
            width = block
    else:
        widest = 512 // streams["x"].dtype.itemsize  # each lane loads a vector of 16 bytes
        fill = 1 if cols <= 4096 else LINES * parts
        block = next(b for b in (256, 128, 64) if width % (b * fill) == 0 and b <= widest)
    blocks = mosaic.cdiv(width, block * parts)
    if not slots:
        tile = _grow(tile, wide, width, rows)
        t = Tiling(rows, heads, cols, width, block, blocks, wide, tile, 0, rows // tile, parts)
        return _side_by_side(t, streams["x"].dtype)
    if wide:
        blocks += -blocks % LINES
    row_cols = parts * blocks * block
    row = row_cols * sum(a.dtype.itemsize for a in streams.values())
    fixed = row_cols * sum(a.dtype.itemsize for a in weights.values())
    # TMA does not clip a copy of one row to global memory at the row's end; it clips several rows.
    least = LINES if not wide else 1 if width == row_cols else 2
    tile = max(tile, least)
    tile = _grow(tile, wide, blocks * block)
    while (room := (_SMEM // per_sm - fixed) // (tile * row)) < 2 and (tile > least or per_sm > 1):
        # Narrow tiles keep their rows, because the backward pass must not have more rows.
        if tile > least and (wide or per_sm <= 2):
            tile //= 2
        else:
            per_sm -= 1
    programs = min(mosaic.cdiv(rows, tile), mosaic.cdiv(per_sm * SMS, heads))
    slots = min(slots, room)
    return Tiling(rows, heads, cols, width, block, blocks, wide, tile, slots, programs, parts)


def _grow(tile: int, wide: bool, width: int, rows: int = 0) -> int:
    """Doubles a tile of narrow rows while it is short and divides the rows."""
    while not wide and 2 * tile * width <= _SHORT and rows % (2 * tile) == 0:
        tile *= 2
    return tile


def _side_by_side(t: Tiling, dtype) -> Tiling:
    """Puts short rows side by side in a warp until each lane loads a vector of 16 bytes.

    Not if TMA copies them: Mosaic would then swizzle the tiles, which fails for padded rows.
    """
    n = 1
    if t.blocks == 1 and not t.wide:
        while 2 * n * t.block * dtype.itemsize <= 512 and t.tile % (2 * n * LINES) == 0:
            n *= 2
    return t._replace(side_by_side=n)


# ---- the ring of tiles in shared memory ----------------------------------------------------------


class Buffered(NamedTuple):
    """The arrays of a persistent block and their shared-memory buffers, under the same names."""

    streams: dict[str, Any]  # (rows, heads, blocks, block), read tile by tile
    weights: dict[str, Any]  # (heads, blocks, block)
    results: dict[str, Any]  # written from the buffer of the stream with the same name
    smem: dict[str, Any]
    bars: Any  # one for each slot; its streams arrive on it
    weight_bar: Any


def ring_types(t: Tiling, streams, weights) -> dict:
    """Scratch types of these buffers; every part has its own buffers and barriers."""
    tiles = (t.parts, t.slots, t.tile, t.blocks, t.block)
    smem = {k: plgpu.SMEM(tiles, a.dtype) for k, a in streams.items()}
    smem |= {k: plgpu.SMEM((t.parts, *tiles[3:]), a.dtype) for k, a in weights.items()}
    return smem | dict(
        bars=plgpu.Barrier(num_arrivals=len(streams), num_barriers=t.parts * t.slots),
        weight_bar=plgpu.Barrier(num_arrivals=max(len(weights), 1), num_barriers=t.parts),
    )


def fetch_weights(t: Tiling, arrays: Buffered):
    """Starts the copies of this head's row of every weight."""
    part = lax.axis_index("part")
    for k, ref in arrays.weights.items():
        window = ref.at[lax.axis_index("head"), *_part_columns(t)]
        plgpu.copy_gmem_to_smem(window, arrays.smem[k].at[part], arrays.weight_bar.at[part])


def _part_columns(t: Tiling):
    """The slices of this part's columns: of blocks, and within a block.

    Their start is a variable because JAX 0.12 rejects slices that are statically too wide.
    """
    zero = lax.rem(lax.axis_index("head"), jnp.int32(1))
    return pl.ds(lax.axis_index("part") * t.blocks + zero, t.blocks), pl.ds(zero, t.block)


def stream(t: Tiling, arrays: Buffered, step, carry):
    """Runs carry = step(rows, slot, tile, carry) for every tile of this program; returns the last.

    Streams are copied to their buffers slots - 1 tiles ahead of the step.  After the step the
    results are copied back from the same buffers.
    """
    program, part = lax.axis_index("program"), lax.axis_index("part")
    steps = lax.div(t.tiles - 1 - program, jnp.int32(t.programs)) + 1
    ring = Ring(t.slots, arrays.bars, first=part * t.slots)
    tile_of = lambda i: program + i * t.programs
    window = lambda ref, i: ref.at[*t.place(ref, tile_of(i)), *_part_columns(t)]

    def fetch(i):
        for k, ref in arrays.streams.items():
            ring.send(i, window(ref, i), arrays.smem[k].at[part])

    # Fill all slots but one.
    for i in range(t.slots - 1):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i)))
    if arrays.weights:
        plgpu.barrier_wait(arrays.weight_bar.at[part])  # after the rows' copies have started

    def body(i, carry):
        slot = ring.wait(i)
        rows = {k: arrays.smem[k].at[part, slot] for k in arrays.streams}
        carry = step(rows, slot, tile_of(i), carry)
        plgpu.commit_smem()
        for k, ref in arrays.results.items():
            plgpu.copy_smem_to_gmem(arrays.smem[k].at[part, slot], window(ref, i))

        @pl.when(i + (t.slots - 1) < steps)
        def _():
            # The next tile replaces the previous step's results; this step's may still be copied.
            plgpu.wait_smem_to_gmem(len(arrays.results), wait_read_only=True)
            fetch(i + (t.slots - 1))

        return carry

    carry = lax.fori_loop(0, steps, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
