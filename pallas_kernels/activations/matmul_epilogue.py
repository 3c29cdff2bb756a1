"""A matmul on Hopper with an elementwise epilogue.

    acc = a b^T (float32),   outputs = tile(*inputs, acc)   element by element

XLA's matmul writes its product, and the next kernel reads it again; here the epilogue works on the
accumulator.  This pays off for an epilogue that reads and writes much, such as the backward pass of
an activation.  The outputs may be columns of one array, which the next matmul takes as a whole.

A persistent block on each SM computes tiles of 128 or 192 x 128.  Its two warpgroups alternate
("ping-pong"): while one uses the tensor core, the other runs the epilogue of the previous tile.

    warpgroup 0   | matmul, tile 0 | epilogue 0     | matmul, tile 2 | epilogue 2     | ...
    warpgroup 1                    | matmul, tile 1 | epilogue 1     | matmul, tile 3 | ...

    step s of K      a (rows, 64)  b (128, 64)  ring of `stages` buffers,   step_bars[wg, stage]
    chunk c of F     each input (rows, 64)      ring of `slots` buffers,    chunk_bars[wg, slot]

Both rings are filled in the order of the tiles.  The warpgroup that has read a buffer refills it at
once, perhaps for the other warpgroup's tile, so no warpgroup waits for a free buffer; each waits
only for its own tiles, at its own barriers.  The outputs overwrite the inputs in their buffers,
each thread what it has read itself.  The chunks do without pipeline.Ring: a tile's inputs take a
fixed group of slots, found without a product in the index.

wgmma computes b a^T, the product transposed: a sum over the rows of a is then one along its rows,
which four neighbouring threads share.  Loads and stores of the chunks transpose.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA
from pallas_kernels.pipeline import Ring

_COLUMNS = 128  # of a tile
_STEP = 64  # of K: 128 bytes, one swizzle
_CHUNK = 64  # columns of the inputs in one copy


class _Tiles(NamedTuple):
    """How a tile is cut."""

    rows: int  # of a in a tile: as many accumulators a thread
    stages: int  # buffers for steps, 32 KB each with 128 rows, 40 with 192
    slots: int  # buffers of each array for chunks, 16 KB each with 128 rows, 24 with 192
    part: int  # rows of a chunk computed at a time
    group: int  # rows of tiles in a group; blocks work on one group at a time


def _tiles(inputs: int, tile) -> _Tiles:
    """The best of the sweep in docs/performance.md that spill no registers."""
    if inputs == 2:
        return _Tiles(128, 5, 2, 32, 8)
    return _Tiles(192, 4, 2, 64, 4) if tile is times else _Tiles(192, 3, 4, 32, 8)


def linear_why_not(weight, *inputs) -> str | None:
    """Why the kernel does not support the backward pass of f(*inputs) @ weight, or None.

    inputs: arrays (..., F), weight: (F, C).
    """
    x, (f, c) = inputs[0], weight.shape
    for y in (weight, *inputs):
        if y.dtype != x.dtype or y.dtype not in (jnp.bfloat16, jnp.float16):
            return f"weight is {weight.dtype}, inputs are {x.dtype}, not bfloat16 or float16"
    for name, size, multiple in (
        ("rows", x.size // max(f, 1), 128),
        ("F", f, _COLUMNS),
        ("C", c, _STEP),
    ):
        if size == 0 or size % multiple:
            return f"{name}={size} is not a positive multiple of {multiple}"
    return None


def linear_backward(slopes, h, weight, dy, **options):
    """Gradients of h @ weight for the inputs of h, whose derivatives are `slopes`, and for weight.

    slopes, h: (N, F), weight: (F, C), dy: (N, C).  options: joint, sums and name.
    """
    gradients = matmul_with_epilogue(dy, weight, slopes, times, sms=mosaic.sm_count(), **options)
    return *gradients, jnp.matmul(h.T, dy, preferred_element_type=weight.dtype)


def times(*inputs):
    """Each derivative times dh."""
    *slopes, dh = inputs
    return tuple(slope * dh for slope in slopes)


@functools.partial(jax.jit, static_argnames=("tile", "joint", "sums", "name", "sms"))
def matmul_with_epilogue(a, b, inputs, tile, *, joint=False, sums=False, name, sms: int):
    """tile(*inputs, a b^T) in float32: as many arrays (N, F) of a's dtype as there are inputs.

    a: (N, K), b: (F, K), inputs: tuple of arrays (N, F).
    joint: the outputs lie side by side in one array instead.
    sums: appends the float32 sum of the first output over the rows, (F,).
    sms: number of blocks.
    """
    (n, k), f = a.shape, b.shape[0]
    t = _tiles(len(inputs), tile)
    rows, columns, steps = mosaic.cdiv(n, t.rows), f // _COLUMNS, k // _STEP
    blocks = min(sms, rows * columns)
    s = Schedule(rows, columns, steps, min(t.stages, steps), t.slots, blocks, t.group)
    smem = lambda count, rows: plgpu.SMEM(
        (count, rows, 64), a.dtype, transforms=mosaic.wgmma_tiles(64, a.dtype)
    )
    width, count = (len(inputs) * f, 1) if joint else (f, len(inputs))
    results, total = mosaic.kernel(
        functools.partial(_body, s, t, tile),
        name=name,
        out_type=[
            (jax.ShapeDtypeStruct((n, width), a.dtype),) * count,
            jax.ShapeDtypeStruct((rows, f), jnp.float32) if sums else None,
        ],
        scratch_types=dict(
            a_smem=smem(s.stages, t.rows),
            b_smem=smem(s.stages, _COLUMNS),
            chunk_smems=(smem(s.slots, t.rows),) * len(inputs),
            step_bars=plgpu.Barrier(num_arrivals=2, num_barriers=2 * s.stages),
            chunk_bars=plgpu.Barrier(num_arrivals=len(inputs), num_barriers=2 * s.slots),
        ),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, inputs)
    return (*results, total.sum(0)) if sums else tuple(results)


class Schedule(NamedTuple):
    """Maps tiles to blocks, and the steps and chunks of tiles to buffers."""

    rows: int  # of tiles
    columns: int
    steps: int  # of K
    stages: int  # buffers for steps
    slots: int  # buffers for chunks of each input, or for parts of each output
    blocks: int
    group: int  # rows of tiles in a group

    @property
    def chunks(self) -> int:
        return _COLUMNS // _CHUNK

    @property
    def ahead(self) -> int:
        """Tiles whose inputs fit the buffers."""
        return self.slots // self.chunks

    def ring(self, bars, i) -> Ring:
        """The ring of steps, with the barriers of the warpgroup that computes the i-th tile."""
        return Ring(self.stages, bars, first=lax.rem(i, jnp.int32(2)) * self.stages)

    def slot(self, i, chunk):
        return lax.rem(i, jnp.int32(self.ahead)) * self.chunks + chunk


def _body(s: Schedule, t: _Tiles, tile, a, b, inputs, results, sums, **scratch):
    """Fills both rings; then the warpgroups alternate."""
    a_smem, b_smem, chunk_smems, step_bars, chunk_bars = scratch.values()
    f = b.shape[0]
    outputs = [y.at[:, pl.ds(at, f)] for y in results for at in range(0, y.shape[1], f)]
    rows_of = lambda row: pl.ds(row * t.rows, t.rows)

    def copy_step(ring, n, row, column, step):
        at = pl.ds(step * _STEP, _STEP)
        rows, columns = rows_of(row), pl.ds(column * _COLUMNS, _COLUMNS)
        ring.send(n, a.at[rows, at], a_smem)
        ring.send(n, b.at[columns, at], b_smem)

    def start_step(stage, acc):  # of b a^T
        plgpu.wgmma(acc, b_smem.at[stage], a_smem.at[stage].transpose((1, 0)))

    def copy_chunk(i, row, column, chunk):
        slot = s.slot(i, chunk)
        bar = chunk_bars.at[lax.rem(i, jnp.int32(2)) * s.slots + slot]
        at = rows_of(row), pl.ds(column * _COLUMNS + chunk * _CHUNK, _CHUNK)
        for source, smem in zip(inputs, chunk_smems, strict=True):
            plgpu.copy_gmem_to_smem(source.at[at], smem.at[slot], bar)

    def fill(mine: BlockTiles):
        for i, c in itertools.product(range(s.ahead), range(s.chunks)):
            send = lambda i=i, c=c: copy_chunk(i, *mine.place(i), c)
            pl.when(i < mine.count)(send)

    def epilogue(mine: BlockTiles, i, _, here, product):
        row, column = here
        later = i + s.ahead
        there = mine.place(later)

        def refill(chunk, in_flight):  # its buffer, once <= in_flight stores are pending
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            pl.when(later < mine.count)(lambda: copy_chunk(later, *there, chunk))

        for c in range(s.chunks):
            # Wait for the inputs and compute in their buffers.
            slot = s.slot(i, c)
            plgpu.barrier_wait(chunk_bars.at[mine.wg * s.slots + slot])
            smems = [smem.at[slot] for smem in chunk_smems]
            total = _compute(t, tile, smems, product[c * _CHUNK : (c + 1) * _CHUNK], sums)
            plgpu.commit_smem()

            # Store the outputs, and refill the buffers whose outputs have been copied.
            rows, columns = rows_of(row), pl.ds(column * _COLUMNS + c * _CHUNK, _CHUNK)
            for smem, target in zip(smems, outputs, strict=True):
                plgpu.copy_smem_to_gmem(smem, target.at[rows, columns])
            if sums is not None:
                mosaic.store(sums.at[row, columns], total)
            if c:
                refill(c - 1, len(outputs))
        refill(s.chunks - 1, 0)

    acc = plgpu.ACC((_COLUMNS, t.rows), jnp.float32)
    alternate(s, step_bars, [acc], copy_step, start_step, epilogue, fill)


def _compute(t: _Tiles, tile, smems, product, sums):
    """Overwrites the inputs of a chunk with its outputs; returns the sums of the first output."""
    total = 0
    for r in range(0, t.rows, t.part):
        parts = [smem.at[pl.ds(r, t.part)].transpose((1, 0)) for smem in smems]
        xs = [plgpu.load(part, layout=WGMMA).astype(jnp.float32) for part in parts]
        ys = tile(*xs, product[:, r : r + t.part])
        for part, y in zip(parts, ys, strict=True):
            part[...] = y.astype(part.dtype)
        if sums is not None:
            total += jnp.sum(ys[0], axis=1)
    return total


# ---- what the kernel shares with activated_matmul.py -------------------------------------------


class BlockTiles(NamedTuple):
    """A block's tiles, as one of its two warpgroups sees them."""

    schedule: Schedule
    wg: Any
    block: Any
    count: Any

    def place(self, i):
        """(row, column) of the block's i-th tile, or of its last tile if i is too large.

        Tiles that run at the same time share rows of a and b in the L2 cache.
        """
        s = self.schedule
        tile = self.block + jnp.minimum(i, self.count - 1) * s.blocks
        above = lax.div(tile, jnp.int32(s.group * s.columns)) * s.group
        height = jnp.minimum(s.group, s.rows - above)  # the last group may have fewer rows
        rest = tile - above * s.columns
        return above + lax.rem(rest, height), lax.div(rest, height)


