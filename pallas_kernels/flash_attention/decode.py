"""Attention of a few new positions to a cache of keys and values: decode_attention.

    x = scale q k^T (softcap: c tanh(x / c)), P = softmax(x over the keys seen), O = P V

Each byte of the cache serves few queries, so memory limits the speed.  The T H/K queries that
share a kv head are the rows of one matmul (row t H/K + g is of position t), and a row's keys are
split over many blocks, each with its own softmax; their merge by the log-sum-exp is exact ("Flash
decoding": Dao et al. 2023; grouped heads: Ainslie et al. 2023).  XLA merges the parts in order, in
one kernel, so two runs are equal bit for bit.  A row of few tiles is one part.

    block (batch, split, kv head), one warpgroup, on Hopper:

    q     (T H/K rows of 64, D)                  -- q_bar --->  S = Q K^T
    K     [i] [i + 1] ... tiles of 64 keys       -- k_bars -->  P = exp2(c S - m), m, l, rescale O
    V     [i] [i + 1] ...                        -- v_bars -->  O += P V
    wide  one tile of K and of V as float16, only for a float8 cache
    o     (64, D), on its way to memory: the row's result, or a float32 part with log-sum-exp

A block takes its share of the tiles that its row sees: those up to its length, inside its window.
TMA copies the next tiles as soon as the warpgroup has left a buffer.  Other GPUs since Ampere run
`general.decode_body`, with one buffer of K and one of V.  For D = 128 its blocks have 48 KB of
shared memory, so two are on a processor and 32 KB of the cache on their way to it.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.flash_attention import general, masks
from pallas_kernels.flash_attention.masks import LEAST_SCALE, scale_of
from pallas_kernels.flash_attention.op import masked_reference
from pallas_kernels.flash_attention.schedule import FP8, KEYS, DecodePlan, decode_plan, width_of
from pallas_kernels.float8.quantize import saturated
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA, along
from pallas_kernels.options import checked
from pallas_kernels.pipeline import Ring
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
) -> Float[Array, "B T H D"] | tuple[Float[Array, "B 1 H D"], ...]:
    """Attention of the last T positions of each row to its cache, in q's dtype.

    k, v: the cache, in q's dtype or in float8_e4m3fn.  Slots from lengths on must be finite.
    lengths: keys of each row, at most S, including the T positions'.  Position t of T is at
        slot lengths - T + t and sees the slots up to its own.
    new: key and value of the only position (T = 1), which the kernel also writes to slot
        lengths - 1, or to the nearest one, in place where the cache is donated.  The result is then
        (y, k, v) with the updated cache.  XLA divides them by their scales, and for a float8 cache
        clips them to +-448 (infinities become NaN) and writes them.
    k_scale, v_scale: multiply k and v, above all for float8; default 1.
    scale: multiplies the logits; default 1 / sqrt(D).
    window: maximum number of keys that a position sees, including its own.
    softcap: caps logits to softcap * tanh(logits / softcap); at most 100 for the kernel.
    theta, scaling: of RoPE (`rope`, layout "half"), which turns q and the key of `new` by the angle
        of position lengths - 1; None: no RoPE.  Hopper's kernel turns them itself; XLA does before
        other GPUs' kernel, and for a float8 cache.

    Logits, softmax and sums are in float32.  P is rounded to q's dtype before it is multiplied by
    V.  With a float8 cache q k_scale and P are rounded to float16, which holds float8 exactly.
    A position that sees no key gets zeros.  The kernels have no gradient: use `attention`.
    """
    lengths = ids.saturated("lengths", lengths)
    _check(q, k, v, lengths, new, k_scale, v_scale, window)
    if theta is not None and (new is None or q.shape[3] % 2):
        raise ValueError(
            f"theta={theta} needs new=, the key that RoPE turns, and an even D, not {q.shape[3]}"
        )
    if window is not None and window >= k.shape[1]:
        window = None  # the window holds every key
    arrays = q, k, v, lengths, new, k_scale, v_scale
    options = dict(scale=scale, window=window, softcap=softcap, theta=theta, scaling=scaling)
    return dispatch.run("decode_attention", FORMS, implementation, *arrays, **options)


def _decode(
    q, k, v, lengths, new, k_scale, v_scale, *, form, scale, window, softcap, theta, scaling
):
    """The op; form: what attends to the cache."""
    group, dtype, table, cache = q.shape[2] // k.shape[2], q.dtype, None, []
    # Whether it turns q and the new key, and writes the new position.
    alone = form is hopper and k.dtype != FP8
    if theta is not None and alone:
        table = cos_sin(lengths - 1, q.shape[3], theta, scaling)
    elif theta is not None:
        places = (lengths - 1)[:, None]
        q, key = rope_reference(q, new[0], places, theta=theta, scaling=scaling)
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
    """[k, v] with a position of each row, two of (B, K, D), in the last slot of its text."""
    slots = jnp.clip(lengths, 1, k.shape[1]) - 1

    def write(kept, new):
        # For a scatter of one row XLA for GPUs checks the bounds, in two kernels.
        if len(slots) == 1:
            return lax.dynamic_update_slice_in_dim(kept, new[:, None], slots[0], axis=1)
        at = kept.at[jnp.arange(len(slots)), slots]
        return at.set(new, unique_indices=True, out_sharding=mosaic.place((kept, slice(None))))

    return [write(k, new[0]), write(v, new[1])]


def _in_jnp(q, k, v, lengths, _new, _table, scale, window, softcap):
    """The formulas in jnp, rounded where the kernel rounds."""
    t, s = q.shape[1], k.shape[1]
    lengths = jnp.minimum(lengths, s)
    places, slots = (lengths[:, None] - t + jnp.arange(t))[:, :, None], jnp.arange(s)
    mask = slots <= places
    if window is not None:
        mask &= places - slots < window
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    return masked_reference(q, k, v, mask[:, None, None], scale, softcap)[:1]


# ---- a block, and the merge of a row's blocks ---------------------------------------------------


class DecodeBlock(NamedTuple):
    """What a block works on: tiles [low, high) of the cache of a row and a kv head."""

    p: DecodePlan
    refs: Any  # references to global memory, by name
    smem: Any  # shared memory and barriers, by name
    batch: Any
    split: Any
    head: Any
    length: Any  # keys of its row in the cache
    low: Any
    high: Any


def weights_of(b: DecodeBlock, x, tile, m, l):
    """`online_softmax` of a tile x = q k^T, with -inf where a row does not see a key."""
    p, (x, factor) = b.p, masks.capped(x, b.p.scale, b.p.softcap)
    last = b.length - 1 + p.appends  # the last position; the first one is T - 1 before
    crosses = tile * KEYS + KEYS - 1 > last - (p.t - 1) - p.appends
    if p.window is not None:
        crosses |= tile * KEYS <= last - p.window

    def mask(x):
        iota = lambda layout, n: plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)
        place = b.length + p.appends - p.t + lax.div(iota(ROW, ROWS), jnp.int32(p.group))
        place = along(place, x.shape, 0)
        key = along(tile * KEYS + iota(COL, KEYS), x.shape, 1)
        x = jnp.where(key <= place - p.appends, x, -jnp.inf)
        return x if p.window is None else jnp.where(place - key < p.window, x, -jnp.inf)

    return masks.online_softmax(lax.cond(crosses, mask, lambda x: x, x), factor, m, l)


def prepare(p: DecodePlan, name: str, body, batch: int, heads: int, result, scratch, **parameters):
    """body(block, refs to O and lse) as a kernel of [k, v] and the other inputs by name.

    result: rows, columns and dtype of a block's o.  parameters: further CompilerParams.
    """
    (*tile, dtype), parts = result, (batch, p.splits, heads)

    def run(cache, inputs, o_ref, lse_ref, **smem):
        refs = SimpleNamespace(**dict(zip("kv", cache, strict=True)) | inputs)
        batch, split, head = (lax.axis_index(name) for name in ("batch", "split", "head"))
        length = jnp.minimum(refs.lengths[batch], p.keys)
        first = jnp.int32(0)
        if p.window is not None:
            first = lax.div(jnp.maximum(length - p.t - p.window + 1, 0), jnp.int32(KEYS))
        length = length - p.appends
        count = lax.div(length + KEYS - 1, jnp.int32(KEYS)) - first
        end = lambda n: first + lax.div(n * count, jnp.int32(p.splits))
        where = batch, split, head, length, end(split), end(split + 1)
        body(DecodeBlock(p, refs, SimpleNamespace(**smem), *where), o_ref, lse_ref)

    lse = jax.ShapeDtypeStruct((*parts, ROWS), jnp.float32) if p.splits > 1 else None
    return mosaic.kernel(
        run,
        name=name,
        out_type=(jax.ShapeDtypeStruct((*parts, *tile), dtype), lse),
        scratch_types=scratch,
        **mosaic.grid(batch=batch, split=p.splits, head=heads),
        # A row is in one warp, so its maximum and sum need no shared memory.
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, **parameters),
    )


def whole(p: DecodePlan, like, o, lse):
    """The result (B, T, H, D) from the splits (B, splits, K, rows, D or more)."""
    b, t, h, d = like.shape
    o = o[:, :, :, : p.rows, :d]
    y = o[:, 0] if p.splits == 1 else merge(o, lse[:, :, :, : p.rows])
    return y.reshape(b, h // p.group, t, p.group, d).swapaxes(1, 2).reshape(b, t, h, d)


def merge(o, lse):
    """The softmax over all keys from the splits' (axis 1), in one kernel of XLA."""
    # As a number of each row, XLA would take the maximum in a separate kernel; so it must be one
    # of each element, which o * 0 makes of it (XLA does not drop it: o might be infinite).
    lse = lse[..., None] + o * 0
    o, lse = (list(jnp.unstack(x, axis=1)) for x in (o, lse))
    # Sums in order, which jnp.sum does not promise.  The largest is finite for a row without keys.
    largest = functools.reduce(jnp.maximum, lse, jnp.float32(masks.LOWEST))
    weights = [jnp.exp(x - largest) for x in lse]
    total = functools.reduce(jnp.add, weights)
    y = functools.reduce(jnp.add, [w * x for w, x in zip(weights, o, strict=True)])
    return y / jnp.where(total > 0, total, 1)


