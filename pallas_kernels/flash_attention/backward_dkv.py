"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in op.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

    K, V, 64 rows a warpgroup       -- k_bars, v_bars -->  warpgroup 0:  S^T = K Q^T, dP^T = V dO^T
                                                                         P^T, dS^T
    Q, -lse    ring [n] [n+1] [n+2] [ ]  -- q_full -->                   dV += P^T dO
    dO, -delta ring [n] [n+1] [n+2] [ ]  -- do_full -->                  dK += dS^T Q
             <---------------------------- free --         warpgroup 1:  the same

query_stream.py loads K, V and the rings, and hands buffers back; this file computes with them.  A
step has 64 queries, or at a head dimension of 64 two halves of 64 (`add_both`).  At 256 a
warpgroup has registers for one of dK and dV; another one sums the other (`add_dv`, `add_dk`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import masks, schedule
from pallas_kernels.flash_attention import query_stream as stream
from pallas_kernels.flash_attention.query_stream import Step
from pallas_kernels.flash_attention.schedule import Call, Item, Tiles, Worker
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA, along


def tiles(head_dim: int, group: int, softcap: float | None) -> Tiles:
    """The fastest on an H100; docs/attention.md has the others.  In pairs if a block has ROWS."""
    if head_dim <= 64:  # in halves; the heads of a group leave no registers for the next item
        return Tiles(2, 128, 3, group == 1, 16)
    if head_dim <= 128:
        return Tiles(2, 64, 4, False, 32)
    if head_dim <= 160 and softcap is None:
        return Tiles(2, 64, 2, False, 32)
    return Tiles(2, 64, 3 if head_dim <= 192 else 2, False, 32, ROWS)


# Compute P and dS, and add to dV and dK.


def across(acc, rows, tile):
    """acc += rows times a tile, transposed."""
    plgpu.wgmma(acc, rows, tile.transpose((1, 0)))


def column(ref, slot, half=None):
    """A statistic of a step's queries, over a tile of S^T.  half: of its first or last 64."""
    n = ref.shape[-1] if half is None else ROWS
    stat = mosaic.read(ref.at[slot, pl.ds((half or 0) * ROWS, n)], COL)
    return along(stat, (ROWS, n), 1)


def begin_scores(w: Worker, s_acc, slot):
    """S begins with -lse, so P is exp2 of a multiple of it.  softcap stands in between: with 0."""
    if w.schedule.softcap is None:
        s_acc[...] = column(w.smem.minus_lse, slot)


def probabilities(w: Worker, i: Item, k_ids, scores, step: Step, slot, masked, half=0):
    """P^T and d logits / d (scale S), None for 1, from K Q^T of 64 queries."""
    s, ids = w.schedule, None
    x, slope = masks.logits(scores, s.scale, s.softcap)
    if masked and s.packed:
        ids = k_ids, mosaic.read(w.smem.q_ids.at[slot, pl.ds(half * ROWS, ROWS)], COL)
    if masked:
        # The positions are the same for all heads; without the barrier the compiler keeps them.
        tile = lax.optimization_barrier(i.stream.base + step.r)
        x = masks.visible(x, s.visits, i.row, tile * s.columns + half * ROWS, ids)
    if s.softcap is not None:
        x = x + column(w.smem.minus_lse, slot, half)
    return jnp.exp2(x), slope


def all_heads(w: Worker, i: Item, add):
    """add(step, slot, masked, begins) for the steps that the warpgroup sees, of all query heads."""
    s, visits, late = w.schedule, w.schedule.visits, stream.runs_on(w.schedule)

    def one(g, r, masked, begins=False):
        step = stream.step_of(i, g, r)
        slot = stream.operands(w)[0].ring.wait(step.n)
        add(step, slot, masked, begins)

    @pl.loop(0, s.group)
    def _(g):
        g = lax.optimization_barrier(g)
        stream.pass_by(w, i, g, 0, i.first)
        if late:
            one(g, i.first, s.masks_first, begins=True)
        crosses = s.diagonal_crosses_tiles if late else visits.causal
        schedule.walk(s, i, i.first + late, functools.partial(one, g), crosses=crosses)
        if late:
            plgpu.wgmma_wait(0)
            stream.release(w, stream.step_of(i, g, i.last - 1).n)
        if visits.window is not None:
            stream.pass_by(w, i, g, i.last, i.end)


def wait_for_k(w: Worker, i: Item):
    """Returns the ids of the keys, None without segments."""
    plgpu.barrier_wait(w.smem.k_bars.at[i.at])
    return mosaic.read(w.smem.k_ids.at[i.at], ROW) if w.schedule.packed else None


def store(w: Worker, i: Item, name: str, x):
    """Scales dk, and stores it or dv."""
    s, smem, at = w.schedule, w.smem, schedule.set_of(w)
    # Of two warpgroups that pair up each is the only reader of one of K and V.
    buffers = dict(dk=smem.dk, dv=smem.dv) if s.persistent else dict(dk=smem.v, dv=smem.k)
    refs = dict(zip(("dk", "dv"), w.results or (w.inputs.joint,) * 2, strict=True))
    x, first = (x * s.scale, s.k_first) if name == "dk" else (x, s.v_first)
    target = refs[name].at[i.batch, i.rows, first + i.head]
    plgpu.commit_smem()  # all warps have read what was there
    buffers[name][at] = x.astype(s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers[name].at[at], target)


# ---- each warpgroup has 64 keys: D up to 128 -----------------------------------------------------
#
# At D = 64 a step has 128 queries, in two halves a and b:
#
#    tensor core    S of both, dP a |       | dV a     | dP b, dK a | dV b     | dK b, the next S
#    warpgroup                      | P a   | dS a     | P b        | dS b     |
#
# wgmma reads both operands of S from shared memory.  For 64 queries that takes as long as it
# multiplies, for 128 three quarters of it, so S of both halves is one wgmma, and b waits in
# registers.  A step instead of two also halves what a step takes besides: barriers, indices and
# copies.  Wider heads leave no registers for b.


def sum_both(w: Worker, i: Item, dk_acc, dv_acc):
    k_ids = wait_for_k(w, i)
    plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    all_heads(w, i, functools.partial(add_both, w, i, k_ids, dk_acc, dv_acc))
    dk, dv = dk_acc[...], dv_acc[...]
    plgpu.wait_smem_to_gmem(0)  # the block before has left
    store(w, i, "dk", dk)
    store(w, i, "dv", dv)


def add_both(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    # The minimum changes nothing.  But where the compiler sees that an operand stays in place, it
    # holds the descriptors of all its slices in registers.
    here = jnp.minimum(i.at, step.n + s.sides * s.sets)
    halves = [pl.ds(side * ROWS, ROWS) for side in range(s.columns // ROWS)]
    q, do = ([ref.at[slot, rows] for rows in halves] for ref in (smem.q, smem.do))
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def add(scores, dp_acc, half, wait_n):
        """Computes P under dP, dS under dV, and begins to accumulate dV; returns dS."""
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, half)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), do[half])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=wait_n)  # less delta
        return masks.d_scores(p, dp, slope).astype(s.dtype)

    def first(s_acc, dp_acc):
        # Issue S^T = K Q^T and dP^T = V dO^T.
        begin_scores(w, s_acc, slot)
        plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(smem.minus_delta, slot, 0)
        across(s_acc, smem.k.at[here], smem.q.at[slot])
        across(dp_acc, smem.v.at[here], do[0])
        stream.load_later(w, i, step.g, step.r)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if stream.runs_on(s) and not begins:
            stream.release(w, step.n - 1)
        ds = add(scores[:, :ROWS], dp_acc, 0, wait_n=1)
        if len(halves) > 1:
            pl.run_scoped(functools.partial(second, ds, scores[:, ROWS:]), acc)
            return
        plgpu.wgmma(dk_acc, ds, q[0])
        if not stream.runs_on(s):
            plgpu.wgmma_wait(0)
            stream.release(w, step.n)

    def second(ds, scores, dp_acc):
        dp_acc[...] = column(smem.minus_delta, slot, 1)
        across(dp_acc, smem.v.at[here], do[1])
        plgpu.wgmma(dk_acc, ds, q[0])
        ds = add(scores, dp_acc, 1, wait_n=2)
        plgpu.wgmma(dk_acc, ds, q[1])

    pl.run_scoped(first, plgpu.ACC((ROWS, s.columns), jnp.float32), acc)


