"""Attention forward on Hopper: one block owns 128 or 192 queries of a head, and keys stream by.

The FlashAttention algorithm (Dao et al. 2022; online softmax: Milakov and Gimelshein 2018) in the
arrangement of FlashAttention-3 (Shah et al. 2024).  A block has up to three warpgroups with 64
queries each; TMA copies tiles of K and V into rings of buffers.

    q, 64 rows a warpgroup    -- q_bars -->  warpgroup 0:  S = Q K^T -> P -> O += P V
    K ring   [n] [n+1] [ ] [ ]  -- k_full -->  warpgroup 1:     the same, one turn later
             <------------------ k_free --        ...
    V ring   [n-1] [n] [ ] [ ]  -- v_full -->
             <------------------ v_free --     turn: 0 -> 1 -> 2 -> 0, who issues matmuls

Per tile of keys a warpgroup

    issues  S_n = Q K_n^T  and  O += P_{n-1} V_{n-1}   (wgmma: asynchronous, on the tensor core)
    takes   S_n, and computes P_n = exp2(c S_n - m) and the row sums (`softmax`)

while the other warpgroups' matmuls run: the `turn` barriers let the warpgroups issue their matmuls
one after the other, which keeps their softmaxes apart.  P is the second wgmma's register operand.

There is no dedicated loader warpgroup; it would hold registers the others need (the compiler
ignores `setmaxnreg` in relocatable code, which jaxlib makes from 0.12 on).  While the tensor core
works on S_n, a warp of the first warpgroup loads the next step's keys, and a warp of the last its
values.  masks.py says which tiles a block visits and masks, schedule.py which block works on what.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import masks, schedule, steps
from pallas_kernels.flash_attention.schedule import Call, Schedule, Tiles, Worker, tiles_at
from pallas_kernels.flash_attention.steps import Item, Operand
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, along
from pallas_kernels.pipeline import Ring

LEAP = 8.0  # how far logits in base 2 may exceed m, to which their row's weights refer
LARGE = 2.0**24  # logits in base 2 that float32 rounds to whole numbers
LONG = 2048  # tokens beyond which blocks of 192 queries are faster than of 128 at D = 128


def tiles(head_dim: int, t: int, call: Call) -> Tiles:
    """The fastest on an H100 that fit beside the ids; docs/attention-tiles.md has the others."""
    if head_dim <= 80:
        return Tiles(3, 128, 4 if head_dim <= 64 else 3, True, 16)
    if head_dim <= 96 or (head_dim <= 128 and not (call.causal or call.segmented)):
        return Tiles(2, 128, 3, True, 16)
    if head_dim <= 128:
        long = call.triangular and call.softcap is None and t > LONG
        return Tiles(3, 96, 2, True, 16) if long else Tiles(2, 128, 2, True, 16)
    # The more columns O has, the fewer keys fit.  TMA copies ids to multiples of 128 bytes.
    keys = (128, 96, 64, 64) if call.segmented else (128, 112, 96, 80)
    return Tiles(2, keys[(head_dim > 160) + (head_dim > 192) + (head_dim > 224)], 2, False, 16)


def v_stages(s: Schedule) -> int:
    """Three, where shared memory has room beside the ring of K: then V is loaded a step early."""
    slots = 7 if s.width <= 96 else 5 if s.width <= 128 and not s.segmented else 4  # of both rings
    return min(3, slots - s.stages)


def scratch(s: Schedule) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    own, ring = s.sides * s.wgs, functools.partial(plgpu.Barrier, num_barriers=s.stages)
    v_ring = functools.partial(plgpu.Barrier, num_barriers=v_stages(s))
    return dict(
        qo=s.buffer(own, ROWS),  # one per warpgroup: Q, and then O
        k=s.buffer(s.stages, s.columns),  # the ring of K
        v=s.buffer(v_stages(s), s.columns),  # the ring of V
        q_bars=plgpu.Barrier(num_arrivals=s.parts + s.segmented, num_barriers=own),
        k_full=ring(num_arrivals=s.parts + s.segmented),
        v_full=v_ring(num_arrivals=s.parts),
        k_free=ring(num_arrivals=s.wgs),
        v_free=v_ring(num_arrivals=s.wgs),
        turn=plgpu.Barrier(num_barriers=s.wgs),
        q_ids=s.ids(own, ROWS),
        k_ids=s.ids(s.stages, s.columns),
    )


def weighs_early(s: Schedule) -> bool:
    """Whether P is computed before m is known to stay: 3 to 8% faster if registers suffice.

    Above D = 160 O takes 96 or more; a softcap takes some; three warpgroups leave 168 a thread.
    """
    return s.width <= 160 and (s.wgs == 2 or s.softcap is None)


def keys_of(w: Worker) -> Operand:
    s, smem = w.schedule, w.smem
    ring = Ring(s.stages, smem.k_full, smem.k_free, loader=0)
    return Operand(ring, w.inputs.k, s.k_first, w.tma.k, 0, 1, (w.inputs.k_ids, smem.k_ids))


def values_of(w: Worker) -> Operand:
    s, smem = w.schedule, w.smem
    ring = Ring(v_stages(s), smem.v_full, smem.v_free, loader=s.wgs - 1)
    return Operand(ring, w.inputs.v, s.v_first, w.tma.v, 1, v_stages(s) - 2)


# Load: the rows of Q, and the tiles of K and V.


def load_q(w: Worker, item, side=0):
    s, smem = w.schedule, w.smem
    row, (batch, head) = s.where(item)
    rows, at = pl.ds(jnp.maximum(row + w.wg * ROWS, 0), ROWS), side * s.wgs + w.wg
    schedule.copy_rows(w, w.inputs.q, batch, rows, head, w.tma.qo, at, smem.q_bars.at[at])
    if s.segmented:
        ids = w.inputs.q_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.q_ids.at[at], smem.q_bars.at[at])


def load(w: Worker, x: Operand, n, stream):
    """Loads the tile of step n; from the stream's end on it is a tile of the next item.

    One warp loads; only it waits until all warpgroups have left the buffer.
    """

    def send(stream):
        x.ring.claim(n)
        steps.send_keys(w, n, stream, x)

    def by_warp(warp):
        pl.when(warp == x.warp)(lambda: steps.send_any(w, n, stream, send))

    pl.when(w.wg == x.ring.loader)(lambda: plgpu.warp_map(by_warp))


def load_later(w: Worker, i: Item, n):
    """Loads tiles under the matmuls of step n: all warpgroups have left the step before."""
    for x in (keys_of(w), values_of(w)):
        load(w, x, n + x.ahead, i.stream)


def begin(w: Worker, item):
    """Loads what the first item of a block needs at once."""
    load_q(w, item)
    stream = steps.stream_of(w, item)
    for x in (keys_of(w), values_of(w)):
        pl.loop(0, x.ahead)(lambda n, x=x: load(w, x, n, stream))


def load_following_q(w: Worker, i: Item):
    following = i.stream.following
    if w.schedule.persistent:
        plgpu.wait_smem_to_gmem(0)  # the previous item's O has left that buffer
        pl.when(following >= 0)(lambda: load_q(w, following, 1 - i.side))


# Take turns, and hand buffers back.


def my_turn(w: Worker):
    plgpu.barrier_wait(w.smem.turn.at[w.wg])


def next_turn(w: Worker):
    plgpu.barrier_arrive(w.smem.turn.at[lax.rem(w.wg + 1, jnp.int32(w.schedule.wgs))])


def pass_by(w: Worker, i: Item, low, high):
    """Passes over steps in which only other warpgroups of the block see something."""

    @pl.loop(low, high)
    def _(n):
        keys_of(w).ring.wait(n)
        my_turn(w)
        next_turn(w)
        load_later(w, i, n)
        keys_of(w).ring.release(n)
        values_of(w).ring.wait(n)
        values_of(w).ring.release(n)


# Compute scores and softmax.


def mask(w: Worker, i: Item, x, n, first=False):
    s, smem, ids = w.schedule, w.smem, None
    if s.segmented:
        k_ids = smem.k_ids.at[keys_of(w).ring.slot(n)]
        ids = mosaic.read(smem.q_ids.at[i.at], ROW), mosaic.read(k_ids, COL)
    x = masks.visible(x, s.visits, i.row, (i.stream.base - 1 - n) * s.columns, ids, first)
    if s.segmented:
        plgpu.commit_smem()  # plain loads have read the ids before TMA overwrites them
    return x


def scores(w: Worker, i: Item, x, n, masked, first=False):
    """Step n's Q K^T, with -inf where masked; releases the tile of keys."""
    s = w.schedule
    if s.softcap is not None:
        x, _ = masks.logits(x, s.scale, s.softcap)
    if not s.segmented:
        keys_of(w).ring.release(n)
    if masked is True:
        x = mask(w, i, x, n, first)
    elif masked is not False:
        x = lax.cond(masked, lambda x: mask(w, i, x, n), lambda x: x, x)
    if s.segmented:
        keys_of(w).ring.release(n)
    return x


