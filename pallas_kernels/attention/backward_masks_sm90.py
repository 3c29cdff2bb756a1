"""What a query sees, for both backward kernels: segments by tiles, and the logits with softcap."""

import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.attention.forward_sm90 import LOG2E

STATIC = ("lengths", "causal", "scale", "tile", "sms", "window", "softcap")


def segment_tiles(rows, columns, sizes):
    """(first, end), (B, blocks) int32: tiles of columns that share a segment with a block of rows.

    By the ranges of ids, so exact where documents are packed one after the other, and never too
    narrow.  sizes: (rows, rows of a block, columns, columns of a tile).
    """

    def ranges(ids, n, size):
        tiles = mosaic.cdiv(n, size)
        last = jnp.iinfo(jnp.int32)
        real = jnp.arange(tiles * size) < n
        ids = jnp.pad(ids[:, :n], ((0, 0), (0, tiles * size - n)))
        reduce = lambda f, fill: f(jnp.where(real, ids, fill).reshape(-1, tiles, size), axis=2)
        return reduce(jnp.min, last.max), reduce(jnp.max, last.min)

    (low, high), (least, most) = ranges(rows, *sizes[:2]), ranges(columns, *sizes[2:])
    meet = (low[:, :, None] <= most[:, None]) & (high[:, :, None] >= least[:, None])
    first = jnp.argmax(meet, axis=2)
    end = meet.shape[2] - jnp.argmax(meet[:, :, ::-1], axis=2)
    return first.astype(jnp.int32), jnp.where(meet.any(2), end, first).astype(jnp.int32)


def logits(s, scale, softcap):
    """Scores -> (logits in base 2, d logits / d (scale s) or None for 1)."""
    if softcap is None:
        return s * (scale * LOG2E), None
    # tanh of the hardware is good to 2^-11, which is 0.02 in logits of 50.
    tanh = 1 - 2 / (1 + jnp.exp2(s * (2 * LOG2E * scale / softcap)))
    return tanh * (softcap * LOG2E), 1 - tanh * tanh
