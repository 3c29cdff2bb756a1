import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import ON_GPU, assert_lowers, check_op, names_in, normal

from pallas_kernels import (
    attention,
    attention_qkv,
    dispatch,
    linear_cross_entropy,
    mosaic,
    rope,
)

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
ROPE = ("rope_forward", "rope_backward")
BF16, FP16 = jnp.bfloat16, jnp.float16


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    monkeypatch.setattr(mosaic, "sm_count", lambda: 16 if ON_GPU else 1)


@pytest.mark.parametrize(
    ("shape", "heads", "theta", "options"),
    [  # (B, T, D), (H, K)
        ((2, 80, 64), (3, 1), 500.0, {"window": 50}),
        slow((1, 72, 128), (2, 2), None, {"softcap": 5.0}),
    ]
    + [
        ((1, 72, 64), (2, 2), None, {}),
        ((1, 64, 128), (2, 1), 1e4, {"softcap": 5.0}),
        ((2, 1000, 128), (12, 3), 1e4, {}),
        ((4, 1024, 64), (12, 12), None, {}),
    ]
    * ON_GPU,
)
def test_it_matches_float64(shape, heads, theta, options):
    (b, t, d), (h, kv) = shape, heads
    op = lambda qkv, positions, implementation="xla": attention_qkv(
        qkv, h, positions=positions, theta=theta, implementation=implementation, **options
    )
    qkv, positions = normal(0, (b, t, h + 2 * kv, d), BF16), jnp.arange(t) + 3
    check_op(op, op, qkv, positions, kernels=KERNELS + (ROPE if theta else ()))


@pytest.mark.parametrize(
    ("shape", "heads", "dtype", "documents", "options"),
    [  # (B, T, D), (H, K); without a softcap the gradient of the keys' biases is zero
        ((2, 136, 64), (3, 1), BF16, None, {"window": 50, "softcap": 5.0}),
        ((1, 72, 128), (1, 1), FP16, 30, {}),
        slow((2, 200, 64), (2, 2), FP16, 70, {"softcap": 5.0}),
        slow((1, 136, 128), (2, 1), BF16, None, {"window": 50, "softcap": 5.0}),
    ]
    + [
        ((4, 1024, 64), (12, 12), BF16, None, {}),
        ((2, 1000, 128), (12, 3), BF16, None, {"softcap": 5.0}),
        ((2, 1000, 64), (12, 3), FP16, 300, {"softcap": 5.0}),
    ]
    * ON_GPU,
)
def test_the_kernels_sum_the_gradient_of_a_bias(shape, heads, dtype, documents, options):
    (b, t, d), (h, kv) = shape, heads
    ids = None if documents is None else jnp.broadcast_to(jnp.arange(t) // documents, (b, t))
    op = lambda qkv, bias, implementation="xla": attention_qkv(
        qkv, h, bias=bias, segment_ids=ids, implementation=implementation, **options
    )
    qkv, bias = normal(0, (b, t, h + 2 * kv, d), dtype), normal(1, (h + 2 * kv, d))
    check_op(op, op, qkv, bias, kernels=KERNELS)
    assert not _sums_rows(op, qkv, bias)


@pytest.mark.parametrize(
    ("t", "d", "theta", "kernels"),
    [
        (24, 96, None, KERNELS),
        (24, 256, None, KERNELS),
        (20, 64, None, KERNELS),  # split, as 20 is not a multiple of 8
        (32, 64, 1e4, KERNELS + ROPE),
    ],
)
def test_xla_sums_the_gradient_of_other_biases(t, d, theta, kernels):
    op = lambda qkv, bias, implementation="mosaic": attention_qkv(
        qkv, 1, bias=bias, theta=theta, implementation=implementation
    )
    qkv, bias = jnp.zeros((2, t, 3, d), BF16), jnp.zeros((3, d))
    assert_lowers(jax.grad(lambda *x: op(*x).sum(), (0, 1)), (qkv, bias), kernels)
    assert _sums_rows(op, qkv, bias)


def _sums_rows(op, qkv, bias):
    """Whether XLA sums the whole gradient over the rows, for that of the bias."""
    gradients = jax.grad(lambda *x: op(*x, implementation="mosaic").sum(), (0, 1))
    program = str(jax.make_jaxpr(gradients)(qkv, bias))
    return re.search(rf"f16\[{bias.size}\] = reduce_sum\[", program) is not None


def test_a_bias_is_added_before_rope_and_attention():
    qkv, bias = normal(0, (2, 24, 8, 64), BF16), normal(1, (8, 64))
    ids = jnp.arange(24) // 9 + jnp.zeros((2, 1), int)
    options = dict(theta=100.0, segment_ids=ids, window=7)
    expected = attention_qkv(qkv + bias.astype(BF16), 4, **options)
    assert jnp.array_equal(attention_qkv(qkv, 4, bias=bias, **options), expected)


def test_only_with_a_bias_the_kernels_compute_sums():
    def matmuls(op, *arrays):
        f = lambda *arrays: op(*arrays, implementation="mosaic").sum()
        return str(jax.make_jaxpr(jax.grad(f))(*arrays)).count("wgmma_ref ")

    qkv, q = jnp.zeros((1, 64, 3, 64), BF16), jnp.zeros((1, 64, 1, 64), BF16)
    without = matmuls(functools.partial(attention_qkv, n_heads=1), qkv)
    assert without == matmuls(attention, q, q, q) > 0
    of_bias = functools.partial(attention_qkv, n_heads=1, bias=jnp.zeros((3, 64)))
    assert matmuls(of_bias, qkv) == without + 3  # sums of dQ, dK and dV


@pytest.mark.parametrize("shape", [(64,), (9, 32), (9 * 64,), (1, 9, 64)])
def test_a_bias_of_another_shape_is_an_error(shape):
    message = re.escape(f"bias has shape {shape}, not (9, 64)")
    with pytest.raises(ValueError, match=message):
        attention_qkv(jnp.zeros((1, 8, 9, 64)), 3, bias=jnp.zeros(shape))


@pytest.mark.parametrize("t", [16, 20])  # in one array; split, as 20 is not a multiple of 8
def test_the_kernels_say_so_in_the_lowered_program(t):
    qkv = jnp.zeros((1, t, 4, 64), BF16)
    f = functools.partial(attention_qkv, n_heads=2, implementation="mosaic")
    text = jax.jit(f).trace(qkv).lower(lowering_platforms=("cuda",)).as_text()
    assert "attention_forward" in names_in(text)
    assert ("stablehlo.slice" in text) == (t == 20)


@pytest.mark.parametrize("lacks", [None, "no GPU"])
def test_what_is_decided_is_what_runs(monkeypatch, lacks):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: lacks)
    dispatch.reset()
    f = jax.jit(lambda qkv: attention_qkv(qkv, 1, theta=1e4))
    qkv = jnp.zeros((2, 16, 3, 64), BF16)
    names = names_in(f.trace(qkv).lower(lowering_platforms=("cuda",)).as_text())
    runs, why = ("xla", lacks) if lacks else ("mosaic", "supported")
    assert dispatch.decisions() == [("rope", runs, why), ("attention", runs, why)]
    for kernel in "rope_forward", "attention_forward":
        assert (kernel in names) == (runs == "mosaic")
    dispatch.reset()


