"""Attention without TMA and wgmma, for every NVIDIA GPU since Ampere: forward, dQ, dK and dV.

The formulas are in op.py, the arrangement is FlashAttention-2's (Dao 2023).  A block is one
warpgroup of 128 threads.  It owns 64 or 128 rows (of queries; in the dK/dV kernel of keys) of one
head.  The tiles of columns that these rows see stream through shared memory, from which every
matmul takes its operands (ampere.py).  Each operand has one buffer, which cp.async fills during
the other operand's matmul:

    forward, from the diagonal downwards:
    wait for K_n     V_n on its way      S = Q K_n^T
    wait for V_n     K_n+1 on its way    P = exp2(c S - m), the sums, O = alpha O + P V_n

    dQ, from the diagonal downwards:
    wait for V_n     K_n on its way      dP = dO V_n^T
    wait for K_n     V_n+1 on its way    S = Q K_n^T, P, dS, dQ += dS K_n
    meet             K_n+1 on its way

    dK and dV, transposed, so that P^T and dS^T lie where mma wants its left operand:
    wait for dO_n    Q_n on its way      dP^T = V dO_n^T
    wait for Q_n                         S^T = K Q_n^T, P^T, dV += P^T dO_n
    meet             dO_n+1 on its way   dS^T, dK += dS^T Q_n
    meet             Q_n+1 on its way

All threads also meet in `wait`, so nobody still reads the buffer that is filled next.  P and dS
stay in registers.  An SM runs two blocks if shared memory allows it: the softmax of one overlaps
the matmuls of the other.  Every block has one item; the hardware hands the items out.

A thread's 255 registers and 99 KB of shared memory limit the tiles.  Tiles of 64 rows read an
operand from shared memory twice as often as tiles of 128.  On an H100 the largest tiles are
fastest, though some spill up to 64 bytes (docs/attention-tiles.md); A100 and H100 take them.
Elsewhere ("tight") ptxas spills more, and RTX has tensor cores half as fast, which 64 rows keep
busy; nobody has timed the tight tiles.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.flash_attention import masks, schedule
from pallas_kernels.flash_attention.schedule import Call, Schedule, Tiles, Worker
from pallas_kernels.mosaic import COL, LOG2E, ROW, WGMMA, along

_TILES = {  # kernel, tight: (rows of a block, columns of a step) for D up to 64, 128 and 256
    ("forward", False): ((128, 64), (128, 64), (64, 32)),  # up to 128 two blocks fit 99 KB
    ("forward", True): ((128, 64), (64, 64), (64, 32)),
    ("backward_dq", False): ((128, 64), (128, 32), (64, 32)),
    ("backward_dq", True): ((128, 32), (64, 32), (64, 32)),
    ("backward_dkv", False): ((128, 32), (64, 64), (64, 16)),
    ("backward_dkv", True): ((64, 32), (64, 32), (64, 16)),
}


def tiles(kernel: str, head_dim: int, call: Call) -> Tiles:
    # In the backward pass segments and softcap need registers.
    more = kernel != "forward" and (call.segmented or call.softcap is not None)
    block, step = _TILES[kernel, mosaic.is_tight() or more][(head_dim > 64) + (head_dim > 128)]
    return Tiles(1, step, 1, False, 16, block)


def scratch(kernel: str, s: Schedule) -> dict:
    """Shared memory for tiles of a block's rows and of a step's columns, and for statistics."""
    rows, columns, stats = {
        "forward": ("q", "k v", ""),
        "backward_dq": ("q do", "k v", "lse2 delta"),  # of a block
        "backward_dkv": ("k v", "q do", "lse delta"),  # of a step
    }[kernel]
    sizes = dict.fromkeys(rows.split(), s.block) | dict.fromkeys(columns.split(), s.columns)
    buffers = {name: mosaic.tiled(n, s.width, dtype=s.dtype) for name, n in sizes.items()}
    stat = plgpu.SMEM((s.columns if s.visits.by_keys else s.block,), jnp.float32)
    return buffers | dict.fromkeys(stats.split(), stat)


def launch(kernel: str, body, call: Call, inputs: dict, segments, out_type):
    tile, memory = tiles(kernel, inputs["q"].shape[-1], call), functools.partial(scratch, kernel)
    return schedule.launch(
        f"general_attention_{kernel}", body, tile, call, inputs, segments, out_type, memory,
        by_keys=kernel == "backward_dkv",
    )  # fmt: skip


class Block(NamedTuple):
    """What a block works on; tiles of columns are counted from the sequence's start."""

    w: Worker
    batch: Any
    head: Any  # the query head; in the dK/dV kernel the kv head
    row: Any  # the first one
    low: Any  # the first tile that it sees
    high: Any  # the tile after the last that it sees
    whole: tuple[Any, Any]  # first and end of the tiles fully visible to all its rows

    @property
    def rows(self):
        return pl.ds(self.row, self.w.schedule.block)


