"""Attention of a few new positions to a cache of keys and values: decode_attention.

    x = scale q k^T (softcap: c tanh(x / c)), P = softmax(x over the keys seen), O = P V

Each byte of the cache serves few queries, so memory limits the speed.  The T H/K queries that
share a kv head are the rows of one matmul (row t H/K + g has position t).  The keys of a row are
split over many blocks, each with a separate softmax; merging them by the log-sum-exp is exact
("Flash decoding": Dao et al. 2023; grouped heads: Ainslie et al. 2023).  One XLA kernel merges the
parts in order, so two runs are equal bit for bit.  A row of few tiles is one part.

This file has the op, its jnp reference and its forms; decode_kernels.py has the kernels.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.flash_attention import masks
from pallas_kernels.flash_attention.decode_kernels import FP8, for_every_gpu, hopper
from pallas_kernels.flash_attention.masks import LEAST_SCALE, scale_of
from pallas_kernels.flash_attention.op import masked_reference
from pallas_kernels.float8.quantize import saturated
from pallas_kernels.mosaic import ROWS
from pallas_kernels.options import checked
from pallas_kernels.rotary import RopeScaling, cos_sin, rope_reference


@checked
def decode_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"] | Float8e4m3fn[Array, "B S K D"],
    v: Float[Array, "B S K D"] | Float8e4m3fn[Array, "B S K D"],
    lengths: Integer[ids.Ids, " B"],
    *,
    new: tuple[Float[Array, "B 1 K D"], Float[Array, "B 1 K D"]] | None = None,
    k_scale: Float[Array, "B K"] | None = None,
    v_scale: Float[Array, "B K"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    theta: float | None = None,
    scaling: RopeScaling | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T H D"] | Any:
    """Attention of the last T positions of each row to its cache, in q's dtype.

    k, v: the cache, in q's dtype or in float8_e4m3fn.  Slots from lengths on must be finite.
    lengths: number of keys of each row, at most S, including the T positions.  Position t of T is
        at slot lengths - T + t and sees the slots up to this one.
    new: key and value of the only position (T = 1), which the kernel also writes to slot
        lengths - 1 (clipped to the cache), in place if the cache is donated.  The result is then
        (y, k, v) with the updated cache.  XLA divides key and value by their scales, and for a
        float8 cache clips them to +-448 (infinities become NaN) and writes them.
    k_scale, v_scale: multiply k and v, above all for float8; default 1.
    scale: multiplies the logits; default 1 / sqrt(D).
    window: maximum number of keys that a position sees, including its own.
    softcap: caps logits to softcap * tanh(logits / softcap); at most 100 for the kernel.
    theta, scaling: of RoPE (`rope`, layout "half"), which rotates q and the key of `new` by the
        angle of position lengths - 1; None: no RoPE.  Hopper's kernel rotates them itself; for
        other GPUs' kernel, and for a float8 cache, XLA rotates them first.

    Logits, softmax and sums are in float32.  P is rounded to q's dtype before it is multiplied by
    V.  With a float8 cache q k_scale and P are rounded to float16, which holds float8 exactly.
    A position that sees no key gets zeros.  If all its logits are -inf (from an infinity in q or
    k) it gets NaN, but zeros from the kernels.  The kernels have no gradient: use `attention`.
    """
    lengths = ids.saturated("lengths", lengths)
    _check(q, k, v, lengths, new, k_scale, v_scale, window)
    if theta is None and scaling is not None:
        raise ValueError(f"scaling={scaling} needs theta, whose frequencies it scales")
    if theta is not None and (new is None or q.shape[3] % 2):
        need = "new=, the key that RoPE turns" if new is None else f"an even D, not {q.shape[3]}"
        raise ValueError(f"theta={theta} needs {need}")
    if window is not None and window >= k.shape[1]:
        window = None  # the window holds every key
    arrays = q, k, v, lengths, new, k_scale, v_scale
    options = dict(scale=scale, window=window, softcap=softcap, theta=theta, scaling=scaling)
    return dispatch.run("decode_attention", FORMS, implementation, *arrays, **options)


def _decode(
    q, k, v, lengths, new, k_scale, v_scale, *, form, scale, window, softcap, theta, scaling
):
    """The op.  form: the function that attends to the cache."""
    group, dtype, table, cache = q.shape[2] // k.shape[2], q.dtype, None, []
    # Whether the kernel rotates q and the new key, and writes the new position.
    alone = form is hopper and k.dtype != FP8
    if theta is not None and alone:
        table = cos_sin(lengths - 1, q.shape[3], theta, scaling)
    elif theta is not None:
        q, key = rope_reference(q, new[0], lengths[:, None] - 1, theta=theta, scaling=scaling)
        new = key, new[1]
    by_head = lambda x: jnp.repeat(x, group, axis=1)[:, None, :, None]
    inner = jnp.float16 if k.dtype == FP8 and dtype.itemsize == 2 else dtype
    q = (q if k_scale is None else q * by_head(k_scale)).astype(inner)
    if new is not None:
        scales = (k_scale, v_scale)
        new = tuple(_stored(x[:, 0], s, k.dtype) for x, s in zip(new, scales, strict=True))
        if not alone:
            k, v = cache = _append(k, v, new, lengths)
            new = None
    y, *written = form(q, k, v, lengths, new, table, scale_of(scale, q), window, softcap)
    cache = cache or written
    y = (y if v_scale is None else y * by_head(v_scale)).astype(dtype)
    return (y, *cache) if cache else y


def why_not(q, k, v, *arrays, scale=None, softcap=None, general=False, **options) -> str | None:
    """Why the kernel, or its general form, does not support this call, or None."""
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    if k.dtype not in (q.dtype, FP8):
        return f"the cache is {k.dtype}, not {q.dtype} or float8_e4m3fn"
    if general and k.dtype == FP8:
        return "a float8 cache needs compute capability 9.0"
    # 32 bytes are the smallest swizzle; float8 with D = 256 would spill registers.
    multiple, most = (32, 128) if k.dtype == FP8 else (16, 256)
    if q.shape[3] % multiple or q.shape[3] > most:
        return f"the head dimension D={q.shape[3]} is not a multiple of {multiple} up to {most}"
    if t * group > ROWS:
        return f"T={t} positions of {group} heads are {t * group} rows, more than {ROWS}"
    if k.shape[1] % 8:
        return f"the cache's S={k.shape[1]} slots are not a multiple of 8"
    if scale_of(scale, q) < LEAST_SCALE:
        return f"scale={scale} is less than {LEAST_SCALE}"
    return mosaic.lossy_softcap(softcap) or mosaic.empty(q=q, k=k)


def _check(q, k, v, lengths, new, k_scale, v_scale, window):
    masks.check(q, k, v, True, window)
    batch, _, kv, d = k.shape
    if v.dtype != k.dtype:
        raise ValueError(f"k is {k.dtype} and v {v.dtype}: they must be equal")
    if new is not None and q.shape[1] != 1:
        raise ValueError(f"q has T={q.shape[1]} positions: a call with new= needs 1")
    needs = [("lengths", lengths, "(B,)", (batch,))]
    needs += [("new", x, "(B, 1, K, D)", (batch, 1, kv, d)) for x in new or ()]
    scales = ("k_scale", k_scale), ("v_scale", v_scale)
    needs += [(name, x, "(B, K)", (batch, kv)) for name, x in scales if x is not None]
    for name, x, axes, need in needs:
        if x.shape != need:
            raise ValueError(f"{name} has shape {x.shape}, not {axes} = {need}")


def _stored(x, scale, dtype):
    """x (B, K, D) as a cache of this dtype holds it; scale: (B, K) or None."""
    x = x.astype(mosaic.stat_dtype(x.dtype))
    x = x if scale is None else x / scale[..., None]
    return saturated(x, dtype) if dtype == FP8 else x.astype(dtype)


def _append(k, v, new, lengths):
    """[k, v] with each row's new key and value, each (B, K, D), written to the row's last slot."""
    slots = jnp.clip(lengths, 1, k.shape[1]) - 1

    def write(kept, new):
        # For a scatter of one row, XLA checks the bounds on a GPU in two kernels.
        if len(slots) == 1:
            return lax.dynamic_update_slice_in_dim(kept, new[:, None], slots[0], axis=1)
        at = kept.at[jnp.arange(len(slots)), slots]
        return at.set(new, unique_indices=True, out_sharding=mosaic.place((kept, slice(None))))

    return [write(k, new[0]), write(v, new[1])]


def _in_jnp(q, k, v, lengths, _new, _table, scale, window, softcap):
    """The formulas in jnp, rounded where the kernel rounds."""
    t, s = q.shape[1], k.shape[1]
    lengths = jnp.clip(lengths, 0, s)
    places, slots = (lengths[:, None] - t + jnp.arange(t))[:, :, None], jnp.arange(s)
    mask = slots <= places
    if window is not None:
        mask &= places - slots < window
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return masked_reference(q, k, v, mask[:, None, None], scale, softcap)[:1]


FORMS = (
    Form("hopper", functools.partial(_decode, form=hopper), "sm_90a", why_not),
    Form(
        "general", functools.partial(_decode, form=for_every_gpu), "sm_80",
        functools.partial(why_not, general=True),
    ),
    Form("xla", functools.partial(_decode, form=_in_jnp)),
)  # fmt: skip
