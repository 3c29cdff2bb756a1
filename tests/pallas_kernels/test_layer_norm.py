import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels import layer_norm

layer_norm_reference = functools.partial(layer_norm, implementation="xla")
KERNELS = ("layer_norm_forward", "layer_norm_backward")
ADD_KERNELS = tuple(f"add_{name}" for name in KERNELS)
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def add(op):
    """The op with the residual, and perhaps a bias before it, among its arrays."""
    return lambda x, residual, weight=None, bias=None, x_bias=None, **options: op(
        x, weight, bias, residual=residual, x_bias=x_bias, **options
    )


def parameters(*shape, dtype=f32):
    return normal(1, shape, dtype, offset=1), normal(2, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 64), f16),  # rows are padded
        slow((9, 192), f32),
        slow((3, 768), bf16),  # wide: four blocks of a row at once
        ((8, 768), bf16),  # narrow: four rows at once
        ((1, 1600), f32),  # the last chunk repeats three blocks
    ],
)
def test_layer_norm_matches_float64(shape, dtype):
    x = normal(0, shape, dtype, scale=2, offset=1)
    check_op(layer_norm, layer_norm_reference, x, *parameters(shape[-1]), kernels=KERNELS)


def test_a_block_that_works_through_many_tiles(one_block):
    x = normal(0, (13, 1280), bf16)
    check_op(layer_norm, layer_norm_reference, x, *parameters(1280), kernels=KERNELS)


@pytest.mark.parametrize("columns", [5120, slow(2560)])
def test_wide_rows_of_which_a_tile_has_one(one_block, columns):
    x = normal(0, (4, columns), bf16)
    check_op(layer_norm, layer_norm_reference, x, *parameters(columns), kernels=KERNELS)


def test_a_large_offset_does_not_hurt_the_variance(one_block):
    x = normal(0, (45, 256), offset=1000)
    check_op(layer_norm, layer_norm_reference, x, *parameters(256), kernels=KERNELS)


def test_rows_whose_variance_is_infinite():
    """Their norm is the bias, as in float32's formula, and not NaN."""
    x = normal(0, (4, 128), scale=1e30)
    check_op(layer_norm, layer_norm_reference, x, *parameters(128), kernels=KERNELS)


@pytest.mark.parametrize(
    ("which", "shape"),
    [("weight", (5, 128)), slow("bias", (3, 64)), slow("neither", (5, 64))],
)
def test_parameters_are_optional(which, shape):
    x, (weight, bias) = normal(0, shape), parameters(shape[-1])
    weight, bias = (weight if which == "weight" else None), (bias if which == "bias" else None)
    kernels = KERNELS[: 2 if which == "neither" else 3]
    check_op(layer_norm, layer_norm_reference, x, weight, bias, kernels=kernels)


def test_parameters_for_each_head(one_block):
    x = normal(0, (2, 19, 3, 128), bf16)
    check_op(layer_norm, layer_norm_reference, x, *parameters(3, 128, dtype=bf16), kernels=KERNELS)


@pytest.mark.parametrize(
    ("shape", "dtype", "residual"),
    [((2, 2, 768), bf16, bf16), slow((3, 1280), bf16, f32), slow((3, 64), f32, f32)],
)
def test_layer_norm_with_a_residual_matches_float64(shape, dtype, residual):
    check_op(
        add(layer_norm),
        add(layer_norm_reference),
        normal(0, shape, dtype),
        normal(3, shape, residual),
        *parameters(shape[-1]),
        kernels=ADD_KERNELS,
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "residual"), [((12, 768), bf16, bf16), slow((5, 1280), f16, f32)]
)
def test_a_bias_before_the_residual(one_block, shape, dtype, residual):
    check_op(
        add(layer_norm),
        add(layer_norm_reference),
        normal(0, shape, dtype),
        normal(3, shape, residual),
        *parameters(shape[-1]),
        normal(4, shape[-1:]),
        kernels=ADD_KERNELS,
    )


def test_a_bias_for_each_head_and_no_weight():
    """The forward pass keeps its statistics in the order in which the backward pass reads them."""
    x, residual, x_bias = (normal(i, (9, 2, 64)[i // 2 :]) for i in range(3))
    arrays = x, residual, None, None, x_bias
    check_op(
        add(layer_norm), add(layer_norm_reference), *arrays, kernels=["add_layer_norm_backward"]
    )


def test_x_and_its_bias_are_rounded_before_a_wider_residual_is_added():
    x, residual = normal(0, (9, 64), bf16), normal(1, (9, 64))
    x_bias = normal(2, (64,), f16)
    expected = (x + x_bias.astype(bf16)).astype(f32) + residual
    for implementation in (None, "xla"):
        call = jax.jit(lambda how=implementation: add(layer_norm)(
            x, residual, None, None, x_bias, implementation=how
        ))  # fmt: skip
        np.testing.assert_array_equal(call()[1], expected)


def test_refusals_and_errors_name_the_reason():
    x = jnp.ones((4, 64))
    with pytest.raises(NotImplementedError, match="C=8200 is more than 8192"):
        layer_norm(jnp.ones((2, 8200)), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="C=100 is not a positive multiple of 64"):
        layer_norm(jnp.ones((2, 100)), implementation="mosaic")
    with pytest.raises(NotImplementedError, match="residual is bfloat16, narrower than x"):
        layer_norm(x, residual=x.astype(bf16), implementation="mosaic")
    with pytest.raises(ValueError, match=r"x_bias has shape \(32,\), not the last axes"):
        layer_norm(x, residual=x, x_bias=jnp.ones(32))
    with pytest.raises(ValueError, match=r"weight \(64,\), x_bias \(4, 64\): all must be"):
        layer_norm(x, jnp.ones(64), residual=x, x_bias=x)
    with pytest.raises(ValueError, match=r"weight has shape \(32,\), not the last axes"):
        layer_norm(x, jnp.ones(32))
    with pytest.raises(ValueError, match="x_bias needs a residual"):
        layer_norm(x, x_bias=jnp.ones(64))
    with pytest.raises(ValueError, match="a gate excludes bias and residual"):
        layer_norm(x, gate=x, residual=x)


def test_reference_matches_its_definition():
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((3, 50)), rng.standard_normal(50), rng.standard_normal(50)
    with jax.enable_x64(True):
        y = np.asarray(layer_norm_reference(jnp.asarray(x), jnp.asarray(w), jnp.asarray(b)))
    var = x.var(-1, keepdims=True)
    np.testing.assert_allclose(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(var + 1e-5) * w + b)
