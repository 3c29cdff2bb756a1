"""The ladder of the vLSTM cell's forward pass (README.md)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from learn.ladder import COPY, CYCLES, MATMUL, SMS, Ladder, normal
from learn.layer_norm import loads
from pallas_kernels import mosaic
from pallas_kernels.mlstm import reference
from pallas_kernels.mosaic import LOG2E

TILE = 64  # positions of a tile, and of a chunk


def inputs(sizes):
    """q, k, v, i, f; sigmoid(f) is 0.95 for the median position, so a position matters for long."""
    batch, length, heads = (sizes[axis] for axis in ("B", "T", "NH"))
    widths = sizes["DQK"], sizes["DQK"], sizes["DV"]
    wide = (normal(n, (batch, length, heads, w), jnp.bfloat16) for n, w in enumerate(widths))
    return *wide, normal(3, (batch, length, heads)), 3 + normal(4, (batch, length, heads))


# The formula grows: rungs 1 and 2 compute a part of it.


def products(q, k, v, i, f):
    """h = s (q k^T) v, without gates."""
    return _products(q, k, v, lambda p: p)


def causal_products(q, k, v, i, f):
    """The same, where a position sees only itself and those before it."""
    return _products(q, k, v, jnp.tril)


def _products(q, k, v, mask):
    wide = jnp.promote_types(q.dtype, jnp.float32)
    p = jnp.einsum("bthd,bjhd->bhtj", q, k, preferred_element_type=wide)
    p = mask(p * q.shape[-1] ** -0.5).astype(q.dtype)
    return jnp.einsum("bhtj,bjhv->bthv", p, v, preferred_element_type=wide).astype(q.dtype)


class Weights(NamedTuple):
    """The gates' numbers, (B, NH, chunks, positions) in float32."""

    row: jax.Array  # s D[t, j] = 2^(row[t] + col[j])
    col: jax.Array
    least: jax.Array  # e^-m, the least denominator of a row
    carried: jax.Array  # weight of the state before the chunk in a row, times s
    admit: jax.Array  # weight of a position in the state after the chunk
    decay: jax.Array  # (B, NH, chunks): weight of the state before a chunk in the state after it


def weights(i, f, size, s) -> Weights:
    """Computes the gates' numbers for chunks of `size` positions; i, f (B, T, NH).

    s, the scale of q . k, is part of `row` and `carried`, so that it costs the kernels nothing.
    """
    chunks = lambda x: jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1, size)
    i, b = chunks(i), jnp.cumsum(chunks(jax.nn.log_sigmoid(f)), axis=3)
    top = lax.cummax(i - b, axis=3)  # b + top is the largest logarithm of D in a row
    # The stabiliser of the state after a chunk, and before it: the largest weight in that state.
    total = jnp.cumsum(b[..., -1], axis=2)
    before_it = total - b[..., -1]
    after = total + jnp.maximum(lax.cummax(top[..., -1] - before_it, axis=2), 0)
    before = jnp.pad(after[..., :-1], [(0, 0), (0, 0), (1, 0)])
    m = b + jnp.maximum(before[..., None], top)
    return Weights(
        row=(b - m) * LOG2E + math.log2(s),
        col=(i - b) * LOG2E,
        least=jnp.exp(-m),
        carried=jnp.exp(b + before[..., None] - m) * s,
        admit=jnp.exp(b[..., -1:] - b + i - after[..., None]),
        decay=jnp.exp(b[..., -1] + before - after),
    )


def buffer(dtype, *shape):
    """A buffer in shared memory that TMA fills and wgmma reads."""
    return plgpu.SMEM(shape, dtype, transforms=mosaic.wgmma_tiles(shape[-1], dtype))


def _heads(sizes):
    return sizes["B"] * sizes["NH"]


def _pairs(sizes):
    """Pairs of tiles, on the diagonal and below it."""
    tiles = sizes["T"] // TILE
    return _heads(sizes) * tiles * (tiles + 1) / 2


def _bytes(sizes):
    positions = sizes["B"] * sizes["T"] * sizes["NH"]
    return positions * (2 * 2 * (sizes["DQK"] + sizes["DV"]) + 2 * 4)


def _k_v(sizes):
    return sizes["B"] * sizes["T"] * sizes["NH"] * 2 * (sizes["DQK"] + sizes["DV"])


def _states(sizes):
    """Bytes of the states before all chunks."""
    return _heads(sizes) * sizes["T"] // TILE * sizes["DQK"] * sizes["DV"] * 2


