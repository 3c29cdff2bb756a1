"""Token and position embedding, the first layer of every model here.

    y[b, t] = wte[tokens[b, t]] + wpe[t]                    (wpe only where positions are learnt)
    dwte[v] = sum of dy[b, t] over the places where tokens[b, t] = v
    dwpe[t] = sum_b dy[b, t]

Forward gathers rows.  Backward must not scatter with atomics: their order, and so the last bits,
would change from run to run.  XLA sorts the tokens (stably), after which the places of one token
are neighbours, and two kernels sum them in that order:

  1. the sorted places are cut into tiles of 32, and a tile that holds a single token is summed by
     one block.  Text is Zipf: the commonest token alone may fill 5% of the places, which one block
     would have to sum one after the other.
  2. each row of the vocabulary adds up its run: the sums of its whole tiles, and one by one the
     places before and after them.  Every row of dwte is written once, zeros included.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import backend as _backend
from pallas_kernels import mosaic

_BATCH = 4  # rows that one block of the forward kernel gathers
_TILE = 32  # places of one token that are summed by a block of their own
_VOCAB = 4  # rows of dwte that one block writes


def encoder(
    tokens: Int[Array, "batch time"],
    wte: Float[Array, "vocab width"],
    wpe: Float[Array, "positions width"] | None,
    *,
    dtype=None,
    backend: _backend.Backend = "auto",
) -> Float[Array, "batch time width"]:
    """Token embedding plus position embedding, added in float32, returned in `dtype`.

    dtype: of the result (default: wte's).  Float32 tables with a bfloat16 result are read as they
    are, nothing is cast beforehand.  A token outside the vocabulary is taken as the nearest one
    inside it (the data loader rejects it).  The gradients have the dtypes of the tables and are
    sums in float32, the same bits in every run.  Tables of fewer than 128 columns are copied.
    Raises ValueError for more than wpe's positions, NotImplementedError under backend="mosaic".
    """
    dtype = jnp.dtype(wte.dtype if dtype is None else dtype)
    if wpe is not None and tokens.shape[1] > wpe.shape[0]:
        raise ValueError(
            f"{tokens.shape[1]} tokens exceed the {wpe.shape[0]} positions of wpe: shorten the"
            " sequence or enlarge wpe"
        )
    if not _backend.use_kernel("encoder", backend, why_not(tokens, wte, wpe, dtype)):
        return encoder_reference(tokens, wte, wpe, dtype=dtype)
    return _encoder(tokens.astype(jnp.int32), wte, wpe, dtype)


def encoder_reference(tokens, wte, wpe, *, dtype=None):
    """The formula in jnp, in float32 (float64 for float64)."""
    stat = mosaic.stat_dtype(wte.dtype)
    tokens = jnp.clip(tokens, 0, wte.shape[0] - 1)
    # The cast comes before the gather so that the gradient is summed in float32; XLA fuses it.
    y = wte.astype(stat)[tokens]
    if wpe is not None:
        y += wpe[: tokens.shape[1]].astype(stat)
    return y.astype(wte.dtype if dtype is None else dtype)


def why_not(tokens, wte, wpe, dtype) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return mosaic.unsupported_dtype(
        wte=wte, wpe=wpe, result=jax.ShapeDtypeStruct((), dtype)
    ) or mosaic.empty(tokens=tokens, wte=wte, wpe=wpe)


def _columns(c: int, *dtypes, most=1024):
    """How rows of c >= 128 columns are cut into loads: (columns of a load, loads, layout).

    The last load of a row ends at the end of the row, so it may overlap the one before.
    """
    widest = 16 // max(jnp.dtype(d).itemsize for d in dtypes)
    choices = [
        (128 * vec * k, vec)
        for vec in (1, 2, 4, 8)
        for k in range(1, most // (128 * vec) + 1)
        if vec <= widest and c % vec == 0 and 128 * vec * k <= c
    ]
    # As few columns twice as possible; a load costs about as much as 64 columns more.
    tile, vec = min(choices, key=lambda x: (mosaic.cdiv(c, x[0]) * (x[0] + 64), -x[1]))
    return tile, mosaic.cdiv(c, tile), plgpu.Layout.WG_STRIDED((tile,), vec)


def _for_columns(c, tile, loads, body):
    """Runs body(columns) for every load of a row of c columns."""
    if loads == 1:
        body(pl.ds(0, tile))
    else:
        pl.loop(0, loads)(lambda i: body(pl.ds(jnp.minimum(i * tile, c - tile), tile)))


@functools.partial(jax.jit, static_argnums=3)
def _forward(tokens, wte, wpe, dtype):
    """y (B, T, C).  A block takes one position of `_BATCH` sequences: wpe is read once for them."""
    width = wte.shape[1]
    wte, wpe = _pad(wte), _pad(wpe)
    (b, t), (v, c) = tokens.shape, wte.shape
    batch = min(_BATCH, b)
    tables = [wte] if wpe is None else [wte, wpe]
    tile, loads, layout = _columns(c, dtype, *(table.dtype for table in tables))

    def encoder_forward(tokens_ref, wte_ref, *refs):
        *wpe_ref, y_ref = refs
        block = lax.axis_index("block")
        position = block % t
        # Past the last sequence the block repeats it, with the same values.
        rows = [jnp.minimum(block // t * batch + i, b - 1) for i in range(batch)]
        ids = [jnp.clip(tokens_ref[row, position], 0, v - 1) for row in rows]

        def body(columns):
            ys = [mosaic.load(wte_ref.at[token, columns], layout) for token in ids]
            if wpe_ref:
                shift = mosaic.load(wpe_ref[0].at[position, columns], layout)
                ys = [y + shift for y in ys]
            for row, y in zip(rows, ys, strict=True):
                mosaic.store(y_ref.at[row, position, columns], y)

        _for_columns(c, tile, loads, body)

    y = plgpu.kernel(
        encoder_forward,
        out_type=jax.ShapeDtypeStruct((b, t, c), dtype),
        grid=(mosaic.cdiv(b, batch) * t,),
        grid_names=("block",),
    )(tokens, *tables)
    return y[..., :width]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _backward_tokens(tokens, dy, v, dtype):
    """dwte (V, C) in `dtype`."""
    width = dy.shape[-1]
    dy = _pad(dy).reshape(tokens.size, -1)
    n, c = dy.shape
    flat = jnp.clip(tokens.reshape(-1), 0, v - 1)
    ids, order = lax.sort((flat, lax.iota(jnp.int32, n)), num_keys=1, is_stable=True)
    tile, loads, layout = _columns(c, dy.dtype, dtype, jnp.float32)

    def add_rows(total, row_of, start, stop):
        """total + the sum of the rows row_of(start), ..., row_of(stop - 1)."""

        def four(i, total):
            x = [row_of(start + 4 * i + u) for u in range(4)]  # four loads under way at a time
            return total + ((x[0] + x[1]) + (x[2] + x[3]))

        fours = (stop - start) // 4
        total = lax.fori_loop(0, fours, four, total)
        return lax.fori_loop(start + 4 * fours, stop, lambda i, t: t + row_of(i), total)

    def encoder_backward_tiles(ids_ref, order_ref, dy_ref, sums_ref):
        i = lax.axis_index("tile")
        first = i * _TILE

        @pl.when(ids_ref[first] == ids_ref[first + _TILE - 1])
        def _():
            def body(columns):
                row_of = lambda p: mosaic.load(dy_ref.at[order_ref[p], columns], layout)
                total = add_rows(mosaic.zeros((tile,), layout), row_of, first, first + _TILE)
                mosaic.store(sums_ref.at[i, columns], total)

            _for_columns(c, tile, loads, body)

    tiles = n // _TILE
    if tiles:
        sums = plgpu.kernel(
            encoder_backward_tiles,
            out_type=jax.ShapeDtypeStruct((tiles, c), jnp.float32),
            grid=(tiles,),
            grid_names=("tile",),
        )(ids, order, dy)
    else:
        sums = jnp.zeros((1, c), jnp.float32)

    def encoder_backward_vocab(ids_ref, order_ref, dy_ref, sums_ref, dwte_ref):
        v0 = lax.axis_index("block") * _VOCAB
        bounds = _search(ids_ref, [v0 + i for i in range(_VOCAB + 1)])
        places = [order_ref[jnp.minimum(start, n - 1)] for start in bounds[:-1]]

        def body(columns):
            # Most tokens of a vocabulary occur once or not at all in a batch.  All rows of the
            # block load their first place together; for an absent token it is a neighbour's.
            firsts = [mosaic.load(dy_ref.at[place, columns], layout) for place in places]
            for i, first in enumerate(firsts):
                row, occurs = v0 + i, bounds[i + 1] - bounds[i]

                @pl.when(occurs == 1)
                def _(row=row, first=first):
                    mosaic.store(dwte_ref.at[row, columns], first)

                @pl.when((occurs == 0) & (row < v))
                def _(row=row):
                    mosaic.store(dwte_ref.at[row, columns], mosaic.zeros((tile,), layout))

            @pl.loop(0, _VOCAB)
            def _(i):
                start, stop = bounds[:2]
                for k in range(1, _VOCAB):
                    start = jnp.where(i == k, bounds[k], start)
                    stop = jnp.where(i == k, bounds[k + 1], stop)

                @pl.when(stop - start > 1)
                def _():
                    # [start, stop) = [start, head), whole tiles, [tail, stop)
                    head = jnp.minimum((start + _TILE - 1) // _TILE * _TILE, stop)
                    tail = jnp.maximum(stop // _TILE * _TILE, head)
                    place = lambda p: mosaic.load(dy_ref.at[order_ref[p], columns], layout)
                    whole = lambda p: mosaic.load(sums_ref.at[p, columns], layout)
                    total = add_rows(mosaic.zeros((tile,), layout), place, start, head)
                    total = add_rows(total, whole, head // _TILE, tail // _TILE)
                    total = add_rows(total, place, tail, stop)
                    mosaic.store(dwte_ref.at[v0 + i, columns], total)

        _for_columns(c, tile, loads, body)

    dwte = plgpu.kernel(
        encoder_backward_vocab,
        out_type=jax.ShapeDtypeStruct((v, c), dtype),
        grid=(mosaic.cdiv(v, _VOCAB),),
        grid_names=("block",),
    )(ids, order, dy, sums)
    return dwte[:, :width]


def _search(ids_ref, tokens):
    """How many of the sorted ids are below each token, by bisection, for all tokens together.

    About 16 dependent loads, mostly from the caches; a searchsorted of XLA is one launch for each.
    """
    n = ids_ref.shape[0]

    def halve(_, carry):
        step, counts = carry

        def next_count(count, token):
            more = count + step
            below = ids_ref[jnp.minimum(more, n) - 1] < token
            return jnp.where((more <= n) & below, more, count)

        return step // 2, tuple(map(next_count, counts, tokens))

    steps = n.bit_length()
    zeros = (jnp.int32(0),) * len(tokens)
    return lax.fori_loop(0, steps, halve, (jnp.int32(1 << (steps - 1)), zeros))[1]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _backward_positions(dy, positions, dtype):
    """dwpe (positions, C) in `dtype`; positions past T get zeros.  One block for each position."""
    width = dy.shape[-1]
    dy = _pad(dy)
    b, t, c = dy.shape
    tile, loads, layout = _columns(c, dy.dtype, dtype)

    def encoder_backward_positions(dy_ref, dwpe_ref):
        position = lax.axis_index("position")

        def body(columns):
            def add(rows, total):
                for x in [mosaic.load(dy_ref.at[row, position, columns], layout) for row in rows]:
                    total += x
                return total

            total = mosaic.zeros((tile,), layout)
            total = lax.fori_loop(
                0, b // 8, lambda i, total: add([8 * i + u for u in range(8)], total), total
            )
            mosaic.store(dwpe_ref.at[position, columns], add(range(b // 8 * 8, b), total))

        _for_columns(c, tile, loads, body)

    dwpe = plgpu.kernel(
        encoder_backward_positions,
        out_type=jax.ShapeDtypeStruct((t, c), dtype),
        grid=(t,),
        grid_names=("position",),
    )(dy)
    return jnp.pad(dwpe[:, :width], ((0, positions - t), (0, 0)))


def _pad(x):
    """Rows of fewer than 128 columns, one for each thread, are padded to 128."""
    return mosaic.pad_axis(x, x.ndim - 1, 128) if x is not None and x.shape[-1] < 128 else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _encoder(tokens, wte, wpe, dtype):
    return _forward(tokens, wte, wpe, dtype)


def _encoder_forward(tokens, wte, wpe, dtype):
    return _encoder(tokens, wte, wpe, dtype), (tokens, wte, wpe)


def _encoder_backward(dtype, saved, dy):
    tokens, wte, wpe = saved  # of the tables only shape and dtype are used
    dwte = _backward_tokens(tokens, dy, wte.shape[0], wte.dtype)
    dwpe = None if wpe is None else _backward_positions(dy, wpe.shape[0], wpe.dtype)
    return None, dwte, dwpe


_encoder.defvjp(_encoder_forward, _encoder_backward)
