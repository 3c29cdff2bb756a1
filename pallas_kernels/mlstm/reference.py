"""The mLSTM cell in jnp: position by position (its definition) and chunkwise (training).

Both compute the same function of q, k, v and the gates; docs/vlstm.md derives it.  The gates are
kept as logarithms, and `m` is subtracted from every exponent so that none overflows: a state
(C, n, m) represents the true state (C e^m, n e^m).  At eps = 0 neither h nor the true state depends
on m, so the chunkwise form does not differentiate the m of the states.  It does differentiate the m
of a row: where l divides h, the gradients of a row's exponents sum to 0, and m's gradient subtracts
what rounding leaves of that sum from the largest weight.  The others may be far smaller than it.

Axes: B batch, T time, H heads, K = DQK, V = DV, N chunks, L positions of a chunk.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import mosaic
from pallas_kernels.options import with_gradient

CLOSED = -1e30  # logarithm of a closed gate or of an empty state; inf - inf cannot occur with it


def floor(stat) -> float:
    """The least m of a row, which keeps e^-m finite; h does not depend on m."""
    return 0.9 * math.log(jnp.finfo(stat).tiny)


def step(q, k, v, i, f, state, *, gate="exp", normalize=True, eps=0.0):
    """One position: q, k (B,H,K), v (B,H,V), i, f (B,H), state (C, n, m) -> (h (B,H,V), state)."""
    dtype, stat = q.dtype, mosaic.stat_dtype(q.dtype)
    c, n, m_old = (x.astype(stat) for x in state)
    q, k, v = (x.astype(stat) for x in (q, k, v))
    i, lf = log_gates(i, f, gate, stat)
    m = jnp.maximum(jnp.maximum(lf + m_old, i), floor(stat))
    forget, admit = jnp.exp(lf + m_old - m)[..., None], jnp.exp(i - m)[..., None]
    c = forget[..., None] * c + (admit * k)[..., None] * v[..., None, :]
    n = forget * n + admit * k
    q = q * max(q.shape[-1], 1) ** -0.5
    scale = _row_scale(jnp.sum(q * n, -1), m, gate, normalize, eps)
    h = scale[..., None] * jnp.sum(q[..., None] * c, -2)
    return narrow(h, dtype), (c, n, m)


# Traced and lowered once for all layers.
@jax.jit(static_argnames=("gate", "normalize", "return_state", "eps", "chunk_size"))
def chunkwise(
    q, k, v, i, f, *,
    gate="exp", normalize=True, segment_ids=None, initial_state=None, return_state=False, eps=0.0,
    chunk_size=None,
):  # fmt: skip
    """Computes chunks of L positions from L x L matrices, like attention, and steps between chunks.

    Time and memory are linear in T; the backward pass recomputes the states and the matrices.
    """
    size = max(1, min(chunk_size or _chunk_size(q.shape[-1], v.shape[-1]), i.shape[1]))
    options = dict(gate=gate, normalize=normalize, eps=eps, segment_ids=segment_ids)
    form = jax.checkpoint(functools.partial(_in_chunks, size=size, **options))
    h, state = form(q, k, v, i, f, lax.optimization_barrier(state_of(initial_state, q, v)))
    h = checkpoint_name(h, "vlstm")
    return (h, state) if return_state else h


def _in_chunks(q, k, v, i, f, state, *, size, gate, normalize, eps, segment_ids):
    """(h, final state), computed in chunks of `size` positions."""
    dtype, stat = q.dtype, mosaic.stat_dtype(q.dtype)
    batch, length = i.shape[:2]
    chunks = functools.partial(_chunks, size=size)

    # Split gates and documents into chunks.
    i, lf = log_gates(i, f, gate, stat)
    # Padding has a closed input gate and an open forget gate, so it does not change the state.
    i, lf = chunks(jnp.maximum(i, CLOSED), fill=CLOSED), chunks(lf)
    q, k, v = (chunks(x).astype(stat) for x in (q, k, v))
    seen = jnp.tril(jnp.ones((size, size), bool))
    continues = True  # whether a position belongs to the document of the carried state
    if segment_ids is not None:
        starts = chunks(starts_of(segment_ids)[..., None])
        document = jnp.cumsum(starts, -1)  # (N,B,1,L), counted from 0 in each chunk
        seen = seen & (document[..., :, None] == document[..., None, :])
        continues = document == 0

    # Sum the log forget gates since the start of the chunk or document.  A masked sum, unlike a
    # difference of running sums, loses no precision to a closed gate in an earlier document.
    b = jnp.sum(jnp.where(seen, lf[..., None, :], 0), -1)  # (N,B,H,L)
    log_d = jnp.where(seen, _sums_between(lf) + i[..., None, :], -jnp.inf)

    # Compute the states between chunks.  h depends on their m only through eps (see above).
    hold = lax.stop_gradient if eps == 0 else lambda m: m
    of_chunk = b[..., -1], log_d[..., -1, :], jnp.broadcast_to(continues, b.shape)[..., -1]
    (c, n, m_before), state = _between_chunks(k, v, *of_chunk, state, hold, dtype)

    # Compute the rows from the carried state and the chunk's own positions.
    carried = b + jnp.where(continues, m_before[..., None], 0)
    m = jnp.maximum(jnp.maximum(carried, jnp.max(log_d, -1)), floor(stat))
    # The weights contain 1 / sqrt(DQK): what q k^T is multiplied with also scales its cotangent,
    # which float16 must hold.
    s = max(q.shape[-1], 1) ** -0.5
    p = _matmul(dtype, q, k.mT) * (s * jnp.exp(log_d - m[..., None]))
    w = s * jnp.exp(jnp.where(continues, carried - m, -jnp.inf))
    l = jnp.sum(p, -1) + w * jnp.sum(q * n[..., None, :], -1)
    scale = _row_scale(l, m, gate, normalize, eps)
    # Normalising before the matmuls means that the backward pass does not need their results, and
    # that float16 holds nothing larger than the weights that multiply v.
    h = _matmul(dtype, scale[..., None] * p, v)
    h += _matmul(dtype, (w * scale)[..., None] * q, c)  # (N,B,H,L,V)
    h = jnp.moveaxis(h, (0, 2), (1, 3))  # (B,N,L,H,V)
    h = h.reshape(batch, h.shape[1] * size, *h.shape[3:])[:, :length]
    return narrow(h, dtype), state


def _between_chunks(k, v, g, a, keeps, state, hold, dtype):
    """Returns (C, n, m) before each chunk (N,B,H,...), C in `dtype`, and the final (C, n, m).

    g: (N,B,H), log decay of a chunk.  a: (N,B,H,L), log weight of a position in the state after its
    chunk.  keeps: whether that state still contains the state before the chunk.
    """

    def next_m(m, x):
        g, a_max, keep = x
        return jnp.maximum(g + jnp.where(keep, m, 0), a_max), m

    # Zeros (B,H), with which the carries vary over a mesh as the results do, which JAX checks.
    zeros = lambda x: jnp.sum(lax.stop_gradient(x[:0]), (0, *range(3, x.ndim)), dtype=g.dtype)
    zero = functools.reduce(jnp.add, map(zeros, (k, v, a, keeps, *(x[None] for x in state))))
    c, n, m = (x + lax.expand_dims(zero, range(2, x.ndim)) for x in state)
    m_last, m_before = lax.scan(next_m, m, (g, jnp.max(a, -1), keeps))
    m_before = hold(m_before)
    m_after = jnp.concatenate([m_before[1:], hold(m_last)[None]])

    def next_state(state, x):
        (c, n), (decay, c_in, n_in) = state, x
        after = decay[..., None, None] * c + c_in, decay[..., None] * n + n_in
        return after, (narrow(c, dtype), n)

    decay = jnp.exp(jnp.where(keeps, g + m_before - m_after, -jnp.inf))
    k_in = jnp.exp(a - m_after[..., None])[..., None] * k
    true_scale = jnp.exp(m - hold(m))  # 1, with the gradient of e^m
    state = c * true_scale[..., None, None], n * true_scale[..., None]
    added = _matmul(dtype, k_in.mT, v), jnp.sum(k_in, -2)
    (c, n), before = lax.scan(next_state, state, (decay, *added))
    true_scale = jnp.exp(hold(m_last) - m_last)  # 1, with the gradient of e^-m
    return (*before, m_before), (c * true_scale[..., None, None], n * true_scale[..., None], m_last)


def _chunks(x, size, fill=0.0):
    """(B,T,H,...) -> (N,B,H,L,...); positions past T get `fill`."""
    widths = [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _chunk_size(dqk, dv):
    """The default number of positions in a chunk, a power of two.

    With it the states (K V / L numbers for each position) need as much memory as two L x L matrices
    (2 L): 64 for heads of 64 and 128, 256 for 256 and 512.
    """
    return min(max(2 ** round(math.log2(max(dqk * dv, 1) / 2) / 2), 64), 256)


def _sums_between(lf):
    """(...,L) -> (...,L,L): at [t, j] the sum of lf after position j, up to and including t >= j.

    A difference of running sums would have their rounding errors, and its gradients would cancel.
    Here each j has its own running sum, of numbers of one sign.
    """
    after = jnp.tril(jnp.ones((lf.shape[-1],) * 2, bool), -1)
    return jnp.cumsum(jnp.where(after, lf[..., None], 0), -2)


def _row_scale(l, m, gate, normalize, eps):
    """The factor of a row's numerator: 1 / (max(|l|, e^-m) + eps), or e^m without a normaliser.

    `where` gives |l| no gradient up to and including e^-m; `maximum` would give it half there.
    """
    if not normalize:
        return jnp.exp(m)
    one = jnp.maximum(jnp.exp(-m), jnp.finfo(m.dtype).tiny)  # 1 on the true scale; never 0
    if gate == "sigmoid":
        eps = eps * one  # the definition of this gate has no stabiliser
    return _reciprocal(jnp.where(jnp.abs(l) <= one, one, jnp.abs(l)) + eps)


@jax.custom_jvp
def _reciprocal(x):
    """1 / x, whose gradient squares no 1 / x: beyond 1e19 that would overflow, times 0 even NaN."""
    return 1 / x


@_reciprocal.defjvp
def _reciprocal_jvp(primals, tangents):
    y = _reciprocal(*primals)
    return y, -(y * (y * tangents[0]))


def log_gates(i, f, gate, stat):
    """Logarithms of the input gate and the forget gate."""
    i = i.astype(stat)
    return jax.nn.log_sigmoid(i) if gate == "sigmoid" else i, jax.nn.log_sigmoid(f.astype(stat))


def state_of(state, q, v):
    """The given state in the statistics' dtype, with a finite m, or zeros."""
    stat = mosaic.stat_dtype(q.dtype)
    if state is not None:
        c, n, m = (x.astype(stat) for x in state)
        return c, n, jnp.maximum(m, CLOSED)
    batch, _, heads, dqk = q.shape
    shapes = ((batch, heads, dqk, v.shape[-1]), (batch, heads, dqk), (batch, heads))
    return tuple(jnp.zeros(shape, stat) for shape in shapes)


