"""The casts of linear_cross_entropy with fp8 operands: W, and in a separate kernel dz.

    z = Q4(x) Q4(W)^T              dz = exp(z - log_sum) - [v = label]
    dx = Q5(dz) Q4(W)              dW = Q5(dz)^T Q4(x)

Q4 and Q5 round to e4m3 and e5m2; the products are fp8_linear's.  dz needs no maximum: without the
loss's factor it lies in [-1, 1].  The factor multiplies the products instead, so dz = -1 is exact,
and the label's share has no error that is the same for all tokens.  e5m2 holds probabilities down
to 2^-31.

The kernel reads the logits and writes dz in fp8, in both orders: 4 bytes a logit, as in bfloat16.
The sum over a row must be known before, which takes one more pass over the logits.
"""

import jax.numpy as jnp

from pallas_kernels.float8 import quantize
from pallas_kernels.float8.linear import BACKWARD, FORWARD
from pallas_kernels.float8.quantize import Cast
from pallas_kernels.losses.kernels import capped


def why_not(x) -> str | None:
    """Why x cannot be cast by the kernels, or None."""
    n, c = x.size // max(x.shape[-1], 1), x.shape[-1]
    return quantize.not_a_multiple(quantize.TILE, tokens=n, C=c)


def cast_weight(weight, transposed: bool) -> Cast:
    """The weight as fp8_linear takes it, (C, V)."""
    values, turned, inverse = quantize.cast(weight, FORWARD, True)
    return Cast(values, turned, inverse) if transposed else Cast(turned, values, inverse)


def gradient(z, labels, log_sum, valid, softcap) -> Cast:
    """dz of rows of logits, in both orders.

    labels: (n,), a column or -1.  log_sum: (n,), of the exponentials of the capped logits; infinite
    for rows without a gradient.  valid: columns that are not padding, an int or an array ().
    """
    rows = [log_sum, labels]
    if not isinstance(valid, int):
        rows.append(jnp.full(labels.shape, valid))

    def tile(u, log_sum, label, valid=valid):
        x, slope = capped(u, softcap)
        column = quantize.column_numbers()
        dz = jnp.exp(x - log_sum)
        dz = jnp.where(column == label, dz - 1, dz)
        dz = dz if slope is None else dz * slope
        return (jnp.where(column < valid, dz, 0.0),)

    name = "linear_cross_entropy_gradient_fp8"
    one = [jnp.float32(1)]
    return quantize.cast_results(tile, [z], one, BACKWARD, rows=rows, name=name, approx=True)[0][0]
