"""The products of linear_cross_entropy with fp8 operands, and the kernel between them.

    z = Q4(x) Q4(W)^T              dz = exp(z - log_sum) - [v = label]
    dx = Q5(dz) Q4(W)              dW = Q5(dz)^T Q4(x)

Q4 and Q5 round to e4m3 and e5m2, as in fp8_linear, which tells how XLA multiplies them.  The
logits' gradient needs no maximum: without the loss's factor it lies in [-1, 1].  The factor
multiplies the products instead, so dz = -1 is exact, and the label's share has no error that is the
same for all tokens.  e5m2 holds probabilities down to 2^-31.

The kernel reads the logits and writes dz in fp8, in both orders: 4 bytes a logit, as in bfloat16.
The sum over a row must be known before, which takes one more pass over the logits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.float8.linear import BACKWARD, FORWARD, product
from pallas_kernels.float8.quantize import (
    TILE,
    Cast,
    cast,
    cast_results,
    column_numbers,
    lost,
    not_a_multiple,
)
from pallas_kernels.losses.kernels import capped


class Table(NamedTuple):
    """The weight in fp8."""

    by_word: Any  # (V, C)
    by_feature: Any  # (C, V)
    inverse: Any  # of its scale


def why_not(x) -> str | None:
    """Why x cannot be cast by the kernels, or None."""
    n, c = x.size // max(x.shape[-1], 1), x.shape[-1]
    return not_a_multiple(TILE, tokens=n, C=c)


def cast_table(weight, transposed: bool) -> Table:
    values, turned, inverse = cast(weight, FORWARD, True)
    return Table(turned, values, inverse) if transposed else Table(values, turned, inverse)


def cast_input(x) -> Cast:
    return cast(x, FORWARD, True)


def logits(x: Cast, w: Table, dtype):
    """x W^T."""
    return product(x.values, x.inverse, w.by_word, w.inverse, axes=1, dtype=dtype)


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
        column = column_numbers()
        dz = jnp.exp(x - log_sum)
        dz = jnp.where(column == label, dz - 1, dz)
        dz = dz if slope is None else dz * slope
        return (jnp.where(column < valid, dz, 0.0),)

    name = "linear_cross_entropy_gradient_fp8"
    one = [jnp.float32(1)]
    return cast_results(tile, [z], one, BACKWARD, rows=rows, name=name, approx=True)[0][0]


def gradient_reference(z, labels, log_sum, valid, softcap):
    """dz in float32, by XLA: what `gradient` rounds."""
    x, slope = z.astype(jnp.float32), 1.0
    if softcap is not None:
        tanh = jnp.tanh(x / softcap)
        x, slope = softcap * tanh, 1 - tanh * tanh
    column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    dz = jnp.exp(x - log_sum[:, None]) - (column == labels[:, None])
    return jnp.where(column < valid, dz * slope, 0)


def probe_gradient(chunks, weight, w: Table, transposed: bool):
    """The shares of x, weight and dz, (3, 3), from those of x and dz in each chunk (`lost`)."""
    each = jnp.stack([jnp.stack(pair) for pair in chunks])
    counts = each[..., 2:]
    shares = (each[..., :2] * counts).sum(0) / counts.sum(0)
    of_x, of_dz = jnp.concatenate([shares, counts.sum(0)], axis=1)
    values = w.by_feature if transposed else w.by_word
    return jnp.stack([of_x, lost(weight, Cast(values, None, w.inverse)), of_dz])


def of_input(dz: Cast, w: Table, dtype):
    """dz W."""
    high = lax.Precision.HIGHEST
    return product(
        dz.values, dz.inverse, w.by_feature, w.inverse, axes=1, dtype=dtype, precision=high
    )


def of_weight(x: Cast, dz: Cast, factor, transposed: bool):
    """factor dz^T x, or its transpose, in float32."""
    high = lax.Precision.HIGHEST
    left, right = (x, dz) if transposed else (dz, x)
    return product(
        left.transposed,
        left.inverse * factor,  # float32 here, so any factor is exact
        right.transposed,
        right.inverse,
        axes=1,
        dtype=jnp.float32,
        precision=high,
    )
