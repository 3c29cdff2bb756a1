"""Attention of a few new positions to a cache of keys and values: decode_attention.

    x = scale q k^T (softcap: c tanh(x / c)), P = softmax(x over the keys seen), O = P V

Each byte of the cache serves few queries, so memory limits the speed.  The T H/K queries that
share a kv head are the rows of one wgmma, and a row's keys are split over many blocks, each with
its own softmax; their merge by the log-sum-exp is exact.  "Flash decoding": Dao et al. 2023;
grouped heads: Ainslie et al. 2023.

    block (batch, split, kv head), one warpgroup:

    q     (T H/K rows of 64, D)                  -- q_bar --->  S = Q K^T
    K     [i] [i + 1] ... tiles of 64 keys       -- k_bars -->  P = exp2(c S - m), m, l, rescale O
    V     [i] [i + 1] ...                        -- v_bars -->  O += P V
    wide  one tile of K and of V as float16, only for a float8 cache
    o     (64, D), on its way to memory: the row's result, or a float32 part with log-sum-exp

A block takes its share of the tiles that its row sees: those up to its length, inside its window.
TMA copies the next tiles as soon as the warpgroup has left a buffer.  XLA merges the parts in
order, in one kernel, so two runs are equal bit for bit.  A row of few tiles is one part.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.flash_attention import general_decode
from pallas_kernels.flash_attention.decode_plan import (
    FP8,
    KEYS,
    Plan,
    Share,
    capped,
    merge,
    plan,
    share_of,
    weights_of,
)
from pallas_kernels.flash_attention.masks import LOWEST
from pallas_kernels.flash_attention.op import check, masked_reference, scale_of
from pallas_kernels.float8.quantize import saturated
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, along
from pallas_kernels.options import checked
from pallas_kernels.pipeline import Ring
from pallas_kernels.rotary import RopeScaling, cos_sin, rope_reference


@checked
def decode_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
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
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B 1 H D"], ...]:
    """Attention of the last T positions of each row to its cache, in q's dtype.

    k, v: the cache, in q's dtype or in float8_e4m3fn.  Slots from lengths on must be finite.
    lengths: keys of each row, at most S, including the T positions'.  Position t of T is at
        slot lengths - T + t and sees the slots up to its own.
    new: key and value of the only position (T = 1), which the kernel also writes to slot
        lengths - 1 (lengths are 1 to S), in place where the cache is donated.  The result is then
        (y, k, v) with the updated cache.  For a float8 cache XLA divides them by their scales,
        clips them to +-448 (infinities become NaN), and writes them.
    k_scale, v_scale: multiply k and v, for float8; default 1.
    scale: multiplies the logits; default 1 / sqrt(D).
    window: maximum number of keys that a position sees, including its own.
    softcap: caps logits to softcap * tanh(logits / softcap); at most 100 for the kernel.
    theta, scaling: of RoPE (`rope`, layout "half"), which turns q and the key of `new` by the angle
        of position lengths - 1; None: no RoPE.  Hopper's kernel turns them itself; XLA does before
        other GPUs' kernel, and for a float8 cache.

    Logits, softmax and sums are in float32.  P is rounded to q's dtype before it is multiplied by
    V.  With a float8 cache q k_scale and P are rounded to float16, which holds float8 exactly.
    A position that sees no key gets zeros.  The kernels have no gradient: use `attention`.
    Raises ValueError for shapes or options that contradict each other, NotImplementedError under
    implementation="mosaic" for a call that the kernel does not support, and for a gradient.
    """
    lengths = ids.saturated("lengths", lengths)
    _check(q, k, v, lengths, new, k_scale, v_scale, window, softcap)
    if theta is not None and (new is None or q.shape[3] % 2):
        raise ValueError(
            f"theta={theta} needs new=, the key that RoPE turns, and an even D, not {q.shape[3]}"
        )
    if window is not None and window >= k.shape[1]:
        window = None  # the window holds every key
    arrays = q, k, v, lengths, new, k_scale, v_scale
    options = dict(scale=scale, window=window, softcap=softcap, theta=theta, scaling=scaling)
    return dispatch.run("decode_attention", FORMS, implementation, *arrays, **options)


def decode_attention_reference(
    q, k, v, lengths, *, new=None, k_scale=None, v_scale=None, **options
):
    """The formulas in jnp, rounded where the kernel rounds."""
    options = dict(scale=None, window=None, softcap=None, theta=None, scaling=None) | options
    return _in_form(q, k, v, lengths, new, k_scale, v_scale, form=_in_jnp, **options)


def _in_form(
    q, k, v, lengths, new, k_scale, v_scale, *, form, scale, window, softcap, theta, scaling
):
    """The op; form: what attends to the cache."""
    table = None
    if theta is not None and form is _kernel and k.dtype != FP8:
        table = cos_sin(lengths - 1, q.shape[3], theta, scaling)
    elif theta is not None:
        q, new = _turned(q, new, lengths, theta, scaling)
    options = scale_of(scale, q), window, softcap
    return _decode(form, *options, q, k, v, lengths, new, table, k_scale, v_scale)


def _turned(q, new, lengths, theta, scaling):
    """q and `new` with RoPE."""
    q, key = rope_reference(q, new[0], (lengths - 1)[:, None], theta=theta, scaling=scaling)
    return q, (key, new[1])


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
    if scale_of(scale, q) <= 0:
        return f"scale={scale} is not positive"
    return mosaic.lossy_softcap(softcap) or mosaic.empty(q=q, k=k)


def _check(q, k, v, lengths, new, k_scale, v_scale, window, softcap):
    """Raises ValueError for arrays or options that contradict each other."""
    check(q, k, v, True, window, softcap)
    (batch, _, kv, _), have = k.shape, k.dtype
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {lengths.shape}, not (B,) = ({batch},)")
    if v.dtype != have:
        raise ValueError(f"k is {have} and v {v.dtype}: they must be equal")
    if new is not None and q.shape[1] != 1:
        raise ValueError(f"q has T={q.shape[1]} positions: a call with new= needs 1")
    for x in new or ():
        if x.shape != (batch, 1, *k.shape[2:]):
            raise ValueError(f"new has shape {x.shape}, not {(batch, 1, *k.shape[2:])}")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x is not None and x.shape != (batch, kv):
            raise ValueError(f"{name} has shape {x.shape}, not (B, K) = ({batch}, {kv})")


def _decode(form, scale, window, softcap, q, k, v, lengths, new, table, k_scale, v_scale):
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    by_head = lambda x: jnp.repeat(x, group, axis=1)[:, None, :, None]
    inner = jnp.float16 if k.dtype == FP8 and dtype.itemsize == 2 else dtype
    q = (q if k_scale is None else q * by_head(k_scale)).astype(inner)
    cache = []
    if new is not None:
        scales = (k_scale, v_scale)
        new = tuple(_stored(x[:, 0], s, k.dtype) for x, s in zip(new, scales, strict=True))
    if new is not None and (form is not _kernel or k.dtype == FP8):
        k, v = cache = _append(k, v, new, lengths)
        new = None
    y, *written = form(q, k, v, lengths, new, table, scale, window, softcap)
    cache = cache or written  # by Hopper's kernel
    y = (y if v_scale is None else y * by_head(v_scale)).astype(dtype)
    return (y, *cache) if cache else y


def _stored(x, scale, dtype):
    """x (B, K, D) as a cache of this dtype holds it; scale: (B, K) or None."""
    if dtype != FP8:
        return x.astype(dtype)
    x = x.astype(mosaic.stat_dtype(x.dtype))
    x = x if scale is None else x / scale[..., None]
    return saturated(x, dtype)


def _append(k, v, new, lengths):
    """[k, v] with a position of each row, two of (B, K, D), in the last slot of its text."""
    slots = lengths - 1

    def write(kept, new):
        # For a scatter of one row XLA for GPUs checks the bounds, in two kernels.
        if len(slots) == 1:
            return lax.dynamic_update_slice_in_dim(kept, new[:, None], slots[0], axis=1)
        return kept.at[jnp.arange(len(slots)), slots].set(new, unique_indices=True)

    return [write(k, new[0]), write(v, new[1])]


def _in_jnp(q, k, v, lengths, _new, _table, scale, window, softcap):
    t, s = q.shape[1], k.shape[1]
    lengths = jnp.minimum(lengths, s)
    places, slots = (lengths[:, None] - t + jnp.arange(t))[:, :, None], jnp.arange(s)
    mask = slots <= places
    if window is not None:
        mask &= places - slots < window
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return masked_reference(q, k, v, mask[:, None, None], scale, softcap)[:1]


# ---- kernel ----------------------------------------------------------------------------------


def _general(q, k, v, lengths, _new, _table, scale, window, softcap):
    return (general_decode.attend(q, k, v, lengths, scale, window, softcap),)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _kernel(q, k, v, lengths, new, table, scale, window, softcap):
    p = plan(q, k, scale, window, softcap, new is not None)
    (b, t, h, d), kv = q.shape, k.shape[2]
    rows = t * p.group
    q = q.reshape(b, t, kv, p.group, d).swapaxes(1, 2).reshape(b, kv, rows, d)
    if rows > 8:  # TMA moves groups of 8 rows
        q = mosaic.pad_axis(q, 2, 8)
    tile = lambda n, rows, dtype: plgpu.SMEM(
        (n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype)
    )
    ring = tile(p.stages, KEYS, k.dtype)
    parts = (b, p.splits, kv)
    lse = jax.ShapeDtypeStruct((*parts, ROWS), jnp.float32) if p.splits > 1 else None
    # float8's result still needs v_scale.
    dtype = jnp.float32 if p.splits > 1 or p.fp8 else p.dtype
    kernel = mosaic.kernel(
        functools.partial(_body, p),
        name="decode_attention",
        out_type=(jax.ShapeDtypeStruct((*parts, q.shape[2], d), dtype), lse),
        scratch_types=dict(
            q_smem=tile(1, ROWS, p.dtype),
            k_smem=ring,
            v_smem=ring,
            wide_smem=tile(2, KEYS, p.dtype) if p.fp8 else None,
            o_smem=tile(1, ROWS, dtype),
            q_bar=plgpu.Barrier(),
            k_bars=plgpu.Barrier(num_barriers=p.stages),
            v_bars=plgpu.Barrier(num_barriers=p.stages),
        ),
        **mosaic.grid(batch=b, split=p.splits, head=kv),
        # A row is in one warp, so its maximum and sum need no shared memory.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )
    arrays, cache = (q, lengths, new, table), []
    if new is None:
        o, lse = kernel([k, v], *arrays)
    else:
        cache, (o, lse) = mosaic.in_place_with_results(kernel, [k, v], *arrays)
    o = o[:, :, :, :rows]
    y = o[:, 0] if lse is None else merge(o, lse[:, :, :, :rows])
    return y.reshape(b, kv, t, p.group, d).swapaxes(1, 2).reshape(b, t, h, d), *cache


class _Block(NamedTuple):
    """What a block of the kernel works on, and its references."""

    p: Plan
    share: Share
    q: Any
    k: Any
    v: Any
    new: Any
    table: Any  # (cos, sin) of RoPE, or None
    o: Any
    lse: Any
    smem: dict


def _body(p: Plan, cache_refs, q_ref, lengths_ref, new_refs, table_refs, o_ref, lse_ref, **smem):
    share = share_of(p, lengths_ref)
    batch, split, head = share.batch, share.split, share.head
    k_ref, v_ref = cache_refs
    b = _Block(p, share, q_ref, k_ref, v_ref, new_refs, table_refs, o_ref, lse_ref, smem)
    # The first row is a variable because JAX 0.12 rejects slices that are statically too wide.
    zero = lax.rem(share.low, jnp.int32(1))
    rows = pl.ds(zero * 8, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[batch, head, rows], smem["q_smem"].at[0], smem["q_bar"])
    for i in range(p.stages):
        for name in "kv":
            _send(b, name, share.low + i)
    plgpu.barrier_wait(smem["q_bar"])
    if table_refs is not None:
        q = plgpu.load(smem["q_smem"].at[0], layout=mosaic.WGMMA)
        smem["q_smem"][0] = _rotated(b, q.astype(jnp.float32)).astype(p.dtype)
        plgpu.commit_smem()
    o, m, l = pl.run_scoped(functools.partial(_attend, b), plgpu.ACC((ROWS, p.width), jnp.float32))
    inverse = jnp.where(l > 0, 1 / l, 0)
    smem["o_smem"][0] = (o * along(inverse, o.shape, 0)).astype(smem["o_smem"].dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["o_smem"].at[0], o_ref.at[batch, split, head, rows])
    if lse_ref is not None:
        mosaic.store(lse_ref.at[batch, split, head], m * (1 / LOG2E) + jnp.log(l))
    if p.appends:
        pl.when(split == p.splits - 1)(lambda: _write_new(b))
    plgpu.wait_smem_to_gmem(0)


def _rotated(b: _Block, x):
    """RoPE of x (rows, D) or (D,).  A thread has both numbers of a pair: D/2 is 8 or more."""
    half = x.shape[-1] // 2
    cos, sin = (mosaic.load(ref.at[b.share.batch], COL) for ref in b.table)
    x, y = x[..., :half], x[..., half:]
    if x.ndim == 2:
        cos, sin = (along(t, x.shape, 1) for t in (cos, sin))
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


def _new(b: _Block, i: int):
    """The key (0) or value (1) of the newest position and this head, (D,)."""
    x = mosaic.load(b.new[i].at[b.share.batch, b.share.head], COL)
    if b.table is None or i == 1:
        return x
    return _rotated(b, x).astype(b.k.dtype).astype(jnp.float32)  # as it will be read later


def _write_new(b: _Block):
    """Writes them to the cache.  No block reads their slot, and this one has read its tile."""
    for i, ref in enumerate((b.k, b.v)):
        mosaic.store(
            ref.at[b.share.batch, jnp.maximum(b.share.length, 0), b.share.head], _new(b, i)
        )


def _ring(b: _Block, name: str) -> Ring:
    """The ring of K or V; its steps are the block's tiles from share.low on."""
    return Ring(b.p.stages, b.smem[f"{name}_bars"])


