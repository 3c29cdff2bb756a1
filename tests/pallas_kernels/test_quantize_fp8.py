"""Casts to fp8: the kernels against the jnp form, bit for bit, and the jnp form against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import assert_lowers, kernels_run_here, normal

from pallas_kernels.float8.quantize import cast

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
KERNELS = ["fp8_maximum", "quantize_fp8"]


def bits(arrays):
    values, transposed, inverse = (np.asarray(a) for a in arrays)
    return values.view(np.uint8), transposed.view(np.uint8), inverse.view(np.uint32)


def both(x, dtype):
    """The bits of the kernels' results and of the jnp form's."""

    def run(x):
        return cast(x, dtype, True)

    assert_lowers(run, (x,), KERNELS)
    with kernels_run_here():
        mine = bits(jax.jit(run)(x))
    return mine, bits(jax.jit(lambda x: cast(x, dtype, False))(x))


@pytest.mark.parametrize(
    ("shape", "dtype", "to"),
    [
        ((128, 192), BF16, E4M3),
        ((2, 64, 64), F32, E5M2),
        slow((3, 64, 128), F16, E4M3),
        slow((64, 576), BF16, E5M2),
    ],
)
def test_the_kernels_equal_the_jnp_form_bit_for_bit(shape, dtype, to):
    x = normal(0, shape, dtype) * jnp.exp(3 * normal(1, shape)).astype(dtype)
    for a, b in zip(*both(x, to), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("special", [0.0, 1e-38, 3e38, np.inf, -np.inf, np.nan])
def test_the_kernels_equal_the_jnp_form_at_extreme_values(special):
    """All of x is 0, nearly 0, or small but for one value."""
    x = normal(0, (64, 64), F32, scale=0.0 if special == 0 else 1e-38)
    (mine, expected) = both(x.at[17, 40].set(special), E4M3)
    for a, b in zip(mine, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    inverse = mine[2].view(np.float32)
    assert np.isfinite(inverse) == np.isfinite(special)
    if special == 0:
        assert inverse == 1
        assert not mine[0].any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_jnp_form_rounds_to_the_nearest_value(dtype):
    """Against a search through all values of the format."""
    x = np.asarray(normal(0, (32, 48)) * jnp.exp(4 * normal(1, (32, 48))))
    values, transposed, inverse = cast(jnp.asarray(x), dtype, False)
    info = jnp.finfo(dtype)
    scale = 2.0 ** np.floor(np.log2(float(info.max) / np.abs(x).max()))
    assert inverse == 1 / scale
    all_values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    all_values = np.sort(all_values[np.isfinite(all_values)])
    scaled = (x * scale).astype(np.float64)
    distance = np.abs(scaled[..., None] - all_values).min(-1)
    got = np.asarray(values).astype(np.float64)
    np.testing.assert_array_equal(np.abs(scaled - got), distance)
    assert float(info.max) / 2 <= np.abs(got).max() <= float(info.max)
    np.testing.assert_array_equal(np.asarray(transposed).astype(np.float64), got.T)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1.75, 1.7500001, 1.0, 1.9999999, 2.0, 3.5, 3.5000002, 448.0])
def test_the_scale_is_the_largest_power_of_2_that_fits(dtype, largest):
    *_, inverse = cast(jnp.full((1, 1), largest, F32), dtype, False)
    limit, scaled = float(jnp.finfo(dtype).max), float(np.float32(largest)) / float(inverse)
    assert scaled <= limit < 2 * scaled
