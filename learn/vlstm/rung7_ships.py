"""Rung 7: the kernel that ships, pallas_kernels/mlstm.

Its two kernels are rung 6's: `states` (states.py) walks, `chunk_outputs` (intra.py) makes h of all
chunks.  They run on every GPU since Ampere: `cp.async` copies instead of TMA, each thread 16 bytes,
and `mma` multiplies operands in registers instead of wgmma.  It is faster by two ideas:

    spans       the walk of a long sequence is split into spans.  A first walk starts all of them
                at once, from zero, and finds what each adds; `join_spans` adds these up; a second
                walk starts each span from its true state.  So 24 heads keep 132 SMs busy.
    gates       in four kernels of XLA instead of about twenty: running compositions of
                m -> max(m + shift, least) in two steps each (gates.py)

What a library needs besides: any T, DQK to 256 and DV to 512, documents, a state in and out, and
the backward pass, where the same two kernels make dq, dk, dv and the gradients of the gates with
other operands (docs/vlstm.md).

Counted: at T = 8192 the walks read k and v twice and write the states, 201 MB; with the 203 MB of
the outputs and 12 us for the gates 149 us.  At T = 2048 one walk is enough: 123 us.  The floor of
52 us is out of reach with states in memory, which the backward pass needs.

Measured: 190 us, 151 us, when its kernels had TMA and wgmma; today's take as long at these widths
(docs/vlstm.md).
"""

import functools

from pallas_kernels import vlstm as op

vlstm = functools.partial(op, implementation="mosaic")
