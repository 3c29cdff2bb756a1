"""Which block of a kernel works on what, and in which order; the call of a kernel.

An item is one block of rows (of queries; in the dK/dV kernel of keys) of one pair (batch, head);
all columns that its rows see stream past it.  These columns should come from the L2 cache, no
block should wait for the busiest one, and a block should know its next item early.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, mosaic
from pallas_kernels.flash_attention.masks import Visits, segment_spans
from pallas_kernels.mosaic import ROWS


class Call(NamedTuple):
    """The static arguments of the op."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    segmented: bool = False  # there are segments
    # (H, K) if one array (B, T, H + 2 K, D) holds q, k and v, in this order.
    heads: tuple[int, int] | None = None
    general: bool = False  # the form for every GPU since Ampere, not Hopper's

    @property
    def triangular(self) -> bool:
        """Whether every query sees all earlier keys."""
        return self.causal and self.window is None and not self.segmented


def blocks_of(q, k) -> tuple[int, ...]:
    """Widths of the blocks of columns in which Hopper's kernels hold a head in shared memory.

    wgmma reads strips of 64, 32 or 16 columns.  In a block of several strips the strips alternate
    every 8 rows, so TMA copies 8 rows and whole strips at a time.  In a block of one strip the rows
    are contiguous: TMA stops at any T and D, and fills the rest with zeros.  Blocks of one width
    are one operand of a wgmma (`mosaic.multiply`), but TMA copies each by itself.
    """
    d = q.shape[3]  # a multiple of 8
    if d % (16 if d <= 96 else 32) == 0 and q.shape[1] % 8 == k.shape[1] % 8 == 0:
        return (d,)  # strips of 16 are slow in wider heads
    if 64 < d <= 96:
        return 64, 32
    width = 16 if d <= 16 else 32 if d <= 32 or 128 < d <= 160 else 64
    return (width,) * mosaic.cdiv(d, width)


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    wgs: int  # computing warpgroups of a block, 64 rows each
    step: int  # columns of one step: keys, or queries in the dK/dV kernel
    stages: int  # steps in flight
    persistent: bool  # one block per SM takes several items; otherwise the hardware hands them out
    section: int  # MiB of streamed operands of the heads worked on at a time
    block: int = 0  # rows of a block, if not 64 for each warpgroup


