import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import check_op, kernels_run_here, normal

from pallas_kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

KERNELS = ("linear_cross_entropy_statistics_and_gradient",)


def labels_for(n, vocab_size, ignored=()):
    labels = np.random.default_rng(1).integers(0, vocab_size, n)
    labels[list(ignored)] = -100
    return jnp.asarray(labels, jnp.int32)


@pytest.mark.parametrize(
    ("n", "c", "v", "dtype", "weight_dtype", "options"),
    [
        (5, 64, 20608, jnp.bfloat16, jnp.float32, {}),  # whole steps, more tiles and a rest
        (9, 32, 1280, jnp.bfloat16, jnp.bfloat16, dict(vocab_size=1201, transposed=True, chunk=4)),
        (6, 48, 4000, jnp.float16, jnp.float32, dict(softcap=2.0, vocab_size=300, chunk=3)),
        (3, 16, 70, jnp.float32, jnp.float32, dict(softcap=30.0, reduction="sum")),
        (1, 1, 1, jnp.float32, jnp.float32, {}),
    ],
)
def test_linear_cross_entropy_matches_float64(n, c, v, dtype, weight_dtype, options):
    options = dict(options)
    x, weight = normal(0, (n, c), dtype), normal(1, (v, c), weight_dtype, scale=3 / c**0.5)
    chunk = options.pop("chunk", None)
    check_op(
        functools.partial(linear_cross_entropy, chunk=chunk),
        linear_cross_entropy_reference,
        x,
        weight.T if options.get("transposed") else weight,
        labels_for(n, options.get("vocab_size", v), ignored=[1] if n > 1 else []),
        kernels=KERNELS,
        **options,
    )
