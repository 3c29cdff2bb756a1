import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from kernel_checks import ON_GPU, assert_error_ratio, check_op, kernels_run_here, normal

from pallas_kernels import dispatch
from pallas_kernels.losses.cross_entropy import logits_kernel
from pallas_kernels.losses.linear_cross_entropy import (
    fp8_gradient,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)

KERNELS = ("linear_cross_entropy_statistics_and_gradient",)


def labels_for(n, vocab_size, ignored=()):
    labels = np.random.default_rng(1).integers(0, vocab_size, n)
    labels[list(ignored)] = -100
    return jnp.asarray(labels, jnp.int32)


@pytest.mark.parametrize(
    ("n", "c", "v", "dtype", "weight_dtype", "options"),
    [
        (3, 64, 13952, jnp.bfloat16, jnp.float32, {}),  # a whole step, more tiles and a remainder
        (5, 32, 1280, jnp.bfloat16, jnp.bfloat16, dict(vocab_size=1201, transposed=True, chunk=3)),
        slow(4, 48, 4000, jnp.float16, jnp.float32, dict(softcap=2.0, vocab_size=300, chunk=2)),
        slow(3, 16, 70, jnp.float32, jnp.float32, dict(softcap=30.0, reduction="sum", scale=3e-5)),
        slow(1, 1, 1, jnp.float32, jnp.float32, {}),
    ],
)
def test_linear_cross_entropy_matches_float64(n, c, v, dtype, weight_dtype, options):
    options = dict(options)
    op = functools.partial(linear_cross_entropy, chunk=options.pop("chunk", None))
    x, weight = normal(0, (n, c), dtype), normal(1, (v, c), weight_dtype, scale=3 / c**0.5)
    check_op(
        op,
        linear_cross_entropy_reference,
        x,
        weight.T if options.get("transposed") else weight,
        labels_for(n, options.get("vocab_size", v), ignored=[1] if n > 1 else []),
        kernels=KERNELS,
        **options,
    )


@pytest.mark.parametrize(
    ("n", "c", "v", "dtype", "options"),
    [
        (192, 64, 384, jnp.bfloat16, dict(chunk=128, vocab_size=300)),
        slow(64, 128, 256, jnp.float16, dict(transposed=True, reduction="sum", scale=3e-5)),
        slow(64, 64, 300, jnp.float32, dict(softcap=30.0, vocab_size=270)),
    ],
)
def test_fp8_matches_float64(n, c, v, dtype, options):
    options = dict(options)
    op = functools.partial(linear_cross_entropy, chunk=options.pop("chunk", None))
    x, weight = normal(0, (n, c), dtype), normal(1, (v, c), scale=3 / c**0.5)
    check_op(
        op,
        linear_cross_entropy_reference,
        x,
        weight.T if options.get("transposed") else weight,
        labels_for(n, options.get("vocab_size", v), ignored=[1, 5]),
        kernels=("linear_cross_entropy_statistics", "linear_cross_entropy_gradient_fp8"),
        fp8=True,
        **options,
    )


def test_fp8_rounds_a_probability_and_not_the_label():
    """dz of each row is p rounded to e5m2 and exactly -1 or so at the label, in both orders."""
    z = normal(0, (64, 256), scale=4)
    labels = labels_for(64, 200, ignored=[3])
    log_sum = jax.nn.logsumexp(z[:, :200], axis=1).at[3].set(jnp.inf)
    local = jnp.where(labels < 0, -1, labels)
    for valid in (200, jnp.int32(200)):
        with kernels_run_here():
            dz = jax.block_until_ready(fp8_gradient(z, local, log_sum, valid, None))
        p = jnp.exp(z - log_sum[:, None]) - jax.nn.one_hot(local, 256)
        wide = dz.values.astype(jnp.float32) * dz.inverse
        np.testing.assert_allclose(wide[:, :200], p[:, :200], rtol=2**-3, atol=2**-31)
        np.testing.assert_array_equal(dz.transposed.astype(jnp.float32), dz.values.T)
        assert not wide[:, 200:].any()
        assert not wide[3].any()
        likely = p[jnp.arange(64), local] < -15 / 16
        assert likely.any()
        np.testing.assert_array_equal(wide[jnp.arange(64), local][likely], -1)


