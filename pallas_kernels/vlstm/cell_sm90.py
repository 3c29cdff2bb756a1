"""The vLSTM on tensor cores: what the two kernels of chunks_sm90.py are given, both directions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.attention.forward_sm90 import sm_count
from pallas_kernels.vlstm import chunks_sm90, reference
from pallas_kernels.vlstm.gates import forget_gradient, gates, running


class Call(NamedTuple):
    """What is static in a call of the kernels."""

    length: int  # T without padding
    size: int  # positions of a chunk
    normalize: bool
    packed: bool  # several documents in a sequence
    sms: int
    kernels: Any  # that has `states` and `rows`: chunks_sm90, or its jnp twin in the tests


@functools.partial(
    jax.jit,  # traced and lowered once for all layers
    static_argnames=("gate", "normalize", "return_state", "eps", "kernels"),
)
def chunkwise(
    q,
    k,
    v,
    i,
    f,
    *,
    gate="exp",
    normalize=True,
    segment_ids=None,
    initial_state=None,
    return_state=False,
    eps=0.0,
    kernels=chunks_sm90,
):
    """`reference.chunkwise` on the kernels, for eps = 0."""
    length = q.shape[1]
    packed = segment_ids is not None
    starts = reference._starts(segment_ids, i.shape[:2]) if packed else None
    wide = mosaic.stat_dtype(q.dtype)
    i, lf = (jnp.swapaxes(x, 1, 2) for x in reference._log_gates(i, f, gate, wide))
    c, n, m = reference._state(initial_state, q, v)
    size = chunks_sm90.edge(q.shape[-1], v.shape[-1])
    # The kernels hold every m constant; these factors are 1, with the gradients of e^m and e^-m.
    hold, scale = lax.stop_gradient, jnp.exp(m - lax.stop_gradient(m))
    c, n = c * scale[..., None, None], n * scale[..., None]
    # TMA copies into wgmma's layout move groups of 8 rows: other lengths cost padded copies.
    q, k, v = (mosaic.pad_axis(x, 1, 8) for x in (q, k, v))
    call = Call(length, size, normalize, packed, sm_count(), kernels)
    h, c, n = _cell(q, k, v, i, lf, c, n, hold(m), starts, call)
    h = h[:, :length]
    if not return_state:
        return h
    m_last = gates(i, lf, m, starts, size).m_last
    scale = jnp.exp(hold(m_last) - m_last)
    return h, (c * scale[..., None, None], n * scale[..., None], m_last)


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def _cell(q, k, v, i, lf, c, n, m, starts, call):
    return _cell_forward(q, k, v, i, lf, c, n, m, starts, call)[0]


def _cell_forward(q, k, v, i, lf, c0, n0, m0, starts, call):
    g = gates(i, lf, m0, starts, call.size)
    c, c_last = call.kernels.states(k, v, g.admit, g.decay, c0)
    n, n_last = running(g.decay, _weighted_sums(g.admit, k), n0)
    tiny = jnp.finfo(jnp.float32).tiny
    one = jnp.maximum(jnp.exp(-g.m), tiny) if call.normalize else jnp.exp(g.m)
    h, norm, slope = call.kernels.rows(
        q, k, v, c, dict(row=g.row, col=g.col, carried=g.carried, one=one, start=g.start),
        mode="forward", along=n, scale=q.shape[-1] ** -0.5,
        normalize=call.normalize, packed=call.packed, sms=call.sms,
    )  # fmt: skip
    g = g._replace(m=g.m_last)  # the rows' m is not needed again
    return (h, c_last, n_last), (q, k, v, h, g, c, n, norm, slope)


def _cell_backward(call, saved, cotangents):
    q, k, v, h, g, c, n, norm, slope = saved
    dh, dc_last, dn_last = cotangents
    s = q.shape[-1] ** -0.5
    static = dict(packed=call.packed, sms=call.sms)

    wide = lambda x: x.astype(g.row.dtype)
    dot = jnp.swapaxes(jnp.sum(wide(dh) * wide(h), -1), 1, 2)
    dot = jnp.pad(dot, [(0, 0), (0, 0), (0, norm.shape[2] * call.size - dot.shape[2])])
    dl = s * slope * dot.reshape(norm.shape)  # of the scaled q . n
    carried = s * g.carried * norm
    dc, dc0, c_dc = call.kernels.states(
        q, dh, carried, g.decay, dc_last, c, reverse=True, saturate=False
    )
    extra = g.carried * dl
    dn, dn0 = running(g.decay, _weighted_sums(extra, q), dn_last, reverse=True)

    rows = dict(row=g.row, col=g.col, factor=s * norm, shift=dl, start=g.start)
    of_q = rows | dict(scale=carried, extra=extra)
    of_k = rows | dict(scale=g.admit)
    dq, q_dq = call.kernels.rows(dh, v, k, c, of_q, mode="dq", along=n, y=q, **static)
    dk, k_dk, k_in = call.kernels.rows(v, dh, q, dc, of_k, mode="dk", along=dn, y=k, **static)
    (dv,) = call.kernels.rows(k, q, dh, dc, of_k, mode="dv", **static)

    dg = jnp.sum(k_in, -1)
    dg += g.decay * (jnp.sum(c_dc, (-2, -1)) + jnp.sum(n * dn, -1))
    dlf = forget_gradient(q_dq - k_dk, dg, g.start, g.in_last)
    flat = lambda x: x.reshape(*x.shape[:2], -1)[:, :, : call.length]
    return dq, dk, dv, flat(k_dk), flat(dlf), dc0, dn0, jnp.zeros_like(g.m_last), None


_cell.defvjp(_cell_forward, _cell_backward)


def _weighted_sums(weight, x):
    """Sums over each chunk: (B,H,N,L), (B,T,H,D) -> (B,H,N,D), in float32."""
    batch, heads, count, size = weight.shape
    x = mosaic.pad_axis(x, 1, count * size) if x.shape[1] < count * size else x
    # Heads and their widths as one axis: else XLA writes a transposed float32 copy of x first.
    x = x.reshape(batch * count, size, -1).astype(weight.dtype)
    weight = jnp.moveaxis(weight, 1, 3).reshape(batch * count, size, heads)
    sums = jnp.sum(jnp.repeat(weight, x.shape[-1] // heads, axis=2) * x, 1)
    return jnp.moveaxis(sums.reshape(batch, count, heads, -1), 2, 1)
