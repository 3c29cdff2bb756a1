"""A matmul on Hopper whose results go through a function of theirs before they leave the SM.

    acc = a b^T (float32),   outputs = tile(*inputs, acc)   element by element

XLA's matmul writes its product, and the kernel after it reads it again; here that function works on
the accumulator.  Of use where it reads and writes much, as the backward pass of an activation does.

One block stays on each SM and takes tile after tile of 128 x 128.  It has four warpgroups: two that
compute, every other tile each, and two that only issue TMA copies, of steps of a and b into a ring
of `_STAGES` buffers and of chunks of the inputs into a ring of their own.  While one computing
warpgroup has the tensor core, the other does what comes after the matmul for the tile before
("ping-pong").  Outputs leave through the buffers of the inputs, where a thread overwrites what it
alone has read.
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
_PART = 64  # rows of a chunk that are computed at a time: all 128 would spill
_REGISTERS = 232, 24  # of a computing thread and of a copying one: 65536 for four warpgroups

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
    stages, slots = _STAGES, _SLOTS // buffers

    def body(a_ref, b_ref, *refs):
        sources, refs = refs[: len(inputs)], refs[len(inputs) :]
        targets, refs = refs[:outputs], refs[outputs:]
        sums_ref, refs = (refs[0], refs[1:]) if sums else (None, refs)
        a_smem, b_smem, *refs = refs
        smems, (full, free, in_full, in_free, turn) = refs[:buffers], refs[buffers:]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        count = lax.div(rows * columns - 1 - block, jnp.int32(blocks)) + 1  # tiles of this block
        stage_of = lambda n: lax.rem(n, jnp.int32(stages))
        slot_of = lambda n: lax.rem(n, jnp.int32(slots))

        def where(i):
            """(row, column) of this block's i-th tile; neighbours share a and b in the L2."""
            tile = block + i * blocks
            above = lax.div(tile, jnp.int32(_GROUP * columns)) * _GROUP
            height = jnp.minimum(_GROUP, rows - above)  # the last group may be a low one
            rest = tile - above * columns
            return above + lax.rem(rest, height), lax.div(rest, height)

        def compute():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")

            def multiply(i, acc):
                first = i * steps

                def step(n):
                    stage = stage_of(n)
                    plgpu.barrier_wait(full.at[wg * stages + stage])
                    plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage].transpose((1, 0)))

                step(first)

                @pl.loop(first + 1, first + steps)
                def _(n):
                    step(n)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(free.at[stage_of(n - 1)])

                product = acc[...]
                plgpu.barrier_arrive(free.at[stage_of(first + steps - 1)])
                return product

            def then(i, product):
                row, column = where(i)
                row_slice = pl.ds(row * _TILE, _TILE)
                totals = [0] * chunks
                for c in range(chunks):
                    n = i * chunks + c
                    slot = slot_of(n)
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
                    here = pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                    for smem, target in zip(smems, targets, strict=False):
                        plgpu.copy_smem_to_gmem(smem.at[slot], target.at[row_slice, here])
                    if c:
                        release(n - 1, outputs)
                if sums_ref is not None:  # in turn: jnp.sum's scratch memory is that of the block
                    plgpu.barrier_wait(turn.at[wg])
                    for c, total in enumerate(totals):
                        here = pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                        mosaic.store(sums_ref.at[row, here], jnp.sum(total, axis=0))
                    plgpu.barrier_arrive(turn.at[1 - wg])
                release(i * chunks + chunks - 1, 0)

            def release(n, later):  # outputs of chunk n have left, `later` copies may be under way
                plgpu.wait_smem_to_gmem(later, wait_read_only=True)
                plgpu.barrier_arrive(in_free.at[slot_of(n)])

            @pl.loop(0, lax.div(count + 1 - wg, jnp.int32(2)))
            def _(j):
                i = 2 * j + wg
                product = pl.run_scoped(
                    functools.partial(multiply, i), plgpu.ACC((_TILE, _TILE), jnp.float32)
                )
                then(i, product)

            plgpu.wait_smem_to_gmem(0)

        def copy_operands():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")

            @pl.loop(0, count)
            def _(i):
                row, column = where(i)
                row_slice, column_slice = pl.ds(row * _TILE, _TILE), pl.ds(column * _TILE, _TILE)

                @pl.loop(0, steps)
                def _(s):
                    n = i * steps + s
                    stage = stage_of(n)
                    bar = full.at[lax.rem(i, jnp.int32(2)) * stages + stage]
                    pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                    at = pl.ds(s * _STEP, _STEP)
                    plgpu.copy_gmem_to_smem(a_ref.at[row_slice, at], a_smem.at[stage], bar)
                    plgpu.copy_gmem_to_smem(b_ref.at[column_slice, at], b_smem.at[stage], bar)

        def copy_inputs():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")

            @pl.loop(0, count)
            def _(i):
                row, column = where(i)
                for c in range(chunks):
                    n = i * chunks + c
                    slot = slot_of(n)
                    bar = in_full.at[lax.rem(i, jnp.int32(2)) * slots + slot]
                    pl.when(n >= slots)(lambda slot=slot: plgpu.barrier_wait(in_free.at[slot]))
                    at = pl.ds(row * _TILE, _TILE), pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                    for source, smem in zip(sources, smems, strict=False):
                        plgpu.copy_gmem_to_smem(source.at[at], smem.at[slot], bar)

        if sums:
            pl.when(wg == 0)(lambda: plgpu.barrier_arrive(turn.at[0]))
        pl.when(wg < 2)(compute)
        pl.when(wg == 2)(copy_operands)
        pl.when(wg == 3)(copy_inputs)

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
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=len(inputs), num_barriers=2 * slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, *inputs)
    return (*results[:outputs], results[outputs].sum(0)) if sums else tuple(results)
