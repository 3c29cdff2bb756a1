"""Unpacks words of a quantised weight into left operands of mma and wgmma, in registers.

A lane's words have the pairs of such an operand (formats.py): two neighbours of k, one in each half
of a word.  For 4 bits and plane q of a step:

    word q             j3 j2 j1 j0 | h3 h2 h1 h0       pair a has the codes h_a and j_a
    shift, mask, flip  0x430j_a      0x430h_a          two bfloat16: 128 + code
    subtract           code - 8      code - 8          128 + 8, exact

So two weights cost three instructions.  In 128 + code the last bit of the mantissa is worth 1;
other widths have other places and exponents (`_level`).

Mosaic has no such instructions on arrays.  So this file emits them as MLIR, on the registers of one
thread; tests/specifications.py says what they do to whole arrays.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import gpu, llvm

from pallas_kernels import mosaic
from pallas_kernels.ampere import constant, i32
from pallas_kernels.mosaic import ROW, WGMMA, inline, read, warp_rows
from pallas_kernels.pipeline import Ring
from pallas_kernels.quantized.formats import COLUMNS, LANES, TURN, WORDS, Format, QuantizedWeight

# The kernels of several rows take squares of w': n are the 64 rows of a wgmma, and 64 k are 128
# bytes of bfloat16, one swizzle.
EDGE = 64
PLANES, TILES = EDGE // 16, EDGE // COLUMNS  # of a square: planes of k, tiles of n
_HALVES = 0x00010001  # of a register
_TILED, _Any = plgpu.Layout.TILED, plgpu.Replicated

LANE_WORDS = warp_rows(WORDS)  # (4, 128) words: each warp has one step and tile
# (4, 16 i) scales of i groups: each warp has one tile, a register n = r and r + 8.
SCALES = _TILED(plgpu.Tiling(((4, COLUMNS), (2,))), (-3,), (-2, _Any(4)), -1)
# (64 / step, 128) words of 64 k and 16 n: each warp has the words of one plane, 16 k.
PLANE_WORDS = {
    4: _TILED(plgpu.Tiling(((1, LANES * WORDS), (WORDS,), (1,))), (-2,), (-3,), -1),
    8: _TILED(plgpu.Tiling(((2, LANES * WORDS), (WORDS,), (2,))), (-4, -2), (-3,), -1),
}
# (1, 16) scales of 16 n, the same in all warps.
COLUMN_SCALES = _TILED(plgpu.Tiling(((1, COLUMNS), (2,))), (_Any(4),), (-2, _Any(4)), -1)


def tile(words, scales, offsets, block: int, bits: int, format: Format):
    """Block `block` of 64 k of a step and 64 n: level s + offset as bfloat16.

    words: register arrays (4, 128), the parts of the step, or for 8 bits of two steps.
    scales, offsets: register arrays (4, 16) bfloat16 of groups of equal length that share the
    block's k; no offsets for symmetric weights.
    In 2:4 column 16 m + c of the result belongs to k = 64 block + 4 c + m.
    """
    code = functools.partial(_tile, block, bits, format)
    return _weights(code, (LANE_WORDS, SCALES, SCALES), words, scales, offsets)


def transposed_tile(words, scales, offsets, bits: int, format: Format):
    """64 k x 64 n: level s + offset as bfloat16, for 4 and 8 bits.

    words: register arrays (64 / step, 128), of 4 tiles of 16 n.
    scales, offsets: register arrays (1, 16) bfloat16 of these tiles; no offsets if symmetric.
    """
    code = functools.partial(_transposed, bits, format)
    return _weights(code, (PLANE_WORDS[bits], COLUMN_SCALES, COLUMN_SCALES), words, scales, offsets)


def _weights(code, layouts, *arguments):
    """The 64 x 64 weights that `code` makes of lists of registers, each list of one layout."""
    types = tuple([layout] * len(a) for layout, a in zip(layouts, arguments, strict=True))
    return inline(code, types, (EDGE, EDGE), jnp.bfloat16, WGMMA)(*arguments)


def load_words(ref, parts: int):
    """Words (4, 128) of a part of four steps."""
    code, shape = functools.partial(_load, parts), (TURN, LANES * WORDS)
    return inline(code, (plgpu.RefType(),), shape, jnp.int32, LANE_WORDS)(ref)


def dot(t, acc, x, words, scales):
    """acc + the products of four steps, one for each warp: (64,), of (step, n).

    t: the plan of gemv.py.  scales: the scales, or scales and offsets.
    A warp multiplies its words by x on the tensor core (mma m16n8k16), whose eight columns are all
    the same row of x.
    """
    types = (ROW, t.x_layout, [LANE_WORDS] * len(words), [t.scales_layout] * len(scales))
    code = functools.partial(_dot, t)
    return inline(code, types, acc.shape, jnp.float32, ROW)(acc, x, words, scales)


def by_tile(weight: QuantizedWeight) -> list:
    """The arrays of a weight for the kernels of several rows: (tiles, parts or groups, numbers)."""
    arrays = (weight.words, LANES * WORDS), (weight.scales, COLUMNS), (weight.offsets, COLUMNS)
    return [None if a is None else a.reshape(len(a), -1, n) for a, n in arrays]


def buffers(slots: int, tiles: int, parts: int, groups: int, asymmetric: bool) -> dict:
    """Shared memory for `slots` turns of some tiles."""
    small = plgpu.SMEM((slots, tiles, groups, COLUMNS), jnp.bfloat16)
    words = plgpu.SMEM((slots, tiles, parts, LANES * WORDS), jnp.int32)
    return dict(words_smem=words, scales_smem=small, offsets_smem=small if asymmetric else None)


def ring_of(slots: int, bars) -> Ring:
    """This warpgroup's ring of turns; the buffers of all warpgroups share arrays."""
    return Ring(slots, bars, first=lax.axis_index("wg") * slots, flat=True)


