"""A matmul on Hopper with an elementwise epilogue.

    acc = a b^T (float32),   outputs = tile(*inputs, acc)   element by element

XLA's matmul writes its product, and the next kernel reads it again; here the epilogue works on the
accumulator.  This pays off for an epilogue that reads and writes much, such as the backward pass of
an activation.

A persistent block on each SM computes tiles of 128 x 128.  Its two warpgroups alternate
("ping-pong"): while one uses the tensor core, the other runs the epilogue of the previous tile.

    warpgroup 0   | matmul, tile 0 | epilogue 0     | matmul, tile 2 | epilogue 2     | ...
    warpgroup 1                    | matmul, tile 1 | epilogue 1     | matmul, tile 3 | ...

    step s of K      a, b (128, 64)         ring of `stages` buffers,   step_bars[wg, stage]
    chunk c of F     each input (128, 64)   a buffer for each of two,   chunk_bars[wg, c]

The buffers are filled in the order of the tiles.  The warpgroup that has read one refills it at
once, perhaps for the other warpgroup's tile, so no warpgroup waits for a free buffer; each waits
only for its own tiles, at its own barriers.  The outputs overwrite the inputs in their buffers;
each thread overwrites only what it has read itself.

wgmma computes b a^T, the product transposed; loads and stores of the chunks transpose.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA
from pallas_kernels.pipeline import Ring

# The best of the sweeps in docs/performance.md that spill no registers.
_ROWS, _COLUMNS = 128, 128  # of a tile
_STEP = 64  # of K: 128 bytes, one swizzle
_CHUNK = 64  # columns of the inputs in one copy
_CHUNKS = _COLUMNS // _CHUNK
_STAGES = 5  # buffers for steps, 32 KB each
_PART = 32  # rows of a chunk computed at a time
_GROUP = 8  # rows of tiles in a group; blocks work on one group at a time


class _Tiles(NamedTuple):
    rows: int
    columns: int
    steps: int  # of K
    stages: int  # buffers for steps
    blocks: int


def why_not(weight, *inputs) -> str | None:
    """Why the kernel does not support the backward pass of f(*inputs) @ weight, or None.

    inputs: arrays (..., F), weight: (F, C).
    """
    x, (f, c) = inputs[0], weight.shape
    for y in (weight, *inputs):
        if y.dtype != x.dtype or y.dtype not in (jnp.bfloat16, jnp.float16):
            return f"weight is {weight.dtype}, inputs are {x.dtype}, not bfloat16 or float16"
    reason = mosaic.not_a_multiple(_ROWS, rows=x.size // max(f, 1))
    reason = reason or mosaic.not_a_multiple(_COLUMNS, F=f)
    return reason or mosaic.not_a_multiple(_STEP, C=c)


@jax.jit(static_argnames=("tile", "name"))
def matmul_with_epilogue(a, b, inputs, tile, *, name):
    """tile(*inputs, a b^T) in float32: as many arrays (N, F) of a's dtype as there are inputs.

    a: (N, K), b: (F, K), inputs: tuple of one or two arrays (N, F).
    """
    (n, k), f = a.shape, b.shape[0]
    rows, columns, steps = mosaic.cdiv(n, _ROWS), f // _COLUMNS, k // _STEP
    t = _Tiles(rows, columns, steps, min(_STAGES, steps), min(mosaic.sm_count(), rows * columns))
    smem = lambda count, rows: mosaic.tiled(count, rows, 64, dtype=a.dtype)
    return mosaic.kernel(
        functools.partial(_body, t, tile),
        name=name,
        out_type=[(jax.ShapeDtypeStruct((n, f), a.dtype),) * len(inputs)],
        scratch_types=dict(
            a_smem=smem(t.stages, _ROWS),
            b_smem=smem(t.stages, _COLUMNS),
            chunk_smems=(smem(_CHUNKS, _ROWS),) * len(inputs),
            step_bars=plgpu.Barrier(num_arrivals=2, num_barriers=2 * t.stages),
            chunk_bars=plgpu.Barrier(num_arrivals=len(inputs), num_barriers=2 * _CHUNKS),
        ),
        **mosaic.grid(block=t.blocks),
        num_threads=2,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, inputs)[0]


class _Block(NamedTuple):
    """A block's work, as one of its two warpgroups sees it."""

    t: _Tiles
    refs: Any  # arrays, shared memory and barriers, by name
    wg: Any
    block: Any
    count: Any  # of tiles

    def place(self, i):
        """(row, column) of the block's i-th tile, or of its last tile if i is too large."""
        tile = self.block + jnp.minimum(i, self.count - 1) * self.t.blocks
        # Tiles that run together share rows of a and b in L2.
        above = lax.div(tile, jnp.int32(_GROUP * self.t.columns)) * _GROUP
        height = jnp.minimum(_GROUP, self.t.rows - above)  # the last group may have fewer rows
        rest = tile - above * self.t.columns
        return above + lax.rem(rest, height), lax.div(rest, height)

    def chunk(self, place, c):
        row, column = place
        return pl.ds(row * _ROWS, _ROWS), pl.ds(column * _COLUMNS + c * _CHUNK, _CHUNK)

    def copy_step(self, i, place, step):
        """Starts the copies of a step of the i-th tile, for the warpgroup that computes it."""
        (row, column), refs, stages = place, self.refs, self.t.stages
        ring = Ring(stages, refs.step_bars, first=lax.rem(i, jnp.int32(2)) * stages)
        n, at = i * self.t.steps + step, pl.ds(step * _STEP, _STEP)
        ring.send(n, refs.a.at[pl.ds(row * _ROWS, _ROWS), at], refs.a_smem)
        ring.send(n, refs.b.at[pl.ds(column * _COLUMNS, _COLUMNS), at], refs.b_smem)

    def copy_chunk(self, i, place, c):
        """Starts the copies of a chunk of the i-th tile's inputs."""
        bar = self.refs.chunk_bars.at[lax.rem(i, jnp.int32(2)) * _CHUNKS + c]
        for source, smem in zip(self.refs.inputs, self.refs.chunk_smems, strict=True):
            plgpu.copy_gmem_to_smem(source.at[self.chunk(place, c)], smem.at[c], bar)


