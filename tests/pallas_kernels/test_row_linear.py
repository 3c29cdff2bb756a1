import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from jax.test_util import check_grads
from kernel_checks import check_op, normal

from pallas_kernels import quantize, row_linear
from pallas_kernels.quantized import gemv
from pallas_kernels.single_row import plan, why_slower

BF16 = jnp.bfloat16
KERNELS = ("row_linear",)
row_linear_reference = functools.partial(row_linear, implementation="xla")


def arrays(k, sizes, norm=None, bias=False, residual=None, dtype=BF16):
    """x, weights, biases, weight and bias of the norm, residual."""
    x = normal(0, (1, k), dtype, offset=0.5)
    weights = [normal(1 + i, (n, k), dtype, scale=k**-0.5) for i, n in enumerate(sizes)]
    biases = [normal(9 + i, (n,)) for i, n in enumerate(sizes)] if bias else None
    centered = normal(21, (k,)) if norm == "layer" else None
    norm = None if norm is None else (normal(20, (k,), scale=0.2, offset=1.0), centered)
    return x, weights, biases, norm, residual and normal(30, (1, sizes[0]), residual)


def call(op, activation=None):
    def run(x, weights, biases, norm, residual, **options):
        weight, shift = norm or (None, None)
        options |= dict(norm_weight=weight, norm_bias=shift, centered=shift is not None)
        options |= dict(norm_eps=1e-3, activation=activation, residual=residual)
        return op(x, weights, biases, **options)

    return run


@pytest.mark.parametrize(
    ("k", "sizes", "options", "activation"),
    [
        # Three matrices of one kernel, two rows a warp; RMS norm and two matrices of one result.
        (256, [16, 8, 8], dict(norm="layer", bias=True), None),
        (512, [16, 16], dict(norm="rms"), "swiglu"),
        # Warpgroups that share K.
        (2048, [8], dict(norm="layer", bias=True, residual=jnp.float32), "gelu"),
        slow(3328, [8], dict(norm="rms", residual=BF16, dtype=jnp.float16), None),
        slow(512, [12], dict(bias=True, residual=jnp.float32, dtype=jnp.float32), None),
    ],
    ids=["qkv", "gate-up", "warpgroups", "many", "float32"],
)
def test_row_linear_matches_float64(k, sizes, options, activation):
    ours, reference = call(row_linear, activation), call(row_linear_reference, activation)
    check_op(ours, reference, *arrays(k, sizes, **options), kernels=KERNELS, differentiable=[])


@pytest.mark.parametrize(
    ("k", "sizes", "packing", "options", "activation"),
    [
        (512, [48, 16, 32], dict(bits=4), dict(norm="layer", bias=True), None),
        (512, [136, 136], dict(bits=8), dict(norm="rms"), "swiglu"),
        # Warpgroups that share K, some with a turn past the end.
        (768, [32], dict(bits=4, group=32), dict(norm="rms", bias=True), "gelu"),
        slow(640, [24], dict(bits=8, symmetric=False), dict(residual=jnp.float32), None),
        slow(2048, [16, 16], dict(bits=1), dict(norm="layer", residual=BF16), "swiglu"),
        slow(1024, [16], dict(bits=2, group=None), dict(norm="layer"), None),
        slow(1024, [16, 8], dict(bits=4, format="2:4"), dict(norm="rms"), None),
    ],
    ids=["qkv", "gate-up", "warpgroups", "residual", "1-bit", "2-bit", "2:4"],
)
def test_packed_row_linear_matches_float64(monkeypatch, k, sizes, packing, options, activation):
    monkeypatch.setattr(gemv, "_WGS", 2)  # threads take long to interpret
    x, weights, *others = arrays(k, sizes, **options)
    weights = [quantize(w.T, **packing) for w in weights]
    ours, reference = call(row_linear, activation), call(row_linear_reference, activation)
    kernels = ("quantized_linear_row",)
    check_op(ours, reference, x, weights, *others, kernels=kernels, differentiable=[])


@pytest.mark.parametrize(
    ("k", "packings", "dtype", "norm", "reason"),
    [
        (512, [{}], jnp.float16, None, "x is float16, not bfloat16"),
        (512, [{}, dict(bits=8)], BF16, None, "the weights have several formats"),
        (384, [{}], BF16, "rms", "K=384 is not a multiple of 256 with a norm"),
        (8448, [{}], BF16, "rms", "K=8448 is more than 8192 with a norm"),
    ],
)
def test_what_the_packed_kernel_does_not_support(k, packings, dtype, norm, reason):
    def run(implementation):
        x, weights, *others = arrays(k, [16] * len(packings), norm=norm, dtype=dtype)
        pairs = zip(weights, packings, strict=True)
        packed = [quantize(w.T.astype(jnp.float32), **options) for w, options in pairs]
        return call(row_linear)(x, packed, *others, implementation=implementation)

    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(lambda: run("mosaic"))
    assert len(jax.eval_shape(lambda: run(None))) == len(packings)


