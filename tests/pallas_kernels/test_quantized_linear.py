import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_interpreted
from kernel_checks import (
    ON_GPU,
    assert_error_ratio,
    assert_lowers,
    check_op,
    kernels_run_here,
    names_in,
    normal,
)

from pallas_kernels import dispatch, mosaic, quantize, quantized_linear
from pallas_kernels.quantized import gemm, gemv, op
from pallas_kernels.quantized.formats import dequantize
from pallas_kernels.quantized.matmul import plan

FEW = ("quantized_linear",)
ROW = ("quantized_linear_row",)
MANY = ("quantized_linear_many",)
DX = ("quantized_linear_dx",)
quantized_linear_reference = functools.partial(quantized_linear, implementation="xla")


@functools.cache
def shapes_of(k, n, **options):
    """A packed weight without numbers."""
    w = jax.ShapeDtypeStruct((k, n), jnp.float32)
    return jax.eval_shape(lambda w: quantize(w, **options), w)


def check(rows, k, n, bias=None, spread=0.0, wide=False, **options):
    """spread: of the logarithms of the weights, so that fp8 has subnormal numbers.

    wide: the result is float32.
    """
    w = normal(1, (k, n)) * jnp.exp(spread * normal(2, (k, n)))
    arrays = (normal(0, (*rows, k), jnp.bfloat16), quantize(w, **options), bias)
    given, m = [0] if bias is None else [0, 2], arrays[0].size // k
    dtype_of = lambda x: mosaic.stat_dtype(x.dtype) if wide else None
    with_dtype = lambda f: lambda x, *others, **o: f(x, *others, dtype=dtype_of(x), **o)
    check_op(
        with_dtype(quantized_linear),
        with_dtype(quantized_linear_reference),
        *arrays,
        kernels=ROW if m == 1 else FEW if m <= 64 else MANY + DX * gemm.has_gradient(arrays[1]),
        differentiable=given,
    )


@pytest.mark.parametrize(
    ("rows", "k", "n", "options"),
    [
        ((1,), 512, 64, dict(bits=4, group=32)),
        ((2, 3), 384, 72, dict(bits=8, group=128, symmetric=False)),
        slow((8,), 512, 64, dict(bits=2, group=64)),
        slow((3,), 512, 64, dict(bits=1, group=32)),
        ((1,), 320, 64, dict(bits=4, group=64, symmetric=False)),
        ((1,), 256, 64, dict(bits=8, group=None, format="fp8", spread=3.0)),
        ((1,), 512, 64, dict(bits=8, group=128, format="2:4")),
        slow((1,), 256, 40, dict(bits=8, group=64, symmetric=False)),
        slow((1,), 256, 64, dict(bits=2, group=None)),
        slow((1,), 512, 64, dict(bits=1, group=32, symmetric=False)),
        slow((1,), 320, 64, dict(bits=4, group=64, format="2:4")),
        slow((11,), 512, 64, dict(bits=4, group=64, format="2:4")),
        slow_interpreted((67,), 256, 72, dict(bits=4, group=128)),
        # dx: two turns
        slow_interpreted((130,), 320, 296, dict(bits=8, group=64, symmetric=False)),
        slow((65,), 64, 40, dict(bits=4, group=None)),
        slow((65,), 192, 520, dict(bits=4, group=64, symmetric=False)),
        # two blocks of n
        slow_interpreted((2, 50), 512, 136, dict(bits=8, group=32, symmetric=False)),
        ((70,), 512, 64, dict(bits=4, group=64, format="2:4")),
        slow((300,), 512, 64, dict(bits=2, group=None)),  # three blocks of m
        slow((128,), 512, 200, dict(bits=1, group=128, symmetric=False)),
        slow((65,), 512, 64, dict(bits=1, group=32)),
        slow((65,), 320, 64, dict(bits=8, group=64, format="fp8", spread=3.0)),
        slow((65,), 512, 64, dict(bits=8, group=None, format="2:4")),
    ],
)
def test_quantized_linear_matches_float64(rows, k, n, options):
    check(rows, k, n, **options)


def test_blocks_split_k_and_add_bias():
    weight = quantize(normal(1, (2048, 64)))
    assert plan(2, weight).splits > 1
    check((2,), 2048, 64, bias=normal(3, (64,)))


