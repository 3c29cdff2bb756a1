import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import ON_GPU, check_op, normal

from pallas_kernels.activations.activation import (
    gelu,
    gelu_backward_tile,
    gelu_reference,
)

KERNELS = ("gelu_forward", "gelu_backward")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, slow(jnp.float16)])
# 6144 leaves an aligned remainder after the whole blocks; XLA once failed to compile it on a GPU.
@pytest.mark.parametrize("shape", [(4, 1024), (1,), (3, 7, 101), (4097,), (6144,)])
def test_gelu_matches_float64(shape, dtype):
    check_op(gelu, gelu_reference, normal(0, shape, dtype, scale=3), kernels=KERNELS)


def test_gelu_of_extreme_values_is_finite():
    x = jnp.array([-60000.0, -1e4, -20, -1e-6, 0, 1e-6, 20, 1e4, 60000], jnp.float32)
    check_op(gelu, gelu_reference, x, kernels=KERNELS)


def test_the_slope_is_0_or_1_where_x_cubed_overflows():
    """In the kernels' formula and in the reference."""
    x = jnp.float32([1e13, 1.5e19, 1e20, 3e38])
    for sign, slope in ((1, 1), (-1, 0)):
        expected = jnp.full_like(x, slope)
        assert (jax.grad(lambda x: gelu_reference(x).sum())(sign * x) == expected).all()
        assert (gelu_backward_tile(sign * x, jnp.ones_like(x))[0] == expected).all()


def test_gelu_refuses_integers_with_the_reason():
    with pytest.raises(ValueError, match="x is int32: cast it to bfloat16, float16 or float32"):
        gelu(jnp.ones(3, jnp.int32), implementation="mosaic")


@pytest.mark.parametrize(
    ("shape", "dtype", "of_bias"),
    [
        ((2, 70, 1024), jnp.bfloat16, jnp.float32),
        ((131, 37), jnp.float16, jnp.float16),
        slow((1, 384), jnp.float32, jnp.float32),
    ],
)
def test_gelu_with_a_bias_matches_float64(shape, dtype, of_bias):
    bias = normal(1, shape[-1:], of_bias)
    kernels = KERNELS[1:] if dtype == jnp.bfloat16 else KERNELS
    check_op(gelu, gelu_reference, normal(0, shape, dtype, scale=2), bias, kernels=kernels)


@pytest.mark.skipif(not ON_GPU, reason="cuBLASLt is on GPUs")
def test_the_matmul_before_takes_bias_and_gelu():
    x, weight = normal(0, (256, 512), jnp.bfloat16), normal(1, (512, 1024), jnp.bfloat16)
    program = jax.jit(jax.vjp, static_argnums=0)
    f = lambda x, w, bias: gelu(x @ w, bias, implementation="mosaic")
    options = {"xla_gpu_enable_triton_gemm": False}  # as train.py has it
    text = program.lower(f, x, weight, normal(2, (1024,))).compile(options).as_text()
    assert '"epilogue":"BIAS_GELU_AUX"' in text


def test_a_bias_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), not \(4,\)"):
        gelu(jnp.ones((2, 4)), jnp.ones(3))
