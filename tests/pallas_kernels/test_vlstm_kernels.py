"""The vLSTM on tensor cores, held against the XLA form in the same dtype.  The jnp twins of its two
kernels hold what is around them: in float64 the cell built on them must be the recurrent form with
all its gradients to 1e-9."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from cases import slow, slow_interpreted
from kernel_checks import ON_GPU, assert_lowers, check_op, kernels_run_here, normal
from vlstm_twins import FOUR, flat, inputs

from pallas_kernels import dispatch, vlstm
from pallas_kernels.mlstm import chunkwise, intra_chunk, states

KERNELS = (
    "vlstm_states", "vlstm_forward", *(f"vlstm_backward_{mode}" for mode in ("dq", "dk", "dv"))
)  # fmt: skip
BF16, FP16 = jnp.bfloat16, jnp.float16
TWINS = chunkwise.HOPPER._replace(
    states=vlstm_twins.states, chunk_outputs=vlstm_twins.chunk_outputs
)


pytestmark = pytest.mark.usefixtures("one_team")


@flat
def xla(q, k, v, i, f, **options):
    """Uses chunks of the kernels' size, so that it rounds as many states as they do."""
    size = chunkwise.tile_size(q.shape[-1], v.shape[-1])
    return vlstm(q, k, v, i, f, chunk_size=size, implementation="xla", **options)


@pytest.mark.parametrize(
    "options",
    [
        slow({}),
        {"segment_ids": jnp.asarray(FOUR)},
        slow({"gate": "sigmoid", "normalize": False}),
    ],
)
def test_the_twin_in_float64_is_the_recurrent_form(options):
    """Checks everything around the kernels, including gradients of the states in and out."""
    with jax.enable_x64(True):
        arrays = inputs(2, 80, 2, 64, 64, jnp.float64, mean=0.0, state=True)

        @functools.partial(jax.jit, static_argnums=0)
        def run(form, arrays):
            form = functools.partial(flat(form), return_state=True, **options)
            y, pull = jax.vjp(form, *arrays)
            return y, pull(jax.tree.map(lambda x: normal(20, x.shape, x.dtype), y))

        twins = lambda *a, **o: chunkwise.chunkwise(a[:3], *a[3:], form=TWINS, **o)
        actual = run(twins, arrays)
        expected = run(vlstm_twins.recurrent, arrays)
        for (path, a), e in zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
        ):
            error = np.abs(a - e).max() / np.abs(e).max()
            assert error < 1e-9, (jax.tree_util.keystr(path), error)


SMALL = [  # (B, T, H, DQK, DV), of the inputs, options
    ((1, 70, 1, 96, 160), {"state": True}, {"return_state": True}),  # padded to 128, 192
    slow((1, 130, 1, 128, 128), {"dtype": FP16}, {"gate": "sigmoid", "normalize": False}),
]
LARGE = [
    ((1, 80, 1, 48, 80), {}, {"segment_ids": jnp.asarray(FOUR[:1])}),  # to 64, 128
    ((1, 72, 1, 128, 192), {"state": True}, {"return_state": True}),
    ((2, 1000, 3, 64, 64), {}, {}),
    ((1, 1024, 2, 128, 256), {"state": True}, {"return_state": True}),
    ((1, 500, 2, 192, 320), {}, {}),
    ((1, 777, 2, 256, 512), {"state": True, "dtype": FP16}, {"return_state": True}),
    ((1, 1024, 2, 256, 512), {}, {}),
    ((1, 8192, 1, 128, 256), {"state": True}, {"return_state": True}),  # in spans
    # df differs by 2.3e-6 of its largest value, the reference's by 2.3e-7 (docs/vlstm.md).
    ((2, 80, 2, 256, 256), {}, {"segment_ids": jnp.asarray(FOUR), "ratio": 12}),
]


@pytest.mark.parametrize(("shape", "of_inputs", "options"), SMALL + LARGE * ON_GPU)
def test_vlstm_matches_the_xla_form(shape, of_inputs, options):
    kernels = KERNELS
    check_op(flat(vlstm), xla, *inputs(*shape, **of_inputs), kernels=kernels, **options)


