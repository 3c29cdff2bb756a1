import jax.numpy as jnp
import pytest
from kernel_checks import check_op, normal

from pallas_kernels.gelu import gelu, gelu_reference

KERNELS = ("gelu_forward", "gelu_backward")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(4, 1024), (1,), (3, 7, 101), (4097,)])
def test_gelu_matches_float64(shape, dtype):
    check_op(gelu, gelu_reference, normal(0, shape, dtype, scale=3), kernels=KERNELS)


def test_gelu_of_extreme_values_is_finite():
    x = jnp.array([-60000.0, -1e4, -20, -1e-6, 0, 1e-6, 20, 1e4, 60000], jnp.float32)
    check_op(gelu, gelu_reference, x, kernels=KERNELS)


def test_gelu_refuses_integers_with_the_reason():
    with pytest.raises(NotImplementedError, match="x is int32, not float32, bfloat16 or float16"):
        gelu(jnp.ones(3, jnp.int32), backend="mosaic")