# ---- the kernels ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(6, 7, 8))  # traced and lowered once for all layers
def for_every_gpu(q, k, v, lengths, _new, _table, scale, window, softcap):
    """([B, T, H, D] in q's dtype,), of caches (B, S, K, D) in it; D: a multiple of 8."""
    p = decode_plan(q, k, scale, window, softcap)
    (b, t, _, d), kv, width = q.shape, k.shape[2], width_of(q.shape[3])
    x = q.reshape(b, t, kv, p.group, d).swapaxes(2, 3).reshape(b, p.rows, kv, d)
    tile = mosaic.tiled(ROWS, width, dtype=p.dtype)
    dtype = jnp.float32 if p.splits > 1 else p.dtype
    kernel = prepare(
        p, "general_decode_attention", lambda b, *refs: general.decode_body(b, weights_of, *refs),
        b, kv, (ROWS, width, dtype), dict.fromkeys("qkv", tile),
        approx_math=True, unsafe_no_auto_barriers=True,  # ampere.wait is where threads meet
    )  # fmt: skip
    return (whole(p, q, *kernel([k, v], dict(q=x, lengths=lengths))),)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def hopper(q, k, v, lengths, new, table, scale, window, softcap):
    """(result, and with `new` the cache k and v).  table: (cos, sin) of RoPE, or None."""
    p = decode_plan(q, k, scale, window, softcap, new is not None)
    (b, t, _, d), kv = q.shape, k.shape[2]
    x = q.reshape(b, t, kv, p.group, d).swapaxes(1, 2).reshape(b, kv, p.rows, d)
    if p.rows > 8:  # TMA moves groups of 8 rows
        x = mosaic.pad_axis(x, 2, 8)
    tile = lambda n, rows, dtype: mosaic.tiled(n, rows, d, dtype=dtype)
    ring, bars = tile(p.stages, KEYS, k.dtype), plgpu.Barrier(num_barriers=p.stages)
    # float8's result still needs v_scale.
    dtype = jnp.float32 if p.splits > 1 or p.fp8 else p.dtype
    wide = tile(2, KEYS, p.dtype) if p.fp8 else None
    scratch = dict(
        q=tile(1, ROWS, p.dtype), k=ring, v=ring, wide=wide, o=tile(1, ROWS, dtype),
        q_bar=plgpu.Barrier(), k_bars=bars, v_bars=bars,
    )  # fmt: skip
    kernel = prepare(p, "decode_attention", _body, b, kv, (x.shape[2], d, dtype), scratch)
    inputs, cache = dict(q=x, lengths=lengths, new=new, table=table), []
    if new is None:
        results = kernel([k, v], inputs)
    else:
        cache, results = mosaic.in_place(kernel, [k, v], inputs, results=True)
    return whole(p, q, *results), *cache


