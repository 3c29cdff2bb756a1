"""Attention backward on Hopper, second kernel: dK and dV (the formulas are in op.py).

A block owns keys and streams the tiles of queries that see them, head after head of the group, so
the gradient of a kv head sums inside the block.  S and dP are computed transposed: P^T and dS^T are
then already where a wgmma takes them, in registers.

    K, V, 64 rows a warpgroup       -- k_bars, v_bars -->  warpgroup 0:  S^T = K Q^T, dP^T = V dO^T
                                                                         P^T, dS^T
    Q, -lse    ring [n] [n+1] [n+2] [ ]  -- q_full -->                   dV += P^T dO
    dO, -delta ring [n] [n+1] [n+2] [ ]  -- do_full -->                  dK += dS^T Q
             <---------------------------- free --         warpgroup 1:  the same

K and V are loaded once per item.  Tiles of Q and dO pass by, head after head of the group, and in a
persistent block item after item.  A step has 64 queries, or at a head dimension of 64 two halves of
64 (`add_both`).  At 256 a warpgroup has registers for only one of dK and dV: two warpgroups share
them (`add_dv`, `add_dk`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import masks, schedule, steps
from pallas_kernels.flash_attention.schedule import Call, Schedule, Tiles, Worker, tiles_at
from pallas_kernels.flash_attention.steps import Item, Operand, Step
from pallas_kernels.mosaic import COL, ROW, ROWS, WGMMA, along
from pallas_kernels.pipeline import Ring


def tiles(head_dim: int, group: int, softcap: float | None) -> Tiles:
    """The fastest on an H100 (docs/attention-tiles.md).  Warpgroups pair up in blocks of ROWS."""
    if head_dim <= 64:  # in halves; the heads of a group leave no registers for the next item
        return Tiles(2, 128, 3, group == 1, 16)
    if head_dim <= 128:
        return Tiles(2, 64, 4, False, 32)
    if head_dim <= 160 and softcap is None:
        return Tiles(2, 64, 2, False, 32)
    return Tiles(2, 64, 3 if head_dim <= 192 else 2, False, 32, ROWS)


def pairs_up(s: Schedule) -> bool:
    """Whether two warpgroups work on the same 64 keys."""
    return s.wgs > s.sets


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded.

    A slot to spare, where there is one, lets a warpgroup run a step ahead of the other.
    """
    return s.stages - (2 if s.columns > ROWS or s.stages > 3 else 1)


def runs_on(s: Schedule) -> bool:
    """Whether a step's dV and dK matmuls run on during the next step: registers then hold P and dS.

    2.92 instead of 3.16 ms at T = 16384, D = 128 (H200).

    A slot then stays taken for one more step.  A step in halves loads before it frees a slot, so
    its ring needs two slots more than `ahead`: with fewer, the loading warp would wait for its own
    warpgroup.
    """
    return s.columns > ROWS or pairs_up(s) or s.stages > 3


def scratch(s: Schedule) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    own, stat = s.sides * s.sets, plgpu.SMEM((s.stages, s.columns), jnp.float32)
    buffers = dict(
        k=s.buffer(own, ROWS),  # one for each 64 keys of the block, like v and their barriers
        v=s.buffer(own, ROWS),
        q=s.buffer(s.stages, s.columns),  # one for each slot, like do and the statistics
        do=s.buffer(s.stages, s.columns),
        minus_lse=stat,
        minus_delta=stat,
        k_bars=plgpu.Barrier(num_arrivals=s.parts + s.segmented, num_barriers=own),
        v_bars=plgpu.Barrier(num_arrivals=s.parts, num_barriers=own),
        q_full=ring(num_arrivals=s.parts + 1 + s.segmented),
        do_full=ring(num_arrivals=s.parts + 1),
        free=ring(num_arrivals=s.wgs),  # one for Q and dO: a warpgroup leaves both at once
        k_ids=s.ids(own, ROWS),
        q_ids=s.ids(s.stages, s.columns),
    )
    if pairs_up(s):  # P^T, on its way from one warpgroup to the other
        swizzled = mosaic.wgmma_tiles(s.columns, jnp.float32)
        buffers["p"] = plgpu.SMEM((ROWS, s.columns), jnp.float32, transforms=swizzled)
        buffers["p_full"] = buffers["p_free"] = plgpu.Barrier()
    if s.persistent:  # otherwise dV and dK leave through the buffers of K and V
        buffers["dv"] = buffers["dk"] = s.buffer(s.sets, ROWS)
    return buffers


