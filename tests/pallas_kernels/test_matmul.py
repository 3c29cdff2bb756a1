"""The kernels of mlp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, names_in, normal

from pallas_kernels import mosaic
from pallas_kernels.activations import feed_forward
from pallas_kernels.activations.feed_forward import mlp

BF16, FP16 = jnp.bfloat16, jnp.float16


def swiglu_mlp(x, gate, up, down, **options):
    return mlp(x, up, down, gate=gate, **options)


def swiglu_mlp_reference(x, gate, up, down):
    return mlp(x, up, down, gate=gate, implementation="xla")


def gelu_mlp(x, up, bias, down, **options):
    return mlp(x, up, down, bias=bias, **options)


def gelu_mlp_reference(x, up, bias, down):
    return mlp(x, up, down, bias=bias, implementation="xla")


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    """Gives each block several tiles, as in a full grid."""
    monkeypatch.setattr(mosaic, "sm_count", lambda: 2)


# C = 448 is more steps than buffers.
@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"),
    [(384, 448, 128, BF16), slow(1152, 64, 256, BF16), (128, 64, 256, FP16)],
)
def test_swiglu_mlp_matches_float64(n, c, f, dtype):
    x, gate, up, down = mlp_arrays(n, c, f, dtype)
    kernels = ("swiglu_forward", "swiglu_mlp_backward")
    x = x.reshape(2, n // 2, c)
    check_op(swiglu_mlp, swiglu_mlp_reference, x, gate, up, down, kernels=kernels)


def mlp_arrays(n, c, f, dtype):
    scales = (1, 2 * c**-0.5, c**-0.5, f**-0.5)
    shapes = (n, c), (c, f), (c, f), (f, c)
    pairs = enumerate(zip(shapes, scales, strict=True))
    return [normal(i, shape, dtype, scale=scale) for i, (shape, scale) in pairs]


@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"),
    [(384, 448, 128, BF16), slow(1152, 64, 256, BF16), slow(128, 64, 256, FP16)],
)
def test_gelu_mlp_matches_float64(n, c, f, dtype):
    x, up, _, down = mlp_arrays(n, c, f, dtype)
    bias = normal(4, f, scale=0.1)
    kernels = ("gelu_mlp_backward",)  # forward in bf16 is cuBLASLt's
    x = x.reshape(2, n // 2, c)
    check_op(gelu_mlp, gelu_mlp_reference, x, up, bias, down, kernels=kernels)


@pytest.mark.parametrize("extreme", [1e30, slow(1e4), slow(90.0)])
def test_extreme_activations_are_finite(extreme):
    x, gate, up, down = mlp_arrays(128, 128, 128, BF16)
    gate = jnp.diag(jnp.tile(jnp.array([-extreme, extreme, 1, 0], BF16), 32))
    kernels = ("swiglu_forward", "swiglu_mlp_backward")
    check_op(swiglu_mlp, swiglu_mlp_reference, x, gate, up, down, kernels=kernels)


def test_shapes_and_options_that_do_not_fit_are_errors():
    x, gate, up, down = mlp_arrays(128, 64, 128, BF16)
    for options, message in (
        (dict(gate=gate, bias=jnp.ones(128)), "a gate .SwiGLU. or a bias .GELU., not both"),
        (dict(bias=jnp.ones(64)), r"bias has shape \(64,\), not \(128,\)"),
        (dict(gate=down), r"x, up, down and gate .* are not \(\.\.\., C\)"),
        (dict(precision="int8"), "precision='int8' is not one of fp8"),
    ):
        with pytest.raises(ValueError, match=message):
            mlp(x, up, down, **options)


@pytest.mark.parametrize(
    ("n", "c", "f", "dtype", "reason"),
    [
        (128, 64, 128, "float32", "weight is float32, inputs are float32, not bfloat16 or float16"),
        (192, 64, 128, "bfloat16", "rows=192 is not a positive multiple of 128"),
        (128, 96, 128, "bfloat16", "C=96 is not a positive multiple of 64"),
        (128, 64, 192, "bfloat16", "F=192 is not a positive multiple of 128"),
    ],
)
def test_a_layer_that_hoppers_kernels_cannot_take(n, c, f, dtype, reason):
    x, gate, up, down = mlp_arrays(n, c, f, dtype)
    assert feed_forward.why_not(x, up, down, gate, None) == reason
    run = jax.jit(functools.partial(swiglu_mlp, implementation="mosaic"))
    text = run.trace(x, gate, up, down).lower(lowering_platforms=("cuda",)).as_text()
    assert "swiglu_forward" in names_in(text)  # between XLA's matmuls
    y = swiglu_mlp(x, gate, up, down, implementation="xla")
    np.testing.assert_array_equal(y, swiglu_mlp_reference(x, gate, up, down))


def test_the_products_have_a_name():
    """So that a policy of jax.checkpoint can save them, and h be computed again."""
    x, gate, up, down = mlp_arrays(128, 64, 128, BF16)
    for implementation in ("xla", "mosaic"):
        op = functools.partial(swiglu_mlp, implementation=implementation)
        assert str(jax.make_jaxpr(op)(x, gate, up, down)).count("name=mlp") == 2


@pytest.mark.parametrize("wrong", range(4))
def test_weights_that_do_not_fit_are_an_error(wrong):
    shapes = [(2, 64), (64, 128), (64, 128), (128, 64)]
    shapes[wrong] = (128, 96)
    with pytest.raises(ValueError, match=r"\(128, 96\).* are not \(\.\.\., C\)"):
        swiglu_mlp(*map(jnp.ones, shapes))
