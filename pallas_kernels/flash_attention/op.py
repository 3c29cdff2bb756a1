"""Attention: softmax(scale Q K^T + mask) V, with grouped kv heads (MHA, GQA, MQA).

    S = scale q k^T (softcap: c tanh(S / c)), P = softmax(S over the visible keys), O = P V

Vaswani et al. 2017, "Attention Is All You Need", equation 1; Ainslie et al. 2023 (GQA).  Query head
h reads kv head h // (H / K).  The forward pass saves only the log-sum-exp of each row, from which
the backward pass recomputes P (Dao et al. 2022, "FlashAttention").  With P = exp(scale S - lse),

    delta = rowsum(dO * O) - dlse        dP = dO V^T              dS = P * (dP - delta)
    dQ = scale dS K                      dK = scale dS^T Q        dV = P^T dO

The dQ kernel owns queries and streams keys, the dK/dV kernel owns keys and streams queries: seven
matmuls where one fused kernel would do five, but no sum crosses blocks, so every run gives the same
result bit for bit.  docs/attention-tiles.md has what the fused kernel took.

This file has the op, its forms, its jnp reference and its `custom_vjp`.  The kernels for Hopper are
in forward.py, backward_dq.py and backward_dkv.py; masks.py defines what a query sees, schedule.py
assigns work to blocks, and steps.py numbers their steps.  The kernels for every NVIDIA GPU since
Ampere are in general.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.flash_attention import general, masks
from pallas_kernels.flash_attention.backward_dkv import backward_dkv
from pallas_kernels.flash_attention.backward_dq import backward_dq
from pallas_kernels.flash_attention.forward import forward
from pallas_kernels.flash_attention.schedule import Call, stat_rows
from pallas_kernels.mosaic import ROWS
from pallas_kernels.options import checked, with_gradient
from pallas_kernels.packed import Packed, operands_of, shapes, split

WIDEST = 256  # the largest head dimension: O then takes 128 of a thread's 255 registers
Segments = Integer[ids.Ids, "B S"] | tuple[Integer[ids.Ids, "B T"], Integer[ids.Ids, "B S"]]


@checked
def attention(
    q: Float[Array, "B T H D"] | Packed,
    k: Float[Array, "B S K D"] | None = None,
    v: Float[Array, "B S K D"] | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: Segments | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T H D"] | Any:
    """softmax(scale q k^T, masked) v of each head, in q's dtype; softmax and sums in float32.

    q: or a `Packed` of q, k and v, read in place if D is a multiple of 8; otherwise it is split
        into copies.
    causal: masks later keys.  Needs T <= S; the last query has the position of the last key.
    scale: multiplies the logits; default 1 / sqrt(D).
    window: maximum number of keys that a query sees, including its own (needs causal).
    segment_ids: ids (B, S) of the keys, whose last T are also the queries' ids, or a pair (ids of
        the queries, ids of the keys).  A query sees only its segment's keys.
    softcap: caps logits to softcap * tanh(logits / softcap); at most 100 for the kernel.
    return_lse: also returns ln(sum of exp(logits)), (B, H, T), float32, differentiable.

    A query that sees no key gets zeros and lse = -inf.  If all its visible logits are -inf (from
    an infinity in q or k) it gets NaN, but zeros from the kernels with segment_ids or a window
    below 128.  P and dS are rounded to the inputs' dtype before their matmuls with V, K and Q.
    The kernels' gradients need logits below about 1e5.
    """
    operands = operands_of(q, dict(k=k, v=v), "qkv")
    of_q, of_k, of_v = shapes(operands)
    masks.check(of_q, of_k, of_v, causal, window)
    if window is not None and window >= of_k.shape[1]:
        window = None  # the window holds every key
    if segment_ids is not None:
        q_ids, k_ids = ids.segments(*_pair(segment_ids, of_q, of_k))
        segment_ids = q_ids, k_ids
    options = dict(causal=causal, scale=scale, window=window, softcap=softcap)
    options |= dict(return_lse=return_lse)
    return dispatch.run("attention", FORMS, implementation, operands, segment_ids, **options)


def why_not(operands, segment_ids=None, *, scale=None, softcap=None, **options) -> str | None:
    q, k, v = shapes(operands)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not one dtype"
    if q.shape[-1] > WIDEST:
        return f"the head dimension D={q.shape[-1]} is more than {WIDEST}"
    if masks.scale_of(scale, q) < masks.LEAST_SCALE:
        return f"scale={scale} is less than {masks.LEAST_SCALE}"
    return mosaic.lossy_softcap(softcap) or mosaic.empty(q=q, k=k)


def cudnn_why_not(
    operands, segment_ids=None, *, causal=True, scale=None, window=None, softcap=None,
    return_lse=False,
) -> str | None:  # fmt: skip
    """Why cuDNN's flash attention cannot replace the kernels, or None."""
    q, k, _ = shapes(operands)
    # Like the kernels, cuDNN multiplies masked logits by the scale.
    if lack := dispatch.device_lacks("sm_80") or why_not(operands, scale=scale):
        return lack
    widest = 128 if dispatch.device_lacks("sm_90") else 256
    if q.shape[-1] > widest or q.shape[-1] % 8:
        return f"the head dimension D={q.shape[-1]} is not a multiple of 8 up to {widest}"
    if causal and q.shape[1] != k.shape[1]:
        return f"T={q.shape[1]} is not S={k.shape[1]} (cuDNN does not align the last query and key)"
    if segment_ids is not None or softcap is not None or return_lse:
        return "cuDNN has no segment_ids, softcap or return_lse"
    for name, x in (("q", q), ("k and v", k)):
        if x.size >= 2**31:
            return f"{name} have {x.size} elements: cuDNN's gradients are wrong from 2^31 on"
    for name, size in (("T", q.shape[1]), ("S", k.shape[1])):
        if size % 2:  # JAX raises NotImplementedError, but only for a gradient
            return f"{name}={size} is odd, for which JAX has no cuDNN gradient"
    return None


