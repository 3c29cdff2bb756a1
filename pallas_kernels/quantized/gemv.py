"""The kernel of quantized_linear for one row of x: activation(x w' + bias) in one launch.

One row needs each weight once, so only memory's speed counts.  A block has 16 columns n, so many
blocks share the bytes of any layer, and its warps share K: no other block adds to its sums.

    block        16 columns n of all K; as many warpgroups as let one wave of blocks fill the GPU
    warpgroup    every `wgs`-th turn of four steps; each of its warps has one of the four
    lane         its words of the next `ahead` turns are in flight while it multiplies those before

    words of a step: 512 bytes in a row -> registers -> operands of mma m16n8k16 (unpack.py)
    x of a step                         -> registers -> mma's eight columns, all equal
    sums of a group of k                -> acc += s sum, and offset sum of x

Nothing goes through shared memory but the sums of the warps, in float32, at the end.  They are
added in a fixed order, so two runs are equal bit for bit.  w' is never rounded: its levels are
exact in bfloat16, and scales multiply sums.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import gpu, llvm

from pallas_kernels import mosaic
from pallas_kernels.activations.elementwise import sigmoid
from pallas_kernels.mosaic import ROW
from pallas_kernels.quantized import formats
from pallas_kernels.quantized.formats import COLUMNS, LANES, TURN, WORDS, Format, QuantizedWeight
from pallas_kernels.quantized.unpack import LANE_WORDS, asm, constant, lane_words, operands

_SMS = 132  # of an H100
_WGS = 8  # of an SM, whose registers hold them at 64 a thread
# 32 warps of an SM then have 32 KB in flight.  More turns need more registers and gain nothing:
# with 2, 3, 4 and 6 an H100 takes 13.0, 13.9, 14.2 and 18.4 us for 4096 x 14336 of 4 bits.
_AHEAD = 2

_TILED, _Any = plgpu.Layout.TILED, plgpu.Replicated
# (4, 8 i) of x: a warp has a row, and lanes 4 r + j the neighbours 2 j and 2 j + 1, for any r.
_X = _TILED(plgpu.Tiling(((TURN, 8), (2,))), (-3,), (_Any(8), -2), -1)
# (4, 32 i) of x for 2:4: lanes 4 r + j have two fours.
_X_FOURS = _TILED(plgpu.Tiling(((TURN, 32), (8,))), (-3,), (_Any(8), -2), -1)
_COLUMNS = _TILED(plgpu.Tiling(((COLUMNS,), (1,))), (_Any(4),), (_Any(2), -2), -1)


def _scales_layout(rows: int):
    """(rows, 16 i) scales of a turn, for `rows` of 1, 2 or 4; n = r and r + 8 are in a register."""
    warps = {1: (_Any(4),), 2: (-3, _Any(2)), 4: (-3,)}[rows]
    return _TILED(plgpu.Tiling(((rows, COLUMNS), (2,))), warps, (-2, _Any(4)), -1)


class Plan(NamedTuple):
    """How a product is split; see the picture."""

    turns: int
    step: int  # k of a step
    bits: int
    format: Format
    group: int  # k in a group
    wgs: int
    ahead: int

    @property
    def share(self) -> int:
        """The turns of a warpgroup; the last of some are past the end."""
        return mosaic.cdiv(self.turns, self.wgs)

    @property
    def rows(self) -> int:
        """The rows of scales of a turn: one for each warp, or fewer if warps share a group."""
        return max(1, min(TURN, TURN * self.step // self.group))

    @property
    def groups(self) -> int:
        """The groups of a step."""
        return max(1, self.step // self.group)


def plan(weight: QuantizedWeight) -> Plan:
    tiles, turns = weight.words.shape[0], weight.steps // TURN
    group = weight.group or turns * TURN * weight.step
    blocks = mosaic.cdiv(tiles, _SMS)  # of an SM
    wgs = max(1, min(_WGS // blocks, turns))
    ahead = min(_AHEAD, mosaic.cdiv(turns, wgs))
    return Plan(turns, weight.step, weight.bits, weight.format, group, wgs, ahead)


def product(x, weight: QuantizedWeight, bias, activation, dtype):
    """activation(x w' + bias) in dtype (N,), for x (K,) bfloat16."""
    bias = None if bias is None else mosaic.pad_axis(bias, 0, COLUMNS)
    arrays = weight.words, weight.scales, weight.offsets
    y = _product(x, *arrays, bias, activation, dtype, plan(weight))
    return y[: weight.shape[1]]


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _product(x, words, scales, offsets, bias, activation, dtype, p: Plan):
    tiles, steps, parts = words.shape[:3]
    by_step = lambda a: None if a is None else a.reshape(tiles, -1, p.groups * COLUMNS)
    return mosaic.kernel(
        functools.partial(_body, p, activation),
        name="quantized_linear_row",
        out_type=jax.ShapeDtypeStruct((tiles * COLUMNS,), dtype),
        scratch_types=dict(
            sums_smem=plgpu.SMEM((p.wgs, TURN * COLUMNS), jnp.float32),
            bar=plgpu.Barrier(num_arrivals=p.wgs),
        ),
        **mosaic.grid(n=tiles),
        num_threads=p.wgs,
        thread_name="wg",
    )(
        words.reshape(tiles, steps, parts, LANES * WORDS),
        by_step(scales),
        by_step(offsets),
        mosaic.pad_axis(x, 0, steps * p.step).reshape(steps, p.step),
        bias,
    )


class _Refs(NamedTuple):
    words: Any
    scales: Any
    offsets: Any
    x: Any
    bias: Any
    out: Any
    sums_smem: Any
    bar: Any


def _body(p: Plan, activation, *arrays, **scratch):
    refs = _Refs(*arrays, **scratch)
    wg = lax.axis_index("wg")
    turn = lambda i: i * p.wgs + wg
    fetch = lambda i: _fetch(p, refs, turn(i))

    def advance(i, carry):
        (first, *others), acc = carry
        others.append(fetch(i + p.ahead))
        return others, _multiply(p, refs, turn(i), first, acc)

    carry = [fetch(i) for i in range(p.ahead)], mosaic.zeros((TURN * COLUMNS,), ROW)
    fetched, acc = lax.fori_loop(0, p.share - p.ahead, advance, carry)
    for i, arrays in enumerate(fetched, p.share - p.ahead):
        acc = _multiply(p, refs, turn(i), arrays, acc)
    mosaic.store(refs.sums_smem.at[wg], acc)
    plgpu.barrier_arrive(refs.bar)
    pl.when(wg == 0)(lambda: _finish(p, refs, activation))


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _existing(p: Plan, turn):
    return turn if p.turns % p.wgs == 0 else jnp.minimum(turn, p.turns - 1)


def _fetch(p: Plan, refs: _Refs, turn):
    """The words, scales and offsets of a turn; past the last turn those of the last one."""
    n, turn, parts = lax.axis_index("n"), _existing(p, turn), refs.words.shape[2]
    steps = pl.ds(turn * TURN, TURN)
    words = [_load_words(refs.words.at[n, steps, i], parts) for i in range(parts)]
    shared = max(1, p.group // (TURN * p.step))  # turns with the same group
    groups = pl.ds(lax.div(turn, jnp.int32(shared)) * p.rows, p.rows)
    layout = _scales_layout(p.rows)
    rows = [a for a in (refs.scales, refs.offsets) if a is not None]
    return words, [_load(a.at[n, groups], layout) for a in rows]


def _multiply(p: Plan, refs: _Refs, turn, fetched, acc):
    """acc + the products of a turn; past the last turn acc."""
    steps = pl.ds(_existing(p, turn) * TURN, TURN)
    layout = _X_FOURS if p.format == "2:4" else _X
    total = _dot(p, acc, _load(refs.x.at[steps], layout), *fetched)
    if p.turns % p.wgs == 0:
        return total
    return jnp.where(jnp.broadcast_to(turn < p.turns, acc.shape), total, acc)


def _load_words(ref, parts: int):
    """Words (4, 128) of a part of four steps."""
    result = plgpu.ShapeDtypeStruct((TURN, LANES * WORDS), jnp.dtype(jnp.int32), layout=LANE_WORDS)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)(_Load(parts))(ref)


@dataclasses.dataclass(frozen=True)
class _Load:
    """The code of `_load_words`; Mosaic's own load cannot spare the L1 cache, which keeps x."""

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


def _finish(p: Plan, refs: _Refs, activation):
    """Adds the sums of the warps in order, then the bias, and stores the result."""
    plgpu.barrier_wait(refs.bar)
    sums = [
        refs.sums_smem.at[w, pl.ds(s * COLUMNS, COLUMNS)] for w in range(p.wgs) for s in range(TURN)
    ]
    y = functools.reduce(jnp.add, [_load(ref, _COLUMNS) for ref in sums])
    here = pl.ds(lax.axis_index("n") * COLUMNS, COLUMNS)
    if refs.bias is not None:
        y = y + mosaic.load(refs.bias.at[here], _COLUMNS)
    mosaic.store(refs.out.at[here], activate(y, activation))


def activate(y, activation):
    """The activation of sums, in a kernel."""
    if activation == "gelu":
        return y * sigmoid(2 * math.sqrt(2 / math.pi) * (y + 0.044715 * (y * y * y)))
    return y * sigmoid(y) if activation == "silu" else y


def _dot(p: Plan, acc, x, words, scales):
    """acc + the products of four steps, one for each warp: (64,), of (step, n).

    scales: the scales, or scales and offsets.
    """
    rows = _scales_layout(p.rows)
    layout = _X_FOURS if p.format == "2:4" else _X
    types = (ROW, layout, [LANE_WORDS] * len(words), [rows] * len(scales))
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.dtype(jnp.float32), layout=ROW)
    code = _Dot(p)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(code)(acc, x, words, scales)


