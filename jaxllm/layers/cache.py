"""What a layer keeps of the tokens it has seen, so that the next token costs one position only."""

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """The memory of one layer in generation, before a call; the layer returns the one after it.

    The first call brings the prompts (B, T), filled up on the right; each later one a token of
    every row, which all rows keep at the same place, so that one slice is written.

    positions: (B, T) in the first call, (B, size) later, int32: where in its row's text each
        place's token stands, and -1 for a place without a token so far.
    size: places for keys and values, at least T; without effect on a vLSTM.
    place: () int32, the place of the later call's token; T in the first of them.
    arrays: None before the first call; then keys and values (B, size, K, D), or the state
        (C, n, m).
    """

    positions: jax.Array
    size: int = field(metadata=dict(static=True))
    place: jax.Array | None = None
    arrays: tuple[jax.Array, ...] | None = None