def block_of(w: Worker) -> Block:
    s = w.schedule
    row, (batch, head) = s.where(lax.axis_index("block"))
    (low, high), whole = s.ranges(row, batch, w.inputs.spans)
    return Block(w, batch, head, row, low, high, whole)


def load(b: Block, name: str, head, first, buffer: str | None = None):
    """Starts to copy rows first, first + 1, ... of an input to its buffer."""
    source, target = getattr(b.w.inputs, name), getattr(b.w.smem, buffer or name)
    end = b.w.schedule.visits.lengths[name in ("k", "v")]
    ampere.load_rows(source, target, b.batch, head, first, end)


def load_keys(b: Block, name: str, tile):
    """Starts to copy a tile of k or v for a block of queries."""
    s = b.w.schedule
    first_head = s.k_first if name == "k" else s.v_first
    load(b, name, first_head + b.head // s.group, tile * s.columns)


def scores(b: Block, tile, x):
    """(logits in base 2, -inf where masked, d logits / d (scale S)) of a tile's scores."""
    s = b.w.schedule
    x, slope = masks.logits(x, s.scale, s.softcap)
    return mask(b, tile, x), slope


def mask(b: Block, tile, x):
    """Scores of a tile, with -inf where a query may not see a key; x's rows are the Schedule's."""
    s, visits, inputs = b.w.schedule, b.w.schedule.visits, b.w.inputs
    if not s.masks_first:
        return x
    crosses = (tile < b.whole[0]) | (tile >= b.whole[1])
    if visits.ragged:
        crosses |= tile == visits.tiles - 1

    def masked(x):
        column, ids = tile * s.columns, None
        if s.segmented:
            ids = inputs.q_ids, inputs.k_ids
            rows, columns = reversed(ids) if visits.by_keys else ids
            mine = mosaic.read(rows.at[b.batch, b.rows], ROW)
            ids = mine, mosaic.read(columns.at[b.batch, pl.ds(column, s.columns)], COL)
        return masks.visible(x, visits, b.row, column, ids)

    return lax.cond(crosses, masked, lambda x: x, x)


# ---- forward ---------------------------------------------------------------------------------


def add_tile(smem, carry, load_v, load_next_k, weigh):
    """Adds a tile of keys to O, to the largest logit and to the sum of each row.

    weigh(scores, m, l): `online_softmax` of the tile.
    """
    o, m, l = carry
    ampere.wait()  # for K
    load_v()
    x = ampere.rows_times_rows(smem.q, smem.k)
    ampere.wait()  # for V
    load_next_k()
    p, m, l, alpha = weigh(x, m, l)
    return ampere.times_rows(o * along(alpha, o.shape, 0), p, smem.v), m, l


def forward_step(b: Block, n, carry):
    tile = b.high - 1 - n
    weigh = lambda x, m, l: masks.online_softmax(scores(b, tile, x)[0], m, l)
    load_next_k = lambda: pl.when(tile > b.low)(lambda: load_keys(b, "k", tile - 1))
    return add_tile(b.w.smem, carry, lambda: load_keys(b, "v", tile), load_next_k, weigh)


def forward_body(w: Worker):
    s, smem, (o_ref, lse_ref), b = w.schedule, w.smem, w.results, block_of(w)
    load(b, "q", b.head, b.row)
    load_keys(b, "k", b.high - 1)
    nothing = mosaic.zeros((s.block, s.width), WGMMA), *masks.no_keys(s.block)
    o, m, l = lax.fori_loop(0, b.high - b.low, functools.partial(forward_step, b), nothing)
    # Divide O by the sums, and store it and the log-sum-exp.
    blind = masks.some_rows_see_nothing(s.visits.window, s.segmented, s.block)
    o, lse = masks.finish(o, m, l, blind=blind)
    ampere.meet()  # all threads have multiplied by Q, whose buffer O takes
    smem.q[...] = o.astype(s.dtype)
    ampere.meet()
    ampere.store_rows(smem.q, o_ref, b.batch, b.head, b.row, s.visits.lengths[0])
    mosaic.store(lse_ref.at[b.batch, b.head, b.rows], lse)


@functools.partial(jax.jit, static_argnames="call")
def forward(q, k, v, segments=None, *, call: Call):
    """Like forward.forward."""
    inputs, out_type = dict(q=q, k=k, v=v), schedule.forward_results(q, call)
    return launch("forward", forward_body, call, inputs, segments, out_type)


# ---- dQ and delta ----------------------------------------------------------------------------


def dq_begin(b: Block, delta_ref):
    """Loads what comes first; computes delta = rowsum(dO * O) - dlse, and stores it."""
    inputs, smem = b.w.inputs, b.w.smem
    load(b, "o", b.head, b.row, buffer="q")  # only delta needs it
    load(b, "do", b.head, b.row)
    of_rows = lambda ref: mosaic.read(ref.at[b.batch, b.head, b.rows], ROW)
    mosaic.store(smem.lse2, of_rows(inputs.lse) * LOG2E)
    ampere.wait()
    o, do = (plgpu.load(x, layout=WGMMA).astype(jnp.float32) for x in (smem.q, smem.do))
    delta = jnp.sum(do * o, axis=1)
    if inputs.dlse is not None:
        delta = delta - of_rows(inputs.dlse)
    mosaic.store(delta_ref.at[b.batch, b.head, b.rows], delta)
    mosaic.store(smem.delta, delta)
    ampere.meet()  # all have read O
    load(b, "q", b.head, b.row)
    load_keys(b, "v", b.high - 1)
    load_keys(b, "k", b.high - 1)


def dq_step(b: Block, n, dq):
    """Adds dS K of the n-th tile of keys to dQ."""
    smem, tile = b.w.smem, b.high - 1 - n
    ampere.wait(1)  # for V
    dp = ampere.rows_times_rows(smem.do, smem.v)
    ampere.wait()  # for K
    pl.when(tile > b.low)(lambda: load_keys(b, "v", tile - 1))
    x, slope = scores(b, tile, ampere.rows_times_rows(smem.q, smem.k))
    of_rows = lambda ref: along(mosaic.read(ref, ROW), x.shape, 0)
    p = jnp.exp2(x - of_rows(smem.lse2))
    ds = masks.d_scores(p, dp - of_rows(smem.delta), slope)
    dq = ampere.times_rows(dq, ds, smem.k)
    ampere.meet()  # all have read K
    pl.when(tile > b.low)(lambda: load_keys(b, "k", tile - 1))
    return dq


def dq_body(w: Worker):
    s, smem, (dq_ref, delta_ref), b = w.schedule, w.smem, w.results, block_of(w)
    dq_begin(b, delta_ref)
    nothing = mosaic.zeros((s.block, s.width), WGMMA)
    dq = lax.fori_loop(0, b.high - b.low, functools.partial(dq_step, b), nothing)
    smem.q[...] = (dq * s.scale).astype(s.dtype)
    ampere.meet()
    ampere.store_rows(smem.q, dq_ref, b.batch, b.head, b.row, s.visits.lengths[0])


@functools.partial(jax.jit, static_argnames="call")
def backward_dq(q, k, v, out, lse, dout, dlse, segments, *, call: Call):
    """(dq like q, lse, delta); if q, k and v are one array, dq's other heads are undefined.

    The last two are (B, H, schedule.stat_rows(T)) fp32, as the dK/dV kernel reads them.
    """
    inputs = dict(q=q, k=k, v=v, o=out, lse=lse, do=dout, dlse=dlse)
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, lse)]
    dq, delta = launch("backward_dq", dq_body, call, inputs, segments, out_type)
    return dq, lse, delta


