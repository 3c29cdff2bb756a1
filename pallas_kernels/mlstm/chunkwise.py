"""The chunkwise mLSTM cell on tensor cores: both directions, around the two kernels, and with the
output gate and norm that follow in an xLSTM block.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import dispatch, mosaic
from pallas_kernels.mlstm import reference
from pallas_kernels.mlstm.gates import forget_gradient, gates
from pallas_kernels.mlstm.intra import chunk_outputs
from pallas_kernels.mlstm.states import SIZE, Heads, states
from pallas_kernels.norms import kernels as norms
from pallas_kernels.norms.norm import FORMS as NORM_FORMS
from pallas_kernels.options import with_gradient
from pallas_kernels.packed import Packed, shapes, split


class CellCall(NamedTuple):
    """The static arguments of a call."""

    dqk: int  # DQK without padding
    dv: int  # DV without padding
    normalize: bool
    first: bool  # an initial state is given
    last: bool  # the final state is returned
    norm_eps: float | None


def in_place(packed: Packed) -> bool:
    """Whether the kernels read the array in place: it needs no padding."""
    (_, dqk), _, (_, dv), *_ = packed.parts
    return not (dqk % SIZE or dv % SIZE)


# Traced and lowered once for all layers.
@jax.jit(static_argnames=("gate", "normalize", "return_state", "norm_eps"))
def chunkwise(
    operands, i, f, weight=None, *,
    gate="exp", normalize=True, segment_ids=None, initial_state=None, return_state=False,
    norm_eps=None,
):  # fmt: skip
    """Computes `reference.chunkwise` with the kernels, for eps = 0.

    operands: q, k and v, or a Packed of them.
    weight: of the norm that follows, if `gated_fits`; o is then the fourth part of the Packed.
    """
    packed = operands if isinstance(operands, Packed) and in_place(operands) else None
    q, k, v, *_ = split(operands) if packed is None else shapes(operands)
    dqk, dv, wide = q.shape[-1], v.shape[-1], mosaic.stat_dtype(q.dtype)
    starts = None if segment_ids is None else reference.starts_of(segment_ids)
    i, lf = reference.log_gates(i, f, gate, wide)
    first, m = None, jnp.zeros((i.shape[0], i.shape[2]), wide)
    if initial_state is not None:
        c, n, m = reference.state_of(initial_state, q, v)
        # 1, with the gradient of e^m, because the kernels do not differentiate m.
        scale = jnp.exp(m - lax.stop_gradient(m))
        c = mosaic.pad_axis(mosaic.pad_axis(c, 2, SIZE), 3, SIZE)
        first = c * scale[..., None, None], mosaic.pad_axis(n, 2, SIZE) * scale[..., None]
    # Tiles have 64 columns.  Other widths are padded in copies.
    pad = lambda x: mosaic.pad_axis(x, 3, SIZE)
    arrays = tuple(map(pad, (q, k, v))) if packed is None else (packed.array,)
    call = CellCall(dqk, dv, normalize, first is not None, return_state, norm_eps)
    h, last = cell(arrays, i, lf, first, m, starts, weight, call)
    h = h[..., :dv]
    if not return_state:
        return h
    c, n = last[0][..., :dqk, :dv], last[1][..., :dqk]
    m_last = gates(i, lf, m, starts).m_last
    scale = jnp.exp(lax.stop_gradient(m_last) - m_last)  # 1, with the gradient of e^-m
    return h, (c * scale[..., None, None], n * scale[..., None], m_last)


def _heads(arrays, heads: int, call: CellCall) -> list[Heads]:
    """q, k and v as the kernels see them."""
    if len(arrays) == 3:
        return [Heads.of(x, x.shape[-1]) for x in arrays]
    places = (call.dqk, 0), (call.dqk, call.dqk), (call.dv, 2 * call.dqk)
    return [Heads.of(arrays[0], width, heads * start) for width, start in places]


def cell_forward(arrays, i, lf, first, m, starts, weight, call):
    """((h, last), what `cell_backward` needs).

    arrays: q, k and v, (B,T,H,D) each, or one array (B,T,P) of their heads, side by side, which may
    have further columns.
    first: the initial (C, n), None for zero; last: the final one, if requested.
    weight: computes sigmoid(o) layer_norm(h, weight) in place of h; o are the array's last columns.
    """
    q, k, v = _heads(arrays, i.shape[2], call)
    g, s = gates(i, lf, m, starts), call.dqk**-0.5
    c, n, last, _ = states(k, v, g.admit, g.admit, g.decay, first, last=call.last)
    tiny = jnp.finfo(jnp.float32).tiny
    one = jnp.maximum(jnp.exp(-g.m), tiny) if call.normalize else jnp.exp(g.m)
    g = g._replace(m=g.m_last, row=g.row + math.log2(s), carried=g.carried * s)
    vectors = dict(row=g.row, col=g.col, scale=g.carried, one=one, start=g.start)
    h, norm, sign = chunk_outputs(q, k, v, c, vectors, n, mode="forward", normalize=call.normalize)
    h = h.reshape(*arrays[0].shape[:2], i.shape[2], -1)
    # A jax.checkpoint policy can save these by name.  The backward pass then recomputes only the
    # states, which take more memory than h and little time.
    h, norm, sign = (checkpoint_name(x, "vlstm") for x in (h, norm, sign))
    normed = None
    if weight is not None:
        gate, eps = arrays[0], call.norm_eps
        (h, _), normed = norms.forward(h, weight, None, None, None, gate, True, eps)
    return (h, last), (arrays, g, c, n, norm, sign, normed)


def _gradient(mode, into, *operands) -> tuple[Any, Any]:
    """(the gradient that the mode computes, further results); into: the array for it, or None."""
    run = lambda into, *operands: chunk_outputs(*operands, into, mode=mode)
    if into is None:
        gradient, *results = run(None, *operands)
        return gradient, results
    # Without a copy: the kernel writes only its columns of the array.
    into = into.reshape(operands[-1].array.shape)
    if mode == "dv":  # has no further results
        return mosaic.in_place(run, into, *operands), ()
    return mosaic.in_place(run, into, *operands, results=True)


def cell_backward(call, saved, cotangents):
    """The gradients of `cell`'s arguments."""
    arrays, g, c, n, norm, sign, normed = saved
    (dh, d_last), dweight, joint = cotangents, None, None
    if normed is not None:
        # joint: the array's gradient, of which only o's columns are written; dq, dk and dv follow.
        dh, dweight, *_, joint = norms.backward(True, call.norm_eps, normed, (dh, None))
    q, k, v = _heads(arrays, dh.shape[2], call)
    dh = Heads.of(dh, dh.shape[-1])
    # With closed forget gates g.row is large, and adding log2(norm) to it rounds 1 / N.  All terms
    # of a row must then use the rounded N: terms far larger than the gates' gradients cancel.
    row = g.row + jnp.log2(norm)
    rounded = jnp.exp2(row - g.row)
    carried, sign = g.carried * rounded, sign * norm / rounded
    seen = dict(row=row, col=g.col, start=g.start)
    dq, (dot,) = _gradient("dq", joint, dh, v, k, c, seen | dict(scale=carried, sign=sign), n, q)
    shift = sign * dot
    back = dict(reverse=True, last=call.first)
    dc, dn, d_first, c_dc = states(q, dh, carried, carried * shift, g.decay, d_last, c, **back)
    seen |= dict(scale=g.admit)
    one = len(arrays) == 1  # then the kernels of dk and dv write to the array of dq
    shifted = seen | dict(shift=shift)
    dk, (inside, outside) = _gradient("dk", dq if one else None, v, dh, q, dc, shifted, dn, k)
    dv, _ = _gradient("dv", dk if one else None, k, q, dh, dc, seen, None, v)
    gradients = (dv,) if one else (dq, dk, dv)
    gradients = tuple(d.reshape(x.shape) for d, x in zip(gradients, arrays, strict=True))

    di = inside + outside  # k . dk
    # q . dq: h does not depend on the length of q where l divides it; elsewhere it is linear in q.
    q_dq = jnp.where(sign == 0, dot, 0)
    # Reducing these to 64 numbers first lets one kernel compute the sums over 64, DX and <C, dC>.
    dots = jnp.concatenate([c_dc, (n * dn)[..., None, :]], -2)
    dots = jnp.unstack(dots.reshape(*g.decay.shape, -1, SIZE), axis=3)
    dg = jnp.sum(outside + g.decay[..., None] * sum(dots), -1)
    dlf = forget_gradient(q_dq - di, dg, g.start, g.in_last)
    flat = lambda x: jnp.swapaxes(x.reshape(*x.shape[:2], -1)[:, :, : arrays[0].shape[1]], 1, 2)
    return gradients, flat(di), flat(dlf), d_first, jnp.zeros_like(g.m_last), None, dweight


cell = with_gradient(cell_forward, cell_backward, nondiff_argnums=(7,))


def gated_fits(packed: Packed, weight, eps, implementation) -> bool:
    """Whether both the cell's and the norm's kernels read the array in place.

    Raises what `layer_norm` raises.
    """
    if not in_place(packed):
        return False
    _, (heads, dqk), _, (_, dv) = packed.parts
    h = jax.ShapeDtypeStruct((*packed.array.shape[:2], heads, dv), packed.array.dtype)
    norm_call = "layer_norm", NORM_FORMS, implementation, h, weight, None, None, None, h
    norm, decision, _ = dispatch.choose(*norm_call, centered=True, eps=eps)
    if not norm.is_kernel or 2 * heads * dqk % dv:
        return False
    dispatch.record(decision)
    return True
