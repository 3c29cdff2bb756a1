import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels.rotary import RopeScaling, frequencies, rope, rope_reference

KERNELS = ("rope_forward", "rope_backward")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def inputs(b, t, h, k, d, dtype):
    return normal(0, (b, t, h, d), dtype), normal(1, (b, t, k, d), dtype)


@pytest.mark.parametrize(
    ("b", "t", "h", "k", "d", "dtype"),
    [
        slow(2, 32, 6, 2, 64, BF16),  # whole tiles
        (2, 33, 5, 1, 64, F32),  # a remainder and positions that do not fit the tiles
        (1, 3, 2, 2, 96, F16),  # only a remainder
        slow(1, 3, 1, 1, 100, BF16),  # loads of 4 bytes
        (1, 130, 1, 1, 2, F32),
        slow(1, 3, 1, 1, 6, F16),
    ],
)
def test_rope_matches_float64(b, t, h, k, d, dtype):
    q, k = inputs(b, t, h, k, d, dtype)
    positions = jnp.arange(t, dtype=jnp.int32)
    check_op(rope, rope_reference, q, k, positions, kernels=KERNELS)


def test_rope_at_large_positions_of_each_row_with_scaling_and_two_dtypes():
    positions = jnp.array([[0, 1, 8191, 8192, 131071], [5, 4, 3, 100_000, 16_777_215]], jnp.int32)
    options = dict(theta=500000.0, scaling=RopeScaling(32.0, 1.0, 4.0, 8192))
    q, k = normal(0, (2, 5, 4, 64), F32), normal(1, (2, 5, 2, 64), BF16)
    check_op(rope, rope_reference, q, k, positions, kernels=KERNELS, **options)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_reference_is_a_complex_rotation(layout):
    q, k = np.asarray(normal(0, (2, 7, 3, 8))), np.asarray(normal(1, (2, 7, 1, 8)))
    positions = np.array([0, 1, 2, 3, 50, 51, 1000], np.int32)
    turn = np.exp(1j * positions[:, None, None] * 10000.0 ** (-np.arange(4) / 4))
    results = rope_reference(jnp.asarray(q), jnp.asarray(k), jnp.asarray(positions), layout=layout)
    for x, y in zip((q, k), results, strict=True):
        if layout == "half":
            z = (x[..., :4] + 1j * x[..., 4:]) * turn
            expected = np.concatenate([z.real, z.imag], -1)
        else:
            z = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            expected = np.stack([z.real, z.imag], -1).reshape(x.shape)
        np.testing.assert_allclose(y, expected, atol=2e-4)  # 1000 * eps of the float32 angle


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("d", [64, 128])
def test_scaled_frequencies_are_those_of_llama3_in_transformers(d, factor):
    """Computes the branches of transformers' rope_type="llama3" one wavelength at a time."""
    theta, low, high, original = 500000.0, 1.0, 4.0, 8192
    expected = []
    for i in range(d // 2):
        inv_freq = 1.0 / theta ** (2 * i / d)
        wavelength = 2 * math.pi / inv_freq
        if wavelength < original / high:
            expected.append(inv_freq)
        elif wavelength > original / low:
            expected.append(inv_freq / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * inv_freq / factor + smooth * inv_freq)
    scaled = frequencies(d, theta, RopeScaling(factor, low, high, original))
    np.testing.assert_allclose(scaled, expected, rtol=1e-7)
    plain = frequencies(d, theta)
    kinds = {"kept": scaled == plain, "divided": scaled == plain / np.float32(factor)}
    assert all(0 < kind.sum() < d // 2 for kind in kinds.values())
    assert (~kinds["kept"] & ~kinds["divided"]).any()  # some are in between


@pytest.mark.parametrize(
    ("d", "theta", "scaling"),
    [
        (128, 1e6, RopeScaling(4.0, 1.0, 32.0, 32768, 1.139)),  # as Qwen2.5's
        (128, 1e4, RopeScaling(16.0, 1.0, 32.0, 4096, 1.0)),
        (64, 5e5, RopeScaling(8.0, 0.5, 2.5, 512, 0.7)),
        (16, 1e4, RopeScaling(40.0, 1.0, 32.0, 32, 1.4)),
    ],
)
def test_frequencies_with_an_attention_factor_are_yarn_s(d, theta, scaling):
    """Computes transformers' rope_type="yarn" with its logarithms."""
    factor, slow, fast, original, _ = scaling
    pair = lambda n: d * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), d - 1)
    expected = []
    for i in range(d // 2):
        ramp = min(1, max(0, (i - low) / (high - low)))
        inv_freq = theta ** (-2 * i / d)
        expected.append(inv_freq / factor * ramp + inv_freq * (1 - ramp))
    np.testing.assert_allclose(frequencies(d, theta, scaling), expected, rtol=1e-7)
    close = scaling._replace(high_freq_factor=slow * 1.0001, original_max_position_embeddings=7)
    found = frequencies(d, theta, close) / frequencies(d, theta)
    np.testing.assert_allclose(found[2:], 1 / factor, rtol=1e-6)
    assert found[0] == 1
    assert np.isfinite(frequencies(d, 1.0, scaling)).all()  # all pairs alike


def test_rope_depends_on_relative_positions_only():
    q, k = inputs(1, 1, 1, 1, 64, F32)
    dot = lambda m, n: float(
        jnp.sum(
            rope(q, k, jnp.array([m], jnp.int32), implementation="xla")[0]
            * rope(q, k, jnp.array([n], jnp.int32), implementation="xla")[1]
        )
    )
    np.testing.assert_allclose(dot(1007, 1000), dot(7, 0), rtol=1e-3)


def test_rope_refuses_what_does_not_fit():
    q, k = inputs(2, 4, 2, 1, 8, F32)
    p = jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(ValueError, match="differ in more than their heads"):
        rope(q, k[:, :3], p)
    with pytest.raises(
        ValueError, match=r"positions have shape \(3,\), neither \(4,\) nor \(2, 4\)"
    ):
        rope(q, k, p[:3])
    with pytest.raises(ValueError, match="D=7 is odd"):
        rope(q[..., :7], k[..., :7], p)
    with pytest.raises(ValueError, match=r"q has shape \(4, 2, 8\), but needs 4 axes: B T H D"):
        rope(q[0], k[0], p)
    with pytest.raises(ValueError, match="theta=0.0 must be more than"):
        rope(q, k, p, theta=0.0)
    with pytest.raises(ValueError, match="layout='halves' is not one of half, interleaved"):
        rope(q, k, p, layout="halves")
    with pytest.raises(
        ValueError, match="low_freq_factor=4.0 must be less than high_freq_factor=1"
    ):
        rope(q, k, p, scaling=RopeScaling(8.0, 4.0, 1.0, 8192))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="q is float64"):
        rope(q.astype(jnp.float64), k, p, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="layout='interleaved' is not half"):
        rope(q, k, p, layout="interleaved", implementation="mosaic")
