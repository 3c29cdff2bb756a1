"""The cache of a layer: with it, each further token costs one position."""

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The cache of one layer before a call; the layer returns the cache after it.

    The first call takes the prompts (B, T), padded on the right.  Each later call takes one token
    per row and stores it in the same slot of all rows, so that it writes one slice.

    positions: int32, (B, T) in the first call, (B, size) later: the position of each slot's token
        in its row's text, or -1 for an empty slot.
    size: number of slots for keys and values, at least T; a vLSTM ignores it.
    slot: () int32, the slot of a later call's token: T, T + 1, ...
    arrays: None before the first call; then keys and values (B, size, K, D), or the state
        (C, n, m).
    """

    positions: jax.Array
    size: int = field(metadata=dict(static=True))
    slot: jax.Array | None = None
    arrays: tuple[jax.Array, ...] | None = None