@dataclasses.dataclass(frozen=True)
class _Dot:
    """The code of `_dot`."""

    p: Plan

    def in_jnp(self, acc, x, words, scales):
        """The specification, on whole arrays."""
        p = self.p
        words = jnp.stack(words, 1).reshape(1, TURN, len(words), LANES, WORDS)
        w = formats.unpack(words, p.bits, p.format).reshape(TURN, p.step, COLUMNS)
        across = []
        for a in scales:
            a = a.reshape(p.rows, p.groups, COLUMNS // 2, 2).swapaxes(2, 3)
            a = a.reshape(p.rows, p.groups, COLUMNS).astype(jnp.float32)
            across += [jnp.repeat(jnp.repeat(a, TURN // p.rows, 0), p.step // p.groups, 1)]
        w = w * across[0] + (across[1] if across[1:] else 0)
        y = jnp.einsum("sk,skn->sn", x.astype(jnp.float32), w, precision="highest")
        return acc + y.reshape(-1)

    def __call__(self, ctx, acc, x, words, scales):
        """The same in Mosaic, on the registers of one thread."""
        del ctx
        p, f32 = self.p, ir.F32Type.get()
        words = [lane_words(w) for w in words]
        rights = _fours(x) if p.format == "2:4" else _pairs(x)
        scales = [[_widen(pair) for pair in a.registers.flat] for a in scales]
        shape, acc_of = acc.registers.shape, acc.registers.flat
        totals = [vector.extract(a, dynamic_position=[], static_position=[0]) for a in acc_of]
        planes = p.step // COLUMNS
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        ones = [constant(0x3F803F80)] * 4
        for g in range(p.groups):
            sums, x_sums = [zero] * 4, [zero] * 4
            own = range(g * planes // p.groups, (g + 1) * planes // p.groups)
            for plane, left in zip(own, operands(words, own, p.bits, p.format), strict=True):
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
    """The same from the four words of two fours each: those of c = 2 j, and of c = 2 j + 8."""
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