def operands(w: Worker) -> tuple[Operand, Operand]:
    """Q and dO.  The last warpgroup loads Q and the first one dO; in a pair the last loads both."""
    s, inputs, smem, last = w.schedule, w.inputs, w.smem, w.schedule.wgs - 1
    ring = functools.partial(Ring, s.stages, free=smem.free)
    q, do = ring(smem.q_full, loader=last), ring(smem.do_full, loader=last if pairs_up(s) else 0)
    lse, delta = (inputs.minus_lse, smem.minus_lse), (inputs.minus_delta, smem.minus_delta)
    return (
        Operand(q, inputs.q, 0, w.tma.q, 0, ahead(s), (inputs.q_ids, smem.q_ids), lse),
        Operand(do, inputs.do, 0, w.tma.do, 1, ahead(s), stats=delta),
    )


# Load: K and V of a warpgroup, and the tiles of Q and dO.


def load_kv(w: Worker, item, side=0):
    s, smem = w.schedule, w.smem
    key0, (batch, kv_head) = s.where(item)
    rows, at = pl.ds(key0 + steps.set_of(w) * ROWS, ROWS), side * s.sets + steps.set_of(w)
    copy = lambda ref, first, *to: schedule.copy_rows(w, ref, batch, rows, first + kv_head, *to)
    copy(w.inputs.k, s.k_first, w.tma.k, at, smem.k_bars.at[at])
    copy(w.inputs.v, s.v_first, w.tma.v, at, smem.v_bars.at[at])
    if s.segmented:
        ids = w.inputs.k_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.k_ids.at[at], smem.k_bars.at[at])


def load(w: Worker, step: Step, nth, stream):
    """Loads the tiles of a step, the nth of its item.

    Two warps load, one Q and one dO; only they wait until all warpgroups have left the buffers.
    """

    def by_warp(warp):
        for x in operands(w):
            send = functools.partial(steps.send_queries, w, step, nth, stream, x)
            pl.when((warp == x.warp) & (w.wg == x.ring.loader))(send)

    plgpu.warp_map(by_warp)


def load_later(w: Worker, i: Item, g, r):
    """Loads what must be on its way after step r of head g."""
    # Without the barriers the compiler would compute indices ahead, and hold them in registers.
    g, r = lax.optimization_barrier(g), lax.optimization_barrier(r)
    nth = g * i.end + r + ahead(w.schedule)
    load(w, Step(i.n0 + nth, g, r + ahead(w.schedule)), nth, i.stream)


def begin(w: Worker, item):
    """Loads what the first item of a block needs at once."""
    pl.when(w.wg < w.schedule.sets)(lambda: load_kv(w, item))
    stream = steps.stream_of(w, item)
    pl.loop(0, ahead(w.schedule))(lambda n: load(w, Step(n, 0, n), n, stream))


# Hand buffers back.


def release(w: Worker, n):
    """This warpgroup has read the tiles of step n."""
    plgpu.commit_smem()  # plain loads have read the statistics
    operands(w)[0].ring.release(n)


def pass_by(w: Worker, i: Item, g, low, high):
    """Passes over steps in which only other warpgroups of the block see something."""

    @pl.loop(low, high)
    def _(r):
        n, (q, do) = steps.step_of(i, g, r).n, operands(w)
        load_later(w, i, g, r)
        q.ring.wait(n)
        do.ring.wait(n)
        q.ring.release(n)


# Compute P and dS, and add to dV and dK.