class Schedule(NamedTuple):
    """What is static in a call of a kernel: what it computes, how it is cut up, who does what."""

    visits: Visits
    wgs: int  # warpgroups of a block
    columns: int  # of one step: keys, or queries in the dK/dV kernel
    stages: int  # steps in flight
    block: int  # rows of a block
    lead: int  # rows of the first block that do not exist, in whole warpgroups
    items: int  # blocks of rows of all pairs
    grid: int  # blocks of the kernel
    where: Callable  # item -> (first row of the block, (batch, head))
    dtype: Any
    blocks: tuple[int, ...]  # widths of the blocks of columns
    group: int  # query heads of a kv head
    k_first: int  # the first head of k in its array
    v_first: int
    scale: float
    softcap: float | None
    segmented: bool  # there are segments

    @property
    def width(self) -> int:
        """D, padded with columns of zeros."""
        return sum(self.blocks)

    @property
    def parts(self) -> int:
        """Number of blocks of columns: a tile takes this many copies, or wgmmas over columns."""
        return len(self.blocks)

    @property
    def sets(self) -> int:
        """Number of groups of 64 rows that a block owns."""
        return self.block // ROWS

    @property
    def part(self) -> int:
        """Rows of a warpgroup."""
        return self.block // min(self.wgs, self.sets)

    @property
    def masks_first(self) -> bool:
        """Whether a mask may hide something in a warpgroup's first step."""
        return self.visits.causal or self.visits.ragged or self.segmented

    @property
    def masks_last(self) -> bool:
        """Whether a mask may hide something in a warpgroup's last steps, or in its block's."""
        return self.visits.window is not None or self.segmented

    @property
    def persistent(self) -> bool:
        """Whether a block takes several items, and loads the next one's rows meanwhile."""
        return self.grid < self.items

    @property
    def sides(self) -> int:
        """Buffers for a block's own rows: the current item's and, if persistent, the next one's."""
        return 2 if self.persistent else 1

    @property
    def begins_with_lse(self) -> bool:
        """Whether dK/dV's scores begin with -lse, so that P need not wait: slower at D = 64."""
        return self.softcap is None and self.width > 64

    def part_from(self, row):
        """The number of the part of the rows, in `segment_spans`, that begins with `row`."""
        return lax.div(row + self.lead, jnp.int32(self.part))

    def ranges(self, row, batch, spans):
        """(tiles that a warpgroup's rows see, tiles fully visible to all rows), each (first, end).

        row: the first row.  spans: a reference to `segment_spans`, or None.
        """
        if spans is not None:
            first, end, *whole = (spans[batch, self.part_from(row), n] for n in range(4))
            return (first, end), tuple(whole)
        all_tiles = row, row + self.part, 0, self.visits.tiles
        return self.visits.seen(*all_tiles), self.visits.whole(*all_tiles)

    def range_of_block(self, row, batch, spans):
        """(first, end) of the tiles that a block visits: one of its rows, from `row` on, sees."""
        if spans is None:
            return self.visits.seen(row, row + self.block, 0, self.visits.tiles)
        parts = [self.part_from(row) + i for i in range(self.block // self.part)]
        at = lambda n: [spans[batch, i, n] for i in parts]
        return mosaic.folded(jnp.minimum, at(0)), mosaic.folded(jnp.maximum, at(1))

    def numbers(self) -> dict:
        """Shared memory for the numbers of a block's items (`steps.finish`)."""
        if not self.persistent:
            return {}
        slots = self.stages + 2  # the most steps, or items, that one warpgroup runs ahead
        items, full = plgpu.SMEM((slots,), jnp.int32), plgpu.Barrier(num_barriers=slots)
        return dict(items=items, item_full=full)

    def buffer(self, n: int, rows: int):
        """Shared memory for n tiles: for each width (n, blocks of this width, rows, width)."""
        shapes = [(n, self.blocks.count(x), rows, x) for x in dict.fromkeys(self.blocks)]
        tiles = [mosaic.tiled(*shape, dtype=self.dtype) for shape in shapes]
        if not set(self.blocks) <= {16, 32, 64} or dispatch.interpreting():
            return tiles
        swizzle = lambda x: mosaic.wgmma_tiles(x.shape[-1], x.dtype)[1:]
        plain = [plgpu.SMEM(x.shape, x.dtype, transforms=swizzle(x)) for x in tiles]
        return plgpu.RefUnion(tiles, plain)

    def ids(self, n: int, rows: int):
        """Shared memory for the ids of n tiles of `rows` rows, or None without segments."""
        return plgpu.SMEM((n, rows), jnp.int32) if self.segmented else None


def schedule_of(q, k, tile: Tiles, call: Call, by_keys: bool = False) -> Schedule:
    """The Schedule of a kernel.  by_keys: a block owns keys, not queries."""
    (b, t, h, d), (s, kv_heads) = q.shape, k.shape[1:3]
    k_first = v_first = 0
    if call.heads is not None:
        h, kv_heads = call.heads
        k_first, v_first = h, h + kv_heads
    group, visits = h // kv_heads, Visits((t, s), call.causal, call.window, tile.step, by_keys)
    block, lead = tile.block or tile.wgs * ROWS, 0
    levels = mosaic.cdiv(visits.rows, block)
    if by_keys:
        first_row = lambda level: level * block  # most queries see the first keys
        owners, pair_bytes = kv_heads, 4 * t * d * group  # Q and dO of a kv head
    else:
        # The partial block comes first, where it sees the fewest keys; its first warpgroups have
        # nothing to do.  (At T = 1024 it has 64 of 192 rows; as the last block it took 8 of 32
        # steps.)
        lead = 0 if call.general else (levels * block - t) // ROWS * ROWS
        first_row = lambda level: (levels - 1 - level) * block - lead  # most keys first
        owners, pair_bytes = h, 4 * s * d // group  # a head's share of K and V
    pairs = b * owners
    fit = max(1, (tile.section << 20) // max(1, pair_bytes))  # pairs of a section, at most
    sections = mosaic.cdiv(pairs, fit)
    # All sections are equal: division by the width of a narrower last one is a function call, and
    # ptxas serializes every wgmma of a kernel that has a call (C7509, compiled relocatably).
    while pairs % sections:
        sections += 1
    section = pairs // sections
    short = levels // 3 if call.triangular else 0

    # Longest items first, so that short ones fill the gaps at the end; but section after section of
    # the pairs, so that the columns being streamed stay in the L2 cache (50 MB).  Because a block
    # takes its next item early, the shortest third of all pairs' items comes last.
    def in_sections(item):
        number, rest = mosaic.divide(item, section * (levels - short))
        level, pair = mosaic.divide(rest, section)
        return level, number * section + pair

    late = lambda item: mosaic.divide(item, pairs)

    def where(item):
        early = item < pairs * (levels - short)
        level, pair = lax.cond(early, in_sections, late, item) if short else in_sections(item)
        return first_row(level), mosaic.divide(pair, owners)

    items = levels * pairs
    grid = min(items, mosaic.sm_count()) if tile.persistent else items
    columns = (width_of(d),) if call.general else blocks_of(q, k)
    return Schedule(
        visits, tile.wgs, tile.step, tile.stages, block, lead, items, grid, where, q.dtype, columns,
        group, k_first, v_first, call.scale, call.softcap, call.segmented,
    )  # fmt: skip


def width_of(head_dim: int) -> int:
    """Columns of the general form's tiles in shared memory; those past D are zeros."""
    return next(width for width in (32, 64, 96, 128, 256) if width >= head_dim)


class Worker(NamedTuple):
    """One warpgroup of a block, with what its kernel's functions use."""

    schedule: Schedule
    inputs: Any  # references to global memory, by name; ids and `spans` may be None
    results: tuple
    smem: Any  # what the kernel's `scratch` lists, by name
    tma: Any  # the same memory in the layout that TMA copies
    wg: Any

    @property
    def cuts(self) -> list:
        """The columns of each block; TMA fills those past D with zeros, and never writes them."""
        d, blocks = self.inputs.q.shape[3], self.schedule.blocks
        # A variable because JAX 0.12 rejects slices that are statically too wide.
        start = lambda at, n: at + (lax.rem(self.wg, jnp.int32(1)) if at + n > d else 0)
        return [pl.ds(start(n * blocks[0], x), x) for n, x in enumerate(blocks)]


def launch(
    name: str, body, tile: Tiles, call: Call, inputs: dict, segments, out_type, scratch,
    by_keys=False, counter=None,
):  # fmt: skip
    """Calls a kernel with body(a Worker).

    inputs: arrays by name.  segments: ids of the queries and of the keys, or None.  scratch: gives
    the shared memory and barriers of a Schedule by name.  by_keys: a block owns keys, not queries.
    counter: a reference to an array of one 0, made here by default.
    """
    s = schedule_of(inputs["q"], inputs["k"], tile, call, by_keys)
    q_ids, k_ids = segments or (None, None)
    inputs = inputs | dict(q_ids=q_ids, k_ids=k_ids, spans=None)
    if segments is not None:
        rows, columns = (k_ids, q_ids) if by_keys else (q_ids, k_ids)
        inputs["spans"] = segment_spans(rows, columns, s.visits, s.block, s.part, s.lead)

    memory = scratch(s) | s.numbers()

    def run(arrays, counter, *results, **smem):
        refs = SimpleNamespace(**dict(zip(inputs, arrays, strict=True)), counter=counter)
        both = {k: smem[k] for k, kind in memory.items() if isinstance(kind, plgpu.RefUnion)}
        view = lambda n: SimpleNamespace(**smem | {name: views[n] for name, views in both.items()})
        body(Worker(s, refs, results, view(0), view(1), lax.axis_index("wg")))

    kernel = mosaic.kernel(
        run,
        name=name,
        out_type=out_type,
        scratch_types=memory,
        **mosaic.grid(block=s.grid),
        num_threads=s.wgs,
        # Row sums need no scratch, and some calls leave no shared memory for it.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )
    if counter is not None or not s.persistent:
        return kernel(tuple(inputs.values()), counter)
    zero = jnp.zeros((1,), jnp.int32)
    return mosaic.in_place(lambda ref, *x: kernel(x, ref), zero, *inputs.values(), results=True)[1]


def forward_results(q, call: Call):
    """The types of O (B, T, H, D) and of the log-sum-exp (B, H, stat_rows(T))."""
    b, t, h, d = q.shape
    h = h if call.heads is None else call.heads[0]
    lse = jax.ShapeDtypeStruct((b, h, stat_rows(t)), jnp.float32)
    return jax.ShapeDtypeStruct((b, t, h, d), q.dtype), lse


def store_rows(w: Worker, name: str, at, value, target, batch, row, head) -> None:
    """Starts to copy 64 rows from registers through a buffer to target[batch, row:, head]."""
    for n, block in enumerate(blocks(tiles_at(getattr(w.smem, name), at))):
        start = n * w.schedule.blocks[0]
        block[...] = value[:, start : start + block.shape[1]].astype(block.dtype)
    plgpu.commit_smem()
    for block, cut in zip(blocks(tiles_at(getattr(w.tma, name), at)), w.cuts, strict=True):
        plgpu.copy_smem_to_gmem(block, target.at[batch, pl.ds(row, ROWS), head, cut])


def tiles_at(buffers: list, *at) -> list:
    """One tile: for each width an array (blocks of this width, rows, width)."""
    return [buffer.at[at] for buffer in buffers]


def blocks(tile: list) -> list:
    """The blocks of a tile, each (rows, width)."""
    return [x.at[n] for x in tile for n in range(x.shape[0])]


def copy_rows(w: Worker, ref, batch, rows, head, buffers: list, at, bar) -> None:
    """Starts to copy rows of a head to the buffers' tile `at`; arrives once for each block."""
    for block, cut in zip(blocks(tiles_at(buffers, at)), w.cuts, strict=True):
        plgpu.copy_gmem_to_smem(ref.at[batch, rows, head, cut], block, bar)


def over_columns(acc, rows: list, tile: list) -> None:
    """acc += rows times a tile, transposed: a wgmma for each block."""
    for x, y in zip(blocks(rows), blocks(tile), strict=True):
        plgpu.wgmma(acc, x, y.transpose((1, 0)))


def stat_rows(t: int) -> int:
    """Length of the arrays of row statistics (lse, delta) for t queries.

    It is a whole number of every kernel's blocks, because TMA copies a contiguous row by a plain
    bulk copy, which does not stop at the end of the row.
    """
    return mosaic.cdiv(t, 6 * ROWS) * 6 * ROWS
