"""The gates of the mLSTM kernels: everything with one number per position or chunk, in plain jnp.

The formulas come from `reference.chunkwise`, in float32 and without gradients of m.
Axes: B batch, T time, H heads, N chunks, L positions of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mlstm.reference import CLOSED, floor
from pallas_kernels.mlstm.states import SIZE
from pallas_kernels.mosaic import LOG2E


class Gates(NamedTuple):
    """Position j has the weight exp2(row[t] + col[j]) in row t of its chunk."""

    row: jax.Array  # (B,H,N,L)
    col: jax.Array  # (B,H,N,L)
    carried: jax.Array  # (B,H,N,L): weight of the state before the chunk in a row
    admit: jax.Array  # (B,H,N,L): weight of a position in the state after the chunk
    decay: jax.Array  # (B,H,N): weight of the state before the chunk in the state after it
    m: jax.Array  # (B,H,N,L): stabiliser of a row
    m_last: jax.Array  # (B,H): stabiliser of the final state; only this one has a gradient
    start: jax.Array | None  # (B,H,N,L) int32: first position of the chunk that a row sees
    in_last: jax.Array | None  # (B,1,N,L) bool: in the document that continues after the chunk


def gates(i, lf, m, starts) -> Gates:
    """Computes the weights of positions and states.

    i, lf: (B,T,H), logarithms of the gates.  m: (B,H), stabiliser of the initial state.
    starts: (B,T) bool, where a new document starts, or None.
    """
    hold = lax.stop_gradient
    # Padding has a closed input gate and an open forget gate, so it does not change the state.  i
    # and lf are joined so that one kernel computes both.
    widths = [(0, 0), (0, -i.shape[1] % SIZE), (0, 0)]
    pad = lambda x, fill: jnp.pad(x, widths, constant_values=fill)
    both = jnp.concatenate([pad(jnp.maximum(i, CLOSED), CLOSED), pad(lf, 0)], 2)
    i, lf = jnp.split(lax.optimization_barrier(_chunks(both)), 2, 1)
    position = jnp.arange(SIZE, dtype=jnp.int32)
    in_last = continues = keeps = jnp.ones((1, 1, 1, 1), bool)
    start, began = None, ()
    if starts is not None:
        began = (jnp.where(_chunks(pad(starts[..., None], False)), position, -1),)
    (b, top, after, *began), (g, a_max, *began_last) = _within(lf, i, *began)
    if starts is not None:
        # Where the latest document started in the chunk, or -1 if it started before.
        began, began_last = began[0], began_last[0][..., None]
        continues, keeps, in_last = began < 0, began_last < 0, position >= began_last
        start = jnp.broadcast_to(jnp.maximum(began, 0), i.shape)
    keeps = keeps[..., 0]

    # m after a chunk is max(g + m before, a_max); m before is 0 where the state is reset.
    least = jnp.maximum(a_max, jnp.where(keeps, -jnp.inf, g))
    shift, least = _over_chunks(jnp.where(keeps, g, -jnp.inf), least)
    m_after = jnp.maximum(shift + m[..., None], least)
    m_last = m_after[..., -1]
    before = lambda m_after: jnp.concatenate([hold(m)[..., None], m_after[..., :-1]], -1)
    m_after = hold(m_after)
    decay = jnp.exp(jnp.where(keeps, g + before(m_after) - m_after, -jnp.inf))
    m_after, decay = lax.optimization_barrier((m_after, decay))

    from_state = b + jnp.where(continues, before(m_after)[..., None], 0)
    m = jnp.maximum(jnp.maximum(from_state, top), floor(i.dtype))
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
    """Gradient of lf (B,H,N,L) from the gradients of b (B,H,N,L) and of the chunks' g (B,H,N)."""
    if start is None:
        return _suffix_sums(db) + dg[..., None]
    position = jnp.arange(db.shape[-1])
    reaches = (position <= position[:, None]) & (position >= start[..., None])  # b[t] adds lf[j]
    dlf = jnp.sum(jnp.where(reaches, db[..., :, None], 0), -2)
    return dlf + jnp.where(in_last, dg[..., None], 0)


def _chunks(x):
    """(B,T,H) -> (B,H,N,L)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, SIZE, x.shape[2]), -1, 1)


EMPTY = 0.0, -jnp.inf, -1  # the identity of _compose


def _compose(before, x):
    """Composes two maps m -> max(m + shift, least), given as (shift, least).

    An optional third number, began, is at least 0 where x starts a document, which makes the map
    before it irrelevant; the result has the maximum of both.
    """
    (s0, m0, *p0), (s, m, *p) = before, x
    shift, least = s0 + s, jnp.maximum(m0 + s, m)
    if not p:
        return shift, least
    anew = p[0] >= 0
    return jnp.where(anew, s, shift), jnp.where(anew, m, least), jnp.maximum(p0[0], p[0])


def _within(lf, i, *began):
    """Scans each chunk of (B,H,N,L).

    Returns (b, top, after, where the latest document started), (B,H,N,L), and for the last position
    of each chunk (b, top, where the latest document started), (B,H,N).
    b: sum of log forget gates since the start of the chunk or document.  It is no difference of
    running sums, so a closed gate in one document costs the next no precision.
    top: the largest logarithm of D in a row; in the last row also of `admit`.
    after: sum of log forget gates after a position.  b[-1] - b would have the rounding error of a
    large b.

    The scan has two steps, of L / 4 terms and of 4.  The first is a separate kernel; XLA fuses
    the second into each kernel that uses it, which it does only for so few terms.
    """
    length = lf.shape[-1]
    width = length // 4
    x = lax.optimization_barrier(_windows(_padded((lf, i, *began), 0, width), 1, width))
    after = functools.reduce(jnp.add, (_shifted(x[:1], -n * width)[0] for n in range(1, 5)))
    b, top, *began = (z[..., :length] for z in _windows(x, width, 4))
    last = (tuple(z[..., length - 1 - n * width] for z in x) for n in range(4))
    last = functools.reduce(lambda x, y: _compose(y, x), last)
    return (b, top, after[..., :length], *began), last


def _over_chunks(shift, least):
    """Composes the maps of all chunks up to each chunk, along the last axis.

    XLA fuses the last step (for up to 16 chunks the only one) into each kernel that uses it.
    """
    x, stride = (shift, least), 1
    while stride < shift.shape[-1]:
        if stride > 1:
            x = lax.optimization_barrier(x)
        x, stride = _windows(x, stride, 16), stride * 16
    return x


def _windows(x, stride, terms):
    """Composes each element with the `terms` - 1 elements at distances of `stride` before it."""
    before = (_shifted(x, stride * n) for n in range(1, terms))
    return functools.reduce(lambda x, y: _compose(y, x), before, tuple(x))


def _shifted(x, n):
    """x[position - n], with the identity of _compose outside x."""
    return _padded(x, n, -n)


def _padded(x, before, after):
    """x padded along the last axis with `before` and `after` identities of _compose."""
    widths = [(0, 0, 0)] * (x[0].ndim - 1) + [(before, after, 0)]
    pairs = zip(x, EMPTY, strict=False)
    return tuple(lax.pad(z, jnp.asarray(empty, z.dtype), widths) for z, empty in pairs)


def _suffix_sums(x):
    """Sums from each element to the last one, in two steps like `_within`."""
    width, after = x.shape[-1] // 4, lambda x, n: _shifted((x,), -n)[0]
    x = lax.optimization_barrier(sum((after(x, n) for n in range(1, width)), x))
    return sum((after(x, width * n) for n in range(1, 4)), x)