def send(ring: Ring, i, refs, tiles, parts, groups) -> None:
    """Starts the copies of some tiles' words, scales and offsets for step i of a ring."""
    ring.send(i, refs.words.at[tiles, parts], refs.words_smem)
    ring.send(i, refs.scales.at[tiles, groups], refs.scales_smem)
    if refs.offsets is not None:
        ring.send(i, refs.offsets.at[tiles, groups], refs.offsets_smem)


def read_scales(refs, layout, *places) -> tuple[list, list]:
    """Scales and offsets of these places in shared memory; no offsets for symmetric weights."""
    of = lambda a: [] if a is None else [read(a.at[at], layout) for at in places]
    return of(refs.scales_smem), of(refs.offsets_smem)


def right_operand(x, format: Format):
    """x (M, K) with its k in the order of `tile`, padded to whole blocks of 64, at least two.

    The kernels read whole steps of a weight, at least 128 k, and a copy past the end of an array
    of one block would read this block again.  More than 8 rows are padded to a multiple of 8.
    """
    x = mosaic.pad_axis(x, 0, 8) if len(x) > 8 else x
    across = 16 * PLANES
    if format == "2:4":
        x = mosaic.pad_axis(x, 1, across).reshape(len(x), -1, 16, 4).swapaxes(2, 3)
        x = x.reshape(len(x), -1)
    return mosaic.pad_axis(x, 1, across if x.shape[1] > across else 2 * across)


# ---- in MLIR, on the registers of one thread -----------------------------------------------------


def _tile(block, bits, format, _, words, scales, offsets):
    words = [lane_words(w) for w in words]
    scales, offsets = ([doubled(a.registers.flat[0]) for a in rows] for rows in (scales, offsets))
    out, planes = {}, range(PLANES * block, PLANES * (block + 1))
    for p, weights in enumerate(operands(words, planes, bits, format)):
        group = p * len(scales) // PLANES
        for a, weight in enumerate(weights):
            offset = [offsets[group][a % 2]] if offsets else []
            out[2 * p + a // 2, a % 2] = _fma(weight, scales[group][a % 2], *offset)
    return _left_operand(out)


def _transposed(bits, format, _, words, scales, offsets):
    # A plane has four 8 x 8 matrices, one in each register; each is transposed by itself, and the
    # matrices of n + 8 and k + 8 change places.
    out = {}
    for t, own in enumerate(words):
        (levels,) = operands([lane_words(own)], range(1), bits, format)
        s, *offset = (doubled(a[t].registers.flat[0]) for a in (scales, offsets) if a)
        for a, level in enumerate(levels):
            weight = _fma(level, s[a % 2], *(o[a % 2] for o in offset))
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


def _load(parts, _, ref):
    i64, index = ir.IntegerType.get_signless(64), ir.IndexType.get()
    number = lambda n: arith.constant(index, ir.IntegerAttr.get(index, n))
    thread = gpu.thread_id(gpu.Dimension.x)
    warp = arith.remui(arith.divui(thread, number(LANES)), number(TURN))
    at = arith.muli(warp, number(4 * LANES * WORDS * parts))
    lane = arith.remui(thread, number(LANES))
    at = arith.addi(at, arith.muli(lane, number(4 * WORDS)))
    address = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
    address = arith.addi(address, arith.index_cast(i64, at))
    # Mosaic's own load would fill the L1 cache, which should keep x.
    # Without the pragma ptxas unrolls the loop, and for 8 bits takes 99 registers instead of 55.
    code = (
        '{ .pragma "nounroll"; .reg .u64 a; cvta.to.global.u64 a, $4; '
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [a]; }"
    )
    words = _results([i32()] * WORDS, code, "=r,=r,=r,=r,l", address)
    register = llvm.mlir_undef(ir.VectorType.get((WORDS,), i32()))
    for i, word in enumerate(words):
        register = llvm.insertelement(register, word, constant(i))
    layout = LANE_WORDS.to_mgpu()
    out = np.full(layout.registers_shape((TURN, LANES * WORDS)), register, dtype=object)
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=True)


