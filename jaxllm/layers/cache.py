"""The cache of a layer: with it, each further token costs one position."""

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Cache:
    """The cache of one layer before a call; the layer returns the cache after it.

    The first call takes the prompts (B, T), padded on the right.  Each later call takes one token
    per row, which follows its row's text: slot n of a row has the row's token n.

    lengths: (B,) int32, tokens of each row's text, including the call's.
    size: slots for keys and values; a token beyond overwrites the last.  A vLSTM ignores it.
    float8: whether keys and values are kept in float8 (e4m3), divided by a scale of each row and
        head, instead of the dtype of the activations; a vLSTM ignores it.
    arrays: None before the first call; then keys and values (B, size, K, D), with float8 also
        their scales (B, K); or the state (C, n, m).
    """

    lengths: jax.Array
    size: int = field(metadata=dict(static=True))
    float8: bool = field(default=False, metadata=dict(static=True))
    arrays: tuple[jax.Array, ...] | None = None
