"""What a block of keys of the dK/dV kernel keeps and streams, and when it hands buffers back.

The block's own K and V are loaded once an item; tiles of Q and dO with their statistics pass
through the rings of the picture in backward_dkv.py, head after head of the group, and for a
persistent block item after item.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import schedule
from pallas_kernels.flash_attention.schedule import Item, Operand, Schedule, Worker
from pallas_kernels.mosaic import ROWS
from pallas_kernels.pipeline import Ring


def pairs_up(s: Schedule) -> bool:
    """Whether two warpgroups work on the same 64 keys."""
    return s.wgs > s.sets


def ahead(s: Schedule) -> int:
    """How many steps early tiles are loaded.

    A slot to spare, where there is one, lets a warpgroup run a step ahead of the other.
    """
    return s.stages - (2 if s.columns > ROWS or s.stages > 3 else 1)


def runs_on(s: Schedule) -> bool:
    """Whether a step adds to dV and dK under the next: P and dS have registers to wait in.

    2.92 instead of 3.16 ms at T = 16384, D = 128 (H200); 4 bytes would spill without a causal mask.

    A slot then stays taken for a step more.  In halves a step loads before it frees one, so its
    ring needs two slots more than `ahead`: with fewer, the warp that loads waits for its own
    warpgroup.
    """
    return s.columns > ROWS or pairs_up(s) or (s.stages > 3 and s.visits.causal)


def scratch(s: Schedule) -> dict:
    """Shared memory and barriers of a block, see the picture."""
    ring = functools.partial(plgpu.Barrier, num_barriers=s.stages)
    own, stat = s.sides * s.sets, plgpu.SMEM((s.stages, s.columns), jnp.float32)
    buffers = dict(
        k=s.buffer(own, ROWS),  # of each 64 keys of the block, like v and their barriers
        v=s.buffer(own, ROWS),
        q=s.buffer(s.stages, s.columns),  # of each slot, like do and the statistics
        do=s.buffer(s.stages, s.columns),
        minus_lse=stat,
        minus_delta=stat,
        k_bars=plgpu.Barrier(num_arrivals=1 + s.packed, num_barriers=own),
        v_bars=plgpu.Barrier(num_barriers=own),
        q_full=ring(num_arrivals=2 + s.packed),
        do_full=ring(num_arrivals=2),
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
    """Q and dO.  The last warpgroup loads Q and the first one dO; of a pair the last loads both."""
    s, inputs, smem, last = w.schedule, w.inputs, w.smem, w.schedule.wgs - 1
    ring = functools.partial(Ring, s.stages, free=smem.free)
    q, do = ring(smem.q_full, loader=last), ring(smem.do_full, loader=last if pairs_up(s) else 0)
    ids = (inputs.q_ids, smem.q_ids) if s.packed else None
    lse, delta = (inputs.minus_lse, smem.minus_lse), (inputs.minus_delta, smem.minus_delta)
    return (
        Operand(q, inputs.q, 0, smem.q, 0, ahead(s), ids, lse),
        Operand(do, inputs.do, 0, smem.do, 1, ahead(s), None, delta),
    )


class Step(NamedTuple):
    """One step: a tile of queries of one head."""

    n: Any  # counted over all items of the block
    g: Any  # the head of the group
    r: Any  # the tile of the head; past the last one come the next head's


def step_of(i: Item, g, r) -> Step:
    return Step(i.n0 + g * i.end + r, g, r)


# Load: K and V of a warpgroup, and the tiles of Q and dO.


def load_kv(w: Worker, item, side=0):
    s, smem = w.schedule, w.smem
    key0, (batch, kv_head) = s.where(item)
    rows, at = pl.ds(key0 + schedule.set_of(w) * ROWS, ROWS), side * s.sets + schedule.set_of(w)
    k = w.inputs.k.at[batch, rows, s.k_first + kv_head]
    v = w.inputs.v.at[batch, rows, s.v_first + kv_head]
    plgpu.copy_gmem_to_smem(k, smem.k.at[at], smem.k_bars.at[at])
    plgpu.copy_gmem_to_smem(v, smem.v.at[at], smem.v_bars.at[at])
    if s.packed:
        ids = w.inputs.k_ids.at[batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.k_ids.at[at], smem.k_bars.at[at])


def send(w: Worker, x: Operand, n, g, r, stream):
    """Starts to copy tile r of head g for step n, once all warpgroups have left its buffer."""
    s = w.schedule
    if s.group > 1:  # no division, which would take longer than the copies
        ends = [heads * stream.end for heads in range(1, ahead(s) + 1)]
        over = sum((r >= end).astype(jnp.int32) for end in ends)
        g, r = g + over, r - over * stream.end
    at = pl.ds((stream.base + r) * s.columns, s.columns)
    x.ring.claim(n)
    x.send(n, stream.batch, stream.head + g, at)


def load(w: Worker, step: Step, nth, stream):
    """Loads the tiles of a step, the nth of its item.

    It may lie up to `ahead` tiles past its head's last one; the tiles of the next item follow the
    last head's.  Two warps load, one Q and one dO; only they wait until all warpgroups have left
    the buffers.
    """

    def one(x):
        past = nth - w.schedule.group * stream.end

        def send_following():
            coming = schedule.stream_of(w, stream.following)
            in_it = past < w.schedule.group * coming.end
            pl.when(in_it)(lambda: send(w, x, step.n, 0, past, coming))

        pl.when(past < 0)(lambda: send(w, x, *step, stream))
        if stream.following is not None:
            pl.when((past >= 0) & (stream.following >= 0))(send_following)

    def by_warp(warp):
        for x in operands(w):
            pl.when((warp == x.warp) & (w.wg == x.ring.loader))(lambda x=x: one(x))

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
    stream = schedule.stream_of(w, item)
    pl.loop(0, ahead(w.schedule))(lambda n: load(w, Step(n, 0, n), n, stream))


# Hand buffers back.


def release(w: Worker, n):
    """This warpgroup has read the tiles of step n."""
    plgpu.commit_smem()  # plain loads have read the statistics
    operands(w)[0].ring.release(n)


def pass_by(w: Worker, i: Item, g, low, high):
    """Steps in which other warpgroups of the block work, and this one sees nothing."""

    @pl.loop(low, high)
    def _(r):
        n, (q, do) = step_of(i, g, r).n, operands(w)
        load_later(w, i, g, r)
        q.ring.wait(n)
        do.ring.wait(n)
        q.ring.release(n)
