"""fp8_linear against float64: as exact as rounded operands allow, in both directions."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from fp8_reference import fp8_linear_reference
from kernel_checks import ON_GPU, assert_error_ratio, check_op, kernels_run_here, normal

from pallas_kernels import dispatch, fp8_linear, linear_cross_entropy, mlp, mosaic
from pallas_kernels.float8 import linear
from pallas_kernels.float8.quantize import saturated

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def operands(shape, n, dtype, spread=0.0):
    """x and a weight; spread: of the exponents of x, in units of e."""
    x = normal(0, shape) * jnp.exp(spread * normal(1, shape))
    return x.astype(dtype), normal(2, (shape[-1], n), dtype, scale=0.02)


def with_gradients(f, x, weight, dy):
    """(y, dx, dw), in one program: XLA on a GPU multiplies in fp8 only inside jit."""

    def run(x, weight, dy):
        y, pull = jax.vjp(f, x, weight)
        return y, *pull(dy)

    return jax.jit(run)(x, weight, dy)


@pytest.mark.parametrize(
    ("shape", "n", "dtype"),
    [
        ((2, 64, 64), 128, BF16),
        slow((128, 192), 64, F32),
        slow((64, 128), 64, F16),
    ],
)
def test_fp8_linear_matches_float64(shape, n, dtype):
    """With the casts by the kernels."""
    arrays = operands(shape, n, dtype)
    check_op(fp8_linear, fp8_linear_reference, *arrays, kernels=["fp8_maximum", "quantize_fp8"])


def test_the_kernels_add_a_bias_and_take_a_bound_of_x():
    """Which the reference does not: it is within the rounding of e4m3 in any case."""
    x, weight = operands((128, 64), 128, BF16)
    bound = 4 * jnp.linalg.norm(x.astype(F32), axis=-1).max()  # 2 of 18 powers of 2
    check_op(
        lambda *a, **o: fp8_linear(*a, row_norm=bound, **o),
        fp8_linear_reference,
        x,
        weight,
        normal(4, (128,)),
        kernels=["fp8_maximum", "quantize_fp8"],
    )


@pytest.mark.parametrize(
    ("shape", "n", "dtype", "spread"),
    [
        ((3, 16, 48), 80, BF16, 2.0),
        ((16, 16), 16, F32, 0.0),
        slow((3, 16, 48), 80, F16, 2.0),
        slow((3, 16, 48), 80, F32, 2.0),
        slow((16, 16), 16, BF16, 0.0),
    ],
)
def test_the_casts_of_xla_match_float64(shape, n, dtype, spread):
    """At shapes that the kernels do not support."""
    x, weight = operands(shape, n, dtype, spread)
    dy = normal(3, (*shape[:-1], n), dtype)
    actual = with_gradients(fp8_linear, x, weight, dy)
    expected = with_gradients(fp8_linear_reference, x, weight, dy)
    x64, weight64, dy64 = (np.asarray(a).astype(np.float64) for a in (x, weight, dy))
    rows = lambda a: a.reshape(-1, a.shape[-1])
    truth = x64 @ weight64, dy64 @ weight64.T, rows(x64).T @ rows(dy64)
    for name, a, e, t in zip(("y", "dx", "dw"), actual, expected, truth, strict=True):
        assert a.dtype == dtype
        assert_error_ratio(a, e, t, name)
        # Rounding to 3 bits has an error of 2.6% of a value, to 2 bits of 5.2%.
        relative = np.linalg.norm(np.asarray(a).astype(np.float64) - t) / np.linalg.norm(t)
        assert 0.01 < relative < 0.12, name


def test_the_implementations_are_equal():
    x, weight = operands((64, 128), 64, BF16)
    dy = normal(3, (64, 64), BF16)

    def of(implementation):
        op = lambda x, weight: fp8_linear(x, weight, implementation=implementation)
        return with_gradients(op, x, weight, dy)

    expected = of("xla")
    with kernels_run_here():
        actual = of("mosaic")
    for a, e in zip(actual, expected, strict=True):
        a, e = (np.asarray(v).astype(np.float64) for v in (a, e))
        # XLA on a GPU may choose different matmuls, which add in other orders.
        limit = 2**-7 * np.abs(e) + 2**-9 * np.abs(e).max() if ON_GPU else 0
        assert (np.abs(a - e) <= limit).all()


def test_a_float32_weight_gets_a_float32_gradient():
    x, weight = operands((16, 32), 48, BF16)
    y, dx, dw = with_gradients(fp8_linear, x, weight.astype(F32), jnp.ones((16, 48), BF16))
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, BF16, F32)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["x", "weight", "dy"])
def test_a_value_that_is_not_finite_makes_its_products_nan(where, bad):
    arrays = {"x": jnp.ones((16, 16)), "weight": jnp.ones((16, 16)), "dy": jnp.ones((16, 16))}
    arrays[where] = arrays[where].at[3, 4].set(bad)
    found = with_gradients(fp8_linear, *arrays.values())
    of = {"y": ("x", "weight"), "dx": ("dy", "weight"), "dw": ("x", "dy")}
    for (name, both), product in zip(of.items(), found, strict=True):
        assert bool(jnp.isnan(product).all()) == (where in both), name
        assert bool(jnp.isfinite(product).all()) == (where not in both), name


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_row_beyond_row_norm_saturates_unless_it_is_not_finite(implementation):
    x, weight = operands((64, 64), 64, BF16)
    x = jnp.clip(x, -3, 3).at[:, 0].set(3)  # row_norm is 3: its scale is exact
    bad = x.at[0, 1].set(np.inf).at[1, 1].set(np.nan).at[2, :2].set(1e30).at[3, 1].set(-4)
    limit = 448 / 128  # 3 times 128 is in e4m3's range, 448
    capped = jnp.clip(x.at[2, :2].set(limit).at[3, 1].set(-limit), -limit, limit)
    run = functools.partial(
        with_gradients, functools.partial(fp8_linear, row_norm=3, implementation=implementation)
    )
    dy = normal(3, (64, 64), BF16)
    with kernels_run_here() if implementation == "mosaic" else contextlib.nullcontext():
        y, _, dw = run(bad, weight, dy)
        expected, *_ = run(capped, weight, dy)
    assert jnp.isnan(y[:2]).all()
    np.testing.assert_array_equal(y[2:], expected[2:])
    assert jnp.isnan(dw[1]).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_saturated(dtype):
    limit = float(jnp.finfo(dtype).max)
    x = jnp.float32([0, limit, 1.2 * limit, -1e38, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(
        saturated(x, dtype).astype(F32), [0, limit, limit, -limit, np.nan, np.nan, np.nan]
    )


@pytest.mark.parametrize("scale", [0.0, 2.0**-100, 2.0**100])
def test_extreme_scales(scale):
    x, weight = operands((16, 64), 32, F32)
    dy = normal(3, (16, 32))
    y, dx, dw = with_gradients(fp8_linear, x * scale, weight, dy)
    expected = with_gradients(fp8_linear, x, weight, dy)
    for a, e, by in zip((y, dx, dw), expected, (scale, 1, scale), strict=True):
        np.testing.assert_allclose(a, e * by, rtol=1e-5, atol=1e-5 * by)


def test_other_shapes_run_in_the_dtype_of_x_and_say_so():
    dispatch.reset()
    x, weight = operands((16, 32), 12, BF16)
    np.testing.assert_array_equal(fp8_linear(x, weight), x @ weight)
    assert "bfloat16, not fp8: N=12 is not a positive multiple of 16" in dispatch.explain()
    with pytest.raises(NotImplementedError, match="N=12 is not a positive multiple of 16"):
        fp8_linear(x, weight, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="N=48 is not a positive multiple of 64"):
        fp8_linear(normal(0, (64, 64)), normal(1, (64, 48)), implementation="mosaic")
    dispatch.reset()


def test_arrays_that_do_not_fit_are_errors():
    with pytest.raises(ValueError, match=r"x \(16, 32\) and weight \(16, 32\) are not"):
        fp8_linear(jnp.ones((16, 32)), jnp.ones((16, 32)))
    with pytest.raises(ValueError, match=r"bias has shape \(32,\), not \(16,\)"):
        fp8_linear(jnp.ones((16, 32)), jnp.ones((32, 16)), jnp.ones(32))


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ("", True),
        ("--a=b --xla_gpu_enable_triton_gemm=false", False),
        ("--xla_gpu_enable_triton_gemm=0", False),
        ("--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_triton_gemm=true", True),
    ],
)
@pytest.mark.parametrize("op", ["fp8_linear", "mlp", "linear_cross_entropy"])
def test_a_gpu_without_the_flag_is_warned_once(monkeypatch, caplog, op, flags, warns):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    monkeypatch.setattr(dispatch, "_warn_of_compiler", lambda: None)
    monkeypatch.setattr(mosaic, "sm_count", lambda: 132)
    monkeypatch.setenv("XLA_FLAGS", flags)
    linear.warn_of_flags.cache_clear()
    call = {
        "fp8_linear": lambda x, w: fp8_linear(x, w),
        "mlp": lambda x, w: mlp(x, w, w, gate=w, precision="fp8"),
        "linear_cross_entropy": lambda x, w: linear_cross_entropy(
            x, w, jnp.zeros(64, jnp.int32), fp8=True
        ),
    }[op]
    x = jax.ShapeDtypeStruct((64, 64), BF16)
    with caplog.at_level("WARNING", "pallas_kernels"):
        for _ in range(2):
            jax.eval_shape(call, x, x)
    said = "set XLA_FLAGS=--xla_gpu_enable_triton_gemm=false in the environment"
    assert [said in r.message for r in caplog.records] == [True] * warns
    linear.warn_of_flags.cache_clear()
    dispatch.reset()