def starts_of(segment_ids):
    """(B,T) bool: where a new document starts (never at the first position)."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def saturated(x, dtype):
    """x inside of what dtype can hold, if that is float16: 65504 instead of infinity."""
    return jnp.clip(x, -65504.0, 65504.0) if dtype == jnp.float16 else x


def narrow(x, dtype, saturate=True):
    """x in dtype; float16 saturates if `saturate`."""
    return (saturated(x, dtype) if saturate else x).astype(dtype)


def _matmul_forward(dtype, x, y):
    """x @ y with operands rounded to `dtype`, summed and returned in the statistics' dtype.

    Its gradients round the same way.  JAX's own would multiply float32 cotangents by bf16 operands,
    which tensor cores cannot do at the speed of bf16.
    """
    x, y = narrow(x, dtype), narrow(y, dtype)
    return _dot(x, y), (x, y)


def _matmul_backward(dtype, operands, dz):
    x, y = operands
    # Barriers hide zeros: on a CPU XLA's sums of products with constants are wrong (0.11 and 0.12).
    dz = lax.optimization_barrier(dz.astype(dtype))  # not saturated, for float16's loss scaling
    return _dot(dz, y.mT), _dot(x.mT, dz)


def _dot(x, y):
    # "highest" keeps float32 from becoming TF32; it does not affect bf16 and float16.
    return jnp.matmul(x, y, precision="highest", preferred_element_type=mosaic.stat_dtype(x.dtype))


_matmul = with_gradient(_matmul_forward, _matmul_backward, nondiff_argnums=(0,))