# ---- dK and dV -------------------------------------------------------------------------------
#
# Sums stay inside the block: it streams the queries of its group's heads, one after the other.
# At a head dimension of 256 registers hold only one of dK and dV.  The kernel then runs twice and
# computes S^T each time: five matmuls instead of four.


def load_queries(b: Block, name: str, step):
    """Starts to copy a tile of q or do, with q the statistics of its rows; step: (head, tile)."""
    (head, tile), s, inputs, smem = step, b.w.schedule, b.w.inputs, b.w.smem
    if name == "q":
        ampere.load_line(inputs.lse, smem.lse, b.batch, head, tile * s.columns)
        ampere.load_line(inputs.delta, smem.delta, b.batch, head, tile * s.columns)
    load(b, name, head, tile * s.columns)


def after(b: Block, step):
    """The step after (head, tile)."""
    head, tile = step
    if b.w.schedule.group == 1:
        return head, tile + 1
    same = tile + 1 < b.high
    return jnp.where(same, head, head + 1), jnp.where(same, tile + 1, b.low)


def dkv_step(b: Block, last, n, carry):
    """Adds P^T dO of the n-th step to dV and dS^T Q to dK, if `sums` has them."""
    s, smem, (i, sums) = b.w.schedule, b.w.smem, carry
    later = after(b, i)
    of_columns = lambda ref: along(mosaic.read(ref, COL), (s.block, s.columns), 1)
    ampere.wait(1)  # for dO
    dp = ampere.rows_times_rows(smem.v, smem.do) if "dk" in sums else None
    ampere.wait()  # for Q
    x, slope = scores(b, i[1], ampere.rows_times_rows(smem.k, smem.q))
    p = jnp.exp2(x - of_columns(smem.lse) * LOG2E)
    if "dv" in sums:
        sums |= dict(dv=ampere.times_rows(sums["dv"], p, smem.do))
    ampere.meet()  # all have read dO
    pl.when(n < last)(lambda: load_queries(b, "do", later))
    if dp is not None:
        ds = masks.d_scores(p, dp - of_columns(smem.delta), slope)
        sums |= dict(dk=ampere.times_rows(sums["dk"], ds, smem.q))
    ampere.meet()  # all have read Q
    pl.when(n < last)(lambda: load_queries(b, "q", later))
    return later, sums


