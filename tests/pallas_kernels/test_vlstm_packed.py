"""The vLSTM on one array of q, k and v must be that on three, bit for bit, with all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vlstm_twins
from cases import slow, slow_interpreted
from kernel_checks import ON_GPU, names_in, normal
from vlstm_twins import assert_same_bits, with_gradients

from pallas_kernels import Packed, dispatch, vlstm
from pallas_kernels.packed import split

KERNELS = tuple(
    f"vlstm_{x}" for x in ("states", "forward", "backward_dq", "backward_dk", "backward_dv")
)
FOUR = {"segment_ids": jnp.asarray(vlstm_twins.FOUR)}


def packed(qkv, heads, dqk):
    dv = qkv.shape[2] // heads - 2 * dqk
    return Packed(qkv, ((heads, dqk), (heads, dqk), (heads, dv)))


def on_one(qkv, i, f, dqk, **options):
    return vlstm(packed(qkv, i.shape[2], dqk), None, None, i, f, **options)


def on_parts(qkv, i, f, dqk, **options):
    return vlstm(*split(packed(qkv, i.shape[2], dqk)), i, f, **options)


def inputs(b, t, heads, dqk, dv, dtype=jnp.bfloat16):
    *parts, i, f = vlstm_twins.inputs(b, t, heads, dqk, dv, dtype)
    return jnp.concatenate([x.reshape(b, t, -1) for x in parts], 2), i, f


SMALL = [  # (B, T, NH, DQK, DV), options
    ((2, 80, 2, 64, 128), FOUR),
    slow((1, 136, 2, 128, 128), {}),
]
LARGE = [
    ((2, 80, 2, 128, 256), FOUR),
    ((2, 1000, 3, 64, 64), {"gate": "sigmoid", "normalize": False}),
    ((4, 1024, 6, 64, 128), {}),
    ((1, 8192, 2, 128, 256), {}),  # in spans
    ((1, 1024, 2, 256, 512), {"segment_ids": jnp.arange(1024)[None] // 300}),
]


@pytest.mark.parametrize(
    ("shape", "options"), [slow_interpreted(*SMALL[0]), *SMALL[1:], *LARGE * ON_GPU]
)
def test_it_is_vlstm_of_its_parts(shape, options, op_by_op):
    (b, t, heads, dqk, dv), options = shape, options | {"implementation": "mosaic"}
    arrays, dh = inputs(*shape), normal(7, (b, t, heads, dv), jnp.bfloat16)
    assert_same_bits(on_one, on_parts, arrays, dh, dqk=dqk, **options)


def test_it_splits_what_the_kernels_do_not_take():
    options = {"eps": 1e-6, "chunk_size": 8, "segment_ids": jnp.arange(20)[None] // 9}
    arrays, dh = inputs(1, 20, 3, 16, 32), normal(7, (1, 20, 3, 32), jnp.bfloat16)
    actual, expected = (
        jax.jit(with_gradients(op, dqk=16, **options))(arrays, dh) for op in (on_one, on_parts)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("lacks", [None, "no GPU"])
def test_what_is_decided_is_what_runs(monkeypatch, lacks):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: lacks)
    dispatch.reset()
    arrays = jax.eval_shape(lambda: inputs(1, 16, 1, 64, 64))
    names = names_in(str(jax.make_jaxpr(lambda *a: on_one(*a, dqk=64))(*arrays)))
    assert [d[:2] for d in dispatch.decisions()] == [("vlstm", "xla" if lacks else "general")]
    assert ("vlstm_forward" in names) == (not lacks)
    dispatch.reset()


@pytest.mark.parametrize(
    ("message", "shape", "options"),
    [
        ("packed has parts .*: heads and width must be at least 1", (1, 8, 250), {}),
        ("packed has 385 columns, not 2 x 64", (1, 8, 385), {}),
        (r"packed has an array \(1, 8, 384, 1\), but needs \(B, T, P\)", (1, 8, 384, 1), {}),
        ("do not match", (1, 9, 384), {}),
        ("do not match", (1, 16, 384), {"implementation": "mosaic"}),
        (r"segment_ids have shape \(8,\)", (1, 8, 384), {"segment_ids": jnp.zeros(8, int)}),
        (r"segment_ids have shape \(\), not", (1, 8, 384), {"segment_ids": np.uint64(5)}),
        ("gate='tanh' is not one of", (1, 8, 384), {"gate": "tanh"}),
        ("chunk_size=0 is not at least 1", (1, 8, 384), {"chunk_size": 0}),
    ],
)
def test_errors(message, shape, options):
    with pytest.raises(ValueError, match=message):
        on_one(jnp.zeros(shape), *[jnp.zeros((1, 8, 2))] * 2, dqk=64, **options)


def test_what_is_packed_is_said_once():
    gates, q = [jnp.zeros((1, 8, 1))] * 2, jnp.zeros((1, 8, 1, 64))
    with pytest.raises(ValueError, match="q is packed with k and v: pass k=None and v=None"):
        vlstm(packed(jnp.zeros((1, 8, 192)), 1, 64), q, q, *gates)
    with pytest.raises(ValueError, match="q is not packed: pass k and v, too"):
        vlstm(q, None, None, *gates)
    with pytest.raises(ValueError, match="packed has 3 parts, not q, k, v, o"):
        on_one(jnp.zeros((1, 8, 192)), *gates, 64, norm_weight=jnp.ones((1, 64)))


def test_states_go_in_and_out():
    shape = (1, 20, 2, 16, 32)
    state = tuple(vlstm_twins.inputs(*shape, state=True)[5:])
    options = dict(dqk=16, initial_state=state, return_state=True)
    actual, expected = (op(*inputs(*shape), **options) for op in (on_one, on_parts))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_what_the_kernels_do_not_support_is_an_error():
    with pytest.raises(NotImplementedError, match="q is float32, not bfloat16 or float16"):
        on_one(jnp.zeros((1, 8, 192)), *[jnp.zeros((1, 8, 1))] * 2, 64, implementation="mosaic")


@pytest.mark.slow  # test_attention_packed.py has another
def test_checkpoint_runs_the_kernels_that_write_in_place_again():
    arrays = inputs(1, 64, 1, 64, 64)
    op = jax.checkpoint(lambda *a: on_one(*a, dqk=64, implementation="mosaic").sum())
    text = jax.jit(jax.grad(op)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert set(KERNELS) <= names_in(text)
