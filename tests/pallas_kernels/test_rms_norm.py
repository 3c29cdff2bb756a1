import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import assert_lowers, check_op, normal

from pallas_kernels import rms_norm

rms_norm_reference = functools.partial(rms_norm, implementation="xla")
KERNELS = ("rms_norm_forward", "rms_norm_backward")
ADD_KERNELS = tuple(f"add_{name}" for name in KERNELS)
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 64), f32), slow((2, 3, 768), f16), slow((3, 1280), bf16)]
)
def test_rms_norm_matches_float64(shape, dtype):
    x = normal(0, shape, dtype, scale=2, offset=1)
    check_op(rms_norm, rms_norm_reference, x, normal(1, shape[-1:]), kernels=KERNELS)


def test_weights_for_each_head():
    x = normal(0, (29, 2, 64), bf16)
    check_op(rms_norm, rms_norm_reference, x, normal(1, (2, 64), bf16), kernels=KERNELS)


@pytest.mark.parametrize("offset", [1e-6, slow(1e4)])
def test_extreme_values(offset):
    x = normal(0, (5, 64), scale=offset, offset=offset)
    check_op(rms_norm, rms_norm_reference, x, normal(1, (64,)), kernels=KERNELS)


def test_rms_norm_with_a_residual_matches_float64():
    x, residual, weight = normal(0, (5, 768), bf16), normal(3, (5, 768), bf16), normal(1, (768,))
    op = lambda x, residual, weight, **k: rms_norm(x, weight, residual=residual, **k)
    reference = lambda x, residual, w, **k: rms_norm_reference(x, w, residual=residual, **k)
    check_op(op, reference, x, residual, weight, kernels=ADD_KERNELS)


def test_a_bias_before_the_residual_and_nothing_else():
    x, residual, bias = normal(0, (8, 64)), normal(3, (8, 64)), normal(1, (64,))
    op = lambda x, residual, x_bias, **k: rms_norm(x, residual=residual, x_bias=x_bias, **k)
    reference = lambda x, r, b, **k: rms_norm_reference(x, residual=r, x_bias=b, **k)
    check_op(op, reference, x, residual, bias, kernels=ADD_KERNELS)


def test_reference_matches_its_definition():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 50)), rng.standard_normal(50)
    with jax.enable_x64(True):
        y = np.asarray(rms_norm_reference(jnp.asarray(x), jnp.asarray(w), eps=1e-3))
    np.testing.assert_allclose(y, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * w)


def test_a_kernel_is_found_by_its_whole_name():
    x, op = jnp.ones((8, 64)), lambda x: rms_norm(x, residual=x, implementation="mosaic")
    assert_lowers(op, (x,), ["add_rms_norm_forward"])
    for part in ("rms_norm_forward", "add_rms_norm"):
        with pytest.raises(AssertionError, match="the traced program lacks the kernels"):
            assert_lowers(op, (x,), [part])
