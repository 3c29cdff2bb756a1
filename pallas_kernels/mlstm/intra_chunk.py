"""The vLSTM's rows on Hopper: one kernel that does every chunk at once, forward and backward.

W is an L x L matrix that comes from A B^T by elementwise work, and out = W X + scale * (A states):

                A    B    X    states   W                        out
    forward     q    k    v    C        A B^T * D                h
    dq          dh   v    k    C^T      (A B^T + shift) * D      dq  (A states + shift n)
    dk          v    dh   q    dC^T     the same, transposed     dk  (A states + dn)
    dv          k    q    dh   dC       forward's W, transposed  dv

D[t,j] = exp2(row[t] + col[j]) for the j <= t of t's document; forward divides W by the normaliser
N, backward row[t] contains it.  shift = -sign(l) dh . h where l divides h, else 0.  dq and dk also
compute Y X^T (q k^T, transposed for dk): with it dh . h and the sums of dP * P, of which the gates'
gradients are made, come from W as it was before it was rounded.

All operands arrive by TMA as squares of edge L = 64 or 128 through one ring of buffers; A stays for
the whole chunk.  Who computes also loads: where a square has been used, the last warpgroup of those
that share it orders the one that is `slots` later, past the chunk's end the next chunk's.  W never
leaves the registers.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.mlstm.inter_chunk import narrow
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA

SMEM = 224 * 1024  # bytes of a block's shared memory that its big buffers may take
TEAMS = 3  # chunks that a block of 64-row tiles works on at a time; at DQK = DV = 64 6% over 2

Mode = Literal["forward", "dq", "dk", "dv"]
# Vectors that a mode reads, of its own rows and of the columns of W, and how many it writes.
OF_ROWS = {
    "forward": ("row", "scale", "one"),
    "dq": ("row", "scale", "sign"),
    "dk": ("col", "scale"),
    "dv": ("col", "scale"),
}
OF_COLUMNS = {"forward": ("col",), "dq": ("col",), "dk": ("row", "shift"), "dv": ("row",)}
STATS = {"forward": 2, "dq": 1, "dk": 2, "dv": 0}


def divide(n, size):
    """n // size and n % size, of an n that is not negative: half the instructions of //, %."""
    return lax.div(n, jnp.int32(size)), lax.rem(n, jnp.int32(size))


def in_order(mode: Mode, parts: int, tiles: int) -> list[tuple[int, int, int, int]]:
    """A chunk's squares in the order of their use: 0 B, 1 X, 2 states; row; column; 16 bytes."""
    turned = mode in ("dq", "dk")
    b = [(0, 0, part, 0) for part in range(parts)]
    x = [(1, 0, tile, 0) for tile in range(tiles)]
    states = [
        [(2, tile, part, 0) if turned else (2, part, tile, 0) for part in range(parts)]
        for tile in range(tiles)
    ]
    order = b + x[::-1] * turned  # Y X^T starts at the last tile
    if mode == "dq":
        return order + sum(states, []) + x
    return order + sum(([*states[tile], x[tile]] for tile in range(tiles)), [])


