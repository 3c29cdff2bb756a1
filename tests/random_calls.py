"""Draws calls of every public op by rule: sizes, dtypes, options and values that few tests list.

A call is a line of Python.  random_checks.py runs it: `--seed N --call K` draws it again, and
the line itself may be edited and pasted.  random_draws.py has the rules for each op.

Sizes are 0, 1, primes, and around the tiles of the kernels: one less, equal, one more, some more.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import quantize

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
PRIMES = (2, 3, 5, 7, 11, 13)
HALVES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class A:
    """An array: its shape, dtype and kind of values, and the numbers that the kind needs."""

    shape: tuple[int, ...]
    dtype: str
    values: str = "normal"
    more: tuple = ()

    def __repr__(self):
        more = (f", {self.values!r}" if self.values != "normal" or self.more else "") + (
            f", {self.more}" if self.more else ""
        )
        return f"A({self.shape}, {self.dtype!r}{more})"

    def make(self, seed: tuple[int, ...]) -> Any:
        rng = np.random.default_rng(seed)
        with np.errstate(over="ignore", invalid="ignore"):
            return _VALUES[self.values](
                rng, self.shape, np.dtype(jnp.dtype(self.dtype)), *self.more
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op; `make` returns its arrays, the same for the same seed."""

    op: str
    seed: tuple[int, int]
    arrays: dict[str, Any]  # of A, None, or tuples of these
    options: dict[str, Any]
    implementation: str | None = "mosaic"
    x64: bool = False  # under jax.enable_x64
    strict: bool = False  # JAX may promote neither dtypes nor ranks
    general: bool = False  # under JAXLLM_KERNELS=general
    inside: Literal["vmap", "map", "checkpoint"] | None = None  # of JAX

    def make(self) -> dict[str, Any]:
        """NumPy arrays, and a QuantizedWeight where there is one."""
        leaves = jax.tree_util.tree_leaves_with_path(self.arrays)
        name = lambda path: zlib.crc32(jax.tree_util.keystr(path).encode())
        made = [a.make((*self.seed, name(path))) for path, a in leaves]
        return jax.tree.unflatten(jax.tree.structure(self.arrays), made)

    @property
    def cost(self) -> int:
        """Elements of all arrays, about the time of an interpreter."""
        return sum(math.prod(a.shape) for a in jax.tree.leaves(self.arrays))


def _floats(change: Callable) -> Callable:
    def make(rng, shape, dtype, *more):
        return np.asarray(change(rng.standard_normal(shape), rng, *more)).astype(dtype)

    return make


