"""What the tests of layers share."""

from functools import partial

import jax
import numpy as np

from jaxllm.layers import Linear

WIDE = partial(Linear, std=0.5)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(actual, expected, tolerance=1e-5):
    """Asserts that the largest error is at most `tolerance` of the largest expected value."""
    scale = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=0, atol=tolerance * scale
    )