@pytest.mark.parametrize(("m", "rows"), [(141, 192), slow_interpreted(200, 256), slow(67, 128)])
def test_many_rows_are_finished_in_their_kernel(monkeypatch, m, rows):
    monkeypatch.setattr(gemm, "_SMS", 1)
    x, weight = normal(0, (m, 1152), jnp.bfloat16), quantize(normal(1, (1152, 76)))
    p = gemm.plan(m, weight)
    assert (p.rows, p.splits) == (rows, 1)
    assert p.turns > p.slots  # so that all buffers are filled again
    assert 4 * p.turns > p.stages
    layer = lambda x, f: f(x, weight)
    kernel = functools.partial(quantized_linear, implementation="mosaic")
    assert_lowers(lambda x: layer(x, kernel), (x,), MANY)
    with jax.enable_x64(True):
        truth = np.asarray(layer(np.asarray(x, np.float64), quantized_linear_reference))
    with kernels_run_here():
        actual = jax.block_until_ready(layer(x, kernel))
        if ON_GPU:
            np.testing.assert_array_equal(layer(x, kernel), actual)
    assert_error_ratio(actual, layer(x, quantized_linear_reference), truth)


def test_the_gradient_sums_over_more_turns_than_its_rings_hold():
    p = gemm.plan(67, quantize(normal(1, (64, 1096)), group=64), most_splits=1, back=True)
    assert p.turns > p.slots
    assert 4 * p.turns > p.stages
    check((67,), 64, 1096, group=64)


def test_one_tile_of_columns_for_two_warpgroups():
    arrays = normal(0, (256, 64), jnp.bfloat16), quantize(normal(1, (64, 64)), group=64), None
    forms = quantized_linear, quantized_linear_reference
    check_op(*forms, *arrays, kernels=MANY, differentiable=[])  # no gradient: y leaves the kernel


@pytest.mark.parametrize(
    ("rows", "k", "options"),
    [
        (2, 64, dict(bits=8)),
        slow(9, 16, dict(bits=4, symmetric=False)),
        (65, 64, dict(bits=1)),
        slow(65, 16, dict(bits=8, format="2:4")),
    ],
)
def test_x_has_fewer_columns_than_a_step_of_the_weight(rows, k, options):
    check((rows,), k, 72, group=None, **options)


@pytest.mark.parametrize("rows", [1, 3, slow_interpreted(67)])
def test_the_result_has_the_dtype_that_is_asked_for(rows):
    check((rows,), 256, 64, bias=normal(3, (64,)), wide=True)
    x, weight = normal(0, (rows, 256), jnp.bfloat16), quantize(normal(1, (256, 64)))
    y = quantized_linear(x, weight, dtype=jnp.float32, implementation="xla")
    assert y.dtype == jnp.float32
    assert (y.astype(jnp.bfloat16).astype(jnp.float32) != y).mean() > 0.9  # rounded once


def test_many_rows_split_k():
    weight = quantize(normal(1, (2048, 64)))
    assert gemm.plan(65, weight).splits > 1
    check((65,), 2048, 64, bias=normal(3, (64,)))


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(1, ROW), (2, FEW), (64, FEW), (65, MANY), (op.MOST_ROWS, MANY), (op.MOST_ROWS + 1, ())],
)
def test_the_number_of_rows_decides(monkeypatch, rows, kernels):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    weight = jax.eval_shape(quantize, jnp.zeros((128, 64)))
    jaxpr = str(jax.make_jaxpr(lambda *a: quantized_linear(*a))(x, weight))
    names = names_in(jaxpr.replace("op=quantized_linear", ""))  # the guard's parameter
    assert {*names} & {*ROW, *FEW, *MANY} == {*kernels}