def column(ref, slot, half=None):
    """A statistic of a step's queries, broadcast to a tile of S^T.  half: the first or last 64."""
    n = ref.shape[-1] if half is None else ROWS
    stat = mosaic.read(ref.at[slot, pl.ds((half or 0) * ROWS, n)], COL)
    return along(stat, (ROWS, n), 1)


def probabilities(w: Worker, i: Item, k_ids, scores, step: Step, slot, masked, begins, half=0):
    """P^T and d logits / d (scale S), None for 1, from K Q^T of 64 queries."""
    s, ids = w.schedule, None
    x, slope = masks.logits(scores, s.scale, s.softcap)
    if masked and s.segmented:
        ids = k_ids, mosaic.read(w.smem.q_ids.at[slot, pl.ds(half * ROWS, ROWS)], COL)
    if masked:
        # The positions are the same for all heads: without the barrier they stay in registers.
        tile = lax.optimization_barrier(i.stream.base + step.r)
        first, at = begins or not runs_on(s), tile * s.columns + half * ROWS
        x = masks.visible(x, s.visits, i.row, at, ids, first)
    if not s.begins_with_lse:
        x = x + column(w.smem.minus_lse, slot, half)
    return jnp.exp2(x), slope


def all_heads(w: Worker, i: Item, add):
    """add(step, slot, masked, begins) for the steps that the warpgroup sees, of all query heads."""
    s, visits, late = w.schedule, w.schedule.visits, runs_on(w.schedule)

    def one(g, r, masked, begins=False):
        step = steps.step_of(i, g, r)
        slot = operands(w)[0].ring.wait(step.n)
        add(step, slot, masked, begins)

    @pl.loop(0, s.group)
    def _(g):
        g = lax.optimization_barrier(g)
        pass_by(w, i, g, 0, i.first)
        if late:
            one(g, i.first, s.masks_first, begins=True)
        crosses = visits.diagonal_crosses_tiles if late else visits.causal
        steps.walk(s, i, i.first + late, functools.partial(one, g), crosses=crosses)
        if late:
            plgpu.wgmma_wait(0)
            release(w, steps.step_of(i, g, i.last - 1).n)
        if s.masks_last:
            pass_by(w, i, g, i.last, i.end)


def wait_for_k(w: Worker, i: Item):
    """Waits for K; returns the ids of the keys, None without segments."""
    plgpu.barrier_wait(w.smem.k_bars.at[i.at])
    return mosaic.read(w.smem.k_ids.at[i.at], ROW) if w.schedule.segmented else None


def store(w: Worker, i: Item, name: str, x):
    """Stores dv, or dk after scaling it."""
    s, at = w.schedule, steps.set_of(w)
    # In a pair, only the warpgroup of dK reads V, and only the warpgroup of dV reads K.
    buffer = name if s.persistent else dict(dk="v", dv="k")[name]
    refs = dict(zip(("dk", "dv"), w.results or (w.inputs.joint,) * 2, strict=True))
    x, first = (x * s.scale, s.k_first) if name == "dk" else (x, s.v_first)
    plgpu.commit_smem()  # all warps have read what was there
    schedule.store_rows(w, buffer, at, x, refs[name], i.batch, i.row, first + i.head)


# ---- each warpgroup has 64 keys: D up to 128 -----------------------------------------------------
#
# At D = 64 a step has 128 queries, in two halves a and b:
#
#    tensor core    S of both, dP a |       | dV a     | dP b, dK a | dV b     | dK b, the next S
#    warpgroup                      | P a   | dS a     | P b        | dS b     |
#
# wgmma reads both operands of S from shared memory.  For 64 queries reading takes as long as
# multiplying, for 128 three quarters of that, so S of both halves is one wgmma, and b waits in
# registers.  One step instead of two also halves the other costs: barriers, indices and copies.
# Wider heads leave no registers for b.