def unit(s: Schedule) -> float:
    """The factor from `scores` to logits in base 2."""
    return s.scale * LOG2E if s.softcap is None else 1.0


def factor_of(s: Schedule, logit):
    """`unit` for rows whose largest logit is known.

    x factor - m is one multiply-add, which does not round the product, though m was rounded: for
    two equal logits of 2^30 it can give 64, not 0, and exp2(64) overflows float16.  From LARGE on
    the factor is therefore a power of two, so that m is exact; different scores are so far apart
    there that only the largest has a weight.
    """
    return jnp.where(abs(logit) < LARGE, unit(s), 2.0 ** math.ceil(math.log2(unit(s))))


def above(s: Schedule, x, m):
    """The logits of scores x, less their row's m: one multiply-add for each element."""
    return x * along(factor_of(s, m), x.shape, 0) - along(m, x.shape, 0)


def by_thread(f, x):
    """Folds x with f inside each thread: (rows, columns) -> (rows, 8)."""
    return mosaic.folded(f, [x[:, at : at + 8] for at in range(0, x.shape[1], 8)])


def sums(s: Schedule, p):
    """Row sums.  They stay `by_thread` where registers suffice, which is 3% faster."""
    roomy = s.wgs == 2 or s.width <= 32
    return by_thread(jnp.add, p) if weighs_early(s) and roomy else jnp.sum(p, axis=1)


