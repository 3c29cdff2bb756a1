"""The ladder of causal attention's backward pass (README.md)."""

from collections import Counter

import jax

from learn import attention as forward
from learn.ladder import MATMUL, SMS, Ladder, normal
from pallas_kernels.flash_attention.op import attention_reference


def inputs(sizes):
    q, k, v = forward.inputs(sizes)
    o, lse = jax.jit(lambda *a: attention_reference(*a, return_lse=True))(q, k, v)
    return q, k, v, o, lse, normal(3, q.shape, q.dtype)


def reference(q, k, v, o, lse, do):
    """Autodiff of the formula, which computes O and its statistics itself."""
    _, pull = jax.vjp(attention_reference, q, k, v)
    return pull(do)


def _bytes(sizes):
    return forward._bytes(sizes) * 2  # q, k, v, o, do; dq, dk, dv


def _flops(sizes):
    return forward._flops(sizes) / 2 * 7


def _one_after_the_other(microseconds):
    """Two blocks on an SM, with so many microseconds for 64 x 64 scores in all kernels."""
    return lambda sizes: forward.seen(sizes, 64) / (2 * SMS) * microseconds


def _matmuls(gap):
    """Seven matmuls for 64 x 64 scores, and microseconds of an SM in which nobody multiplies."""

    def counted(sizes):
        tiles = forward.seen(sizes, 64)
        return tiles * 64 * 64 * 14 * sizes["width"] / MATMUL + tiles / SMS * gap

    return counted


def _done(book):
    return sum(e.count for e in book.events if e.kind == "wgmma")


def seven_matmuls(book, q, k, v, o, lse, do):
    """dK and dV share S and dP."""
    tiles = forward.seen(dict(batch=q.shape[0], heads=q.shape[2], time=q.shape[1]), 64)
    if (each := _done(book) / (tiles * 64 * 64 * q.shape[3])) > 7:
        return f"wgmma does {each:g} matmuls for each tile of scores where 7 would do"


def p_stays(book, q, k, v, o, lse, do):
    """No thread writes to shared memory, and wgmma multiplies."""
    through = {e.buffer for e in book.events if (e.kind, e.space) == ("store", "shared")}
    if through:
        return f"{', '.join(sorted(through))} is written by threads"
    if not _done(book):
        return "no wgmma multiplies"
    return seven_matmuls(book, q, k, v, o, lse, do)


def under_matmuls(book, q, k, v, o, lse, do):
    """S is taken while dP still runs, and copies of the next tiles are under way."""
    if not any(e.kind == "wait wgmma" and e.count for e in book.events):
        return "whoever takes S waits for all wgmmas: nothing is computed under one"
    blocks = Counter((e.kernel, e.block) for e in book.events if e.kind == "wgmma")
    longest = max(blocks, key=blocks.__getitem__)  # of the keys: four wgmmas in each step
    own = [e for e in book.events if (e.kernel, e.block) == longest]
    copies = [i for i, e in enumerate(own) if e.kind == "copy in"]
    steps = [i for i, e in enumerate(own) if e.kind == "wgmma" and i > max(copies, default=0)]
    if len(steps) < 5:
        return "the copies of a step start after the matmuls of the step before"
    return p_stays(book, q, k, v, o, lse, do)


LADDER = Ladder(
    name="attention_backward",
    reference=reference,
    inputs=inputs,
    sizes=({"batch": 2, "time": 4096, "heads": 16, "width": 128},),
    small={"batch": 1, "time": 192, "heads": 1, "width": 64},
    again={"batch": 2, "time": 128, "heads": 2, "width": 128},
    bytes=_bytes,
    flops=_flops,
    counted=(
        _one_after_the_other(11),
        _one_after_the_other(9),
        _one_after_the_other(6.5),
        _matmuls(0.45),
        _matmuls(0),
    ),
    bandwidth=100,  # most tiles come from the L2 cache
    properties={2: seven_matmuls, 3: p_stays, 4: under_matmuls},
)
