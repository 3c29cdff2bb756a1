"""Everything of the vLSTM that is one number a position or a chunk, for the kernels: plain jnp.

The formulas are those of `reference.chunkwise`, in float32 and with m held constant.
Axes: B batch, T time, H heads, N chunks, L positions of a chunk.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm.reference import CLOSED
from pallas_kernels.mosaic import LOG2E

FLOOR = 0.9 * math.log(jnp.finfo(jnp.float32).tiny)  # of m, so that e^-m is finite


class Gates(NamedTuple):
    """Row t of a chunk sees position j with the weight exp2(row[t] + col[j])."""

    row: jax.Array  # (B,H,N,L)
    col: jax.Array  # (B,H,N,L)
    carried: jax.Array  # (B,H,N,L): weight of the state before the chunk in a row
    admit: jax.Array  # (B,H,N,L): weight of a position in the state after the chunk
    decay: jax.Array  # (B,H,N): weight of the state before the chunk in the one after
    m: jax.Array  # (B,H,N,L): the stabiliser of a row
    m_last: jax.Array  # (B,H): the stabiliser of the last state; the only one with a gradient
    start: jax.Array | None  # (B,H,N,L) int32: first position of the chunk that a row may see
    in_last: jax.Array | None  # (B,1,N,L) bool: of the document that goes on after the chunk


def gates(i, lf, m, starts, size: int) -> Gates:
    """i, lf: (B,T,H) logarithms of the gates; m: (B,H) of the initial state; starts: (B,T) bool,
    where another document begins, or None.
    """
    hold = lax.stop_gradient
    # One kernel makes both; a closed input gate and an open forget gate: padding leaves the state
    # as it is.
    widths = [(0, 0), (0, -i.shape[1] % size), (0, 0)]
    pad = lambda x, fill: jnp.pad(x, widths, constant_values=fill)
    both = jnp.concatenate([pad(jnp.maximum(i, CLOSED), CLOSED), pad(lf, 0)], 2)
    i, lf = jnp.split(lax.optimization_barrier(_chunks(both, size)), 2, 1)
    position = jnp.arange(size, dtype=jnp.int32)
    in_last = continues = keeps = jnp.ones((1, 1, 1, 1), bool)
    start, began = None, ()
    if starts is not None:
        began = (jnp.where(_chunks(pad(starts[..., None], False), size), position, -1),)
    (b, top, after, *began), (g, a_max, *began_last) = _within(lf, i, *began)
    if starts is not None:
        # Where the latest document of the chunk began, -1: before the chunk.
        began, began_last = began[0], began_last[0][..., None]
        continues, keeps, in_last = began < 0, began_last < 0, position >= began_last
        start = jnp.broadcast_to(jnp.maximum(began, 0), i.shape)
    keeps = keeps[..., 0]

    # m after chunk k is max(g + m before, a_max), and where the state is emptied m before is 0.
    least = jnp.maximum(a_max, jnp.where(keeps, -jnp.inf, g))
    shift, least = _over_chunks(jnp.where(keeps, g, -jnp.inf), least)
    m_after = jnp.maximum(shift + m[..., None], least)
    m_last = m_after[..., -1]
    before = lambda m_after: jnp.concatenate([hold(m)[..., None], m_after[..., :-1]], -1)
    m_after = hold(m_after)
    decay = jnp.exp(jnp.where(keeps, g + before(m_after) - m_after, -jnp.inf))
    m_after, decay = lax.optimization_barrier((m_after, decay))

    from_state = b + jnp.where(continues, before(m_after)[..., None], 0)
    m = jnp.maximum(jnp.maximum(from_state, top), FLOOR)
    a = jnp.where(in_last, after + i, -jnp.inf)
    return Gates(
        row=(b - m) * LOG2E,
        col=(i - b) * LOG2E,
        carried=jnp.exp(jnp.where(continues, from_state - m, -jnp.inf)),
        admit=jnp.exp(a - m_after[..., None]),
        decay=decay,
        m=m,
        m_last=m_last,
        start=start,
        in_last=None if start is None else in_last,
    )


def forget_gradient(db, dg, start, in_last):
    """Gradient of lf (B,H,N,L), from those of b (B,H,N,L) and of the chunks' g (B,H,N)."""
    if start is None:
        return _suffix_sums(db) + dg[..., None]
    position = jnp.arange(db.shape[-1])
    reaches = (position <= position[:, None]) & (position >= start[..., None])  # b of t has lf of j
    dlf = jnp.sum(jnp.where(reaches, db[..., :, None], 0), -2)
    return dlf + jnp.where(in_last, dg[..., None], 0)


