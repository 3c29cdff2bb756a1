"""Token and position embedding, the first layer of every model here.

    y[b, t] = wte[tokens[b, t]] + wpe[t]                    (wpe only for learnt positions)
    dwte[v] = sum of dy[b, t] over the places where tokens[b, t] = v
    dwpe[t] = sum_b dy[b, t]

The forward pass gathers rows.  The backward pass must not scatter with atomics, whose order, and so
the last bits, change from run to run.  XLA's stable sort (lax.sort) groups the places of each
token, and two kernels sum the places in that order:

    sorted tokens   | 3 3 3 3 | 3 3 3 3 | 3 5 5 8 | 8 8 8 8 |       tiles (of 4 here, of 32 there)
    kernel 1          sum       sum                 sum             of tiles with a single token
    kernel 2          dwte[3] = sum + sum + 1 place, dwte[8] = 1 place + sum, dwte[5] = 2 places

  1. One block sums each tile of 32 places with a single token.  Tokens of text are Zipf
     distributed: the most common one may fill 5% of the places, too many for one block to sum.
  2. A block for each row of the vocabulary sums its run: the sums of whole tiles and the places
     before and after them.  It writes the row of dwte (V, C) once, zeros included.

XLA sums dwpe.
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
from pallas_kernels.options import checked, with_gradient

_TILE = 32  # places of one token that one block sums: 64 took 4% longer (docs/performance.md)
_IN_FLIGHT = 4  # rows of a run that are loaded together; with 8 fewer blocks fit an SM


@checked
def encoder(
    tokens: Integer[ids.Ids, "batch time"],
    wte: Float[Array, "vocab width"],
    wpe: Float[Array, "positions width"] | None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "batch time width"]:
    """wte[tokens] + wpe[0 ... time - 1], added in float32, returned in `dtype`.

    dtype: of the result (default: wte's).  The kernel reads float32 tables directly, without a cast
    to the result's dtype.  Tables of fewer than 128 columns are copied.
    tokens: clipped to the vocabulary (the data loader rejects others).
    The gradients have the tables' dtypes.  They are summed in float32, with the same bits in every
    run.
    """
    dtype = jnp.dtype(wte.dtype if dtype is None else dtype)
    mosaic.check_axes("B T", tokens=tokens)
    tokens = ids.saturated("tokens", tokens)
    mosaic.check_axes("rows C", wte=wte, **({} if wpe is None else {"wpe": wpe}))
    if not wte.shape[0]:
        raise ValueError(f"wte has shape {wte.shape}, but the vocabulary needs at least 1 row")
    if wpe is not None and wpe.shape[1] != wte.shape[1]:
        raise ValueError(f"wpe has {wpe.shape[1]} columns, wte has {wte.shape[1]}")
    if wpe is not None and tokens.shape[1] > wpe.shape[0]:
        raise ValueError(f"{tokens.shape[1]} tokens exceed the {wpe.shape[0]} positions of wpe")
    return dispatch.run("encoder", FORMS, implementation, tokens, wte, wpe, dtype=dtype)


def encoder_reference(tokens, wte, wpe, *, dtype=None):
    """The formula in jnp, in float32 (float64 for float64)."""
    stat, tokens = mosaic.stat_dtype(wte.dtype), jnp.clip(tokens, 0, wte.shape[0] - 1)
    # Casting before the gather sums the gradient in float32; XLA fuses the cast.
    place = mosaic.place((tokens, slice(None)), (wte, slice(1, None)))
    y = wte.astype(stat).at[tokens].get(out_sharding=place)
    if wpe is not None:
        y += wpe[: tokens.shape[1]].astype(stat)
    return y.astype(wte.dtype if dtype is None else dtype)


# For rows of fewer than 128 columns, which the kernels pad, XLA is faster (H100, JAX 0.11.2, at
# 4x1024x100 12 times forward, 4 times backward), but adds with atomics; so kernels run there, too.
def why_not(tokens, wte, wpe, *, dtype) -> str | None:
    reason = mosaic.unsupported_dtype(wte=wte, wpe=wpe, result=jax.ShapeDtypeStruct((), dtype))
    reason = reason or mosaic.empty(tokens=tokens, wte=wte, wpe=wpe)
    return reason or mosaic.too_many(**{"2 (B T + V)": 2 * (tokens.size + wte.shape[0])})


def why_slower(tokens, *arrays, dtype) -> str | None:
    """Why XLA's form is faster, or None: in generation the number of kernels decides the time."""
    return "XLA fuses the lookups of one position" if tokens.shape[1] == 1 else None


class _Loads(NamedTuple):
    """How `c` columns of a row are split into loads."""

    c: int
    tile: int  # columns of a load
    count: int
    layout: Any

    def each(self, body):
        if self.count == 1:
            body(pl.ds(0, self.tile))
            return
        start = lambda i: jnp.minimum(i * self.tile, self.c - self.tile)
        pl.loop(0, self.count)(lambda i: body(pl.ds(start(i), self.tile)))

    def zeros(self):
        return mosaic.zeros((self.tile,), self.layout)


def _loads(c: int, *dtypes) -> _Loads:
    """The loads of rows of c >= 128 columns.

    The last load ends at the end of the row and may overlap the one before.
    """
    widest = 16 // max(jnp.dtype(d).itemsize for d in dtypes)
    choices = [
        (128 * vec * k, vec)
        for vec in (1, 2, 4, 8)
        for k in range(1, 1024 // (128 * vec) + 1)
        if vec <= widest and c % vec == 0 and 128 * vec * k <= c
    ]
    # Load as few columns twice as possible; one more load costs about as much as 64 columns.
    tile, vec = min(choices, key=lambda x: (mosaic.cdiv(c, x[0]) * (x[0] + 64), -x[1]))
    return _Loads(c, tile, mosaic.cdiv(c, tile), plgpu.Layout.WG_STRIDED((tile,), vec))


# ---- forward -----------------------------------------------------------------------------------


@jax.jit(static_argnums=3)
def _forward(tokens, wte, wpe, dtype):
    """(y (B, T, C), what `_backward` needs); a block gathers the row of one token."""
    tables = _pad(wte), None if wpe is None else _pad(wpe)
    (b, t), c = tokens.shape, tables[0].shape[1]
    loads = _loads(c, dtype, *(table.dtype for table in jax.tree.leaves(tables)))
    y = mosaic.kernel(
        functools.partial(_gather, loads),
        name="encoder_forward",
        out_type=jax.ShapeDtypeStruct((b, t, c), dtype),
        **mosaic.grid(block=b * t),
    )(tokens, *tables)
    return y[..., : wte.shape[1]], (tokens, wte, wpe)


def _gather(loads: _Loads, tokens_ref, wte_ref, wpe_ref, y_ref):
    sequence, position = mosaic.divide(lax.axis_index("block"), tokens_ref.shape[1])
    token = jnp.clip(tokens_ref[sequence, position], 0, wte_ref.shape[0] - 1)

    def body(columns):
        y = mosaic.load(wte_ref.at[token, columns], loads.layout)
        if wpe_ref is not None:
            y += mosaic.load(wpe_ref.at[position, columns], loads.layout)
        mosaic.store(y_ref.at[sequence, position, columns], y)

    loads.each(body)


# ---- backward ----------------------------------------------------------------------------------


@jax.jit(static_argnums=0)
def _backward(_, saved, dy):
    tokens, wte, wpe = saved  # only the shapes and dtypes of wte and wpe are used
    v, width = wte.shape
    rows = _pad(dy).reshape(tokens.size, -1)
    runs, c = _runs(tokens.reshape(-1), v), rows.shape[1]
    dwte = mosaic.kernel(
        functools.partial(_sum_run, _loads(c, dy.dtype, wte.dtype, jnp.float32)),
        name="encoder_backward_vocabulary",
        out_type=jax.ShapeDtypeStruct((v, c), wte.dtype),
        **mosaic.grid(row=v),
    )(*runs[1:], rows, _sum_tiles(runs, rows))[:, :width]
    if wpe is None:
        return None, dwte, None
    dwpe = dy.astype(jnp.float32).sum(0).astype(wpe.dtype)
    return None, dwte, jnp.pad(dwpe, ((0, wpe.shape[0] - len(dwpe)), (0, 0)))


def _runs(tokens, v):
    """(ids, order, ends): the sorted tokens, their places, and the run of every row.

    order[ends[i] : ends[v + i]] are the places of token i; both ends are 0 for an absent token.
    """
    n = tokens.size
    place = lax.iota(jnp.int32, n)
    ids, order = lax.sort((jnp.clip(tokens, 0, v - 1), place), num_keys=1, is_stable=True)
    differ = ids[1:] != ids[:-1]
    first_and_last = [jnp.pad(differ, side, constant_values=True) for side in ((1, 0), (0, 1))]
    # One scatter writes both ends; all other elements get unique indices past the array.
    past = 2 * v + lax.iota(jnp.int32, 2 * n).reshape(2, n)
    at = jnp.where(jnp.stack(first_and_last), jnp.stack([ids, ids + v]), past)
    ends = jnp.zeros(2 * v, jnp.int32)
    ends = ends.at[at].set(jnp.stack([place, place + 1]), mode="drop", unique_indices=True)
    return ids, order, ends


def _sum(load, start, stop, total, index=lambda i: i):
    """Adds load(index(i)) for i in [start, stop) to total."""

    def step(i, total):
        first = start + i * _IN_FLIGHT
        # Past the end the last row has weight 0.
        at = [index(jnp.minimum(first + u, stop - 1)) for u in range(_IN_FLIGHT)]
        weights = [jnp.where(first + u < stop, 1.0, 0.0) for u in range(_IN_FLIGHT)]
        return total + functools.reduce(jnp.add, map(jnp.multiply, map(load, at), weights))

    return lax.fori_loop(0, (stop - start + _IN_FLIGHT - 1) // _IN_FLIGHT, step, total)


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
    tile = lax.axis_index("block")
    first, last = tile * _TILE, (tile + 1) * _TILE

    def body(columns):
        load = lambda place: mosaic.load(dy_ref.at[place, columns], loads.layout)
        total = _sum(load, first, last, loads.zeros(), lambda i: order_ref[i])
        mosaic.store(sums_ref.at[tile, columns], total)

    pl.when(ids_ref[first] == ids_ref[last - 1])(lambda: loads.each(body))


def _sum_run(loads: _Loads, order_ref, ends_ref, dy_ref, sums_ref, dwte_ref):
    """A block writes one row of dwte."""
    row = lax.axis_index("row")
    start, stop = ends_ref[row], ends_ref[dwte_ref.shape[0] + row]
    # [start, stop) = [start, head), whole tiles, [tail, stop)
    head = jnp.minimum((start + _TILE - 1) // _TILE * _TILE, stop)
    tail = jnp.maximum(stop // _TILE * _TILE, head)

    def body(columns):
        load = lambda place: mosaic.load(dy_ref.at[place, columns], loads.layout)
        load_sum = lambda i: mosaic.load(sums_ref.at[i, columns], loads.layout)
        place = lambda i: order_ref[i]
        total = _sum(load, start, head, loads.zeros(), place)
        total = _sum(load_sum, head // _TILE, tail // _TILE, total)
        mosaic.store(dwte_ref.at[row, columns], _sum(load, tail, stop, total, place))

    loads.each(body)


def _pad(x: jax.Array) -> jax.Array:
    """Pads rows to at least 128 columns, one for each thread."""
    return mosaic.pad_axis(x, x.ndim - 1, 128) if x.shape[-1] < 128 else x


_encoder = with_gradient(_forward, _backward, nondiff_argnums=(3,))

FORMS = Form("general", _encoder, "sm_80", why_not, why_slower), Form("xla", encoder_reference)
