"""Attention backward for every NVIDIA GPU since Ampere, first kernel: dQ and delta.

The formulas are in op.py.  A block owns queries of one head and streams the keys that they
see, from the diagonal downwards:

    wait for V_n    K_n on its way      dP = dO V_n^T
    wait for K_n    V_n+1 on its way    S = Q K_n^T, P, dS, dQ += dS K_n
    meet            K_n+1 on its way

P and dS stay in registers.  O comes through Q's buffer before Q: of O only delta is needed.
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
from pallas_kernels.flash_attention.masks import logits
from pallas_kernels.flash_attention.schedule import Call, Heads, Schedule, launch, with_spans
from pallas_kernels.mosaic import LOG2E, ROW, WGMMA, along


def tiles(width: int, tight: bool) -> tuple[int, int]:
    """(queries of a block, keys of a step), see general.py."""
    if width <= 64:
        return 128, 32 if tight else 64
    return (128, 32) if width <= 128 and not tight else (64, 32)


class GeneralDqInputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    do: Any
    dlse: Any  # None for zeros
    segments: Any  # Segments, or None


def scratch(s: Schedule) -> dict:
    """Shared memory of a block."""
    return dict(
        q=ampere.tile(s.block, s.width, s.dtype),  # O, then Q, then dQ
        do=ampere.tile(s.block, s.width, s.dtype),
        k=ampere.tile(s.columns, s.width, s.dtype),
        v=ampere.tile(s.columns, s.width, s.dtype),
        lse2=plgpu.SMEM((s.block,), jnp.float32),  # log-sum-exp of the rows, in base 2
        delta=plgpu.SMEM((s.block,), jnp.float32),
    )


def load_own(w: Worker, ref, buffer):
    """Starts to copy the block's rows of Q, O or dO."""
    b, (t, _) = w.block, w.schedule.visits.lengths
    ampere.load_rows(ref, buffer, b.batch, b.head, b.row, t)


def begin(w: Worker, delta_ref):
    """Loads what comes first; computes delta = rowsum(dO * O) - dlse, and stores it."""
    s, inputs, smem, b = w.schedule, w.inputs, w.smem, w.block
    load_own(w, inputs.o, smem.q)
    load_own(w, inputs.do, smem.do)
    stat = lambda ref: plgpu.load(ref.at[b.batch, b.head, b.rows(s)], layout=ROW, optimized=False)
    mosaic.store(smem.lse2, stat(inputs.lse) * LOG2E)
    ampere.wait()
    o, do = (plgpu.load(x, layout=WGMMA).astype(jnp.float32) for x in (smem.q, smem.do))
    delta = jnp.sum(do * o, axis=1)
    if inputs.dlse is not None:
        delta = delta - stat(inputs.dlse)
    mosaic.store(delta_ref.at[b.batch, b.head, b.rows(s)], delta)
    mosaic.store(smem.delta, delta)
    ampere.meet()  # all have read O
    load_own(w, inputs.q, smem.q)
    load_v(w, b.high - 1)
    load_k(w, b.high - 1)


def step(w: Worker, n, dq):
    """Adds dS K of the n-th tile of keys to dQ."""
    s, b, smem = w.schedule, w.block, w.smem
    tile = b.high - 1 - n
    ampere.wait(1)  # for V
    dp = ampere.rows_times_rows(smem.do, smem.v)
    ampere.wait()  # for K
    pl.when(tile > b.low)(lambda: load_v(w, tile - 1))
    x, slope = logits(ampere.rows_times_rows(smem.q, smem.k), s.scale, s.softcap)
    x = general.mask(s, b, w.inputs.segments, tile, x)
    stat = lambda ref: along(plgpu.load(ref, layout=ROW, optimized=False), x.shape, 0)
    p = jnp.exp2(x - stat(smem.lse2))
    ds = p * (dp - stat(smem.delta))
    dq = ampere.times_rows(dq, ds if slope is None else ds * slope, smem.k)
    ampere.meet()  # all have read K
    pl.when(tile > b.low)(lambda: load_k(w, tile - 1))
    return dq


def body(s: Schedule, inputs: GeneralDqInputs, dq_ref, delta_ref, smem):
    b = general.block_of(s, inputs.segments)
    w = Worker(s, inputs, smem, b)
    begin(w, delta_ref)
    nothing = mosaic.zeros((s.block, s.width), WGMMA)
    dq = lax.fori_loop(0, b.high - b.low, functools.partial(step, w), nothing)
    smem.q[...] = (dq * s.scale).astype(s.dtype)
    ampere.meet()
    ampere.store_rows(smem.q, dq_ref, b.batch, b.head, b.row, s.visits.lengths[0])


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def backward_dq(q, k, v, out, lse, dout, dlse, segments, *, call: Call, heads: Heads | None = None):
    """(dq like q, lse, delta); with `heads` the others of dq are undefined.

    The last two are (B, H, stat_rows(T)) fp32, what the dK/dV kernel wants.
    """
    packed = segments is not None
    tile = tiles(general.width_of(q.shape[-1]), general.tight(call, packed))
    s = general.schedule(q, k, *tile, call, heads, packed=packed)
    inputs = GeneralDqInputs(q, k, v, out, lse, dout, dlse, with_spans(s, segments))
    out_type = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(lse.shape, jnp.float32),
    )
    # Sums of rows need no scratch, and a head dimension of 256 leaves none.
    dq, delta = launch(
        s, "general_attention_backward_dq", body, inputs, out_type, scratch(s),
        reduction_scratch_bytes=0,
    )  # fmt: skip
    return dq, lse, delta