def _dot(t, _, acc, x, words, scales):
    f32 = ir.F32Type.get()
    words = [lane_words(w) for w in words]
    rights = _right_operands(x, t.format)
    scales = [[_widen(pair) for pair in a.registers.flat] for a in scales]
    shape, acc_of = acc.registers.shape, acc.registers.flat
    totals = [vector.extract(a, dynamic_position=[], static_position=[0]) for a in acc_of]
    planes = t.step // COLUMNS
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    ones = [constant(0x3F803F80)] * 4
    for g in range(t.groups):
        sums, x_sums = [zero] * 4, [zero] * 4
        own = range(g * planes // t.groups, (g + 1) * planes // t.groups)
        for plane, left in zip(own, operands(words, own, t.bits, t.format), strict=True):
            sums = _mma(left, rights[plane], sums)
            if scales[1:]:
                x_sums = _mma(ones, rights[plane], x_sums)
        for half in range(2):  # n = r and r + 8; all columns of the sums are equal
            terms = [(sums, scales[0]), *([(x_sums, scales[1])] if scales[1:] else [])]
            for a, s in terms:
                factors = a[2 * half], s[g][half], totals[half]
                totals[half] = asm("fma.rn.f32 $0, $1, $2, $3;", *factors, kind="f")
    out = np.empty(shape, dtype=object)
    for i, total in enumerate(totals):
        out.flat[i] = vector.broadcast(ir.VectorType.get((1,), f32), total)
    return mgpu.FragmentedArray(_registers=out, _layout=acc.layout, _is_signed=None)


def _right_operands(x, format: Format) -> list:
    """For each plane, in the order of `operands`, k = 2 j and the next, and those 8 further."""
    if format == "2:4":
        words = ir.VectorType.get((4,), i32())
        return _places([_elements(vector.bitcast(words, eight)) for eight in x.registers.flat])
    pairs = [llvm.bitcast(i32(), pair) for pair in x.registers.flat]
    return [pairs[i : i + 2] for i in range(0, len(pairs), 2)]


def _places(eights) -> list:
    """Planes of 2:4 from the four words of two fours each: c = 2 j first, then c = 2 j + 8."""
    planes = []
    for block in range(0, len(eights), 2):
        for m in range(4):
            code = f"prmt.b32 $0, $1, $2, {0x7632 if m % 2 else 0x5410};"
            two = eights[block : block + 2]
            planes.append([asm(code, words[m // 2], words[2 + m // 2]) for words in two])
    return planes


def _widen(pair) -> list:
    """Both halves of a register as float32."""
    f32, word = ir.F32Type.get(), llvm.bitcast(i32(), pair)
    high = arith.andi(word, constant(0xFFFF0000))
    return [llvm.bitcast(f32, bits) for bits in (arith.shli(word, constant(16)), high)]


def _mma(left, right, acc) -> list:
    """acc + left right, of 16 n x 16 k and 16 k x 8 columns."""
    f32 = ir.F32Type.get()
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return _results([f32] * 4, code, constraints, *left, *right, *acc)


def _results(types, code: str, constraints: str, *operands) -> list:
    """The results of an instruction that has several."""
    struct = llvm.StructType.get_literal(types)
    result: Any = llvm.inline_asm(struct, list(operands), code, constraints)
    return [llvm.extractvalue(type_, result, [i]) for i, type_ in enumerate(types)]


def operands(words, planes: range, bits: int, format: Format) -> list:
    """The levels of some planes: for each plane four registers, the pairs.

    words: for each part of a step a lane's four words.
    In 2:4 plane 4 p + m has place m of the fours of block p; `planes` covers whole blocks.
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
    if format == "fp8":  # bfloat16 with the same sign and exponent bits: 2^-120 times the number
        sign = _take(_shift(halves, 8 - place), 0x8000)
        small = arith.ori(sign, _take(_shift(halves, 4 - place), 0x07F0))
        return _fma(small, constant(0x7B80 * _HALVES))
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


def asm(code: str, *registers, kind: str = "r") -> Any:
    """The result of an instruction of one kind of registers: "r" or "f", float32."""
    constraints = ",".join([f"={kind}", *[kind] * len(registers)])
    result = i32() if kind == "r" else ir.F32Type.get()
    return llvm.inline_asm(result, list(registers), code, constraints)


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


def _fma(a, b, c=None):
    """a b + c, or a b, of two bfloat16 each.

    GPUs before Hopper have only fma for bfloat16.  For sm_90 ptxas makes the same instructions of
    it as of sub and mul.
    """
    c = constant(0x8000 * _HALVES) if c is None else c  # -0
    return asm("fma.rn.bf16x2 $0, $1, $2, $3;", a, b, c)


def _subtract(a, b):
    return _fma(b, constant(0xBF80 * _HALVES), a)  # -1 b + a


def lane_words(array) -> list:
    """A lane's words of an array of words, which are one register."""
    return _elements(*array.registers.flat)


def _elements(register) -> list:
    count = ir.VectorType(register.type).shape[0]
    extract = lambda i: vector.extract(register, dynamic_position=[], static_position=[i])
    return [extract(i) for i in range(count)]


def doubled(pair) -> list:
    """Each half of a register, in both halves."""
    word = llvm.bitcast(i32(), pair)
    return [asm(f"prmt.b32 $0, $1, $1, {selector};", word) for selector in (0x1010, 0x3232)]
