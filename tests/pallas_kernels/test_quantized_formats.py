"""Weights of few bits: the errors that formats.py promises, packing, saving, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from kernel_checks import normal
from safetensors.flax import load_file, save_file

from pallas_kernels import QuantizedWeight, quantize
from pallas_kernels.quantized.formats import dequantize

FORMATS = [("int", bits) for bits in (8, 4, 2, 1)] + [("fp8", 8), ("2:4", 8), ("2:4", 4)]
# Expected root mean square errors for N(0, 1) in groups of 128 (with 10% to spare).
EXPECTED = {("int", 8): 0.007, ("int", 4): 0.115, ("int", 2): 0.37, ("int", 1): 0.62}


def groups(w, group):
    """w as (groups, group, N) in float64."""
    return np.asarray(w, np.float64).reshape(-1, group or w.shape[0], w.shape[1])


def mean_square(a):
    return np.mean(np.square(a), 1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group"), [(8, 32), (4, None), slow(4, 64), slow(2, 32), (1, 128)]
)
def test_errors_of_integers_are_within_their_bounds(bits, symmetric, group):
    w = normal(0, (256, 70), scale=0.02) + 0.01 * normal(1, (1, 70))
    q = quantize(w, bits=bits, group=group, symmetric=symmetric)
    w, wq = groups(w, group), groups(dequantize(q), group)
    error = np.sqrt(mean_square(w - wq))
    largest, reach = np.abs(w).max(1), w.max(1) - w.min(1)
    if not symmetric:
        bound = reach / (2**bits - 1) / 2
    elif bits == 1:
        bound = np.sqrt(mean_square(w) - np.abs(w).mean(1) ** 2)
    else:
        bound = largest / {8: 254, 4: 14, 2: 3}[bits]
    assert (error <= bound + largest * 2**-8).all(), (error / bound).max()


def test_errors_of_fp8_are_within_their_bound():
    w = normal(0, (256, 70)) * jnp.exp(3 * normal(1, (256, 70)))
    wq = np.asarray(dequantize(quantize(w, bits=8, group=64, format="fp8")))
    largest = np.repeat(np.abs(groups(w, 64)).max(1), 64, 0)
    error = np.abs(np.asarray(w) - wq)
    assert (error <= 2**-4 * np.abs(w) + largest * 2**-10 / 448).all()


@pytest.mark.parametrize(("format", "bits"), EXPECTED)
def test_errors_of_normal_weights_are_those_that_are_stated(format, bits):
    w = normal(0, (512, 128))
    wq = dequantize(quantize(w, bits=bits, group=128, format=format))
    error = float(jnp.sqrt(jnp.mean(jnp.square(w - wq))))
    assert 0.8 * EXPECTED[format, bits] < error < EXPECTED[format, bits]


def test_scales_of_symmetric_1_bit_weights_are_the_mean_magnitude():
    w = normal(0, (64, 64))
    wq = groups(dequantize(quantize(w, bits=1, group=32)), 32)
    w = groups(w, 32)
    assert (np.sign(wq) == np.sign(w)).all()
    np.testing.assert_allclose(np.abs(wq), np.abs(w).mean(1, keepdims=True) + 0 * w, rtol=2**-8)


@pytest.mark.parametrize("bits", [8, 4])
def test_two_of_four_keeps_the_two_largest(bits):
    w = np.array(normal(0, (512, 64)))
    w[:4, 0] = 3, -3, 3, 0.5  # of equal weights the first are kept
    wq = np.asarray(dequantize(quantize(jnp.asarray(w), bits=bits, group=64, format="2:4")))
    magnitude = np.abs(w.reshape(-1, 4, 64))
    kept = magnitude >= np.sort(magnitude, 1)[:, 2:3]
    kept[0, 2, 0] = False
    error = np.abs(w - wq).reshape(kept.shape)
    largest = np.repeat(np.abs(groups(w, 64)).max(1), 16, 0)[:, None]
    step = largest / (127 if bits == 8 else 7)
    assert (wq.reshape(kept.shape)[~kept] == 0).all()
    # A clipped scale may move the largest weights by more than half a step.
    assert (error[kept] <= 0.8 * largest.repeat(4, 1)[kept]).all()
    assert np.sqrt(np.mean(error[kept] ** 2)) < np.sqrt(np.mean(step**2)) / 2


@pytest.mark.parametrize(("format", "bits"), FORMATS)
def test_a_weight_on_the_levels_comes_back(format, bits):
    shape, group = (320, 70), 64
    w = dequantize(quantize(normal(0, shape), bits=bits, group=group, format=format))
    again = quantize(w, bits=bits, group=group, format=format)
    assert again.words.shape[3:] == (32, 4)
    np.testing.assert_allclose(dequantize(again), w, rtol=0, atol=float(jnp.abs(w).max()) / 100)
    assert dequantize(again).shape == shape
    rounded = dequantize(again).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dequantize(again, jnp.bfloat16), rounded)


def test_dequantize_rounds_whatever_follows():
    # XLA fuses what follows, and would drop the conversions to bfloat16 and back.
    q = quantize(normal(0, (128, 64)), bits=8)
    w = jax.jit(lambda q: dequantize(q, jnp.bfloat16).astype(jnp.float32))(q)
    np.testing.assert_array_equal(w, np.asarray(dequantize(q)).astype(jnp.bfloat16))


def test_packing_is_the_documented_one():
    # Plane 6 (word 2 of the second step), n = r + 8 and k = 2 j + 9 (pair 3): the second set of 16.
    r, j, n = 5, 2, 16 + 5 + 8
    k = 64 + 16 * 2 + 2 * j + 8 + 1
    w = jnp.zeros((256, 30)).at[k, n].set(7.0)
    q = quantize(w, bits=4, group=128)
    assert q.words.shape == (2, 4, 1, 32, 4)
    words = np.asarray(q.words).view(np.uint32)
    assert words[1, 1, 0, 4 * r + j, 2] >> (16 + 4 * 3) & 15 == 7 + 8
    assert (words != 0x88888888)[:, :, 0, : 4 * 6].sum() == 1  # the others are padding
    scales = np.zeros((2, 2, 8, 2))
    scales[1, 0, r, 1] = 1
    np.testing.assert_array_equal(np.asarray(q.scales, np.float32), scales)


def test_constant_and_empty_groups():
    w = jnp.zeros((128, 64)).at[:64].set(-0.5)
    for symmetric in (True, False):
        wq = dequantize(quantize(w, bits=4, group=64, symmetric=symmetric))
        np.testing.assert_allclose(wq, w, atol=2**-9)


def test_weights_that_are_not_finite_are_not_finite_afterwards():
    for bad in (jnp.nan, jnp.inf):
        w = normal(0, (128, 64)).at[3, 5].set(bad)
        for format in ("int", "fp8"):
            wq = dequantize(quantize(w, bits=8, group=64, format=format))
            assert not jnp.isfinite(wq[3, 5])
            assert jnp.isfinite(wq[64:]).all()


def test_a_weight_is_a_pytree_of_arrays():
    q = quantize(normal(0, (128, 64)), bits=4, symmetric=False)
    assert len(jax.tree.leaves(q)) == 3
    assert q != jax.tree.map(jnp.copy, q)  # it was an array, whose truth value is ambiguous
    assert q in {q}
    double = jax.jit(lambda q: jax.tree.map(lambda a: a, q))(q)
    np.testing.assert_array_equal(dequantize(double), dequantize(q))
    assert q.nbytes == 256 * 64 // 2 + 2 * 2 * 2 * 64  # a turn has 256 of k


@pytest.mark.parametrize(("format", "bits"), [("int", 4), ("fp8", 8), ("2:4", 8)])
def test_a_saved_weight_comes_back(tmp_path, format, bits):
    q = quantize(normal(0, (128, 64)), bits=bits, group=64, format=format)
    save_file(q.to_arrays(), tmp_path / "w.safetensors")
    back = QuantizedWeight.from_arrays(load_file(tmp_path / "w.safetensors"))
    assert (back.shape, back.bits, back.group, back.format) == ((128, 64), bits, 64, format)
    np.testing.assert_array_equal(dequantize(back), dequantize(q))


DAMAGE = {
    "has no scales": lambda a: a.pop("scales"),
    "is damaged: its checksum is": lambda a: a["words"].reshape(-1).__setitem__(3, 1),
    "is not a quantised weight's": lambda a: a.update(header=a["header"][:3]),
    r"bits=3 is not 8 or 4 or 2 or 1": lambda a: a["header"].__setitem__(3, 3),
    r"words of a \(512, 64\) weight is int32": lambda a: a["header"].__setitem__(1, 512),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_weight_is_refused_in_one_line(message):
    arrays = {k: a.copy() for k, a in quantize(normal(0, (128, 64))).to_arrays().items()}
    DAMAGE[message](arrays)
    with pytest.raises(ValueError, match=message) as error:
        QuantizedWeight.from_arrays(arrays)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        ((100, 64), {}, "K=100, N=64: K is not a multiple of the group, 128"),
        ((130, 64), dict(format="2:4", group=None), "not a multiple of the four weights of 2:4, 4"),
        ((128, 0), {}, "K=128, N=0: the weight has no elements"),
        ((128, 64), dict(bits=3), "bits=3 is not 8 or 4 or 2 or 1, the width of format int"),
        ((128, 64), dict(format="fp8"), "bits=4 is not 8, the width of format fp8"),
        ((128, 64), dict(group=16), "group=16 is not one of (32, 64, 128, None)"),
        ((128, 64), dict(group=32, format="2:4"), "group=32 is not one of (64, 128, None)"),
        ((128, 64), dict(format="nf4"), "format='nf4' is not one of int, fp8, 2:4"),
        ((128, 64), dict(bits=8, format="fp8", symmetric=False), "fp8 has no offsets"),
        ((128,), {}, "w has shape (128,), but needs 2 axes: K N"),
    ],
)
def test_what_quantize_refuses(shape, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(jnp.ones(shape), **given)
