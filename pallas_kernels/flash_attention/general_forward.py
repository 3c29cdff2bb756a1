"""Attention forward for every NVIDIA GPU since Ampere: FlashAttention-2 (Dao 2023) on mma.

A block owns queries of one head and streams the keys that they see, from the diagonal downwards.
K and V have one buffer each, which cp.async fills under the other one's matmul:

    wait for K_n      V_n on its way      S = Q K_n^T
    wait for V_n      K_n+1 on its way    P = exp2(c S - m), the sums, O = alpha O + P V_n

`wait` is also where the block's threads meet, so nobody reads any longer what is filled next.  P
stays in registers: as a result of mma it lies where the next mma wants its left operand.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.flash_attention import general
from pallas_kernels.flash_attention.general import Worker, load_k, load_v
from pallas_kernels.flash_attention.masks import (
    LOWEST,
    logits,
    online_softmax,
    some_rows_see_nothing,
)
from pallas_kernels.flash_attention.schedule import (
    Call,
    Heads,
    Schedule,
    launch,
    pad_segments,
    stat_rows,
    with_spans,
)
from pallas_kernels.mosaic import LOG2E, ROW, WGMMA, along


def tiles(width: int, tight: bool) -> tuple[int, int]:
    """(queries of a block, keys of a step), see general.py; up to 128 two blocks fit 99 KB."""
    if width <= 64:
        return 128, 64
    if width <= 128:
        return (64, 64) if tight else (128, 64)
    return 64, 32


class GeneralForwardInputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    segments: Any  # Segments, or None


def scratch(s: Schedule) -> dict:
    """Shared memory of a block."""
    return dict(
        qo=ampere.tile(s.block, s.width, s.dtype),  # Q, and then O
        k=ampere.tile(s.columns, s.width, s.dtype),
        v=ampere.tile(s.columns, s.width, s.dtype),
    )


def step(w: Worker, n, carry):
    """Adds the n-th tile of keys to O, to the largest logit and to the sum of each row."""
    s, b, smem = w.schedule, w.block, w.smem
    (o, m, l), tile = carry, b.high - 1 - n
    # Compute the scores.
    ampere.wait()  # for K
    load_v(w, tile)
    x = ampere.rows_times_rows(smem.qo, smem.k)
    ampere.wait()  # for V
    pl.when(tile > b.low)(lambda: load_k(w, tile - 1))
    if s.softcap is not None:
        x = logits(x, s.scale, s.softcap)[0]
    x = general.mask(s, b, w.inputs.segments, tile, x)
    factor = s.scale * LOG2E if s.softcap is None else 1.0
    p, m_new, alpha = online_softmax(x, factor, m)
    l = l * alpha + jnp.sum(p, axis=1)
    # Add the values.
    o = ampere.times_rows(o * along(alpha, o.shape, 0), p, smem.v)
    return o, m_new, l


def store(w: Worker, o_ref, lse_ref, o, m, l):
    """Divides O by the sums, and stores it and the log-sum-exp."""
    s, b, smem = w.schedule, w.block, w.smem
    inverse = 1 / l
    if some_rows_see_nothing(s.visits.window, s.packed, s.block):  # zeros; lse = m + log 0 = -inf
        inverse = jnp.where(l > 0, inverse, 0)
    ampere.meet()  # all have multiplied with Q, whose place O takes
    smem.qo[...] = (o * along(inverse, o.shape, 0)).astype(s.dtype)
    ampere.meet()
    ampere.store_rows(smem.qo, o_ref, b.batch, b.head, b.row, s.visits.lengths[0])
    mosaic.store(lse_ref.at[b.batch, b.head, b.rows(s)], m * (1 / LOG2E) + jnp.log(l))


def body(s: Schedule, inputs: GeneralForwardInputs, o_ref, lse_ref, smem):
    b = general.block_of(s, inputs.segments)
    w = Worker(s, inputs, smem, b)
    ampere.load_rows(inputs.q, smem.qo, b.batch, b.head, b.row, s.visits.lengths[0])
    load_k(w, b.high - 1)
    row = lambda value: plgpu.layout_cast(jnp.full((s.block,), value, jnp.float32), ROW)
    nothing = mosaic.zeros((s.block, s.width), WGMMA), row(LOWEST), row(0)
    results = lax.fori_loop(0, b.high - b.low, functools.partial(step, w), nothing)
    store(w, o_ref, lse_ref, *results)


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def forward(q, k, v, segments=None, *, call: Call, heads: Heads | None = None):
    """(out (B, T, H, D), lse (B, H, stat_rows(T)) fp32, natural log).  D: a multiple of 8.

    segments: ids of the queries (B, T or more) and of the keys (B, S or more), or None.
    heads: q, k and v are the same array, which holds all three.
    """
    (b, t, _, d), packed = q.shape, segments is not None
    h = q.shape[2] if heads is None else heads.q
    tile = tiles(general.width_of(d), call.tight)
    s = general.schedule(q, k, *tile, call, heads, packed=packed)
    ids = pad_segments(segments, call.lengths) if packed else None
    inputs = GeneralForwardInputs(q, k, v, with_spans(s, ids))
    out_type = (
        jax.ShapeDtypeStruct((b, t, h, d), q.dtype),
        jax.ShapeDtypeStruct((b, h, stat_rows(t)), jnp.float32),
    )
    # Sums of rows need no scratch.
    return launch(
        s, "general_attention_forward", body, inputs, out_type, scratch(s),
        reduction_scratch_bytes=0,
    )  # fmt: skip