def alternate(
    s: Schedule, step_bars, accs, copy_step, start_step, epilogue, fill=lambda mine: None
):
    """A block fills its rings; then its warpgroups alternate over its tiles.

    accs: the accumulators of a tile.
    copy_step(ring, n, row, column, step): starts the copies of a step of a tile, the ring's n-th.
    start_step(stage, *accs): starts a wgmma of a step for each accumulator.
    epilogue(mine, i, j, (row, column), *products): stores the block's i-th tile, of this
    warpgroup's the j-th.
    fill(mine): starts the other copies before the first tile.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(s.rows * s.columns - 1 - block, jnp.int32(s.blocks)) + 1
    mine = BlockTiles(s, wg, block, count)
    copy = lambda i, row, column, step: copy_step(
        s.ring(step_bars, i), i * s.steps + step, row, column, step
    )

    @pl.when(wg == 0)
    def _():
        first = mine.place(0)
        pl.loop(0, s.stages)(lambda step: copy(0, *first, step))
        fill(mine)

    @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
    def _(j):
        i = 2 * j + wg
        here = mine.place(i)
        run = functools.partial(_multiply, mine, step_bars, copy, start_step, i, here)
        epilogue(mine, i, j, here, *pl.run_scoped(run, *accs))

    plgpu.wait_smem_to_gmem(0)


def _multiply(mine: BlockTiles, step_bars, copy, start_step, i, here, *accs):
    """The products of the i-th tile; refills each stage once its wgmmas have read it."""
    s = mine.schedule
    after = mine.place(i + 1)

    def multiply_step(step):
        ring = Ring(s.stages, step_bars, first=mine.wg * s.stages)
        start_step(ring.wait(i * s.steps + step), *accs)

    def refill(step):  # loads the step that comes `stages` steps later into this step's buffer
        step += s.stages
        over = lax.convert_element_type(step >= s.steps, jnp.int32)  # 1: in the next tile
        row, column = (jnp.where(over, y, x) for x, y in zip(here, after, strict=True))
        pl.when(i + over < mine.count)(lambda: copy(i + over, row, column, step - over * s.steps))

    multiply_step(0)

    @pl.loop(1, s.steps)
    def _(step):
        multiply_step(step)
        plgpu.wgmma_wait(len(accs))
        refill(step - 1)

    products = [acc[...] for acc in accs]
    refill(jnp.int32(s.steps - 1))
    return products
