"""Rung 7: the kernel that ships, pallas_kernels/norms/kernels.py.

It is one program with what the rungs have found, and it chooses by the width of a row (`_NARROW` in
pallas_kernels/norms/tiles.py, with the measurements that chose it):

    up to 1024 columns   rung 4: a block for each tile of four rows or more
    up to 8192 columns   rung 6 without the ring: four warps for each row, a block for each row

What it adds to the rungs is what a library needs.  Any number of rows, which are padded where they
must be.  The mean in two parts: the mean of x = 1000 + N(0, 1) has a rounding error of 3e-5, which
the second pass corrects.  Saved statistics for the backward pass.  RMS norm, a residual that is
added first, and heads with separate weights, by the same code.  And `unsafe_no_auto_barriers`: by
default the compiler puts a barrier around every access to shared memory; here only the sums over
warps need one.

Counted: 34 us at 32768 x 768 and 91 us at 16384 x 4096: each byte once, at the speed of a copy.

Measured: 37 us and 101 us, with a form that had the ring for 4096 columns.
"""

import functools

from pallas_kernels import layer_norm as op

layer_norm = functools.partial(op, implementation="mosaic")
