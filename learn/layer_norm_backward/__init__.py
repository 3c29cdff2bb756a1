"""The ladder of layer norm's backward pass (README.md)."""

from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax

from learn.ladder import COPY, SMS, Ladder, like, normal
from learn.layer_norm import LATENCY, STAYS, loads
from pallas_kernels import layer_norm


def inputs(sizes):
    shape = sizes["rows"], sizes["cols"]
    x, dy = (1 + normal(0, shape)).astype(jnp.bfloat16), normal(1, shape, jnp.bfloat16)
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=1)
    r = lax.rsqrt(jnp.var(wide, axis=1) + 1e-5)
    return x, normal(2, shape[1:]), dy, mean, r


def reference(x, weight, dy, mean, r):
    """Autodiff of the formula, which computes the statistics itself."""
    op = lambda *arrays: layer_norm(*arrays, implementation="xla")
    _, pull = jax.vjp(op, x, weight, jnp.zeros_like(weight))
    return pull(dy.astype(x.dtype))


def _once(sizes):
    return 3 * 2 * sizes["rows"] * sizes["cols"]  # bfloat16: x, dy, dx


def _two_kernels(sizes):
    steps = sizes["rows"] / 4
    return _once(sizes) / COPY + steps * LATENCY * max(1, sizes["cols"] / 32 / (16 * SMS))


def _parts(sizes):
    return _once(sizes) * 5 / 3 / COPY


def _sums(parts, sizes):
    """Microseconds to write and read the sums of all parts."""
    return 2 * 2 * 4 * parts * sizes["cols"] / COPY


def _fused(sizes):
    return _once(sizes) / COPY + _sums(sizes["rows"] / 4, sizes)


def _persistent(sizes):
    return _once(sizes) / COPY + _sums(2 * SMS, sizes)


def rows_split(book, x, weight, dy, mean, r):
    """No block walks down all rows."""
    turns = Counter((e.kernel, e.block, e.where, e.first) for e in loads(book, x))
    most = max(turns.values(), default=0)
    if most >= x.shape[0] // 4:
        return f"a block takes {most} turns, all {x.shape[0]} rows: give the rows to several blocks"


def reads_once(book, x, weight, dy, mean, r):
    """x and dy come from global memory once, by loads or by TMA."""
    read = sum(e.bytes for e in loads(book, x))  # dy is like x
    copied = sum(e.bytes for e in book.events if e.kind == "copy in" and e.array == like(x))
    if read + copied > x.nbytes + dy.nbytes:
        return f"{read + copied} bytes are read, of an x and dy of {x.nbytes + dy.nbytes} bytes"


def few_sums(book, x, weight, dy, mean, r):
    """The kernel writes fewer rows of sums than a fourth of its rows."""
    complaint = reads_once(book, x, weight, dy, mean, r)
    if complaint:
        return complaint
    written = [e for e in book.events if e.kind == "store" and e.space == "global"]
    sums = sum(e.bytes for e in written if e.array != like(x))  # dx is like x
    most = 2 * weight.nbytes * 2  # of two blocks
    if sums > most:
        return f"{sums} bytes of sums are written, more than two blocks need ({most}); {STAYS}"


LADDER = Ladder(
    name="layer_norm_backward",
    reference=reference,
    inputs=inputs,
    sizes=({"rows": 32768, "cols": 768},),
    small={"rows": 16, "cols": 512},
    again={"rows": 32, "cols": 768},
    bytes=_once,
    flops=lambda sizes: 0,
    counted=(_two_kernels, _parts, _fused, _persistent, _persistent, lambda s: _once(s) / COPY),
    properties={2: rows_split, 3: reads_once, 4: few_sums},
)
