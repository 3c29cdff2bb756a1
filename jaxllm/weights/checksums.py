"""Checksums of what a checkpoint holds: a changed byte passes the library that reads it.

Those of arrays are computed where the arrays are, in whole numbers: they are the same on any mesh,
and no array is copied for them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.data.cache import digest


def array_checksums(arrays: dict[str, Any]) -> dict[str, str]:
    """{name: 16 hex digits} of arrays, on devices (also of several hosts) or not."""
    sums = jax.device_get([_sums(x) for x in arrays.values()])
    return {
        name: f"{int(first):08x}{int(second):08x}"
        for name, (first, second) in zip(arrays, sums, strict=True)
    }


def changed(arrays: dict[str, Any], checksums: dict[str, str]) -> str | None:
    """Name of the first array that is not the one its checksum was made of, or None."""
    found = array_checksums({name: x for name, x in arrays.items() if name in checksums})
    return next((name for name in found if found[name] != checksums[name]), None)


def sealed(page: dict[str, Any]) -> dict[str, Any]:
    """A JSON page with a digest of itself."""
    return page | {"digest": digest(page)}


def check_seal(page: Any) -> None:
    """Raises ValueError for a JSON page that was changed; pages of before have no checksums."""
    if not isinstance(page, dict) or not isinstance(page.get("arrays"), dict):
        raise ValueError("its JSON page lists no arrays")
    content = {key: value for key, value in page.items() if key != "digest"}
    if ("checksums" in page or "digest" in page) and page.get("digest") != digest(content):
        raise ValueError("its JSON page was changed")


@jax.jit
def _sums(x) -> tuple[jax.Array, jax.Array]:
    """Two sums modulo 2^32: of the words, and of the words mixed with their places.

    Both maps are one to one in each word: a single word that is another changes both sums.
    """
    x = jnp.asarray(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
    words = words.astype(jnp.uint32)
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(words.ndim)):  # no reshape, which would gather a sharded array
        place += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = words + place * jnp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)  # MurmurHash3's last steps
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed ^= mixed >> 16
    return words.sum(dtype=jnp.uint32), mixed.sum(dtype=jnp.uint32)
