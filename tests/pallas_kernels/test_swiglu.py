import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels.activations.activation import swiglu, swiglu_reference

KERNELS = ("swiglu_forward", "swiglu_backward")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, slow(jnp.float16)])
@pytest.mark.parametrize("shape", [(4, 1024), (1,), (3, 7, 401)])
def test_swiglu_matches_float64(shape, dtype):
    gate, up = normal(0, shape, dtype, scale=3), normal(1, shape, dtype)
    check_op(swiglu, swiglu_reference, gate, up, kernels=KERNELS)


def test_swiglu_of_extreme_gates_is_finite():
    gate = jnp.array([-3e38, -1e4, -100, -20, -1e-6, 0, 1e-6, 20, 100, 1e4], jnp.float32)
    check_op(swiglu, swiglu_reference, gate, normal(0, gate.shape), kernels=KERNELS)


def test_swiglu_reference_is_the_formula():
    gate, up = np.array([-2.0, 0.0, 1.0]), np.array([3.0, 5.0, -7.0])
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(
        swiglu_reference(jnp.float32(gate), jnp.float32(up)), expected, rtol=1e-6
    )


def test_swiglu_of_two_dtypes_runs_on_xla_in_the_wider_one():
    gate, up = normal(0, (8,), jnp.bfloat16), normal(1, (8,), jnp.float32)
    assert swiglu(gate, up).dtype == jnp.float32
    with pytest.raises(NotImplementedError, match="gate is bfloat16 but up is float32"):
        swiglu(gate, up, implementation="mosaic")


def test_swiglu_refuses_two_shapes():
    with pytest.raises(ValueError, match=r"gate has shape \(8,\) but up has \(1,\)"):
        swiglu(jnp.ones(8), jnp.ones(1))
