import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import BF16, FP16, inputs, packed
from cases import slow, slow_interpreted
from kernel_checks import ON_GPU, check_op, kernels_run_here

from pallas_kernels import mosaic
from pallas_kernels.flash_attention import forward
from pallas_kernels.flash_attention.op import attention, attention_reference

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    """Gives each block several work items, as in a full grid."""
    monkeypatch.setattr(mosaic, "sm_count", lambda: 16 if ON_GPU else 2)


# A CPU spends ten seconds on each case, most of them on XLA's compilation of the interpreted
# kernels, so each covers several features; the larger cases have them one by one.
SMALL = [  # (B, T, S, H, K, D), dtype, options
    ((1, 64, 64, 2, 1, 64), BF16, {"logits": 30.0}),  # large ones, in whole tiles
    slow((1, 17, 150, 2, 2, 128), FP16, {"causal": False}),
    slow((1, 1, 1, 1, 1, 64), BF16, {"return_lse": True}),
    slow((1, 70, 137, 1, 1, 128), BF16, {"return_lse": True, "scale": 0.3}),
    slow((2, 130, 130, 3, 1, 64), BF16, {}),
    slow((2, 130, 70, 2, 1, 72), BF16, {"causal": False, "return_lse": True}),  # D=72 as 64 + 32
    slow((1, 130, 301, 2, 1, 104), BF16, {"segments": [[140]], "window": 90}),
    slow((1, 70, 70, 2, 2, 24), FP16, {"softcap": 3.0}),
    slow((1, 70, 130, 2, 1, 200), FP16, {}),
    ((1, 128, 128, 3, 1, 128), BF16, {}),  # tiles of three heads on their way
    ((1, 40, 300, 3, 1, 80), FP16, {"softcap": 3.0, "return_lse": True}),
    ((1, 60, 137, 1, 1, 256), BF16, {"segments": [[100]], "window": 60}),
    slow((1, 130, 300, 3, 1, 64), BF16, {"window": 40, "return_lse": True}),
    ((2, 70, 300, 2, 1, 64), BF16, {"segments": [[40, 250], [299]]}),
]
LARGE = [
    ((1, 72, 72, 2, 1, 64), BF16, {}),
    ((1, 64, 64, 2, 1, 64), BF16, {}),
    ((1, 96, 96, 1, 1, 64), BF16, {"logits": 30.0}),
    ((1, 17, 17, 2, 2, 128), FP16, {"causal": False}),
    ((1, 40, 150, 1, 1, 64), FP16, {"causal": False}),
    ((2, 777, 777, 14, 2, 64), BF16, {"return_lse": True}),
    ((2, 1000, 1000, 12, 3, 128), BF16, {"return_lse": True}),
    ((1, 1024, 1024, 7, 7, 64), FP16, {}),
    ((1, 4097, 4097, 4, 2, 128), BF16, {}),
    ((1, 2048, 2048, 8, 1, 128), FP16, {"causal": False}),
    ((2, 129, 1000, 4, 4, 128), BF16, {}),
    ((2, 640, 1024, 4, 4, 64), BF16, {}),
    ((2, 513, 100, 4, 4, 64), BF16, {"causal": False}),
    ((2, 1000, 1000, 6, 2, 256), BF16, {"return_lse": True}),
    ((2, 1000, 1000, 6, 2, 96), BF16, {"causal": False}),
    ((2, 777, 1500, 6, 2, 96), BF16, {"window": 20, "softcap": 20.0}),
    ((2, 1500, 1500, 6, 2, 64), BF16, {"window": 257}),
    ((2, 777, 1500, 6, 2, 128), BF16, {"window": 300}),
    ((1, 1024, 2048, 4, 1, 128), BF16, {"window": 1}),
    ((2, 1500, 1500, 6, 2, 64), BF16, {"segments": [[100, 900], [1, 2, 3, 777]]}),
    ((2, 1500, 1500, 6, 2, 128), FP16, {"segments": [[100, 900], [7, 777]], "window": 128}),
    ((2, 999, 1500, 6, 2, 96), BF16, {"segments": [[600, 900], [1300]], "causal": False}),
    ((2, 1500, 1500, 6, 2, 128), BF16, {"softcap": 20.0}),
    ((1, 700, 700, 2, 1, 256), BF16, {"segments": [[333]], "softcap": 20.0}),
    ((2, 777, 1500, 6, 2, 80), BF16, {"segments": [[600, 900], [1300]], "window": 300}),
    ((1, 1000, 1000, 6, 2, 112), FP16, {"segments": [[333]], "softcap": 20.0}),
    ((2, 1000, 1000, 6, 6, 192), BF16, {"window": 200, "return_lse": True}),
    ((1, 777, 777, 6, 2, 160), BF16, {"segments": [[333]], "causal": False}),
    ((1, 1000, 1000, 6, 6, 16), BF16, {"segments": [[600, 900]], "window": 100}),
    ((2, 333, 1001, 6, 2, 32), BF16, {"return_lse": True}),
    ((2, 1000, 1000, 6, 1, 48), FP16, {"softcap": 20.0, "return_lse": True}),
]
# Blocks of one to five steps: what the compiler knows of a loop's length changes the program.
STEPS = [
    ((1, t, t, heads, 1, d), BF16, {"causal": causal})
    for t in (40, 64, 128, 192, 256, 320)
    for heads, d in ((2, 64), (3, 64), (1, 64), (2, 128), (3, 128))
    for causal in (True, False)
]


