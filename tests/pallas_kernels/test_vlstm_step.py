"""One position of the vLSTM's recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_truth
from cases import slow
from kernel_checks import assert_error_ratio, normal

from pallas_kernels import dispatch, vlstm_step

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


def formula(*arrays, gate="exp", normalize=True):
    """h and the true (C e^m, n e^m) in float64."""
    with jax.enable_x64(True):
        *arrays, c, n, m = (jnp.asarray(x).astype(jnp.float64) for x in arrays)
        state = random_truth.true_state((c, n, m))
        return jax.tree.map(
            np.asarray, random_truth.vlstm_step(*arrays, state, gate=gate, normalize=normalize)
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 2, 32, 64), BF16, {}),
        ((1, 1, 48, 32), jnp.float32, dict(gate="sigmoid")),
        ((1, 1, 40, 33), jnp.float16, dict(normalize=False)),
        slow((3, 2, 64, 96), BF16, dict(gate="sigmoid", normalize=False)),
    ],
)
def test_vlstm_step_is_its_formula(shape, dtype, options):
    *arrays, c, n, m = inputs(*shape, dtype)
    h, (new_c, new_n, new_m) = jax.jit(lambda *a: vlstm_step(*a, **options))(*arrays, (c, n, m))
    expected, (true_c, true_n) = formula(*arrays, c, n, m, **options)
    assert h.dtype == dtype
    assert new_c.dtype == new_n.dtype == new_m.dtype == jnp.float32
    assert_error_ratio(h, expected.astype(dtype), expected, "h")
    scale = np.exp(np.asarray(new_m, np.float64))
    for name, x, true in (("C", new_c, true_c), ("n", new_n, true_n)):
        x = np.asarray(x, np.float64) * scale.reshape(*scale.shape, *[1] * (x.ndim - 2))
        np.testing.assert_allclose(x, true, rtol=2e-5, atol=2e-5 * np.abs(true).max(), err_msg=name)


def test_extreme_gates():
    """A closed input gate, a forget gate that clears the state, and a state far from zero."""
    *arrays, c, n, m = inputs(4, 1, 16, 32)
    arrays[3] = jnp.array([-jnp.inf, 80.0, -80.0, 0.0])[:, None]
    arrays[4] = jnp.array([100.0, -90.0, 3.0, -1e4])[:, None]
    m = jnp.array([0.0, 50.0, -60.0, 90.0])[:, None]
    h, state = vlstm_step(*arrays, (c, n, m))
    expected, _ = formula(*arrays, c, n, m)
    assert all(np.isfinite(x).all() for x in state)
    assert_error_ratio(h, expected.astype(BF16), expected, "h")


def test_it_has_no_kernel_and_a_gpu_misses_none(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_warn_of_compiler", lambda: None)
    dispatch.reset()
    *arrays, c, n, m = inputs(1, 1, 16, 32)
    step = lambda how: jax.eval_shape(lambda: vlstm_step(*arrays, (c, n, m), implementation=how))
    step(None)
    assert [d.runs for d in dispatch.decisions()] == ["xla"]
    assert not caplog.records
    with pytest.raises(NotImplementedError, match="vlstm_step has no Mosaic kernel .*it has none"):
        step("mosaic")
