"""Tokens, labels, lengths, positions and segments of any integer dtype, as the kernels read them.

Every op widens its ids here before it decides how it runs, so that the kernel and the XLA form see
the same numbers.  Without that, jnp compares and clips in the ids' own dtype, where -100 is the
uint8 156, and casts numpy's int64 1 + 2^32 to 1.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Ids = jax.Array | np.ndarray
_LEAST, _MOST = -(2**31), 2**31 - 1


def saturated(name: str, x: Ids) -> jax.Array:
    """x as int32; numbers outside int32's range are clipped to it."""
    x = _checked(name, x)
    if not _fits(x):
        clip = np.clip if isinstance(x, np.ndarray) else jnp.clip
        x = clip(x, max(_LEAST, _range(x)[0]), _MOST)
    return _int32(x)


def labels(x: Ids, ignore_index: int) -> tuple[jax.Array, int]:
    """(labels as int32, ignore_index): the same labels are ignored, and the same are unknown."""
    x, ignore_index = _checked("labels", x), operator.index(ignore_index)
    if _fits(x) and _LEAST <= ignore_index <= _MOST:
        return _int32(x), ignore_index
    low, high = _range(x)
    ignored = x == np.array(ignore_index, x.dtype) if low <= ignore_index <= high else False
    x = saturated("labels", x)
    return jnp.where(ignored, -1, jnp.where(x < 0, -2, x)), -1  # no vocabulary has -2 or 2^31 - 1


def positions(x: Ids) -> jax.Array:
    """x as int32, or, where int32 might not hold x, as float32, from which angles are computed."""
    x = _checked("positions", x)
    return _int32(x) if _fits(x) else jnp.asarray(x.astype(np.float32))


def segments(*given: Ids | None) -> tuple:
    """Ids (B, n) as int32 that compare like the given ids within a row of all arrays together."""
    ids = [_checked("segment_ids", x) for x in given if x is not None]
    if not ids or not all(x.ndim for x in ids):  # the op rejects a shape that is not (B, n)
        return given
    if all(map(_fits, ids)):
        return tuple(map(_int32, ids))
    # Each id becomes the number of different smaller ids in its row.
    keys = [jnp.concatenate(part, axis=-1) for part in zip(*map(_words, ids), strict=True)]
    place = jnp.zeros_like(keys[0], jnp.int32) + jnp.arange(keys[0].shape[-1], dtype=jnp.int32)
    *keys, place = lax.sort((*keys, place), num_keys=len(keys))
    new = jnp.stack([key[..., 1:] != key[..., :-1] for key in keys]).any(0)
    new = jnp.concatenate([jnp.zeros_like(place[..., :1], bool), new], axis=-1)
    rank = jnp.cumsum(new, axis=-1, dtype=jnp.int32)
    _, rank = lax.sort((place, rank), num_keys=1)
    return tuple(jnp.split(rank, np.cumsum([x.shape[-1] for x in ids])[:-1], axis=-1))


def _words(x: Ids) -> list[jax.Array]:
    """x as keys for a sort: whether it is positive, its upper and its lower 32 bits."""
    negative = x < 0
    upper = x >> 32 if x.dtype.itemsize == 8 else -negative.astype(np.int32)
    return [jnp.asarray(part) for part in (~negative, upper.astype(np.uint32), x.astype(np.uint32))]


def _checked(name: str, x: Ids) -> Ids:
    """x, or int32 for a NumPy array that fits.  Raises ValueError if x cannot hold ids."""
    if not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array, not {type(x).__name__}: pass np.array({name})")
    if not (jnp.issubdtype(x.dtype, jnp.integer) or (x.dtype == bool and name != "positions")):
        raise ValueError(f"{name} is {x.dtype}: cast it to an integer dtype such as int32")
    if isinstance(x, np.ndarray) and (not x.size or _LEAST <= x.min() <= x.max() <= _MOST):
        return x.astype(np.int32)
    return x


def _range(x: Ids) -> tuple[int, int]:
    if x.dtype == bool:
        return 0, 1
    info = jnp.iinfo(x.dtype)
    return int(info.min), int(info.max)


def _fits(x: Ids) -> bool:
    low, high = _range(x)
    return _LEAST <= low and high <= _MOST


def _int32(x: Ids) -> jax.Array:
    return jnp.asarray(x.astype(np.int32))
