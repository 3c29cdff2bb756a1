"""Rung 6: the kernel that ships, pallas_kernels/flash_attention/forward.py.

It is rung 5 with other ways to have registers and work.  No warpgroup only loads: two warpgroups
may use 255 registers for each thread, three only 168, so the tiles have 128 keys, and half as many
steps pay for barriers and turns.  One warp of each computing warpgroup starts the copies instead,
under its own matmuls.  Blocks stay, take the number of the next item from a counter that they
share, and load its queries while they compute this one.  `unsafe_no_auto_barriers` is for the same
reason as in layer norm.

What a library needs: any T and S, other head widths, grouped heads, windows, documents packed in
one row, a softcap, and the log-sum-exp of each row for the backward pass.  Tiles that no query of a
block sees are never loaded (masks.py).

Counted: the matmuls at 800 TFLOP/s, 0.17 ms, and 3% for the halves of the tiles on the diagonal
that the mask hides: 0.18 ms.

Measured: 218 us.
"""

import functools

from pallas_kernels import attention as op

attention = functools.partial(op, implementation="mosaic")