def test_fp8_of_ignored_and_wrong_labels():
    x, weight = normal(0, (64, 64), jnp.bfloat16), normal(1, (256, 64))
    f = functools.partial(linear_cross_entropy, vocab_size=250, fp8=True, implementation="mosaic")
    run = jax.jit(jax.value_and_grad(f, (0, 1)))
    with kernels_run_here():
        loss, (dx, dw) = jax.block_until_ready(run(x, weight, labels_for(64, 250, range(9))))
        assert loss > 0
        np.testing.assert_array_equal(jnp.any(dx != 0, 1), jnp.arange(64) >= 9)
        assert not dw[250:].any()
        bad = labels_for(64, 250).at[7].set(250)
        loss, (dx, dw) = jax.block_until_ready(run(x, weight, bad))
    assert jnp.isnan(loss)
    assert jnp.isnan(dx[7]).all()
    assert jnp.isnan(dw[:250]).all()


def test_fp8_says_where_it_cannot_be():
    dispatch.reset()
    x, weight, labels = normal(0, (8, 16)), normal(1, (50, 16)), labels_for(8, 50)
    y = linear_cross_entropy(x, weight, labels, fp8=True)
    np.testing.assert_array_equal(y, linear_cross_entropy(x, weight, labels))
    assert "float32, not fp8: tokens=8 is not a positive multiple of 64" in dispatch.explain()
    if not ON_GPU:  # explain() named a kernel, which never ran
        assert {decision.runs for decision in dispatch.decisions()} == {"xla"}


@pytest.mark.parametrize("dtype", [slow(jnp.bfloat16), jnp.float16])
def test_a_small_scale_costs_no_digits(dtype):
    """In bfloat16 only what the reference loses by rounding the same dz; in float16 nothing."""
    x, weight, labels = normal(0, (9, 16), dtype), normal(1, (256, 16)), labels_for(9, 250, [2])

    def run(op, x, weight, scale):
        loss = lambda weight: op(x, weight, labels, reduction="sum", scale=scale)
        return jax.value_and_grad(loss)(weight)

    op = functools.partial(linear_cross_entropy, implementation="mosaic")
    kernel = jax.jit(functools.partial(run, op))
    reference = jax.jit(functools.partial(run, linear_cross_entropy_reference))
    scale = jnp.float32(3e-5)
    with kernels_run_here():
        actual = jax.block_until_ready(kernel(x, weight, scale))
        if dtype == jnp.float16:  # a dz of 3e-5 x a probability would be subnormal
            expected = jax.tree.map(lambda a: a * scale, kernel(x, weight, jnp.float32(1)))
            jax.block_until_ready(expected)
    if dtype == jnp.bfloat16:
        expected = reference(x, weight, scale)
    with jax.enable_x64(True):
        truth = reference(*(np.asarray(a).astype(np.float64) for a in (x, weight, scale)))
    for a, e, t in zip(actual, expected, truth, strict=True):
        assert_error_ratio(a, e, t)


def test_linear_cross_entropy_of_rows_longer_than_the_cache_has_room_for():
    z, labels = normal(0, (2, 65536), jnp.bfloat16, scale=3), jnp.array([7, 65499], jnp.int32)
    wide = z[:, :65500].astype(jnp.float32)
    p = jax.nn.softmax(wide) - jax.nn.one_hot(labels, 65500)
    with kernels_run_here():
        dz, top, total, picked = jax.block_until_ready(
            logits_kernel(z, labels, jnp.ones(2), real=65500, softcap=None, write=True)
        )
    np.testing.assert_allclose(jnp.log(total) + top, jax.nn.logsumexp(wide, 1), rtol=1e-6)
    np.testing.assert_array_equal(picked, z[jnp.arange(2), labels].astype(jnp.float32))
    np.testing.assert_allclose(dz[:, :65500].astype(jnp.float32), p, rtol=2**-8, atol=1e-10)
    assert not dz[:, 65500:].any()


def test_linear_cross_entropy_against_log_softmax():
    """Compares the reference itself with jax.nn's form."""
    x, weight, labels = normal(0, (5, 8)), normal(1, (50, 8)), labels_for(5, 40, ignored=[3])
    z = 4 * jnp.tanh(x @ weight.T / 4)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(z[:, :40]), labels[:, None] % 40, 1)[:, 0]
    kept = jnp.array([0, 1, 2, 4])
    for reduction, expected in (("sum", losses[kept].sum()), ("mean", losses[kept].mean())):
        options = dict(vocab_size=40, softcap=4.0, reduction=reduction, implementation="xla")
        actual = linear_cross_entropy(x, weight, labels, **options)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        loss = lambda s, options=options: linear_cross_entropy(
            x, weight, labels, scale=s, **options
        )
        actual, slope = jax.value_and_grad(loss)(0.5)
        np.testing.assert_allclose(actual, expected / 2, rtol=1e-5)
        assert slope == 0  # a scale gets no gradient