@pytest.mark.parametrize("k", [256, 768, 1280, 2048, 3072, 4096, 8192, 14336])
@pytest.mark.parametrize(
    ("sizes", "activation"), [([4], None), ([768] * 3, None), ([64] * 2, "swiglu")]
)
def test_the_loads_of_a_lane_fit_into_its_registers(k, sizes, activation):
    p = plan(k, sizes, jnp.dtype(BF16), 1e-5, True, activation)
    assert p.share * p.wgs == k
    assert not any(n % p.lines for n in sizes)
    registers = p.rows * (2 if activation else 1) * p.share * 2 // (32 * 4)
    assert registers <= (64 if p.wgs <= 4 or p.rows == 1 else 32)


def test_xla_multiplies_large_matrices():
    small, large = (jax.ShapeDtypeStruct((n, 4096), BF16) for n in (2048, 2052))
    assert why_slower(None, [small]) is None
    assert why_slower(None, [large]) == why_slower(None, [small] * 2)
    assert "16 MB" in (why_slower(None, [large]) or "")


BAD = [
    (
        dict(weights=[jnp.ones((8, 256)), quantize(jnp.ones((256, 8)))]),
        "some weights are packed and some are not",
    ),
    (
        dict(weights=[quantize(jnp.ones((128, 8)))]),
        "weights[0] has shape (128, 8), but x needs (256, N)",
    ),
    (dict(x=jnp.ones((2, 256))), "x has shape (2, 256), which is not a single row"),
    (dict(weights=[jnp.ones((8, 512))]), "weights[0] has shape (8, 512), but x needs (N, 256)"),
    (dict(biases=[jnp.ones(4)]), "biases[0] has shape (4,), but needs (8,)"),
    (dict(biases=[None] * 2), "there are 2 biases for 1 weights"),
    (dict(biases=jnp.ones(8)), "biases must be a tuple or list of arrays, not float32 (8,)"),
    (dict(activation="relu"), "activation='relu' is not one of gelu, swiglu"),
    (dict(activation="swiglu"), "swiglu needs two weights of one shape, not [(8, 256)]"),
    (dict(weights=[]), "weights is empty: row_linear needs at least one"),
    (dict(norm_weight=jnp.ones(8)), "norm_weight has shape (8,), but needs (256,)"),
    (dict(norm_bias=jnp.ones(256)), "norm_bias needs a norm_weight"),
    (dict(residual=jnp.ones((1, 4))), "residual has shape (1, 4), but needs (1, 8)"),
    (
        dict(weights=[jnp.ones((8, 256))] * 2, residual=jnp.ones((1, 8))),
        "a residual needs one result, not 2",
    ),
]


@pytest.mark.parametrize(("change", "error"), BAD, ids=[error for _, error in BAD])
def test_bad_calls_are_named_in_one_line(change, error):
    good = dict(x=jnp.ones((1, 256)), weights=[jnp.ones((8, 256))])
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        row_linear(**(good | change))


@pytest.mark.parametrize(
    ("k", "sizes", "options", "reason"),
    [
        (260, [8], {}, "K=260 is not a positive multiple of 256"),
        (256, [6], {}, "N=6 is not a positive multiple of 4"),
        (8448, [8], dict(norm="rms"), "K=8448 is more than 8192 with a norm"),
        (256 * 137, [8], {}, f"K={256 * 137} does not divide into at most 8 parts for registers"),
    ],
)
def test_the_kernel_names_what_it_does_not_support_and_xla_runs(k, sizes, options, reason):
    inputs = jax.eval_shape(lambda: arrays(k, sizes, **options))
    mosaic = lambda *a: call(row_linear)(*a, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(mosaic, *inputs)
    assert jax.eval_shape(call(row_linear), *inputs)[0].shape == (1, *sizes)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.parametrize("integer", ["weights", "residual"])
def test_integers_are_refused(integer, implementation):
    """The result, which has the weight's or the residual's dtype, was rounded to them."""
    given = dict(weights=[jnp.ones((8, 256))], residual=jnp.ones((1, 8)))
    given[integer] = jax.tree.map(lambda a: a.astype(jnp.int8), given[integer])
    with pytest.raises(ValueError, match="is int8: cast it"):
        row_linear(jnp.ones((1, 256)), **given, implementation=implementation)


def test_only_xla_has_a_gradient():
    x, weights, *_ = arrays(256, [8], dtype=jnp.float32)
    f = lambda x, implementation: row_linear(x, weights, implementation=implementation)[0]
    with jax.default_matmul_precision("highest"):  # a GPU's TF32 has too few bits for differences
        check_grads(lambda x: f(x, "xla"), (x,), order=1, modes=["rev"])
    with pytest.raises(NotImplementedError, match="row_linear.* generation no gradient"):
        jax.eval_shape(jax.grad(lambda x: f(x, "mosaic").sum()), x)
