"""quantized_linear with a plain weight, for which x is quantised, too: int8 x int8, fp8 x fp8."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import ON_GPU, normal

from pallas_kernels import dispatch, quantize, quantized_linear
from pallas_kernels.quantized.formats import PlainWeight, dequantize
from pallas_kernels.quantized.op import quantize_rows

FORMATS = ["int", "fp8"]


def packed(format, k=320, n=72):
    w = normal(1, (k, n)) * jnp.exp(normal(2, (k, n)))
    return quantize(w, bits=8, group=None, format=format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_plain_weight_has_the_codes_of_the_packed_one(format):
    weight = packed(format)
    plain = weight.plain()
    assert (plain.shape, plain.codes.shape) == ((320, 72), (72, 320))
    assert plain.codes.dtype == (jnp.int8 if format == "int" else jnp.float8_e4m3fn)
    np.testing.assert_array_equal(dequantize(plain), dequantize(weight))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_rounded_to_the_nearest_code(format):
    x = np.array(normal(0, (70, 320)) * jnp.exp(3 * normal(3, (70, 320))))
    x[3], x[5, :2] = 0, [-1e-30, 1e-30]
    codes, scales = quantize_rows(jnp.asarray(x), packed(format).plain().codes.dtype)
    assert scales.dtype == jnp.float32
    codes, t = np.asarray(codes).astype(np.float64), np.asarray(scales).astype(np.float64)
    x = x.astype(np.float64)
    bound = t / 2 if format == "int" else 2**-4 * np.abs(x) + 2**-10 * t
    assert (np.abs(x - codes * t) <= bound + 2**-22 * np.abs(x).max(1, keepdims=True)).all()
    assert (np.abs(codes).max(1) == (127 if format == "int" else 448))[x.any(1)].all()


@pytest.mark.parametrize("format", FORMATS)
def test_errors_are_those_of_the_rounded_rows(format):
    x, weight = normal(0, (70, 320), jnp.bfloat16), packed(format).plain()
    y = np.asarray(quantized_linear(x, weight), np.float64)
    x, w = np.asarray(x, np.float64), np.asarray(dequantize(weight), np.float64)
    t = np.abs(x).max(1, keepdims=True) / (127 if format == "int" else 448)
    off = t / 2 + 0 * x if format == "int" else 2**-4 * np.abs(x) + 2**-10 * t
    assert (np.abs(y - x @ w) <= off @ np.abs(w) + 2**-8 * np.abs(x @ w)).all()
    error, unquantised = (np.sqrt(np.mean(np.square(a))) for a in (y - x @ w, x @ w))
    assert error < (0.015 if format == "int" else 0.04) * unquantised


def test_int8_is_exact_but_for_the_rows_and_the_last_rounding():
    x, weight, bias = normal(0, (2, 35, 320), jnp.bfloat16), packed("int").plain(), normal(3, (72,))
    rows = jax.jit(quantize_rows, static_argnums=1)(x.reshape(70, 320), jnp.int8)
    codes, t = map(np.asarray, rows)
    sums = codes.astype(np.int64) @ np.asarray(weight.codes).astype(np.int64).T
    expected = (sums.astype(np.float32) * t * np.asarray(weight.scales)).reshape(2, 35, 72)
    for b in (None, bias):
        y = expected if b is None else expected + np.asarray(b)
        actual = jax.jit(quantized_linear)(x, weight, b)
        np.testing.assert_array_equal(actual, jnp.asarray(y).astype(jnp.bfloat16))


@pytest.mark.skipif(not ON_GPU, reason="docs/decoding.md says what a CPU compiled ahead of time")
@pytest.mark.parametrize("format", FORMATS)
def test_cublaslt_multiplies(format):  # Triton is off in tests
    x, weight = normal(0, (70, 320), jnp.bfloat16), packed(format).plain()
    program = jax.jit(quantized_linear).lower(x, weight).compile().as_text()
    assert "__cublas$lt$matmul" in program


def test_rows_that_are_not_finite_stay_alone():
    x = normal(0, (4, 320), jnp.bfloat16).at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf)
    for format in FORMATS:
        finite = jnp.isfinite(quantized_linear(x, packed(format).plain())).all(1)
        np.testing.assert_array_equal(finite, [True, False, False, True])


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_is_that_of_x_not_quantised(format):
    weight, x, bias = packed(format).plain(), normal(0, (5, 320)), normal(3, (72,))
    y, pull = jax.vjp(lambda x, bias: quantized_linear(x, weight, bias), x, bias)
    dy = jnp.cos(y)
    dx, dbias = pull(dy)
    np.testing.assert_allclose(dx, dy @ dequantize(weight).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dbias, dy.sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(bits=4, group=None),
        dict(bits=8, group=32),
        dict(bits=8, group=None, symmetric=False),
        dict(bits=8, group=None, format="2:4"),
    ],
)
def test_other_weights_have_no_plain_form(options):
    weight = quantize(normal(1, (320, 64)), **options)
    with pytest.raises(ValueError, match=r"has no plain form: quantize with bits=8, group=None"):
        weight.plain()


def test_explain_says_nobody_asked_for_xla():
    dispatch.reset()
    quantized_linear(normal(0, (2, 320)), packed("int").plain())
    assert [d.kind for d in dispatch.decisions()] == ["fits"]


def test_what_a_plain_weight_refuses():
    x, weight = normal(0, (2, 320), jnp.bfloat16), packed("int").plain()
    with pytest.raises(NotImplementedError, match="the weight is plain"):
        quantized_linear(x, weight, implementation="mosaic")
    with pytest.raises(ValueError, match=re.escape("the weight needs (..., 320)")):
        quantized_linear(x[:, 1:], weight)
    wrong = PlainWeight(weight.codes, weight.scales[1:])
    with pytest.raises(ValueError, match=re.escape("not int8 (72, 320) and (71,)")):
        quantized_linear(x, wrong)
