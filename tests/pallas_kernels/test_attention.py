import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import ON_GPU, assert_error_ratio, check_op, normal

from pallas_kernels import dispatch, mosaic
from pallas_kernels.flash_attention import masks, schedule
from pallas_kernels.flash_attention import op as attention_module
from pallas_kernels.flash_attention.masks import Visits
from pallas_kernels.flash_attention.op import attention, attention_reference, why_not

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
BF16, FP16 = jnp.bfloat16, jnp.float16


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    """Gives each block several work items, as in a full grid."""
    monkeypatch.setattr(mosaic, "sm_count", lambda: 16 if ON_GPU else 2)


def inputs(b, t, s, h, k, d, dtype=BF16, scale=1.0):
    return (
        normal(0, (b, t, h, d), dtype, scale),
        normal(1, (b, s, k, d), dtype, scale),
        normal(2, (b, s, k, d), dtype),
    )


def packed(*cuts, length):
    """Ids of documents that end at `cuts`, one row for each batch entry."""
    at = np.arange(length)
    return jnp.asarray(np.stack([np.searchsorted(c, at, side="right") for c in cuts]), jnp.int32)


# A CPU spends ten seconds on each case, most of them on XLA's compilation of the interpreted
# kernels, so each covers several features; the larger cases have them one by one.
SMALL = [  # (B, T, S, H, K, D), dtype, options
    ((1, 64, 64, 2, 1, 64), BF16, {"logits": 30.0}),  # large ones, in whole tiles
    slow((1, 17, 150, 2, 2, 128), FP16, {"causal": False}),
    slow((1, 1, 1, 1, 1, 64), BF16, {"return_lse": True}),
    slow((1, 70, 137, 1, 1, 128), BF16, {"return_lse": True, "scale": 0.3}),
    slow((2, 130, 130, 3, 1, 64), BF16, {}),
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


# ---- visited tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 40, 64, 100])
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(("t", "s", "size"), [(300, 300, 64), (130, 391, 128), (257, 300, 32)])
def test_visited_tiles_are_those_with_something_to_see(t, s, size, by_keys, window):
    q, k = np.arange(t)[:, None] + (s - t), np.arange(s)
    seen = (q >= k) & (window is None or q - k < window)
    seen = seen.T if by_keys else seen
    visits = Visits((t, s), True, window, size, by_keys)
    tiles = np.pad(seen, ((0, 0), (0, -seen.shape[1] % size))).reshape(len(seen), -1, size)
    real = np.pad(np.ones_like(seen[0]), (0, -seen.shape[1] % size)).reshape(-1, size)
    assert visits.tiles == tiles.shape[1]
    for first in range(0, len(seen), 64):
        block = tiles[first : first + 64]
        low, high = visits.seen(first, first + 64, 0, visits.tiles)
        some = np.nonzero(block.any((0, 2)))[0]
        if not some.size:  # no query sees these keys: one tile is visited, fully masked
            assert high == low + 1
            continue
        # Rows past the end count like the others, so one tile too many may be visited at the end.
        assert low <= some[0] <= some[-1] < high
        if first + 64 <= len(seen):
            assert (low, high) == (some[0], some[-1] + 1)
        low, high = visits.whole(first, first + 64, int(low), int(high))
        whole = [i for i in range(visits.tiles) if (block[:, i] | ~real[i]).all() and real[i].all()]
        if first + 64 <= len(seen):
            assert [i for i in range(low, high) if real[i].all()] == whole


def test_tiles_of_other_segments_are_left_out():
    rows, columns = packed([128, 256], length=300), packed([128, 256], length=384)
    visits = Visits((300, 384), False, None, 128)
    segment_spans = jax.jit(masks.segment_spans, static_argnums=(2, 3))
    spans = segment_spans(rows, columns, visits, 64)
    np.testing.assert_array_equal(
        spans, [[[0, 1, 0, 1], [0, 1, 0, 1], [1, 2, 1, 2], [1, 2, 1, 2], [2, 3, 2, 3]]]
    )
    spans = segment_spans(rows, packed([120, 290], length=384), visits, 64)  # edges inside tiles
    np.testing.assert_array_equal(spans[0, :, :2], [[0, 1], [0, 1], [0, 3], [0, 3], [2, 3]])
    np.testing.assert_array_equal(spans[0, :, 2] < spans[0, :, 3], [0, 0, 1, 1, 0])
    spans = segment_spans(rows + 5, columns, visits, 64)  # without a common id: one tile
    np.testing.assert_array_equal(spans[0, :, 1] - spans[0, :, 0], 1)
    shuffled = jnp.asarray([[0] * 128 + [1] * 128 + [0] * 128])  # another segment in between
    spans = segment_spans(rows[:, :64], shuffled, Visits((64, 384), False, None, 128), 64)
    np.testing.assert_array_equal(spans[0, 0, :2], [0, 3])
    assert spans[0, 0, 2] >= spans[0, 0, 3]


# ---- schedule --------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [1, 22, 64, 384])
def test_every_item_is_planned_once_and_blocks_are_done_together(section):
    costs, pairs, blocks = (1152, 1024, 768, 640, 384, 256), 384, 132  # B32 T1024 12/12 D64
    table = schedule.plan(costs, pairs, section, blocks)
    count, items = table[:, 0], table[:, 1:]
    there = np.arange(items.shape[1]) < count[:, None]
    np.testing.assert_array_equal(np.sort(items[there]), np.arange(len(costs) * pairs))
    assert (items[~there] == -1).all()
    assert (count + 3 <= table.shape[1]).all()  # the kernels read two items ahead
    load = np.where(there, np.array(costs)[items // pairs], 0).sum(1)
    assert load.max() - load.min() <= costs[0]
    section_of = np.where(there, items % pairs // section, pairs)
    assert (np.diff(section_of) >= 0).all()  # sections in order


@pytest.mark.parametrize(("pairs", "section"), [(128, 16), (24, 12), (13, 13), (58, 2)])
def test_sections_are_equal_and_each_block_is_worked_on_once(pairs, section):
    q = jax.ShapeDtypeStruct((1, 2048, pairs, 96), BF16)  # 0.75 MiB of K and V for each head
    call = schedule.Call((2048, 2048), True, 1.0, 132, None, None)
    tiles = schedule.Tiles(2, 128, 3, False, 16)
    s = schedule.schedule_of(q, q, tiles, call, None, block=128, packed=False)
    row, (_, head) = jax.vmap(s.where)(jnp.arange(s.grid))
    assert len(set(zip(row.tolist(), head.tolist(), strict=True))) == s.grid == 16 * pairs
    np.testing.assert_array_equal(row[: 2 * section], np.repeat([15 * 128, 14 * 128], section))
    np.testing.assert_array_equal(head[:: 16 * section], np.arange(0, pairs, section))


def test_cost_of_a_block_is_what_it_visits():
    visits = Visits((300, 300), True, None, 64)
    rows = np.array([192, 64, -64])
    assert schedule.block_costs(visits, rows, 128) == (5 * 64 + 128, 3 * 64 + 128, 64 + 128)
    full = Visits((300, 300), False, None, 64)
    assert schedule.block_costs(full, rows, 128) == (5 * 64 + 128,) * 3


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


# ---- unsupported calls and errors ------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "reason"),
    [
        ((1, 8, 8, 2, 1, 260), BF16, {}, "D=260 is more than 256"),
        ((1, 8, 8, 2, 1, 64), jnp.float32, {}, "q is float32, not bfloat16 or float16"),
        ((1, 8, 8, 2, 1, 64), BF16, {"scale": -1.0}, "scale=-1.0 is not positive"),
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
    monkeypatch.setattr(attention_module, "_cudnn", lambda q, *_, **options: calls.append(1) or q)
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
