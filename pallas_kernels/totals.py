"""Sums of weights' gradients over several calls, as gradient accumulation needs them.

An op that takes a weight W takes `total` beside it, a float32 array like W.  Its gradient is

    total + dW,   and W has none

so the derivative with respect to `total` is the next total.  To sum separate gradients, XLA would
write dW in W's dtype, then read it and the sum: 12 bytes a parameter of bf16, 16 of float32.  Here
the matmul of dW adds to the sum's buffer (cuBLASLt's C with beta = 1), and dW is never rounded.
"""

import jax

from pallas_kernels import mosaic
from pallas_kernels.options import with_gradient


def check_totals(totals: tuple, *weights: jax.Array) -> None:
    """Raises ValueError unless there is a float32 total (float64 in tests) like each weight."""
    need = [w.shape for w in weights]
    wide = all(t.dtype == mosaic.stat_dtype(t.dtype) for t in totals)
    if [t.shape for t in totals] != need or not wide:
        have = ", ".join(f"{t.dtype} {t.shape}" for t in totals)
        raise ValueError(f"totals are {have}, not float32 {', '.join(map(str, need))}")


def summed(weight: jax.Array, total: jax.Array | None, adds: bool = True) -> jax.Array:
    """The weight for any operation, whose gradient goes to `total`; None: the weight as it is.

    adds: if False, total's gradient is dW alone, because another op returns total + dW.
    XLA adds to the total inside a matmul if that alone yields the gradient, of operands in bf16.
    """
    return weight if total is None else _summed(weight, total, adds)


def _backward(adds, total, dw):
    return None, total + dw.astype(total.dtype) if adds else dw.astype(total.dtype)


_summed = with_gradient(lambda w, total, adds: (w, total), _backward, nondiff_argnums=(2,))
