"""The kernels of decode_attention, how they split the keys of a row, and how the parts are merged.

    block (batch, split, kv head), one warpgroup, on Hopper:

    q     (T H/K rows of 64, D)                  -- q_bar --->  S = Q K^T
    K     [i] [i + 1] ... tiles of 64 keys       -- k_bars -->  P = exp2(c S - m), m, l, rescale O
    V     [i] [i + 1] ...                        -- v_bars -->  O += P V
    wide  one tile of K and of V as float16, only for a float8 cache
    o     (64, D), on its way to memory: the row's result, or a float32 part with log-sum-exp

A block takes its share of the tiles that its row sees: those up to its length, inside its window.
TMA copies the next tiles as soon as the warpgroup has left a buffer.  Other GPUs since Ampere run
`_general_body`, with one buffer of K and one of V.  For D = 128 its blocks have 48 KB of
shared memory, so an SM holds two of them, with 32 KB of the cache in flight.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.flash_attention import masks
from pallas_kernels.flash_attention.general import add_tile
from pallas_kernels.flash_attention.schedule import width_of
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA, along
from pallas_kernels.pipeline import Ring

FP8 = jnp.float8_e4m3fn
KEYS = 64  # per tile: 16 KB for D = 128 in bfloat16
_STAGES = 4  # tiles of K and of V in flight, at most
_SMEM = 112 * 1024  # per block, so that an SM (228 KB) holds two
_START = 2  # starting a block and merging its part take as long as this many tiles
_WHOLE = 4  # up to this many tiles take no longer than the second kernel, which merges (estimated)
_LEAST_SPLITS = 8  # for several rows, whose lengths may differ, if each split has as many tiles
_MOST_SPLITS = 33  # gives each of 132 SMs two blocks, for one row with 8 kv heads


# ---- a block, and the merge of a row's blocks ---------------------------------------------------


class DecodePlan(NamedTuple):
    """What is static in a call of the kernel; see the picture."""

    t: int
    keys: int  # S
    group: int  # query heads of a kv head
    width: int  # D
    dtype: Any  # of the matmuls
    fp8: bool
    scale: float
    window: int | None
    softcap: float | None
    stages: int
    splits: int
    appends: bool  # the newest position is not in the cache yet

    @property
    def rows(self) -> int:
        """Queries of a kv head, at most 64."""
        return self.t * self.group


def splits_of(tiles: int, pairs: int, blocks: int, least: int) -> int:
    """The number of blocks for a pair (row, kv head) that should be fastest.

    blocks: how many run at once (one wave).
    """
    if tiles <= _WHOLE:
        return 1
    waves = lambda n: mosaic.cdiv(pairs * n, blocks) * (mosaic.cdiv(tiles, n) + _START)
    return min(range(min(least, tiles), min(_MOST_SPLITS, tiles) + 1), key=waves)


def plan_of(q, k, scale, window, softcap, appends=False) -> DecodePlan:
    (b, t, h, d), (_, s, kv, _) = q.shape, k.shape
    fp8, tile = k.dtype == FP8, KEYS * d * k.dtype.itemsize
    others = ROWS * d * (2 + 4) + (2 * KEYS * d * 2 if fp8 else 0)  # q and o; wide
    per_sm = 2 if (_SMEM - others) // (2 * tile) >= 2 else 1
    stages = min(_STAGES, (2 * _SMEM // per_sm - others) // (2 * tile))
    tiles = mosaic.cdiv(s if window is None else min(s, window + t - 1), KEYS)
    least = max(1, min(_LEAST_SPLITS, tiles // _LEAST_SPLITS)) if b > 1 else 1
    # One block per SM uses all of memory's bandwidth; a second one hides float8's conversion.
    splits = splits_of(tiles, b * kv, (per_sm if fp8 else 1) * mosaic.sm_count(), least)
    group = h // kv
    return DecodePlan(t, s, group, d, q.dtype, fp8, scale, window, softcap, stages, splits, appends)


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
    p, x = b.p, masks.logits(x, b.p.scale, b.p.softcap)[0]
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

    return masks.online_softmax(lax.cond(crosses, mask, lambda x: x, x), m, l)


def prepare(p: DecodePlan, name: str, body, batch: int, heads: int, result, scratch, **parameters):
    """body(block, refs to O and lse) as a kernel of [k, v] and the other inputs by name.

    result: rows, columns and dtype of a block's o.  parameters: further CompilerParams.
    """
    (*tile, dtype), parts = result, (batch, p.splits, heads)

    def run(cache, inputs, o_ref, lse_ref, **smem):
        refs = SimpleNamespace(**dict(zip("kv", cache, strict=True)) | inputs)
        batch, split, head = (lax.axis_index(name) for name in ("batch", "split", "head"))
        length = jnp.minimum(jnp.maximum(refs.lengths[batch], 0), p.keys)
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
    """The softmax over all keys from the splits' softmaxes (axis 1), in one kernel of XLA."""
    # XLA would compute one maximum per row in a separate kernel.  Adding o * 0 gives each element
    # its lse and so its maximum (XLA does not drop o * 0, because o might be infinite).
    lse = lse[..., None] + o * 0
    o, lse = (list(jnp.unstack(x, axis=1)) for x in (o, lse))
    # Sums in order, which jnp.sum does not promise.  `largest` is finite even without keys.
    largest = functools.reduce(jnp.maximum, lse, jnp.float32(masks.LOWEST))
    weights = [jnp.exp(x - largest) for x in lse]
    total = functools.reduce(jnp.add, weights)
    y = functools.reduce(jnp.add, [w * x for w, x in zip(weights, o, strict=True)])
    return y / jnp.where(total > 0, total, 1)