@pytest.mark.parametrize("dtype", [slow_interpreted(FP16)] + [BF16] * ON_GPU)
def test_extreme_gates_and_documents(dtype, monkeypatch):
    """Covers gates past xLSTM's caps in two thirds of the places; three chunks for two teams;
    features padded to 64 and 128."""
    if not ON_GPU:
        monkeypatch.setattr(intra_chunk, "TEAMS", 2)
    q, k, v, i, f = inputs(1, 135, 1, 48, 80, dtype)
    some = np.arange(135)[None, :, None] % 3 > 0
    i, f = (np.where(some, most * np.sign(x), x) for most, x in ((15, i), (30, f)))
    ids = jnp.asarray(np.repeat([[4, 1, 2]], [70, 1, 64], axis=1))
    gates, kernels = (jnp.asarray(i), jnp.asarray(f)), KERNELS
    check_op(flat(vlstm), xla, q, k, v, *gates, segment_ids=ids, kernels=kernels)


def test_spans_fill_idle_sms_only():
    spans = functools.partial(states.spans, at_once=132)
    assert spans(8, 512) == 16  # 4 heads of 128 x 256, 65,536 positions: 128 blocks
    assert spans(45, 512) == 1  # a second walk costs what two spans save
    assert spans(8, 23) == 1  # for so few chunks one walk is faster
    assert spans(4, 1024) == 32  # of 32 chunks each


@pytest.mark.parametrize("reverse", [slow(False), True])
def test_chunks_walked_in_spans(reverse, monkeypatch):
    """Five chunks form spans of 2, 2 and 1; one decay resets the state."""
    monkeypatch.setattr(states, "MIN_SPAN", 1)
    assert states.spans(1, 5, 4) == 3
    x, y = (normal(n, (1, 296, 1, 64), BF16) for n in (0, 1))
    weight, vector = (jnp.abs(normal(n, (1, 1, 5, 64))) for n in (3, 4))
    decay = jnp.array([0.9, 0.5, 0.0, 1.0, 0.8])[None, None]
    first = normal(5, (1, 1, 64, 64)), normal(6, (1, 1, 64))
    other = normal(7, (1, 1, 5, 64, 64), BF16)
    x, y = (vlstm_twins.together(z, 64) for z in (x, y))
    arguments = (x, y, weight, vector, decay, first, other)
    walk = functools.partial(chunkwise.HOPPER.states, reverse=reverse, sms=2)
    assert_lowers(walk, arguments, ("vlstm_states",))
    with kernels_run_here():
        actual = jax.block_until_ready(jax.jit(walk)(*arguments))
    expected = vlstm_twins.states(*arguments, reverse=reverse)
    leaves = zip(*(jax.tree.leaves(z) for z in (actual, expected)), strict=True)
    for name, (a, e) in zip(("S", "s", "last S", "last s", "dots"), leaves, strict=True):
        error = jnp.abs(a.astype(jnp.float32) - e.astype(jnp.float32)).max()
        tolerance = 2**-7 if name == "S" else 1e-5  # S may be rounded in the other direction
        assert error <= tolerance * jnp.abs(e).max(), (name, error)


def test_auto_takes_the_kernels_on_hopper_and_says_why_not():
    arrays = inputs(1, 8, 1, 64, 64)
    dispatch.reset()
    jax.eval_shape(functools.partial(vlstm, implementation="mosaic"), *arrays)
    assert [d[:2] for d in dispatch.decisions()] == [("vlstm", "hopper")]
    for message, changed, options in (
        ("eps=0.1 is not 0", arrays, {"eps": 0.1}),
        ("q is float32, not bfloat16", inputs(1, 8, 1, 64, 64, jnp.float32), {}),
        ("DQK=100 is not a multiple of 16 up to 256", inputs(1, 8, 1, 100, 64), {}),
        ("DV=528 is not a multiple of 16 up to 512", inputs(1, 8, 1, 64, 528), {}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            vlstm(*changed, implementation="mosaic", **options)
