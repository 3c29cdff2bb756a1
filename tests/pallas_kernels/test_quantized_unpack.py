"""The instructions that unpack words give the levels that formats.py defines.

The interpreter runs the specification in place of Mosaic's code (interpreter_extension.py), and a
CPU cannot run PTX.  So these tests replace the builders of instructions by what they mean in NumPy.
"""

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized import unpack
from pallas_kernels.quantized.formats import levels


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
    a, b = (halves(np.broadcast_to(x, operands[0].shape).copy()) for x in operands)
    return register({"sub.rn.bf16x2": a - b, "mul.rn.bf16x2": a * b}[name])


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
    extract = lambda register, dynamic_position, static_position: register[static_position[0]]
    monkeypatch.setattr(unpack, "arith", arith)
    monkeypatch.setattr(unpack, "vector", SimpleNamespace(extract=extract))
    monkeypatch.setattr(unpack, "_constant", np.uint32)
    monkeypatch.setattr(unpack, "_asm", asm)


def words(seed):
    """Registers of two words each, with every pattern of 16 bits in both halves of one of them."""
    every = np.arange(2**16, dtype=np.uint32)
    other = np.random.default_rng(seed).integers(0, 2**32, 2**16, np.uint32)
    return (every | every << 16, other)


def words_of_places(seed):
    """Registers of two words of eight pairs of different places each."""
    pairs = [a | b << 2 for a in range(4) for b in range(4) if a != b]
    chosen = np.random.default_rng(seed).choice(np.array(pairs, np.uint32), (2, 2**16, 8))
    return tuple(np.sum(chosen << np.arange(0, 32, 4, np.uint32), -1, dtype=np.uint32))


def code(word, plane, bits):
    return (word >> np.uint32(plane * bits)) & np.uint32(2**bits - 1)


@pytest.mark.parametrize(("format", "bits"), [*[("int", b) for b in (8, 4, 2, 1)], ("fp8", 8)])
def test_instructions_give_the_levels(in_numpy, format, bits):
    register = words(0)
    for plane in range(32 // bits):
        given = halves(unpack._level(*unpack._field(register, plane, bits), bits, format))
        for i, word in enumerate(register):
            expected = np.asarray(levels(code(word, plane, bits), bits, format), np.float64)
            finite = np.isfinite(expected)  # quantize makes no code of e4m3's NaN
            np.testing.assert_array_equal(given[finite, i], expected[finite])


@pytest.mark.parametrize("bits", [8, 4])
def test_instructions_place_two_of_four(in_numpy, bits):
    values, places = words(0), words_of_places(1)
    for block in range(8):
        first = 2 * block % (32 // bits)
        made = unpack._Code(first, block, bits, "2:4")._two_of_four(values, places)
        for i in range(2):
            kept = [levels(code(values[i], first + j, bits), bits, "int") for j in range(2)]
            place = code(places[i], block, 4)
            at = (place & 3, place >> 2)
            for m, given in enumerate(made):
                pick = np.where(at[0] == m, kept[0], np.where(at[1] == m, kept[1], 0))
                np.testing.assert_array_equal(halves(given)[:, i], pick)
