"""A matmul on Hopper whose results go through a function of theirs before they leave the SM.

    acc = a b^T (float32),   outputs = tile(*inputs, acc)   element by element

XLA's matmul writes its product, and the kernel after it reads it again; here that function works on
the accumulator.  Of use where it reads and writes much, as the backward pass of an activation does.

One block stays on each SM and takes tile after tile of 128 x 128.  It has four warpgroups: two that
compute, and two that only issue TMA copies, of steps of a and b into a ring of `stages` buffers and
of chunks of the inputs into one of `slots`.  The computing two take turns ("ping-pong"): while one
has the tensor core for its tile, the other does what comes after the matmul for the tile before.
Outputs leave through the buffers of the inputs, where a thread overwrites what it alone has read.
"""

import functools
from typing import NamedTuple

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
_REGISTERS = 232, 24  # of a computing thread and of a copying one: 65536 for four warpgroups


class Plan(NamedTuple):
    """How the kernel is cut up."""

    stages: int  # steps of a and b in flight, 32 KB each
    slots: int  # chunks of the inputs in flight or on their way out, 16 KB for each array
    group: int  # rows of tiles that are worked on together, column by column
    turns: bool = True  # a computing warpgroup begins when the other has issued its last wgmma
    registers: tuple[int, int] = _REGISTERS
    part: int = 64
    cluster: int = 1  # blocks, of neighbouring rows of tiles, that get b by one multicast copy


def why_not(a, b, inputs=()) -> str | None:
    """Why the kernel cannot take this call, or None."""
    (n, k), f = a.shape, b.shape[0]
    for name, x in {"a": a, "b": b, **{f"inputs[{i}]": x for i, x in enumerate(inputs)}}.items():
        if x.dtype != a.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
            return f"{name} is {x.dtype}: all must be bfloat16, or all float16"
    for name, size, multiple in (("N", n, _TILE), ("F", f, _TILE), ("K", k, _STEP)):
        if size == 0 or size % multiple:
            return f"{name}={size} is no multiple of {multiple}"
    return None