@pytest.mark.parametrize(("shape", "dtype", "options"), SMALL + (LARGE + STEPS) * ON_GPU)
def test_attention_matches_float64(shape, dtype, options):
    options = dict(options)
    if "segments" in options:
        options["segment_ids"] = packed(*options.pop("segments"), length=shape[2])
    arrays = inputs(*shape, dtype, scale=options.pop("logits", 1.0))
    check_op(attention, attention_reference, *arrays, kernels=KERNELS, **options)


# Each t is in this test alone: jit keeps what it compiled with other tiles.
@pytest.mark.parametrize("t", [210, *([60, 100, 290, 390, 580, 1010] * ON_GPU)])
def test_the_tiles_of_long_calls(t, monkeypatch):
    monkeypatch.setattr(forward, "LONG", 0)
    arrays = inputs(1, t, t, 2, 1, 128, BF16)
    check_op(attention, attention_reference, *arrays, kernels=KERNELS, return_lse=True)


@pytest.mark.parametrize("d", [64, slow_interpreted(128)])
def test_the_largest_logit_leaps(d):
    """From tile to tile logits grow in some rows by more than 2^8, in others by less, or shrink."""
    q, k, v = inputs(1, 64, 640, 1, 1, d, BF16)
    q *= jnp.asarray([[0.2], [1], [3], [-1]] * 16, BF16)[:, None]
    k *= (3 * (5 - jnp.arange(640) // 128)).astype(BF16)[:, None, None]  # the last tile is first
    options = dict(causal=False, return_lse=True)
    check_op(attention, attention_reference, q, k, v, kernels=KERNELS, **options)


LARGE_LOGITS = [  # of q and k; all of them negative: once less than the maximum of no logit
    (FP16, 64, 2e4, 2e4),
    slow_interpreted(FP16, 80, 3e3, 3e3),
    slow_interpreted(BF16, 128, 1e5, 1e5),
    (BF16, 64, 1e15, -1e16),
]


@pytest.mark.parametrize("general", [False, slow(True)])
@pytest.mark.parametrize(("dtype", "d", "of_q", "of_k"), LARGE_LOGITS)
def test_large_logits(dtype, d, of_q, of_k, general, request):
    """Beyond 2^24, where a multiply-add of logits less their maximum is off by whole numbers."""
    if general:
        request.getfixturevalue("general_kernels")
    q, k, v = inputs(1, 300, 300, 2, 1, d, dtype)
    q, k = (q * of_q, k * of_k) if of_k > 0 else (jnp.abs(q) * of_q, jnp.abs(k) * of_k)
    with kernels_run_here():
        out, lse = attention(q, k, v, return_lse=True, implementation="mosaic")
    expected, expected_lse = attention_reference(q, k, v, return_lse=True)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("t", [1500, 4096])  # items that the host plans, and that it does not
@pytest.mark.parametrize("d", [slow(128), 256])
def test_segments_leave_room_in_shared_memory(t, d):
    q = jax.ShapeDtypeStruct((2, t, 36, d), BF16)
    k = jax.ShapeDtypeStruct((2, t, 12, d), BF16)

    def both(q, k, ids):
        run = functools.partial(attention, segment_ids=ids, implementation="mosaic")
        return jax.vjp(lambda q, k: run(q, k, k), q, k)[1](q)

    traced = jax.jit(both).trace(q, k, jax.ShapeDtypeStruct((2, t), jnp.int32))
    traced.lower(lowering_platforms=("cuda",))  # refuses more shared memory than there is


@pytest.mark.slow
def test_queries_that_see_no_key():
    """Covers unsorted ids, keys whose id no query has, and queries whose id no key has."""
    rng = np.random.default_rng(0)
    q_ids, k_ids = rng.integers(0, 3, (1, 60)), rng.integers(1, 4, (1, 150))
    options = {"causal": False, "segment_ids": (jnp.asarray(q_ids), jnp.asarray(k_ids))}

    def with_finite_lse(f):
        def run(*arrays, **more):
            out, lse = f(*arrays, return_lse=True, **more)
            # This is NaN for lse = -inf, which must not spread.
            return out, jnp.isfinite(lse), jnp.where(jnp.isfinite(lse), lse * lse, 0)

        return run

    op, reference = map(with_finite_lse, (attention, attention_reference))
    arrays = inputs(1, 60, 150, 1, 1, 64)
    seen = reference(*arrays, **options)[1]
    np.testing.assert_array_equal(seen[0, 0], q_ids[0] != 0)
    check_op(op, reference, *arrays, kernels=KERNELS, **options)


# ---- the reference, against an independent implementation ------------------------------------


def independent(q, k, v, *, causal=True, scale=None, window=None, segments=None, softcap=None):
    """Loops over rows in float64 numpy: (out, lse)."""
    (b, t, h, d), (s, kv) = q.shape, k.shape[1:3]
    out, lse = np.zeros((b, t, h, d)), np.full((b, h, t), -np.inf)
    for n, i, head in np.ndindex(b, t, h):
        place, group = i + s - t, head * kv // h
        keys = [
            j
            for j in range(s)
            if (not causal or j <= place)
            and (window is None or place - j < window)
            and (segments is None or segments[0][n, i] == segments[1][n, j])
        ]
        if keys:
            x = k[n, keys, group] @ q[n, i, head] * (d**-0.5 if scale is None else scale)
            x = x if softcap is None else softcap * np.tanh(x / softcap)
            lse[n, head, i] = np.log(np.exp(x).sum())
            out[n, i, head] = np.exp(x - lse[n, head, i]) @ v[n, keys, group]
    return out, lse


@pytest.mark.parametrize(
    ("h", "kv", "options"),
    [
        (6, 3, {}),
        (6, 2, {"causal": False, "scale": 0.5}),
        (6, 1, {"window": 3}),
        (6, 6, {"softcap": 2.0}),
        (6, 3, {"segments": True}),
    ],
)
def test_reference_is_the_formula_and_its_gradient(h, kv, options):
    t, s = 4, 7
    options = dict(options)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(x) for x in ((2, t, h, 4), (2, s, kv, 4), (2, s, kv, 4))]
    pair = None
    if options.pop("segments", False):
        pair = (rng.integers(0, 3, (2, t)), rng.integers(0, 2, (2, s)))  # 2: sees no key
    out, lse = independent(*arrays, segments=pair, **options)
    assert (pair is None) == bool(np.isfinite(lse).all())
    weights = [rng.standard_normal(x.shape) for x in (out, lse)]

    def loss(arrays, f):
        o, l = f(*arrays)
        return sum(
            (np.where(np.isfinite(x), x, 0) * w).sum() for x, w in zip((o, l), weights, strict=True)
        )

    with jax.enable_x64(True):
        f = functools.partial(attention_reference, segment_ids=pair, return_lse=True, **options)

        @jax.jit
        def run(arrays, weights):
            actual, pull = jax.vjp(f, *arrays)
            return actual, pull(weights)

        actual, grads = run([*map(jnp.asarray, arrays)], tuple(map(jnp.asarray, weights)))
        np.testing.assert_allclose(actual[0], out, atol=1e-13)
        np.testing.assert_allclose(actual[1], lse, atol=1e-13)
    grads = [np.asarray(g) for g in grads]
    assert all(np.isfinite(g).all() for g in grads)
    exact = functools.partial(independent, segments=pair, **options)
    for n, g in enumerate(grads):  # along one random direction of each array
        direction = rng.standard_normal(arrays[n].shape) * 1e-5
        moved = [
            loss([*arrays[:n], arrays[n] + sign * direction, *arrays[n + 1 :]], exact)
            for sign in (1, -1)
        ]
        np.testing.assert_allclose((g * direction).sum(), (moved[0] - moved[1]) / 2, rtol=1e-6)


def test_one_array_of_segments_serves_queries_and_keys():
    q, k, v = inputs(2, 5, 9, 2, 1, 8, jnp.float32)
    ids = jnp.array([[0, 0, 0, 0, 0, 1, 1, 2, 2], [0] * 9])
    one = attention(q, k, v, segment_ids=ids, implementation="xla")
    two = attention(q, k, v, segment_ids=(ids[:, 4:], ids), implementation="xla")
    np.testing.assert_array_equal(one, two)
