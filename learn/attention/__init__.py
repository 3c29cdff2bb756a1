"""The ladder of causal attention's forward pass (README.md)."""

import jax.numpy as jnp

from learn.ladder import COPY, MATMUL, SMS, Ladder, normal
from pallas_kernels.flash_attention.op import attention_reference as reference


def inputs(sizes):
    shape = tuple(sizes[axis] for axis in ("batch", "time", "heads", "width"))
    return tuple(normal(i, shape, jnp.bfloat16) for i in range(3))


def _bytes(sizes):
    return 4 * 2 * sizes["batch"] * sizes["time"] * sizes["heads"] * sizes["width"]


def _scores(sizes):
    """All scores of all heads; half of them are seen."""
    return sizes["batch"] * sizes["heads"] * sizes["time"] ** 2


def _flops(sizes):
    return 2 * 2 * sizes["width"] * _scores(sizes) / 2


def seen(sizes, tile):
    """Tiles of tile x tile that the blocks visit."""
    rows = sizes["time"] // tile
    return sizes["batch"] * sizes["heads"] * rows * (rows + 1) / 2


def _formula(sizes):
    return _scores(sizes) * (4 / 2 + 4 + 2 + 2 / 2) / COPY


def _one_after_the_other(blocks, microseconds):
    """Blocks on an SM, each with 64 x 64 scores in so many microseconds."""
    return lambda sizes: seen(sizes, 64) / (blocks * SMS) * microseconds


def _matmuls(gap):
    """The matmuls, with so many microseconds for each 128 x 128 scores when nobody multiplies."""

    def counted(sizes):
        tiles = seen(sizes, 128)
        return tiles * 128 * 128 * 4 * sizes["width"] / MATMUL + tiles / SMS * gap

    return counted


def scores_stay(book, q, k, v):
    """Nothing but O is written to global memory."""
    written = [e for e in book.events if (e.kind, e.space) == ("store", "global")]
    written += [e for e in book.events if e.kind == "copy out"]
    if (total := sum(e.bytes for e in written)) > q.nbytes:
        return f"{total} bytes are written, of an O of {q.nbytes} bytes"


def p_stays(book, q, k, v):
    """No thread writes to shared memory, and wgmma multiplies."""
    through = {e.buffer for e in book.events if (e.kind, e.space) == ("store", "shared")}
    if through:
        return f"{', '.join(sorted(through))} is written by threads"
    done = sum(e.count for e in book.events if e.kind == "wgmma")
    wanted = q.size * q.shape[1]  # half of the scores, twice
    if done < wanted:
        return f"wgmma does {done} multiply-adds, not {wanted} or more"
    return scores_stay(book, q, k, v)


def shared_by_128(book, q, k, v):
    """A tile of keys comes once for 128 queries."""
    b, t, h, d = q.shape
    copied = sum(e.bytes for e in book.events if e.kind == "copy in")
    rows = t // 128
    most = q.nbytes + b * h * rows * (rows + 1) // 2 * 2 * 128 * d * q.itemsize
    if copied > most:
        return f"{copied} bytes are copied in where {most} would do"
    return p_stays(book, q, k, v)


def softmax_under_a_wgmma(book, q, k, v):
    """S is taken while another wgmma of the same warpgroup still runs."""
    if not any(e.kind == "wait wgmma" and e.count for e in book.events):
        return "whoever takes S waits for all wgmmas, so its softmax runs under none"
    return shared_by_128(book, q, k, v)


LADDER = Ladder(
    name="attention",
    reference=reference,
    inputs=inputs,
    sizes=({"batch": 2, "time": 4096, "heads": 16, "width": 128},),
    small={"batch": 1, "time": 256, "heads": 1, "width": 64},
    again={"batch": 2, "time": 128, "heads": 2, "width": 128},
    bytes=_bytes,
    flops=_flops,
    counted=(
        _formula,
        _one_after_the_other(2, 3),
        _one_after_the_other(2, 2),
        _matmuls(0.9),
        _matmuls(0.2),
        _matmuls(0),
    ),
    bandwidth=100,  # most tiles come from the L2 cache
    properties={2: scores_stay, 3: p_stays, 4: shared_by_128, 5: softmax_under_a_wgmma},
)
