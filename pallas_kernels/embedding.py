"""Token and position embedding, the first layer of every model here.

    y[b, t] = wte[tokens[b, t]] + wpe[t]                    (wpe only for learnt positions)
    dwte[v] = sum of dy[b, t] over the places where tokens[b, t] = v
    dwpe[t] = sum_b dy[b, t]

The forward pass gathers rows.  The backward pass must not scatter with atomics, whose order and so
the last bits change from run to run.  XLA's stable sort (lax.sort) groups the places of each token,
and two kernels sum them in that order:

    sorted tokens   | 3 3 3 3 | 3 3 3 3 | 3 5 5 8 | 8 8 8 8 |       tiles (of 4 here, of 32 there)
    kernel 1          sum       sum                 sum             of tiles with a single token
    kernel 2          dwte[3] = sum + sum + 1 place, dwte[8] = 1 place + sum, dwte[5] = 2 places

  1. One block sums each tile of 32 places with a single token.  Tokens of text are Zipf
     distributed: the most common one may fill 5% of the places, too many for one block to sum.
  2. For each row of the vocabulary, a block sums its run: the sums of whole tiles and the places
     before and after them.  It writes every row of dwte (V, C) once, zeros included, which takes
     most of the time.  Other blocks of the kernel sum dwpe.

If the table is also the head (tied), the kernel gets the head's gradient (V, C); kernel 2 adds the
rows of the tokens that occur in place, and touches no other row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked, custom_vjp
from pallas_kernels.totals import summed

# The best of the sweep in docs/performance.md: 32x1024 Zipf ids of GPT-2 take 32 us forward and
# 118 us backward.
_SLAB = 256  # the forward kernel gathers all tokens for these columns before the next ones
_BATCH = 8  # a forward block gathers one row for each of these sequences
_TILE = 32  # places of one token that one block sums
_VOCAB = 4  # rows of dwte that one block writes


@checked
def encoder(
    tokens: Integer[ids.Ids, "batch time"],
    wte: Float[Array, "vocab width"],
    wpe: Float[Array, "positions width"] | None,
    *,
    dtype=None,
    tied: bool = False,
    total: Float[Array, "vocab width"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> (
    Float[Array, "batch time width"]
    | tuple[Float[Array, "batch time width"], Float[Array, "vocab width"]]
):
    """Token embedding plus position embedding, added in float32, returned in `dtype`.

    dtype: of the result (default: wte's).  The kernel reads float32 tables directly, without a cast
    to the result's dtype.  Tables of fewer than 128 columns are copied.
    tokens: clipped to the vocabulary (the data loader rejects others).
    tied: returns (result, wte).  Use this wte as the head: the embedding's rows are then added in
    place to the head's gradient, and no second array is written and summed.  That gradient is
    copied if its columns are not a multiple of 128.
    total: of gradients of wte so far (totals.py); if tied, it is returned in the place of wte, for
    the head to add to first.
    The gradients have the tables' dtypes.  They are summed in float32, with the same bits in every
    run.  Raises ValueError for tokens and tables that do not fit, NotImplementedError under
    implementation="mosaic" for a call that the kernel does not support.
    """
    dtype = jnp.dtype(wte.dtype if dtype is None else dtype)
    mosaic.check_axes("B T", tokens=tokens)
    tokens = ids.saturated("tokens", tokens)
    mosaic.check_axes("rows C", wte=wte, **({} if wpe is None else {"wpe": wpe}))
    if not wte.shape[0]:
        raise ValueError(f"wte has shape {wte.shape}, but the vocabulary needs at least 1 row")
    if wpe is not None and wpe.shape[1] != wte.shape[1]:
        raise ValueError(
            f"wpe has {wpe.shape[1]} columns, wte has {wte.shape[1]}; they must be equal"
        )
    if wpe is not None and tokens.shape[1] > wpe.shape[0]:
        raise ValueError(
            f"{tokens.shape[1]} tokens exceed the {wpe.shape[0]} positions of wpe: shorten the"
            " sequence or enlarge wpe"
        )
    arrays = tokens, wte, wpe
    options = dict(dtype=dtype, tied=tied, total=total)
    return dispatch.run("encoder", FORMS, implementation, *arrays, **options)


def encoder_reference(tokens, wte, wpe, *, dtype=None, tied=False):
    """The formula in jnp, in float32 (float64 for float64)."""
    stat = mosaic.stat_dtype(wte.dtype)
    tokens = jnp.clip(tokens, 0, wte.shape[0] - 1)
    # Casting before the gather sums the gradient in float32; XLA fuses the cast.
    y = wte.astype(stat)[tokens]
    if wpe is not None:
        y += wpe[: tokens.shape[1]].astype(stat)
    y = y.astype(wte.dtype if dtype is None else dtype)
    return (y, wte) if tied else y


# For rows of fewer than 128 columns, which the kernels pad, XLA's form is faster (H100, JAX 0.11.2,
# at 4x1024x100 12 times forward, 4 times backward).  Its backward pass adds with atomics, however,
# so the kernels run there too, for the same bits in every run.
def why_not(tokens, wte, wpe, *, dtype, **options) -> str | None:
    """Why the kernel does not support this call, or None."""
    result = jax.ShapeDtypeStruct((), dtype)
    reason = mosaic.unsupported_dtype(wte=wte, wpe=wpe, result=result)
    reason = reason or mosaic.empty(tokens=tokens, wte=wte, wpe=wpe)
    return reason or mosaic.too_many(**{"2 (B T + V)": 2 * (tokens.size + wte.shape[0])})


def why_slower(tokens, *arrays, **options) -> str | None:
    """Why XLA's form is faster, or None: generation takes as long as it has kernels."""
    return "XLA fuses the lookups of one position" if tokens.shape[1] == 1 else None


class _Loads(NamedTuple):
    """How `c` columns of a row are split into loads."""

    c: int
    tile: int  # columns of a load
    count: int
    layout: Any

    def each(self, body, first=0):
        """Runs body(columns) for every load of the columns from `first` on."""
        if self.count == 1:
            body(pl.ds(first, self.tile))
            return
        start = lambda i: first + jnp.minimum(i * self.tile, self.c - self.tile)
        pl.loop(0, self.count)(lambda i: body(pl.ds(start(i), self.tile)))

    def zeros(self):
        return mosaic.zeros((self.tile,), self.layout)


def _loads(c: int, *dtypes, overlap: bool = True) -> _Loads:
    """The loads of rows of c >= 128 columns.

    The last load ends at the end of the row and may overlap the one before.  With overlap=False no
    loads overlap; c must then be a multiple of 128.
    """
    widest = 16 // max(jnp.dtype(d).itemsize for d in dtypes)
    choices = [
        (128 * vec * k, vec)
        for vec in (1, 2, 4, 8)
        for k in range(1, 1024 // (128 * vec) + 1)
        if vec <= widest and c % vec == 0 and 128 * vec * k <= c
        if overlap or c % (128 * vec * k) == 0
    ]
    # Load as few columns twice as possible; one more load costs about as much as 64 columns.
    tile, vec = min(choices, key=lambda x: (mosaic.cdiv(c, x[0]) * (x[0] + 64), -x[1]))
    return _Loads(c, tile, mosaic.cdiv(c, tile), plgpu.Layout.WG_STRIDED((tile,), vec))


# ---- forward -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=3)
def _forward(tokens, wte, wpe, dtype):
    """Returns y (B, T, C).  A block takes one position of `_BATCH` sequences and reads wpe once.

    The blocks gather all tokens for the first `_SLAB` columns, then for the next.  The rows of wte
    for a batch exceed the L2 cache, but a slab of them fits, so repeated tokens hit the cache.
    """
    width = wte.shape[1]
    wte, wpe = _pad(wte), None if wpe is None else _pad(wpe)
    (b, t), c = tokens.shape, wte.shape[1]
    blocks = mosaic.cdiv(b, min(_BATCH, b)) * t  # for each slab
    slab = _SLAB if c % _SLAB == 0 else c
    loads = _loads(slab, dtype, *(table.dtype for table in (wte, wpe) if table is not None))
    y = mosaic.kernel(
        functools.partial(_gather, loads, blocks),
        name="encoder_forward",
        out_type=jax.ShapeDtypeStruct((b, t, c), dtype),
        **mosaic.grid(block=c // slab * blocks),
    )(tokens, wte, wpe)
    return y[..., :width]


def _gather(loads: _Loads, blocks, tokens_ref, wte_ref, wpe_ref, y_ref):
    """A block gathers a slab of columns for one position of some sequences."""
    (b, t), v = tokens_ref.shape, wte_ref.shape[0]
    batch = min(_BATCH, b)
    block = lax.axis_index("block")
    group, position = block % blocks // t, block % t
    # Past the last sequence the block writes it again, with the same values.
    sequences = [jnp.minimum(group * batch + i, b - 1) for i in range(batch)]
    ids = [jnp.clip(tokens_ref[sequence, position], 0, v - 1) for sequence in sequences]

    def body(columns):
        ys = [mosaic.load(wte_ref.at[token, columns], loads.layout) for token in ids]
        if wpe_ref is not None:
            shift = mosaic.load(wpe_ref.at[position, columns], loads.layout)
            ys = [y + shift for y in ys]
        for sequence, y in zip(sequences, ys, strict=True):
            mosaic.store(y_ref.at[sequence, position, columns], y)

    loads.each(body, first=block // blocks * loads.c)


# ---- backward ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _backward(tokens, dy, table, v, wte_dtype, positions, wpe_dtype):
    """Returns dwte (v, C) and dwpe (positions, C), or None for positions = 0.

    table: an array (v, C) to which dwte is added in place, or None.
    """
    (b, t), width = tokens.shape, dy.shape[-1]
    if table is not None:  # overlapping loads would add some columns twice
        dy, table = (mosaic.pad_axis(x, x.ndim - 1, 128) for x in (dy, table))
    dy = _pad(dy).reshape(b * t, -1)
    runs = _runs(tokens.reshape(-1), v)
    sums = _sum_tiles(runs, dy)
    dwte, *dwpe = _vocabulary(runs, dy, sums, table, v, wte_dtype, positions and t, wpe_dtype)
    dwpe = jnp.pad(dwpe[0][:, :width], ((0, positions - t), (0, 0))) if dwpe else None
    return dwte[:, :width], dwpe


def _runs(tokens, v):
    """(ids, order, ends): the sorted tokens, their places, and the run of every row.

    order[ends[i] : ends[v + i]] are the places of token i; both ends are 0 for an absent token.
    """
    n = tokens.size
    place = lax.iota(jnp.int32, n)
    # A radix sort takes two passes for 16 bits and four for 32.
    keys = jnp.clip(tokens, 0, v - 1).astype(jnp.uint16 if v <= 1 << 16 else jnp.uint32)
    ids, order = lax.sort((keys, place), num_keys=1, is_stable=True)
    differ = ids[1:] != ids[:-1]
    first_and_last = [jnp.pad(differ, side, constant_values=True) for side in ((1, 0), (0, 1))]
    is_end = jnp.stack(first_and_last)
    # One scatter writes both ends; all other elements get unique indices past the array.
    row = ids.astype(jnp.int32)
    at = jnp.where(
        is_end, jnp.stack([row, row + v]), 2 * v + lax.iota(jnp.int32, 2 * n).reshape(2, n)
    )
    ends = jnp.zeros(2 * v, jnp.int32)
    ends = ends.at[at].set(jnp.stack([place, place + 1]), mode="drop", unique_indices=True)
    return ids, order, ends


def _sum(load, start, stop, group, total, index=lambda i: i):
    """Adds load(index(i)) for i in [start, stop) to total, `group` rows at a time."""

    def step(i, total):
        first = start + i * group
        # All loads of a group are in flight together; past the end the last row has weight 0.
        at = [index(jnp.minimum(first + u, stop - 1)) for u in range(group)]
        weights = [jnp.where(first + u < stop, 1.0, 0.0) for u in range(group)]
        return total + functools.reduce(jnp.add, map(jnp.multiply, map(load, at), weights))

    return lax.fori_loop(0, (stop - start + group - 1) // group, step, total)


def _sum_tiles(runs, dy):
    """Sums of the tiles with a single token, (n // _TILE, C); other rows are undefined."""
    ids, order, _ = runs
    n, c = dy.shape
    tiles = n // _TILE
    if not tiles:
        return jnp.zeros((1, c), jnp.float32)
    return mosaic.kernel(
        functools.partial(_sum_tile, _loads(c, dy.dtype, jnp.float32)),
        name="encoder_backward_sums",
        out_type=jax.ShapeDtypeStruct((tiles, c), jnp.float32),
        **mosaic.grid(block=tiles),
    )(ids, order, dy)


def _sum_tile(loads: _Loads, ids_ref, order_ref, dy_ref, sums_ref):
    """A block sums one tile if all its places hold the same token."""
    n = ids_ref.shape[0]
    first = lax.axis_index("block") * _TILE

    def body(columns):
        load = lambda place: mosaic.load(dy_ref.at[place, columns], loads.layout)
        zeros, place = loads.zeros(), lambda i: order_ref[i]
        total = _sum(load, first, first + _TILE, 8, zeros, place)
        mosaic.store(sums_ref.at[lax.axis_index("block"), columns], total)

    same = ids_ref[first] == ids_ref[jnp.minimum(first + _TILE, n) - 1]
    pl.when(same)(lambda: loads.each(body))


def _vocabulary(runs, dy, sums, table, v, dtype, positions, wpe_dtype):
    """[dwte (v, C), dwpe (positions, C)].  A block writes one position or `_VOCAB` rows of dwte.

    With a table, dwte is added to it; rows of absent tokens are neither read nor written.
    """
    _, order, ends = runs
    c = dy.shape[1]
    blocks = mosaic.cdiv(v, _VOCAB)
    loads = _loads(c, dy.dtype, dtype, jnp.float32, overlap=table is None)
    out = [jax.ShapeDtypeStruct((v, c), dtype)]
    out += [jax.ShapeDtypeStruct((positions, c), wpe_dtype)] if positions else []
    call = mosaic.kernel(
        functools.partial(_vocabulary_body, loads, v, positions, table is not None),
        name="encoder_backward_vocabulary",
        out_type=[out] if table is None else [],
        **mosaic.grid(block=positions + blocks),
    )
    if table is None:
        return call(order, ends, dy, sums)[0]
    state = [table, *(lax.empty(dwpe.shape, dwpe.dtype) for dwpe in out[1:])]
    return mosaic.in_place(lambda refs, *arrays: call(*arrays, refs), state, order, ends, dy, sums)


def _vocabulary_body(
    loads: _Loads, v, positions, adds, order_ref, ends_ref, dy_ref, sums_ref, gradient_refs
):
    """A block writes a row of dwpe or some rows of dwte."""
    block = lax.axis_index("block")
    dwte_ref, *dwpe_ref = gradient_refs
    if positions:
        position = lambda: _sum_position(loads, positions, block, dy_ref, *dwpe_ref)
        pl.when(block < positions)(position)
    refs = _Runs(loads, v, adds, order_ref, ends_ref, dy_ref, sums_ref, dwte_ref)
    pl.when(block >= positions)(lambda: _write_rows(refs, block - positions))


def _sum_position(loads: _Loads, positions, position, dy_ref, dwpe_ref):
    """Writes the row of dwpe of one position."""
    n = dy_ref.shape[0]

    def body(columns):
        row = lambda i: dy_ref.at[i * positions + position, columns]
        load = lambda i: mosaic.load(row(i), loads.layout)
        batch, zeros = n // positions, loads.zeros()
        mosaic.store(dwpe_ref.at[position, columns], _sum(load, 0, batch, min(8, batch), zeros))

    loads.each(body)


class _Runs(NamedTuple):
    """The references from which rows of dwte are computed."""

    loads: _Loads
    v: int
    adds: bool  # adds to what dwte holds
    order: Any
    ends: Any
    dy: Any
    sums: Any
    dwte: Any

    def put(self, row, columns, total):
        at = self.dwte.at[row, columns]
        mosaic.store(at, mosaic.load(at, self.loads.layout) + total if self.adds else total)


def _write_rows(r: _Runs, block):
    """Writes `_VOCAB` rows of dwte."""
    blocks = mosaic.cdiv(r.v, _VOCAB)
    # The rows are far from each other, as the first rows of a vocabulary are the most common.
    rows = [block + i * blocks for i in range(_VOCAB)]
    safe = [jnp.minimum(row, r.v - 1) for row in rows]
    starts = [r.ends[row] for row in safe]
    counts = [r.ends[r.v + row] - start for row, start in zip(safe, starts, strict=True)]
    places = [r.order[start] for start in starts]

    def body(columns):
        # Most tokens of a vocabulary occur at most once in a batch, so all rows of the block load
        # their first place together (for an absent token any place, unused).
        firsts = [mosaic.load(r.dy.at[place, columns], r.loads.layout) for place in places]
        for row, count in zip(rows, counts, strict=True):  # stores zeros during these loads
            absent = False if r.adds else (count == 0) & (row < r.v)
            zero = lambda row=row: mosaic.store(r.dwte.at[row, columns], r.loads.zeros())
            pl.when(absent)(zero)
        for row, count, first in zip(rows, counts, firsts, strict=True):
            once = lambda row=row, first=first: r.put(row, columns, first)
            pl.when((count == 1) & (row < r.v))(once)
        pl.loop(0, _VOCAB)(lambda i: _write_run(r, block + i * blocks, columns))

    work = True if not r.adds else functools.reduce(jnp.maximum, counts) > 0
    pl.when(work)(lambda: r.loads.each(body))


def _write_run(r: _Runs, row, columns):
    """Writes a row of dwte if its token occurs more than once."""
    start = r.ends[jnp.minimum(row, r.v - 1)]
    stop = r.ends[jnp.minimum(r.v + row, 2 * r.v - 1)]

    @pl.when((stop - start > 1) & (row < r.v))
    def _():
        # [start, stop) = [start, head), whole tiles, [tail, stop)
        head = jnp.minimum((start + _TILE - 1) // _TILE * _TILE, stop)
        tail = jnp.maximum(stop // _TILE * _TILE, head)
        load = lambda place: mosaic.load(r.dy.at[place, columns], r.loads.layout)
        load_sum = lambda i: mosaic.load(r.sums.at[i, columns], r.loads.layout)
        place = lambda i: r.order[i]
        total = _sum(load, start, head, 4, r.loads.zeros(), place)
        total = _sum(load_sum, head // _TILE, tail // _TILE, 4, total)
        total = _sum(load, tail, stop, 4, total, place)
        r.put(row, columns, total)


def _pad(x: jax.Array) -> jax.Array:
    """Pads rows to at least 128 columns, one for each thread."""
    return mosaic.pad_axis(x, x.ndim - 1, 128) if x.shape[-1] < 128 else x


@functools.partial(custom_vjp, nondiff_argnums=(4, 5))
def _encoder(tokens, wte, wpe, total, dtype, tied):
    y = _forward(tokens, wte, wpe, dtype)
    return (y, wte if total is None else total) if tied else y


def _encoder_forward(tokens, wte, wpe, total, dtype, tied):
    return _encoder(tokens, wte, wpe, total, dtype, tied), (tokens, wte, wpe, total)


def _encoder_backward(dtype, tied, saved, gradients):
    tokens, wte, wpe, total = saved  # only the shapes and dtypes of wte and wpe are used
    dy, table = gradients if tied else (gradients, total)
    positions, wpe_dtype = (0, None) if wpe is None else (wpe.shape[0], wpe.dtype)
    dtype = wte.dtype if total is None else total.dtype
    dwte, dwpe = _backward(tokens, dy, table, wte.shape[0], dtype, positions, wpe_dtype)
    return None, *((dwte, dwpe, None) if total is None else (None, dwpe, dwte))


_encoder.defvjp(_encoder_forward, _encoder_backward)


def _kernels(tokens, wte, wpe, *, dtype, tied, total):
    return _encoder(tokens, wte, wpe, total, dtype, tied)


def _xla(tokens, wte, wpe, *, dtype, tied, total):
    wte, table = summed(wte, total, not tied), wte if total is None else total
    y = encoder_reference(tokens, wte, wpe, dtype=dtype)
    return (y, table) if tied else y


FORMS = (
    Form("general", _kernels, "sm_80", why_not, why_slower),
    Form("xla", _xla),
)
