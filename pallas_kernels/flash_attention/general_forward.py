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
from pallas_kernels.flash_attention.forward import LOWEST
from pallas_kernels.flash_attention.general import schedule, width_of
from pallas_kernels.flash_attention.masks import logits, same_segment, some_rows_see_nothing
from pallas_kernels.flash_attention.queries import Item, in_sight, is_ragged, item_of
from pallas_kernels.flash_attention.schedule import (
    Call,
    Heads,
    Schedule,
    launch,
    pad_segments,
    stat_rows,
    with_spans,
)
from pallas_kernels.mosaic import COL, LOG2E, ROW, WGMMA, along


def tiles(head_dim: int) -> tuple[int, int]:
    """(queries of a block, keys of a step) that registers and 99 KB of shared memory hold."""
    if head_dim <= 128:
        return 128, 64
    return 64, 64


class Inputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    segments: Any  # Segments, or None


class Worker(NamedTuple):
    """A block."""

    schedule: Schedule
    inputs: Inputs
    o_ref: Any
    lse_ref: Any
    smem: Any  # what `scratch` lists, by name


def scratch(s: Schedule) -> dict:
    """Shared memory of a block."""
    return dict(
        qo=ampere.tile(s.block, s.width, s.dtype),  # Q, and then O
        k=ampere.tile(s.columns, s.width, s.dtype),
        v=ampere.tile(s.columns, s.width, s.dtype),
    )


def load(w: Worker, i: Item, n, ref, first_head, tile):
    """Starts to copy the tile of step n of K or V."""
    s = w.schedule
    head, first = first_head + i.head // s.group, (i.top - 1 - n) * s.columns
    ampere.load_rows(ref, tile, i.batch, head, first, s.visits.lengths[1])


def mask(w: Worker, i: Item, x, n):
    """x with -inf where a query may not see a key."""
    s = w.schedule
    if s.packed:
        stat, segments = functools.partial(plgpu.load, optimized=False), w.inputs.segments
        rows, keys = pl.ds(i.q0, s.block), pl.ds((i.top - 1 - n) * s.columns, s.columns)
        q_ids = stat(segments.q_ids.at[i.batch, rows], layout=ROW)
        k_ids = stat(segments.k_ids.at[i.batch, keys], layout=COL)
        x = same_segment(x, q_ids, k_ids)
    return in_sight(s, i, x, n)


def step(w: Worker, i: Item, n, carry):
    """Adds the keys of step n to O, to the largest logit and to the sum of each row."""
    s, smem = w.schedule, w.smem
    o, m, l = carry
    # Compute the scores.
    ampere.wait()  # for K
    load(w, i, n, w.inputs.v, s.v_first, smem.v)
    x = mosaic.zeros((s.block, s.columns), WGMMA)
    x = plgpu.mma(x, ampere.left(smem.qo), ampere.right_transposed(smem.k))
    ampere.wait()  # for V
    pl.when(n + 1 < i.last)(lambda: load(w, i, n + 1, w.inputs.k, s.k_first, smem.k))
    if s.softcap is not None:
        x = logits(x, s.scale, s.softcap)[0]
    if s.visits.causal or is_ragged(s) or s.packed:
        masked = (n < i.unmasked) | (n >= i.edge)
        x = lax.cond(masked, lambda x: mask(w, i, x, n), lambda x: x, x)
    # Compute the softmax in base 2: one multiply-add and one exp2 an element.
    factor = s.scale * LOG2E if s.softcap is None else 1.0
    m_new = jnp.maximum(m, jnp.max(x, axis=1) * factor)
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(x * factor - along(m_new, x.shape, 0))
    l = l * alpha + jnp.sum(p, axis=1)
    # Add the values.
    o = o * along(alpha, o.shape, 0)
    o = plgpu.mma(o, ampere.as_left(p, s.dtype), ampere.right(smem.v))
    return o, m_new, l


def store(w: Worker, i: Item, o, m, l):
    """Divides O by the sums, and stores it and the log-sum-exp."""
    s, smem = w.schedule, w.smem
    inverse = 1 / l
    if some_rows_see_nothing(s.visits.window, s.packed, s.block):  # zeros; lse = m + log 0 = -inf
        inverse = jnp.where(l > 0, inverse, 0)
    ampere.meet()  # all have multiplied with Q, whose place O takes
    smem.qo[...] = (o * along(inverse, o.shape, 0)).astype(s.dtype)
    ampere.meet()
    ampere.store_rows(smem.qo, w.o_ref, i.batch, i.head, i.q0, s.visits.lengths[0])
    rows = pl.ds(i.q0, s.block)
    mosaic.store(w.lse_ref.at[i.batch, i.head, rows], m * (1 / LOG2E) + jnp.log(l))


def body(s: Schedule, inputs: Inputs, o_ref, lse_ref, smem):
    w = Worker(s, inputs, o_ref, lse_ref, smem)
    i = item_of(s, inputs.segments, 0, lax.axis_index("block"), None, 0, 0, rows=s.block)
    ampere.load_rows(inputs.q, smem.qo, i.batch, i.head, i.q0, s.visits.lengths[0])
    load(w, i, 0, inputs.k, s.k_first, smem.k)
    row = lambda value: plgpu.layout_cast(jnp.full((s.block,), value, jnp.float32), ROW)
    nothing = mosaic.zeros((s.block, s.width), WGMMA), row(LOWEST), row(0)
    store(w, i, *lax.fori_loop(0, i.last, functools.partial(step, w, i), nothing))


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def forward(q, k, v, segments=None, *, call: Call, heads: Heads | None = None):
    """(out (B, T, H, D), lse (B, H, stat_rows(T)) fp32, natural log).  D: a multiple of 8.

    segments: ids of the queries (B, T or more) and of the keys (B, S or more), or None.
    heads: q, k and v are the same array, which holds all three.
    """
    (b, t, _, d), packed = q.shape, segments is not None
    h = q.shape[2] if heads is None else heads.q
    s = schedule(q, k, *tiles(width_of(d)), call, heads, packed=packed)
    ids = pad_segments(segments, call.lengths) if packed else None
    inputs = Inputs(q, k, v, with_spans(s, ids))
    out_type = (
        jax.ShapeDtypeStruct((b, t, h, d), q.dtype),
        jax.ShapeDtypeStruct((b, h, stat_rows(t)), jnp.float32),
    )
    # Sums of rows need no scratch.
    return launch(
        s, "general_attention_forward", body, inputs, out_type, scratch(s),
        reduction_scratch_bytes=0,
    )  # fmt: skip
