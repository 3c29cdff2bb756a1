"""Rung 6: the kernel that ships, pallas_kernels/quantized/gemv.py.

The tensor core multiplies.  The words are packed so that a lane's 16 bytes hold what its operand of
`mma` needs: a shift, a LOP3 and a subtraction make two bfloat16 levels, in the halves of a register
(unpack.py, the trick of rung 5).  The eight columns of the other operand are all x: it is eight
times the work that is needed, and the tensor core has time for it.

    words   memory -> registers -> left operand, 16 outputs x 16 of k, exact levels
    x       shared -> registers -> right operand          sums += mma;  at the end y = scale sum

A block has 16 outputs and, at this size, four warps, which take the k in turns of 256.  The words
of a lane's next two turns are on the way while it multiplies.  The block brings x to shared memory
once, while the first words are on their way.  The warps' sums are added there, too, in a fixed
order.  A thread has 53 registers, so all 896 blocks run at the same time, in one wave.

What a library needs besides: 8, 2 and 1 bits, scales of groups of k, offsets, and for more rows
other kernels (matmul.py for 2 to 64, gemm.py beyond), with wgmma and rings.

Counted: a warp needs 86 instructions for 1024 weights, not quite 3 for each weight of a lane, where
memory allows 5.  So memory is the limit: 29 MB, 10 us.

Measured: 13 us.
"""

import jax.numpy as jnp

from pallas_kernels import quantize, quantized_linear


def prepare(x, levels, scales):
    """(x (1, K), the packed weight): quantize finds the same levels and scales again."""
    weight = (levels * scales).astype(jnp.float32)
    return x[None], quantize(weight, bits=4, group=None)


def low_bit_gemv(x, weight):
    return quantized_linear(x, weight, implementation="mosaic")[0]
