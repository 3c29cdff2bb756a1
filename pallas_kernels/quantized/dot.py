"""What a warp of gemv.py does with a turn of four steps, in Mosaic's own language.

Each warp has one of the steps: its lanes load its words, 16 bytes each, and multiply them by x on
the tensor core (mma m16n8k16), whose eight columns are all the same row of x.  The words have the
pairs of mma's left operand (unpack.py).  `in_jnp` of each code is its specification, which the
tests' interpreter runs.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import gpu, llvm

from pallas_kernels.mosaic import ROW
from pallas_kernels.quantized import formats
from pallas_kernels.quantized.formats import COLUMNS, LANES, TURN, WORDS, Format
from pallas_kernels.quantized.unpack import LANE_WORDS, asm, constant, lane_words, operands

_TILED, _Any = plgpu.Layout.TILED, plgpu.Replicated
# (4, 8 i) of x: a warp has a row, and lanes 4 r + j the neighbours 2 j and 2 j + 1, for any r.
_X = _TILED(plgpu.Tiling(((TURN, 8), (2,))), (-3,), (_Any(8), -2), -1)
# (4, 32 i) of x for 2:4: lanes 4 r + j have two fours.
_X_FOURS = _TILED(plgpu.Tiling(((TURN, 32), (8,))), (-3,), (_Any(8), -2), -1)


class Turn(NamedTuple):
    """Four steps of a weight."""

    step: int  # k of a step
    bits: int
    format: Format
    group: int  # k in a group

    @property
    def rows(self) -> int:
        """The rows of scales of a turn: one for each warp, or fewer if warps share a group."""
        return max(1, min(TURN, TURN * self.step // self.group))

    @property
    def groups(self) -> int:
        """The groups of a step."""
        return max(1, self.step // self.group)

    @property
    def x_layout(self) -> plgpu.Layout:
        """Of (4, step) of x."""
        # pyrefly: ignore[bad-return]
        return _X_FOURS if self.format == "2:4" else _X

    @property
    def scales_layout(self) -> plgpu.Layout:
        """Of (rows, 16 groups) scales; n = r and r + 8 are in a register."""
        warps = {1: (_Any(4),), 2: (-3, _Any(2)), 4: (-3,)}[self.rows]
        tiling = plgpu.Tiling(((self.rows, COLUMNS), (2,)))
        # pyrefly: ignore[bad-return]
        return _TILED(tiling, warps, (-2, _Any(4)), -1)


def load_words(ref, parts: int):
    """Words (4, 128) of a part of four steps."""
    result = plgpu.ShapeDtypeStruct((TURN, LANES * WORDS), jnp.dtype(jnp.int32), layout=LANE_WORDS)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(_Load(parts))(ref)


@dataclasses.dataclass(frozen=True)
class _Load:
    """The code of `load_words`; Mosaic's own load cannot spare the L1 cache, which keeps x."""

    parts: int

    def in_jnp(self, words):
        """The specification, on the content of the reference."""
        return words

    def __call__(self, ctx, ref):
        del ctx
        i64, index = ir.IntegerType.get_signless(64), ir.IndexType.get()
        number = lambda n: arith.constant(index, ir.IntegerAttr.get(index, n))
        thread = gpu.thread_id(gpu.Dimension.x)
        warp = arith.remui(arith.divui(thread, number(LANES)), number(TURN))
        at = arith.muli(warp, number(4 * LANES * WORDS * self.parts))
        lane = arith.remui(thread, number(LANES))
        at = arith.addi(at, arith.muli(lane, number(4 * WORDS)))
        address = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))
        address = arith.addi(address, arith.index_cast(i64, at))
        # ptxas would unroll the loop, and for 8 bits take 99 registers instead of 55.
        code = (
            '{ .pragma "nounroll"; .reg .u64 a; cvta.to.global.u64 a, $4; '
            "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [a]; }"
        )
        words = _results([_i32()] * WORDS, code, "=r,=r,=r,=r,l", address)
        register = llvm.mlir_undef(ir.VectorType.get((WORDS,), _i32()))
        for i, word in enumerate(words):
            register = llvm.insertelement(register, word, constant(i))
        layout = LANE_WORDS.to_mgpu()
        out = np.full(layout.registers_shape((TURN, LANES * WORDS)), register, dtype=object)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=True)


