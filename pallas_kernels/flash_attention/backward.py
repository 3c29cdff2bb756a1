"""Attention backward on Hopper: one kernel for dQ (and the row sums), one for dK and dV.

With P = exp(c S - lse) recomputed from the saved log-sum-exp,

    delta = rowsum(dO * O) - dlse        dP = dO V^T          dS = P * (dP - delta)
    dQ = c dS K                          dK = c dS^T Q        dV = P^T dO

The dQ kernel (backward_dq.py) owns queries and streams keys, the dK/dV kernel (backward_dkv.py)
owns keys and streams queries: seven matmuls where one fused kernel would do five, but no sum
crosses blocks, so every run gives the same result bit for bit.  docs/attention.md has what the
fused kernel took.  In both kernels a warpgroup owns 64 rows and hands P and dS to the tensor core
in registers, and nobody loads tiles that no row of a block sees (masks.py).

These are for Hopper; general_backward_dq.py and general_backward_dkv.py are for every NVIDIA GPU
since Ampere.
"""

import functools

import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import general_backward_dkv, general_backward_dq
from pallas_kernels.flash_attention.backward_dkv import backward_dkv
from pallas_kernels.flash_attention.backward_dkv_alone import differentiate_alone
from pallas_kernels.flash_attention.backward_dkv_halves import differentiate_in_halves
from pallas_kernels.flash_attention.backward_dkv_pair import differentiate_in_pairs
from pallas_kernels.flash_attention.backward_dq import backward_dq
from pallas_kernels.flash_attention.masks import some_rows_see_nothing
from pallas_kernels.flash_attention.schedule import Call, Heads, pad_segments
from pallas_kernels.mosaic import ROWS


def backward(
    q, k, v, out, lse, dout, dlse, segments=None, *, call: Call, heads: Heads | None = None,
    sums: bool = False,
):  # fmt: skip
    """(dq, dk, dv) in the dtypes of q, k, v.  lse, dlse (None: zero): (B, H, stat_rows(T)) fp32.

    segments: as in `forward`.  Rows of dout past T must be zero.
    heads: q, k and v are the same array; its gradient is one array too, the only result.
    sums: with heads, where column_sums.sums_columns allows it: there is a second result, the sum of
        the gradient over all rows, (heads, D) fp32.
    """
    if segments is not None:
        segments = pad_segments(segments, call.lengths)
    rows = 2 * ROWS if call.general else ROWS
    if some_rows_see_nothing(call.window, segments is not None, rows):
        # A row that sees no key: P = exp(-1e30) = 0, whatever cotangent came for its lse.
        blind = lse == -jnp.inf
        lse = jnp.where(blind, 1e30, lse)
        dlse = None if dlse is None else jnp.where(blind, 0, dlse)
    first = functools.partial(backward_dq, sums=sums)
    last = functools.partial(backward_dkv, work_of(q.shape[-1]))
    if call.general:
        first, last = general_backward_dq.backward_dq, general_backward_dkv.backward_dkv
    # What the second kernel reads of the rows; in the general form this is lse and delta.
    dq, lse2, minus_delta, *partial = first(
        q, k, v, out, lse, dout, dlse, segments, call=call, heads=heads
    )
    arrays = q, k, v, lse2, dout, minus_delta, segments
    second = lambda refs, *arrays: last(*arrays, *refs, call=call, heads=heads)
    if heads is None:
        return dq, *second((), *arrays)
    # No copy: the second kernel writes its own heads of dq, and of the partial sums.
    d, *partial = mosaic.in_place(second, [dq, *partial], *arrays)
    return d, *(x.sum((0, 1)) for x in partial)


def work_of(head_dim: int):
    """What a warpgroup of the dK/dV kernel does: as much at a time as it has registers for."""
    if head_dim <= 64:
        return differentiate_in_halves
    return differentiate_alone if head_dim <= 128 else differentiate_in_pairs