@pytest.mark.parametrize("m", [65, 256, 300, 1000])
@pytest.mark.parametrize("k", [256, 14336])
@pytest.mark.parametrize(
    "options",
    [dict(bits=4), dict(bits=8, group=32, symmetric=False), dict(bits=8, format="2:4")],
    ids=["int4", "int8", "2:4"],
)
def test_the_plan_of_many_rows_fits_an_sm(m, k, options):
    weight = shapes_of(k, 4096, **options)
    p = gemm.plan(m, weight)
    slot = 8 * (512 * p.parts + 32 * p.groups * (1 + (weight.offsets is not None)))
    assert p.stages * 128 * p.rows + p.slots * slot <= 226 * 1024
    assert p.slots >= 2
    assert p.splits <= p.turns
    assert p.rows * -(-m // p.rows) < m + p.rows


def test_warpgroups_share_the_turns_of_one_row(monkeypatch):
    monkeypatch.setattr(gemv, "_WGS", 2)
    p = gemv.plan([quantize(normal(1, (2304, 40)))])
    assert (p.turns, p.wgs, p.share, p.ahead) == (9, 2, 5, 2)
    check((1,), 2304, 40, bias=normal(3, (40,)))


@pytest.mark.parametrize("k", [128, 4096, 14336])
@pytest.mark.parametrize("n", [64, 2048, 4096, 14336])
def test_the_blocks_of_one_row_run_at_once(k, n):
    weight = shapes_of(k, n)
    p = gemv.plan([weight])
    blocks = -(-weight.words.shape[0] // 132)
    assert blocks * p.wgs * 128 * 64 <= 65536  # threads of 64 registers
    assert (p.share - 1) * p.wgs < p.turns <= p.share * p.wgs
    assert 1 <= p.ahead <= p.share


@pytest.mark.parametrize("m", [1, 8, 9, 64])
@pytest.mark.parametrize("k", [128, 4096, 14336])
@pytest.mark.parametrize("bits", [8, 1])
def test_the_turns_of_blocks_and_warpgroups_cover_k_once(m, k, bits):
    p = plan(m, shapes_of(k, 4096, bits=bits))
    turns = []
    for split in range(p.splits):
        first, last = (s * p.turns // p.splits for s in (split, split + 1))
        for wg in range(p.wgs):
            count = (last - first - wg + p.wgs - 1) // p.wgs
            turns += [first + wg + i * p.wgs for i in range(count)]
    assert sorted(turns) == list(range(p.turns))
    assert p.turns * p.span * p.step >= k
    assert p.stages >= 1


@pytest.mark.parametrize(
    ("m", "k", "options"),
    [
        (64, 512, dict(bits=2, symmetric=False)),
        (64, 512, dict(bits=1, group=32, symmetric=False)),
        (32, 768, dict(bits=4)),
    ],
)
def test_the_largest_blocks_fit_into_shared_memory(m, k, options):
    weight = jax.eval_shape(lambda w: quantize(w, **options), jnp.zeros((k, 64)))
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    linear = lambda *a: quantized_linear(*a, implementation="mosaic")
    assert_lowers(linear, (x, weight), FEW)


def test_the_gradient_is_that_of_the_dense_layer():
    x, bias = normal(0, (5, 128)), normal(2, (64,))
    weight = quantize(normal(1, (128, 64)), bits=4, symmetric=False)
    dense = lambda x, bias: x @ dequantize(weight) + bias
    ours = lambda x, bias: quantized_linear(x, weight, bias)
    results = []
    for f in (dense, ours):
        y, pull = jax.vjp(f, x, bias)
        results.append((y, pull(jnp.cos(y))))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_xla_dequantizes_after_it_has_x(monkeypatch):
    """Or it would dequantize the weights of all layers first."""
    x, weight = arrays()
    depends = []

    def spy(weight, dtype):
        depends.append(isinstance(weight.words, jax.core.Tracer))
        return dequantize(weight, dtype)

    monkeypatch.setattr(op, "dequantize", spy)
    loss = lambda x: quantized_linear(x, weight, implementation="xla").sum()
    jax.make_jaxpr(jax.grad(loss))(x)
    assert depends == [True, True]  # forward and backward


def test_the_weight_has_no_gradient():
    weight = quantize(normal(1, (128, 64)))
    x = normal(0, (2, 128))
    loss = lambda w: quantized_linear(x, w).sum()
    gradient = jax.grad(loss, allow_int=True)(weight)
    assert not gradient.scales.any()


def arrays():
    return normal(0, (2, 128), jnp.bfloat16), quantize(normal(1, (128, 64)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x[:, :64], w), "x has shape (2, 64), but the weight needs (..., 128)"),
        (lambda x, w: (x, w, jnp.ones(63)), "bias has shape (63,), but the weight needs (64,)"),
        (
            lambda x, w: (x, jax.tree.map(lambda a: a[:, :0], w)),
            "words of a (128, 64) weight is int32 (4, 0, 1, 32, 4), not int32 (4, 4, 1, 32, 4)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantized_linear(*change(*arrays()))


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (jnp.ones((2, 128)), "x is float32, not bfloat16"),
        (jnp.ones((4097, 1, 128), jnp.bfloat16), "rows=4097 are more than 4096"),
        (jnp.ones((0, 128), jnp.bfloat16), "without elements"),
    ],
)
def test_what_the_kernel_does_not_take(x, why):
    weight = arrays()[1]
    with pytest.raises(NotImplementedError, match=why):
        quantized_linear(x, weight, implementation="mosaic")
    assert quantized_linear(x, weight).shape == (*x.shape[:-1], 64)


def test_a_weight_that_is_not_packed_is_refused():
    for call in (lambda w: quantized_linear(jnp.ones((2, 128)), w), dequantize):
        with pytest.raises(ValueError, match=r"not packed: quantize\(\) packs arrays"):
            call(jnp.ones((128, 64)))