def test_linear_cross_entropy_of_ignored_and_wrong_labels():
    x, weight = normal(0, (4, 16)), normal(1, (256, 16))

    def compiled(implementation):
        options = dict(vocab_size=250, ignore_index=-7, implementation=implementation)
        f = functools.partial(linear_cross_entropy, **options)
        return jax.jit(jax.value_and_grad(f, (0, 1)))

    def run(f, labels):
        loss, gradients = f(x, weight, jnp.array(labels, jnp.int32))
        return jax.block_until_ready((loss, *gradients))

    with kernels_run_here():
        kernel = compiled("mosaic")
        results = {
            what: run(kernel, labels)
            for what, labels in dict(
                good=[0, -7, 249, 3], none=[-7] * 4, bad=[0, 250, 1, 1]
            ).items()
        }
    loss, dx, dw = results["good"]
    assert loss > 0
    np.testing.assert_array_equal(jnp.any(dx != 0, 1), [True, False, True, True])
    assert not dw[250:].any()
    assert dw[:250].all()
    assert all(not a.any() for a in results["none"])
    for results_of in (results["bad"], run(compiled("xla"), [0, 250, 1, 1])):
        loss, dx, dw = results_of
        assert jnp.isnan(loss)
        np.testing.assert_array_equal(jnp.isnan(dx).all(1), [False, True, False, False])
        assert jnp.isnan(dw[:250]).all()


@pytest.mark.parametrize("fp8", [slow(False), True])
def test_linear_cross_entropy_where_a_class_is_ignored(fp8):
    x, weight = normal(0, (64, 64)).astype(jnp.bfloat16), normal(1, (256, 64))
    labels = jnp.arange(64) % 5

    def run(labels, ignored):
        options = dict(ignore_index=ignored, fp8=fp8, implementation="mosaic")
        f = functools.partial(linear_cross_entropy, **options)
        return jax.jit(jax.value_and_grad(f, (0, 1)))(x, weight, labels)

    with kernels_run_here():
        class_0 = run(labels, 0)
        other = run(jnp.where(labels == 0, -100, labels), -100)
    jax.tree.map(np.testing.assert_array_equal, class_0, other)


def test_linear_cross_entropy_of_a_split_vocabulary():
    """Uses a mesh of one, the interpreter's limit; test_sharding.py splits it over four."""
    x, weight, labels = normal(0, (4, 16)), normal(1, (384, 16)), labels_for(4, 300, ignored=[2])
    softcap = 3.0
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))

    def run(implementation):
        def f(x, weight):
            options = dict(vocab_size=300, softcap=softcap, implementation=implementation)
            op = lambda *arrays: linear_cross_entropy(*arrays, vocab_axis="v", **options)
            specs = dict(in_specs=(P(), P("v"), P()), out_specs=P(), check_vma=False)
            return jax.shard_map(op, mesh=mesh, **specs)(x, weight, labels)

        return jax.jit(jax.value_and_grad(f, (0, 1)))(x, weight)

    whole = lambda *a: linear_cross_entropy_reference(*a, labels, vocab_size=300, softcap=softcap)
    with kernels_run_here():
        split = jax.block_until_ready(run("mosaic"))
    with jax.enable_x64(True):
        wide = (np.asarray(a, np.float64) for a in (x, weight))
        truth = jax.jit(jax.value_and_grad(whole, (0, 1)))(*wide)
    for a, e, t in zip(*map(jax.tree.leaves, (split, run("xla"), truth)), strict=True):
        assert_error_ratio(a, e, t)