def _body(b: DecodeBlock, o_ref, lse_ref):
    p, q_smem, o_smem = b.p, b.smem.q, b.smem.o
    # The first row is a variable because JAX 0.12 rejects slices that are statically too wide.
    zero = lax.rem(b.low, jnp.int32(1))
    rows = pl.ds(zero * 8, ROWS)
    plgpu.copy_gmem_to_smem(b.refs.q.at[b.batch, b.head, rows], q_smem.at[0], b.smem.q_bar)
    for i in range(p.stages):
        for name in "kv":
            _send(b, name, b.low + i)
    plgpu.barrier_wait(b.smem.q_bar)
    if b.refs.table is not None:
        q = plgpu.load(q_smem.at[0], layout=WGMMA)
        q_smem[0] = _rotated(b, q.astype(jnp.float32)).astype(p.dtype)
        plgpu.commit_smem()
    o, m, l = pl.run_scoped(functools.partial(_attend, b), plgpu.ACC((ROWS, p.width), jnp.float32))
    o, lse = masks.finish(o, m, l, blind=True)
    mosaic.store_tile(o, o_smem.at[0], o_ref.at[b.batch, b.split, b.head, rows])
    if lse_ref is not None:
        mosaic.store(lse_ref.at[b.batch, b.split, b.head], lse)
    if p.appends:

        @pl.when(b.split == p.splits - 1)
        def _():  # no block reads its slot, and this one has read its tile
            for i, ref in enumerate((b.refs.k, b.refs.v)):
                mosaic.store(ref.at[b.batch, jnp.maximum(b.length, 0), b.head], _new(b, i))

    plgpu.wait_smem_to_gmem(0)


