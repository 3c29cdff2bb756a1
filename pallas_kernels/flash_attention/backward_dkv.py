"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in op.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

    K, V, 64 rows a warpgroup       -- k_bars, v_bars -->  warpgroup 0:  S^T = K Q^T, dP^T = V dO^T
                                                                         P^T, dS^T
    Q, -lse    ring [n] [n+1] [n+2] [ ]  -- q_full -->                   dV += P^T dO
    dO, -delta ring [n] [n+1] [n+2] [ ]  -- do_full -->                  dK += dS^T Q
             <---------------------------- free --         warpgroup 1:  the same

keys.py has the copies.  What a warpgroup computes in a step depends on the registers that it has
for it: of 64 queries (`add_both`), at a head dimension of 64 of 128 queries (`add_halves`), and at
256 only one of dK and dV, while another warpgroup sums the other (`add_dv`, `add_dk`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import keys, masks, schedule
from pallas_kernels.flash_attention.keys import KeysItem, Step
from pallas_kernels.flash_attention.schedule import Call, Heads, Tiles, Worker
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA, along


def tiles(head_dim: int, group: int) -> Tiles:
    """The fastest on an H100; docs/attention.md has the others."""
    if head_dim <= 64:  # in halves; the heads of a group leave no registers for the next item
        return Tiles(2, 128, 3, group == 1, 16)
    if head_dim <= 96:
        return Tiles(2, 64, 3, True, 16)
    return Tiles(2, 64, 4 if head_dim <= 128 else 2, False, 32)


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


def probabilities(w: Worker, i: KeysItem, k_ids, scores, step: Step, slot, masked, half=0):
    """P^T and d logits / d (scale S), None for 1, from K Q^T of 64 queries."""
    s, visits = w.schedule, w.schedule.visits
    x, slope = masks.logits(scores, s.scale, s.softcap)
    if masked and s.packed:
        ids = w.smem.q_ids.at[slot, pl.ds(half * ROWS, ROWS)]
        q_ids = mosaic.read(ids, COL)
        x = masks.same_segment(x, k_ids, q_ids)
    if masked:
        # The positions are the same for all heads; without the barrier the compiler keeps them.
        tile = lax.optimization_barrier(i.stream.base + step.r)
        q0 = tile * s.columns + half * ROWS + visits.offset
        x = masks.visible(x, q0, i.k0, causal=visits.causal, window=visits.window, transposed=True)
    if s.softcap is not None:
        x = x + column(w.smem.minus_lse, slot, half)
    return jnp.exp2(x), slope


def own(w: Worker, i: KeysItem, step: Step):
    """The buffer of the warpgroup's keys and values.

    The minimum changes nothing.  But where the compiler sees that an operand stays in place, it
    holds the descriptors of all its slices in registers.
    """
    return jnp.minimum(i.at, step.n + w.schedule.sides * keys.sets(w.schedule))


def one_head(w: Worker, i: KeysItem, add, g):
    """Walks over the steps of one query head that the warpgroup sees."""
    s, visits, late = w.schedule, w.schedule.visits, keys.runs_on(w.schedule)

    def one(r, masked, begins=False):
        step = i.step(g, r)
        slot = keys.queries_of(w)[0].ring.wait(step.n)
        add(step, slot, masked, begins)

    keys.pass_by(w, i, g, 0, i.first)
    if late:
        one(i.first, visits.causal or s.packed, begins=True)
    crosses = s.diagonal_crosses_tiles if late else visits.causal
    schedule.walk(s, i, i.first + late, one, crosses=crosses)
    if late:
        plgpu.wgmma_wait(0)
        keys.release(w, i.step(g, i.last - 1).n)
    if visits.window is not None:
        keys.pass_by(w, i, g, i.last, i.stream.steps)


def all_heads(w: Worker, i: KeysItem, add):
    """Calls add(step, slot, masked, begins) for the steps of all heads of the group."""
    pl.loop(0, w.schedule.group)(lambda g: one_head(w, i, add, lax.optimization_barrier(g)))


def wait_for_k(w: Worker, i: KeysItem):
    """Returns the ids of the keys, None without segments."""
    plgpu.barrier_wait(w.smem.k_bars.at[i.at])
    if w.schedule.packed:
        return mosaic.read(w.smem.k_ids.at[i.at], ROW)
    return None


def store(w: Worker, i: KeysItem, name: str, x):
    """Scales dk, and stores it or dv."""
    s, smem, at = w.schedule, w.smem, keys.set_of(w)
    # Of two warpgroups that pair up each is the only reader of one of K and V.
    buffers = dict(dk=smem.dk, dv=smem.dv) if s.persistent else dict(dk=smem.v, dv=smem.k)
    refs = dict(zip(("dk", "dv"), w.results or (w.inputs.joint,) * 2, strict=True))
    x, first = (x * s.scale, s.k_first) if name == "dk" else (x, s.v_first)
    target = refs[name].at[i.batch, pl.ds(i.k0, ROWS), first + i.kv_head]
    plgpu.commit_smem()  # all warps have read what was there
    buffers[name][at] = x.astype(s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffers[name].at[at], target)


# ---- each warpgroup has 64 keys, steps of 64 queries: D = 96 and 128 -----------------------------


def sum_own_keys(w: Worker, i: KeysItem, add):
    """Sums dK and dV; add: what a step adds, as `add_both`."""

    def both(dk_acc, dv_acc):
        k_ids = wait_for_k(w, i)
        plgpu.barrier_wait(w.smem.v_bars.at[i.at])
        all_heads(w, i, functools.partial(add, w, i, k_ids, dk_acc, dv_acc))
        dk, dv = dk_acc[...], dv_acc[...]
        plgpu.wait_smem_to_gmem(0)  # the block before has left
        store(w, i, "dk", dk)
        store(w, i, "dv", dv)

    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    pl.run_scoped(both, acc, acc)


def add_both(w: Worker, i: KeysItem, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = own(w, i, step)

    def add(s_acc, dp_acc):
        # Issue S^T = K Q^T and dP^T = V dO^T.
        begin_scores(w, s_acc, slot)
        plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(smem.minus_delta, slot)
        across(s_acc, smem.k.at[here], smem.q.at[slot])
        across(dp_acc, smem.v.at[here], smem.do.at[slot])
        keys.load_later(w, i, step.g, step.r)
        # Compute P under dP, accumulate dV.
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if keys.runs_on(s) and not begins:
            keys.release(w, step.n - 1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])
        # Compute dS under dV, accumulate dK.
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)  # less delta
        ds = masks.d_scores(p, dp, slope, s.dtype)
        plgpu.wgmma(dk_acc, ds, smem.q.at[slot])
        if not keys.runs_on(s):
            plgpu.wgmma_wait(0)
            keys.release(w, step.n)

    acc = plgpu.ACC((ROWS, s.columns), jnp.float32)
    pl.run_scoped(add, acc, acc)