def test_linear_cross_entropy_of_a_vocabulary_in_two_parts():
    """The axis is that of a vmap, which needs only one device."""
    x, weight, labels = normal(0, (3, 16)), normal(1, (256, 16)), jnp.array([5, -100, 250])
    op = functools.partial(linear_cross_entropy, labels=labels, vocab_size=251, scale=0.3)
    both = lambda op: jax.value_and_grad(lambda x, weight: op(x, weight), (0, 1))
    loss, (dx, dw) = both(functools.partial(op, implementation="xla"))(x, weight)
    of_part = both(functools.partial(op, vocab_axis="v", implementation="mosaic"))
    with kernels_run_here():
        run = jax.vmap(of_part, in_axes=(None, 0), axis_name="v")
        losses, (dxs, dws) = jax.block_until_ready(jax.jit(run)(x, weight.reshape(2, 128, 16)))
    np.testing.assert_allclose(losses, [loss, loss], rtol=1e-6)
    # Each part gets a gradient of one for the same loss, so the loss has a gradient of two.
    np.testing.assert_allclose(dxs.sum(0) / 2, dx, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(dws.reshape(256, 16) / 2, dw, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_fp8_of_a_vocabulary_in_two_parts():
    """Scales are powers of 2, so each part rounds as the whole does, but for values in the middle.

    A GPU's tensor cores may add a part in another order.
    """
    x, weight, labels = normal(0, (64, 64)), normal(1, (256, 64)), labels_for(64, 251, [4])
    op = functools.partial(
        linear_cross_entropy, labels=labels, vocab_size=251, fp8=True, implementation="mosaic"
    )
    whole = jax.jit(jax.value_and_grad(lambda x, weight: op(x, weight), (0, 1)))
    of_part = jax.value_and_grad(lambda x, weight: op(x, weight, vocab_axis="v"), (0, 1))
    parts = jax.jit(jax.vmap(of_part, in_axes=(None, 0), axis_name="v"))
    with kernels_run_here():
        loss, (dx, dw) = jax.block_until_ready(whole(x, weight))
        losses, (dxs, dws) = jax.block_until_ready(parts(x, weight.reshape(2, 128, 64)))
    np.testing.assert_allclose(losses, [loss, loss], rtol=1e-4 if ON_GPU else 1e-6)
    error = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    most = 5e-3 if ON_GPU else 1e-5
    assert error(dxs.sum(0) / 2, dx) < most
    assert error(dws.reshape(256, 64) / 2, dw) < most


def test_linear_cross_entropy_of_a_part_that_is_all_padding():
    z, labels = normal(0, (2, 128)), jnp.array([-1, -1])
    given = (jnp.zeros(2), jnp.ones(2), jnp.zeros(2))
    run = functools.partial(logits_kernel, z, labels, jnp.ones(2), jnp.int32(0), softcap=None)
    with kernels_run_here():
        _, top, total, _ = jax.block_until_ready(run(write=False))
        dz = jax.block_until_ready(run(given, write=True))[0]
    assert not total.any()
    assert jnp.isfinite(top).all()
    assert not dz.any()


def test_linear_cross_entropy_refuses_what_does_not_fit():
    x, weight, labels = jnp.ones((2, 8)), jnp.ones((5, 8)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"weight has 5 features \(shape \(5, 8\)\), but x has 8"):
        linear_cross_entropy(x, weight, labels, transposed=True)
    with pytest.raises(ValueError, match=r"labels have shape \(3,\), .* needs \(2,\)"):
        linear_cross_entropy(x, weight, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"vocab_size=9 is not in \[1, 5\], weight's"):
        linear_cross_entropy(x, weight, labels, vocab_size=9)
    with pytest.raises(ValueError, match="reduction='none' is not one of mean, sum"):
        linear_cross_entropy(x, weight, labels, reduction="none")
    with pytest.raises(ValueError, match="softcap=-3.0 must be positive"):
        linear_cross_entropy(x, weight, labels, softcap=-3.0)
    with pytest.raises(ValueError, match="chunk=0 is not at least 1 token"):
        linear_cross_entropy(x, weight, labels, chunk=0)
    for implementation in ("mosaic", "xla"):  # a scale for each token would silently weight them
        with pytest.raises(ValueError, match=r"scale has shape \(2,\), but must be one number"):
            linear_cross_entropy(
                x, weight, labels, scale=jnp.ones(2), implementation=implementation
            )
    with pytest.raises(ValueError, match="labels is float32: cast it to an integer dtype"):
        linear_cross_entropy(x, weight, labels.astype(jnp.float32), implementation="mosaic")
    with pytest.raises(ValueError, match=r"weight has shape \(8,\), but needs 2 axes: V C"):
        linear_cross_entropy(x, weight[0], labels)
    with pytest.raises(NotImplementedError, match="softcap=101.0 is more than 100"):
        linear_cross_entropy(x, weight, labels, softcap=101.0, implementation="mosaic")
    with pytest.raises(ValueError, match="x is int32: cast it"):
        linear_cross_entropy(x.astype(jnp.int32), weight, labels, implementation="mosaic")
