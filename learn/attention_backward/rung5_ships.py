"""Rung 5: the kernels that ship, pallas_kernels/flash_attention/op.py.

backward_dq.py and backward_dkv.py are rung 4 with more hands.  A block has two or three warpgroups
of 64 rows each, so a tile that streams serves up to 192 rows, and the ring has three or four
stages, which one or two warps fill under the matmuls.  dQ += dS K of a step runs on under the next
one.  The kernel of the queries computes delta, too, when it begins.  At D up to 96 blocks stay and
load their next rows early; windows, segments, grouped heads and a softcap as in the forward pass.

Counted: seven matmuls at 800 TFLOP/s, 0.60 ms, and 2% for the halves of the tiles on the diagonal
that the mask hides: 0.61 ms.

Measured: 757 us.
"""

import jax.numpy as jnp

from pallas_kernels.flash_attention.op import backward
from pallas_kernels.flash_attention.schedule import Call, stat_rows


def prepare(q, k, v, o, lse, do):
    """The forward kernel gives lse in whole tiles."""
    t = lse.shape[-1]
    return q, k, v, o, jnp.pad(lse, ((0, 0), (0, 0), (0, stat_rows(t) - t))), do


def attention_backward(q, k, v, o, lse, do):
    """(dq, dk, dv) (B, T, H, D); lse (B, H, at least T) in float32."""
    call = Call(True, q.shape[3] ** -0.5, None, None)
    return backward(q, k, v, o, lse, do, None, call=call)
