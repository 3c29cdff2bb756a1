"""The vLSTM on tensor cores, held against the XLA form in the same dtype.  The jnp twins of its two
kernels hold what is around them: in float64 the cell built on them must be the recurrent form with
all its gradients to 1e-9."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from cases import slow
from kernel_checks import ON_GPU, assert_lowers, check_op, kernels_run_here, normal
from vlstm_twins import FOUR, flat, inputs

from pallas_kernels import dispatch, explain, mosaic, vlstm
from pallas_kernels.mlstm import chunkwise, intra, states

KERNELS = (
    "vlstm_states", "vlstm_forward", *(f"vlstm_backward_{mode}" for mode in ("dq", "dk", "dv"))
)  # fmt: skip
BF16, FP16 = jnp.bfloat16, jnp.float16
SMALLEST = 99 * 1024  # shared memory of a block on an RTX 30, 40 or 50


@flat
def xla(q, k, v, i, f, **options):
    """Uses chunks of the kernels' size, so that it rounds as many states as they do."""
    return vlstm(q, k, v, i, f, chunk_size=64, implementation="xla", **options)


@pytest.mark.parametrize(
    "options",
    [
        slow({}),
        {"segment_ids": jnp.asarray(FOUR)},
        slow({"gate": "sigmoid", "normalize": False}),
    ],
)
def test_the_twin_in_float64_is_the_recurrent_form(options, monkeypatch):
    """Checks everything around the kernels, including gradients of the states in and out."""
    for name in ("states", "chunk_outputs"):
        monkeypatch.setattr(chunkwise, name, getattr(vlstm_twins, name))
    with jax.enable_x64(True):
        arrays = inputs(2, 80, 2, 64, 64, jnp.float64, mean=0.0, state=True)

        @functools.partial(jax.jit, static_argnums=0)
        def run(form, arrays):
            form = functools.partial(flat(form), return_state=True, **options)
            y, pull = jax.vjp(form, *arrays)
            return y, pull(jax.tree.map(lambda x: normal(20, x.shape, x.dtype), y))

        twins = lambda *a, **o: chunkwise.chunkwise.__wrapped__(a[:3], *a[3:], **o)
        actual = run(twins, arrays)
        expected = run(vlstm_twins.recurrent, arrays)
        for (path, a), e in zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
        ):
            error = np.abs(a - e).max() / np.abs(e).max()
            assert error < 1e-9, (jax.tree_util.keystr(path), error)


SMALL = [  # (B, T, H, DQK, DV), of the inputs, options
    ((1, 70, 1, 96, 48), {"state": True}, {"return_state": True}),  # padded to 128, 64
    slow((1, 70, 1, 96, 160), {"state": True}, {"return_state": True}),
    slow((1, 130, 1, 128, 128), {"dtype": FP16}, {"gate": "sigmoid", "normalize": False}),
    slow((2, 80, 2, 64, 64), {}, {"segment_ids": jnp.asarray(FOUR)}),
]
LARGE = [
    ((1, 72, 1, 128, 192), {"state": True}, {"return_state": True}),
    ((2, 1000, 3, 64, 64), {}, {}),
    ((2, 1023, 3, 64, 128), {"dtype": FP16}, {}),
    ((1, 1024, 2, 128, 256), {"state": True}, {"return_state": True}),
    ((1, 500, 2, 192, 320), {}, {}),
    ((1, 777, 2, 256, 512), {"state": True, "dtype": FP16}, {"return_state": True}),
    ((1, 1024, 2, 256, 512), {}, {}),
    ((1, 8192, 1, 128, 256), {"state": True}, {"return_state": True}),  # in spans
    ((2, 80, 2, 256, 256), {}, {"segment_ids": jnp.asarray(FOUR)}),
    ((1, 80, 1, 48, 80), {}, {"segment_ids": jnp.asarray(FOUR[:1])}),
]


@pytest.mark.parametrize(("shape", "of_inputs", "options"), SMALL + LARGE * ON_GPU)
def test_vlstm_matches_the_xla_form(shape, of_inputs, options):
    check_op(flat(vlstm), xla, *inputs(*shape, **of_inputs), kernels=KERNELS, **options)


@pytest.mark.parametrize("dtype", [slow(FP16)] + [BF16] * ON_GPU)
def test_extreme_gates_and_documents(dtype):
    """Covers gates past xLSTM's caps in two thirds of the places, and padded features."""
    q, k, v, i, f = inputs(1, 135, 1, 48, 80, dtype)
    some = np.arange(135)[None, :, None] % 3 > 0
    i, f = (np.where(some, most * np.sign(x), x) for most, x in ((15, i), (30, f)))
    ids = jnp.asarray(np.repeat([[4, 1, 2]], [70, 1, 64], axis=1))
    check_op(
        flat(vlstm), xla, q, k, v, jnp.asarray(i), jnp.asarray(f), segment_ids=ids, kernels=KERNELS
    )


