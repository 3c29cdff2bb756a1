"""Causal self-attention on one array of queries, keys and values, with or without RoPE.

    (q | k | v) = qkv,   y = attention(rope(q), rope(k), v)

One matmul can then compute q, k and v, and its backward pass takes two matmuls instead of six.
Splitting the array for `rope` and `attention` would copy it.  Here the kernels index its heads:
RoPE rotates q and k in place, and both backward kernels write into one gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.flash_attention.backward import backward
from pallas_kernels.flash_attention.column_sums import sums_columns
from pallas_kernels.flash_attention.op import (
    WIDTHS,
    attention,
    call_of,
    check,
    forward_of,
    gpu_for,
    use_kernel,
)
from pallas_kernels.flash_attention.op import why_not as _attention_why_not
from pallas_kernels.flash_attention.schedule import Heads
from pallas_kernels.rotary import RopeScaling, checked_positions, rope, rotate_in_place
from pallas_kernels.rotary import why_not_in_place as _rope_why_not


def attention_qkv(
    qkv: Float[Array, "B T P D"],
    n_heads: int,
    *,
    bias: Float[Array, "P D"] | None = None,
    positions: Integer[ids.Ids, "*rows T"] | None = None,
    theta: float | None = None,
    scaling: RopeScaling | None = None,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: Integer[ids.Ids, "B T"] | None = None,
    softcap: float | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention of a sequence to itself, in qkv's dtype.

    qkv: has P = H + 2 K heads: n_heads = H of q, then K of k, then K of v.
    bias: is added to qkv first, rounded to its dtype, as is the sum.  Its gradient is summed in
        float32, without RoPE and at D = 64 and 128 by Hopper's kernels.
    theta: base of RoPE on q and k (layout "half"), or None for no RoPE.
    positions: for RoPE; default 0 ... T-1.
    scaling: as in `rope`; scale, window, segment_ids, softcap: as in `attention`.
    Raises ValueError for heads that do not add up or a bias of another shape than (P, D), and what
    `rope` and `attention` raise.
    """
    mosaic.check_axes("B T P D", qkv=qkv)
    n_kv, left = divmod(qkv.shape[2] - n_heads, 2)
    if left or n_kv < 1 or n_heads < 1 or n_heads % n_kv:
        raise ValueError(
            f"qkv has {qkv.shape[2]} heads, not n_heads={n_heads} plus twice a divisor of it"
        )
    if bias is not None and bias.shape != qkv.shape[2:]:
        raise ValueError(f"bias has shape {bias.shape}, not {qkv.shape[2:]}, qkv's last two axes")
    t, heads = qkv.shape[1], Heads(n_heads, n_kv)
    segment_ids = ids.documents(segment_ids)
    options = dict(scale=scale, window=window, softcap=softcap)
    positions = jnp.arange(t) if positions is None else positions
    general = dispatch.general_form(implementation)
    split = _why_split(qkv, positions if theta else None, general, **options)
    # A GPU that supports attention's kernel also supports RoPE's.
    decision = dispatch.decide("attention", implementation, None, gpu_for(general))
    split = split or decision.runs != "mosaic"
    if split or theta is not None or not sums_columns(general, qkv.shape[3]):
        qkv, bias = _plus(qkv, bias), None  # XLA sums the gradient
    if split:
        q, k, v = (qkv[:, :, i:j] for i, j in ((0, -2 * n_kv), (-2 * n_kv, -n_kv), (-n_kv, None)))
        if theta is not None:
            q, k = rope(
                q, k, positions, theta=theta, scaling=scaling, implementation=implementation
            )
        # pyrefly: ignore[bad-return]
        return attention(q, k, v, segment_ids=segment_ids, **options, implementation=implementation)
    check(qkv, qkv, qkv, True, window, softcap, segment_ids)
    if theta is not None:
        positions = checked_positions(qkv, positions)
        dispatch.use_kernel("rope", implementation, None)
    use_kernel(implementation, None, general)
    window = None if window is not None and window >= t else window
    call = call_of(qkv, t, general, True, scale, window, softcap)
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    return _attention_qkv(qkv, bias, positions, segments, heads, (theta, scaling), call)


def _why_split(qkv, positions, general: bool, **options) -> str | None:
    """Why q, k and v must be split (for their own kernels or for XLA), or None."""
    if reason := _attention_why_not(qkv, qkv, qkv, **options):
        return reason
    fits = qkv.shape[1] % 8 == 0 and qkv.shape[3] in WIDTHS
    if not fits and not (general and qkv.shape[3] % 8 == 0):
        return f"T={qkv.shape[1]} and D={qkv.shape[3]} need padded copies"
    return None if positions is None else _rope_why_not(qkv, positions)


def _plus(qkv, bias):
    """qkv + bias, in the shape of the matmul that yields qkv: XLA then adds it in the matmul."""
    if bias is None:
        return qkv
    flat = qkv.reshape(*qkv.shape[:2], -1)
    return (flat + bias.reshape(-1).astype(qkv.dtype)).reshape(qkv.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention_qkv(qkv, bias, positions, segments, heads, rotation, call):
    return _forward(qkv, bias, positions, segments, heads, rotation, call)[0]


def _forward(qkv, bias, positions, segments, heads, rotation, call):
    qkv = _plus(qkv, bias)
    if rotation[0] is not None:
        qkv = rotate_in_place(qkv, sum(heads), positions, *rotation)
    results = forward_of(call)(qkv, qkv, qkv, segments, call=call, heads=heads)
    out, lse = (checkpoint_name(x, "attention") for x in results)
    like_bias = None if bias is None else jnp.zeros((), bias.dtype)
    return out, (qkv, like_bias, positions, segments, out, lse)


def _backward(heads, rotation, call, saved, dout):
    qkv, like_bias, positions, segments, out, lse = saved
    options = dict(call=call, heads=heads, sums=like_bias is not None)
    d, *dbias = backward(qkv, qkv, qkv, out, lse, dout, None, segments, **options)
    if rotation[0] is not None:
        d = rotate_in_place(d, sum(heads), positions, *rotation, backward=True)
    return d, dbias[0].astype(like_bias.dtype) if dbias else None, None, None


_attention_qkv.defvjp(_forward, _backward)
