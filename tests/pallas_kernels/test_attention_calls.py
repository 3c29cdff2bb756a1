"""What runs a call of attention, and which calls are refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import BF16, FP16, inputs
from kernel_checks import ON_GPU, assert_error_ratio, normal

from pallas_kernels import dispatch
from pallas_kernels.flash_attention.op import attention, attention_reference, why_not


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "reason"),
    [
        ((1, 8, 8, 2, 1, 260), BF16, {}, "D=260 is more than 256"),
        ((1, 8, 8, 2, 1, 64), jnp.float32, {}, "q is float32, not bfloat16 or float16"),
        ((1, 8, 8, 2, 1, 64), BF16, {"scale": -1.0}, "scale=-1.0 is less than 1e-30"),
        # Masked logits would be -inf times 0, and lse over the scale infinite.
        ((1, 8, 8, 2, 1, 64), BF16, {"scale": 1e-38}, "scale=1e-38 is less than 1e-30"),
        ((1, 8, 8, 2, 1, 64), BF16, {"softcap": 101.0}, "softcap=101.0 is more than 100"),
        ((0, 8, 8, 2, 1, 64), BF16, {}, "without elements"),
    ],
)
def test_what_the_kernel_lacks_is_said(shape, dtype, options, reason):
    q, k, v = inputs(*shape, dtype)
    assert reason in why_not((q, k, v), **options)
    with pytest.raises(NotImplementedError, match=reason):
        attention(q, k, v, implementation="mosaic", **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "runs"),
    [
        ((1, 8, 8, 2, 1, 64), BF16, {}, "cudnn"),
        ((1, 8, 8, 2, 1, 96), FP16, {"causal": False}, "cudnn"),
        ((1, 8, 8, 2, 1, 64), BF16, {"window": 4, "scale": 0.3}, "cudnn"),
        ((1, 8, 8, 2, 1, 136), BF16, {}, "general"),  # over 128 before Hopper
        ((1, 8, 8, 2, 1, 64), jnp.float32, {}, "xla"),
        ((1, 8, 10, 2, 1, 64), BF16, {}, "general"),
        ((1, 8, 10, 2, 1, 64), BF16, {"causal": False}, "cudnn"),
        ((1, 9, 9, 2, 1, 64), BF16, {}, "general"),  # JAX has no gradient for odd lengths
        ((1, 9, 8, 2, 1, 64), BF16, {"causal": False}, "general"),
        ((1, 8, 9, 2, 1, 64), BF16, {"causal": False}, "general"),
        ((1, 8, 8, 2, 1, 64), BF16, {"softcap": 4.0}, "general"),
        ((1, 8, 8, 2, 1, 64), BF16, {"return_lse": True}, "general"),
        ((1, 8, 8, 2, 1, 64), BF16, {"segment_ids": jnp.zeros((1, 8), jnp.int32)}, "general"),
    ],
)
def test_other_gpus_take_cudnn_where_it_takes_the_call(shape, dtype, options, runs, monkeypatch):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None if gpu == "sm_80" else "older")
    calls = []
    cudnn = lambda q, *_, **options: calls.append(1) or q
    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    why = {
        "cudnn": "older",
        "general": "supported",
        "xla": "q is float32, not bfloat16 or float16",
    }
    for asked, expected in (
        (None, (runs, why[runs])),
        ("xla", ("xla", "asked for")),  # never runs on cuDNN
    ):
        dispatch.reset()
        arrays = inputs(*shape, dtype)
        jax.eval_shape(functools.partial(attention, **options, implementation=asked), *arrays)
        (decision,) = dispatch.decisions()
        assert (decision.runs, decision.why) == expected
        assert len(calls) == (runs == "cudnn")


def test_other_dtypes_of_v_are_not_for_cudnn_and_get_gradients_in_their_own(monkeypatch):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    q, k, v = inputs(1, 8, 8, 2, 1, 8)
    v = v.astype(jnp.float32)
    dispatch.reset()
    grads = jax.grad(lambda *a: attention(*a).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)
    assert dispatch.decisions()[0].runs == "xla"  # JAX does not pass it to cuDNN
    assert [g.dtype for g in grads] == [BF16, BF16, jnp.float32]


@pytest.mark.parametrize(("b", "t", "s"), [(0, 8, 8), (1, 0, 8), (1, 8, 0), (1, 0, 0)])
def test_attention_without_elements(b, t, s):
    arrays = inputs(b, t, s, 2, 1, 8)
    f = functools.partial(attention, causal=False, return_lse=True)
    (out, lse), pull = jax.vjp(f, *arrays)
    np.testing.assert_array_equal(out, np.zeros((b, t, 2, 8)))  # no query sees a key
    np.testing.assert_array_equal(lse, np.full((b, 2, t), -np.inf))
    for a, g in zip(arrays, pull((out, jnp.zeros_like(lse))), strict=True):
        np.testing.assert_array_equal(g, np.zeros(a.shape))


@pytest.mark.skipif(not ON_GPU, reason="cuDNN runs on a GPU")
@pytest.mark.parametrize(("d", "options"), [(96, {}), (256, {}), (64, {"window": 50})])
def test_cudnn_computes_what_the_reference_does(d, options, monkeypatch):
    other = lambda gpu: "another GPU" if gpu == "sm_90a" else None
    monkeypatch.setattr(dispatch, "device_lacks", other)
    arrays = inputs(2, 200, 200, 4, 2, d)
    dout = normal(3, arrays[0].shape, BF16)

    def results(f, *arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, *pull(dout.astype(out.dtype))

    dispatch.reset()
    actual = results(functools.partial(attention, **options), *arrays)
    assert dispatch.decisions()[0].runs == "cudnn"
    reference = functools.partial(attention_reference, **options)
    expected = results(reference, *arrays)
    with jax.enable_x64(True):
        truth = results(reference, *(np.asarray(x).astype(np.float64) for x in arrays))
    # The tolerance is relative: gradients reach 14, where a step of bfloat16 is 0.06.
    for name, *values in zip(("out", "dq", "dk", "dv"), actual, expected, truth, strict=True):
        assert_error_ratio(*values, name)


def test_a_policy_can_spare_the_second_forward():
    q, k, v = inputs(1, 64, 64, 1, 1, 64)

    def forwards(policy):
        f = jax.checkpoint(lambda *x: attention(*x, implementation="mosaic"), policy=policy)
        loss = lambda *x: f(*x).astype(jnp.float32).sum()
        grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        text = grad.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("call @forward")

    policies = jax.checkpoint_policies
    assert forwards(policies.nothing_saveable) == 2
    assert forwards(policies.save_only_these_names("attention")) == 1


def one(*shape):
    return jnp.ones(shape, jnp.int32)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 8, 8, 3, 2, 64), {}, "H=3 query heads are not a multiple of K=2"),
        ((1, 9, 8, 2, 2, 64), {}, "T=9 is more than S=8 keys"),
        ((1, 8, 8, 2, 2, 64), {"causal": False, "window": 3}, "window=3 needs causal=True"),
        ((1, 8, 8, 2, 2, 64), {"softcap": 0.0}, "softcap=0.0 must be positive"),
        ((1, 8, 8, 2, 2, 64), {"scale": math.nan}, "scale=nan is not a finite number"),
        (
            (2, 8, 8, 2, 2, 64),
            {"segment_ids": one(1, 8)},
            r"shapes \(\(1, 8\),\), not \(\(2, 8\),\)",
        ),
        (
            (2, 8, 9, 2, 2, 64),
            {"segment_ids": one(2, 8)},
            r"shapes \(\(2, 8\),\), not \(\(2, 9\),\)",
        ),
        ((1, 8, 9, 2, 2, 64), {"segment_ids": (one(1, 9),) * 2}, r"not \(\(1, 8\), \(1, 9\)\)"),
        ((1, 9, 8, 2, 2, 64), {"segment_ids": one(1, 8), "causal": False}, "segment_ids of both"),
        ((1, 8, 8, 2, 2, 64), {"segment_ids": one(1, 8) + 0.5}, "segment_ids is float32: cast"),
    ],
)
def test_contradictions_are_errors(shape, options, message):
    with pytest.raises(ValueError, match=message):
        attention(*inputs(*shape), implementation="mosaic", **options)