def _cudnn(operands, segment_ids, *, causal, scale, window, **options):
    if dispatch.rehearses():  # JAX traces cuDNN's attention only where cuDNN is
        return _in_jnp(operands, None, causal=causal, scale=scale, window=window)
    q, k, v = split(operands)
    local = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=masks.scale_of(scale, q), is_causal=causal, local_window_size=local,
        implementation="cudnn",
    )  # fmt: skip


def _pair(segment_ids, q, k):
    """Returns (ids of the queries, ids of the keys); raises ValueError for other shapes."""
    (b, t), s, joint = q.shape[:2], k.shape[1], not isinstance(segment_ids, tuple | list)
    if joint and t > s:
        raise ValueError(f"T={t} is more than S={s} keys: pass segment_ids of both")
    given, need = (segment_ids,) if joint else segment_ids, ((b, t), (b, s))[joint:]
    if (have := tuple(x.shape for x in given)) != need:
        raise ValueError(f"segment_ids have shapes {have}, not {need}")
    return (segment_ids[:, s - t :], segment_ids) if joint else segment_ids


# ---- reference -------------------------------------------------------------------------------


def attention_reference(
    q, k, v, *, causal=True, scale=None, window=None, segment_ids=None, softcap=None,
    return_lse=False,
):  # fmt: skip
    """The formulas in jnp, in float32 (float64 for float64, where no rounding takes effect).

    It rounds where every kernel must: P and dS to the data's dtype before their matmuls, and O to
    its dtype before the row sums of dO * O.  Its gradient is therefore written out.
    """
    t, s = q.shape[1], k.shape[1]
    q_ids, k_ids = jnp.arange(t)[:, None] + (s - t), jnp.arange(s)
    mask = jnp.ones((1, t, s), bool)
    if causal:
        mask &= q_ids >= k_ids
    if window is not None:
        mask &= q_ids - k_ids < window
    if segment_ids is not None:
        q_seg, k_seg = _pair(segment_ids, q, k)
        mask &= q_seg[:, :, None] == k_seg[:, None, :]
    out, lse = masked_reference(q, k, v, mask[:, None, None], masks.scale_of(scale, q), softcap)
    return (out, lse) if return_lse else out


