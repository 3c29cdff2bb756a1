"""What a layer keeps of the tokens it has seen, so that the next token costs one position only."""

from dataclasses import dataclass

import jax


@dataclass
class Cache:
    """The memory of one layer in generation; the layer fills `arrays` in place while it is traced.

    The first call brings the prompts (B, T), filled up on the right; each later one a token of
    every row, which all rows keep at the same place, so that one slice is written.

    inside: (B, T) in the first call, (B, size) later, bool: where the row has a token by now.
    size: places for keys and values, at least T; without effect on a vLSTM.
    place: () int32, the place of the later call's token; T in the first of them.
    arrays: None before the first call; then keys and values (B, size, K, D), or the state
        (C, n, m).
    """

    inside: jax.Array
    size: int
    place: jax.Array | None = None
    arrays: tuple[jax.Array, ...] | None = None
