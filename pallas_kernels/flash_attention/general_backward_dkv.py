"""Attention backward for every NVIDIA GPU since Ampere, second kernel: dK and dV.

The formulas are in op.py.  A block owns keys of one kv head and streams the tiles of queries
that see them, head after head of the group, so that the sums stay inside the block.  S and dP are
computed transposed: P^T and dS^T then lie in registers where mma wants its left operand.

    wait for dO_n    Q_n on its way       dP^T = V dO_n^T
    wait for Q_n                          S^T = K Q_n^T, P^T, dV += P^T dO_n
    meet             dO_n+1 on its way    dS^T, dK += dS^T Q_n
    meet             Q_n+1 on its way

At a head dimension of 256 registers hold only one of dK and dV.  The kernel then runs twice and
computes S^T each time: five matmuls instead of four.
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
from pallas_kernels.flash_attention.general import Block, Worker
from pallas_kernels.flash_attention.masks import logits
from pallas_kernels.flash_attention.schedule import Call, Heads, Schedule, launch, with_spans
from pallas_kernels.mosaic import COL, LOG2E, WGMMA, along


def tiles(width: int, tight: bool) -> tuple[int, int]:
    """(keys of a block, queries of a step), see general.py."""
    if width <= 64 and not tight:
        return 128, 32
    if width <= 128:
        return 64, 32 if tight else 64
    return 64, 16


class GeneralDkvInputs(NamedTuple):
    """References to global memory."""

    q: Any
    k: Any
    v: Any
    lse: Any
    do: Any
    delta: Any
    segments: Any  # Segments, or None
    joint: Any  # where the results go, or None


class Results(NamedTuple):
    """Of dK and dV, or of one of them; None for the other one."""

    dk: Any
    dv: Any


class GeneralStep(NamedTuple):
    """One step: a tile of queries of one head."""

    head: Any
    tile: Any

    def following(self, b: Block, group: int):
        if group == 1:
            return GeneralStep(self.head, self.tile + 1)
        same = self.tile + 1 < b.high
        return GeneralStep(
            jnp.where(same, self.head, self.head + 1), jnp.where(same, self.tile + 1, b.low)
        )


def scratch(s: Schedule) -> dict:
    """Shared memory of a block."""
    return dict(
        k=ampere.tile(s.block, s.width, s.dtype),  # and then dK
        v=ampere.tile(s.block, s.width, s.dtype),  # and then dV
        q=ampere.tile(s.columns, s.width, s.dtype),
        do=ampere.tile(s.columns, s.width, s.dtype),
        lse=plgpu.SMEM((s.columns,), jnp.float32),  # come with Q
        delta=plgpu.SMEM((s.columns,), jnp.float32),
    )


def load_do(w: Worker, i: GeneralStep):
    s, batch = w.schedule, w.block.batch
    ampere.load_rows(w.inputs.do, w.smem.do, batch, i.head, i.tile * s.columns, s.visits.lengths[0])


def load_q(w: Worker, i: GeneralStep):
    """Starts to copy a tile of Q, and the statistics of its rows."""
    s, inputs, smem, batch = w.schedule, w.inputs, w.smem, w.block.batch
    first = i.tile * s.columns
    ampere.load_line(inputs.lse, smem.lse, batch, i.head, first)
    ampere.load_line(inputs.delta, smem.delta, batch, i.head, first)
    ampere.load_rows(inputs.q, smem.q, batch, i.head, first, s.visits.lengths[0])


def begin(w: Worker) -> GeneralStep:
    """Loads what comes first; returns the first step."""
    s, b, inputs, smem = w.schedule, w.block, w.inputs, w.smem
    for ref, buffer, first_head in (
        (inputs.k, smem.k, s.k_first),
        (inputs.v, smem.v, s.v_first),
    ):
        ampere.load_rows(ref, buffer, b.batch, first_head + b.head, b.row, s.visits.lengths[1])
    first = GeneralStep(b.head * s.group, b.low)
    load_do(w, first)
    load_q(w, first)
    return first


def step(w: Worker, last, n, carry):
    """Adds P^T dO of the n-th step to dV and dS^T Q to dK."""
    s, b, smem, inputs = w.schedule, w.block, w.smem, w.inputs
    i, (dk, dv) = carry
    shape, later = (s.block, s.columns), i.following(b, s.group)
    stat = lambda ref: along(plgpu.load(ref, layout=COL, optimized=False), shape, 1)
    ampere.wait(1)  # for dO
    dp = None if dk is None else ampere.rows_times_rows(smem.v, smem.do)
    ampere.wait()  # for Q
    x, slope = logits(ampere.rows_times_rows(smem.k, smem.q), s.scale, s.softcap)
    x = general.mask(s, b, inputs.segments, i.tile, x)
    p = jnp.exp2(x - stat(smem.lse) * LOG2E)
    if dv is not None:
        dv = ampere.times_rows(dv, p, smem.do)
    ampere.meet()  # all have read dO
    pl.when(n < last)(lambda: load_do(w, later))
    if dp is not None:
        ds = p * (dp - stat(smem.delta))
        dk = ampere.times_rows(dk, ds if slope is None else ds * slope, smem.q)
    ampere.meet()  # all have read Q
    pl.when(n < last)(lambda: load_q(w, later))
    return later, Results(dk, dv)


def store(w: Worker, refs: Results, sums: Results):
    """Scales dK, and stores both through the buffers of K and V."""
    s, b, smem = w.schedule, w.block, w.smem
    parts = []
    if sums.dk is not None:
        smem.k[...] = (sums.dk * s.scale).astype(s.dtype)
        parts.append((smem.k, refs.dk, s.k_first))
    if sums.dv is not None:
        smem.v[...] = sums.dv.astype(s.dtype)
        parts.append((smem.v, refs.dv, s.v_first))
    ampere.meet()
    for buffer, ref, first_head in parts:
        head = first_head + b.head
        ampere.store_rows(buffer, ref, b.batch, head, b.row, s.visits.lengths[1])


def body(wanted: Results, s: Schedule, inputs: GeneralDkvInputs, *refs):
    *results, smem = refs
    w = Worker(s, inputs, smem, general.block_of(s, inputs.segments))
    targets = iter(results or (inputs.joint,) * 2)
    refs = Results(*(next(targets) if wants else None for wants in wanted))
    zeros = mosaic.zeros((s.block, s.width), WGMMA)
    nothing = Results(*(zeros if wants else None for wants in wanted))
    steps = s.group * (w.block.high - w.block.low)
    one = functools.partial(step, w, steps - 1)
    store(w, refs, lax.fori_loop(0, steps, one, (begin(w), nothing))[1])


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def backward_dkv(
    q, k, v, lse, dout, delta, segments, joint=None, *, call: Call, heads: Heads | None = None
):
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there."""
    packed, width = segments is not None, general.width_of(q.shape[-1])
    tile = tiles(width, general.tight(call, packed))
    s = general.schedule(q, k, *tile, call, heads, packed=packed, by_keys=True)
    inputs = GeneralDkvInputs(q, k, v, lse, dout, delta, with_spans(s, segments), joint)
    like = jax.ShapeDtypeStruct(k.shape, q.dtype)

    def run(**wanted):
        wanted = Results(**wanted)
        return launch(
            s, "general_attention_backward_dkv", functools.partial(body, wanted), inputs,
            () if heads else (like,) * sum(wanted), scratch(s), reduction_scratch_bytes=0,
        )  # fmt: skip

    if width <= 128:
        return run(dk=True, dv=True)
    return *run(dk=True, dv=False), *run(dk=False, dv=True)
