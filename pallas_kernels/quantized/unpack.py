"""Unpacks words of a quantised weight into left operands of mma and wgmma, in registers.

A lane's words have the pairs of such an operand (formats.py): two neighbours of k, one in each half
of a word.  For 4 bits and plane q of a step:

    word q             j3 j2 j1 j0 | h3 h2 h1 h0       pair a has the codes h_a and j_a
    shift, mask, flip  0x430j_a      0x430h_a          two bfloat16: 128 + code
    subtract           code - 8      code - 8          128 + 8, exact

So two weights cost three instructions.  In 128 + code the last bit of the mantissa is 1; other
widths have other places and exponents (`_level`).  Mosaic has no such instructions on arrays, so
this file and dot.py make Mosaic's own; their `in_jnp`, which the tests' interpreter calls, is the
specification.
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

from pallas_kernels import mosaic
from pallas_kernels.mosaic import WGMMA, warp_rows
from pallas_kernels.quantized import formats
from pallas_kernels.quantized.formats import COLUMNS, LANES, WORDS, Format

PLANES = 4  # planes of a block: 64 of k, 128 bytes of bfloat16, one swizzle
_HALVES = 0x00010001  # of a register

LANE_WORDS = warp_rows(WORDS)  # (4, 128) words: each warp has one step and tile
# (4, 16 i) scales of i groups: each warp has one tile, a register n = r and r + 8.
SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, COLUMNS), (2,))),
    warp_dims=(-3,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
# (64 / step, 128) words of 64 k and 16 n: each warp has the words of one plane, 16 k.
PLANE_WORDS = {
    4: plgpu.Layout.TILED(
        plgpu.Tiling(((1, LANES * WORDS), (WORDS,), (1,))), warp_dims=(-2,), lane_dims=(-3,),
        vector_dim=-1,
    ),
    8: plgpu.Layout.TILED(
        plgpu.Tiling(((2, LANES * WORDS), (WORDS,), (2,))), warp_dims=(-4, -2), lane_dims=(-3,),
        vector_dim=-1,
    ),
}  # fmt: skip
# (1, 16) scales of 16 n, the same in all warps.
COLUMN_SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((1, COLUMNS), (2,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)


def tile(words, scales, offsets, block: int, bits: int, format: Format):
    """Block `block` of 64 k of a step and 64 n: level s + offset as bfloat16.

    words: register arrays (4, 128), the parts of the step, or for 8 bits of two steps.
    scales, offsets: register arrays (4, 16) bfloat16 of groups of equal length that share the
    block's k; no offsets for symmetric weights.
    In 2:4 column 16 m + c of the result belongs to k = 64 block + 4 c + m.
    """
    return _run(_Tile(block, bits, format), (LANE_WORDS, SCALES, SCALES), words, scales, offsets)


def transposed_tile(words, scales, offsets, bits: int, format: Format):
    """64 k x 64 n: level s + offset as bfloat16, for 4 and 8 bits.

    words: register arrays (64 / step, 128), of 4 tiles of 16 n.
    scales, offsets: register arrays (1, 16) bfloat16 of these tiles; no offsets for symmetric
    weights.
    """
    layouts = PLANE_WORDS[bits], COLUMN_SCALES, COLUMN_SCALES
    return _run(_Transposed(bits, format), layouts, words, scales, offsets)


def _run(code, layouts, *arguments):
    """The 64 x 64 weights that `code` makes of lists of registers, each list of one layout."""
    types = tuple([layout] * len(a) for layout, a in zip(layouts, arguments, strict=True))
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.dtype(jnp.bfloat16), layout=WGMMA)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(code)(*arguments)


def read(ref, layout):
    """Loads a global or unswizzled shared ref into registers of `layout`, in its dtype."""
    return plgpu.load(ref, layout=layout, optimized=False)


def right_operand(x, format: Format):
    """x (M, K) with its k in the order of `tile`, padded to whole blocks of 64, two at least.

    K takes whole steps of a weight, 128 k at least, and a copy past the end of an array with a
    single block would read this block again.
    """
    across = 16 * PLANES
    if format == "2:4":
        x = mosaic.pad_axis(x, 1, across).reshape(len(x), -1, 16, 4).swapaxes(2, 3)
        x = x.reshape(len(x), -1)
    return mosaic.pad_axis(x, 1, across if x.shape[1] > across else 2 * across)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The code of `tile`."""

    block: int
    bits: int
    format: Format

    def in_jnp(self, words, scales, offsets):
        """The specification, on whole arrays."""
        words = jnp.stack([w.reshape(4, LANES, WORDS) for w in words], 1)
        steps = 1 if self.format == "2:4" else words.shape[1]
        words = words.reshape(4, steps, -1, LANES, WORDS)
        w = formats.unpack(words, self.bits, self.format).T[:, 64 * self.block :][:, :64]
        across = lambda rows: jnp.concatenate(
            [jnp.repeat(_by_column(s), 64 // len(rows), 1) for s in rows], 1
        )
        w = w * across(scales)
        if offsets:
            w = w + across(offsets)
        if self.format == "2:4":
            w = w.reshape(64, 16, 4).swapaxes(1, 2).reshape(64, 64)
        return w.astype(jnp.bfloat16)

    def __call__(self, ctx, words, scales, offsets):
        """The same in Mosaic, on the registers of one thread."""
        del ctx
        words = [lane_words(w) for w in words]
        scales, offsets = (
            [doubled(a.registers.flat[0]) for a in rows] for rows in (scales, offsets)
        )
        out = {}
        planes = range(PLANES * self.block, PLANES * (self.block + 1))
        for p, weights in enumerate(operands(words, planes, self.bits, self.format)):
            group = p * len(scales) // PLANES
            for a, weight in enumerate(weights):
                offset = [offsets[group][a % 2]] if offsets else []
                out[2 * p + a // 2, a % 2] = _scaled(weight, scales[group][a % 2], *offset)
        return _left_operand(out)


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """The code of `transposed_tile`."""

    bits: int
    format: Format

    def in_jnp(self, words, scales, offsets):
        """The specification, on whole arrays."""
        words = jnp.stack(words).reshape(len(words), -1, 1, LANES, WORDS)
        by_n = lambda rows: jnp.concatenate([_by_column(s) for s in rows]).T
        w = formats.unpack(words, self.bits, self.format) * by_n(scales)
        return (w + by_n(offsets) if offsets else w).astype(jnp.bfloat16)

    def __call__(self, ctx, words, scales, offsets):
        """The same in Mosaic, on the registers of one thread.

        A plane has four 8 x 8 matrices, one in each register; each is transposed by itself, and
        the matrices of n + 8 and k + 8 change places.
        """
        del ctx
        out = {}
        for t, own in enumerate(words):
            (levels,) = operands([lane_words(own)], range(1), self.bits, self.format)
            s, *offset = (doubled(a[t].registers.flat[0]) for a in (scales, offsets) if a)
            for a, level in enumerate(levels):
                weight = _scaled(level, s[a % 2], *(o[a % 2] for o in offset))
                weight = asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", weight)
                out[2 * t + a % 2, a // 2] = weight
        return _left_operand(out)


def _left_operand(words: dict):
    """A thread's words {(eight columns, half of the rows): word} of 64 x 64 bfloat16."""
    out = np.empty((1, 2 * PLANES, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    for (eight, half), word in words.items():
        out[0, eight, 0, 0, half, 0, 0, 0, 0] = llvm.bitcast(pair, word)
    return mgpu.FragmentedArray(_registers=out, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _scaled(level, s, offset=None):
    if offset is None:
        return _multiply(level, s)
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", level, s, offset)


def _by_column(scales):
    """Scales (tiles, 16) of n = (tile, r, 8) as (16 tiles, 1) float32."""
    return scales.reshape(-1, 8, 2).swapaxes(1, 2).reshape(-1, 1).astype(jnp.float32)


def operands(words, planes: range, bits: int, format: Format) -> list:
    """The levels of some planes: for each plane four registers, the pairs.

    words: for each part of a step a lane's four words.
    In 2:4 plane 4 p + m has place m of the fours of block p; `planes` are whole blocks'.
    """
    if format == "2:4":
        blocks = range(planes.start // 4, planes.stop // 4)
        return [plane for p in blocks for plane in _two_of_four(words, p, bits)]
    per = 16 // bits  # pairs of a word
    flat = [word for part in words for word in part]
    pair = lambda at: _level(flat[at // per], bits * (at % per), bits, format)
    return [[pair(4 * plane + a) for a in range(4)] for plane in planes]


def _two_of_four(words, block: int, bits: int):
    """The levels of the four places, of which two are kept."""
    per = 16 // bits
    values = [word for part in words[:-1] for word in part]
    planes = [[] for _ in range(4)]
    for a in range(4):
        at = [4 * (2 * block + j) + a for j in range(2)]
        kept = [_level(values[i // per], bits * (i % per), bits, "int") for i in at]
        # Each bit of the places as a mask of its half.
        place = [_take(_shift(words[-1][block], -(4 * a + i)), 1) for i in range(4)]
        masks = [arith.muli(bit, constant(0xFFFF)) for bit in place]
        inverse = [arith.xori(mask, constant(0xFFFFFFFF)) for mask in masks]

        def chosen(j, m, kept=kept, masks=masks, inverse=inverse):
            here = [(masks if m >> i & 1 else inverse)[2 * j + i] for i in range(2)]
            return arith.andi(arith.andi(*here), kept[j])

        for m, plane in enumerate(planes):
            plane.append(arith.ori(chosen(0, m), chosen(1, m)))
    return planes


def _level(halves, place: int, bits: int, format: Format):
    """Two bfloat16 levels from two codes at `place` of their halves."""
    if format == "fp8":  # sign to sign, exponent to exponent: 2^-120 of the number
        sign = _take(_shift(halves, 8 - place), 0x8000)
        small = arith.ori(sign, _take(_shift(halves, 4 - place), 0x07F0))
        return _multiply(small, constant(0x7B80 * _HALVES))
    if bits == 1:  # 1 with the sign of the code
        return _take(_shift(halves, 15 - place), 0x8000, 0xBF80)
    to = 5 if bits == 2 else 0
    halves = _shift(halves, to - place)
    if bits == 8:  # 128 + the low 7 bits; less 128 if the highest is set, else 256
        return _subtract(_take(halves, 0x7F, 0x4300), _take(halves, 0x80, 0x4380))
    # 4 bits: 128 + code less 136; 2 bits: 4 + code less 5.5.
    number, base = {4: (0x4300, 0x4308), 2: (0x4080, 0x40B0)}[bits]
    value = _take(halves, (2**bits - 1) << to, number)
    return _subtract(value, constant(base * _HALVES))


def constant(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value - 2**32 * (value >> 31)))


def asm(code: str, *registers) -> Any:
    constraints = ",".join(["=r", *["r"] * len(registers)])
    return llvm.inline_asm(ir.IntegerType.get_signless(32), list(registers), code, constraints)


def _shift(halves, left: int):
    """Moves both halves' codes; the bits that cross the middle are masked afterwards."""
    if left == 0:
        return halves
    return (arith.shli if left > 0 else arith.shrui)(halves, constant(abs(left)))


def _take(halves, mask: int, flip: int = 0) -> Any:
    """(halves & mask) ^ flip, in one instruction: LLVM and ptxas would make two."""
    mask, flip = mask * _HALVES, flip * _HALVES
    if not flip:
        return arith.andi(halves, constant(mask))
    return asm(f"lop3.b32 $0, $1, {mask:#x}, {flip:#x}, {(0xF0 & 0xCC) ^ 0xAA};", halves)


# GPUs before Hopper have only fma for bfloat16.  For sm_90 ptxas makes the same instructions of it
# as of sub and mul.
def _subtract(a, b):
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", b, constant(0xBF80 * _HALVES), a)


def _multiply(a, b):
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, constant(0x8000 * _HALVES))


def lane_words(array) -> list:
    """A lane's words of an array of words, which are one register."""
    (register,) = array.registers.flat
    count = ir.VectorType(register.type).shape[0]
    return [
        vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(count)
    ]


def doubled(pair) -> list:
    """Each half of a register, in both halves."""
    word = llvm.bitcast(ir.IntegerType.get_signless(32), pair)
    return [asm(f"prmt.b32 $0, $1, $1, {selector};", word) for selector in (0x1010, 0x3232)]