# ---- steps of 128 queries, in two halves a and b: D = 64 -----------------------------------------
#
#    tensor core    S of both, dP a |       | dV a     | dP b, dK a | dV b     | dK b, the next S
#    warpgroup                      | P a   | dS a     | P b        | dS b     |
#
# wgmma reads both operands of S from shared memory.  For 64 queries that takes as long as it
# multiplies, for 128 three quarters of it, so S of both halves is one wgmma, and b waits in
# registers.  A step instead of two also halves what a step takes besides: barriers, indices and
# copies.  Wider heads leave no registers for b.


def add_halves(w: Worker, i: KeysItem, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = own(w, i, step)
    halves = [pl.ds(side * ROWS, ROWS) for side in range(2)]
    q, do = ([ref.at[slot, rows] for rows in halves] for ref in (smem.q, smem.do))
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def to_dv(scores, side):
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, side)
        plgpu.wgmma(dv_acc, p.astype(s.dtype), do[side])
        return p, slope

    def first(s_acc, dp_acc):
        begin_scores(w, s_acc, slot)
        plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(smem.minus_delta, slot, 0)
        across(s_acc, smem.k.at[here], smem.q.at[slot])
        across(dp_acc, smem.v.at[here], do[0])
        keys.load_later(w, i, step.g, step.r)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        if not begins:
            keys.release(w, step.n - 1)
        p, slope = to_dv(scores[:, :ROWS], 0)
        ds = masks.d_scores(p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=1), slope, s.dtype)
        pl.run_scoped(functools.partial(second, ds, scores[:, ROWS:]), acc)

    def second(ds, scores, dp_acc):
        dp_acc[...] = column(smem.minus_delta, slot, 1)
        across(dp_acc, smem.v.at[here], do[1])
        plgpu.wgmma(dk_acc, ds, q[0])
        p, slope = to_dv(scores, 1)
        ds = masks.d_scores(p, plgpu.wgmma_accumulator_load(dp_acc, wait_n=2), slope, s.dtype)
        plgpu.wgmma(dk_acc, ds, q[1])

    pl.run_scoped(first, plgpu.ACC((ROWS, s.columns), jnp.float32), acc)


# ---- two warpgroups for the same 64 keys: D = 256 ------------------------------------------------
#
# Each has registers for one of dK and dV.  P^T goes from one to the other through shared memory, in
# float32; no matmul is done twice.
#
#    warpgroup 0:  S^T = K Q^T, P^T, dV += P^T dO   -- p_full -->   warpgroup 1:  dP^T = V dO^T,
#                                                  <-- p_free --                  dS^T, dK += dS^T Q


def sum_dv(w: Worker, i: KeysItem, dv_acc):
    k_ids = wait_for_k(w, i)
    all_heads(w, i, functools.partial(add_dv, w, i, k_ids, dv_acc))
    store(w, i, "dv", dv_acc[...])


def sum_dk(w: Worker, i: KeysItem, dk_acc):
    plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    all_heads(w, i, functools.partial(add_dk, w, i, dk_acc))
    store(w, i, "dk", dk_acc[...])


