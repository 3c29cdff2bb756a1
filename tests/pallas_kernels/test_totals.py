"""Ops that add a weight's gradient to a total: total + dW, and the weight has none (totals.py)."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_interpreted
from kernel_checks import kernels_run_here, normal

from pallas_kernels import encoder, fp8_linear, linear_cross_entropy, mlp
from pallas_kernels.totals import summed

BF16, F32 = jnp.bfloat16, jnp.float32
X, TOKENS = normal(0, (128, 128), BF16), np.arange(128, dtype=np.int32).reshape(2, 64) % 50
UP, GATE = (normal(i, (128, 128), BF16) / 8 for i in (1, 2))
DOWN, BIAS = normal(3, (128, 128), BF16) / 8, normal(4, (128,))
TABLE, HEAD = normal(5, (50, 128)) / 8, normal(6, (128, 50))
LABELS = np.where(TOKENS == 7, -100, (TOKENS + 3) % 49).reshape(-1)
SUM = dict(reduction="sum", scale=0.01)
HEADS = SUM | dict(transposed=True, vocab_size=49, chunk=64)


def tied(wte, total=None, **o):
    """A table that is the head, too: the head adds to the total."""
    y = encoder(TOKENS, summed(wte, total, adds=False), None, dtype=BF16, **o)
    return linear_cross_entropy(y.reshape(-1, 128), wte, LABELS, total=total, **SUM | o)


def layer(precision, up, down, gate=None, totals=None, **o):
    bias = BIAS if gate is None else None
    y = mlp(X, up, down, gate=gate, bias=bias, precision=precision, totals=totals, **o)
    return y.astype(F32).sum()


def one(f):
    """f(weight, total=...) as f(weights, totals)."""
    return lambda weight, totals=None, **o: f(weight, total=totals and totals[0], **o)


CASES = {  # a scalar of weights (and totals), the weights
    "tied": (one(tied), (TABLE,)),
    "head": (
        one(lambda w, **o: linear_cross_entropy(X, w, LABELS, **HEADS | o)),
        (HEAD,),
    ),
    "head fp8": (
        one(lambda w, **o: linear_cross_entropy(X, w, LABELS, fp8=True, **HEADS | o)),
        (HEAD,),
    ),
    "fp8_linear": (one(lambda w, **o: fp8_linear(X, w, BIAS, **o).astype(F32).sum()), (UP,)),
    "swiglu": (functools.partial(layer, None), (UP, DOWN, GATE)),
    "gelu": (functools.partial(layer, None), (UP, DOWN)),
    "swiglu fp8": (functools.partial(layer, "fp8"), (UP, DOWN, GATE)),
    "gelu fp8": (functools.partial(layer, "fp8"), (UP, DOWN)),
}


def marked(case, implementation):
    if case in ("tied", "head fp8", "gelu fp8"):
        return slow(case, implementation)
    mark = slow_interpreted if (case, implementation) == ("head", "mosaic") else pytest.param
    return mark(case, implementation)


@pytest.mark.parametrize(
    ("case", "implementation"), [marked(case, how) for case in CASES for how in ("xla", "mosaic")]
)
def test_the_gradient_of_a_total_is_the_next_total(case, implementation):
    f, weights = CASES[case]
    f = functools.partial(f, implementation=implementation)
    start = tuple(normal(9 + i, w.shape) for i, w in enumerate(weights))
    both = lambda weights, totals: f(*weights, totals=totals)
    alone = lambda weights: f(*weights)
    kernels = implementation == "mosaic"
    with kernels_run_here() if kernels else contextlib.nullcontext():
        # jit: the casts' barriers need one program
        loss, (none, sums) = jax.jit(jax.value_and_grad(both, (0, 1)))(weights, start)
        plain, dws = jax.jit(jax.value_and_grad(alone))(weights)
        jax.block_until_ready((loss, none, sums, plain, dws))
    assert float(loss) == float(plain)
    for zero, before, after, dw in zip(none, start, sums, dws, strict=True):
        assert after.dtype == F32
        assert not np.asarray(zero, np.float32).any()
        dw = np.asarray(dw, np.float32)
        # dW alone is rounded to the weight's dtype.
        atol = (0.01 if weights[0].dtype == BF16 else 1e-5) * np.abs(dw).max() + 1e-6
        np.testing.assert_allclose(np.asarray(after) - before, dw, atol=atol)
        assert np.abs(dw).max() > 100 * 1e-6


def test_a_factor_after_the_loss_is_not_silently_wrong():
    total = jnp.zeros_like(HEAD)
    of_total = functools.partial(linear_cross_entropy, X[:64], HEAD, LABELS[:64], **HEADS)
    f = lambda total: 2 * of_total(total=total, implementation="mosaic")
    with kernels_run_here():
        assert np.isnan(np.asarray(jax.grad(f)(total))).all()
    with pytest.raises(ValueError, match='a total needs reduction="sum"'):
        linear_cross_entropy(X, HEAD, LABELS, total=total, transposed=True)


W = normal(7, (128, 128))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mlp(X, W, W, gate=W, totals=(W, W)),
            r"float32 \(128, 128\), float32 \(128, 128\)",
        ),
        (lambda: mlp(X, W, W, bias=W[0], totals=(W[0], W)), r"float32 \(128,\), float32 \(128, 1"),
        (lambda: mlp(X, W, W, gate=W, totals=(W, None, W)), r"\[1\] must be an array, not None$"),
        (lambda: fp8_linear(X, W, total=W.astype(BF16)), r"bfloat16 \(128, 128\), not float32 \(1"),
        (
            lambda: linear_cross_entropy(X, W[:9], LABELS, total=W[:8], **SUM),
            r"float32 \(8, 128\), n",
        ),
    ],
)
def test_totals_unlike_their_weights_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^totals( are )?{message}"):
        call()


def test_summed_leaves_a_weight_without_a_total_alone():
    assert jax.grad(lambda w: (3 * summed(w, None)).sum())(jnp.ones(2)).tolist() == [3, 3]
