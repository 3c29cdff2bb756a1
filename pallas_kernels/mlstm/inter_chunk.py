"""The vLSTM's states on Hopper: along the chunks of a head, with a tile of the state in registers.

    S <- decay S + (weight * X)^T Y          s <- decay s + X^T vector

and writes both as they were before each chunk.  (X, Y) = (k, v) gives C and n, and backwards in
time (q, dh) gives dC and dn.

A walk is serial, so where batch, heads and tiles leave SMs idle the chunks are cut into segments:
a first walk, from zero in all segments at once, gives what each of them adds to the state;
`vlstm_join` carries the state over these few; and a second walk starts each segment from there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA

TURNED = plgpu.Layout.WGMMA_TRANSPOSED  # in which a turned square is loaded
LEAST = 8  # chunks of a segment: with fewer, three kernels take longer than one


def narrow(x, dtype, saturate=True):
    """x in dtype; float16 saturates where asked to."""
    if dtype == jnp.float16 and saturate:
        x = jnp.clip(x, -65504.0, 65504.0)
    return x.astype(dtype)


def segments(blocks: int, count: int, at_once: int) -> int:
    """Into how many segments the chunks are cut; 1 unless that wins more than the first walk."""
    most = min(at_once // blocks, count // LEAST)
    return mosaic.cdiv(count, mosaic.cdiv(count, most)) if most > 2 else 1


@functools.partial(jax.jit, static_argnames=("reverse", "saturate", "last", "sms"))
def states(
    x, y, weight, vector, decay, first=None, other=None, *,
    reverse=False, saturate=True, last=True, sms: int,
):  # fmt: skip
    """S and s before each chunk, (B,H,N,DX,DY) in x's dtype and (B,H,N,DX) float32; then
    (S, s) after the last one, (B,H,DX,DY) and (B,H,DX) float32, with last=False None; then None.

    x: (B,T,H,DX), y: (B,T,H,DY), weight, vector: (B,H,N,L), decay: (B,H,N), first: (S, s) before
    all chunks, None: zero.
    other: shaped like the states; given, the last part is (B,H,N,tiles,DX) float32, whose sums
    over the last two axes are the inner products of the S (not rounded) with it.
    reverse: from the last chunk to the first; "before" and "last" are meant in that order.
    """
    heads, size = x.shape[2], weight.shape[-1]
    blocks = x.shape[0] * heads * (x.shape[-1] // size) * (y.shape[-1] // size)
    at_once = sms * (2 if size == ROWS else 1)  # blocks; registers and shared memory decide
    cuts = segments(blocks, decay.shape[-1], at_once)
    walk = functools.partial(
        _walk, x, y, weight, vector, decay, cuts=cuts, reverse=reverse, saturate=saturate
    )
    if cuts > 1:
        first = _join(decay, walk(None, None, keep=False, ends=cuts - 1), first, cuts, reverse)
    elif first is not None:
        first = tuple(z[:, :, None] for z in first)
    before, s_before, *rest = walk(first, other, keep=True, ends=int(last))
    end = tuple(z[:, :, 0] for z in rest[:2]) if last else None
    return before, s_before, end, None if other is None else rest[-1]


def _walk(x, y, weight, vector, decay, first, other, *, cuts, reverse, saturate, keep, ends):
    """Walks along all segments at once, without `keep` along all but the last: [S and s before
    each chunk if keep, S and s after the last `ends` of the segments walked, dots if other]."""
    batch, _, heads, dx = x.shape
    dy, dtype = y.shape[-1], x.dtype
    count, size = weight.shape[2:]
    wgs, stages = size // ROWS, 2
    y_tiles = dy // size
    tiles = dx // size * y_tiles
    walked, per = (cuts if keep else ends), mosaic.cdiv(count, cuts)
    begins, dots = 2 * (first is not None), other is not None

    def vlstm_states(x_ref, y_ref, weight_ref, vector_ref, decay_ref, *rest):
        first_refs, rest = rest[:begins], rest[begins:]
        other_refs, rest = rest[:dots], rest[dots:]
        out_refs, rest = rest[: 2 * keep], rest[2 * keep :]
        last_refs, rest = rest[: 2 * (ends > 0)], rest[2 * (ends > 0) :]
        dots_refs, rest = rest[:dots], rest[dots:]
        x_smem, y_smem, vectors_smem, scaled_smem, out_smem, full, free, *of_other = rest
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        pair, segment, tile = block // tiles // walked, block // tiles % walked, block % tiles
        b, h = pair // heads, pair % heads
        x0, y0 = tile // y_tiles * size, tile % y_tiles * size
        start = segment * per
        steps = jnp.minimum(per, count - start) if cuts > 1 else count
        chunk_of = lambda n: count - 1 - start - n if reverse else start + n
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))

        mine = pl.ds(x0 + wg * ROWS, ROWS)
        here = (mine, pl.ds(y0, size))
        load = functools.partial(plgpu.load, optimized=False)

        def load_x(n):
            """Of step n, the warpgroup's own columns."""

            @pl.when(n < steps)
            def _():
                source = x_ref.at[b, pl.ds(chunk_of(n) * size, size), h, mine]
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot_of(n), wg], full.at[slot_of(n)])

        def load_shared(n):
            """Of step n, what all warpgroups read; by the last one."""

            @pl.when(n < steps)
            def _():
                chunk, slot = chunk_of(n), slot_of(n)
                source = y_ref.at[b, pl.ds(chunk * size, size), h, pl.ds(y0, size)]
                plgpu.copy_gmem_to_smem(source, y_smem.at[slot], full.at[slot])
                for place, ref in enumerate((weight_ref, vector_ref)):
                    into = vectors_smem.at[slot, place]
                    plgpu.copy_gmem_to_smem(ref.at[b, h, chunk], into, full.at[slot])

        def refill(n):
            """Loads into the slot of step n what all read, once they have read it."""

            @pl.when(wg == wgs - 1)
            def _():
                plgpu.barrier_wait(free.at[slot_of(n)])
                load_shared(n + stages)

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
            pl.when(n + 1 < steps)(lambda: load_other(n + 1))

        def sum_columns(slot):
            # Read once more, turned: a column's sum then is in 4 lanes and not in all warps.
            square = x_smem.at[slot, wg].transpose((1, 0))
            x = plgpu.load(square, layout=TURNED).astype(jnp.float32)
            vector = load(vectors_smem.at[slot, 1], layout=TURNED.reduce(0))
            return jnp.sum(x * mosaic.along(vector, x.shape, 1), axis=1)

        def walk(acc):
            acc[...] = mosaic.zeros((ROWS, size), WGMMA)
            sums = mosaic.zeros((ROWS,), TURNED.reduce(1))
            if begins:
                acc[...] = load(first_refs[0].at[b, h, segment, *here], layout=WGMMA)
                sums = load(first_refs[1].at[b, h, segment, mine], layout=TURNED.reduce(1))
            if dots:
                load_other(0)

            def step(n, carry):
                decay, sums = carry
                chunk, slot = chunk_of(n), slot_of(n)
                # One chunk ahead: from global memory it takes as long as the matmul.
                ahead = decay_ref[b, h, chunk_of(jnp.minimum(n + 1, steps - 1))]
                state = acc[...]
                if keep:
                    plgpu.wait_smem_to_gmem(0)  # the state before has left out_smem
                    out_smem[wg] = narrow(state, dtype, saturate)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[wg], out_refs[0].at[b, h, chunk, *here])

                    @pl.when(y0 == 0)
                    def _():
                        mosaic.store(out_refs[1].at[b, h, chunk, mine], sums)

                if dots:
                    multiply_other(n, state)
                acc[...] = state * decay
                pl.when(n > 0)(lambda: refill(n - 1))
                plgpu.barrier_wait(full.at[slot])
                weight = load(vectors_smem.at[slot, 0], layout=ROW)
                x = plgpu.load(x_smem.at[slot, wg], layout=WGMMA).astype(jnp.float32)
                scaled_smem[wg] = (x * mosaic.along(weight, x.shape, 0)).astype(dtype)
                plgpu.commit_smem()
                plgpu.wgmma(acc, scaled_smem.at[wg].transpose((1, 0)), y_smem.at[slot])
                sums = lax.cond(y0 == 0, lambda: sums * decay + sum_columns(slot), lambda: sums)
                plgpu.commit_smem()  # all four warps have read x and its vectors
                load_x(n + stages)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])
                return ahead, sums

            carry = decay_ref[b, h, chunk_of(0)], sums
            _, sums = lax.fori_loop(0, steps, step, carry)
            return sums, acc[...]

        pl.loop(0, stages)(load_x)
        pl.when(wg == wgs - 1)(lambda: pl.loop(0, stages)(load_shared))
        sums, state = pl.run_scoped(walk, plgpu.ACC((ROWS, size), jnp.float32))
        if ends:
            end = segment - (walked - ends)

            @pl.when(end >= 0)
            def _():
                mosaic.store(last_refs[0].at[b, h, end, *here], state)
                pl.when(y0 == 0)(lambda: mosaic.store(last_refs[1].at[b, h, end, mine], sums))

        plgpu.wait_smem_to_gmem(0)

    swizzled = functools.partial(mosaic.wgmma_tiles, dtype=dtype)
    of_head = lambda *shape: jax.ShapeDtypeStruct((batch, heads, *shape), jnp.float32)
    before = jax.ShapeDtypeStruct((batch, heads, count, dx, dy), dtype)
    return mosaic.kernel(
        vlstm_states,
        out_type=(
            *[before, of_head(count, dx)] * keep,
            *[of_head(ends, dx, dy), of_head(ends, dx)] * (ends > 0),
            *[of_head(count, y_tiles, dx)] * dots,
        ),
        scratch_types=[
            plgpu.SMEM((stages, wgs, size, ROWS), dtype, transforms=swizzled(ROWS)),
            plgpu.SMEM((stages, size, size), dtype, transforms=swizzled(size)),
            plgpu.SMEM((stages, 2, size), jnp.float32),
            plgpu.SMEM((wgs, size, ROWS), dtype, transforms=swizzled(ROWS)),
            plgpu.SMEM((wgs, ROWS, size), dtype, transforms=swizzled(size)),
            plgpu.Barrier(num_barriers=stages, num_arrivals=wgs + 3),
            plgpu.Barrier(num_barriers=stages, num_arrivals=wgs),
            *[plgpu.SMEM((wgs, ROWS, size), dtype, transforms=swizzled(size))] * dots,
            *[plgpu.Barrier(num_barriers=wgs)] * dots,
        ],
        grid=(batch * heads * walked * tiles,),
        grid_names=("block",),
        num_threads=wgs,
        thread_name="wg",
        # No sum here crosses warps, and all of shared memory is taken.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(x, y, weight, vector, decay, *(first or ()), *[other] * dots)


def _join(decay, ends, first, cuts, reverse):
    """(S, s) before each segment, (B,H,segments,...), from those that all but the last of them
    reach from zero: the recurrence once more, with the product of a segment's decays."""
    *pairs, count = decay.shape
    per = mosaic.cdiv(count, cuts)
    decay = decay[:, :, ::-1] if reverse else decay
    decay = decay[:, :, : (cuts - 1) * per].reshape(*pairs, cuts - 1, per)
    if first is None:
        first = tuple(jnp.zeros((*pairs, *z.shape[3:])) for z in ends)
    first = tuple(z.reshape(-1, *z.shape[2:]) for z in first)
    dx, dy = first[0].shape[1:]
    width = 512  # 4 numbers a thread, of which 8 segments are in flight
    wide = plgpu.Layout.WG_STRIDED((width,), vec_size=width // 128)

    def vlstm_join(decay_ref, ends_ref, s_ends_ref, first_ref, s_first_ref, out_ref, s_out_ref):
        pair, block = lax.axis_index("pair"), lax.axis_index("block")

        def carry(ends, first, out, at, layout):
            state = mosaic.load(first.at[pair, at], layout)
            mosaic.store(out.at[pair, 0, at], state)
            for n in range(0, cuts - 1, 8):
                group = range(n, min(n + 8, cuts - 1))
                loaded = [
                    (decay_ref[pair, n], mosaic.load(ends.at[pair, n, at], layout)) for n in group
                ]
                for n, (decay, end) in zip(group, loaded, strict=True):
                    state = state * decay + end
                    mosaic.store(out.at[pair, n + 1, at], state)

        carry(ends_ref, first_ref, out_ref, pl.ds(block * width, width), wide)

        @pl.when(block < dx // ROWS)
        def _():
            carry(s_ends_ref, s_first_ref, s_out_ref, pl.ds(block * ROWS, ROWS), COL)

    out = mosaic.kernel(
        vlstm_join,
        out_type=(
            jax.ShapeDtypeStruct((len(first[0]), cuts, dx * dy), jnp.float32),
            jax.ShapeDtypeStruct((len(first[0]), cuts, dx), jnp.float32),
        ),
        grid=(len(first[0]), dx * dy // width),
        grid_names=("pair", "block"),
    )(
        jnp.prod(decay, -1).reshape(-1, cuts - 1),
        ends[0].reshape(-1, cuts - 1, dx * dy),
        ends[1].reshape(-1, cuts - 1, dx),
        first[0].reshape(-1, dx * dy),
        first[1],
    )
    return out[0].reshape(*pairs, cuts, dx, dy), out[1].reshape(*pairs, cuts, dx)