def add_dv(w: Worker, i: KeysItem, k_ids, dv_acc, step: Step, slot, masked, begins):
    """Hands P over, and adds P^T dO to dV."""
    s, smem = w.schedule, w.smem

    def add(s_acc):
        # Compute P.
        begin_scores(w, s_acc, slot)
        across(s_acc, smem.k.at[i.at], smem.q.at[slot])
        scores = s_acc[...]
        if not begins:
            keys.release(w, step.n - 1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked)
        # Hand it over.
        plgpu.barrier_wait(smem.p_free)
        smem.p[...] = p if slope is None else p * slope
        plgpu.barrier_arrive(smem.p_full)
        # Accumulate dV, under the next step.
        plgpu.barrier_wait(smem.do_full.at[slot])
        plgpu.wgmma(dv_acc, p.astype(s.dtype), smem.do.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


def add_dk(w: Worker, i: KeysItem, dk_acc, step: Step, slot, masked, begins):
    """Takes P, and adds dS^T Q to dK; the mask is in P."""
    s, smem = w.schedule, w.smem

    def add(dp_acc):
        # Compute dP.
        plgpu.barrier_wait(smem.do_full.at[slot])
        across(dp_acc, smem.v.at[i.at], smem.do.at[slot])
        dp = dp_acc[...]
        if not begins:
            keys.release(w, step.n - 1)
        keys.load_later(w, i, step.g, step.r)
        # Take P, compute dS.
        plgpu.barrier_wait(smem.p_full)
        p = plgpu.load(smem.p, layout=WGMMA)
        ds = (p * (dp + column(smem.minus_delta, slot))).astype(s.dtype)
        plgpu.barrier_arrive(smem.p_free)
        # Accumulate dK, under the next step.
        plgpu.wgmma(dk_acc, ds, smem.q.at[slot])

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


# ---- an item, and the kernel --------------------------------------------------------------------


def differentiate(w: Worker, i: KeysItem):
    """Sums and stores dK and dV of an item, or this warpgroup's share of them."""
    if not keys.pairs_up(w.schedule):
        sum_own_keys(w, i, add_halves if keys.in_halves(w.schedule) else add_both)
        return
    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    pl.when(w.wg == 0)(lambda: pl.run_scoped(functools.partial(sum_dv, w, i), acc))
    pl.when(w.wg == 1)(lambda: pl.run_scoped(functools.partial(sum_dk, w, i), acc))


def one_item(w: Worker, item, following, side, n0):
    """One block of keys; returns the step after its last."""
    s, end = w.schedule, w.schedule.visits.lengths[1]
    if following is not None:
        pl.when(following >= 0)(lambda: keys.load_kv(w, following, 1 - side))
    i = keys.item_of(w, item, following, side, n0)
    total = s.group * i.stream.steps
    if s.persistent:  # of an item of fewer steps than are on their way when it begins
        pl.loop(total, keys.ahead(s))(
            lambda nth: keys.load(w, Step(n0 + nth, 0, nth), nth, i.stream, following)
        )

    pl.when(i.k0 < end)(lambda: differentiate(w, i))
    if mosaic.cdiv(end, s.block) * s.block - end >= ROWS:

        @pl.when(i.k0 >= end)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.k_bars.at[i.at])
            plgpu.barrier_wait(w.smem.v_bars.at[i.at])
            pl.loop(0, s.group)(lambda g: keys.pass_by(w, i, g, 0, i.stream.steps))

    return n0 + total


def body(w: Worker):
    if keys.pairs_up(w.schedule):
        pl.when(w.wg == 1)(lambda: plgpu.barrier_arrive(w.smem.p_free))
    schedule.work_items(
        w.inputs.plan, functools.partial(keys.begin, w), functools.partial(one_item, w)
    )
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("call", "heads"))
def backward_dkv(
    q, k, v, minus_lse, dout, minus_delta, segments, joint=None, *,
    call: Call, heads: Heads | None = None,
):  # fmt: skip
    """(dk, dv) like (k, v); with a ref `joint` nothing: they are written there.

    minus_lse, minus_delta: from the dQ kernel.
    """
    # K and V must not stay in registers: ptxas gives these away too early (docs/attention.md).
    packed, group = segments is not None, q.shape[2] // k.shape[2]
    tile = tiles(q.shape[-1], heads.q // heads.kv if heads else group)
    block = ROWS * (1 if q.shape[-1] > 128 else tile.wgs)
    s = schedule.schedule_of(q, k, tile, call, heads, block=block, packed=packed, by_keys=True)
    written = mosaic.cdiv(call.lengths[0], ROWS) * ROWS  # by the dQ kernel
    if written % s.columns:  # the last step has a half without queries, so its P must be 0
        masked = lambda x, value: jnp.where(jnp.arange(x.shape[2]) < written, x, value)
        minus_lse, minus_delta = masked(minus_lse, -jnp.inf), masked(minus_delta, 0)
    inputs = dict(q=q, k=k, v=v, minus_lse=minus_lse, do=dout, minus_delta=minus_delta, joint=joint)
    like = jax.ShapeDtypeStruct(k.shape, q.dtype)
    out_type = () if heads else (like, like)
    return schedule.launch(
        s, "attention_backward_dkv", body, inputs, segments, out_type, keys.scratch(s)
    )