def dot(t: Turn, acc, x, words, scales):
    """acc + the products of four steps, one for each warp: (64,), of (step, n).

    scales: the scales, or scales and offsets.
    """
    types = (ROW, t.x_layout, [LANE_WORDS] * len(words), [t.scales_layout] * len(scales))
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), layout=ROW)
    code = _Dot(t)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(code)(acc, x, words, scales)


@dataclasses.dataclass(frozen=True)
class _Dot:
    """The code of `dot`."""

    turn: Turn

    def in_jnp(self, acc, x, words, scales):
        """The specification, on whole arrays."""
        t = self.turn
        words = jnp.stack(words, 1).reshape(1, TURN, len(words), LANES, WORDS)
        w = formats.unpack(words, t.bits, t.format).reshape(TURN, t.step, COLUMNS)
        across = []
        for a in scales:
            a = a.reshape(t.rows, t.groups, COLUMNS // 2, 2).swapaxes(2, 3)
            a = a.reshape(t.rows, t.groups, COLUMNS).astype(jnp.float32)
            across += [jnp.repeat(jnp.repeat(a, TURN // t.rows, 0), t.step // t.groups, 1)]
        w = w * across[0] + (across[1] if across[1:] else 0)
        y = jnp.einsum("sk,skn->sn", x.astype(jnp.float32), w, precision="highest")
        return acc + y.reshape(-1)

    def __call__(self, ctx, acc, x, words, scales):
        """The same in Mosaic, on the registers of one thread."""
        del ctx
        t, f32 = self.turn, ir.F32Type.get()
        words = [lane_words(w) for w in words]
        rights = _fours(x) if t.format == "2:4" else _pairs(x)
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
                    totals[half] = _fma(a[2 * half], s[g][half], totals[half])
        out = np.empty(shape, dtype=object)
        for i, total in enumerate(totals):
            out.flat[i] = vector.broadcast(ir.VectorType.get((1,), f32), total)
        return mgpu.FragmentedArray(_registers=out, _layout=acc.layout, _is_signed=None)


def _pairs(x) -> list:
    """The right operands of the planes: k = 2 j and the next, and those 8 further."""
    pairs = [llvm.bitcast(_i32(), pair) for pair in x.registers.flat]
    return [pairs[i : i + 2] for i in range(0, len(pairs), 2)]


def _fours(x) -> list:
    """Those of 2:4: plane 4 p + m has place m of the fours of block p."""
    words = ir.VectorType.get((4,), _i32())
    eights = [vector.bitcast(words, eight) for eight in x.registers.flat]
    word = lambda v, i: vector.extract(v, dynamic_position=[], static_position=[i])
    return _places([[word(v, i) for i in range(4)] for v in eights])


def _places(eights) -> list:
    """The same from the four words of two fours each: c = 2 j first, then c = 2 j + 8."""
    planes = []
    for block in range(0, len(eights), 2):
        for m in range(4):
            code = f"prmt.b32 $0, $1, $2, {0x7632 if m % 2 else 0x5410};"
            two = eights[block : block + 2]
            planes.append([asm(code, words[m // 2], words[2 + m // 2]) for words in two])
    return planes


def _widen(pair) -> list:
    """Both halves of a register as float32."""
    f32, word = ir.F32Type.get(), llvm.bitcast(_i32(), pair)
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


def _fma(a, b, c) -> Any:
    f32 = ir.F32Type.get()
    return llvm.inline_asm(f32, [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")


def _i32():
    return ir.IntegerType.get_signless(32)
