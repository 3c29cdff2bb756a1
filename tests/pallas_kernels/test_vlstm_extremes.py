"""vlstm at gates and states where a careless form computes inf - inf or 0 times infinity."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from kernel_checks import kernels_run_here, normal

from pallas_kernels import vlstm, vlstm_step

EMPTY = (0.0, -jnp.inf)  # a factor of C and n, and the stabiliser


def inputs(length, width, dtype=jnp.float32):
    q, k, v = (normal(seed, (1, length, 1, width), dtype) for seed in range(3))
    return q, k, v, *(normal(seed, (1, length, 1), scale=2.0) for seed in (3, 4))


def a_state(width, scale, m):
    c, n = normal(5, (1, 1, width, width)), normal(6, (1, 1, width))
    return c * scale, n * scale, jnp.full((1, 1), m)


def with_gradients(form, args, state, **options):
    """h and the gradients of its sum with normal numbers, float64."""

    @jax.jit
    def run(args, state):
        f = lambda args, state: form(*args, initial_state=state, **options)
        h, pull = jax.vjp(f, args, state)
        return h, pull(normal(20, h.shape, h.dtype))

    leaves, _ = jax.tree.flatten(run(args, state))
    return [np.asarray(x).astype(np.float64) for x in leaves]


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a - e).max() <= tolerance * max(np.abs(e).max(), 1e-3)


@pytest.mark.parametrize(
    ("i", "f", "q_scale", "state"),
    [  # 17 positions are a chunk, and one more chunk with 15 of padding
        (100.0, 0.0, 1.0, None),  # 1 / N of padding is e^100
        (60.0, 0.0, 0.0, None),  # and of queries that are 0
        (0.0, 0.0, 1.0, EMPTY),
        (-jnp.inf, 0.0, 1.0, EMPTY),
        (0.0, -1e4, 1.0, (1.0, -jnp.inf)),
    ],
)
def test_extremes_of_the_chunkwise_form(i, f, q_scale, state):
    q, k, v, i0, f0 = inputs(17, 8)
    args = q * q_scale, k, v, i0 + i, f0 + f
    if state is not None:
        state = a_state(8, *state)
    actual = with_gradients(vlstm, args, state, chunk_size=16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (args, state))
        expected = with_gradients(vlstm_twins.recurrent, *wide)
    assert_close(actual, expected, 1e-3)


def test_the_kernels_start_from_an_empty_state():
    """The input gates of the first positions are closed, too."""
    args = list(inputs(9, 16, jnp.bfloat16))
    args[3] = args[3].at[:, :5].set(-jnp.inf)
    state = a_state(16, *EMPTY)
    expected = with_gradients(vlstm, args, state, implementation="xla")
    with kernels_run_here():
        actual = with_gradients(vlstm, args, state, implementation="mosaic")
    assert_close(actual, expected, 0.05)


@pytest.mark.parametrize("form", ["xla", "mosaic"])
def test_the_only_position_of_a_row_has_no_gradient_near_l_0(form):
    """l summed in one order and q k^T in another left 1e4 times the rounding of float32."""
    q, k, v, dh = (
        normal(seed, (1, 1, 4, d), jnp.bfloat16) for seed, d in enumerate([192] * 2 + [64] * 2)
    )
    wide = lambda x: np.asarray(x, np.float64)
    rest = np.sum((wide(q) * wide(k))[..., :-1], -1)
    q, k = q.at[..., -1].set(1), k.at[..., -1].set((-rest).astype(k.dtype))
    gate, l = jnp.full((1, 1, 4), 20.0), np.sum(wide(q) * wide(k), -1)
    with kernels_run_here() if form == "mosaic" else contextlib.nullcontext():
        _, pull = jax.vjp(lambda *qk: vlstm(*qk, v, gate, gate, implementation=form), q, k)
        gradients = pull(dh)
    condition = np.abs(np.sum(wide(dh) * wide(v), -1) / l)[..., None]
    for gradient, other in zip(gradients, (k, q), strict=True):
        assert (np.abs(wide(gradient)) <= 2**-19 * condition * np.abs(wide(other)).max()).all()


def test_a_step_with_a_closed_gate_leaves_an_empty_state_empty():
    q, k, v, i, f = (x[:, 0] for x in inputs(1, 32))
    h, (c, n, m) = vlstm_step(q, k, v, jnp.full_like(i, -jnp.inf), f, a_state(32, *EMPTY))
    assert not h.any()
    assert not c.any()
    assert not n.any()
    assert jnp.isfinite(m).all()


@pytest.mark.parametrize("form", ["xla", "mosaic", "step"])
def test_a_normaliser_that_is_nan_shows(form):
    """max(|l|, e^-m) took e^-m for NaN: h was finite, and the state after it NaN."""
    args, (c, n, m) = inputs(1, 16, jnp.bfloat16), a_state(16, 1.0, 0.0)
    state = c, n.at[..., 0].set(jnp.nan), m
    if form == "step":
        h, _ = vlstm_step(*(x[:, 0] for x in args), state, implementation="xla")
    else:
        with kernels_run_here() if form == "mosaic" else contextlib.nullcontext():
            h = vlstm(*args, initial_state=state, implementation=form)
    assert np.isnan(h.astype(jnp.float32)).all()
