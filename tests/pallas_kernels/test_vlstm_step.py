"""One position of the vLSTM's recurrence on its kernel."""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import slow
from kernel_checks import check_op, normal

from pallas_kernels import dispatch, vlstm_step
from pallas_kernels.mlstm import reference

BF16 = jnp.bfloat16


def inputs(b, h, dqk, dv, dtype=BF16):
    """A mean keeps |l| away from 0, where every form amplifies rounding errors."""
    return [
        normal(0, (b, h, dqk), dtype, offset=1.0),
        normal(1, (b, h, dqk), dtype, offset=1.0),
        normal(2, (b, h, dv), dtype),
        normal(3, (b, h), scale=2.0),
        normal(4, (b, h), scale=2.0, offset=2.0),
        normal(5, (b, h, dqk, dv)),
        normal(6, (b, h, dqk), offset=1.0),
        normal(7, (b, h)),
    ]


def flat(op):
    return lambda q, k, v, i, f, *state, **options: op(q, k, v, i, f, state, **options)


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 2, 32, 64), BF16, {}),
        ((1, 1, 48, 32), jnp.float32, dict(gate="sigmoid")),
        ((1, 1, 256, 32), jnp.float16, dict(normalize=False)),
        slow((3, 2, 64, 96), BF16, dict(gate="sigmoid", normalize=False)),
    ],
)
def test_vlstm_step_matches_float64(shape, dtype, options):
    check_op(
        flat(vlstm_step),
        flat(reference.step),
        *inputs(*shape, dtype),
        kernels=("vlstm_step",),
        differentiable=[],
        **options,
    )


def test_extreme_gates():
    """A closed input gate, a forget gate that clears the state, and a state far from zero."""
    arrays = inputs(4, 1, 16, 32)
    arrays[3] = jnp.array([-jnp.inf, 80.0, -80.0, 0.0])[:, None]
    arrays[4] = jnp.array([100.0, -90.0, 3.0, -1e4])[:, None]
    arrays[7] = jnp.array([0.0, 50.0, -60.0, 90.0])[:, None]
    kernels = ("vlstm_step",)
    check_op(flat(vlstm_step), flat(reference.step), *arrays, kernels=kernels, differentiable=[])


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((1, 1, 40, 32), {}, "DQK=40 is not a multiple of 16 up to 256"),
        ((1, 1, 272, 32), {}, "DQK=272 is not a multiple of 16 up to 256"),
        ((1, 1, 32, 48), {}, "DV=48 is not a multiple of 32"),
        ((1, 1, 32, 32), dict(eps=1e-6), "eps=1e-06 is not 0"),
    ],
)
def test_what_the_kernel_does_not_support(shape, options, reason):
    q, k, v, i, f, *state = inputs(*shape)
    run = lambda which: vlstm_step(q, k, v, i, f, state, implementation=which, **options)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        jax.eval_shape(lambda: run("mosaic"))
    assert jax.eval_shape(lambda: run(None))[0].shape == v.shape


@pytest.mark.parametrize(("rows", "runs"), [(3, "xla"), (4, "general")])  # 12 and 16 MiB
def test_a_small_state_is_left_to_xla(monkeypatch, rows, runs):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    dispatch.reset()
    of = lambda *shape: jax.ShapeDtypeStruct((rows, 8, *shape), jnp.float32)
    state = of(256, 512), of(256), of()
    jax.eval_shape(vlstm_step, of(256), of(256), of(512), of(), of(), state)
    assert [d.runs for d in dispatch.decisions()] == [runs]
