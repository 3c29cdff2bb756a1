"""Calls that random ones do not draw, against float64 formulas: results that were wrong once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import normal

import pallas_kernels as ops
from pallas_kernels.quantized.formats import dequantize


def wide(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("scale", [1.0, 1e13, 1e15, 1e16])
@pytest.mark.parametrize("op", [ops.layer_norm, ops.rms_norm, ops.row_linear])
def test_gradients_of_a_norm_of_large_rows(op, scale):
    """r^3, which the gradient of rsqrt takes, left float32's range: a part of dx was lost."""
    x, w, dy = (normal(i, (1, 64), scale=s) for i, s in enumerate((scale, 1, 1)))
    options = dict(implementation="xla")
    if op is ops.row_linear:
        run = lambda x: op(x, [jnp.eye(64)], norm_weight=w[0], centered=False, **options)[0]
    else:
        run = lambda x: op(x, w[0], **options)
    (dx,) = jax.vjp(run, x)[1](dy)
    mean = lambda x: x.mean(-1, keepdims=True)
    z, g, centred = wide(x), wide(w) * wide(dy), op is ops.layer_norm
    z = z - mean(z) if centred else z
    r = 1 / np.sqrt(mean(z * z) + 1e-5)
    true = r * (g - centred * mean(g) - z * r * mean(g * z * r))
    np.testing.assert_allclose(wide(dx) / r, true / r, atol=1e-5)


@pytest.mark.parametrize(
    "op",
    [
        lambda x, bias: 2 * ops.gelu(x, bias),
        lambda x, bias: ops.fp8_linear(x, jnp.eye(24, dtype=x.dtype), bias),
        lambda x, bias: ops.layer_norm(x, residual=x, x_bias=bias)[1],
    ],
    ids=["gelu", "fp8_linear, not in fp8", "layer_norm"],
)
def test_the_gradient_of_a_bias_is_summed_in_float32(op):
    """XLA's forms summed it in x's dtype, with an error of 1% where rounding it once makes 0.2%."""
    x = jnp.zeros((1000, 24), jnp.bfloat16)
    dy = jax.random.uniform(jax.random.key(0), x.shape).astype(x.dtype)
    _, dbias = jax.jit(lambda *a: jax.vjp(op, *a)[1](dy))(x, jnp.zeros(24))
    np.testing.assert_allclose(dbias, wide(dy).sum(0), rtol=1e-6)


@pytest.mark.parametrize("x", [1e12, 1e14, 1e30, -1e30])
def test_gradients_of_a_gelu_after_a_matmul(x):
    """x^3 was infinite, and infinity times the slope 0 of tanh was NaN."""
    options = dict(activation="gelu", implementation="xla")
    run = lambda x: ops.row_linear(x, [jnp.ones((1, 32))], **options)[0].sum()
    dx = jax.grad(run)(jnp.full((1, 32), x))
    np.testing.assert_allclose(dx, float(x > 0), rtol=1e-2)


@pytest.mark.parametrize("gate", [1e20, -1e20])
def test_gradients_of_a_swiglu_of_large_products(gate):
    """gate up was infinite, and infinity times the slope 0 of the sigmoid was NaN."""
    run = lambda gate, up: ops.swiglu(gate, up, implementation="xla").sum()
    dgate, dup = jax.grad(run, (0, 1))(jnp.full((1, 8), gate), jnp.full((1, 8), 1e20))
    np.testing.assert_allclose([dgate, dup], np.full((2, 1, 8), 1e20 * (gate > 0)), rtol=1e-6)


@pytest.mark.parametrize("power", [-70, 125])
@pytest.mark.parametrize(
    "options",
    [
        dict(bits=8),
        dict(bits=4, symmetric=False),
        slow(dict(bits=2)),
        slow(dict(bits=1)),
        dict(bits=4, format="2:4"),
    ],
)
def test_a_power_of_two_changes_no_code(power, options):
    """Squared errors left float32's range, so all clips were equal, and the first one won.  Beyond
    1e37 ranges and sums of weights left it, too, and the scales were infinite.
    """
    w = normal(0, (128, 16))
    one, other = (dequantize(ops.quantize(w * 2.0**p, **options)) for p in (0, power))
    np.testing.assert_array_equal(wide(one) * 2.0**power, wide(other))