def _chunks(x, size):
    """(B,T,H) -> (B,H,N,L)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, x.shape[2]), -1, 1)


EMPTY = 0.0, -jnp.inf, -1  # what _compose leaves as it is


def _compose(before, x):
    """The map m -> max(m + shift, least) after another one: (shift, least) of both.

    A third number, began, is at least 0 where x starts anew; of both it is the maximum.
    """
    (s0, m0, *p0), (s, m, *p) = before, x
    shift, least = s0 + s, jnp.maximum(m0 + s, m)
    if not p:
        return shift, least
    anew = p[0] >= 0
    return jnp.where(anew, s, shift), jnp.where(anew, m, least), jnp.maximum(p0[0], p[0])


def _within(lf, i, *began):
    """Within each chunk of (B,H,N,L): b, top, after, and where the latest document began; then of
    the chunk's last position b, top, and where it began, (B,H,N).

    b: sum of log forget gates since the chunk or the document began.  No difference of running
    sums: a closed gate in one document cannot blur the next.
    top: the largest logarithm of D in a row, and so in the last row that of `admit`.
    after: the sum of what comes after a position.  Not b of the last one minus b, which is rounded
    as large b are.

    In two steps, of L / 4 terms and of 4.  The first is a kernel of its own, the second is done in
    each kernel that uses it, which XLA does with so few terms only.
    """
    length = lf.shape[-1]
    width = length // 4
    x = [
        jnp.pad(z, [(0, 0), (0, 0), (0, 0), (0, width)], constant_values=empty)
        for z, empty in zip((lf, i, *began), EMPTY, strict=False)
    ]
    x = lax.optimization_barrier(_windows(x, 3, 1, width))
    after = jnp.zeros((), lf.dtype)
    for n in range(1, 5):
        after += _shifted(x[:1], 3, -n * width)[0]
    b, top, *began = (z[..., :length] for z in _windows(x, 3, width, 4))
    last = (tuple(z[..., length - 1 - n * width] for z in x) for n in range(4))
    last = functools.reduce(lambda x, y: _compose(y, x), last)
    return (b, top, after[..., :length], *began), last


def _over_chunks(shift, least):
    """The maps of all chunks up to each, composed, along the last axis.

    The last step, for up to 16 chunks the only one, XLA does again in each kernel that uses it.
    """
    x, stride = (shift, least), 1
    while stride < shift.shape[-1]:
        if stride > 1:
            x = lax.optimization_barrier(x)
        x, stride = _windows(x, 2, stride, 16), stride * 16
    return x


def _windows(x, axis, stride, terms):
    """Each element with `terms` - 1 before it, `stride` apart, composed."""
    before = (_shifted(x, axis, stride * n) for n in range(1, terms))
    return functools.reduce(lambda x, y: _compose(y, x), before, tuple(x))


def _shifted(x, axis, n):
    """x[position - n], and nothing from outside."""

    def one(z, empty):
        widths = [(0, 0, 0)] * z.ndim
        widths[axis] = (n, -n, 0)
        return lax.pad(z, jnp.asarray(empty, z.dtype), widths)

    return tuple(one(z, empty) for z, empty in zip(x, EMPTY, strict=False))


def _suffix_sums(x):
    """Sums along the last axis from each element to the last, in two steps like `_within`."""
    width = x.shape[-1] // 4
    x = lax.optimization_barrier(_suffix_step(x, 1, width))
    return _suffix_step(x, width, 4)


def _suffix_step(x, stride, terms):
    return sum((_shifted((x,), -1, -stride * n)[0] for n in range(1, terms)), x)