def dkv_body(wanted: tuple[str, ...], w: Worker):
    s, smem, b = w.schedule, w.smem, block_of(w)
    nothing = dict.fromkeys(wanted, mosaic.zeros((s.block, s.width), WGMMA))
    steps = s.group * (b.high - b.low)
    step = functools.partial(dkv_step, b, steps - 1)
    load(b, "k", s.k_first + b.head, b.row)
    load(b, "v", s.v_first + b.head, b.row)
    first = b.head * s.group, b.low
    load_queries(b, "do", first)
    load_queries(b, "q", first)
    _, sums = lax.fori_loop(0, steps, step, (first, nothing))
    # Scale dK, and store both through the buffers of K and V.
    through = dict(dk=(smem.k, s.k_first, s.scale), dv=(smem.v, s.v_first, 1))
    for name in wanted:
        buffer, _, scale = through[name]
        buffer[...] = (sums[name] * scale).astype(s.dtype)
    ampere.meet()
    for name, ref in zip(wanted, w.results or (w.inputs.joint,) * 2, strict=False):
        buffer, first_head, _ = through[name]
        ampere.store_rows(buffer, ref, b.batch, first_head + b.head, b.row, s.visits.lengths[1])


@functools.partial(jax.jit, static_argnames="call")
def backward_dkv(q, k, v, lse, dout, delta, segments, given=None, *, call: Call):
    """As on Hopper: (dk, dv), or nothing with references `given`."""
    inputs = dict(q=q, k=k, v=v, lse=lse, do=dout, delta=delta, joint=given and given[0])
    like = jax.ShapeDtypeStruct(k.shape, q.dtype)

    def run(*wanted):
        out_type = () if call.heads else (like,) * len(wanted)
        body = functools.partial(dkv_body, wanted)
        return launch("backward_dkv", body, call, inputs, segments, out_type)

    return run("dk", "dv") if q.shape[-1] <= 128 else (*run("dk"), *run("dv"))
