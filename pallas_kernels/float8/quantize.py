"""Casts to 8-bit floating point, scaled per tensor, in the array's order and transposed.

    s = the largest power of 2 with s max |x| <= L  (1 if x is 0),   values = cast(s x)

so x is about values / s.  A cast rounds to the nearest number, ties to even; L is 448 for e4m3 and
57344 for e5m2.  A power of 2 makes s x and values / s exact, and 1 / s exact in bfloat16, to which
XLA rounds it before a matmul.
Micikevicius et al. 2022, "FP8 Formats for Deep Learning", sections 3 and 4.

Two kernels, both bound by memory; XLA computes s between them:

    max of |x|    reads x; each block writes the maximum of its elements
    the cast      reads x; writes values and their transpose: for bfloat16, 4 bytes an element

A block of the cast has a tile of 64 x 64.  A thread reads four elements of each of four adjacent
rows, and packs the four values of a column into one word.  Shared memory, with swizzled rows,
transposes the words:

    x (four rows)    a0 b0 c0 ..        values    the same order
                     a1 b1 c1 ..
                     a2 b2 c2 ..        words     a0 a1 a2 a3 | b0 b1 b2 b3 | ..   one row of 16
                     a3 b3 c3 ..                  -> one column of the words of the transpose
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, dispatch, mosaic

LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
TILE = 64  # rows and columns of a block
_WORDS = TILE // 4  # words of a column
_OPTIONS = dict(warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
# A lane has 4 words: 16 bytes, which it stores at once without bank conflicts.
_ACROSS = plgpu.Layout.TILED(plgpu.Tiling(((8, TILE), (2, TILE), (4,))), **_OPTIONS)
# A warp has 8 words of 4 columns: 32 banks, and 32 bytes of 4 rows, which are whole sectors.
_DOWN = plgpu.Layout.TILED(plgpu.Tiling(((16, 8), (4, 8), (1,))), **_OPTIONS)
_EQUAL = plgpu.Layout.WG_STRIDED((128,), 1)  # of 128 equal numbers
_STEP = 4096  # elements that a block takes the maximum of at a time: 4 vectors a thread


class Cast(NamedTuple):
    """x in fp8 and the inverse of its scale; None for an array that is not needed any more."""

    values: Any  # (*rows, K)
    transposed: Any  # (K, *rows)
    inverse: Any  # 1 / s, float32


def saturated(x, dtype):
    """x in fp8: numbers beyond the limit become the limit, infinities NaN; also inside a kernel.

    A GPU's own conversion makes both the limit, XLA's on a CPU makes both NaN.
    """
    limit = LARGEST[jnp.dtype(dtype)]
    values = jnp.minimum(jnp.maximum(x, -limit), limit)
    return (values + 0 * x).astype(dtype)


def cast(x, dtype, kernel: bool, largest=None) -> Cast:
    """x in fp8, in both orders, by the kernels or by XLA; both are equal bit for bit.

    largest: max |x| if it is known, or an upper bound on it.  An infinity or a NaN in x makes 1 / s
    infinite, and so every product with it NaN.
    """
    return cast_and_sum(x, dtype, kernel, False, largest)[0]


def cast_and_sum(x, dtype, kernel: bool, sums: bool, largest=None) -> tuple[Cast, jax.Array | None]:
    """(`cast`, the sum of x's rows in float32 (K,), or None without `sums`)."""
    if largest is None:
        largest = named(_largest_by_kernel(x) if kernel else _largest(x))
    if kernel:
        (result,), totals = cast_results(_itself, [x], [largest], dtype, sums=sums)
        return result, totals[0] if sums else None
    scale, inverse = _scale(largest, dtype)
    values = saturated(x.astype(jnp.float32) * scale, dtype)
    # Without the barrier XLA on a GPU may cancel a cast and the cast back, and so the rounding.
    result = lax.optimization_barrier(Cast(values, jnp.moveaxis(values, -1, 0), inverse))
    return result, x.astype(jnp.float32).sum(tuple(range(x.ndim - 1))) if sums else None


def known_norm(row_norm):
    """The row_norm of an op as `largest` for `cast`; raises ValueError if it cannot be one."""
    if row_norm is None:
        return None
    if jnp.shape(row_norm):
        raise ValueError(f"row_norm has shape {jnp.shape(row_norm)}, but must be one number")
    if not isinstance(row_norm, jax.core.Tracer) and float(row_norm) < 0:
        raise ValueError(f"row_norm={row_norm} is negative")
    return lax.stop_gradient(jnp.float32(row_norm))


def _largest(x):
    """max |x|, infinite if x has an infinity or a NaN."""
    return _sizes(x).max(initial=0).astype(jnp.float32)


def _sizes(x):
    """|x|, with infinity for NaN, which XLA's maximum on a CPU may skip."""
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def norms(x, axis=-1):
    """(max |x|, the largest Euclidean norm along an axis), float32, in one pass; by XLA.

    The norm is overestimated where squares leave float32's range.
    """
    wide = x.astype(jnp.float32)
    largest, square = _sizes(wide).max(axis).max(), jnp.square(wide).sum(axis).max()
    # Squares below 1e-38 are lost, so a sum below 1e-30 may be far too small.
    plain = (square > 1e-30) & (square < jnp.inf)
    norm = jnp.where(plain, jnp.sqrt(square), largest * x.shape[axis] ** 0.5)
    return named(largest), named(norm)


def named(number):
    """The maximum over all devices inside shard_map, where scales belong to the whole array, named
    for jax.checkpoint: saving it spares a pass over the array.
    """
    of, mesh = jax.typeof(number).manual_axis_type, jax.sharding.get_abstract_mesh()
    axes = tuple(of.varying if dispatch.shard_map_why_not() else mesh.manual_axes)
    return checkpoint_name(lax.pmax(number, axes) if axes else number, "fp8_largest")


def _scale(largest, dtype):
    """(s, 1 / s) of an array with this max |x|; s is 0 if the maximum is infinite.

    Both come from the exponent's bits, so that all forms agree, also inside a kernel.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # `LARGEST` is 1.75 times a power of 2.
    top = math.frexp(LARGEST[jnp.dtype(dtype)])[1] - 1
    power = top + 127 - exponent - jnp.where(mantissa > 0x600000, 1, 0)
    power = jnp.where(largest == 0, 0, jnp.clip(power, -126, 126))  # s and 1 / s are normal
    to_float = lambda power: lax.bitcast_convert_type((power + 127) << 23, jnp.float32)
    finite = exponent < 255
    return jnp.where(finite, to_float(power), 0.0), jnp.where(finite, to_float(-power), jnp.inf)


# ---- kernels -----------------------------------------------------------------------------------


_itself = lambda x: (x,)


@jax.jit(static_argnames=("tile", "dtype", "sums", "name", "approx"))  # lowered once per shape
def cast_results(
    tile, arrays, largest, dtype, *, rows=(), sums=False, name="quantize_fp8", approx=False
):
    """Casts the results of tile(*blocks) of whole arrays: (a list of Cast, a list of sums).

    tile: computes one or more blocks in float32, element by element, inside the kernel.
    largest: for each result an upper bound on |result|.
    rows: arrays of one number a row, which tile gets after the blocks, as blocks of equal columns.
    sums: the second list has the sum of the first result over the rows, float32 (K,).
    approx: exp in fewer instructions, see `elementwise` in activations.
    """
    x = arrays[0]
    height, columns, n = x.size // x.shape[-1], x.shape[-1], len(largest)
    all_values, all_words, all_inverse, all_sums = mosaic.kernel(
        functools.partial(_cast, tile),
        name=name,
        out_type=[
            [jax.ShapeDtypeStruct((height // 4, 4, columns), dtype)] * n,
            [jax.ShapeDtypeStruct((columns, height // 4), jnp.int32)] * n,
            [jax.ShapeDtypeStruct((1,), jnp.float32)] * n,
            [jax.ShapeDtypeStruct((height // TILE, columns), jnp.float32)] * sums,
        ],
        scratch_types=dict(smems=[mosaic.tiled(_WORDS, TILE, dtype=jnp.int32)] * n),
        **mosaic.grid(row=height // TILE, column=columns // TILE),
        compiler_params=plgpu.CompilerParams(approx_math=approx),
    )(
        [a.reshape(height // 4, 4, columns) for a in arrays],
        [a.reshape(height // 4, 4) for a in rows],
        [one.reshape(1) for one in largest],
    )

    def result(values, words, inverse):
        transposed = lax.bitcast_convert_type(words, dtype).reshape(columns, *x.shape[:-1])
        return Cast(values.reshape(x.shape), transposed, inverse.reshape(()))

    results = list(map(result, all_values, all_words, all_inverse))
    return results, [one.sum(0) for one in all_sums]


def _largest_by_kernel(x):
    """max |x|, as `_largest`."""
    blocks = x.size // _STEP
    steps = next(n for n in (16 // x.dtype.itemsize, 4, 2, 1) if blocks % n == 0)  # registers
    return _largest(maxima(_itself, [x], 1, "fp8_maximum", steps))


@jax.jit(static_argnames=("tile", "results", "name", "steps"))
def maxima(tile, arrays, results: int, name: str, steps: int = 1):
    """The largest |result| of tile(*blocks) in each block: (results, blocks) float32.

    tile: computes the results in float32, element by element, inside the kernel.
    steps: how many times 4096 elements a block has.
    """
    flat = [a.reshape(-1, steps, _STEP) for a in arrays]
    return mosaic.kernel(
        functools.partial(_maxima, tile),
        name=name,
        out_type=jax.ShapeDtypeStruct((results, len(flat[0])), jnp.float32),
        **mosaic.grid(block=len(flat[0])),
        compiler_params=plgpu.CompilerParams(approx_math=arrays[0].dtype.itemsize == 2),
    )(flat)


def _maxima(tile, sources, out_ref):
    """A block takes the maxima of its steps, element by element, and then over the elements."""
    block, (_, steps, _) = lax.axis_index("block"), sources[0].shape
    layout = plgpu.Layout.WG_STRIDED((_STEP,), 16 // sources[0].dtype.itemsize)  # 16-byte loads
    load = lambda i: [mosaic.load(ref.at[block, i], layout) for ref in sources]
    results = [list(map(abs, tile(*load(i)))) for i in range(steps)]
    for k, parts in enumerate(zip(*results, strict=True)):
        out_ref[k, block] = mosaic.folded(jnp.maximum, list(parts)).max()


def _cast(tile, sources, rows, largest, all_values, all_words, all_inverse, all_sums, *, smems):
    """A block casts four rows at a time, and transposes the words that hold the values."""
    row, column = lax.axis_index("row"), lax.axis_index("column")
    # From the end: the elements that the maximum read last may still be in the L2 cache.
    row = all_values[0].shape[0] // _WORDS - 1 - row
    fours, columns = pl.ds(row * _WORDS, _WORDS), pl.ds(column * TILE, TILE)
    load = lambda ref, i: mosaic.load(ref.at[fours, i, columns], _ACROSS)
    # One number of each row, in all its columns.
    numbers = lambda ref, i: mosaic.read(ref.at[fours, i], _ACROSS.reduce(1))
    along = lambda ref, i: mosaic.along(numbers(ref, i), (_WORDS, TILE), 0)
    blocks = [[load(a, i) for a in sources] + [along(a, i) for a in rows] for i in range(4)]
    # Every block computes the scales: XLA would take two kernels for each.
    everywhere = lambda ref: lax.broadcast(ref[0], (_WORDS, TILE))  # one register
    dtype = all_values[0].dtype
    scales = [_scale(everywhere(ref), dtype)[0] for ref in largest]

    words, total = [jnp.int32(0)] * len(all_values), jnp.float32(0)
    for i, block in enumerate(blocks):
        results = tile(*block)
        for k, (result, values_ref) in enumerate(zip(results, all_values, strict=True)):
            values = saturated(result * scales[k], dtype)
            mosaic.store(values_ref.at[fours, i, columns], values)
            byte = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.int32)
            words[k] |= byte << (8 * i)
        if all_sums:
            total += results[0]
    for word, smem in zip(words, smems, strict=True):
        smem[...] = word
    ampere.meet()
    for words_ref, smem in zip(all_words, smems, strict=True):
        turned = plgpu.load(smem.transpose((1, 0)), layout=_DOWN)
        mosaic.store(words_ref.at[columns, fours], turned)
    for sums_ref in all_sums:
        mosaic.store(sums_ref.at[row, columns], total.sum(0))

    @pl.when((row == 0) & (column == 0))
    def _():
        for one_ref, inverse_ref in zip(largest, all_inverse, strict=True):
            one = plgpu.layout_cast(lax.broadcast(one_ref[0], (128,)), _EQUAL)
            inverse_ref[0] = _scale(one, dtype)[1].max()


def column_numbers():
    """The columns of a block, inside `tile`."""
    inside = plgpu.broadcasted_iota(jnp.int32, (_WORDS, TILE), 1, layout=_ACROSS)
    return inside + lax.axis_index("column") * TILE