def softmax(s: Schedule, x, m, l, o):
    """Takes in a tile of scores: (P, m, l, O).

    m, l: for each row, the maximum its weights refer to, and their `sums`.  m follows the row's
    largest logit only when it has grown by a factor of 2^8 (FlashAttention-4's lazy rescaling).  In
    nearly all steps of a warp no m moves: threads exchange no maxima, and O stays as it is.
    A row decides for itself, so its bits depend on no other row.
    """
    seen = x if weighs_early(s) else by_thread(jnp.maximum, x)
    state = m, l, o

    def follow(m, l, o):
        top = jnp.max(seen, axis=1)
        rises, logit = top * factor_of(s, m) > m + LEAP, top * unit(s)
        new = jnp.where(rises, top * factor_of(s, logit), m)
        # The new maximum in m's unit or, if m's is a power of two, in the new unit.
        alpha = jnp.exp2(m - jnp.where(rises & (abs(m) < LARGE), logit, new))
        l = l * (along(alpha, l.shape, 0) if l.ndim > 1 else alpha)
        return new, l, o * along(alpha, o.shape, 0)

    def weigh(m, l, o):
        p = jnp.exp2(above(s, x, m))
        l = l + sums(s, p)
        # Without the barrier P would be rounded after the branch.
        return lax.optimization_barrier(p.astype(s.dtype)), m, l, o

    early = weigh(*state) if weighs_early(s) else None
    # A vote on P, two weights a register, takes a third of the instructions; at D = 96 it is late.
    vote = (early[0], 2.0**LEAP) if early and s.width != 96 else (above(s, seen, m), LEAP)
    leaps = mosaic.any_reaches(*vote)
    if early:
        return lax.cond(leaps, lambda *_: weigh(*follow(*state)), lambda *same: same, *early)
    return weigh(*lax.cond(leaps, follow, lambda *same: same, *state))


def first_step(w: Worker, i: Item):
    """P, m and l of the first step, which has no O to add to yet."""
    s, slot = w.schedule, keys_of(w).ring.slot(i.first)
    plgpu.barrier_wait(w.smem.q_bars.at[i.at])
    keys_of(w).ring.wait(i.first)
    my_turn(w)

    def issue(s_acc):
        schedule.over_columns(s_acc, tiles_at(w.smem.qo, i.at), tiles_at(w.smem.k, slot))
        next_turn(w)
        load_later(w, i, i.first)
        return s_acc[...]

    x = pl.run_scoped(issue, plgpu.ACC((ROWS, s.columns), jnp.float32))
    x = scores(w, i, x, i.first, s.masks_first, first=True)
    top = jnp.max(x, axis=1)
    m = jnp.maximum(top * factor_of(s, top * unit(s)), masks.LOWEST)
    p = jnp.exp2(above(s, x, m))
    return p.astype(s.dtype), m, sums(s, p)


