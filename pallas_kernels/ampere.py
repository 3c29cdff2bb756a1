"""Copies and matmuls of every NVIDIA GPU since Ampere (8.0), for kernels without TMA and wgmma.

    cp.async    16 bytes from global to shared memory, without a register in between
    ldmatrix    8 x 8 pieces of shared memory into registers, as mma wants them
    mma         16 x 8 += 16 x 16 times 16 x 8 in a warp's registers (plgpu.mma makes many of them)

A block of such a kernel is one warpgroup: 128 threads, which meet at their own barrier.  Mosaic has
cp.async as well, but only before Hopper and only inside an array's bounds.  So this file emits the
copies as MLIR; the tests' interpreter runs their specifications in tests/specifications.py.

A tile in shared memory (`mosaic.tiled`) has rows of 8 (or 4) pieces of 16 bytes, and piece c of row
r stands at place c ^ (r % 8) of its row ("swizzled"; with 4: c ^ (r % 8 // 2)): eight rows of one
column then lie in different banks, which ldmatrix reads at once.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels.mosaic import WGMMA, global_pointer, inline, wgmma_tiles, zeros

_THREADS = 128
_SCALAR = plgpu.Layout.WG_SPLAT


def load_rows(source, target, batch, head, first, end) -> None:
    """Starts to copy rows first, first + 1, ... of source[batch, :, head] to target.

    source: (B, T, H, D) in global memory, D a multiple of 8.  target: a tile (rows, D or more), in
    multiples of 32 columns.  Rows from `end` on and columns from D on are filled with zeros.
    """
    _move(_load_rows, source, target, batch, head, first, end)


def load_line(source, target, batch, head, first) -> None:
    """Starts to copy source[batch, head, first:] to target, as a part of the next `load_rows`.

    source: (B, H, T) float32 in global memory, long enough to fill target; T and first are
    multiples of 4.  target: (n,) in shared memory, n a multiple of 4 and at most 512.
    """
    _move(_load_line, source, target, batch, head, first)


def store_rows(source, target, batch, head, first, end) -> None:
    """Copies source to rows first, first + 1, ... of target[batch, :, head], none from `end` on."""
    _move(_store_rows, target, source, batch, head, first, end)


def wait(n: int = 0) -> None:
    """Waits until at most the last n of this block's `load_rows` are under way, for all threads.

    All threads have then finished everything before this call, so buffers may be overwritten.
    """
    plgpu.inline_mgpu()(functools.partial(_wait, n))()


def meet() -> None:
    """Waits for all threads of the block; their writes to shared memory can then be read."""
    plgpu.inline_mgpu()(functools.partial(_wait, None))()


def rows_times_rows(x, y):
    """x y^T of tiles x (M, K) and y (N, K), in float32."""
    acc = zeros((x.shape[0], y.shape[0]), WGMMA)
    across = wgmma_tiles(x.shape[1], x.dtype)[0].tiling[1]  # columns of a swizzled row
    for k in range(0, x.shape[1], across):
        part = pl.ds(k, across)
        acc = times_columns(acc, left(x.at[:, part]), y.at[:, part])
    return acc


def times_rows(acc, x, y):
    """acc + x y of x (M, K) and a tile y (K, N).

    x: a result of mma, which is rounded to y's dtype, or a left operand.
    """
    for k in range(0, x.shape[1], 16):
        a = x[:, k : k + 16]
        a = a if a.dtype == y.dtype else as_left(a, y.dtype)
        b = plgpu.load(y.at[pl.ds(k, 16)], layout=plgpu.Layout.MMA_RHS(y.dtype))
        acc = plgpu.mma(acc, a, b)
    return acc


def times_columns(acc, x, y):
    """acc + x y^T of a left operand x (M, K) and a tile y (N, K) of one swizzled row across."""
    b = plgpu.load(y.transpose((1, 0)), layout=plgpu.Layout.MMA_RHS(y.dtype))
    return plgpu.mma(acc, x, b)


def left(x):
    """A tile as the left operand of mma, in registers."""
    return plgpu.load(x, layout=plgpu.Layout.MMA_LHS(x.dtype))


def as_left(x, dtype):
    """A result of mma, rounded to dtype, as the next mma's left operand, in the same threads."""
    dtype = jnp.dtype(dtype)
    code = functools.partial(_as_left, dtype)
    return inline(code, (WGMMA,), x.shape, dtype, plgpu.Layout.MMA_LHS(dtype))(x)


# ---- in MLIR ---------------------------------------------------------------------------------


def _move(code, array, tile, *where):
    transforms = () if len(tile.shape) == 1 else wgmma_tiles(tile.shape[-1], tile.dtype)  # a line
    types = (plgpu.RefType(), plgpu.RefType(transforms), *(_SCALAR,) * len(where))
    scalars = (jnp.asarray(x, jnp.int32) for x in where)
    code = functools.partial(code, array.shape, tile.shape)
    plgpu.inline_mgpu(arg_types=types)(code)(array, tile, *scalars)


