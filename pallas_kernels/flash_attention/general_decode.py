"""decode_attention for every NVIDIA GPU since Ampere: the split of decode.py, on mma and cp.async.

    block (batch, split, kv head), one warpgroup; K and V have one buffer each:

    wait for K_n      V_n on its way      S = Q K_n^T
    wait for V_n      K_n+1 on its way    P = exp2(c S - m), the sums, O = alpha O + P V_n

as in general_forward.py.  A block has 48 KB of shared memory for D = 128, so two are on a processor
and 32 KB of the cache on their way to it.  XLA writes a new position before the kernel starts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.flash_attention.decode_plan import (
    KEYS,
    Plan,
    Share,
    merge,
    plan,
    share_of,
    weights_of,
)
from pallas_kernels.flash_attention.masks import LOWEST
from pallas_kernels.flash_attention.schedule import width_of
from pallas_kernels.mosaic import LOG2E, ROW, ROWS, WGMMA, along


class _GeneralBlock(NamedTuple):
    """What a block works on, and its references."""

    p: Plan
    share: Share
    k: Any
    v: Any
    k_smem: Any
    v_smem: Any


@functools.partial(jax.jit, static_argnums=(4, 5, 6))  # traced and lowered once for all layers
def attend(q, k, v, lengths, scale, window, softcap):
    """(B, T, H, D) in q's dtype, of caches (B, S, K, D) in it; D: a multiple of 8."""
    p = plan(q, k, scale, window, softcap)
    (b, t, h, d), kv = q.shape, k.shape[2]
    rows = t * p.group
    q = q.reshape(b, t, kv, p.group, d).swapaxes(2, 3).reshape(b, rows, kv, d)
    parts = (b, p.splits, kv)
    dtype = jnp.float32 if p.splits > 1 else p.dtype
    tile = lambda n: ampere.tile(n, width_of(d), p.dtype)
    o, lse = mosaic.kernel(
        functools.partial(_body, p, rows),
        name="general_decode_attention",
        out_type=(
            jax.ShapeDtypeStruct((*parts, ROWS, width_of(d)), dtype),
            jax.ShapeDtypeStruct((*parts, ROWS), jnp.float32),
        ),
        scratch_types=dict(q_smem=tile(ROWS), k_smem=tile(KEYS), v_smem=tile(KEYS)),
        **mosaic.grid(batch=b, split=p.splits, head=kv),
        # A row is in one warp, and ampere.wait is where threads meet.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )(q, k, v, lengths)
    o = o[:, :, :, :rows, :d]
    y = o[:, 0] if p.splits == 1 else merge(o, lse[:, :, :, :rows])
    y = y.reshape(b, kv, t, p.group, d).swapaxes(1, 2)
    return y.reshape(b, t, h, d)


def _body(p: Plan, rows, q_ref, k_ref, v_ref, lengths_ref, o_ref, lse_ref, *, q_smem, **smem):
    share = share_of(p, lengths_ref)
    b = _GeneralBlock(p, share, k_ref, v_ref, **smem)
    ampere.load_rows(q_ref, q_smem, share.batch, share.head, 0, rows)
    pl.when(share.low < share.high)(lambda: _load(b, k_ref, b.k_smem, share.low))
    row = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)
    nothing = mosaic.zeros((ROWS, q_smem.shape[1]), WGMMA), row(LOWEST), row(0)
    o, m, l = lax.fori_loop(share.low, share.high, functools.partial(_step, b, q_smem), nothing)
    ampere.wait()  # for Q, which nobody has waited for if there are no keys
    o = o * along(jnp.where(l > 0, 1 / l, 0), o.shape, 0)
    at = share.batch, share.split, share.head
    mosaic.store(o_ref.at[at], o)
    mosaic.store(lse_ref.at[at], m * (1 / LOG2E) + jnp.log(l))


def _load(b: _GeneralBlock, ref, buffer, tile):
    """Starts to copy a tile; past S it is filled with zeros."""
    ampere.load_rows(ref, buffer, b.share.batch, b.share.head, tile * KEYS, b.p.keys)


def _step(b: _GeneralBlock, q_smem, tile, carry):
    """Adds a tile of keys to O, to the largest logit and to the sum of each row."""
    p, (o, m, l) = b.p, carry
    ampere.wait()  # for K
    _load(b, b.v, b.v_smem, tile)
    x = ampere.rows_times_rows(q_smem, b.k_smem)
    ampere.wait()  # for V
    pl.when(tile + 1 < b.share.high)(lambda: _load(b, b.k, b.k_smem, tile + 1))
    e, m_new, alpha = weights_of(p, b.share, x, tile, m)
    o = ampere.times_rows(o * along(alpha, o.shape, 0), e, b.v_smem)
    return o, m_new, l * alpha + jnp.sum(e, axis=1)
