"""The vLSTM's states on Hopper: along the chunks of a head, with a tile of the state in registers.

    S <- decay S + (weight * X)^T Y          and writes S as it was before each chunk

(X, Y) = (k, v) gives C, and backwards in time (q, dh) gives dC.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

WGMMA = plgpu.Layout.WGMMA
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # one value for each row / column of a wgmma tile
ROWS = 64  # rows of one wgmma, and of one computing warpgroup


def narrow(x, dtype, saturate=True):
    """x in dtype; float16 saturates where asked to."""
    if dtype == jnp.float16 and saturate:
        x = jnp.clip(x, -65504.0, 65504.0)
    return x.astype(dtype)


def more_registers(wgs):
    if wgs > 1:  # 65,536 for all threads; blocks of 256 threads have enough as they are
        plgpu.set_max_registers({2: 240, 3: 160}[wgs], action="increase")


def fewer_registers(wgs):
    if wgs > 1:
        plgpu.set_max_registers({2: 24, 3: 32}[wgs], action="decrease")


@functools.partial(jax.jit, static_argnames=("reverse", "saturate"))
def states(x, y, weight, decay, first, other=None, *, reverse=False, saturate=True):
    """(states before each chunk (B,H,N,DX,DY) in x's dtype, the last one (B,H,DX,DY) float32).

    x: (B,T,H,DX), y: (B,T,H,DY), weight: (B,H,N,L), decay: (B,H,N), first: (B,H,DX,DY) float32.
    other: shaped like the states; given, the result has a third part, (B,H,N,tiles,DX) float32,
    whose sums over the last two axes are the inner products of the states (not rounded) with it.
    reverse: from the last chunk to the first; "before" and "last" are meant in that order.
    """
    batch, _, heads, dx = x.shape
    dy, dtype = y.shape[-1], x.dtype
    count, size = weight.shape[2:]
    wgs, stages = size // ROWS, 2
    x_tiles, y_tiles = dx // size, dy // size

    dots = other is not None

    def vlstm_states(x_ref, y_ref, weight_ref, decay_ref, first_ref, *rest):
        other_refs, (out_ref, last_ref, *rest) = rest[:dots], rest[dots:]
        dots_refs, rest = rest[:dots], rest[dots:]
        x_smem, y_smem, scaled_smem, out_smem, full, free, *of_other = rest
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        pair, tile = block // (x_tiles * y_tiles), block % (x_tiles * y_tiles)
        b, h = pair // heads, pair % heads
        x0, y0 = tile // y_tiles * size, tile % y_tiles * size
        chunk_of = lambda n: count - 1 - n if reverse else n
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        @pl.when(wg < wgs)
        def _compute():
            more_registers(wgs)
            mine = pl.ds(x0 + wg * ROWS, ROWS)
            here = (mine, pl.ds(y0, size))

            def load_other(n):
                other_smem, other_full = of_other
                source = other_refs[0].at[b, h, chunk_of(n), *here]
                plgpu.copy_gmem_to_smem(source, other_smem.at[wg], other_full.at[wg])

            def multiply_other(n, state):
                other_smem, other_full = of_other
                plgpu.barrier_wait(other_full.at[wg])
                other = plgpu.load(other_smem.at[wg], layout=WGMMA).astype(jnp.float32)
                dot = jnp.sum(state * other, axis=1)
                mosaic.store(dots_refs[0].at[b, h, chunk_of(n), tile % y_tiles, mine], dot)
                plgpu.commit_smem()
                pl.when(n + 1 < count)(lambda: load_other(n + 1))

            def walk(acc):
                acc[...] = plgpu.load(first_ref.at[b, h, *here], layout=WGMMA, optimized=False)
                if dots:
                    load_other(0)

                @pl.loop(0, count)
                def _(n):
                    chunk, slot = chunk_of(n), slot_of(n)
                    decay = decay_ref[b, h, chunk]
                    weight = plgpu.load(weight_ref.at[b, h, chunk], layout=ROW, optimized=False)
                    state = acc[...]
                    plgpu.wait_smem_to_gmem(0)  # the state before has left out_smem
                    out_smem[wg] = narrow(state, dtype, saturate)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[b, h, chunk, *here])
                    if dots:
                        multiply_other(n, state)
                    acc[...] = state * decay
                    plgpu.barrier_wait(full.at[slot])
                    x = plgpu.load(x_smem.at[slot, wg], layout=WGMMA).astype(jnp.float32)
                    scaled_smem[wg] = (x * mosaic.along(weight, x.shape, 0)).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(acc, scaled_smem.at[wg].transpose((1, 0)), y_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                return acc[...]

            state = pl.run_scoped(walk, plgpu.ACC((ROWS, size), jnp.float32))
            mosaic.store(last_ref.at[b, h, *here], state)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == wgs)
        def _load():
            fewer_registers(wgs)

            @pl.loop(0, count)
            def _(n):
                slot, at = slot_of(n), pl.ds(chunk_of(n) * size, size)
                pl.when(n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for w in range(wgs):
                    part = x_ref.at[b, at, h, pl.ds(x0 + w * ROWS, ROWS)]
                    plgpu.copy_gmem_to_smem(part, x_smem.at[slot, w], full.at[slot])
                part = y_ref.at[b, at, h, pl.ds(y0, size)]
                plgpu.copy_gmem_to_smem(part, y_smem.at[slot], full.at[slot])

    tiles = functools.partial(mosaic.wgmma_tiles, dtype=dtype)
    return plgpu.kernel(
        vlstm_states,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, count, dx, dy), dtype),
            jax.ShapeDtypeStruct((batch, heads, dx, dy), jnp.float32),
            *[jax.ShapeDtypeStruct((batch, heads, count, y_tiles, dx), jnp.float32)] * dots,
        ),
        scratch_types=[
            plgpu.SMEM((stages, wgs, size, ROWS), dtype, transforms=tiles(ROWS)),
            plgpu.SMEM((stages, size, size), dtype, transforms=tiles(size)),
            plgpu.SMEM((wgs, size, ROWS), dtype, transforms=tiles(ROWS)),
            plgpu.SMEM((wgs, ROWS, size), dtype, transforms=tiles(size)),
            plgpu.Barrier(num_barriers=stages, num_arrivals=wgs + 1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=wgs),
            *[plgpu.SMEM((wgs, ROWS, size), dtype, transforms=tiles(size))] * dots,
            *[plgpu.Barrier(num_barriers=wgs)] * dots,
        ],
        grid=(batch * heads * x_tiles * y_tiles,),
        grid_names=("block",),
        num_threads=wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, y, weight, decay, first, *[other] * dots)