def _in_jnp(operands, segment_ids, **options):
    return attention_reference(*split(operands), segment_ids=segment_ids, **options)


def _logits(q, k, mask, scale, softcap):
    """(logits (B, K, G, T, S), -inf where masked; d logits / d(scale q k^T), None for 1)."""
    x, slope = _einsum("btkgd,bskd->bkgts", q, k) * scale, None
    if softcap is not None:
        tanh = jnp.tanh(x / softcap)
        x, slope = softcap * tanh, 1 - tanh * tanh
    return jnp.where(mask, x, -jnp.inf), slope


def _einsum(formula, x, y):
    return jnp.einsum(formula, x, y, preferred_element_type=mosaic.stat_dtype(x.dtype))


def _grouped(x, kv_heads):
    b, t, h, d = x.shape
    return x.reshape(b, t, kv_heads, h // kv_heads, d)  # the heads of a group are adjacent


def _reference_forward(q, k, v, mask, scale, softcap):
    """((out, lse), what its gradient needs), for any mask that broadcasts to (B, K, H/K, T, S)."""
    b, t, h, _ = q.shape
    x, _ = _logits(_grouped(q, k.shape[2]), k, mask, scale, softcap)
    top = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf)  # S may be 0
    # A row may see no key.  If all its logits are -inf, q or k has an infinity, and it gets NaN.
    top = jnp.where(jnp.any(mask, axis=-1, keepdims=True), top, 0)
    p = jnp.exp(x - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    out = _einsum("bkgts,bskd->bkgtd", p.astype(q.dtype), v) / jnp.where(total == 0, 1, total)
    out = jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)
    lse = (top + jnp.log(total)).reshape(b, h, t)
    out, lse = (checkpoint_name(x, "attention") for x in (out, lse))
    return (out, lse), (q, k, v, mask, out, lse)


