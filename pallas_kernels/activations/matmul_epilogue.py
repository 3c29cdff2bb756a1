"""A matmul on Hopper whose results go through a function of theirs before they leave the SM.

    acc = a b^T (float32),   outputs = tile(*inputs, acc)   element by element

XLA's matmul writes its product, and the kernel after it reads it again; here that function works on
the accumulator.  Of use where it reads and writes much, as the backward pass of an activation does.

One block stays on each SM and takes tile after tile of 128 x 128.  Its two warpgroups take every
other tile each: while one has the tensor core, the other does what comes after the matmul for the
tile before ("ping-pong").  Steps of a and b come through one ring of `_STAGES` buffers, chunks of
the inputs through another, both in the order of the tiles.  Who has read a buffer fills it again at
once, if need be for the other warpgroup's tile: so nobody ever waits for a buffer to be free.
Outputs leave through the buffers of the inputs, where a thread overwrites what it alone has read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA

_TILE = 128  # rows and columns of a tile: 128 accumulators a thread
_STEP = 64  # of K: 128 bytes, one swizzle
_CHUNK = 64  # columns of the inputs that are copied at a time
_PART = 64  # rows of a chunk that are computed at a time: all 128 spill in GELU (ptxas 13.5)

# Buffers of 32 KB for steps, and of 64 KB in all for chunks; rows of tiles worked on together.  GPU
# ms on an H100 of the backward pass of SwiGLU in llama3_124m, in llama3_1b, of GELU in gpt2_124m:
#
#   stages, slots    124m   1b     stages, slots  GELU    group   124m   1b     GELU
#   5, 2             0.250  0.493  5, 4           0.362   8       0.250  0.493  0.362
#   4, 3             0.265  0.524  4, 6           0.357   16      0.253  0.497  0.360
#   3, 4             0.303         6, 2           0.374   32             0.518
#   matmul, kernel   0.369  0.582                 0.445
#
# Within 2% of it: b by multicast to two blocks; a strict order of the two warpgroups' matmuls.
# Since then: the sigmoid by rsqrt (0.244, 0.490, 0.338), only GELU's sums in turn (0.32).
_STAGES = 5
_SLOTS = 4  # of one array; of two arrays half as many
_GROUP = 8


def linear_why_not(weight, *inputs) -> str | None:
    """Why the kernel cannot make the backward pass of f(*inputs) @ weight, or None.

    inputs: arrays (..., F), weight: (F, C).
    """
    x, (f, c) = inputs[0], weight.shape
    for y in (weight, *inputs):
        if y.dtype != x.dtype or y.dtype not in (jnp.bfloat16, jnp.float16):
            return f"weight is {weight.dtype}, inputs are {x.dtype}, not bfloat16 or float16"
    for name, size, multiple in (
        ("rows", x.size // max(f, 1), _TILE),
        ("F", f, _TILE),
        ("C", c, _STEP),
    ):
        if size == 0 or size % multiple:
            return f"{name}={size} is no multiple of {multiple}"
    return None


def linear_backward(inputs, h, weight, dy, tile, **options):
    """Gradients of h @ weight, h = f(*inputs): what `matmul_then` gives, and that of weight.

    inputs, h: (N, F), weight: (F, C), dy: (N, C); tile(*inputs, dh): the backward pass of f.
    """
    gradients = matmul_then(dy, weight, inputs, tile, sms=mosaic.sm_count(), **options)
    return *gradients, jnp.matmul(h.T, dy, preferred_element_type=weight.dtype)


@functools.partial(jax.jit, static_argnames=("tile", "outputs", "sums", "name", "sms"))
def matmul_then(a, b, inputs, tile, *, outputs=1, sums=False, name, sms: int):
    """A tuple of `outputs` arrays (N, F) of a's dtype: tile(*inputs, a b^T), computed in float32.

    a (N, K), b (F, K), inputs: tuple of arrays (N, F).
    sums: the last of the tuple is the float32 sum over the rows of the first output, (F,).
    sms: blocks of the grid.
    """
    (n, k), f = a.shape, b.shape[0]
    dtype = a.dtype
    rows, columns, steps, chunks = n // _TILE, f // _TILE, k // _STEP, _TILE // _CHUNK
    blocks = min(sms, rows * columns)
    buffers = max(len(inputs), outputs)
    stages = min(_STAGES, steps)
    slots = _SLOTS // buffers
    ahead = slots // chunks  # tiles whose inputs there are buffers for

    def body(a_ref, b_ref, *refs):
        sources, refs = refs[: len(inputs)], refs[len(inputs) :]
        targets, refs = refs[:outputs], refs[outputs:]
        sums_ref, refs = (refs[0], refs[1:]) if sums else (None, refs)
        a_smem, b_smem, *refs = refs
        smems, (full, in_full, turn) = refs[:buffers], refs[buffers:]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        count = lax.div(rows * columns - 1 - block, jnp.int32(blocks)) + 1  # tiles of this block
        stage_of = lambda i, s: lax.rem(i * steps + s, jnp.int32(stages))
        slot_of = lambda i, c: lax.rem(i, jnp.int32(ahead)) * chunks + c

        def where(i):
            """(row, column) of this block's i-th tile; neighbours share a and b in the L2.

            Past the last tile: those of the last.
            """
            tile = block + jnp.minimum(i, count - 1) * blocks
            above = lax.div(tile, jnp.int32(_GROUP * columns)) * _GROUP
            height = jnp.minimum(_GROUP, rows - above)  # the last group may be a low one
            rest = tile - above * columns
            return above + lax.rem(rest, height), lax.div(rest, height)

        def copy_step(i, row, column, s):
            """Step s of a and b of the i-th tile."""
            stage = stage_of(i, s)
            bar = full.at[lax.rem(i, jnp.int32(2)) * stages + stage]
            at = pl.ds(s * _STEP, _STEP)
            for ref, smem, first in (a_ref, a_smem, row), (b_ref, b_smem, column):
                source = ref.at[pl.ds(first * _TILE, _TILE), at]
                plgpu.copy_gmem_to_smem(source, smem.at[stage], bar)

        def copy_chunk(i, row, column, c):
            """Chunk c of the inputs of the i-th tile."""
            slot = slot_of(i, c)
            bar = in_full.at[lax.rem(i, jnp.int32(2)) * slots + slot]
            at = pl.ds(row * _TILE, _TILE), pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
            for source, smem in zip(sources, smems, strict=False):
                plgpu.copy_gmem_to_smem(source.at[at], smem.at[slot], bar)

        def multiply(i, here, acc):
            after = where(i + 1)

            def step(s):
                stage = stage_of(i, s)
                plgpu.barrier_wait(full.at[wg * stages + stage])
                plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage].transpose((1, 0)))

            def refill(s):  # the buffer of step s, with what comes `stages` steps later
                s += stages
                over = lax.convert_element_type(s >= steps, jnp.int32)  # 1: in the next tile
                row, column = (jnp.where(over, y, x) for x, y in zip(here, after, strict=True))

                @pl.when(i + over < count)
                def _():
                    copy_step(i + over, row, column, s - over * steps)

            step(0)

            @pl.loop(1, steps)
            def _(s):
                step(s)
                plgpu.wgmma_wait(1)
                refill(s - 1)

            product = acc[...]
            refill(jnp.int32(steps - 1))
            return product

        def then(i, here, product):
            row, column = here
            row_slice = pl.ds(row * _TILE, _TILE)
            later = i + ahead
            there = where(later)

            def refill(c, under_way):  # the buffer of chunk c, after `under_way` stores at most
                plgpu.wait_smem_to_gmem(under_way, wait_read_only=True)
                pl.when(later < count)(lambda: copy_chunk(later, *there, c))

            totals = [0] * chunks
            for c in range(chunks):
                slot = slot_of(i, c)
                plgpu.barrier_wait(in_full.at[wg * slots + slot])
                for r in range(0, _TILE, _PART):
                    some = pl.ds(r, _PART)
                    xs = [
                        plgpu.load(smem.at[slot, some], layout=WGMMA).astype(jnp.float32)
                        for smem in smems[: len(inputs)]
                    ]
                    ys = tile(*xs, product[r : r + _PART, c * _CHUNK : (c + 1) * _CHUNK])
                    for smem, y in zip(smems, ys, strict=False):
                        smem[slot, some] = y.astype(dtype)
                    if sums:
                        totals[c] += ys[0]
                plgpu.commit_smem()
                at = row_slice, pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                for smem, target in zip(smems, targets, strict=False):
                    plgpu.copy_smem_to_gmem(smem.at[slot], target.at[at])
                if c:
                    refill(c - 1, outputs)
            if sums_ref is not None:  # in turn: jnp.sum's scratch memory is that of the block
                plgpu.barrier_wait(turn.at[wg])
                for c, total in enumerate(totals):
                    at = row, pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                    mosaic.store(sums_ref.at[at], jnp.sum(total, axis=0))
                plgpu.barrier_arrive(turn.at[1 - wg])
            refill(chunks - 1, 0)

        @pl.when(wg == 0)
        def _():
            if sums:
                plgpu.barrier_arrive(turn.at[0])
            first = where(0)
            pl.loop(0, stages)(lambda s: copy_step(0, *first, s))
            for i in range(ahead):
                for c in range(chunks):
                    pl.when(i < count)(lambda i=i, c=c: copy_chunk(i, *where(i), c))

        @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
        def _(j):
            i = 2 * j + wg
            here = where(i)
            acc = plgpu.ACC((_TILE, _TILE), jnp.float32)
            product = pl.run_scoped(functools.partial(multiply, i, here), acc)
            then(i, here, product)

        plgpu.wait_smem_to_gmem(0)

    body.__name__ = name
    like = jax.ShapeDtypeStruct((n, f), dtype)
    smem = lambda count, cols: plgpu.SMEM(
        (count, _TILE, cols), dtype, transforms=mosaic.wgmma_tiles(cols, dtype)
    )
    results = mosaic.kernel(
        body,
        out_type=[like] * outputs + [jax.ShapeDtypeStruct((rows, f), jnp.float32)] * sums,
        scratch_types=[
            *[smem(stages, _STEP)] * 2,
            *[smem(slots, _CHUNK)] * buffers,
            plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages),
            plgpu.Barrier(num_arrivals=len(inputs), num_barriers=2 * slots),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, *inputs)
    return (*results[:outputs], results[outputs].sum(0)) if sums else tuple(results)
