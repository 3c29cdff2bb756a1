"""quantize_fp8: the kernels against the jnp form, bit for bit, and that against NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import slow
from kernel_checks import assert_lowers, kernels_run_here, normal

from pallas_kernels import quantize_fp8
from pallas_kernels.float8.quantize import quantize_fp8_reference

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
KERNELS = ["fp8_maximum", "quantize_fp8"]


def bits(arrays):
    values, transposed, inverse = (np.asarray(a) for a in arrays)
    return values.view(np.uint8), transposed.view(np.uint8), inverse.view(np.uint32)


def both(x, dtype):
    """The bits of the kernels' results and of the jnp form's."""

    def run(x):
        return quantize_fp8(x, dtype=dtype, implementation="mosaic")

    assert_lowers(run, (x,), KERNELS)
    with kernels_run_here():
        mine = bits(jax.jit(run)(x))
    return mine, bits(jax.jit(lambda x: quantize_fp8_reference(x, dtype=dtype))(x))


@pytest.mark.parametrize(
    ("shape", "dtype", "to"),
    [
        ((128, 192), BF16, E4M3),
        slow((2, 64, 64), F32, E5M2),
        slow((3, 64, 128), F16, E4M3),
        slow((64, 576), BF16, E5M2),
    ],
)
def test_the_kernels_equal_the_jnp_form_bit_for_bit(shape, dtype, to):
    x = normal(0, shape, dtype) * jnp.exp(3 * normal(1, shape)).astype(dtype)
    for a, b in zip(*both(x, to), strict=True):
        np.testing.assert_array_equal(a, b)
