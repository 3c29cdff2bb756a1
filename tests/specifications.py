"""What the code that emits MLIR does, for interpreter_extension.py to run in its place.

ARRAYS has functions of the code's options and of whole arrays, in jnp.  Those of `on_memory` get
what is in the references, and return what the code writes: {number of the reference: content}.
Code that `stores` gets the first reference's shape alone, and returns a place in it, too.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from pallas_kernels import ampere, mosaic
from pallas_kernels.options import own_settings
from pallas_kernels.quantized import formats, unpack
from pallas_kernels.quantized.formats import COLUMNS, LANES, TURN, WORDS


@dataclasses.dataclass(frozen=True)
class OnMemory:
    run: Callable
    asynchronous: bool = False  # its result can be read only after a `wait`
    commits: bool = False  # ends a group of copies
    copies: int | None = None  # that a `wait` leaves under way
    stores: bool = False  # to a part of the first reference, which it does not read


def on_memory(code) -> OnMemory | None:
    """The specification of code that works on references, or None."""
    if code.func is ampere._wait:
        return OnMemory(dict, copies=code.args[0])
    return MEMORY.get(code.func)


def load_rows(array, tile, batch, head, first, end):
    rows, found = np.arange(first, first + len(tile)), np.zeros_like(tile)
    ok = rows < end
    found[ok, : array.shape[3]] = array[batch, rows[ok], head]
    return {1: found}


def load_line(array, target, batch, head, first):
    return {1: array[batch, head, first : first + len(target)]}


def store_rows(array, tile, batch, head, first, end):
    n = min(max(int(end) - int(first), 0), len(tile))
    return {0: ((batch, slice(first, first + n), head), tile[:n, : array.shape[3]])}


def store_number(ref, x):
    return {0: np.full_like(ref, x)}


@own_settings()
def tile(block, bits, format, words, scales, offsets):
    words = jnp.stack([w.reshape(4, LANES, WORDS) for w in words], 1)
    steps = 1 if format == "2:4" else words.shape[1]
    words = words.reshape(4, steps, -1, LANES, WORDS)
    w = formats.unpack(words, bits, format).T[:, 64 * block :][:, :64]
    across = lambda rows: jnp.concatenate(
        [jnp.repeat(by_column(s), 64 // len(rows), 1) for s in rows], 1
    )
    w = w * across(scales)
    if offsets:
        w = w + across(offsets)
    if format == "2:4":
        w = w.reshape(64, 16, 4).swapaxes(1, 2).reshape(64, 64)
    return w.astype(jnp.bfloat16)


@own_settings()
def transposed(bits, format, words, scales, offsets):
    words = jnp.stack(words).reshape(len(words), -1, 1, LANES, WORDS)
    by_n = lambda rows: jnp.concatenate([by_column(s) for s in rows]).T
    w = formats.unpack(words, bits, format) * by_n(scales)
    return (w + by_n(offsets) if offsets else w).astype(jnp.bfloat16)


def by_column(scales):
    """Scales (tiles, 16) of n = (tile, r, 8) as (16 tiles, 1) float32."""
    return scales.reshape(-1, 8, 2).swapaxes(1, 2).reshape(-1, 1).astype(jnp.float32)


@own_settings()
def dot(t, acc, x, words, scales):
    words = jnp.stack(words, 1).reshape(1, TURN, len(words), LANES, WORDS)
    w = formats.unpack(words, t.bits, t.format).reshape(TURN, t.step, COLUMNS)
    across = []
    for a in scales:
        a = a.reshape(t.rows, t.groups, COLUMNS // 2, 2).swapaxes(2, 3)
        a = a.reshape(t.rows, t.groups, COLUMNS).astype(jnp.float32)
        across += [jnp.repeat(jnp.repeat(a, TURN // t.rows, 0), t.step // t.groups, 1)]
    w = w * across[0] + (across[1] if across[1:] else 0)
    y = jnp.einsum("sk,skn->sn", x.astype(jnp.float32), w, precision="highest")
    return acc + y.reshape(-1)


def multiply(acc, p, tile):
    tile = jnp.concatenate([block for x in tile for block in x], axis=1).astype(acc.dtype)
    return acc + jnp.matmul(p.astype(acc.dtype), tile, precision="highest")


WGMMAS = {mosaic._multiply}  # read shared memory as wgmma does
ARRAYS = {
    ampere._as_left: lambda dtype, x: x.astype(dtype),
    # Each warp's own answer on a GPU.  A row's result does not depend on it.
    mosaic._any_reaches: lambda limit, x: (x >= limit).any().astype(jnp.int32),
    mosaic._multiply: multiply,
    unpack._tile: tile,
    unpack._transposed: transposed,
    unpack._load: lambda parts, words: words,
    unpack._dot: dot,
}
MEMORY = {
    ampere._load_rows: OnMemory(load_rows, asynchronous=True, commits=True),
    ampere._load_line: OnMemory(load_line, asynchronous=True),
    ampere._store_rows: OnMemory(store_rows, stores=True),
    mosaic._store_number: OnMemory(store_number),
}
