"""Unpacks words of a quantised weight into a left operand of wgmma, in registers.

A thread has the words of two neighbours (n, c) and (n, c + 1), and wants the bfloat16 weights of
both in one register for each plane.  For 4 bits and plane i:

    word (n, c)      h7 h6 h5 h4 | h3 h2 h1 h0         code h of plane 0 .. 7
    word (n, c + 1)  j7 j6 j5 j4 | j3 j2 j1 j0
    prmt             j3 j2 j1 j0 | h3 h2 h1 h0         the halves with plane i: one for four planes
    shift, mask, or  0x430j        0x430h              two bfloat16: 128 + code
    subtract         code - 8      code - 8            128 + 8, exact
    multiply         by s, or fma with s and the offset: the only rounding

So a weight costs about two instructions, in halves of registers.  In 128 + code the last bit of the
mantissa is 1; other widths have other places and exponents (`_level`).  Mosaic has no such
instructions on arrays, so `_Code` makes Mosaic's own; its `in_jnp`, which the tests' interpreter
calls, is the specification.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import llvm

from pallas_kernels.mosaic import ROW, WGMMA
from pallas_kernels.quantized.formats import WORDS, Format, levels

PLANES = 4  # planes of a block: 64 of k, 128 bytes of bfloat16, one swizzle
_HALVES = 0x00010001  # of a register


def unpack(words, scales, offsets, block: int, bits: int, format: Format):
    """Block `block` of a step, 64 columns n x 64 of k: level s + offset as bfloat16.

    words: register arrays (64, 16), the parts of a step.
    scales, offsets: register arrays (64,) bfloat16 of groups of equal length that share the block's
    k; no offsets for symmetric weights.
    In 2:4 column 16 m + c of the result belongs to k = 64 block + 4 c + m.
    """
    sparse = format == "2:4"
    part, first = divmod((2 if sparse else PLANES) * block, 32 // bits)
    arguments = ([words[part], *([words[-1]] if sparse else [])], scales, offsets)
    types = tuple([layout] * len(a) for layout, a in zip((WGMMA, ROW, ROW), arguments, strict=True))
    result = plgpu.ShapeDtypeStruct((64, PLANES * WORDS), jnp.dtype(jnp.bfloat16), layout=WGMMA)
    code = _Code(first, block, bits, format)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(code)(*arguments)


@dataclasses.dataclass(frozen=True)
class _Code:
    """The code of `unpack` for one block."""

    first: int  # plane of its part
    block: int
    bits: int
    format: Format

    def in_jnp(self, words, scales, offsets):
        """The specification, on whole arrays."""
        field = lambda w, plane, bits: (w >> (plane * bits)) & (2**bits - 1)
        level = lambda plane: levels(field(words[0], plane, self.bits), self.bits, self.format)
        if self.format == "2:4":
            kept = [level(self.first + j) for j in range(2)]
            place = field(words[1], self.block, 4)
            pick = lambda m: jnp.where((place >> 2) == m, kept[1], 0)
            weights = [jnp.where((place & 3) == m, kept[0], pick(m)) for m in range(4)]
        else:
            weights = [level(self.first + p) for p in range(PLANES)]
        of = lambda rows, p: rows[p * len(rows) // PLANES].astype(jnp.float32)[:, None]
        weights = [w * of(scales, p) for p, w in enumerate(weights)]
        if offsets:
            weights = [w + of(offsets, p) for p, w in enumerate(weights)]
        return jnp.concatenate(weights, 1).astype(jnp.bfloat16)

    def __call__(self, ctx, words, scales, offsets):
        """The same in Mosaic, on the registers of one thread."""
        del ctx
        wide = lambda rows: rows.broadcast_in_dim((64, WORDS), (0,), mgpu.WGMMA_LAYOUT).registers
        scales, offsets = [wide(s) for s in scales], [wide(o) for o in offsets]
        out = np.empty((1, 2 * PLANES, *words[0].registers.shape[2:]), dtype=object)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        for at, register in np.ndenumerate(words[0].registers):
            if self.format == "2:4":
                weights = self._two_of_four(register, words[1].registers[at])
            else:
                planes = range(self.first, self.first + PLANES)
                fields = [_field(register, plane, self.bits) for plane in planes]
                weights = [_level(*field, self.bits, self.format) for field in fields]
            for p, weight in enumerate(weights):
                s = _as_word(scales[p * len(scales) // PLANES][at])
                if offsets:
                    offset = _as_word(offsets[p * len(offsets) // PLANES][at])
                    weight = _asm("fma.rn.bf16x2 $0, $1, $2, $3;", weight, s, offset)
                else:
                    weight = _asm("mul.rn.bf16x2 $0, $1, $2;", weight, s)
                out[(0, 2 * p + at[1], *at[2:])] = llvm.bitcast(pair, weight)
        return mgpu.FragmentedArray(_registers=out, _layout=words[0].layout, _is_signed=None)

    def _two_of_four(self, register, place):
        """The levels of four places, of which two are kept."""
        kept = [_field(register, self.first + j, self.bits) for j in range(2)]
        kept = [_level(*field, self.bits, "int") for field in kept]
        halves, at = _field(place, self.block, 4)
        # Each bit of the places as a mask of its half.
        bits = [_take(_shift(halves, -(at + i)), 1) for i in range(4)]
        masks = [arith.muli(bit, _constant(0xFFFF)) for bit in bits]
        inverse = [arith.xori(mask, _constant(0xFFFFFFFF)) for mask in masks]

        def chosen(j, m):
            here = [(masks if m >> i & 1 else inverse)[2 * j + i] for i in range(2)]
            return arith.andi(arith.andi(*here), kept[j])

        return [arith.ori(chosen(0, m), chosen(1, m)) for m in range(4)]


def _field(register, plane: int, bits: int):
    """Both words' halves with this plane in one register, and the place of the code in a half."""
    low, high = (
        vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)
    )
    half, place = divmod(plane * bits, 16)
    return _asm(f"prmt.b32 $0, $1, $2, {0x7632 if half else 0x5410};", low, high), place


