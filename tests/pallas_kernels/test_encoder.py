import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels.embedding import encoder, encoder_reference

KERNELS = ("encoder_forward", "encoder_backward_sums", "encoder_backward_vocabulary")


def zipf(shape, v, seed=0):
    """Token ids whose first is far more frequent than the last, as in text."""
    ids = np.random.default_rng(seed).zipf(1.3, shape) - 1
    return jnp.asarray(np.minimum(ids, v - 1), jnp.int32)


@pytest.mark.parametrize(
    ("batch", "time", "v", "width", "positions", "table", "dtype"),
    [
        (5, 30, 37, 256, 33, jnp.float32, jnp.bfloat16),  # frequent tokens fill tiles of 32 places
        slow(9, 7, 50, 384, 7, jnp.bfloat16, jnp.bfloat16),
        slow(2, 9, 3, 100, 12, jnp.float16, jnp.float32),
        (1, 3, 5, 1601, 3, jnp.float32, jnp.float32),  # two loads a row that overlap
        slow(1, 1, 1, 1, 1, jnp.float32, jnp.bfloat16),
    ],
)
def test_encoder_matches_float64(batch, time, v, width, positions, table, dtype):
    tokens = zipf((batch, time), v)
    wte, wpe = normal(1, (v, width), table), normal(2, (positions, width), table)
    check_op(
        lambda *a, dtype, implementation: encoder(
            tokens, *a, dtype=dtype, implementation=implementation
        ),
        # The truth is float64 throughout, while the reference rounds its result to dtype.
        lambda *a, dtype: encoder_reference(
            tokens, *a, dtype=None if a[0].dtype == jnp.float64 else dtype
        ),
        wte,
        wpe,
        kernels=KERNELS if tokens.size >= 32 else (KERNELS[0], KERNELS[2]),
        dtype=dtype,
    )


@pytest.mark.parametrize(
    "tokens", [jnp.full((3, 33), 2), jnp.array([[-5, 0, 8, 9, 10, 2**31 - 1]])]
)
def test_encoder_without_positions(tokens):
    """Covers one token everywhere (one block sums all tiles) and tokens outside the vocabulary."""
    check_op(
        lambda wte, implementation: encoder(tokens, wte, None, implementation=implementation),
        lambda wte: encoder_reference(tokens, wte, None),
        normal(0, (10, 128)),
        kernels=KERNELS if tokens.size >= 32 else ("encoder_backward_vocabulary",),
    )


def test_encoder_against_one_hot_matmuls():
    """Checks the reference itself: an embedding is a product with the tokens' one-hot rows."""
    tokens, wte, wpe = zipf((3, 8), 11), normal(0, (11, 4)), normal(1, (9, 4))
    dy = normal(2, (3, 8, 4))
    y, pull = jax.vjp(lambda *a: encoder_reference(tokens, *a), wte, wpe)
    hot = np.eye(11)[np.asarray(tokens)]
    np.testing.assert_allclose(y, hot @ np.asarray(wte) + np.asarray(wpe)[:8], rtol=1e-6, atol=1e-6)
    dwte, dwpe = pull(dy)
    np.testing.assert_allclose(dwte, np.einsum("btv,btc->vc", hot, dy), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dwpe[:8], np.asarray(dy).sum(0), rtol=1e-5, atol=1e-6)
    assert (dwpe[8] == 0).all()


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize(
    ("tokens", "wte", "wpe", "message"),
    [
        (jnp.zeros((2, 4)), (8, 128), (4, 128), "tokens is float32: cast it to an integer dtype"),
        (jnp.zeros(4, jnp.int32), (8, 128), (4, 128), r"tokens has shape \(4,\), but needs 2 axes"),
        (jnp.zeros((2, 4), jnp.int32), (8, 256), (4, 128), "wpe has 128 columns, wte has 256"),
        (jnp.zeros((2, 4), jnp.int32), (8, 128), (4, 1), "wpe has 1 columns, wte has 128"),
    ],
)
def test_encoder_refuses_what_does_not_fit(tokens, wte, wpe, message, implementation):
    with pytest.raises(ValueError, match=message):
        encoder(tokens, jnp.ones(wte), jnp.ones(wpe), implementation=implementation)


def test_encoder_refuses_a_sequence_longer_than_its_positions():
    with pytest.raises(ValueError, match="5 tokens exceed the 4 positions of wpe"):
        encoder(jnp.zeros((1, 5), jnp.int32), jnp.ones((2, 8)), jnp.ones((4, 8)))