def sum_both(w: Worker, i: Item, dk_acc, dv_acc):
    k_ids = wait_for_k(w, i)
    plgpu.barrier_wait(w.smem.v_bars.at[i.at])
    all_heads(w, i, functools.partial(add_both, w, i, k_ids, dk_acc, dv_acc))

    def store_both():
        dk, dv = dk_acc[...], dv_acc[...]
        plgpu.wait_smem_to_gmem(0)  # the previous item's dK and dV have left
        store(w, i, "dk", dk)
        store(w, i, "dv", dv)

    steps.finish(w, i, store_both)


def add_both(w: Worker, i: Item, k_ids, dk_acc, dv_acc, step: Step, slot, masked, begins):
    """Adds P^T dO to dV and dS^T Q to dK."""
    s, smem = w.schedule, w.smem
    here = steps.unsettled(i, s, step.n)
    halves = [pl.ds(side * ROWS, ROWS) for side in range(s.columns // ROWS)]
    q, do = ([tiles_at(x, slot, slice(None), rows) for rows in halves] for x in (smem.q, smem.do))
    k, v = tiles_at(smem.k, here), tiles_at(smem.v, here)
    acc = plgpu.ACC((ROWS, ROWS), jnp.float32)

    def add(scores, dp_acc, half, wait_n):
        """Computes P while dP runs, starts dV, computes dS while dV runs; returns dS."""
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, begins, half)
        mosaic.multiply(dv_acc, p.astype(s.dtype), do[half])
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=wait_n)  # dP - delta
        return masks.d_scores(p, dp, slope).astype(s.dtype)

    def first(s_acc, dp_acc):
        # Issue S^T = K Q^T and dP^T = V dO^T.
        if s.begins_with_lse:  # P is then exp2 of a multiple of S
            s_acc[...] = column(smem.minus_lse, slot)
            plgpu.barrier_wait(smem.do_full.at[slot])
        dp_acc[...] = column(smem.minus_delta, slot, 0)
        schedule.over_columns(s_acc, k, tiles_at(smem.q, slot))
        schedule.over_columns(dp_acc, v, do[0])
        load_later(w, i, step.g, step.r)
        scores = plgpu.wgmma_accumulator_load(s_acc, wait_n=s.parts)
        if runs_on(s) and not begins:
            release(w, step.n - 1)
        ds = add(scores[:, :ROWS], dp_acc, 0, wait_n=1)
        if len(halves) > 1:
            pl.run_scoped(functools.partial(second, ds, scores[:, ROWS:]), acc)
            return
        mosaic.multiply(dk_acc, ds, q[0])
        if not runs_on(s):
            plgpu.wgmma_wait(0)
            release(w, step.n)

    def second(ds, scores, dp_acc):
        dp_acc[...] = column(smem.minus_delta, slot, 1)
        schedule.over_columns(dp_acc, v, do[1])
        mosaic.multiply(dk_acc, ds, q[0])
        ds = add(scores, dp_acc, 1, wait_n=2)
        mosaic.multiply(dk_acc, ds, q[1])

    if not s.begins_with_lse:  # outside, as in backward_dq.step
        plgpu.barrier_wait(smem.do_full.at[slot])
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
        if s.begins_with_lse:  # P is then exp2 of a multiple of S
            s_acc[...] = column(smem.minus_lse, slot)
        schedule.over_columns(s_acc, tiles_at(smem.k, i.at), tiles_at(smem.q, slot))
        scores = s_acc[...]
        if not begins:
            release(w, step.n - 1)
        p, slope = probabilities(w, i, k_ids, scores, step, slot, masked, begins)
        # Hand it over.
        plgpu.barrier_wait(smem.p_free)
        smem.p[...] = p if slope is None else p * slope
        plgpu.barrier_arrive(smem.p_full)
        # Accumulate dV; the matmul runs on during the next step.
        plgpu.barrier_wait(smem.do_full.at[slot])
        mosaic.multiply(dv_acc, p.astype(s.dtype), tiles_at(smem.do, slot))

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


