"""What a layer keeps of the tokens it has seen, so that the next token costs one position only."""

from dataclasses import dataclass

import jax


@dataclass
class Cache:
    """The memory of one layer in generation; the layer fills `arrays` in place while it is traced.

    lengths: (B,) int32, tokens of each row, those of the call under way included.  The first call
        brings the prompts, filled up on the right; each later one the token at lengths - 1.
    size: positions that are kept at most; without effect on a vLSTM.
    arrays: None before the first call; then keys and values (B, size, K, D), or the state
        (C, n, m).
    """

    lengths: jax.Array
    size: int
    arrays: tuple[jax.Array, ...] | None = None