def _reference_backward(scale, softcap, saved, cotangents):
    q, k, v, mask, out, lse = saved
    # Without the barrier XLA would use the unrounded O (on a GPU, from JAX 0.12 on).
    out = jax.lax.optimization_barrier(out)
    dout, dlse = cotangents
    dtype, wide = q.dtype, mosaic.stat_dtype(q.dtype)
    (b, t, h, d), kv = q.shape, k.shape[2]
    per_head = lambda x: x.reshape(b, kv, h // kv, t, 1)
    delta = jnp.einsum("bthd,bthd->bht", dout.astype(wide), out.astype(wide)) - dlse
    q, dout = _grouped(q, kv), _grouped(dout, kv)
    x, slope = _logits(q, k, mask, scale, softcap)
    p = jnp.where(mask, jnp.exp(x - per_head(jnp.where(lse == -jnp.inf, 0, lse))), 0)
    ds = jnp.where(mask, p * (_einsum("btkgd,bskd->bkgts", dout, v) - per_head(delta)), 0)
    ds = (ds if slope is None else ds * slope).astype(dtype)
    dq = (_einsum("bkgts,bskd->btkgd", ds, k) * scale).astype(dtype)
    dk = (_einsum("bkgts,btkgd->bskd", ds, q) * scale).astype(k.dtype)
    dv = _einsum("bkgts,btkgd->bskd", p.astype(dtype), dout).astype(v.dtype)
    return dq.reshape(b, t, h, d), dk, dv, None


masked_reference = with_gradient(_reference_forward, _reference_backward, nondiff_argnums=(4, 5))

# ---- kernels ---------------------------------------------------------------------------------


def _kernels(operands, segment_ids, *, causal, scale, window, softcap, return_lse, general: bool):
    """The op by the kernels, in the general form or in Hopper's."""
    q, _, _ = shapes(operands)
    t, d = q.shape[1], q.shape[3]
    if isinstance(operands, Packed) and d % 8 == 0:
        heads = operands.parts[0][0], operands.parts[1][0]
        arrays = (operands.array.reshape(*q.shape[:2], -1, d),)
    else:  # the kernels store 16 bytes at a time
        heads, arrays = None, tuple(mosaic.pad_axis(x, 3, 8) for x in split(operands))
    scale = masks.scale_of(scale, q)
    call = Call(causal, scale, window, softcap, segment_ids is not None, heads, general)
    if segment_ids is not None:  # the kernels copy whole tiles
        segment_ids = [mosaic.pad_axis(x, 1, stat_rows(1)) for x in segment_ids]
    out, lse = _attention(arrays, segment_ids, call, return_lse)
    out = out[..., :d]
    return (out, lse[:, :, :t]) if return_lse else out


def _attention_forward(arrays, segments, call: Call, with_lse):
    """((O, lse), what the backward pass needs).  arrays: (q, k, v), or one array with all three."""
    q, k, v = arrays if call.heads is None else arrays * 3
    results = (general.forward if call.general else forward)(q, k, v, segments, call=call)
    # A jax.checkpoint policy can save these by name and so avoid a second forward pass.
    out, lse = (checkpoint_name(x, "attention") for x in results)
    return (out, lse), (arrays, segments, out, lse)


def _attention_backward(call: Call, with_lse, saved, cotangents):
    arrays, segments, out, lse = saved
    dout, dlse = cotangents
    dlse = dlse if with_lse else None  # it is zero, so the kernels need not read it
    q, k, v = arrays if call.heads is None else arrays * 3
    return backward(q, k, v, out, lse, dout, dlse, segments, call=call), None


def backward(q, k, v, out, lse, dout, dlse, segments=None, *, call: Call):
    """(dq, dk, dv), or one joint gradient if q, k and v are one array.

    lse, dlse (None: zero): (B, H, stat_rows(T)) float32.
    segments: ids of the queries and of the keys, padded to multiples of `stat_rows(1)`, or None.
    """
    rows = 2 * ROWS if call.general else ROWS
    if masks.some_rows_see_nothing(call.window, call.segmented, rows):
        # In a row that sees no key, lse = 1e30 makes P = exp(-1e30) = 0; its dlse is ignored.
        blind = lse == -jnp.inf
        lse = jnp.where(blind, 1e30, lse)
        dlse = None if dlse is None else jnp.where(blind, 0, dlse)
    first, last = backward_dq, backward_dkv
    if call.general:
        first, last = general.backward_dq, general.backward_dkv
    # The statistics that the second kernel reads: lse in base 2 and -delta, or lse and delta.
    dq, lse, delta = first(q, k, v, out, lse, dout, dlse, segments, call=call)
    others = q, k, v, lse, dout, delta, segments
    if call.heads is None:
        return dq, *last(*others, call=call)
    # The second kernel writes dK and dV in place, into their heads of dq's array.
    state = [dq, jnp.zeros((1,), jnp.int32)]
    return (mosaic.in_place(lambda refs, *x: last(*x, refs, call=call), state, *others)[0],)


_attention = with_gradient(_attention_forward, _attention_backward, nondiff_argnums=(2, 3))


# Only an H100 has run the general form, so cuDNN is tried first.
FORMS = (
    Form("hopper", functools.partial(_kernels, general=False), "sm_90a", why_not),
    Form("cudnn", _cudnn, "sm_80", cudnn_why_not),
    Form("general", functools.partial(_kernels, general=True), "sm_80", why_not),
    Form("xla", _in_jnp),
)