@functools.partial(jax.jit, static_argnames=("tile", "outputs", "sums", "name", "plan", "sms"))
def matmul_then(a, b, inputs, tile, *, outputs=1, sums=False, name, plan: Plan, sms: int):
    """A tuple of `outputs` arrays (N, F) of a's dtype: tile(*inputs, a b^T), computed in float32.

    a (N, K), b (F, K), inputs: tuple of arrays (N, F).
    sums: the last of the tuple is the float32 sum over the rows of the first output, (F,).
    sms: blocks of the grid.
    """
    (n, k), f = a.shape, b.shape[0]
    dtype = a.dtype
    stages, slots, group, turns, registers, part, cluster = plan
    rows, columns, steps, chunks = n // _TILE, f // _TILE, k // _STEP, _TILE // _CHUNK
    group = min(group, rows)
    sms = min(sms, rows * columns) // cluster * cluster
    assert slots >= 2, "a chunk leaves while the next one is computed"
    assert rows % cluster == 0
    assert group % cluster == 0
    clusters, tiles = sms // cluster, rows * columns // cluster  # a cluster takes that many tiles
    buffers = max(len(inputs), outputs)

    def body(a_ref, b_ref, *refs):
        sources, refs = refs[: len(inputs)], refs[len(inputs) :]
        targets, refs = refs[:outputs], refs[outputs:]
        sums_ref, refs = (refs[0], refs[1:]) if sums else (None, refs)
        a_smem, b_smem, *refs = refs
        smems, (full, free, in_full, in_free, turn, then_turn) = refs[:buffers], refs[buffers:]
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        rank = lax.axis_index("cluster") if cluster > 1 else 0
        count = lax.div(tiles - 1 - block, jnp.int32(clusters)) + 1  # tiles of this block
        stage_of = lambda n: lax.rem(n, jnp.int32(stages))
        slot_of = lambda n: lax.rem(n, jnp.int32(slots))

        def where(i):
            """(row, column) of this block's i-th tile; `group` rows share a and b in the L2."""
            tile = block + i * clusters
            height = group // cluster
            above = lax.div(tile, jnp.int32(height * columns)) * height
            rest = tile - above * columns
            height = jnp.minimum(height, rows // cluster - above)  # the last group may be a low one
            return (above + lax.rem(rest, height)) * cluster + rank, lax.div(rest, height)

        def compute():
            plgpu.set_max_registers(registers[0], action="increase")
            other = 1 - wg

            def multiply(i, acc):
                first = i * steps

                def step(n):
                    stage = stage_of(n)
                    plgpu.barrier_wait(full.at[wg * stages + stage])
                    plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage].transpose((1, 0)))

                if turns:
                    plgpu.barrier_wait(turn.at[wg])
                step(first)

                @pl.loop(first + 1, first + steps)
                def _(n):
                    step(n)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(free.at[stage_of(n - 1)])

                if turns:
                    plgpu.barrier_arrive(turn.at[other])
                product = acc[...]
                plgpu.barrier_arrive(free.at[stage_of(first + steps - 1)])
                return product

            def then(i, product):
                row, column = where(i)
                row_slice = pl.ds(row * _TILE, _TILE)
                for c in range(chunks):
                    n = i * chunks + c
                    slot = slot_of(n)
                    plgpu.barrier_wait(in_full.at[wg * slots + slot])
                    total = 0
                    for r in range(0, _TILE, part):  # fewer rows take fewer registers
                        some = pl.ds(r, part)
                        xs = [
                            plgpu.load(smem.at[slot, some], layout=WGMMA).astype(jnp.float32)
                            for smem in smems[: len(inputs)]
                        ]
                        ys = tile(*xs, product[r : r + part, c * _CHUNK : (c + 1) * _CHUNK])
                        for smem, y in zip(smems, ys, strict=False):
                            smem[slot, some] = y.astype(dtype)
                        if sums:
                            total += ys[0]
                    plgpu.commit_smem()
                    here = pl.ds(column * _TILE + c * _CHUNK, _CHUNK)
                    for smem, target in zip(smems, targets, strict=False):
                        plgpu.copy_smem_to_gmem(smem.at[slot], target.at[row_slice, here])
                    if sums_ref is not None:
                        mosaic.store(sums_ref.at[row, here], jnp.sum(total, axis=0))
                    if c:
                        release(n - 1, outputs)
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
                if sums:  # jnp.sum's scratch memory is that of the block
                    plgpu.barrier_wait(then_turn.at[wg])
                then(i, product)
                if sums:
                    plgpu.barrier_arrive(then_turn.at[other])

            plgpu.wait_smem_to_gmem(0)

        def copy_operands():
            plgpu.set_max_registers(registers[1], action="decrease")

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
                    plgpu.copy_gmem_to_smem(
                        b_ref.at[column_slice, at], b_smem.at[stage], bar,
                        collective_axes="cluster" if cluster > 1 else None,
                    )  # fmt: skip

            if cluster > 1:  # stay until the other blocks have said all that they say to this one

                @pl.loop(jnp.maximum(count * steps, stages), count * steps + stages)
                def _(n):
                    plgpu.barrier_wait(free.at[stage_of(n)])

        def copy_inputs():
            plgpu.set_max_registers(registers[1], action="decrease")

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

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_arrive(turn.at[0])
            plgpu.barrier_arrive(then_turn.at[0])

        pl.when(wg < 2)(compute)
        pl.when(wg == 2)(copy_operands)
        pl.when(wg == 3)(copy_inputs)

    body.__name__ = name
    like = jax.ShapeDtypeStruct((n, f), dtype)
    smem = lambda count, cols: plgpu.SMEM(
        (count, _TILE, cols), dtype, transforms=mosaic.wgmma_tiles(cols, dtype)
    )
    free = plgpu.Barrier(num_barriers=stages)
    if cluster > 1:
        free = plgpu.ClusterBarrier(collective_axes=("cluster",), num_barriers=stages)
    results = plgpu.kernel(
        body,
        out_type=[like] * outputs + [jax.ShapeDtypeStruct((rows, f), jnp.float32)] * sums,
        scratch_types=[
            *[smem(stages, _STEP)] * 2,
            *[smem(slots, _CHUNK)] * buffers,
            plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages),
            free,
            plgpu.Barrier(num_arrivals=len(inputs), num_barriers=2 * slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(clusters,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("cluster",) if cluster > 1 else (),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, *inputs)
    return (*results[:outputs], results[outputs].sum(0)) if sums else tuple(results)