def _level(halves, place: int, bits: int, format: Format):
    """Two bfloat16 levels from two codes at `place` of their halves."""
    if format == "fp8":  # sign to sign, exponent to exponent: 2^-120 of the number
        sign = _take(_shift(halves, 8 - place), 0x8000)
        small = arith.ori(sign, _take(_shift(halves, 4 - place), 0x07F0))
        return _asm("mul.rn.bf16x2 $0, $1, $2;", small, _constant(0x7B80 * _HALVES))
    if bits == 1:  # 1 with the sign of the code
        return _take(_shift(halves, 15 - place), 0x8000, 0xBF80)
    to = 5 if bits == 2 else 0
    halves = _shift(halves, to - place)
    if bits == 8:  # 128 + the low 7 bits; less 128 if the highest is set, else 256
        return _subtract(_take(halves, 0x7F, 0x4300), _take(halves, 0x80, 0x4380))
    # 4 bits: 128 + code less 136; 2 bits: 4 + code less 5.5.
    number, base = {4: (0x4300, 0x4308), 2: (0x4080, 0x40B0)}[bits]
    value = _take(halves, (2**bits - 1) << to, number)
    return _subtract(value, _constant(base * _HALVES))


def _constant(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value - 2**32 * (value >> 31)))


def _asm(code: str, *operands) -> Any:
    constraints = ",".join(["=r", *["r"] * len(operands)])
    return llvm.inline_asm(ir.IntegerType.get_signless(32), list(operands), code, constraints)


def _shift(halves, left: int):
    """Moves both halves' codes; the bits that cross the middle are masked afterwards."""
    if left == 0:
        return halves
    return (arith.shli if left > 0 else arith.shrui)(halves, _constant(abs(left)))


def _take(halves, mask: int, flip: int = 0) -> Any:
    """(halves & mask) ^ flip, in one instruction: LLVM and ptxas would make two."""
    mask, flip = mask * _HALVES, flip * _HALVES
    if not flip:
        return arith.andi(halves, _constant(mask))
    return _asm(f"lop3.b32 $0, $1, {mask:#x}, {flip:#x}, {(0xF0 & 0xCC) ^ 0xAA};", halves)


def _subtract(a, b):
    return _asm("sub.rn.bf16x2 $0, $1, $2;", a, b)


def _as_word(pair):
    return llvm.bitcast(ir.IntegerType.get_signless(32), pair)
