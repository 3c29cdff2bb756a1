"""The vLSTM with its output gate on one array must be the two ops on two, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from cases import slow, slow_interpreted
from kernel_checks import ON_GPU, check_op, names_in, normal
from vlstm_twins import assert_same_bits, with_gradients

from pallas_kernels import Packed, dispatch, layer_norm, vlstm

NORM = tuple(f"gated_layer_norm_{x}" for x in ("forward", "backward"))
CELL = ("vlstm_states", "vlstm_forward", "vlstm_backward_dq")
KERNELS = (*CELL, "vlstm_backward_dk", "vlstm_backward_dv", *NORM)
FOUR = {"segment_ids": jnp.asarray(vlstm_twins.FOUR)}


pytestmark = pytest.mark.usefixtures("one_block")


def inputs(b, t, heads, dqk, dv, dtype=jnp.bfloat16):
    *parts, i, f = vlstm_twins.inputs(b, t, heads, dqk, dv, dtype)
    parts.append(normal(5, (b, t, heads, dv), dtype, scale=2.0))
    qkvo = jnp.concatenate([x.reshape(b, t, -1) for x in parts], 2)
    return qkvo, i, f, normal(6, (heads, dv), offset=1.0)


def gated(qkvo, i, f, weight, dqk, **options):
    heads, dv = weight.shape
    packed = Packed(qkvo, ((heads, dqk), (heads, dqk), (heads, dv), (heads, dv)))
    return vlstm(packed, None, None, i, f, norm_weight=weight, **options)


def reference(qkvo, i, f, weight, *, dqk, **options):
    """Uses chunks of the kernels' size, so that it rounds as many states as they do."""
    heads, dv = weight.shape
    ends = np.cumsum([heads * dqk, heads * dqk, heads * dv])
    parts = jnp.split(qkvo, ends, axis=2)
    q, k, v, o = (x.reshape(*x.shape[:2], heads, -1) for x in parts)
    h = vlstm(q, k, v, i, f, chunk_size=64, implementation="xla", **options)
    h = jax.lax.optimization_barrier(h)  # XLA for GPUs would not round it before the norm
    return layer_norm(h, weight, gate=o, eps=1e-6, implementation="xla")


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 80, 2, 64, 128), jnp.bfloat16, FOUR),
        slow((1, 72, 2, 64, 64), jnp.float16, {"gate": "sigmoid"}),
        slow((1, 136, 1, 128, 256), jnp.bfloat16, {}),
    ],
)
def test_vlstm_matches_float64(shape, dtype, options):
    kernels = KERNELS if shape[3] == 64 else (*CELL, *NORM)
    check_op(gated, reference, *inputs(*shape, dtype), dqk=shape[3], kernels=kernels, **options)


def on_two(qkvo, i, f, weight, dqk, norm_eps=1e-6, **options):
    """The same with the kernels of vlstm on q, k and v and of layer_norm with a gate."""
    (heads, dv), columns = weight.shape, qkvo.shape[2] - weight.size
    qkv = Packed(qkvo[..., :columns], ((heads, dqk), (heads, dqk), (heads, dv)))
    h = vlstm(qkv, None, None, i, f, **options)
    o, implementation = qkvo[..., columns:].reshape(h.shape), options["implementation"]
    return layer_norm(h, weight, gate=o, eps=norm_eps, implementation=implementation)