def test_spans_fill_idle_sms_only():
    spans = functools.partial(states.spans, at_once=132)
    assert spans(8, 512) == 16  # 4 heads of 128 x 256, 65,536 positions: 128 blocks
    assert spans(45, 512) == 1  # a second walk costs what two spans save
    assert spans(8, 23) == 1  # for so few chunks one walk is faster
    assert spans(4, 1024) == 32  # of 32 chunks each


@pytest.mark.parametrize(("reverse", "sms"), [(True, 2), slow(False, 2), slow(False, 1)])
def test_states_of_several_tiles(reverse, sms, monkeypatch):
    """Two SMs walk five chunks in spans of 2, 2 and 1; one decay resets the state."""
    monkeypatch.setattr(states, "MIN_SPAN", 1)
    x, y = normal(0, (1, 295, 1, 64), BF16), normal(1, (1, 295, 1, 64), BF16)
    if sms == 1:
        y = normal(1, (1, 295, 1, 128), BF16)
    dy = y.shape[-1]
    weight, vector = (jnp.abs(normal(n, (1, 1, 5, 64))) for n in (3, 4))
    decay = jnp.array([0.9, 0.5, 0.0, 1.0, 0.8])[None, None]
    first = normal(5, (1, 1, 64, dy)), normal(6, (1, 1, 64))
    other = normal(7, (1, 1, 5, 64, dy), BF16)
    x, y = (vlstm_twins.together(z) for z in (x, y))
    arguments = (x, y, weight, vector, decay, first, other)
    monkeypatch.setattr(mosaic, "sm_count", lambda: sms)
    walk = functools.partial(states.states, reverse=reverse)
    assert_lowers(walk, arguments, ("vlstm_states",))
    with kernels_run_here():
        *actual, dots = jax.block_until_ready(jax.jit(walk)(*arguments))
    *expected, sums = vlstm_twins.states(*arguments, reverse=reverse)
    leaves = zip(
        *map(jax.tree.leaves, ((actual, dots.sum(-2)), (expected, sums.sum(-2)))), strict=True
    )
    for name, (a, e) in zip(("S", "s", "last S", "last s", "dots"), leaves, strict=True):
        error = jnp.abs(a.astype(jnp.float32) - e.astype(jnp.float32)).max()
        tolerance = 2**-7 if name == "S" else 1e-5  # S may be rounded in the other direction
        assert error <= tolerance * jnp.abs(e).max(), (name, error)


def test_auto_takes_the_kernels_and_says_why_not():
    arrays = inputs(1, 8, 1, 64, 64)
    dispatch.reset()
    jax.eval_shape(functools.partial(vlstm, implementation="mosaic"), *arrays)
    assert [d[:2] for d in dispatch.decisions()] == [("vlstm", "general")]
    for message, changed, options in (
        ("eps=0.1 is not 0", arrays, {"eps": 0.1}),
        ("q is float32, not bfloat16", inputs(1, 8, 1, 64, 64, jnp.float32), {}),
        ("DQK=100 is not a multiple of 16 up to 256", inputs(1, 8, 1, 100, 64), {}),
        ("DV=528 is not a multiple of 16 up to 512", inputs(1, 8, 1, 64, 528), {}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            vlstm(*changed, implementation="mosaic", **options)


def test_explain_lists_its_kernels():
    plan = explain.explain("vlstm", *inputs(1, 130, 2, 64, 128))
    assert (plan.decision.runs, plan.decision.why) == ("general", "supported")
    forward, both = plan.parts
    assert {k.name for k in forward.kernels} == set(KERNELS[:2])
    assert {k.name for k in both.kernels} == set(KERNELS)
    assert all(k.warpgroups == 1 for k in both.kernels)


# ---- what the kernels take for granted -------------------------------------------------------


@pytest.mark.parametrize("mode", intra.STATS)
def test_the_largest_call_fits_the_smallest_gpus(mode):
    da, dx = (256, 512) if mode in ("forward", "dv") else (512, 256)
    s = intra.ChunkPlan(mode, True, True, BF16, 64, 1, 1, da // 64, dx // 64)
    vector = jax.ShapeDtypeStruct((1, 1, 64), jnp.float32)
    vectors = dict.fromkeys(("row", "col", "scale", "start", "one"), vector)  # or sign, or shift
    vectors["along"] = jax.ShapeDtypeStruct((1, 1, 256), jnp.float32)
    assert _bytes(intra.scratch(s, vectors)) <= SMALLEST - 1024  # the system's share
    assert len(s.order) <= intra.ORDER
    assert all(x < 256 for square in s.order for x in square)  # the columns may be more


def test_two_walks_fit_an_a100():
    s = states.Walk(BF16, 64, 1, 1, 8, 8, 1, 1, 1, 1, True, False)
    assert _bytes(states.scratch(s, True)) <= 163 * 1024 // 2 - 1024


def _bytes(scratch):
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: hasattr(x, "dtype"))
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)
