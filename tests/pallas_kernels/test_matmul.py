"""The kernels of swiglu_mlp, and of the backward passes of swiglu_linear and gelu_linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import check_op, kernels_run_here, names_in, normal

from pallas_kernels import dispatch, mosaic
from pallas_kernels.activations.activated_matmul import activated_matmul
from pallas_kernels.activations.gelu import derivative_tile as gelu_tile
from pallas_kernels.activations.gelu import (
    gelu_linear,
    gelu_linear_reference,
    gelu_mlp,
    gelu_mlp_reference,
    gelu_reference,
)
from pallas_kernels.activations.matmul_epilogue import matmul_with_epilogue, times
from pallas_kernels.activations.swiglu import derivative_tile as swiglu_tile
from pallas_kernels.activations.swiglu import (
    swiglu_linear,
    swiglu_linear_reference,
    swiglu_mlp,
    swiglu_mlp_reference,
    swiglu_reference,
)

BF16, FP16 = jnp.bfloat16, jnp.float16
SWIGLU = ("swiglu_forward", "swiglu_linear_backward")
# In bf16 cuBLASLt fuses the forward pass with the matmul before.
GELU = {BF16: ("gelu_linear_backward",), FP16: ("gelu_forward", "gelu_linear_backward")}


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    """Gives each block several tiles, as in a full grid."""
    monkeypatch.setattr(mosaic, "sm_count", lambda: 2)


# Nine rows of tiles make the last group smaller.  K = 64 is one step.
@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"),
    [(1152, 64, 128, BF16), slow(384, 192, 256, BF16), slow(128, 448, 128, FP16)],
)
def test_swiglu_linear_matches_float64(n, c, f, dtype):
    gate, up = normal(0, (n, f), dtype, scale=2), normal(1, (n, f), dtype)
    weight = normal(2, (f, c), dtype, scale=f**-0.5)
    check_op(swiglu_linear, swiglu_linear_reference, gate, up, weight, kernels=SWIGLU)


@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"), [(384, 192, 256, BF16), slow(256, 64, 384, FP16)]
)
def test_gelu_linear_matches_float64(n, c, f, dtype):
    x, bias = normal(0, (2, n // 2, f), dtype, scale=2), normal(1, (f,))
    weight = normal(2, (f, c), dtype, scale=f**-0.5)
    check_op(gelu_linear, gelu_linear_reference, x, bias, weight, kernels=GELU[dtype])


# C = 448 is more steps than buffers.
@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"),
    [(384, 448, 128, BF16), slow(1152, 64, 256, BF16), (128, 64, 256, FP16)],
)
def test_swiglu_mlp_matches_float64(n, c, f, dtype):
    x, gate, up, down = mlp_arrays(n, c, f, dtype)
    kernels = ("swiglu_mlp_forward", "swiglu_mlp_backward")
    x = x.reshape(2, n // 2, c)
    check_op(swiglu_mlp, swiglu_mlp_reference, x, gate, up, down, kernels=kernels)


def mlp_arrays(n, c, f, dtype):
    scales = (1, 2 * c**-0.5, c**-0.5, f**-0.5)
    shapes = (n, c), (c, f), (c, f), (f, c)
    pairs = enumerate(zip(shapes, scales, strict=True))
    return [normal(i, shape, dtype, scale=scale) for i, (shape, scale) in pairs]


@pytest.mark.parametrize(
    ("n", "c", "f", "dtype"),
    [(384, 448, 128, BF16), slow(1152, 64, 256, BF16), (128, 64, 256, FP16)],
)
def test_gelu_mlp_matches_float64(n, c, f, dtype):
    x, up, _, down = mlp_arrays(n, c, f, dtype)
    bias = normal(4, f, scale=0.1)
    kernels = ("gelu_mlp_forward", "gelu_mlp_backward")
    x = x.reshape(2, n // 2, c)
    check_op(gelu_mlp, gelu_mlp_reference, x, up, bias, down, kernels=kernels)


def test_the_forward_kernels_store_results_and_derivatives():
    """Each rounded once: a product that was rounded first would differ in many places."""
    x, gate, up, _ = mlp_arrays(256, 128, 256, BF16)
    bias = normal(4, 256)

    def run(weights, bias, tile, function):
        kernel = functools.partial(activated_matmul, name="mlp_forward", sms=2)
        with kernels_run_here():
            stored = jax.device_get(jax.jit(kernel, static_argnums=3)(x, weights, bias, tile))
        wide = lambda a: np.asarray(a, np.float64)
        products = [wide(x) @ wide(w) + (0 if bias is None else wide(bias)) for w in weights]
        with jax.enable_x64(True):
            h, backward = jax.vjp(function, *map(jnp.asarray, products))
            exact = [h, *backward(jnp.ones_like(h))]
        for got, expected in zip(stored, exact, strict=True):
            rounded = np.asarray(expected.astype(BF16), np.float32)
            np.testing.assert_allclose(got.astype(np.float32), rounded, rtol=2**-7, atol=1e-5)
            assert np.mean(got.astype(np.float32) == rounded) > 0.99

    run((up,), bias, gelu_tile, gelu_reference)
    run((gate, up), None, swiglu_tile, swiglu_reference)


def test_joint_outputs_are_the_separate_ones_side_by_side():
    """Bit for bit; swapped halves, or tiles at a wrong column, would differ."""
    n, k, f = 256, 64, 384
    a, b = normal(0, (n, k), BF16), normal(1, (f, k), BF16)
    slopes = normal(2, (n, f), BF16), normal(3, (n, f), BF16)
    options = dict(outputs=2, name="matmul", sms=2)
    with kernels_run_here():
        separate = matmul_with_epilogue(a, b, slopes, times, **options)
        (joint,) = matmul_with_epilogue(a, b, slopes, times, joint=True, **options)
    np.testing.assert_array_equal(joint, np.concatenate(separate, axis=1))


@pytest.mark.parametrize("extreme", [1e30, slow(1e4), slow(90.0)])
def test_extreme_activations_are_finite(extreme):
    x = jnp.tile(jnp.array([-extreme, extreme, 1, 0], BF16), (128, 32))
    up, weight = normal(1, x.shape, BF16), normal(2, (128, 64), BF16)
    check_op(swiglu_linear, swiglu_linear_reference, x, up, weight, kernels=SWIGLU)


@pytest.mark.parametrize(
    ("rows", "c", "f", "dtype", "reason"),
    [
        (
            128,
            64,
            128,
            "float32",
            "weight is float32, inputs are float32, not bfloat16 or float16",
        ),
        (192, 64, 128, "bfloat16", "rows=192 is not a positive multiple of 128"),
        (128, 64, 192, "bfloat16", "F=192 is not a positive multiple of 128"),
        (128, 96, 128, "bfloat16", "C=96 is not a positive multiple of 64"),
    ],
)
def test_a_call_that_the_kernel_cannot_take(rows, c, f, dtype, reason, monkeypatch):
    x, bias, weight = normal(0, (rows, f), dtype), jnp.ones(f), normal(2, (f, c), dtype)
    for op, arrays in (swiglu_linear, (x, x, weight)), (gelu_linear, (x, bias, weight)):
        with pytest.raises(NotImplementedError, match=rf"^{op.__name__} has no .*: {reason}$"):
            op(*arrays, implementation="mosaic")
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)  # pretends there is a GPU
    dispatch.reset()
    run = jax.jit(swiglu_linear).trace(x, x, weight).lower(lowering_platforms=("cuda",))
    assert "swiglu_forward" in names_in(run.as_text())
    fused, alone = dispatch.decisions()
    assert fused == ("swiglu_linear", "xla", reason)
    assert alone == ("swiglu", "mosaic", "supported")
    dispatch.reset()
    y = swiglu_linear(x, x, weight, implementation="xla")
    np.testing.assert_array_equal(y, swiglu_linear_reference(x, x, weight))


@pytest.mark.parametrize(
    ("n", "c", "f", "dtype", "reason"),
    [
        (128, 64, 128, "float32", "weight is float32, inputs are float32, not bfloat16 or float16"),
        (192, 64, 128, "bfloat16", "rows=192 is not a positive multiple of 128"),
        (128, 96, 128, "bfloat16", "C=96 is not a positive multiple of 64"),
        (128, 64, 192, "bfloat16", "F=192 is not a positive multiple of 128"),
    ],
)
def test_a_layer_that_the_kernels_cannot_take(n, c, f, dtype, reason):
    arrays = mlp_arrays(n, c, f, dtype)
    with pytest.raises(NotImplementedError, match=rf"^swiglu_mlp has no .*: {reason}$"):
        swiglu_mlp(*arrays, implementation="mosaic")
    y = swiglu_mlp(*arrays, implementation="xla")
    np.testing.assert_array_equal(y, swiglu_mlp_reference(*arrays))


def test_the_products_have_a_name_where_xla_multiplies():
    """So that a policy of jax.checkpoint can save them, and h be computed again."""
    x, gate, up, down = mlp_arrays(128, 64, 128, BF16)
    text = str(jax.make_jaxpr(lambda *a: swiglu_mlp(*a, implementation="xla"))(x, gate, up, down))
    assert text.count("name=mlp") == 2


@pytest.mark.parametrize(("rows", "runs"), [(2048, "xla"), (8192, "mosaic")])
def test_xla_multiplies_where_the_tiles_are_few(rows, runs, monkeypatch):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    monkeypatch.setattr(mosaic, "sm_count", lambda: 132)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
    up, down = of(768, 2048), of(2048, 768)
    for op, arrays in (swiglu_mlp, (up, up, down)), (gelu_mlp, (up, of(2048), down)):
        text = str(jax.make_jaxpr(op)(of(rows, 768), *arrays))
        assert (f"{op.__name__}_forward" in text) == (runs == "mosaic")


@pytest.mark.parametrize("wrong", range(4))
def test_weights_that_do_not_fit_are_an_error(wrong):
    shapes = [(2, 64), (64, 128), (64, 128), (128, 64)]
    shapes[wrong] = (128, 96)
    with pytest.raises(ValueError, match=r"\(128, 96\).* do not fit"):
        swiglu_mlp(*map(jnp.ones, shapes))


@pytest.mark.parametrize("f", [64, 256])
def test_shapes_that_do_not_fit_are_an_error(f):
    x, bias, weight = jnp.ones((2, 128)), jnp.ones(128), jnp.ones((f, 64))
    with pytest.raises(ValueError, match=rf"weight \({f}, 64\) do not fit"):
        swiglu_linear(x, x, weight)
    with pytest.raises(ValueError, match=rf"weight \({f}, 64\) do not fit"):
        gelu_linear(x, bias, weight)
