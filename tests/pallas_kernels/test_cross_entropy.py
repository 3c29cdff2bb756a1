import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, kernels_run_here, normal

from pallas_kernels import cross_entropy

cross_entropy_reference = functools.partial(cross_entropy, implementation="xla")
KERNELS = ("linear_cross_entropy_statistics", "linear_cross_entropy_gradient")


def labels_for(shape, vocab_size, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, shape), jnp.int32)


@pytest.mark.parametrize(
    ("shape", "vocab_size", "dtype"),
    [
        ((2, 2, 9088), None, jnp.bfloat16),  # whole steps, whole tiles and a tail
        ((3, 1024), 901, jnp.float16),  # padding inside the last tile
        slow((3, 1024), 300, jnp.float32),  # padding over several tiles
        slow((5, 256), None, jnp.float32),
        ((1, 128), None, jnp.float32),
    ],
)
def test_cross_entropy_matches_float64(shape, vocab_size, dtype):
    logits = normal(0, shape, dtype, scale=3)
    labels = labels_for(shape[:-1], vocab_size or shape[-1])
    check_op(
        cross_entropy,
        cross_entropy_reference,
        logits,
        labels,
        kernels=KERNELS,
        vocab_size=vocab_size,
    )


@pytest.mark.parametrize("offset", [slow(0), 1e4, slow(-1e4)])
def test_cross_entropy_of_large_logits(offset):
    logits = normal(0, (4, 768), scale=100, offset=offset).at[1, 3].set(-jnp.inf)
    check_op(cross_entropy, cross_entropy_reference, logits, labels_for((4,), 3), kernels=KERNELS)


def test_cross_entropy_against_log_softmax():
    """Compares the reference itself with jax.nn's form."""
    logits, labels = normal(0, (5, 50)), labels_for((5,), 40)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :40]), labels[:, None], 1)[:, 0]
    actual = cross_entropy_reference(logits, labels, vocab_size=40)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_cross_entropy_of_ignored_and_wrong_labels(implementation):
    logits = normal(0, (6, 384)).at[4, 0].set(-jnp.inf)
    labels = jnp.array([0, 259, 260, -1, -7, 299], jnp.int32)

    def f(logits):
        return cross_entropy(
            logits, labels, vocab_size=260, ignore_index=-7, implementation=implementation
        )

    with kernels_run_here() if implementation == "mosaic" else contextlib.nullcontext():
        loss, pull = jax.vjp(jax.jit(f), logits)
        (dlogits,) = pull(jnp.ones(6))
    np.testing.assert_array_equal(jnp.isnan(loss), [False, False, True, True, False, True])
    assert loss[4] == 0
    assert (dlogits[4] == 0).all()
    assert (dlogits[jnp.array([0, 1, 4]), 260:] == 0).all()
    np.testing.assert_array_equal(jnp.isnan(dlogits[:, :260]).all(1), jnp.isnan(loss))
    np.testing.assert_array_equal(jnp.isnan(dlogits[:, :260]).any(1), jnp.isnan(loss))


def test_cross_entropy_refuses_what_does_not_fit():
    logits = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"labels have shape \(3,\), .* need \(2,\)"):
        cross_entropy(logits, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="labels is float32: cast it to an integer dtype"):
        cross_entropy(logits, jnp.zeros(2), implementation="mosaic")
    with pytest.raises(ValueError, match=r"vocab_size=9 is not in \[1, 8\]"):
        cross_entropy(logits, jnp.zeros(2, jnp.int32), vocab_size=9)
    with pytest.raises(ValueError, match="logits is int32: cast it"):
        cross_entropy(jnp.ones((2, 8), jnp.int32), jnp.zeros(2, jnp.int32), implementation="mosaic")
