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
    seen = jnp.tril(jnp.ones((size, size), bool))
    in_last = continues = jnp.ones((), bool)
    keeps, start = continues, None
    if starts is not None:
        document = jnp.cumsum(chunks(starts[:, None], False), -1)  # counted from 0 in each chunk
        seen = seen & (document[..., :, None] == document[..., None, :])
        in_last, continues = document == document[..., -1:], document == 0
        keeps = continues[..., -1]
        start = jnp.min(jnp.where(seen, jnp.arange(size), size), -1).astype(jnp.int32)
        start = jnp.broadcast_to(start, i.shape)

    # b: sum of log forget gates since the chunk or the document began.  With documents a masked
    # sum, not a difference of running sums: a closed gate in one cannot blur the next.
    # top: the largest logarithm of D in a row.
    if starts is None:
        b = _accumulate(jnp.add, lf, 0.0)
        top = b + _accumulate(jnp.maximum, i - b, -jnp.inf)
    else:
        b = jnp.sum(jnp.where(seen, lf[..., None, :], 0), -1)
        log_d = b[..., :, None] - b[..., None, :] + i[..., None, :]
        top = jnp.max(jnp.where(seen, log_d, -jnp.inf), -1)
    g = b[..., -1]
    # Not g - b, which is rounded as large b are: the sum of what comes after each position.
    after = jnp.pad(lf[..., 1:], [(0, 0)] * (lf.ndim - 1) + [(0, 1)])
    a = jnp.where(in_last, _suffix_sums(after) + i, -jnp.inf)
    a_max = jnp.max(a, -1)

    # m after chunk k is max(g + m before, a_max): composed pairwise, in log2(N) steps.
    m0 = jnp.maximum(a_max, jnp.where(keeps, -jnp.inf, g))  # the state is empty: its m is 0
    shift, least = lax.associative_scan(
        lambda x, y: (x[0] + y[0], jnp.maximum(x[1] + y[0], y[1])),
        (jnp.where(keeps, g, -jnp.inf), m0),
        axis=2,
    )
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


def running(decay, change, first, *, reverse=False):
    """s[k+1] = decay[k] s[k] + change[k] -> (s[0..N-1], s[N]); with reverse from the end on.

    decay: (B,H,N), change: (B,H,N,D), first: (B,H,D).
    """
    if reverse:
        s, last = running(decay[:, :, ::-1], change[:, :, ::-1], first)
        return s[:, :, ::-1], last
    total, summed = lax.associative_scan(
        lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (decay[..., None], change), axis=2
    )
    after = total * first[:, :, None] + summed
    return jnp.concatenate([first[:, :, None], after[:, :, :-1]], 2), after[:, :, -1]


def _chunks(x, size, fill):
    """(B,H,T) -> (B,H,N,L); positions past T take `fill`."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % size)], constant_values=fill)
    return x.reshape(*x.shape[:2], -1, size)


def _suffix_sums(x):
    return _accumulate(jnp.add, x[..., ::-1], 0.0)[..., ::-1]


def _accumulate(combine, x, empty):
    """Running sums (or maxima) along the last axis, a multiple of 8 long.

    In two steps, of 8 terms and of the rest, of which XLA makes one small kernel each: 16 to 24
    terms a position, where a masked L x L sum has L.
    """
    empty = jnp.asarray(empty, x.dtype)
    for stride, terms in ((1, 8), (8, x.shape[-1] // 8)):
        shifted = [
            lax.pad(x, empty, [(0, 0, 0)] * (x.ndim - 1) + [(stride * n, -stride * n, 0)])
            for n in range(terms)
        ]
        x = lax.optimization_barrier(functools.reduce(combine, shifted))
    return x
