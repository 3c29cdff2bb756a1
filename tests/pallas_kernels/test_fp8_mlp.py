"""mlp in fp8: no worse than fp8_linear with the activation between, and its bounds hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from fp8_reference import fp8_linear_reference
from kernel_checks import check_op, kernels_run_here, normal

from pallas_kernels import dispatch
from pallas_kernels.activations import activation, feed_forward
from pallas_kernels.activations.activation import gelu_reference, swiglu_reference
from pallas_kernels.activations.feed_forward import mlp
from pallas_kernels.float8.quantize import norms

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
KINDS = ["swiglu", "gelu"]
fp8_mlp = functools.partial(mlp, precision="fp8")
KERNELS = {
    "swiglu": ["fp8_maximum", "quantize_fp8", "swiglu_maxima", "swiglu_fp8", "swiglu_backward_fp8"],
    "gelu": ["quantize_fp8", "gelu_fp8", "gelu_backward_fp8"],
}


def fp8_mlp_reference(x, up, down, *, gate=None, bias=None):
    """The formula in jnp, of the rounded operands of fp8_linear_reference."""
    times = fp8_linear_reference
    if gate is None:
        return times(gelu_reference(times(x, up), bias), down).astype(x.dtype)
    return times(swiglu_reference(times(x, gate), times(x, up)), down).astype(x.dtype)


def of(op, kind):
    """op(x, up, down, gate or bias)."""
    last = {"swiglu": "gate", "gelu": "bias"}[kind]
    return lambda x, up, down, other, **options: op(x, up, down, **{last: other}, **options)


def arrays(kind, shape=(2, 64, 64), f=128, dtype=BF16, scale=0.1):
    c = shape[-1]
    other = normal(4, (f,), F32) if kind == "gelu" else normal(4, (c, f), dtype, scale=scale)
    return (
        normal(0, shape, dtype),
        normal(1, (c, f), dtype, scale=scale),
        normal(2, (f, c), dtype, scale=scale),
        other,
    )


def with_gradients(op, inputs, dy):
    """(y, gradients), in one program."""

    def run(dy, *inputs):
        y, pull = jax.vjp(op, *inputs)
        return y, *pull(dy)

    return [np.asarray(a).astype(np.float64) for a in jax.jit(run)(dy, *inputs)]


@pytest.mark.parametrize(
    ("kind", "shape", "f", "dtype"),
    [
        ("swiglu", (2, 64, 64), 128, BF16),
        ("gelu", (2, 64, 64), 128, BF16),
        slow("swiglu", (64, 128), 64, F32),
        slow("gelu", (64, 128), 64, F32),
        slow("swiglu", (192, 64), 192, F16),
        slow("gelu", (192, 64), 192, F16),
    ],
)
def test_fp8_mlp_matches_float64(kind, shape, f, dtype):
    check_op(
        of(fp8_mlp, kind),
        of(fp8_mlp_reference, kind),
        *arrays(kind, shape, f, dtype),
        kernels=KERNELS[kind],
    )


@pytest.mark.parametrize("kind", ["swiglu", slow("gelu")])
def test_a_bound_of_x_may_be_given(kind):
    x, *others = arrays(kind)
    bound = 2 * jnp.linalg.norm(x.astype(F32), axis=-1).max()
    op = functools.partial(of(fp8_mlp, kind), row_norm=bound)
    kernels = sorted(set(KERNELS[kind]))
    check_op(op, of(fp8_mlp_reference, kind), x, *others, kernels=kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.0, slow(4.0)])
def test_no_value_passes_its_bound(kind, spread, monkeypatch):
    """Also where few rows and columns are much larger than the others: nothing saturates."""
    seen = []
    real = feed_forward.cast_results

    def checked(tile, sources, largest, dtype, **options):
        exact = tile(*(a.astype(F32) for a in sources))
        seen.extend(
            (float(abs(e).max()), float(bound)) for e, bound in zip(exact, largest, strict=True)
        )
        return real(tile, sources, largest, dtype, **options)

    monkeypatch.setattr(feed_forward, "cast_results", checked)
    x, up, down, other = arrays(kind)
    x *= jnp.exp(spread * normal(5, (2, 64, 1))).astype(BF16)
    down *= jnp.exp(spread / 2 * normal(6, (128, 1))).astype(BF16)
    up *= jnp.exp(spread / 2 * normal(7, (1, 128))).astype(BF16)
    dy = normal(8, x.shape) * jnp.exp(spread * normal(9, (2, 64, 1)))
    with kernels_run_here():
        _, pull = jax.vjp(
            functools.partial(of(fp8_mlp, kind), implementation="mosaic"), x, up, down, other
        )
        pull(dy.astype(BF16))
    if kind == "swiglu":  # the bound of h is its maximum, as another kernel computes it
        largest, bound = seen.pop(0)
        assert largest == pytest.approx(bound, rel=1e-5)
    assert len(seen) == 2
    for largest, bound in seen:
        assert largest <= bound <= 2 ** (16 if spread else 10) * largest


@pytest.mark.parametrize("tile", [activation.gelu_backward_tile, activation.swiglu_backward_tile])
def test_the_slopes_are_bounds(tile):
    z = jnp.linspace(-30, 30, 100_001)
    rest = (jnp.ones_like(z),) if tile is activation.gelu_backward_tile else (jnp.ones_like(z),) * 2
    limit = feed_forward._SLOPE if tile is activation.gelu_backward_tile else 1.1
    assert limit - 0.002 < abs(tile(z, *rest)[0]).max() < limit


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("axis", [0, 1])
def test_norms_are_bounds_at_extreme_scales(scale, axis):
    x = np.asarray(normal(0, (64, 96)), np.float64) * scale
    largest, norm = (float(a) for a in norms(jnp.asarray(x, F32), axis))
    exact = np.linalg.norm(x, axis=axis).max()
    assert largest == pytest.approx(abs(x).max(), rel=1e-6)
    assert exact * (1 - 1e-5) <= norm <= 10 * exact


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [  # of GELU's arrays only the bias is not also SwiGLU's
        (value, where, kind)
        if value is np.nan and (kind == "swiglu" or where == 3)
        else slow(value, where, kind)
        for value in (np.nan, np.inf)
        for where in range(5)
        for kind in KINDS
    ],
)
def test_a_value_that_is_not_finite_makes_its_products_nan(kind, where, value):
    """In x, up, down, gate or bias, or dy; a run then skips the step."""
    inputs = [*arrays(kind, (64, 64), 64), normal(8, (64, 64), BF16)]
    a = inputs[where]
    inputs[where] = a.at[(3,) * a.ndim].set(value)
    *inputs, dy = inputs
    with kernels_run_here():
        op = functools.partial(of(fp8_mlp, kind), implementation="mosaic")
        y, *gradients = with_gradients(op, inputs, dy)
    assert np.isnan(y).any() == (where != 4)
    bad = [not np.isfinite(g).all() for g in gradients]
    assert all(bad) if where == 4 else any(bad)
    if where == 4:
        assert all(np.isnan(g).all() for g in gradients[:3])


def test_other_calls_run_in_parts_and_say_why():
    dispatch.reset()
    x, up, down, gate = arrays("swiglu", (32, 64))
    with pytest.raises(NotImplementedError, match="rows=32 is not a positive"):
        fp8_mlp(x, up, down, gate=gate, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="x is bfloat16 but up is float32"):
        fp8_mlp(x, up.astype(F32), down, gate=gate, implementation="mosaic")
    expected = fp8_mlp_reference(x, up, down, gate=gate).astype(F32)
    actual = fp8_mlp(x, up, down, gate=gate).astype(F32)
    np.testing.assert_allclose(actual, expected, atol=0.04 * float(abs(expected).max()))
    dispatch.reset()


def test_wrong_arguments_are_errors():
    x, up, down, gate = arrays("swiglu")
    with pytest.raises(ValueError, match="a gate .SwiGLU. or a bias .GELU., not both"):
        fp8_mlp(x, up, down, gate=gate, bias=jnp.zeros(128))
    with pytest.raises(ValueError, match=r"\(64, 128\), \(64, 128\)"):
        fp8_mlp(x, up, up, gate=gate)
    with pytest.raises(ValueError, match=r"bias has shape \(64,\), not \(128,\)"):
        fp8_mlp(x, up, down, bias=jnp.zeros(64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_beyond_row_norm_saturates_unless_it_is_not_finite(kind):
    x, *others = arrays(kind, (64, 64), 64)
    x = x.at[2, 1].set(1e30)
    bad = x.at[0, 1].set(jnp.inf).at[1, 1].set(jnp.nan)
    run = lambda x, implementation: jax.jit(
        functools.partial(of(fp8_mlp, kind), row_norm=2, implementation=implementation)
    )(x, *others)
    both = [(run(x, "xla"), run(bad, "xla"))]
    with kernels_run_here():
        both.append((run(x, "mosaic"), run(bad, "mosaic")))
    for finite, not_finite in both:
        assert jnp.isfinite(finite).all()
        assert jnp.isnan(not_finite[:2]).all()