def add_dk(w: Worker, i: Item, dk_acc, step: Step, slot, masked, begins):
    """Takes P, and adds dS^T Q to dK; the mask is in P."""
    s, smem = w.schedule, w.smem

    def add(dp_acc):
        # Compute dP.
        plgpu.barrier_wait(smem.do_full.at[slot])
        schedule.over_columns(dp_acc, tiles_at(smem.v, i.at), tiles_at(smem.do, slot))
        dp = dp_acc[...]
        if not begins:
            release(w, step.n - 1)
        load_later(w, i, step.g, step.r)
        # Take P, compute dS.
        plgpu.barrier_wait(smem.p_full)
        p = plgpu.load(smem.p, layout=WGMMA)
        ds = (p * (dp + column(smem.minus_delta, slot))).astype(s.dtype)
        plgpu.barrier_arrive(smem.p_free)
        # Accumulate dK; the matmul runs on during the next step.
        mosaic.multiply(dk_acc, ds, tiles_at(smem.q, slot))

    pl.run_scoped(add, plgpu.ACC((ROWS, s.columns), jnp.float32))


# ---- an item, and the kernel --------------------------------------------------------------------


def differentiate(w: Worker, i: Item):
    """Sums and stores dK and dV of an item, or this warpgroup's share of them."""
    acc = plgpu.ACC((ROWS, w.schedule.width), jnp.float32)
    if not pairs_up(w.schedule):
        pl.run_scoped(functools.partial(sum_both, w, i), acc, acc)
        return
    pl.when(w.wg == 0)(lambda: pl.run_scoped(functools.partial(sum_dv, w, i), acc))
    pl.when(w.wg == 1)(lambda: pl.run_scoped(functools.partial(sum_dk, w, i), acc))


def one_item(w: Worker, i: Item):
    """One block of keys; returns the step after its last."""
    s, end, following = w.schedule, w.schedule.visits.lengths[1], i.stream.following
    total = s.group * i.end
    if s.persistent:
        pl.when(following >= 0)(lambda: load_kv(w, following, 1 - i.side))
        # An item of fewer steps than `ahead` also loads the first tiles of the next item.
        pl.loop(total, ahead(s))(lambda n: load(w, Step(i.n0 + n, 0, n), n, i.stream))

    pl.when(i.row < end)(lambda: differentiate(w, i))
    if mosaic.cdiv(end, s.block) * s.block - end >= ROWS:

        @pl.when(i.row >= end)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.k_bars.at[i.at])
            plgpu.barrier_wait(w.smem.v_bars.at[i.at])
            pl.loop(0, s.group)(lambda g: pass_by(w, i, g, 0, i.end))

    return i.n0 + total


def body(w: Worker):
    if pairs_up(w.schedule):
        pl.when(w.wg == 1)(lambda: plgpu.barrier_arrive(w.smem.p_free))
    steps.work_items(w, begin, one_item)


@functools.partial(jax.jit, static_argnames="call")
def backward_dkv(q, k, v, minus_lse, dout, minus_delta, segments, given=None, *, call: Call):
    """(dk, dv) like (k, v).  With refs `given` = (joint, a 0) it writes them to joint instead.

    minus_lse, minus_delta: from the dQ kernel.
    """
    # K and V must not stay in registers: ptxas reuses these too early (docs/attention.md).
    heads, kv_heads = call.heads or (q.shape[2], k.shape[2])
    tile = tiles(sum(schedule.blocks_of(q, k)), heads // kv_heads, call.softcap)
    written = mosaic.cdiv(q.shape[1], ROWS) * ROWS  # by the dQ kernel
    if written % tile.step:  # the last step has a half without queries, so its P must be 0
        masked = lambda x, value: jnp.where(jnp.arange(x.shape[2]) < written, x, value)
        minus_lse, minus_delta = masked(minus_lse, -jnp.inf), masked(minus_delta, 0)
    inputs = dict(q=q, k=k, v=v, minus_lse=minus_lse, do=dout, minus_delta=minus_delta)
    inputs["joint"], counter = given or (None, None)
    like = jax.ShapeDtypeStruct(k.shape, k.dtype)
    return schedule.launch(
        "attention_backward_dkv", body, tile, call, inputs, segments,
        () if call.heads else (like, like), scratch, by_keys=True, counter=counter,
    )  # fmt: skip
