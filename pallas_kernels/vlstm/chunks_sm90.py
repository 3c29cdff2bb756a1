"""The vLSTM's two kernels on Hopper; each runs forward and backward, with its roles exchanged.

`states` walks along the chunks with a tile of the state in registers:

    S <- decay S + (weight * X)^T Y          and writes S as it was before each chunk

(X, Y) = (k, v) gives C, and backwards in time (q, dh) gives dC.  `rows` does one chunk at a time,
all of them at once, with W an L x L matrix that comes from A B^T by elementwise work:

                A    B    X    states   W                        out = W X + scale * (A states)
    forward     q    k    v    C        s A B^T * D / N          h
    dq          dh   v    k    C^T      s (A B^T / N + dl) * D   dq  (+ s dl n)
    dk          v    dh   q    dC^T     the same, transposed     dk  (+ dn)
    dv          k    q    dh   dC       forward's W, transposed  dv

D[t,j] = exp2(row[t] + col[j]) for the j <= t of t's document, N the normaliser.  All operands
arrive as squares of edge L = 64 or 128 through one ring of buffers, filled by TMA from a warpgroup
that does nothing else; A stays for the whole chunk.  W never leaves the registers.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

WGMMA = plgpu.Layout.WGMMA
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # one value for each row / column of a wgmma tile
ROWS = 64  # rows of one wgmma, and of one computing warpgroup
SMEM = 224 * 1024  # bytes of a block's shared memory that its big buffers may take
TEAMS = (
    3  # chunks that a block of 64-row tiles works on at a time (d64 of the benchmark: 6% over 2)
)

# Vectors that a mode reads: of its own rows, of the columns of W, of the columns of the output.
Mode = Literal["forward", "dq", "dk", "dv"]
OF_ROWS = {
    "forward": ("row", "carried", "one"),
    "dq": ("row", "factor", "shift", "scale", "extra"),
    "dk": ("col", "scale"),
    "dv": ("col", "scale"),
}
OF_COLUMNS = {
    "forward": ("col",),
    "dq": ("col",),
    "dk": ("row", "factor", "shift"),
    "dv": ("row", "factor"),
}


def edge(dqk: int, dv: int) -> int:
    """Positions of a chunk, and the edge of all tiles."""
    return 128 if dqk % 128 == dv % 128 == 0 else 64


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


def along_rows(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [0])


def along_columns(vector, shape):
    return lax.broadcast_in_dim(vector, shape, [1])


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
                    scaled_smem[wg] = (x * along_rows(weight, x.shape)).astype(dtype)
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


@functools.partial(jax.jit, static_argnames=("mode", "scale", "normalize", "packed", "sms"))
def rows(
    a, b, x, chunk_states, vectors, *, mode: Mode, scale=1.0, along=None, y=None,
    normalize=True, packed=False, sms: int,
):  # fmt: skip
    """One row of the table above: (out like x.., then by mode, in float32 of (B,H,N,L):

    forward  1 / N of each row, and what dh . h has to be multiplied by for the gradient of l
    dq       q . dq of each row
    dk       k . dk of each row, and its part that came through the state
    vectors: name -> (B,H,N,L) float32, by OF_ROWS and OF_COLUMNS, and "start" if packed.
    along: (B,H,N,DX) float32, n or dn.  y: q for dq, k for dk, shaped like the output.
    """
    batch, length, heads, da = a.shape
    dx, dtype = x.shape[-1], a.dtype
    count, size = chunk_states.shape[2], vectors["row"].shape[-1]
    wgs, parts, tiles = size // ROWS, da // size, dx // size
    forward, dots = mode == "forward", mode in ("dq", "dk")
    transposed = mode in ("dk", "dv")  # rows of W are positions that are seen, not that see
    square = size * size * jnp.dtype(dtype).itemsize
    slots = min(4, SMEM // square - parts - 1)
    steps = parts + tiles * (parts + 1)  # squares of a chunk that go through the ring
    items = batch * heads * count
    # Teams of a block: each has a chunk of its own, and its own buffers.
    teams = 1 if wgs > 1 else min(TEAMS, SMEM // ((slots + parts + 1) * square))
    grid = min(mosaic.cdiv(items, teams), sms)

    of_rows, of_columns = OF_ROWS[mode], OF_COLUMNS[mode]
    if packed:
        of_rows, of_columns = (
            (of_rows, (*of_columns, "start")) if transposed else ((*of_rows, "start"), of_columns)
        )
    names = (*of_rows, *of_columns, *(("along",) if forward or dots else ()))
    stats = {"forward": 2, "dq": 1, "dk": 2, "dv": 0}[mode]

    def where(item):
        return item // count // heads, item // count % heads, item % count

    def share(team):  # first item, how many, and how far apart
        mine = lax.axis_index("block") * teams + team
        return mine, (items - mine + grid * teams - 1) // (grid * teams), grid * teams

    def kernel(a_ref, b_ref, x_ref, state_ref, *rest):
        y_refs, rest = rest[:dots], rest[dots:]
        given, rest = dict(zip(names, rest, strict=False)), rest[len(names) :]
        out_ref, *rest = rest
        stat_refs, rest = rest[:stats], rest[stats:]
        a_smem, ring, out_smem, a_full, a_free, full, free, y_full = rest
        thread = lax.axis_index("wg")
        slot_of = lambda team, n: team * slots + lax.rem(n, jnp.int32(slots))

        @pl.when(thread < teams * wgs)
        def _compute():
            more_registers(teams * wgs)
            team, wg = thread // wgs, thread % wgs
            shape = (ROWS, size)

            def one_chunk(turn, n0):
                b, h, chunk = where(first + turn * apart)
                row0 = chunk * size + wg * ROWS
                mine = (b, h, chunk, pl.ds(wg * ROWS, ROWS))
                row = {
                    name: plgpu.load(given[name].at[mine], layout=ROW, optimized=False)
                    for name in of_rows
                }

                def of_output(name, tile):
                    at = given[name].at[b, h, chunk, pl.ds(tile * size, size)]
                    return along_columns(plgpu.load(at, layout=COL, optimized=False), shape)

                def spread(name):
                    if name in row:
                        return along_rows(row[name], shape)
                    vector = plgpu.load(given[name].at[b, h, chunk], layout=COL, optimized=False)
                    return along_columns(vector, shape)

                def multiply(acc, n, transpose):
                    """acc += A times `parts` squares of the ring, from step n on."""
                    for part in range(parts):
                        slot = slot_of(team, n + part)
                        plgpu.barrier_wait(full.at[slot])
                        square = ring.at[slot]
                        square = square.transpose((1, 0)) if transpose else square
                        plgpu.wgmma(acc, a_smem.at[team, part, wg], square)
                        if part:
                            plgpu.wgmma_wait(1)
                            plgpu.barrier_arrive(free.at[slot_of(team, n + part - 1)])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot_of(team, n + parts - 1)])
                    return acc[...]

                plgpu.barrier_wait(a_full.at[team])
                m = pl.run_scoped(
                    lambda acc: multiply(acc, n0, True), plgpu.ACC(shape, jnp.float32)
                )

                iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=WGMMA)
                i, j = wg * ROWS + iota(0), iota(1)
                seeing, position = (j, i) if transposed else (i, j)
                visible = position <= seeing
                if packed:
                    visible = visible & (position >= spread("start"))
                d = jnp.exp2(jnp.where(visible, spread("row") + spread("col"), -jnp.inf))

                if forward:
                    w = m * d * scale
                    inner = row["carried"] * scale
                    if normalize:
                        l = jnp.sum(w, axis=1)
                        for part in range(parts):
                            q = plgpu.load(a_smem.at[team, part, wg], layout=WGMMA)
                            q = q.astype(jnp.float32) * of_output("along", part)
                            l = l + inner * jnp.sum(q, axis=1)
                        above = jnp.abs(l) > row["one"]
                        norm = 1 / jnp.where(above, jnp.abs(l), row["one"])
                        slope = jnp.where(above, jnp.where(l > 0, -norm, norm), 0.0)
                    else:
                        norm = row["one"]
                        slope = norm * 0.0
                    mosaic.store(stat_refs[0].at[mine], norm)
                    mosaic.store(stat_refs[1].at[mine], slope)
                    w = w * along_rows(norm, shape)
                    inner = inner * norm
                else:
                    inner = row["scale"]
                    w = m * spread("factor")
                    w = (w + spread("shift") if dots else w) * d
                w = narrow(w, dtype, forward)

                def one_tile(tile, sums):
                    n = n0 + parts + tile * (parts + 1)
                    at = (b, pl.ds(row0, ROWS), h, pl.ds(tile * size, size))
                    if dots:  # y comes through the buffer in which the result will leave
                        plgpu.wait_smem_to_gmem(0)
                        plgpu.copy_gmem_to_smem(
                            y_refs[0].at[at], out_smem.at[thread], y_full.at[thread]
                        )

                    def tile_of(acc):
                        through = multiply(acc, n, dots) * along_rows(inner, shape)
                        if dots:
                            extra = row["extra"] if mode == "dq" else row["scale"]
                            through += along_rows(extra, shape) * of_output("along", tile)
                        acc[...] = through
                        slot = slot_of(team, n + parts)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, w, ring.at[slot])
                        if mode == "dk":  # under the matmul
                            plgpu.barrier_wait(y_full.at[thread])
                            y = plgpu.load(out_smem.at[thread], layout=WGMMA).astype(jnp.float32)
                            new = (sums[1] + jnp.sum(through * y, axis=1),)
                        else:
                            new = ()
                        out = acc[...]
                        plgpu.barrier_arrive(free.at[slot])
                        return out, new

                    out, new = pl.run_scoped(tile_of, plgpu.ACC(shape, jnp.float32))
                    if dots:
                        if mode == "dq":
                            plgpu.barrier_wait(y_full.at[thread])
                        y = plgpu.load(out_smem.at[thread], layout=WGMMA).astype(jnp.float32)
                        new = (sums[0] + jnp.sum(out * y, axis=1), *new)
                    else:
                        plgpu.wait_smem_to_gmem(0)  # the tile before has left out_smem
                    out_smem[thread] = narrow(out, dtype, forward)
                    plgpu.commit_smem()

                    @pl.when(row0 < length)
                    def _():
                        plgpu.copy_smem_to_gmem(out_smem.at[thread], out_ref.at[at])

                    return new

                sums = tuple(mosaic.zeros((ROWS,), ROW) for _ in range(stats * dots))
                sums = lax.fori_loop(0, tiles, one_tile, sums)
                plgpu.barrier_arrive(a_free.at[team])
                if dots:
                    for ref, value in zip(stat_refs, sums, strict=True):
                        mosaic.store(ref.at[mine], value)
                return n0 + steps

            first, mine, apart = share(team)
            lax.fori_loop(0, mine, one_chunk, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(thread == teams * wgs)
        def _load():
            fewer_registers(teams * wgs)

            def load_a(team, item, turn):
                b, h, chunk = where(item)
                pl.when(turn > 0)(lambda: plgpu.barrier_wait(a_free.at[team]))
                for part in range(parts):
                    for w in range(wgs):
                        at = pl.ds(chunk * size + w * ROWS, ROWS)
                        source = a_ref.at[b, at, h, pl.ds(part * size, size)]
                        plgpu.copy_gmem_to_smem(source, a_smem.at[team, part, w], a_full.at[team])

            def push(team, n, source):
                slot = slot_of(team, n)
                pl.when(n >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])

            cut = lambda n: pl.ds(n * size, size)

            def load_b(team, item, n, part):
                b, h, chunk = where(item)
                push(team, n, b_ref.at[b, cut(chunk), h, cut(part)])

            def load_state(team, item, n, part, tile):
                b, h, chunk = where(item)
                at = (cut(tile), cut(part)) if dots else (cut(part), cut(tile))
                push(team, n, state_ref.at[b, h, chunk, *at])

            def load_x(team, item, n, tile):
                b, h, chunk = where(item)
                push(team, n, x_ref.at[b, cut(chunk), h, cut(tile)])

            def one_turn(turn, n0):
                def of_all(load, *args):  # in step, as the teams use them
                    for team in range(teams):
                        first, mine, apart = share(team)
                        item = first + turn * apart
                        pl.when(turn < mine)(functools.partial(load, team, item, *args))

                of_all(load_a, turn)
                for part in range(parts):
                    of_all(load_b, n0 + part, part)

                @pl.loop(0, tiles)
                def _(tile):
                    n = n0 + parts + tile * (parts + 1)
                    for part in range(parts):
                        of_all(load_state, n + part, part, tile)
                    of_all(load_x, n + parts, tile)

                return n0 + steps

            lax.fori_loop(0, share(0)[1], one_turn, jnp.int32(0))

    kernel.__name__ = kernel.__qualname__ = "vlstm_forward" if forward else f"vlstm_backward_{mode}"
    swizzled = mosaic.wgmma_tiles(size, dtype)
    of_position = jax.ShapeDtypeStruct((batch, heads, count, size), jnp.float32)
    given = vectors | {"along": along}
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((batch, length, heads, dx), dtype), *[of_position] * stats),
        scratch_types=[
            plgpu.SMEM((teams, parts, wgs, ROWS, size), dtype, transforms=swizzled),
            plgpu.SMEM((teams * slots, size, size), dtype, transforms=swizzled),
            plgpu.SMEM((teams * wgs, ROWS, size), dtype, transforms=swizzled),
            plgpu.Barrier(num_barriers=teams, num_arrivals=parts * wgs),
            plgpu.Barrier(num_barriers=teams, num_arrivals=wgs),
            plgpu.Barrier(num_barriers=teams * slots),
            plgpu.Barrier(num_barriers=teams * slots, num_arrivals=wgs),
            plgpu.Barrier(num_barriers=teams * wgs),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=teams * wgs + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(a, b, x, chunk_states, *([y] if dots else []), *(given[name] for name in names))
