"""Rung 5: the kernel that ships, `_backward` in pallas_kernels/embedding.py.

It is rung 4 for any shape.  The runs come from one scatter, not from a count and a cumulative sum;
XLA sums dwpe; rows of any width are split into loads as in the forward pass.  Until 2026-11-25 it
had more: a block had four rows of dwte, loaded the first place of all four together and stored
zeros meanwhile, the sums of dwpe were blocks of the same kernel, tokens were sorted as 16-bit
numbers, and a head with the same table shared its gradient.  That gained 52 us of GPT-2's step of
53 ms, and made the kernel twice as long.

Counted: 70 us for memory, and the sort's small kernels, which take 25 us more
(docs/performance.md).

Measured: 118 us, when it had all that.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import encoder


def prepare(tokens, dy, wte):
    """The backward pass of the op, which needs no forward result: (pull, dy)."""
    wpe = jnp.zeros((dy.shape[1], dy.shape[2]), wte.dtype)
    op = lambda wte, wpe: encoder(tokens, wte, wpe, dtype=dy.dtype, implementation="mosaic")
    return jax.jit(lambda *a: jax.vjp(op, *a)[1])(wte, wpe), dy


def encoder_backward(pull, dy):
    """(dwte, dwpe)."""
    return pull(dy)