def _load_rows(shape, tile_shape, _, array, tile, *where):
    source, target, found = _pieces(shape, tile_shape, array, tile, *where)
    for from_, to, ok in found:
        _copy(source, target, ok, from_, to)
    nvvm.cp_async_commit_group()


def _store_rows(shape, tile_shape, _, array, tile, *where):
    words = ir.VectorType.get((4,), i32())
    target, source, found = _pieces(shape, tile_shape, array, tile, *where)
    byte = ir.IntegerType.get_signless(8)
    for to, from_, ok in found:
        here = mgpu.utils.getelementptr(source, [from_], byte)
        there = mgpu.utils.getelementptr(target, [to], byte)
        with mgpu.when(ok):
            llvm.store(llvm.load(words, here, alignment=16), there, alignment=16)


def _pieces(shape, tile_shape, array, tile, batch, head, first, end):
    """A thread's first addresses in global and in shared memory, and its pieces of 16 bytes.

    A piece: what to add to both addresses, in bytes, and whether it is inside the array.
    """
    element = ir.MemRefType(array.type).element_type
    batch, head, first, end = (x.registers.item() for x in (batch, head, first, end))
    (_, t, h, d), (rows, width) = shape, tile_shape
    line = ir.MemRefType(tile.type).shape[-1]  # elements of a row of 128 or 64 bytes
    across = line // 8
    at_once = _THREADS // across
    assert rows % at_once == 0, f"{rows} rows are not a multiple of {at_once}"
    add, multiply = arith.addi, arith.muli
    thread = arith.remui(mgpu.thread_idx(), constant(_THREADS))
    row, piece = (f(thread, constant(across)) for f in (arith.divui, arith.remui))
    turn = arith.divui(arith.remui(row, constant(8)), constant(8 // across))
    place = multiply(arith.xori(piece, turn), constant(8))
    inside = add(multiply(row, constant(line)), place)
    # Rows r and r + 8 stand in different tiles of 8 rows: row r at r // 8 * 8 * width.
    block = multiply(arith.divui(row, constant(8)), constant(8 * (width - line)))
    inside = add(inside, block)
    first_row = add(first, row)
    from_ = _index(batch, (t, first_row), (h, head), (d, multiply(piece, constant(8))))
    global_ = mgpu.utils.getelementptr(global_pointer(array), [from_], element)
    shared = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tile), [inside], element)
    found = []
    for r in range(0, rows, at_once):
        here = _less(add(first_row, constant(r)), end)
        for c in range(0, width, line):
            ok = here
            if c >= d:
                ok = arith.constant(ir.IntegerType.get_signless(1), 0)
            elif c + line > d:
                ok = arith.andi(here, _less(multiply(piece, constant(8)), constant(d - c)))
            found.append((2 * (r * h * d + c), 2 * (r * width + c * 8), ok))
    return global_, shared, found


def _load_line(shape, line_shape, _, array, target, batch, head, first):
    batch, head, first = (x.registers.item() for x in (batch, head, first))
    thread = arith.remui(mgpu.thread_idx(), constant(_THREADS))
    mine = arith.muli(thread, constant(4))
    (_, heads, t), f32 = shape, ir.F32Type.get()
    place = _index(batch, (heads, head), (t, arith.addi(first, mine)))
    source = mgpu.utils.getelementptr(global_pointer(array), [place], f32)
    target = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [mine], f32)
    with mgpu.when(_less(mine, constant(line_shape[0]))):
        _copy(source, target)


def _index(i, *others):
    """((i n + j) m + k) ... in 64 bits; others: (n, j), (m, k), ..."""
    i64 = ir.IntegerType.get_signless(64)
    i = arith.extsi(i64, i)
    for n, j in others:
        i = arith.muli(i, arith.constant(i64, ir.IntegerAttr.get(i64, n)))
        i = arith.addi(i, arith.extsi(i64, j))
    return i


def _copy(source, target, ok=None, from_=0, to=0):
    """Starts to copy 16 bytes, or to write zeros if not ok; from_, to: added to the addresses."""
    size = constant(16) if ok is None else arith.select(ok, constant(16), constant(0))
    target = llvm.ptrtoint(size.type, target)
    code = f"cp.async.cg.shared.global [$0 + {to}], [$1 + {from_}], 16, $2;"
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [target, source, size], code, "r,l,r", has_side_effects=True)


def i32():
    return ir.IntegerType.get_signless(32)


def constant(n: int):
    """A number of 32 bits, signed or not."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), n - 2**32 * (n >> 31 & 1)))


def _less(x, y):
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def _wait(copies: int | None, _):
    """copies: how many may still be under way; None: any number."""
    if copies is not None:
        nvvm.cp_async_wait_group(copies)
    mgpu.warpgroup_barrier()


def _as_left(dtype, _, x):
    # Both layouts have the same numbers in the same threads, in the same order.  They are rounded
    # here because MLIR would hand on unchanged registers in their old layout.
    x = x.astype(mgpu.utils.dtype_to_ir_type(dtype))
    layout = plgpu.Layout.MMA_LHS(dtype).to_mgpu()
    registers = x.registers.reshape(layout.registers_shape(x.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