def test_it_is_rope_and_attention_of_its_parts():
    qkv, ids = normal(0, (2, 24, 8, 16)), jnp.arange(24) // 9 + jnp.zeros((2, 1), int)
    q, k, v = jnp.split(qkv, (4, 6), axis=2)
    q, k = rope(q, k, jnp.arange(24), theta=100.0)
    expected = attention(q, k, v, segment_ids=ids, window=7)
    actual = attention_qkv(qkv, 4, positions=jnp.arange(24), theta=100.0, segment_ids=ids, window=7)
    assert jnp.array_equal(actual, expected)


@pytest.mark.parametrize("n_heads", [4, 5, 6, 8])
def test_heads_that_do_not_add_up_are_an_error(n_heads):
    with pytest.raises(ValueError, match=f"qkv has 9 heads, not n_heads={n_heads} plus twice"):
        attention_qkv(jnp.zeros((1, 8, 9, 64)), n_heads)


def test_checkpoint_runs_the_kernels_that_write_in_place_again():
    """JAX once dropped these writes, so the gradients were those of q and k before RoPE."""
    x, weight, labels = (
        jnp.ones((1, 64, 3, 64), BF16),  # RoPE rotates whole tiles of 32 positions in place
        jnp.ones((128, 64)),
        jnp.zeros(8, int),
    )
    rotated = lambda x: (
        attention_qkv(x, 1, theta=1e4, implementation="mosaic").astype(jnp.float32).sum()
    )
    head = lambda x: linear_cross_entropy(
        x.reshape(-1, 64)[:8], weight, labels, implementation="mosaic"
    )
    for op, kernel in (
        (rotated, "rope_forward"),
        (head, "linear_cross_entropy_statistics_and_gradient"),
    ):
        again = jax.jit(jax.grad(jax.checkpoint(op))).trace(x).lower(lowering_platforms=("cuda",))
        assert kernel in names_in(again.as_text())
