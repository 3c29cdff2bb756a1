"""Where the heads of q, k, v, h and of their gradients stand, for all kernels of the mLSTM cell."""

from dataclasses import dataclass, field
from typing import Any, Self

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Heads:
    """Heads of one width, side by side in an array whose columns are cut into tiles of L.

    Other columns may stand beside them: q, k and v may be parts of the same array.
    """

    array: Any  # (B,T,tiles,L), or a reference to it
    tiles: int = field(metadata=dict(static=True))  # across a head
    first: int = field(metadata=dict(static=True))  # tile of the array

    @classmethod
    def of(cls, x: jax.Array, width: int, size: int, start: int = 0) -> Self:
        """Heads of `width` columns, from column `start` of x on, in tiles of `size` columns.

        x: (B,T,NH,D) or (B,T,P); it is not copied.
        """
        return cls(x.reshape(*x.shape[:2], -1, size), width // size, start // size)

    def tile(self, head, n):
        """The array's tile that is the n-th of a head."""
        return head * self.tiles + n + self.first

    def at(self, batch, rows, head, n):
        """A reference to some rows of the n-th tile of a head."""
        return self.array.at[batch, rows, self.tile(head, n)]
