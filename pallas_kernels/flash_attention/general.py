"""Attention without TMA and wgmma, for every NVIDIA GPU since Ampere: what its kernels share.

A block is one warpgroup of 128 threads.  It owns 64 or 128 rows (of queries; in the dK/dV kernel of
keys) of one head, and the tiles of columns that they see stream by through shared memory, from which
every matmul takes its operands (ampere.py).  Two blocks run on a processor at a time where shared
memory allows it: one's softmax runs under the other's matmuls.  The arrangement is that of
FlashAttention-2 (Dao 2023); what a block sees (masks.py) and which block works on what (schedule.py)
are the same as on Hopper.
"""

from pallas_kernels import mosaic
from pallas_kernels.flash_attention.masks import Visits
from pallas_kernels.flash_attention.schedule import Call, Heads, Schedule, Tiles, share_out

WIDTHS = (32, 64, 96, 128, 256)  # of tiles in shared memory; the columns past D are zeros
SECTION = 16  # MiB of what streams, of the heads that are worked on at a time


def width_of(head_dim: int) -> int:
    return next(width for width in WIDTHS if width >= head_dim)


def schedule(
    q, k, rows: int, step: int, call: Call, heads: Heads | None, *, packed: bool, by_keys=False
) -> Schedule:
    """The Schedule of a kernel whose blocks own `rows` rows and take `step` columns at a time.

    heads: q, k and v are the same array, which holds all three.  packed: there are segments.
    by_keys: a block owns keys, not queries.
    """
    b, _, h, d = q.shape
    kv_heads, k_first, v_first = k.shape[2], 0, 0
    if heads is not None:
        h, kv_heads, k_first, v_first = *heads, heads.q, heads.q + heads.kv
    (t, s), group, tile = call.lengths, h // kv_heads, Tiles(1, step, 1, False, SECTION)
    visits = Visits(call.lengths, call.causal, call.window, step, by_keys)
    if by_keys:
        first_row = lambda level: level * rows  # most queries see the first keys
        pairs, pair_bytes = (b, kv_heads), 4 * t * d * group  # Q and dO of a kv head
    else:
        blocks = mosaic.cdiv(t, rows)
        first_row = lambda level: (blocks - 1 - level) * rows  # most keys first
        pairs, pair_bytes = (b, h), 4 * s * d // group  # a head's share of K and V
    items = share_out(
        visits, rows, first_row, pairs, tile, sms=call.sms, pair_bytes=pair_bytes, packed=packed
    )
    return Schedule(
        visits, items, tile, rows, 0, q.dtype, width_of(d), group, k_first, v_first, call.scale,
        call.softcap, packed,
    )  # fmt: skip
