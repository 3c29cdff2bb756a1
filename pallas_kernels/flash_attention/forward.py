"""Attention forward on Hopper: one block owns some hundred queries of one head, keys stream by.

The FlashAttention algorithm (Dao et al. 2022; online softmax: Milakov and Gimelshein 2018) in the
arrangement of FlashAttention-3 (Shah et al. 2024).  A block has `wgs` warpgroups with 64 query rows
each; tiles of keys and values come by TMA into rings of `stages` buffers.  Per tile of keys a
warpgroup

    issues  S_i = Q K_i^T  and  O += P_{i-1} V_{i-1}   (wgmma: asynchronous, on the tensor core)
    takes   S_i, and computes P_i = exp2(c S_i - m), the row sums and the rescale of O

so its own O += P V runs under its softmax, and the other warpgroups' matmuls too: `turn` barriers
let the warpgroups issue their matmuls one after the other, which keeps their softmaxes apart.
P never leaves the registers: it is the register operand of the second wgmma.

No warpgroup is there for loads alone: its registers would be missed (`setmaxnreg` would hand them
over, but is ignored where a kernel is compiled relocatably, as jaxlib does from 0.12 on).  While
the tensor core works on S_i, one warp of the first warpgroup sends for the keys of the next step
and one of the last for its values, into buffers that all left a step ago.  Which tiles a block
visits, and which of them need a mask, is in masks.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import (
    Visits,
    logits,
    same_segment,
    segment_spans,
    take,
    visible,
)
from pallas_kernels.flash_attention.schedule import Tiles, share_out, work_items
from pallas_kernels.mosaic import COL, LOG2E, ROW, ROWS, along

LOWEST = -1e30  # the running maximum before any key: finite, as -inf - (-inf) is no number


def tiles(head_dim: int) -> Tiles:
    # H100, B32 T1024 12/12 D64: 0.141 ms, without sections 0.159 (and if not persistent 0.184).
    # B8 T2048 16/16 D96: 0.203 ms, not persistent 0.228.  D128: B4 T4096 32/8 0.805 ms, not
    # persistent 0.856; B1 T16384 16/16 1.512 and 1.537.
    if head_dim <= 64:
        return Tiles(3, 128, 4, True, 16)
    if head_dim <= 128:
        return Tiles(2, 128, 3, True, 16)
    return Tiles(2, 64, 3, False, 16)  # 256 columns of O leave registers for 64 keys


def stat_rows(t: int) -> int:
    """Length of the arrays of row statistics (lse, delta) for t queries.

    A whole number of blocks of every kernel: a copy of a contiguous row is a plain bulk copy, which
    nothing clips at the end of the row.
    """
    return mosaic.cdiv(t, 6 * ROWS) * 6 * ROWS


def some_rows_see_nothing(window: int | None, packed: bool) -> bool:
    """Rows without any key: of segments, or past T, under a window of less than their number."""
    return packed or (window is not None and window < ROWS)


def pad_segments(segments, lengths):
    """Ids of queries and keys as the kernels copy them: int32, whole tiles of every kernel."""
    return tuple(
        mosaic.pad_axis(ids[:, :n].astype(jnp.int32), 1, stat_rows(1))
        for ids, n in zip(segments, lengths, strict=True)
    )


class Heads(NamedTuple):
    """Where the heads of q, k and v stand, if one array (B, T, H + 2 K, D) holds all of them."""

    q: int  # H, which come first
    kv: int  # K, first those of k, then those of v


def heads_of(q, k, heads: Heads | None) -> tuple[int, int, int, int]:
    """(H, K, first head of k, first head of v)."""
    if heads is None:
        return q.shape[2], k.shape[2], 0, 0
    return heads.q, heads.kv, heads.q, heads.q + heads.kv


STATIC = ("lengths", "causal", "scale", "sms", "window", "softcap", "heads", "tile")


@functools.partial(jax.jit, static_argnames=STATIC)
def forward(
    q, k, v, segments=None, *, lengths, causal: bool, scale: float, sms: int,
    window: int | None = None, softcap: float | None = None, heads: Heads | None = None,
    tile: Tiles | None = None,
):  # fmt: skip
    """(out (B, T, H, D), lse (B, H, stat_rows(T)) fp32, natural log).

    lengths: the true T and S; the axes themselves are padded to multiples of 8, because a TMA copy
    into wgmma's layout moves groups of 8 rows.  Rows past T mean nothing.
    segments: ids of the queries (B, T or more) and of the keys (B, S or more), or None.
    heads: q, k and v are the same array, which holds all three.
    """
    b, rows, _, d = q.shape
    h, kv_heads, k_first, v_first = heads_of(q, k, heads)
    t, s_len = lengths
    group, dtype = h // kv_heads, q.dtype
    tile = tile or tiles(d)
    wgs, bkv, stages = tile[:3]
    packed = segments is not None
    if packed and d > 128:  # shared memory has no more, beside the ids
        stages = 2
    # Values are used a step after the keys of their number.
    v_stages = stages if d <= 64 else 2
    k_ahead, v_ahead = 1, int(d <= 64)  # steps before theirs that tiles are sent for
    block = wgs * ROWS
    blocks = mosaic.cdiv(t, block)
    # The block that is not full is the first one, which sees the fewest keys: its first warpgroups
    # have nothing to do.  (At T = 1024 it has 64 of 192 rows; at the end it took 8 of 32 steps.)
    lead = (blocks * block - t) // ROWS * ROWS
    visits = Visits(lengths, causal, window, bkv)
    offset = visits.offset
    ragged = s_len % bkv != 0
    # Steps after the first one may need the mask: the diagonal may cross two tiles, segments may
    # begin and end anywhere, and so may the window.
    mixed = (causal and bool(offset % ROWS or bkv % ROWS)) or window is not None or packed
    factor = (
        scale * LOG2E if softcap is None else 1.0
    )  # softmax in base 2: one multiply-add and one exp2 an element

    first_row = lambda level: (blocks - 1 - level) * block - lead  # the longest causal blocks first
    pair_bytes = 4 * s_len * d // group  # a head's share of K and V
    items = share_out(
        visits, block, first_row, (b, h), tile, sms=sms, pair_bytes=pair_bytes, packed=packed
    )
    where, persistent = items.where, items.persistent
    sides = 2 if persistent else 1  # buffers of rows: of this item and of the next one

    def limits_of(row, batch, spans_ref):  # the tiles that segments leave to a block
        mine = lax.div(row + lead, jnp.int32(block))
        return visits.limits((lambda i: spans_ref[batch, mine, i]) if packed else None)

    def attention_forward(q_ref, k_ref, v_ref, *rest):
        (plan_ref,), rest = take(rest, 1, persistent)
        (q_ids_ref, k_ids_ref, spans_ref), rest = take(rest, 3, packed)
        # O leaves through the buffer of its own queries: another one would not fit beside those of
        # the next queries at D = 128, and at D = 64 it gains less than 1%.
        o_ref, lse_ref, qo_smem, k_smem, v_smem, *rest = rest
        q_bars, k_full, v_full, k_free, v_free, turn, *rest = rest
        (q_ids_smem, k_ids_smem), _ = take(rest, 2, packed)
        wg = lax.axis_index("wg")
        slot_of = lambda n: lax.rem(n, jnp.int32(stages))
        v_slot_of = lambda n: lax.rem(n, jnp.int32(v_stages))

        def load_q(item, side):
            row, (batch, head) = where(item)
            rows = pl.ds(jnp.maximum(row + wg * ROWS, 0), ROWS)
            at = side * wgs + wg
            plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], qo_smem.at[at], q_bars.at[at])
            if packed:
                ids = q_ids_ref.at[batch, rows]
                plgpu.copy_gmem_to_smem(ids, q_ids_smem.at[at], q_bars.at[at])

        def tiles_of(item, n0):
            """(batch, kv head, step n takes tile top - 1 - n, its last step + 1) of an item."""
            row, (batch, head) = where(item)
            low, high = visits.seen(row, row + block, *limits_of(row, batch, spans_ref)[0])
            return batch, head // group, n0 + high, n0 + high - low

        def load(ref, step, own, following, end):
            """Sends for the keys (k_ref) or values of a step, from `end` on of the next item.

            One warp does, of the first warpgroup for keys and of the last for values.  Only it
            waits until all warpgroups have left the buffer.
            """
            first_head, smem, full, free, count = (
                (k_first, k_smem, k_full, k_free, stages)
                if ref is k_ref
                else (v_first, v_smem, v_full, v_free, v_stages)
            )

            def copy(batch, head, top):
                slot, tile = lax.rem(step, jnp.int32(count)), pl.ds((top - 1 - step) * bkv, bkv)
                pl.when(step >= count)(lambda: plgpu.barrier_wait(free.at[slot]))
                source = ref.at[batch, tile, first_head + head]
                plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot])
                if packed and ref is k_ref:
                    ids = k_ids_ref.at[batch, tile]
                    plgpu.copy_gmem_to_smem(ids, k_ids_smem.at[slot], full.at[slot])

            def of_following():
                batch, head, top, stop = tiles_of(following, end)
                pl.when(step < stop)(lambda: copy(batch, head, top))

            def by_warp(warp):
                @pl.when(warp == (ref is v_ref))
                def _():
                    pl.when(step < end)(lambda: copy(*own))
                    if following is not None:
                        pl.when((step >= end) & (following >= 0))(of_following)

            pl.when(wg == (0 if ref is k_ref else wgs - 1))(lambda: plgpu.warp_map(by_warp))

        def load_from(begin, n0, *item):
            """Loads the steps from `begin` on that are to be on their way when step n0 begins."""
            for ref, ahead in ((k_ref, k_ahead), (v_ref, v_ahead)):
                pl.loop(begin, n0 + ahead)(lambda n, ref=ref: load(ref, n, *item))

        def begin(item):
            load_q(item, 0)
            *own, end = tiles_of(item, 0)
            load_from(0, 0, own, None, end)

        def my_turn():
            if wgs > 1:
                plgpu.barrier_wait(turn.at[wg])

        def next_turn():
            if wgs > 1:
                plgpu.barrier_arrive(turn.at[lax.rem(wg + 1, jnp.int32(wgs))])

        def attend(item, following, side, n0):
            """One block of queries, with steps n0, n0 + 1, ... of this kernel block."""
            at = side * wgs + wg  # this item's queries
            row, (batch, head) = where(item)
            q0 = row + wg * ROWS
            limits, same = limits_of(row, batch, spans_ref)
            low, high = visits.seen(row, row + block, *limits)
            top, end = n0 + high, n0 + high - low
            mine = visits.seen(q0, q0 + ROWS, *limits)
            whole = visits.whole(q0, q0 + ROWS, *same)
            # This warpgroup's steps (the others may see further), those without a mask inside.
            first, last = top - mine[1], top - mine[0]
            unmasked = jnp.clip(top - whole[1], first + 1, last)
            edge = last
            if window is not None or packed:
                edge = jnp.clip(top - whole[0], unmasked, last)

            item_and_next = (batch, head // group, top), following, end
            if following is not None:  # where this item has few steps
                load_from(end, n0, *item_and_next)

            def load_following():
                if following is not None:
                    plgpu.wait_smem_to_gmem(0)  # the O before has left that buffer
                    pl.when(following >= 0)(lambda: load_q(following, 1 - side))

            def load_later(n):  # under the matmuls of step n: all have left the step before
                load(k_ref, n + k_ahead, *item_and_next)
                load(v_ref, n + v_ahead, *item_and_next)

            def free_keys(n):
                plgpu.barrier_arrive(k_free.at[slot_of(n)])

            def free_values(n):
                plgpu.barrier_arrive(v_free.at[v_slot_of(n)])

            def pass_by(lo, hi):  # steps in which the block's other warpgroups work
                @pl.loop(lo, hi)
                def _(n):
                    plgpu.barrier_wait(k_full.at[slot_of(n)])
                    my_turn()
                    next_turn()
                    load_later(n)
                    free_keys(n)
                    plgpu.barrier_wait(v_full.at[v_slot_of(n)])
                    free_values(n)

            def mask(s, n):
                if packed:
                    stat = functools.partial(plgpu.load, optimized=False)
                    q_ids = stat(q_ids_smem.at[at], layout=ROW)
                    k_ids = stat(k_ids_smem.at[slot_of(n)], layout=COL)
                    s = same_segment(s, q_ids, k_ids)
                    plgpu.commit_smem()  # read with plain loads: done before TMA writes there
                k0, keys = (top - 1 - n) * bkv, s_len if ragged else None
                return visible(s, q0 + offset, k0, causal=causal, window=window, keys=keys)

            def scores(s, n, masked):
                """Of step n in base 2 before the factor; the tile of keys is free then."""
                if softcap is not None:
                    s = logits(s, scale, softcap)[0]
                if not packed:
                    free_keys(n)
                if masked is True:
                    s = mask(s, n)
                elif masked is not False:
                    s = lax.cond(masked, lambda s: mask(s, n), lambda s: s, s)
                if packed:
                    free_keys(n)
                return s

            def softmax(s, m, l):
                m_new = jnp.maximum(m, jnp.max(s, axis=1) * factor)
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s * factor - along(m_new, s.shape, 0))
                return p.astype(dtype), m_new, l * alpha + jnp.sum(p, axis=1), alpha

            def first_scores(s_acc):
                plgpu.wgmma(s_acc, qo_smem.at[at], k_smem.at[slot_of(first)].transpose((1, 0)))
                next_turn()
                load_later(first)
                return s_acc[...]

            def step(o_acc, n, carry):
                p, m, l = carry
                masked = ((n < unmasked) | (n >= edge)) if mixed else False
                slot, before = slot_of(n), v_slot_of(n - 1)
                plgpu.barrier_wait(k_full.at[slot])
                my_turn()

                def issue(s_acc):
                    here = jnp.minimum(at, n + sides * wgs)
                    plgpu.wgmma(s_acc, qo_smem.at[here], k_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(v_full.at[before])
                    plgpu.wgmma(o_acc, p, v_smem.at[before])
                    next_turn()
                    load_later(n)
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # O += P V still runs

                s = pl.run_scoped(issue, plgpu.ACC((ROWS, bkv), jnp.float32))
                p, m, l, alpha = softmax(scores(s, n, masked), m, l)
                o = o_acc[...]  # waits for O += P V
                free_values(n - 1)
                o_acc[...] = o * along(alpha, o.shape, 0)
                return p, m, l

            def all_steps_of(o_acc):
                plgpu.barrier_wait(q_bars.at[at])
                plgpu.barrier_wait(k_full.at[slot_of(first)])
                my_turn()
                s = pl.run_scoped(first_scores, plgpu.ACC((ROWS, bkv), jnp.float32))
                row = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ROW)
                begin_masked = causal or ragged or packed
                carry = softmax(scores(s, first, begin_masked), row(LOWEST), row(0))[:3]
                load_following()
                body = functools.partial(step, o_acc)
                p, m, l = lax.fori_loop(first + 1, last, body, carry)
                if packed:
                    plgpu.commit_smem()  # the queries' ids were read
                slot = v_slot_of(last - 1)
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.wgmma(o_acc, p, v_smem.at[slot])
                o = o_acc[...]
                free_values(last - 1)
                if window is not None:
                    pass_by(last, end)
                return o, m, l

            @pl.when(q0 >= 0)
            def _():
                pass_by(n0, first)
                o, m, l = pl.run_scoped(all_steps_of, plgpu.ACC((ROWS, d), jnp.float32))
                inverse = 1 / l
                if some_rows_see_nothing(window, packed):  # zeros; lse = m + log 0 = -inf
                    inverse = jnp.where(l > 0, inverse, 0)
                plgpu.commit_smem()  # all warps have multiplied with the queries
                qo_smem[at] = (o * along(inverse, o.shape, 0)).astype(dtype)
                plgpu.commit_smem()
                rows = pl.ds(q0, ROWS)
                plgpu.copy_smem_to_gmem(qo_smem.at[at], o_ref.at[batch, rows, head])
                mosaic.store(lse_ref.at[batch, head, rows], m * (1 / LOG2E) + jnp.log(l))

            if lead:

                @pl.when(q0 < 0)  # nothing but padding
                def _():
                    plgpu.barrier_wait(q_bars.at[at])
                    load_following()
                    pass_by(n0, end)

            return end

        if wgs > 1:
            pl.when(wg == 0)(lambda: plgpu.barrier_arrive(turn.at[0]))
        work_items(plan_ref, begin, attend)
        plgpu.wait_smem_to_gmem(0)

    args = (items.table,) if persistent else ()
    if packed:
        q_ids, k_ids = pad_segments(segments, lengths)
        args += (q_ids, k_ids, segment_spans(q_ids, k_ids, visits, block, lead))
    smem = lambda n, rows: plgpu.SMEM((n, rows, d), dtype, transforms=mosaic.wgmma_tiles(d, dtype))
    ring = functools.partial(plgpu.Barrier, num_barriers=stages)
    ids_smem = [plgpu.SMEM(x, jnp.int32) for x in ((sides * wgs, ROWS), (stages, bkv))]
    return mosaic.kernel(
        attention_forward,
        out_type=(
            jax.ShapeDtypeStruct((b, rows, h, d), dtype),
            jax.ShapeDtypeStruct((b, h, stat_rows(t)), jnp.float32),
        ),
        scratch_types=[
            smem(sides * wgs, ROWS),
            smem(stages, bkv),
            smem(v_stages, bkv),
            plgpu.Barrier(num_arrivals=1 + packed, num_barriers=sides * wgs),
            ring(num_arrivals=1 + packed),
            plgpu.Barrier(num_barriers=v_stages),
            ring(num_arrivals=wgs),
            plgpu.Barrier(num_arrivals=wgs, num_barriers=v_stages),
            plgpu.Barrier(num_barriers=wgs),
            *ids_smem * packed,
        ],
        grid=(items.grid,),
        grid_names=("block",),
        num_threads=wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(q, k, v, *args)
