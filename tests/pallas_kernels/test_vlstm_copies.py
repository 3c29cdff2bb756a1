"""No array is copied or padded before or after the kernels of a vLSTM on one array."""

import re

import jax
import jax.numpy as jnp
import pytest
import vlstm_twins
from cases import slow
from kernel_checks import names_in, normal
from vlstm_twins import COPIES, with_gradients

from pallas_kernels import Packed, vlstm

CELL = {"vlstm_states", "vlstm_forward", *(f"vlstm_backward_{x}" for x in ("dq", "dk", "dv"))}
NORM = {f"gated_layer_norm_{x}" for x in ("forward", "backward")}


def on_one(array, i, f, *weight):
    """Of q, k and v; with a weight also the output gate and the norm."""
    parts = ((2, 64), (2, 64), *[(2, 128)] * (1 + len(weight)))
    options = {"norm_weight": weight[0]} if weight else {}
    return vlstm(Packed(array, parts), None, None, i, f, implementation="mosaic", **options)


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize(
    ("normed", "t", "copied"),
    [
        slow(False, 72, False),
        slow(False, 77, False),
        (True, 72, False),  # the kernels of both
        slow(True, 76, False),
        slow(True, 77, True),  # the norm pads rows to multiples of 4
    ],
)
def test_nothing_is_copied_around_the_kernels(normed, t, copied):
    *parts, i, f = vlstm_twins.inputs(1, t, 2, 64, 128)
    parts += [normal(5, parts[2].shape, jnp.bfloat16)] * normed
    arrays = [jnp.concatenate([x.reshape(1, t, -1) for x in parts], 2), i, f]
    arrays += [normal(6, (2, 128), offset=1.0)] * normed
    dh = jnp.zeros((1, t, 2, 128), jnp.bfloat16)
    run = jax.jit(with_gradients(on_one)).trace(arrays, dh)
    text = run.lower(lowering_platforms=("cuda",)).as_text()
    assert CELL | (NORM if normed else set()) <= names_in(text)
    assert bool(re.search(COPIES, text)) == copied


@pytest.mark.parametrize(
    "copy", [lambda x: jnp.pad(x, 1), lambda x: jnp.stack([x, x]), lambda x: x.T]
)
def test_a_copy_is_found(copy):
    x = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    assert re.search(COPIES, jax.jit(copy).lower(x).as_text())