# ---- the kernels ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(6, 7, 8))  # traced and lowered once for all layers
def for_every_gpu(q, k, v, lengths, _new, _table, scale, window, softcap):
    """([B, T, H, D],), from caches (B, S, K, D), all in q's dtype; D: a multiple of 8."""
    p = plan_of(q, k, scale, window, softcap)
    (b, t, _, d), kv, width = q.shape, k.shape[2], width_of(q.shape[3])
    x = q.reshape(b, t, kv, p.group, d).swapaxes(2, 3).reshape(b, p.rows, kv, d)
    tile = mosaic.tiled(ROWS, width, dtype=p.dtype)
    dtype = jnp.float32 if p.splits > 1 else p.dtype
    kernel = prepare(
        p, "general_decode_attention", _general_body, b, kv, (ROWS, width, dtype),
        dict.fromkeys("qkv", tile),
        approx_math=True, unsafe_no_auto_barriers=True,  # ampere.wait is where threads meet
    )  # fmt: skip
    return (whole(p, q, *kernel([k, v], dict(q=x, lengths=lengths))),)


def _general_body(b: DecodeBlock, o_ref, lse_ref):
    def load(name, tile):  # past S it is filled with zeros
        source, target = getattr(b.refs, name), getattr(b.smem, name)
        ampere.load_rows(source, target, b.batch, b.head, tile * KEYS, b.p.keys)

    def step(tile, carry):
        load_next_k = lambda: pl.when(tile + 1 < b.high)(lambda: load("k", tile + 1))
        weigh = lambda x, m, l: weights_of(b, x, tile, m, l)
        return add_tile(b.smem, carry, lambda: load("v", tile), load_next_k, weigh)

    ampere.load_rows(b.refs.q, b.smem.q, b.batch, b.head, 0, b.p.rows)
    pl.when(b.low < b.high)(lambda: load("k", b.low))
    nothing = mosaic.zeros(b.smem.q.shape, WGMMA), *masks.no_keys(ROWS)
    o, m, l = lax.fori_loop(b.low, b.high, step, nothing)
    ampere.wait()  # for Q, which nobody has waited for if there are no keys
    for ref, x in zip((o_ref, lse_ref), masks.finish(o, m, l, blind=True), strict=True):
        if ref is not None:
            mosaic.store(ref.at[b.batch, b.split, b.head], x)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def hopper(q, k, v, lengths, new, table, scale, window, softcap):
    """(result, and with `new` the cache k and v).  table: (cos, sin) of RoPE, or None."""
    p = plan_of(q, k, scale, window, softcap, new is not None)
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
    o_smem[0] = o.astype(o_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem.at[0], o_ref.at[b.batch, b.split, b.head, rows])
    if lse_ref is not None:
        mosaic.store(lse_ref.at[b.batch, b.split, b.head], lse)
    if p.appends:

        @pl.when(b.split == p.splits - 1)
        def _():  # no block reads the new slot, and this block has read the slot's tile
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
    return _rotated(b, x).astype(b.refs.k.dtype).astype(jnp.float32)  # rounded as in the cache


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
    """Starts to refill this tile's buffer, which all warps have read, with a later tile."""
    plgpu.commit_smem()
    _send(b, name, tile + b.p.stages)


def _attend(b: DecodeBlock, o_acc):
    """-> O before its division, the largest logit and the sum of each row."""
    m, l = masks.no_keys(ROWS)
    if b.p.appends:
        last = (b.split == b.p.splits - 1) & (b.length >= 0)  # a row of length 0 sees nothing
        m, l = lax.cond(last, lambda: _start(b, o_acc, m), lambda: (m, l))
    m, l = lax.fori_loop(b.low, b.high, functools.partial(_step, b, o_acc), (m, l))
    return o_acc[...], m, l


def _start(b: DecodeBlock, o_acc, m):
    """Begins O with the newest position alone; returns the logit and the sum of each row."""
    q = plgpu.load(b.smem.q.at[0], layout=WGMMA).astype(jnp.float32)
    x = jnp.sum(q * along(_new(b, 0), q.shape, 1), axis=1)
    # Rounded, as in `online_softmax`, so that l is 1.
    x = lax.optimization_barrier(masks.logits(x, b.p.scale, b.p.softcap)[0])
    m = jnp.maximum(m, x)
    l = jnp.exp2(x - m)  # 1, but 0 for a logit of -inf, and NaN for inf and NaN
    o_acc[...] = along(l, q.shape, 0) * along(_new(b, 1), q.shape, 1)
    return m, l


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
