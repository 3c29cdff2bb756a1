"""What both forms of decode_attention share: how keys are split over blocks, masked and merged.

A block takes some tiles of 64 keys of one row and one kv head.  The T H/K queries that share the kv
head are 64 rows; row t H/K + g is of position t.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import LOWEST, logits, online_softmax
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, along

FP8 = jnp.float8_e4m3fn
KEYS = 64  # of a tile: 16 KB for D = 128 in bfloat16
_STAGES = 4  # tiles of K and of V in flight, at most
_SMEM = 112 * 1024  # of a block, so that an SM (228 KB) holds two
_START = 2  # tiles that would take as long as a block takes to start, and its part to merge
_WHOLE = 4  # so few tiles take no longer than a second kernel that merges (an estimate)
_LEAST_SPLITS = 8  # of several rows, whose lengths may differ, if each has so many tiles
_MOST_SPLITS = 33  # two blocks for each of 132 SMs, of one row with 8 kv heads


class Plan(NamedTuple):
    """What is static in a call of the kernel; see the picture."""

    t: int
    keys: int  # S
    group: int  # query heads of a kv head
    width: int  # D
    dtype: Any  # of the matmuls
    fp8: bool
    scale: float
    window: int | None
    softcap: float | None
    stages: int
    splits: int
    appends: bool  # the newest position is not in the cache yet


def splits_of(tiles: int, pairs: int, blocks: int, least: int) -> int:
    """Over how many blocks a pair (row, kv head) is split: the number that should take least time.

    blocks: of one wave.
    """
    if tiles <= _WHOLE:
        return 1
    waves = lambda n: mosaic.cdiv(pairs * n, blocks) * (mosaic.cdiv(tiles, n) + _START)
    return min(range(min(least, tiles), min(_MOST_SPLITS, tiles) + 1), key=waves)


def plan(q, k, scale, window, softcap, appends=False) -> Plan:
    (b, t, h, d), (_, s, kv, _) = q.shape, k.shape
    fp8, tile = k.dtype == FP8, KEYS * d * k.dtype.itemsize
    others = ROWS * d * (2 + 4) + (2 * KEYS * d * 2 if fp8 else 0)  # q and o; wide
    per_sm = 2 if (_SMEM - others) // (2 * tile) >= 2 else 1
    stages = min(_STAGES, (2 * _SMEM // per_sm - others) // (2 * tile))
    seen = s if window is None else min(s, window + t - 1)
    tiles = mosaic.cdiv(seen, KEYS)
    least = max(1, min(_LEAST_SPLITS, tiles // _LEAST_SPLITS)) if b > 1 else 1
    # One block on each SM takes all that memory gives; a second one hides float8's conversion.
    splits = splits_of(tiles, b * kv, (per_sm if fp8 else 1) * mosaic.sm_count(), least)
    return Plan(t, s, h // kv, d, q.dtype, fp8, scale, window, softcap, stages, splits, appends)


class Share(NamedTuple):
    """What a block works on: tiles [low, high) of the cache of a row and a kv head."""

    batch: Any
    split: Any
    head: Any
    length: Any  # keys of its row in the cache
    low: Any
    high: Any


def share_of(p: Plan, lengths_ref) -> Share:
    batch, split, head = (lax.axis_index(name) for name in ("batch", "split", "head"))
    length = jnp.minimum(lengths_ref[batch], p.keys)
    first = jnp.int32(0)
    if p.window is not None:
        first = lax.div(jnp.maximum(length - p.t - p.window + 1, 0), jnp.int32(KEYS))
    length = length - p.appends
    count = lax.div(length + KEYS - 1, jnp.int32(KEYS)) - first
    end = lambda n: first + lax.div(n * count, jnp.int32(p.splits))
    return Share(batch, split, head, length, end(split), end(split + 1))


def capped(p: Plan, x):
    """(logits, factor) of x = q k^T: the logits in base 2 are their product."""
    if p.softcap is None:
        return x, p.scale * LOG2E
    return logits(x, p.scale, p.softcap)[0], 1.0


def weights_of(p: Plan, b: Share, x, tile, m):
    """`online_softmax` of a tile x = q k^T."""
    x, factor = capped(p, x)
    return online_softmax(_masked(p, b, x, tile), factor, m)


def _masked(p: Plan, b: Share, x, tile):
    """The logits x of a tile, with -inf where a row does not see a key."""
    last = b.length - 1 + p.appends  # the last position; the first one is T - 1 before
    crosses = tile * KEYS + KEYS - 1 > last - (p.t - 1) - p.appends
    if p.window is not None:
        crosses |= tile * KEYS <= last - p.window
    return lax.cond(crosses, lambda x: _mask(p, b, x, tile), lambda x: x, x)


def _mask(p: Plan, b: Share, x, tile):
    iota = lambda layout, n: plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
    appends = p.appends
    place = b.length + appends - p.t + lax.div(iota(ROW, ROWS), jnp.int32(p.group))
    place = along(place, x.shape, 0)
    key = along(tile * KEYS + iota(COL, KEYS), x.shape, 1)
    x = jnp.where(key <= place - appends, x, -jnp.inf)
    return x if p.window is None else jnp.where(place - key < p.window, x, -jnp.inf)


def merge(o, lse):
    """The softmax over all keys from the splits' (axis 1), in one kernel of XLA."""
    # As a number of each row, XLA would take the maximum in a separate kernel; so it must be one
    # of each element, which o * 0 makes of it (XLA does not drop it: o might be infinite).
    lse = lse[..., None] + o * 0
    o, lse = (list(jnp.unstack(x, axis=1)) for x in (o, lse))
    # Sums in order, which jnp.sum does not promise.  The largest is finite for a row without keys.
    largest = functools.reduce(jnp.maximum, lse, jnp.float32(LOWEST))
    weights = [jnp.exp(x - largest) for x in lse]
    total = functools.reduce(jnp.add, weights)
    y = functools.reduce(jnp.add, [w * x for w, x in zip(weights, o, strict=True)])
    return y / jnp.where(total > 0, total, 1)