def test_subnormal_numbers_of_float16_stay():
    """lax.reduce_precision takes them for 0: 367 of these weights."""
    weight = ops.quantize(normal(0, (128, 64), scale=1e-3), bits=8, format="fp8")
    exact = dequantize(weight)
    np.testing.assert_array_equal(dequantize(weight, jnp.float16), exact.astype(jnp.float16))
    assert abs(exact).min() < jnp.finfo(jnp.float16).tiny
    y, pull = jax.vjp(ops.gelu, jnp.float16([3e-5]))
    np.testing.assert_allclose([y, *pull(y)], [[1.5e-5], [7.5e-6]], rtol=1e-2)


@pytest.mark.parametrize("precision", [None, "fp8"])
@pytest.mark.parametrize("name", ["gate", "bias"])
def test_mlp_has_the_dtype_of_x_beside_wider_weights(name, precision):
    """It was float32: jnp.matmul promotes."""
    x, weights = jnp.ones((16, 32), jnp.bfloat16), (jnp.ones((32, 16)), jnp.ones((16, 32)))
    last = {"gate": jnp.ones((32, 16)), "bias": jnp.ones(16)}[name]
    run = lambda x: ops.mlp(x, *weights, precision=precision, **{name: last})
    assert jax.eval_shape(run, x).dtype == x.dtype


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_weakly_typed_residual_keeps_its_dtype(implementation):
    """jnp's promotion rounded it, and with it the sum, to x's bfloat16 in the XLA form alone."""
    x, residual = jnp.ones((8, 64), jnp.bfloat16), jnp.full((8, 64), 1.001)
    assert residual.weak_type
    run = lambda x, r: ops.rms_norm(x, residual=r, implementation=implementation)
    assert [y.dtype for y in jax.eval_shape(run, x, residual)] == [x.dtype, residual.dtype]


@pytest.mark.parametrize("options", [{}, dict(window=1), dict(segment_ids=jnp.array([[0, 1]]))])
def test_an_infinite_query_is_not_finite_for_a_single_key(options):
    """A row whose logits are all -inf was taken for one that sees no key, and got zeros."""
    q = jnp.array([-jnp.inf, 1.0]).reshape(1, 2, 1, 1)
    run = lambda q: ops.attention(q, jnp.ones(q.shape), jnp.ones(q.shape), **options)
    y, pull = jax.vjp(run, q)
    (dq,) = pull(jnp.ones(q.shape))
    np.testing.assert_array_equal(y.ravel(), [np.nan, 1.0])
    np.testing.assert_array_equal(np.isnan(dq.ravel()), [True, False])


def test_segment_ids_of_queries_and_keys_in_a_list():
    q, k, v = (normal(i, (1, n, 1, 8)) for i, n in enumerate((2, 3, 3)))
    pair = jnp.array([[0, 1]]), jnp.array([[0, 0, 1]])
    one, other = (ops.attention(q, k, v, segment_ids=x) for x in (pair, list(pair)))
    np.testing.assert_array_equal(one, other)


def test_plain_weights_whose_sums_leave_int32_are_refused():
    """140,000 products of 127 x 127 wrapped, and the sum was -126,281."""
    weight = ops.quantize(jnp.ones((140_000, 1)), bits=8, group=None)
    with pytest.raises(ValueError, match=r"^K=140000 is more than 131072: sums may leave int32$"):
        ops.quantized_linear(jnp.ones((2, 140_000)), weight.plain())


X = jnp.ones((16, 16))
ROTARY = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 2, 1, 8)), jnp.arange(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.layer_norm(X, eps=-1.0), "eps=-1.0 must be 0 or at least"),
        (lambda: ops.rms_norm(0 * X, eps=1e-39), "eps=1e-39 must be 0 or at least"),
        (lambda: ops.row_linear(X[:1], [X], norm_weight=X[0], norm_eps=-1.0), "norm_eps=-1.0 must"),
        (lambda: ops.rope(*ROTARY, scaling=ops.RopeScaling(0.0)), "factor=0.0 must be more than"),
        (lambda: ops.rope(*ROTARY, theta=1e-300), "theta=1e-300 must be more than"),
        (lambda: ops.fp8_linear(X, X, row_norm=X[0]), r"row_norm has shape \(16,\), but must be"),
        (lambda: ops.fp8_linear(X, X, row_norm=-1.0), "row_norm=-1.0 is negative"),
        (lambda: ops.fp8_linear(X[:, :3], X[:3], row_norm=-1.0), "row_norm=-1.0 is negative"),
    ],
)
def test_what_gave_nan_or_wrong_numbers_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
