"""The kernels of layer norm and RMS norm.

They read every row once, compute one or two means over it, and write a row of the same width.  The
backward kernels also sum over all rows for dweight and dbias.  They are bound by memory, so they
must keep enough copies in flight: blocks are persistent, each takes every `programs`-th tile of
rows, and `stream` (ring.py) moves several tiles through shared memory at once (tiling: tiles.py):

    slot 0   | tile i                 wait for bars[0], compute in place, copy back |
    slot 1   | tile i + programs      arriving on bars[1]                           |
    slot 2   | tile i + 2 programs    arriving on bars[2]                           |

    forward    x (, residual, gate)  ->  statistics  ->  y (, s)
    backward   x, dy (, ds, gate)  ->  n, g  ->  means of g, g n  ->  dx (, dgate);  sums over the
               rows in registers

For narrow rows the forward pass is faster without TMA, with many small blocks of one tile each.

The general form, for every NVIDIA GPU since Ampere, has no slots (Tiling.slots is 0): registers get
rows from global memory, forward as for narrow rows, backward in persistent blocks that share an SM:

    registers   | tile i        compute, store |  tile i + programs, loaded ahead if rows are wide

Weights have one row (C,) for all heads or one for each of H heads; a program handles one head.
"""

import functools

import jax

from pallas_kernels.norms.backward import backward
from pallas_kernels.norms.forward import Norm, forward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def norm(kind: Norm, eps, general, x, residual, weight, bias, x_bias=None, gate=None):
    """(y, s): y = n weight + bias for the rows of x (then s is None) or of s = x + residual.

    general: in the general form.  x_bias needs a residual: s = (x + x_bias) + residual.
    gate: multiplies y by its sigmoid; without a bias and for C up to 1024.
    """
    return _save(kind, eps, general, x, residual, weight, bias, x_bias, gate)[0]


def _save(kind, eps, general, x, residual, weight, bias, x_bias, gate):
    if x_bias is not None:
        x = x + x_bias.astype(x.dtype)  # XLA fuses this with the matmul that makes x
    (y, s), stats = forward(kind, eps, general, x, residual, weight, bias, gate)
    return (y, s), (x if s is None else s, stats, weight, bias, x_bias, gate)


def _gradients(kind, _, general, saved, cotangents):
    (dy, ds), (x, stats, *others) = cotangents, saved
    dx, *gradients = backward(kind, general, x, stats, dy, ds, *others)
    return dx.astype(dy.dtype), None if ds is None else dx, *gradients


norm.defvjp(_save, _gradients)
