"""The instructions that unpack words give the levels that formats.py defines.

The interpreter runs the specification in place of Mosaic's code (interpreter_extension.py), and a
CPU cannot run PTX.  So these tests replace the builders of instructions by what they mean in NumPy.
"""

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized import formats, unpack
from pallas_kernels.quantized.formats import COLUMNS, LANES, WORDS, levels


def halves(register):
    """The two bfloat16 numbers of a register, as float64, along a new last axis."""
    return register.view(np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 2).astype(np.float64)


def register(halves):
    return halves.astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint16).view(np.uint32)


def prmt(a, b, selector):
    data = np.stack([a, b], -1).view(np.uint8).reshape(-1, 8)
    chosen = [data[:, selector >> 4 * i & 7] for i in range(4)]
    return np.stack(chosen, -1).reshape(-1).view(np.uint32)


def lop3(a, b, c, table):
    """The table has a bit for each of the eight triples of bits."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            of = lambda x, bit: x if i >> bit & 1 else ~x  # noqa: B023 - called at once
            result |= of(a, 2) & of(np.uint32(b), 1) & of(np.uint32(c), 0)
    return result


def asm(code, *operands):
    name = code.split()[0]
    numbers = [int(n, 0) for n in re.findall(r"(?<= )(?:0x[0-9a-f]+|\d+)(?=[,;])", code)]
    if name == "prmt.b32":
        return prmt(*operands, *numbers)
    if name == "lop3.b32":
        return lop3(*operands, *numbers)
    assert name == "fma.rn.bf16x2"
    shape = np.broadcast_shapes(*(np.shape(x) for x in operands))
    a, b, c = (halves(np.broadcast_to(x, shape).copy()) for x in operands)
    return register(a * b + c)


@pytest.fixture
def in_numpy(monkeypatch):
    arith = SimpleNamespace(
        ori=np.bitwise_or,
        andi=np.bitwise_and,
        xori=np.bitwise_xor,
        muli=np.multiply,
        shli=np.left_shift,
        shrui=np.right_shift,
    )
    monkeypatch.setattr(unpack, "arith", arith)
    monkeypatch.setattr(unpack, "constant", np.uint32)
    monkeypatch.setattr(unpack, "asm", asm)


@pytest.mark.parametrize(("format", "bits"), [*[("int", b) for b in (8, 4, 2, 1)], ("fp8", 8)])
def test_instructions_give_the_levels(in_numpy, format, bits):
    every = np.arange(2**16, dtype=np.uint32)
    other = np.random.default_rng(0).integers(0, 2**16, 2**16, np.uint32)
    for place in range(0, 16, bits):
        given = halves(unpack._level(every | other << np.uint32(16), place, bits, format))
        for i, half in enumerate((every, other)):
            code = half >> np.uint32(place) & np.uint32(2**bits - 1)
            expected = np.asarray(levels(code, bits, format), np.float64)
            finite = np.isfinite(expected)  # quantize makes no code of e4m3's NaN
            np.testing.assert_array_equal(given[finite, i], expected[finite])


def step_of_words(format, bits):
    """Random words (1, 1, parts, 32, 4) of one step; two different places of each four for 2:4."""
    rng = np.random.default_rng(1)
    parts = bits // 2 + 1 if format == "2:4" else 1
    words = rng.integers(0, 2**32, (1, 1, parts, LANES, WORDS), np.uint32)
    if format == "2:4":
        pairs = np.array([a | b << 2 for a in range(4) for b in range(4) if a != b], np.uint32)
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        words[:, :, -1] = np.sum(rng.choice(pairs, (LANES, WORDS, 8)) << shifts, -1)
    return words


@pytest.mark.parametrize(
    ("format", "bits"), [*[("int", b) for b in (8, 4, 2, 1)], ("2:4", 8), ("2:4", 4)]
)
def test_lanes_hold_the_operands_of_mma(in_numpy, format, bits):
    words = step_of_words(format, bits)
    expected = np.asarray(formats.unpack(words.view(np.int32), bits, format))
    planes = range(len(expected) // 16)
    of_lanes = [[part[:, i] for i in range(WORDS)] for part in words[0, 0]]
    given = np.zeros((len(planes), 16, COLUMNS))  # of plane, k, n
    lanes = np.arange(LANES)
    for plane, pairs in zip(planes, unpack.operands(of_lanes, planes, bits, format), strict=True):
        for a, pair in enumerate(pairs):
            for half in range(2):
                k, n = 2 * (lanes % 4) + 8 * (a // 2) + half, lanes // 4 + 8 * (a % 2)
                given[plane, k, n] = halves(pair)[:, half]
    if format == "2:4":  # of block, place, four
        given = given.reshape(-1, 4, 16, COLUMNS).swapaxes(1, 2)
    np.testing.assert_array_equal(given.reshape(expected.shape), expected)


def test_x_of_two_of_four_is_in_the_order_of_its_weights(in_numpy):
    x = np.arange(64, dtype=np.float32)  # exact in bfloat16
    # Lane j has the fours 2 j and 2 j + 1, and those 8 further.
    eights = [register(x.reshape(8, 8)[4 * i : 4 * i + 4]).reshape(4, 4).T for i in range(2)]
    for m, right in enumerate(unpack._places(eights)):
        for i, pair in enumerate(right):
            fours = 2 * np.arange(4) + 8 * i
            np.testing.assert_array_equal(halves(pair), 4 * np.stack([fours, fours + 1], 1) + m)