# ---- two warpgroups for the same 64 keys: D = 256 ------------------------------------------------
#
# Each has registers for one of dK and dV.  P^T goes from one to the other through shared memory, in
# float32; no matmul is done twice.
#
#    warpgroup 0:  S^T = K Q^T, P^T, dV += P^T dO   -- p_full -->   warpgroup 1:  dP^T = V dO^T,
#                                                  <-- p_free --                  dS^T, dK += dS^T Q


def sum_dv(w: Worker, i: Item, dv_acc):
    k_ids = wait_for_k(w, i)
    all_heads(w, i, functools.partial(add_dv, w, i, k_ids, dv_acc))
    store(w, i, "dv", dv_acc[...])


def sum_dk(w: Worker, i: Item, dk_acc):
    plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    all_heads(w, i, functools.partial(add_dk, w, i, dk_acc))
    store(w, i, "dk", dk_acc[...])


def add_dv(w: Worker, i: Item, k_ids, dv_acc, step: Step, slot, masked, begins):
    """Hands P over, and adds P^T dO to dV."""
    s, smem = w.schedule, w.smem

    def add(s_acc):
        # Compute P.
        begin_scores(w, s_acc, slot)
        across(s_acc, smem.k.at[i.at], smem.q.at[slot])
        scores = s_acc[...]
        if not begins:
            stream.release(w, step.n - 1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
        # Hand it over.
        plgpu.barrier_wait(smem.p_free)
        smem.p[...] = p if slope is None else p * slope
        plgpu.barrier_arrive(smem.p_full)
        # Accumulate dV, under the next step.
        plgpu.barrier_wait(smem.do_full.at[slot])
        plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


def add_dk(w: Worker, i: Item, dk_acc, step: Step, slot, masked, begins):
    """Takes P, and adds dS^T Q to dK; the mask is in P."""
    s, smem = w.schedule, w.smem

    def add(dp_acc):
        # Compute dP.
        plgpu.barrier_wait(smem.do_full.at[slot])
        across(dp_acc, smem.v.at[i.at], smem.do.at[slot])
        dp = dp_acc[...]
        if not begins:
            stream.release(w, step.n - 1)
        stream.load_later(w, i, step.g, step.r)
        # Take P, compute dS.
        plgpu.barrier_wait(smem.p_full)
        p = plgpu.load(smem.p, layout=WGMMA)
        ds = (p * (dp + column(smem.minus_delta, slot))).astype(s.dtype)
        plgpu.barrier_arrive(smem.p_free)
        # Accumulate dK, under the next step.
        plgpu.wgmma(dk_acc, ds, smem.q.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


# ---- an item, and the kernel --------------------------------------------------------------------


def differentiate(w: Worker, i: Item):
    """Sums and stores dK and dV of an item, or this warpgroup's share of them."""
    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    if not stream.pairs_up(w.schedule):
        pl.run_scoped(functools.partial(sum_both, w, i), acc, acc)
        return
    pl.when(w.wg == 0)(lambda: pl.run_scoped(functools.partial(sum_dv, w, i), acc))
    pl.when(w.wg == 1)(lambda: pl.run_scoped(functools.partial(sum_dk, w, i), acc))


def one_item(w: Worker, item, following, side, n0):
    """One block of keys; returns the step after its last."""
    s, end = w.schedule, w.schedule.visits.lengths[1]
    if following is not None:
        pl.when(following >= 0)(lambda: stream.load_kv(w, following, 1 - side))
    i = schedule.item_of(w, item, following, side, n0)
    total = s.group * i.end
    if s.persistent:  # of an item of fewer steps than are on their way when it begins
        load = lambda nth: stream.load(w, Step(n0 + nth, 0, nth), nth, i.stream)
        pl.loop(total, stream.ahead(s))(load)

    pl.when(i.row < end)(lambda: differentiate(w, i))
    if mosaic.cdiv(end, s.block) * s.block - end >= ROWS:

        @pl.when(i.row >= end)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.k_bars.at[i.at])
            plgpu.barrier_wait(w.smem.v_bars.at[i.at])
            pl.loop(0, s.group)(lambda g: stream.pass_by(w, i, g, 0, i.end))

    return n0 + total


def body(w: Worker):
    if stream.pairs_up(w.schedule):
        pl.when(w.wg == 1)(lambda: plgpu.barrier_arrive(w.smem.p_free))
    schedule.work_items(w, stream.begin, one_item)


@functools.partial(jax.jit, static_argnames="call")
def backward_dkv(q, k, v, minus_lse, dout, minus_delta, segments, joint=None, *, call: Call):
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there.

    minus_lse, minus_delta: from the dQ kernel.
    """
    # K and V must not stay in registers: ptxas gives these away too early (docs/attention.md).
    heads, kv_heads = call.heads or (q.shape[2], k.shape[2])
    tile = tiles(q.shape[-1], heads // kv_heads, call.softcap)
    written = mosaic.cdiv(call.lengths[0], ROWS) * ROWS  # by the dQ kernel
    if written % tile.step:  # the last step has a half without queries, so its P must be 0
        masked = lambda x, value: jnp.where(jnp.arange(x.shape[2]) < written, x, value)
        minus_lse, minus_delta = masked(minus_lse, -jnp.inf), masked(minus_delta, 0)
    inputs = dict(q=q, k=k, v=v, minus_lse=minus_lse, do=dout, minus_delta=minus_delta, joint=joint)
    like = jax.ShapeDtypeStruct(k.shape, q.dtype)
    return schedule.launch(
        "attention_backward_dkv", body, tile, call, inputs, segments,
        () if call.heads else (like, like), stream.scratch, by_keys=True,
    )  # fmt: skip