@functools.partial(jax.jit, static_argnames=("mode", "normalize", "packed", "sms"))
def rows(
    a, b, x, chunk_states, vectors, *, mode: Mode, along=None, y=None,
    normalize=True, packed=False, sms: int,
):  # fmt: skip
    """One row of the table above: (out like x.., then by mode, in float32 of (B,H,N,L):

    forward  1 / N of each row, and -sign(l), or 0 where l does not divide h
    dq       dh . h of each row
    dk       k . dk of each row: the part from inside the chunk, the part through the state
    vectors: name -> (B,H,N,L) float32, by OF_ROWS and OF_COLUMNS, and "start" if packed.
    along: (B,H,N,DX) float32, n or dn.  y: q for dq, k for dk, shaped like the output.
    """
    batch, length, heads, da = a.shape
    dx, dtype = x.shape[-1], a.dtype
    count, size = chunk_states.shape[2], vectors["row"].shape[-1]
    wgs, parts, tiles = size // ROWS, da // size, dx // size
    turned = mode in ("dq", "dk")  # the state is transposed
    transposed = mode in ("dk", "dv")  # rows of W are positions that are seen, not that see
    of_rows, of_columns = OF_ROWS[mode], OF_COLUMNS[mode]
    if packed and transposed:
        of_columns = (*of_columns, "start")
    elif packed:
        of_rows = (*of_rows, "start")
    names = (*of_rows, *of_columns, *["along"] * (along is not None))

    square = size * size * jnp.dtype(dtype).itemsize
    slots = min(4, SMEM // square - parts - 1)
    order = in_order(mode, parts, tiles)
    steps = len(order)
    items = batch * heads * count
    # Teams of a block: each has a chunk of its own, and its own buffers.  Tiles that dq holds in
    # registers leave no room for a third.
    most = 2 if mode == "dq" and tiles > 2 else TEAMS
    teams = 1 if wgs > 1 else min(most, SMEM // ((slots + parts + 1) * square))
    grid = min(mosaic.cdiv(items, teams), sms)

    def where(item):
        pair, chunk = divide(item, count)
        return *divide(pair, heads), chunk

    def cut(n):
        return pl.ds(n * size, size)

    def kernel(order_ref, a_ref, b_ref, x_ref, state_ref, *rest):
        y_refs, rest = rest[:turned], rest[turned:]
        given, rest = dict(zip(names, rest, strict=False)), rest[len(names) :]
        out_ref, *rest = rest
        stat_refs, rest = rest[: STATS[mode]], rest[STATS[mode] :]
        order_smem, a_smem, ring, out_smem, order_full, a_full, full, free, y_full = rest
        thread = lax.axis_index("wg")
        team, wg = (thread, 0) if wgs == 1 else (0, thread)
        first, apart = lax.axis_index("block") * teams + team, grid * teams
        slot_of = lambda n: team * slots + divide(n, slots)[1]

        def push(n):
            """Orders the square of step n, counted over all chunks of the team."""
            turn, step = divide(n, steps)
            item = first + turn * apart
            b, h, chunk = where(item)
            kind, i, j = (order_smem[step, place] for place in range(3))
            squares = [
                lambda: b_ref.at[b, cut(chunk), h, cut(j)],
                lambda: x_ref.at[b, cut(chunk), h, cut(j)],
                lambda: state_ref.at[b, h, chunk, cut(i), cut(j)],
            ]
            slot = slot_of(n)
            into = ring.at[slot], full.at[slot]
            copies = [lambda at=at: plgpu.copy_gmem_to_smem(at(), *into) for at in squares]
            pl.when(item < items)(lambda: lax.switch(kind, copies))

        def release(n):
            """The square of step n has been used: after the last use another takes its slot."""
            slot = slot_of(n)
            plgpu.barrier_arrive(free.at[slot])

            @pl.when(wg == wgs - 1)
            def _():
                plgpu.barrier_wait(free.at[slot])
                push(n + slots)

        def fetch_a(item):
            b, h, chunk = where(item)

            @pl.when(item < items)
            def _():
                @pl.loop(0, parts)
                def _(part):
                    source = a_ref.at[b, pl.ds(chunk * size + wg * ROWS, ROWS), h, cut(part)]
                    plgpu.copy_gmem_to_smem(source, a_smem.at[thread, part], a_full.at[thread])

        def fetch_next_a(item):
            plgpu.commit_smem()  # all four warps have read this one
            fetch_a(item + apart)

        out_mine, y_here = out_smem.at[thread], y_full.at[thread]
        acc = plgpu.ACC((ROWS, size), jnp.float32)
        down = lambda vector: mosaic.along(vector, (ROWS, size), 0)
        across = lambda vector: mosaic.along(vector, (ROWS, size), 1)
        sum_rows = functools.partial(jnp.sum, axis=1)
        now = lax.optimization_barrier  # the compiler keeps factors where it can put off a product

        def multiply(acc, left, n, transpose=False):
            """acc += left times the square of the ring's step n."""
            slot = slot_of(n)
            plgpu.barrier_wait(full.at[slot])
            square = ring.at[slot]
            plgpu.wgmma(acc, left, square.transpose((1, 0)) if transpose else square)

        def a_times(n, transpose):
            """A times `parts` squares of the ring, from step n on."""

            def run(acc):
                @pl.loop(0, parts)  # not unrolled: that costs registers for 8 addresses a part
                def _(part):
                    multiply(acc, a_smem.at[thread, part], n + part, transpose)
                    plgpu.wgmma_wait(1)
                    pl.when(part > 0)(lambda: release(n + part - 1))

                plgpu.wgmma_wait(0)
                release(n + parts - 1)
                return acc[...]

            return pl.run_scoped(run, acc)

        fetch_a(first)

        @pl.when(thread == 0)
        def _():
            plgpu.copy_gmem_to_smem(order_ref, order_smem, order_full)

        plgpu.barrier_wait(order_full)

        @pl.when(wg == wgs - 1)
        def _():
            pl.loop(0, slots)(push)

        def one_chunk(carry):
            item, n0 = carry
            # Where a chunk's slots are those of the one before (steps is a multiple of slots) the
            # compiler would compute the addresses of all squares once and keep them.
            n0 = now(n0)
            b, h, chunk = where(item)
            row0 = chunk * size + wg * ROWS
            here = (b, h, chunk, pl.ds(wg * ROWS, ROWS))
            load = functools.partial(plgpu.load, optimized=False)
            of_row = lambda name: load(given[name].at[here], layout=ROW)

            def spread(name):
                if name in of_rows:
                    return down(of_row(name))
                return across(load(given[name].at[b, h, chunk], layout=COL))

            def save(*stats):
                for ref, value in zip(stat_refs, stats, strict=True):
                    mosaic.store(ref.at[here], value)

            def along_tile(tile):
                return across(load(given["along"].at[b, h, chunk, cut(tile)], layout=COL))

            def at(tile):
                return b, pl.ds(row0, ROWS), h, cut(tile)

            # Y comes through the buffer in which the result will leave.
            def fetch_y(tile):
                plgpu.copy_gmem_to_smem(y_refs[0].at[at(tile)], out_mine, y_here)

            def sums_with_y(z):
                y = plgpu.load(out_mine, layout=WGMMA).astype(jnp.float32)
                return sum_rows(z * y)

            def y_times_x(n):
                """Y X^T, from the last tile to the first, of which Y then stays in place."""

                def run(acc):
                    @pl.loop(0, tiles)
                    def _(step):
                        plgpu.barrier_wait(y_here)
                        multiply(acc, out_mine, n + step, transpose=True)
                        plgpu.wgmma_wait(0)
                        release(n + step)

                        @pl.when(step < tiles - 1)
                        def _():
                            plgpu.commit_smem()  # all four warps have multiplied
                            fetch_y(tiles - 2 - step)

                    return acc[...]

                return pl.run_scoped(run, acc)

            def decays():
                """D of these rows: computed anew where it is needed, 64 registers else."""
                # Positions of the sequence: the compiler would keep those of a chunk, which
                # are the same in each, for the whole kernel, in 40 registers.
                iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, size))
                i, j = row0 + iota(0, layout=WGMMA), chunk * size + iota(1, layout=WGMMA)
                seeing, position = (j, i) if transposed else (i, j)
                visible = position <= seeing
                if packed:
                    visible = visible & (position >= spread("start") + chunk * size)
                return jnp.exp2(jnp.where(visible, spread("row") + spread("col"), -jnp.inf))

            def finish(tile, start, w, n, under=lambda: ()):
                """Writes a tile of start + W X; `under` is computed under the matmul."""

                def run(acc):
                    acc[...] = start
                    multiply(acc, w, n)
                    extra = under()
                    out = acc[...]
                    release(n)
                    return out, extra

                out, extra = pl.run_scoped(run, acc)
                plgpu.wait_smem_to_gmem(0)  # the tile before has left
                out_smem[thread] = narrow(out, dtype, mode == "forward")
                plgpu.commit_smem()

                @pl.when(row0 < length)
                def _():
                    plgpu.copy_smem_to_gmem(out_mine, out_ref.at[at(tile)])

                return extra

            def finish_all(w, inner, n):
                @pl.loop(0, tiles)
                def _(tile):
                    step = n + tile * (parts + 1)
                    through = a_times(step, turned) * down(inner)
                    pl.when(tile == tiles - 1)(lambda: fetch_next_a(item))
                    finish(tile, through, w, step + parts)

            if turned:
                plgpu.wait_smem_to_gmem(0)
                fetch_y(tiles - 1)
            plgpu.barrier_wait(a_full.at[thread])
            m, n = a_times(n0, True), n0 + parts

            if mode == "forward":
                w, inner, norm = m * decays(), of_row("scale"), of_row("one")
                sign = norm * 0.0
                if normalize:

                    def q_times_n(part, sums):
                        q = plgpu.load(a_smem.at[thread, part], layout=WGMMA)
                        return sums + sum_rows(q.astype(jnp.float32) * along_tile(part))

                    qn = lax.fori_loop(0, parts, q_times_n, mosaic.zeros((ROWS,), ROW))
                    l = sum_rows(w) + inner * qn
                    above = jnp.abs(l) > norm
                    norm = 1 / jnp.where(above, jnp.abs(l), norm)
                    sign = jnp.where(above, jnp.where(l > 0, -1.0, 1.0), 0.0)
                save(norm, sign)
                finish_all(narrow(w * down(norm), dtype), inner * norm, n)

            elif mode == "dv":
                finish_all((m * decays()).astype(dtype), of_row("scale"), n)

            elif mode == "dk":
                w, scale = now((m + spread("shift")) * decays()), of_row("scale")
                inside = sum_rows(w * y_times_x(n))
                w, n = w.astype(dtype), n + tiles

                def one_tile(tile, sums):
                    @pl.when(tile > 0)  # the first is there
                    def _():
                        plgpu.wait_smem_to_gmem(0)
                        fetch_y(tile)

                    step = n + tile * (parts + 1)
                    through = a_times(step, True) + along_tile(tile)
                    through = through * down(scale)
                    pl.when(tile == tiles - 1)(lambda: fetch_next_a(item))
                    pl.when(tile > 0)(lambda: plgpu.barrier_wait(y_here))
                    under = lambda: sums + sums_with_y(through)
                    return finish(tile, through, w, step + parts, under)

                outside = lax.fori_loop(0, tiles, one_tile, mosaic.zeros((ROWS,), ROW))
                save(inside, outside)

            else:  # the shift has to be known before W, and the state has a part in it
                w, scale = now(m * decays()), of_row("scale")
                dot = sum_rows(w * y_times_x(n))
                n, through = n + tiles, []
                for tile in range(tiles):
                    if tile:
                        plgpu.commit_smem()  # the Y before has been read
                        fetch_y(tile)
                    part = a_times(n, True)
                    if tile:
                        plgpu.barrier_wait(y_here)
                    dot += scale * sums_with_y(part)
                    through.append(part)
                    n += parts
                fetch_next_a(item)
                save(dot)
                shift = of_row("sign") * dot
                w = now((w + decays() * down(shift)).astype(dtype))
                for tile, part in enumerate(through):
                    part = (part + down(shift) * along_tile(tile)) * down(scale)
                    finish(tile, part, w, n + tile)

            return item + apart, n0 + steps

        lax.while_loop(lambda carry: carry[0] < items, one_chunk, (first, jnp.int32(0)))
        plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = kernel.__qualname__ = (
        "vlstm_forward" if mode == "forward" else f"vlstm_backward_{mode}"
    )
    swizzled = mosaic.wgmma_tiles(size, dtype)
    of_position = jax.ShapeDtypeStruct((batch, heads, count, size), jnp.float32)
    given = vectors | {"along": along}
    return mosaic.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, length, heads, dx), dtype),
            *[of_position] * STATS[mode],
        ),
        scratch_types=[
            plgpu.SMEM((steps, 4), jnp.int32),
            plgpu.SMEM((teams * wgs, parts, ROWS, size), dtype, transforms=swizzled),
            plgpu.SMEM((teams * slots, size, size), dtype, transforms=swizzled),
            plgpu.SMEM((teams * wgs, ROWS, size), dtype, transforms=swizzled),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=teams * wgs, num_arrivals=parts),
            plgpu.Barrier(num_barriers=teams * slots),
            plgpu.Barrier(num_barriers=teams * slots, num_arrivals=wgs),
            plgpu.Barrier(num_barriers=teams * wgs),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=teams * wgs,
        thread_name="wg",
        # No sum here crosses warps, and all of shared memory is taken.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(
        jnp.array(order, jnp.int32), a, b, x, chunk_states,
        *[y] * turned, *(given[name] for name in names),
    )  # fmt: skip