def _rotated(b: DecodeBlock, x):
    """RoPE of x (rows, D) or (D,).  A thread has both numbers of a pair: D/2 is 8 or more."""
    half = x.shape[-1] // 2
    cos, sin = (mosaic.load(ref.at[b.batch], COL) for ref in b.refs.table)
    x, y = x[..., :half], x[..., half:]
    if x.ndim == 2:
        cos, sin = (along(t, x.shape, 1) for t in (cos, sin))
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1)


def _new(b: DecodeBlock, i: int):
    """The key (0) or value (1) of the newest position and this head, (D,)."""
    x = mosaic.load(b.refs.new[i].at[b.batch, b.head], COL)
    if b.refs.table is None or i == 1:
        return x
    return _rotated(b, x).astype(b.refs.k.dtype).astype(jnp.float32)  # as it will be read later


def _send(b: DecodeBlock, name: str, tile):
    """Starts the copy of a tile of K or V, if it is the block's; past S it is filled with zeros."""

    @pl.when(tile < b.high)
    def _():
        source = getattr(b.refs, name).at[b.batch, pl.ds(tile * KEYS, KEYS), b.head]
        ring = Ring(b.p.stages, getattr(b.smem, f"{name}_bars"))
        ring.send(tile - b.low, source, getattr(b.smem, name))


def _receive(b: DecodeBlock, name: str, tile):
    """The tile as an operand of wgmma, once it has arrived."""
    ring = Ring(b.p.stages, getattr(b.smem, f"{name}_bars"))
    arrived = getattr(b.smem, name).at[ring.wait(tile - b.low)]
    if not b.p.fp8:
        return arrived
    wide = b.smem.wide.at["kv".index(name)]
    x = plgpu.load(arrived, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    wide[...] = plgpu.layout_cast(x.astype(b.p.dtype), WGMMA)
    _leave(b, name, tile)
    return wide


def _leave(b: DecodeBlock, name: str, tile):
    """All warps have read the buffer of this tile, so it takes a later one."""
    plgpu.commit_smem()
    _send(b, name, tile + b.p.stages)


def _attend(b: DecodeBlock, o_acc):
    """-> O before its division, the largest logit and the sum of each row."""
    m, l = masks.no_keys(ROWS)
    if b.p.appends:
        last = (b.split == b.p.splits - 1) & (b.length >= 0)  # a row of length 0 sees nothing
        m, l = lax.cond(last, lambda: (_start(b, o_acc), l + 1), lambda: (m, l))
    m, l = lax.fori_loop(b.low, b.high, functools.partial(_step, b, o_acc), (m, l))
    return o_acc[...], m, l


def _start(b: DecodeBlock, o_acc):
    """The softmax over the newest position alone: O; returns the logit of each row."""
    q = plgpu.load(b.smem.q.at[0], layout=WGMMA).astype(jnp.float32)
    x = jnp.sum(q * along(_new(b, 0), q.shape, 1), axis=1)
    x, factor = masks.capped(x, b.p.scale, b.p.softcap)
    o_acc[...] = along(_new(b, 1), q.shape, 1)
    return x * factor


def _step(b: DecodeBlock, o_acc, tile, carry):
    """Adds one tile of keys."""
    p, (m, l) = b.p, carry
    k = _receive(b, "k", tile)

    def scores(acc):
        plgpu.wgmma(acc, b.smem.q.at[0], k.transpose((1, 0)))
        return acc[...]

    x = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
    if not p.fp8:
        _leave(b, "k", tile)
    e, m, l, alpha = weights_of(b, x, tile, m, l)
    o_acc[...] = o_acc[...] * along(alpha, o_acc.shape, 0)
    plgpu.wgmma(o_acc, e.astype(p.dtype), _receive(b, "v", tile))
    plgpu.wgmma_wait(0)
    if not p.fp8:
        _leave(b, "v", tile)
    return m, l


FORMS = (
    Form("hopper", functools.partial(_decode, form=hopper), "sm_90a", why_not),
    Form(
        "general", functools.partial(_decode, form=for_every_gpu), "sm_80",
        functools.partial(why_not, general=True),
    ),
    Form("xla", functools.partial(_decode, form=_in_jnp)),
)  # fmt: skip
