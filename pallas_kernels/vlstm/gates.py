"""Everything of the vLSTM that is one number a position or a chunk, for the kernels: plain jnp.

The formulas are those of `reference.chunkwise`, in float32 and with m held constant.
Axes: B batch, H heads, N chunks, L positions of a chunk.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
CLOSED = -1e30  # an input gate that lets nothing in; finite, so that no inf - inf can arise
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
    """i, lf: (B,H,T) logarithms of the gates; m: (B,H) of the initial state; starts: (B,T) bool,
    where another document begins, or None."""
    hold = lax.stop_gradient
    chunks = lambda x, fill: _chunks(x, size, fill)
    # A closed input gate and an open forget gate: padding leaves the state as it is.
    i, lf = chunks(jnp.maximum(i, CLOSED), CLOSED), chunks(lf, 0)
    position = jnp.arange(size, dtype=jnp.int32)
    in_last = continues = jnp.ones((), bool)
    keeps, start, began = continues, None, ()
    if starts is not None:
        began = (jnp.where(chunks(starts[:, None], False), position, -1),)

    # b: sum of log forget gates since the chunk or the document began.  No difference of running
    # sums: a closed gate in one document cannot blur the next.
    # top: the largest logarithm of D in a row, and so in the last row that of `admit`.
    b, top, *began = _running_maps(lf, i, *began)
    if starts is not None:
        began = began[0]  # where the latest document of the chunk began, -1: before the chunk
        continues, start = began < 0, jnp.broadcast_to(jnp.maximum(began, 0), i.shape)
        in_last, keeps = position >= began[..., -1:], continues[..., -1]
    g, a_max = b[..., -1], top[..., -1]
    # Not g - b, which is rounded as large b are: the sum of what comes after each position.
    after = jnp.pad(lf[..., 1:], [(0, 0)] * (lf.ndim - 1) + [(0, 1)])
    a = jnp.where(in_last, _suffix_sums(after) + i, -jnp.inf)

    # m after chunk k is max(g + m before, a_max), and where the state is emptied m before is 0.
    m0 = jnp.maximum(a_max, jnp.where(keeps, -jnp.inf, g))
    shift, least = _running_maps(jnp.where(keeps, g, -jnp.inf), m0)
    m_after = jnp.maximum(shift + m[..., None], least)
    m_last = m_after[..., -1]
    m_after = hold(m_after)
    m_before = jnp.concatenate([hold(m)[..., None], m_after[..., :-1]], -1)

    from_state = b + jnp.where(continues, m_before[..., None], 0)
    m = jnp.maximum(jnp.maximum(from_state, top), FLOOR)
    return Gates(
        row=(b - m) * LOG2E,
        col=(i - b) * LOG2E,
        carried=jnp.exp(jnp.where(continues, from_state - m, -jnp.inf)),
        admit=jnp.exp(a - m_after[..., None]),
        decay=jnp.exp(jnp.where(keeps, g + m_before - m_after, -jnp.inf)),
        m=m,
        m_last=m_last,
        start=start,
        in_last=in_last if start is not None else None,
    )


def forget_gradient(db, dg, start, in_last):
    """Gradient of lf (B,H,N,L), from those of b (B,H,N,L) and of the chunks' g (B,H,N)."""
    if start is None:
        return _suffix_sums(db) + dg[..., None]
    position = jnp.arange(db.shape[-1])
    reaches = (position <= position[:, None]) & (position >= start[..., None])  # b of t has lf of j
    dlf = jnp.sum(jnp.where(reaches, db[..., :, None], 0), -2)
    return dlf + jnp.where(in_last, dg[..., None], 0)


def _chunks(x, size, fill):
    """(B,H,T) -> (B,H,N,L); positions past T take `fill`."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % size)], constant_values=fill)
    return x.reshape(*x.shape[:2], -1, size)


def _suffix_sums(x):
    return _running(lambda later, x: (later[0] + x[0],), (x,), (0.0,), reverse=True)[0]


def _running_maps(shift, least, began=None):
    """m -> max(m + shift, least) of every position composed from the first to each, along the last
    axis: (shifts, leasts).  Where began >= 0 it starts anew; its running maximum comes third."""

    def compose(before, x):
        (s0, m0, *p0), (s, m, *p) = before, x
        shifted, moved = s0 + s, jnp.maximum(m0 + s, m)
        if not p:
            return shifted, moved
        anew = p[0] >= 0
        shifted, moved = jnp.where(anew, s, shifted), jnp.where(anew, m, moved)
        return shifted, moved, jnp.maximum(p0[0], p[0])

    if began is None:
        return _running(compose, (shift, least), (0.0, -jnp.inf))
    return _running(compose, (shift, least, began), (0.0, -jnp.inf, -1))


def _running(combine, x, empty, reverse=False):
    """combine(what lies before, x) of all x up to each position of the last axis.

    In steps of up to 8 terms, of which XLA makes one small kernel each: 16 terms a position for 64
    of them, where a masked L x L sum has L and a binary tree has 6 kernels.
    """
    length, stride = x[0].shape[-1], 1
    while stride < length:

        def shifted(n, stride=stride, x=x):
            ends = (-stride * n, stride * n) if reverse else (stride * n, -stride * n)
            pads = lambda a: [(0, 0, 0)] * (a.ndim - 1) + [(*ends, 0)]
            return tuple(
                lax.pad(a, jnp.asarray(e, a.dtype), pads(a))
                for a, e in zip(x, empty, strict=True)
            )  # fmt: skip

        terms = min(8, -(-length // stride))
        x = functools.reduce(lambda x, n: combine(shifted(n), x), range(1, terms), x)
        x = lax.optimization_barrier(x)
        stride *= 8
    return x