def _send(b: _Block, name: str, tile):
    """Starts the copy of a tile of K or V, if it is the block's; past S it is filled with zeros."""

    @pl.when(tile < b.share.high)
    def _():
        source = getattr(b, name).at[b.share.batch, pl.ds(tile * KEYS, KEYS), b.share.head]
        _ring(b, name).send(tile - b.share.low, source, b.smem[f"{name}_smem"])


def _receive(b: _Block, name: str, tile):
    """The tile as an operand of wgmma, once it has arrived."""
    arrived = b.smem[f"{name}_smem"].at[_ring(b, name).wait(tile - b.share.low)]
    if not b.p.fp8:
        return arrived
    wide = b.smem["wide_smem"].at["kv".index(name)]
    x = plgpu.load(arrived, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    wide[...] = plgpu.layout_cast(x.astype(b.p.dtype), mosaic.WGMMA)
    _leave(b, name, tile)
    return wide


def _leave(b: _Block, name: str, tile):
    """All warps have read the buffer of this tile, so it takes a later one."""
    plgpu.commit_smem()
    _send(b, name, tile + b.p.stages)


def _attend(b: _Block, o_acc):
    """-> O before its division, the largest logit and the sum of each row."""
    row = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
    m, l = row(LOWEST), row(0)
    if b.p.appends:
        last = b.share.split == b.p.splits - 1
        m, l = lax.cond(last, lambda: _start(b, o_acc), lambda: (m, l))
    m, l = lax.fori_loop(b.share.low, b.share.high, functools.partial(_step, b, o_acc), (m, l))
    return o_acc[...], m, l


def _start(b: _Block, o_acc):
    """The softmax over the newest position alone: O, and the largest logit and the sum of rows."""
    q = plgpu.load(b.smem["q_smem"].at[0], layout=mosaic.WGMMA).astype(jnp.float32)
    x = jnp.sum(q * along(_new(b, 0), q.shape, 1), axis=1)
    x, factor = capped(b.p, x)
    o_acc[...] = along(_new(b, 1), q.shape, 1)
    return x * factor, plgpu.layout_cast(jnp.full((ROWS,), 1, jnp.float32), ROW)


def _step(b: _Block, o_acc, tile, carry):
    """Adds one tile of keys."""
    p, (m, l) = b.p, carry
    k = _receive(b, "k", tile)

    def scores(acc):
        plgpu.wgmma(acc, b.smem["q_smem"].at[0], k.transpose((1, 0)))
        return acc[...]

    x = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
    if not p.fp8:
        _leave(b, "k", tile)
    e, m_new, alpha = weights_of(p, b.share, x, tile, m)
    o_acc[...] = o_acc[...] * along(alpha, o_acc.shape, 0)
    plgpu.wgmma(o_acc, e.astype(p.dtype), _receive(b, "v", tile))
    plgpu.wgmma_wait(0)
    if not p.fp8:
        _leave(b, "v", tile)
    return m_new, l * alpha + jnp.sum(e, axis=1)


FORMS = (
    Form("hopper", functools.partial(_in_form, form=_kernel), "sm_90a", why_not),
    Form(
        "general",
        functools.partial(_in_form, form=_general),
        "sm_80",
        functools.partial(why_not, general=True),
    ),
    Form("xla", functools.partial(_in_form, form=_in_jnp)),
)
