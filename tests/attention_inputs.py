"""Arrays for tests of attention."""

import jax.numpy as jnp
import numpy as np
from kernel_checks import normal

BF16, FP16 = jnp.bfloat16, jnp.float16


def inputs(b, t, s, h, k, d, dtype=BF16, scale=1.0):
    return (
        normal(0, (b, t, h, d), dtype, scale),
        normal(1, (b, s, k, d), dtype, scale),
        normal(2, (b, s, k, d), dtype),
    )


def packed(*cuts, length):
    """Ids of documents that end at `cuts`, one row for each batch entry."""
    at = np.arange(length)
    return jnp.asarray(np.stack([np.searchsorted(c, at, side="right") for c in cuts]), jnp.int32)