def _body(t: _Tiles, tile, a, b, inputs, outputs, **smem):
    """Fills the buffers; then the warpgroups alternate over the block's tiles."""
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(t.rows * t.columns - 1 - block, jnp.int32(t.blocks)) + 1
    refs = SimpleNamespace(a=a, b=b, inputs=inputs, outputs=outputs, **smem)
    mine = _Block(t, refs, wg, block, count)

    @pl.when(wg == 0)
    def _():
        first = mine.place(0)
        pl.loop(0, t.stages)(lambda step: mine.copy_step(0, first, step))
        for c in range(_CHUNKS):
            mine.copy_chunk(0, first, c)

    @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
    def _(j):
        i = 2 * j + wg
        here, after = mine.place(i), mine.place(i + 1)
        run = functools.partial(_multiply, mine, i, here, after)
        product = pl.run_scoped(run, plgpu.ACC((_COLUMNS, _ROWS), jnp.float32))
        _epilogue(mine, tile, i, here, after, product)

    plgpu.wait_smem_to_gmem(0)


def _multiply(mine: _Block, i, here, after, acc):
    """b a^T of the i-th tile; refills each stage once its wgmma has read it."""
    steps, stages = mine.t.steps, mine.t.stages

    def multiply_step(step):
        ring = Ring(stages, mine.refs.step_bars, first=mine.wg * stages)
        stage = ring.wait(i * steps + step)
        plgpu.wgmma(acc, mine.refs.b_smem.at[stage], mine.refs.a_smem.at[stage].transpose((1, 0)))

    def refill(step):  # loads the step that comes `stages` steps later into this step's buffer
        step += stages
        over = lax.convert_element_type(step >= steps, jnp.int32)  # 1: in the next tile
        at = [jnp.where(over, y, x) for x, y in zip(here, after, strict=True)]
        copy = functools.partial(mine.copy_step, i + over, at, step - over * steps)
        pl.when(i + over < mine.count)(copy)

    multiply_step(0)

    @pl.loop(1, steps)
    def _(step):
        multiply_step(step)
        plgpu.wgmma_wait(1)
        refill(step - 1)

    product = acc[...]
    refill(jnp.int32(steps - 1))
    return product


def _epilogue(mine: _Block, tile, i, here, after, product):
    """Computes the outputs of the i-th tile where its inputs lie, and stores them."""

    def refill(c, in_flight):  # its buffers, once <= in_flight stores are pending
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        pl.when(i + 1 < mine.count)(lambda: mine.copy_chunk(i + 1, after, c))

    for c in range(_CHUNKS):
        plgpu.barrier_wait(mine.refs.chunk_bars.at[mine.wg * _CHUNKS + c])
        smems = [smem.at[c] for smem in mine.refs.chunk_smems]
        for r in range(0, _ROWS, _PART):
            parts = [smem.at[pl.ds(r, _PART)].transpose((1, 0)) for smem in smems]
            xs = [plgpu.load(part, layout=WGMMA).astype(jnp.float32) for part in parts]
            own = product[c * _CHUNK : (c + 1) * _CHUNK][:, r : r + _PART]
            for part, y in zip(parts, tile(*xs, own), strict=True):
                part[...] = y.astype(part.dtype)
        plgpu.commit_smem()
        for smem, target in zip(smems, mine.refs.outputs, strict=True):
            plgpu.copy_smem_to_gmem(smem, target.at[mine.chunk(here, c)])
        if c:
            refill(c - 1, len(smems))
    refill(_CHUNKS - 1, 0)
