"""Token and position embedding, the first layer of every model here.

    y[b, t] = wte[tokens[b, t]] + wpe[t]                    (wpe only where positions are learnt)
    dwte[v] = sum of dy[b, t] over the places where tokens[b, t] = v
    dwpe[t] = sum_b dy[b, t]

Forward gathers rows.  Backward must not scatter with atomics: their order, and so the last bits,
would change from run to run.  XLA's own sort (lax.sort) orders the tokens stably, after which the
places of one token are neighbours, and two kernels sum them in that order:

  1. the sorted places are cut into tiles of 32, and a tile that holds a single token is summed by
     one block.  Text is Zipf: the commonest token alone may fill 5% of the places, which one block
     would have to sum one after the other.
  2. each row of the vocabulary adds up its run: the sums of its whole tiles and the places before
     and after them.  All of dwte (V, C) is written, each row once, zeros included; that takes most
     of the time.  Other blocks of the same kernel sum dwpe.

Where the table is the head as well (tied), its gradient as the head, all of (V, C), comes in, and
kernel 2 adds the rows that occur to it in place and touches no other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic

# Measured on an H100 (copy of 1 GiB: 2.94 TB/s), fp32 tables, bf16 rows, microseconds with uniform
# / Zipf ids; "small" is B32 T1024 C768 V50304, "large" B4 T8192 C4096 V128256.
#
#            small     large        the neighbours that were tried
#   forward  48 / 32   309 / 221    _SLAB 128: 49 / 38, 320 / 245; whole rows: 53 / 34, 315 / 250
#                                   _BATCH 4: 49 / 35; 2: 53 / 38; 16: as 8
#   backward 120 / 118 1032 / 1022  dwpe in the first kernel: 124 / 119, 1039 / 1027; so, _TILE 64:
#                     123 / 126; _VOCAB 2: 126 / 119, 1029 / 1011; 8: 124 / 121, 1050 / 1050
#
# Of the small backward pass 25 are XLA's sort and scatter (two radix passes of 8), 2 / 10 the
# first kernel and 93 / 82 the second.
_SLAB = 256  # columns for which the forward kernel gathers all tokens before it goes on
_BATCH = 8  # rows that one block of it gathers
_TILE = 32  # places of one token that are summed by a block of their own
_VOCAB = 4  # rows of dwte that one block writes


def encoder(
    tokens: Int[Array, "batch time"],
    wte: Float[Array, "vocab width"],
    wpe: Float[Array, "positions width"] | None,
    *,
    dtype=None,
    tied: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> (
    Float[Array, "batch time width"]
    | tuple[Float[Array, "batch time width"], Float[Array, "vocab width"]]
):
    """Token embedding plus position embedding, added in float32, returned in `dtype`.

    dtype: of the result (default: wte's).  Float32 tables with a bfloat16 result are read as they
    are, nothing is cast beforehand.  A token outside the vocabulary is taken as the nearest one
    inside it (the data loader rejects it).  The gradients have the dtypes of the tables and are
    sums in float32, the same bits in every run.  Tables of fewer than 128 columns are copied.
    tied: returns (result, wte), and who uses wte again, as a head, takes this one: the gradient it
    gets is then the array to which the embedding's rows are added in place, where otherwise two
    would be written whole and summed.  Columns that are no multiple of 128 cost a copy of it.
    Raises ValueError for tokens and tables that do not fit, NotImplementedError under "mosaic".
    """
    dtype = jnp.dtype(wte.dtype if dtype is None else dtype)
    mosaic.check_axes("B T", tokens=tokens)
    mosaic.check_whole_numbers(tokens=tokens)
    mosaic.check_axes("rows C", wte=wte, **({} if wpe is None else {"wpe": wpe}))
    if wpe is not None and wpe.shape[1] != wte.shape[1]:
        raise ValueError(f"wpe has {wpe.shape[1]} columns, wte has {wte.shape[1]}: not one width")
    if wpe is not None and tokens.shape[1] > wpe.shape[0]:
        raise ValueError(
            f"{tokens.shape[1]} tokens exceed the {wpe.shape[0]} positions of wpe: shorten the"
            " sequence or enlarge wpe"
        )
    if not dispatch.use_kernel("encoder", implementation, why_not(tokens, wte, wpe, dtype)):
        return encoder_reference(tokens, wte, wpe, dtype=dtype, tied=tied)
    return _encoder(tokens.astype(jnp.int32), wte, wpe, dtype, tied)


def encoder_reference(tokens, wte, wpe, *, dtype=None, tied=False):
    """The formula in jnp, in float32 (float64 for float64)."""
    stat = mosaic.stat_dtype(wte.dtype)
    tokens = jnp.clip(tokens, 0, wte.shape[0] - 1)
    # The cast comes before the gather so that the gradient is summed in float32; XLA fuses it.
    y = wte.astype(stat)[tokens]
    if wpe is not None:
        y += wpe[: tokens.shape[1]].astype(stat)
    y = y.astype(wte.dtype if dtype is None else dtype)
    return (y, wte) if tied else y


# Where rows of fewer than 128 columns are padded, XLA's form is faster (H100, JAX 0.11.2, at
# 4x1024x100 12 times forward, 4 times backward).  But its backward pass adds with atomics, so
# the kernels are taken there, too: for the same bits in every run.
def why_not(tokens, wte, wpe, dtype) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return mosaic.unsupported_dtype(
        wte=wte, wpe=wpe, result=jax.ShapeDtypeStruct((), dtype)
    ) or mosaic.empty(tokens=tokens, wte=wte, wpe=wpe)


def _columns(c: int, *dtypes, overlap: bool = True):
    """How rows of c >= 128 columns are cut into loads: (columns of a load, loads, layout).

    The last load of a row ends at the end of the row, so it may overlap the one before; without
    `overlap` it does not, and c is a multiple of 128.
    """
    widest = 16 // max(jnp.dtype(d).itemsize for d in dtypes)
    choices = [
        (128 * vec * k, vec)
        for vec in (1, 2, 4, 8)
        for k in range(1, 1024 // (128 * vec) + 1)
        if vec <= widest and c % vec == 0 and 128 * vec * k <= c
        if overlap or c % (128 * vec * k) == 0
    ]
    # As few columns twice as possible; a load costs about as much as 64 columns more.
    tile, vec = min(choices, key=lambda x: (mosaic.cdiv(c, x[0]) * (x[0] + 64), -x[1]))
    return tile, mosaic.cdiv(c, tile), plgpu.Layout.WG_STRIDED((tile,), vec)


def _for_columns(c, tile, loads, body, first=0):
    """Runs body(columns) for every load of c columns from `first` on."""
    if loads == 1:
        body(pl.ds(first, tile))
    else:
        pl.loop(0, loads)(lambda i: body(pl.ds(first + jnp.minimum(i * tile, c - tile), tile)))


@functools.partial(jax.jit, static_argnums=3)
def _forward(tokens, wte, wpe, dtype):
    """y (B, T, C).  A block takes one position of `_BATCH` sequences: wpe is read once for them.

    All tokens are gathered for the first `_SLAB` columns, then for the next: the rows of wte that
    a batch touches exceed the level-2 cache, a slab of them does not, so that a token which occurs
    again is read from the cache.
    """
    width = wte.shape[1]
    tables = [_pad(table) for table in (wte, wpe) if table is not None]
    (b, t), (v, c) = tokens.shape, tables[0].shape
    batch = min(_BATCH, b)
    blocks = mosaic.cdiv(b, batch) * t
    slab = _SLAB if c % _SLAB == 0 else c
    tile, loads, layout = _columns(slab, dtype, *(table.dtype for table in tables))

    def encoder_forward(tokens_ref, wte_ref, *refs):
        *wpe_ref, y_ref = refs
        block = lax.axis_index("block")
        group, position = block % blocks // t, block % t
        # Past the last sequence the block repeats it, with the same values.
        rows = [jnp.minimum(group * batch + i, b - 1) for i in range(batch)]
        ids = [jnp.clip(tokens_ref[row, position], 0, v - 1) for row in rows]

        def body(columns):
            ys = [mosaic.load(wte_ref.at[token, columns], layout) for token in ids]
            if wpe_ref:
                shift = mosaic.load(wpe_ref[0].at[position, columns], layout)
                ys = [y + shift for y in ys]
            for row, y in zip(rows, ys, strict=True):
                mosaic.store(y_ref.at[row, position, columns], y)

        _for_columns(slab, tile, loads, body, first=block // blocks * slab)

    y = mosaic.kernel(
        encoder_forward,
        out_type=jax.ShapeDtypeStruct((b, t, c), dtype),
        grid=(c // slab * blocks,),
        grid_names=("block",),
    )(tokens, *tables)
    return y[..., :width]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _backward(tokens, dy, table, v, wte_dtype, positions, wpe_dtype):
    """dwte (v, C) and dwpe (positions, C), which is None for positions = 0.

    table: what dwte is added to (v, C), in its place, or None.
    """
    (b, t), width = tokens.shape, dy.shape[-1]
    if table is not None:  # no load may overlap another: it would add again
        dy, table = (mosaic.pad_axis(x, x.ndim - 1, 128) for x in (dy, table))
    dy = _pad(dy).reshape(b * t, -1)
    runs = _runs(tokens.reshape(-1), v)
    sums = _sums(runs, dy)
    dwte, *dwpe = _vocabulary(runs, dy, sums, table, v, wte_dtype, positions and t, wpe_dtype)
    dwpe = jnp.pad(dwpe[0][:, :width], ((0, positions - t), (0, 0))) if dwpe else None
    return dwte[:, :width], dwpe


def _runs(tokens, v):
    """(ids, order, ends): the tokens sorted, the place of each, the run of every row.

    The places order[ends[i] : ends[v + i]] hold token i; both ends are 0 for an absent one.
    """
    n = tokens.size
    place = lax.iota(jnp.int32, n)
    # Radix sort takes two passes for 16 bits, four for 32.
    keys = jnp.clip(tokens, 0, v - 1).astype(jnp.uint16 if v <= 1 << 16 else jnp.uint32)
    ids, order = lax.sort((keys, place), num_keys=1, is_stable=True)
    differ = ids[1:] != ids[:-1]
    first_and_last = [jnp.pad(differ, side, constant_values=True) for side in ((1, 0), (0, 1))]
    is_end = jnp.stack(first_and_last)
    # One scatter for both ends; what is no end goes past the array, each to a place of its own.
    row = ids.astype(jnp.int32)
    at = jnp.where(
        is_end, jnp.stack([row, row + v]), 2 * v + lax.iota(jnp.int32, 2 * n).reshape(2, n)
    )
    ends = jnp.zeros(2 * v, jnp.int32)
    ends = ends.at[at].set(jnp.stack([place, place + 1]), mode="drop", unique_indices=True)
    return ids, order, ends


def _sum(load, start, stop, group, total, index=lambda i: i):
    """total + the sum of load(index(i)) for i in [start, stop), `group` rows at a time."""

    def step(i, total):
        first = start + i * group
        # All loads of a group are under way together; past the end the last row counts 0 times.
        at = [index(jnp.minimum(first + u, stop - 1)) for u in range(group)]
        weights = [jnp.where(first + u < stop, 1.0, 0.0) for u in range(group)]
        return total + functools.reduce(jnp.add, map(jnp.multiply, map(load, at), weights))

    return lax.fori_loop(0, (stop - start + group - 1) // group, step, total)


def _sums(runs, dy):
    """Sums of the tiles of one token (n // _TILE, C), other tiles undefined."""
    ids, order, _ = runs
    n, c = dy.shape
    tiles = n // _TILE
    if not tiles:
        return jnp.zeros((1, c), jnp.float32)
    tile, loads, layout = _columns(c, dy.dtype, jnp.float32)

    def encoder_backward_sums(ids_ref, order_ref, dy_ref, sums_ref):
        first = lax.axis_index("block") * _TILE

        def tile_sum(columns):
            load = lambda place: mosaic.load(dy_ref.at[place, columns], layout)
            zeros, place = mosaic.zeros((tile,), layout), lambda i: order_ref[i]
            total = _sum(load, first, first + _TILE, 8, zeros, place)
            mosaic.store(sums_ref.at[lax.axis_index("block"), columns], total)

        same = ids_ref[first] == ids_ref[jnp.minimum(first + _TILE, n) - 1]
        pl.when(same)(lambda: _for_columns(c, tile, loads, tile_sum))

    return mosaic.kernel(
        encoder_backward_sums,
        out_type=jax.ShapeDtypeStruct((tiles, c), jnp.float32),
        grid=(tiles,),
        grid_names=("block",),
    )(ids, order, dy)


def _vocabulary(runs, dy, sums, table, v, dtype, positions, wpe_dtype):
    """[dwte (v, C), dwpe (positions, C)].  A block writes one position or `_VOCAB` rows of dwte.

    With a table, dwte is added to it, and rows that do not occur are neither read nor written.
    """
    _, order, ends = runs
    n, c = dy.shape
    blocks = mosaic.cdiv(v, _VOCAB)
    tile, loads, layout = _columns(c, dy.dtype, dtype, jnp.float32, overlap=table is None)

    def encoder_backward_vocabulary(*refs):
        block, dy_ref, dwpe_ref = lax.axis_index("block"), refs[2], refs[-1]

        def position_sum(columns):
            load = lambda i: mosaic.load(dy_ref.at[i * positions + block, columns], layout)
            batch, zeros = n // positions, mosaic.zeros((tile,), layout)
            mosaic.store(dwpe_ref.at[block, columns], _sum(load, 0, batch, min(8, batch), zeros))

        if positions:
            pl.when(block < positions)(lambda: _for_columns(c, tile, loads, position_sum))
        pl.when(block >= positions)(lambda: vocabulary(block - positions, *refs[:5]))

    def vocabulary(block, order_ref, ends_ref, dy_ref, sums_ref, dwte_ref):
        # Rows far apart: the first ones of a vocabulary are the commonest, one after the other.
        rows = [block + i * blocks for i in range(_VOCAB)]
        safe = [jnp.minimum(row, v - 1) for row in rows]
        starts = [ends_ref[row] for row in safe]
        counts = [ends_ref[v + row] - start for row, start in zip(safe, starts, strict=True)]
        places = [order_ref[start] for start in starts]

        def put(row, columns, total):
            at = dwte_ref.at[row, columns]
            mosaic.store(at, total if table is None else mosaic.load(at, layout) + total)

        def body(columns):
            # Most tokens of a vocabulary occur once or not at all in a batch, so all rows of the
            # block load their first place together (an absent token some place, unused).
            firsts = [mosaic.load(dy_ref.at[place, columns], layout) for place in places]
            for row, count in zip(rows, counts, strict=True):  # meanwhile the zeros
                absent = (count == 0) & (row < v) if table is None else False

                @pl.when(absent)
                def _(row=row):
                    mosaic.store(dwte_ref.at[row, columns], mosaic.zeros((tile,), layout))

            for row, count, first in zip(rows, counts, firsts, strict=True):

                @pl.when((count == 1) & (row < v))
                def _(row=row, first=first):
                    put(row, columns, first)

            @pl.loop(0, _VOCAB)
            def _(i):
                row = block + i * blocks
                start = ends_ref[jnp.minimum(row, v - 1)]
                stop = ends_ref[jnp.minimum(v + row, 2 * v - 1)]

                @pl.when((stop - start > 1) & (row < v))
                def _():
                    # [start, stop) = [start, head), whole tiles, [tail, stop)
                    head = jnp.minimum((start + _TILE - 1) // _TILE * _TILE, stop)
                    tail = jnp.maximum(stop // _TILE * _TILE, head)
                    load = lambda place: mosaic.load(dy_ref.at[place, columns], layout)
                    load_sum = lambda i: mosaic.load(sums_ref.at[i, columns], layout)
                    place = lambda i: order_ref[i]
                    total = _sum(load, start, head, 4, mosaic.zeros((tile,), layout), place)
                    total = _sum(load_sum, head // _TILE, tail // _TILE, 4, total)
                    total = _sum(load, tail, stop, 4, total, place)
                    put(row, columns, total)

        work = table is None or functools.reduce(jnp.maximum, counts) > 0
        pl.when(work)(lambda: _for_columns(c, tile, loads, body))

    out = [jax.ShapeDtypeStruct((v, c), dtype)]
    out += [jax.ShapeDtypeStruct((positions, c), wpe_dtype)] if positions else []
    call = mosaic.kernel(
        encoder_backward_vocabulary,
        out_type=out if table is None else [],
        grid=(positions + blocks,),
        grid_names=("block",),
    )
    if table is None:
        return call(order, ends, dy, sums)
    state = [table, *(lax.empty(dwpe.shape, dwpe.dtype) for dwpe in out[1:])]
    return mosaic.in_place(lambda refs, *arrays: call(*arrays, *refs), state, order, ends, dy, sums)


def _pad(x: jax.Array) -> jax.Array:
    """Rows of fewer than 128 columns, one for each thread, are padded to 128."""
    return mosaic.pad_axis(x, x.ndim - 1, 128) if x.shape[-1] < 128 else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _encoder(tokens, wte, wpe, dtype, tied):
    y = _forward(tokens, wte, wpe, dtype)
    return (y, wte) if tied else y


def _encoder_forward(tokens, wte, wpe, dtype, tied):
    return _encoder(tokens, wte, wpe, dtype, tied), (tokens, wte, wpe)


def _encoder_backward(dtype, tied, saved, gradients):
    tokens, wte, wpe = saved  # of the tables only shape and dtype are used
    dy, table = gradients if tied else (gradients, None)
    positions, wpe_dtype = (0, None) if wpe is None else (wpe.shape[0], wpe.dtype)
    return None, *_backward(tokens, dy, table, wte.shape[0], wte.dtype, positions, wpe_dtype)


_encoder.defvjp(_encoder_forward, _encoder_backward)