SMALL = [  # (B, T, NH, DQK, DV), options
    ((2, 80, 2, 64, 128), FOUR),
    slow((1, 136, 2, 128, 128), {}),
    ((1, 77, 2, 64, 64), {}),  # the general form of the norm pads the rows
    slow((1, 72, 3, 64, 192), {}),  # the norm's forward pass takes TMA
]
LARGE = [
    ((2, 80, 2, 128, 256), FOUR),
    ((2, 1000, 3, 64, 64), {"gate": "sigmoid", "normalize": False}),
    ((4, 1024, 6, 64, 128), {"norm_eps": 1e-3}),
    ((1, 8192, 2, 128, 256), {}),  # in spans
    ((1, 1024, 2, 256, 512), {"segment_ids": jnp.arange(1024)[None] // 300}),
]


@pytest.mark.parametrize(
    ("shape", "options"), [slow_interpreted(*SMALL[0]), *SMALL[1:], *LARGE * ON_GPU]
)
def test_it_is_the_vlstm_and_then_the_norm(shape, options, op_by_op):
    b, t, heads, dqk, dv = shape
    options = dict(dqk=dqk, implementation="mosaic") | options
    arrays, dy = inputs(*shape), normal(7, (b, t, heads, dv), jnp.bfloat16)
    assert_same_bits(gated, on_two, arrays, dy, **options)


@pytest.mark.parametrize("heads", [2, slow(3)])
def test_it_splits_what_the_kernels_do_not_take(heads):
    """Also where the gate would not begin at a multiple of its width."""
    dqk, dv = (64, 256) if heads == 3 else (16, 32)
    options = {"norm_eps": 1e-3, "chunk_size": 8, "segment_ids": jnp.arange(20)[None] // 9}
    arrays, dy = inputs(1, 20, heads, dqk, dv), normal(7, (1, 20, heads, dv), jnp.bfloat16)
    options |= dict(dqk=dqk, implementation=None)  # on a GPU both have kernels, with padding
    actual, expected = (
        jax.jit(with_gradients(op, **options))(arrays, dy) for op in (gated, on_two)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def traced(arrays, wrap=lambda op: op, **options):
    op = wrap(functools.partial(gated, dqk=64, **options))
    loss = lambda *a: op(*a).astype(jnp.float32).sum()
    return jax.jit(jax.grad(loss, (0, 3))).trace(*arrays)


def traced_names(arrays, **options):
    """Names of what runs, before it is lowered: the tests above lower it."""
    return names_in(str(traced(arrays, **options).jaxpr))


@pytest.mark.parametrize("lacks", [None, "no GPU"])
def test_what_is_decided_is_what_runs(monkeypatch, lacks):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: lacks)
    dispatch.reset()
    names = traced_names(jax.eval_shape(lambda: inputs(1, 16, 1, 64, 64)))
    runs = dict.fromkeys(("vlstm", "layer_norm"), "xla")
    if not lacks:
        runs = dict.fromkeys(("vlstm", "layer_norm"), "general")
    assert [d[:2] for d in dispatch.decisions()] == list(runs.items())
    assert names & set(KERNELS) == (set() if lacks else set(KERNELS))
    dispatch.reset()


def test_a_gate_that_begins_elsewhere_has_the_kernels_of_both_ops():
    arrays = jax.eval_shape(lambda: inputs(1, 16, 1, 64, 192))
    assert set(KERNELS) <= traced_names(arrays, implementation="mosaic")
    narrow = jax.eval_shape(lambda: inputs(1, 16, 1, 64, 16))  # the norm has no kernel for it
    assert traced_names(narrow, implementation="mosaic") & set(KERNELS) == set(KERNELS[:5])


@pytest.mark.parametrize(
    ("message", "shape", "weight", "options"),
    [
        ("packed has 514 columns, not 2 x 64", (1, 8, 514), (2, 64), {}),
        ("do not match", (1, 16, 512), (2, 64), {"implementation": "mosaic"}),
        (r"segment_ids have shape \(8,\)", (1, 8, 512), (2, 64), {"segment_ids": np.zeros(8, int)}),
        ("gate='tanh' is not one of", (1, 8, 512), (2, 64), {"gate": "tanh"}),
        ("chunk_size=0 is not at least 1", (1, 8, 512), (2, 64), {"chunk_size": 0}),
    ],
)
def test_errors(message, shape, weight, options):
    gates = [jnp.zeros((1, 8, 2))] * 2
    with pytest.raises(ValueError, match=message):
        gated(jnp.zeros(shape), *gates, jnp.ones(weight), 64, **options)


@pytest.mark.parametrize(
    ("message", "parts", "weight"),
    [
        (r"norm_weight has shape \(2, 32\), not \(NH, DV\) = \(2, 64\)", [64] * 4, (2, 32)),
        (r"o has shape \(1, 8, 2, 32\) but v \(1, 8, 2, 64\)", [64] * 3 + [32], (2, 64)),
        ("norm_weight needs a Packed of q, k, v and o", None, (2, 64)),
    ],
)
def test_a_norm_or_gate_that_does_not_fit_is_an_error(message, parts, weight):
    q, k, v = jnp.zeros((1, 8, 2, 64)), jnp.zeros((1, 8, 2, 64)), jnp.zeros((1, 8, 2, 64))
    if parts:
        q, k, v = (
            Packed(jnp.zeros((1, 8, 2 * sum(parts))), tuple((2, d) for d in parts)),
            None,
            None,
        )
    with pytest.raises(ValueError, match=message):
        vlstm(q, k, v, *[jnp.zeros((1, 8, 2))] * 2, norm_weight=jnp.ones(weight))


@pytest.mark.parametrize(
    ("message", "dtype", "options"),
    [
        ("q is float32, not bfloat16 or float16", jnp.float32, {}),
        ("eps=0.0 is not positive", jnp.bfloat16, {"norm_eps": 0.0}),
    ],
)
def test_what_the_kernels_do_not_support_is_an_error(message, dtype, options):
    arrays = inputs(1, 8, 1, 64, 64, dtype)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            functools.partial(gated, dqk=64, implementation="mosaic", **options), *arrays
        )


@pytest.mark.slow  # test_attention_packed.py has another
def test_checkpoint_runs_the_kernels_that_write_in_place_again():
    arrays = inputs(1, 64, 1, 64, 64)
    again = traced(arrays, jax.checkpoint, implementation="mosaic")
    assert set(KERNELS) <= names_in(again.lower(lowering_platforms=("cuda",)).as_text())