def step(w: Worker, i: Item, o_acc, n, carry):
    """Adds step n - 1's P V to O, while it computes the scores and softmax of step n."""
    s = w.schedule
    p, m, l = carry
    # The diagonal may cross two tiles, and segments and the window may begin anywhere.
    crosses = s.visits.diagonal_crosses_tiles or s.masks_last
    masked = ((n < i.unmasked) | (n >= i.edge)) if crosses else False
    slot, before = keys_of(w).ring.slot(n), values_of(w).ring.slot(n - 1)
    keys_of(w).ring.wait(n)
    my_turn(w)

    def issue(s_acc):
        here = steps.unsettled(i, s, n)
        schedule.over_columns(s_acc, tiles_at(w.smem.qo, here), tiles_at(w.smem.k, slot))
        values_of(w).ring.wait(n - 1)
        mosaic.multiply(o_acc, p, tiles_at(w.smem.v, before))
        next_turn(w)
        load_later(w, i, n)
        return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # O += P V still runs

    x = pl.run_scoped(issue, plgpu.ACC((ROWS, s.columns), jnp.float32))
    x = scores(w, i, x, n, masked)
    o = o_acc[...]  # waits for O += P V
    values_of(w).ring.release(n - 1)
    # Compute the softmax while the other warpgroups' matmuls run.
    p, m, l, o = softmax(s, x, m, l, o)
    o_acc[...] = o
    return p, m, l


def accumulate(w: Worker, i: Item, carry, o_acc):
    """-> O before its division, the largest logit and the sum of each row."""
    # Walk over the tiles after the first.
    p, m, l = lax.fori_loop(i.first + 1, i.last, functools.partial(step, w, i, o_acc), carry)
    if w.schedule.segmented:
        plgpu.commit_smem()  # plain loads have read the queries' ids
    # Add the last values.
    mosaic.multiply(o_acc, p, tiles_at(w.smem.v, values_of(w).ring.wait(i.last - 1)))
    o = o_acc[...]
    values_of(w).ring.release(i.last - 1)
    return o, m, l


# The epilogue divides O by the sums, and stores it and the log-sum-exp.


def store(w: Worker, i: Item, o, m, l):
    s, (o_ref, lse_ref) = w.schedule, w.results
    # Computed again, because the loop leaves no registers to keep it.
    row, (batch, head) = s.where(lax.optimization_barrier(i.number))
    row += w.wg * ROWS
    l = jnp.sum(l, axis=1) if l.ndim > 1 else l
    m = jnp.where(abs(m) < LARGE, m, m * (unit(s) / factor_of(s, LARGE)))
    o, lse = masks.finish(o, m, l, blind=masks.some_rows_see_nothing(s.visits.window, s.segmented))
    # O leaves through its queries' buffer (docs/attention.md).
    plgpu.commit_smem()  # all warps have multiplied with the queries
    schedule.store_rows(w, "qo", i.at, o, o_ref, batch, row, head)
    mosaic.store(lse_ref.at[batch, head, pl.ds(row, ROWS)], lse)


def attend(w: Worker, i: Item):
    """One block of queries; returns the step after its last."""
    s = w.schedule

    @pl.when(i.row >= 0)
    def _():
        pass_by(w, i, i.n0, i.first)
        carry = first_step(w, i)
        load_following_q(w, i)
        # O's accumulator begins here: if it began earlier, ptxas would also store the zeros of S.
        acc = plgpu.ACC((ROWS, s.width), jnp.float32)
        o, m, l = pl.run_scoped(functools.partial(accumulate, w, i, carry), acc)
        steps.finish(w, i, lambda: store(w, i, o, m, l))
        if s.masks_last:
            pass_by(w, i, i.last, i.end)

    if s.lead:

        @pl.when(i.row < 0)  # nothing but padding
        def _():
            plgpu.barrier_wait(w.smem.q_bars.at[i.at])
            load_following_q(w, i)
            pass_by(w, i, i.n0, i.end)
            steps.finish(w, i, lambda: None)

    return i.end


def body(w: Worker):
    pl.when(w.wg == 0)(lambda: plgpu.barrier_arrive(w.smem.turn.at[0]))
    steps.work_items(w, begin, attend)


@functools.partial(jax.jit, static_argnames="call")
def forward(q, k, v, segments=None, *, call: Call):
    """(out (B, T, H, D), lse (B, H, schedule.stat_rows(T)) fp32, natural log).

    segments: ids of the queries and of the keys, padded by op.py, or None.
    """
    tile = tiles(sum(schedule.blocks_of(q, k)), q.shape[1], call)
    out_type = schedule.forward_results(q, call)
    return schedule.launch(
        "attention_forward", body, tile, call, dict(q=q, k=k, v=v), segments, out_type, scratch
    )
