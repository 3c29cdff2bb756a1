"""Rung 6: the kernel that ships, pallas_kernels/quantized/matmul.py.

It is made for 1 to 64 rows of x, so the tensor core multiplies: two instructions make bfloat16
weights of a code (unpack.py, the trick of rung 5 in halves of a register), in the layout of wgmma's
left operand, and wgmma takes them from registers.  The words are packed in the order that this
layout wants.  Words, scales and x come by TMA through a ring for each of four warpgroups, which
split the k among them and add their sums in a fixed order; if there are few columns, several blocks
share the k of a column ("split K"), too.

With one row it pays for seven more, which are zeros.  A form of its own for one row is rung 5's
idea with that ring; nobody has measured it yet.

Counted: 29 MB, 10 us.

Measured: 15 us.
"""

import jax.numpy as jnp

from pallas_kernels import quantize, quantized_linear


def prepare(x, levels, scales):
    """(x (1, K), the packed weight): quantize finds the same levels and scales again."""
    weight = (levels * scales).astype(jnp.float32)
    return x[None], quantize(weight, bits=4, group=None)


def low_bit_gemv(x, weight):
    return quantized_linear(x, weight, implementation="mosaic")[0]