def _some(x, rng, *values):
    """x with each of these values in about one place of 20, at least one."""
    x = np.reshape(x, -1)
    for value in values:
        if x.size:
            x[rng.integers(x.size, size=1 + x.size // 20)] = value
    return x


def _ids(rng, shape, dtype, low, high, *special):
    """Integers in [low, high), as far as the dtype holds them, and some of the special ones."""
    info = np.iinfo(dtype)
    first, last = max(low, info.min), min(high, info.max + 1) - 1
    ids = rng.integers(first, max(first, last), size=shape, endpoint=True)
    ids = np.asarray(ids, object)
    held = [value for value in special if info.min <= value <= info.max]
    return _some(ids, rng, *held).reshape(shape).astype(dtype)


def _segments(rng, shape, dtype, length, *ids):
    """Runs of random length (about `length`) of these ids, in any order: an id may come back."""
    info = np.iinfo(dtype)
    ids = [value for value in ids if info.min <= value <= info.max]
    starts = rng.random(shape) < 1 / length
    run = np.cumsum(starts, axis=-1)
    chosen = rng.integers(len(ids), size=(*shape[:-1], shape[-1] + 1))
    index = np.take_along_axis(chosen, run, axis=-1)
    return np.array([*ids, 0], object)[index].reshape(shape).astype(dtype)


def _quantized(rng, shape, dtype, bits, group, symmetric, format, plain):
    with jax.enable_x64(False), jax.default_device(jax.local_devices(backend="cpu")[0]):
        w = rng.standard_normal(shape).astype(np.float32)
        weight = quantize(w, bits=bits, group=group, symmetric=symmetric, format=format)
        return jax.tree.map(np.asarray, weight.plain() if plain else weight)


_VALUES = {
    "normal": _floats(lambda x, rng, scale=1.0, mean=0.0: x * scale + mean),
    "offset": _floats(lambda x, rng: x + 1000),
    "spread": _floats(lambda x, rng: x * 10 ** rng.uniform(-3, 3, x.shape)),
    "zeros": _floats(lambda x, rng: 0 * x),
    "rows of zeros": _floats(lambda x, rng: x * (rng.random((*x.shape[:-1], 1)) < 0.5)),
    "some": _floats(lambda x, rng, *values: _some(x, rng, *values).reshape(x.shape)),
    "all": lambda rng, shape, dtype, value: np.full(shape, value, dtype),
    "float8": lambda rng, shape, dtype: np.clip(rng.standard_normal(shape) * 50, -448, 448).astype(
        dtype
    ),
    "ids": _ids,
    "segments": _segments,
    "quantized": _quantized,
}


class Draw:
    """Random choices by rule."""

    def __init__(self, seed: int, number: int):
        self.rng = np.random.default_rng((seed, number))
        self.x64 = self.odds(1 / 12)
        self.dtype = self.one("bfloat16", "bfloat16", "float16", "float32")

    def one(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def odds(self, share: float) -> bool:
        return self.rng.random() < share

    def maybe(self, value, share: float = 0.5):
        return value if self.odds(share) else None

    def size(self, *tiles: int, zero: float = 0.01) -> int:
        """0 (seldom), 1, a prime, or a size around one of these tiles."""
        if self.odds(zero):
            return 0
        tile, prime = self.one(*tiles), self.one(*PRIMES)
        around = (tile - 1, tile, tile + 1, 2 * tile, tile + prime)
        return self.one(1, prime, prime, *around)

    def large(self, *sizes: int, share: float = 0.12) -> int:
        """Seldom one of these sizes, at which a kernel's loops turn often; otherwise 0."""
        return self.one(*sizes) if self.odds(share) else 0

    def batch(self, *sizes: int) -> int:
        return 0 if self.odds(0.02) else self.one(*sizes)

    def rows(self, *tiles: int) -> tuple[int, ...]:
        """One or two leading axes, seldom none, or three."""
        n = self.size(*tiles)
        if self.odds(0.06):
            return self.one((), (2, n, 2), (0, n))
        return self.one((n,), (self.one(1, 2, 3), n))

    def floats(self, *shape: int, huge: float = 1e4, special=(), dtype=None) -> A:
        """The array of an op whose values are extreme at times.

        huge: a factor with which the op still promises a result; special: values that it accepts.
        """
        dtype = dtype or self.dtype
        if not self.odds(0.4):
            return A(shape, dtype)
        if special and self.odds(0.3):
            return A(shape, dtype, "some", (self.one(*special),))
        narrow = dtype == "float16"
        huge, tiny = (min(huge, 1e3), 1e-4) if narrow else (huge, 1e-12)
        kind = self.one("offset", "spread", "zeros", "rows of zeros", "huge", "huge", "tiny")
        scale = {"huge": huge, "tiny": tiny}.get(kind)
        return A(shape, dtype, "normal", (scale,)) if scale else A(shape, dtype, kind)

    def weight_dtype(self) -> str:
        return self.one(self.dtype, self.dtype, "float32", "bfloat16", "float16")

    def integers(self) -> str:
        return self.one(*INTEGERS)

    def segments(self, b: int, t: int) -> A:
        dtype = self.integers()
        info = np.iinfo(dtype)
        ids = [0, 1, 2, 3, info.max, info.max - 1, info.min]
        if info.max > 2**32 and not self.x64:  # JAX itself narrows such arrays
            ids = ids[:4]
        elif info.max > 2**32:
            ids += [1 + 2**32, 2 + 2**32]
        return A((b, t), dtype, "segments", (self.one(1, 3, 20, 1000), *ids))

    def heads(self, most: int = 8) -> tuple[int, int]:
        """Query heads and kv heads, in groups of 1 to 8."""
        kv, group = self.one(1, 1, 2, 3), self.one(1, 2, 3, 4, 5, 6, 7, 8)
        return (kv * min(group, most), kv)