def _outer_products(pairs, blocks):
    """128 steps of 0.3 us for each pair of tiles; so many blocks on an SM."""
    return lambda sizes: pairs(sizes) * (sizes["DQK"] + TILE) * 0.3 / (blocks * SMS)


def _all_pairs(sizes):
    return _heads(sizes) * (sizes["T"] // TILE) ** 2


def _exponentials(sizes):
    return _pairs(sizes) * TILE**2 / 16 / SMS / CYCLES  # 16 a cycle of an SM


def _gates(sizes):
    return _outer_products(_pairs, 3)(sizes) + _exponentials(sizes)


def _tensor_core(sizes):
    flops = _pairs(sizes) * 2 * TILE**2 * (sizes["DQK"] + sizes["DV"])
    return flops / MATMUL + _exponentials(sizes)


def _walk(sizes, microseconds):
    """Steps of a walk along the chunks; a block for each head, at most one on an SM."""
    return math.ceil(_heads(sizes) / SMS) * sizes["T"] / TILE * microseconds


def _states_first(sizes):
    walk = max(_walk(sizes, 1.2), (_k_v(sizes) + _states(sizes)) / COPY)
    return walk + (_bytes(sizes) + _states(sizes)) / COPY + 20


def _ships(sizes):
    spans = 1 + (_heads(sizes) * sizes["DV"] // TILE * 3 <= 2 * SMS)  # walks
    return (spans * _k_v(sizes) + 2 * _states(sizes) + _bytes(sizes)) / COPY + 12


def fewer_keys(book, q, k, v, i, f):
    """No block reads the keys after its rows."""
    of_v = loads(book, v)
    tiles = q.shape[1] // TILE
    done, wanted = sum(e.bytes for e in of_v), v.nbytes * (tiles + 1) // 2
    if not of_v:
        return "no block loads v from global memory"
    if done > wanted:
        return f"{done} bytes of v are loaded where {wanted} would do"


def _multiplied(book):
    return sum(e.count for e in book.events if e.kind == "wgmma")


def tensor_core(book, q, k, v, i, f):
    """Both products come from wgmma."""
    per_pair = TILE**2 * (q.shape[-1] + v.shape[-1])
    wanted = q.shape[0] * q.shape[1] * q.shape[2] // TILE * per_pair
    if _multiplied(book) < wanted:
        return f"wgmma does {_multiplied(book)} of at least {wanted} multiply-adds"


def linear(book, q, k, v, i, f):
    """The products of chunks of 64 with a state: their number grows with T."""
    per_chunk = TILE**2 * (q.shape[-1] + v.shape[-1]) + 2 * TILE * q.shape[-1] * v.shape[-1]
    most = q.shape[0] * q.shape[1] * q.shape[2] // TILE * per_chunk
    if _multiplied(book) > most:
        return f"wgmma does {_multiplied(book)} multiply-adds where {most} would do"
    return tensor_core(book, q, k, v, i, f)


def blocks_for_chunks(book, q, k, v, i, f):
    """The last kernel has a block for each chunk."""
    chunks = q.shape[0] * q.shape[1] * q.shape[2] // TILE
    last = max((e.kernel for e in book.events), default=0)
    blocks = len({e.block for e in book.events if e.kernel == last})
    if blocks < chunks:
        return f"{blocks} blocks make h of {chunks} chunks"


LADDER = Ladder(
    name="vlstm",
    reference=reference.chunkwise,
    inputs=inputs,
    sizes=(
        {"B": 4, "T": 8192, "NH": 6, "DQK": 64, "DV": 128},
        {"B": 16, "T": 2048, "NH": 6, "DQK": 64, "DV": 128},
    ),
    small={"B": 1, "T": 128, "NH": 1, "DQK": 64, "DV": 128},
    again={"B": 2, "T": 64, "NH": 2, "DQK": 64, "DV": 128},
    bytes=_bytes,
    flops=lambda sizes: 0,
    counted=(
        _outer_products(_all_pairs, 4),
        _outer_products(_pairs, 3),
        _gates,
        _tensor_core,
        lambda sizes: max(_walk(sizes, 2.5), _bytes(sizes) / COPY),
        _states_first,
        _ships,
    ),
    properties={2: fewer_keys, 4: tensor_core, 5: linear, 6: blocks_for_chunks},
    formulas={1: products, 2: causal_products},
)
