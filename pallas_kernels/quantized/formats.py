"""Weights of 8, 4, 2 or 1 bits: quantize, dequantize, and the packed form that the kernel reads.

    w' = level(code) s + offset        s (and offset) for each column n and each group of rows k

w is a Linear's matrix (K, N), (in, out).  A code of b bits has the level

    int, 8 and 4 bits   code - 2^(b-1); symmetric weights do not use code 0
    int, 2 bits         code - 1.5
    int, 1 bit          2 code - 1
    fp8                 the e4m3 number with these bits, up to 448
    2:4                 as int, for the two largest |w| of four consecutive k; the others are 0

Scales and offsets are bfloat16, and codes are chosen for their rounded values.  s is the best of
`_CLIPS`: it has the least squared error in its group.  docs/decoding.md bounds the errors.

The kernels read this packed form, in tiles of 16 columns n and "planes" of 16 consecutive k:

    words (N/16, steps, parts, 32, 4), int32; 256/b of k in a step, one part; steps are 4 i
    scales, offsets (N/16, groups, 8, 2), of n = r and n = r + 8 together

Each of a warp's 32 lanes holds its four words as it holds left operands of mma and wgmma, so no
lane needs another's data, and a warp reads 512 bytes in a row.  Lane 4 r + j has four pairs a = 0
.. 3 of each plane: n = r + 8 (a mod 2), and k = 2 j + 8 (a div 2) and the next k.  The pairs of all
planes fill the words, 16/b pairs a word: the first codes go to the low half, from its lowest bits
on, the second codes to the high half.  docs/decoding.md has a picture.

2:4 has 256 k in a step, and one part more than its values need.  A step has 4 blocks p of 16 fours
c (k = 64 p + 4 c).  Planes 2 p and 2 p + 1 of the values hold the first and the second kept weight
of each c; plane p of the last part holds 4 bits: the first kept place + 4 times the second.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels import mosaic
from pallas_kernels.options import checked, own_settings

Format = Literal["int", "fp8", "2:4"]
COLUMNS, LANES, WORDS = 16, 32, 4  # n and lanes of a tile, and words of a lane
TURN = 4  # steps that a warpgroup's warps take at once
_CLIPS = np.linspace(0.2, 1.0, 33)  # s relative to the s that clips nothing
E4M3_MAX = 448.0
_MAGIC = 0x6A6C7132  # "jlq2": the first number of a header
_STATIC = {"static": True}  # a pytree field that is not an array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # == of arrays is no bool
class QuantizedWeight:
    """A (K, N) weight that `quantize` packed: a pytree of the arrays described above."""

    words: Array
    scales: Array
    offsets: Array | None  # None: symmetric
    shape: tuple[int, int] = dataclasses.field(metadata=_STATIC)
    bits: int = dataclasses.field(metadata=_STATIC)
    group: int | None = dataclasses.field(metadata=_STATIC)  # None: one scale for each column
    format: Format = dataclasses.field(metadata=_STATIC)

    @property
    def step(self) -> int:
        """The number of k in one step."""
        return 256 if self.format == "2:4" else 256 // self.bits

    @property
    def parts(self) -> int:
        return self.bits // 2 + 1 if self.format == "2:4" else 1

    @property
    def steps(self) -> int:
        return mosaic.cdiv(self.shape[0], self.step * TURN) * TURN

    @property
    def nbytes(self) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))

    @own_settings()
    def plain(self) -> "PlainWeight":
        """The weight for products in which x is quantised, too; each call unpacks it anew.

        Raises ValueError unless the weight is symmetric, int8 or fp8, with group=None.
        """
        self.check()
        if (self.bits, self.group, self.offsets) != (8, None, None) or self.format == "2:4":
            raise ValueError(
                f"a weight with bits={self.bits}, group={self.group}, format={self.format!r} has no"
                " plain form: quantize with bits=8, group=None, symmetric=True, format int or fp8"
            )
        k, n = self.shape
        codes = _planes(self.words, 8)[:k, :n].T.astype(jnp.uint8)
        if self.format == "int":
            codes = lax.bitcast_convert_type(codes ^ 128, jnp.int8)  # code - 128
        else:
            codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return PlainWeight(codes, _across(self, self.scales)[0, :n])

    def check(self) -> None:
        """Raises ValueError unless the arrays fit the format; needs only their shapes."""
        _check_format(self.shape, self.bits, self.group, self.offsets is None, self.format)
        columns = mosaic.cdiv(self.shape[1], COLUMNS)
        groups = mosaic.cdiv(self.steps * self.step, self.group) if self.group else 1
        small = ((columns, groups, COLUMNS // 2, 2), jnp.bfloat16)
        expected = {"words": ((columns, self.steps, self.parts, LANES, WORDS), jnp.int32)}
        expected |= {"scales": small} | ({} if self.offsets is None else {"offsets": small})
        for name, (shape, dtype) in expected.items():
            a = getattr(self, name)
            # A test's oracle has scales of float64.
            if a.shape != shape or a.dtype not in (dtype, jnp.float64):
                raise ValueError(
                    f"{name} of a {self.shape} weight is {a.dtype} {a.shape}, not"
                    f" {jnp.dtype(dtype)} {shape}: quantize the weight again"
                )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The arrays and a header, to save under any names; `from_arrays` reads them."""
        arrays = {"words": self.words, "scales": self.scales, "offsets": self.offsets}
        arrays = {name: np.asarray(a) for name, a in arrays.items() if a is not None}
        kind = get_args(Format).index(self.format)
        header = [_MAGIC, *self.shape, self.bits, self.group or 0, kind, _checksum(arrays)]
        return arrays | {"header": np.array(header, np.int32)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array | np.ndarray]) -> "QuantizedWeight":
        """Reads what `to_arrays` returned; raises ValueError, in one line, if it is damaged."""
        header = [int(number) for number in np.ravel(arrays.get("header", []))]
        formats = get_args(Format)
        if len(header) != 7 or header[0] != _MAGIC or header[5] not in range(len(formats)):
            raise ValueError(f"the header {header} is not a quantised weight's")
        _, k, n, bits, group, kind, checksum = header
        names = ["words", "scales", *(["offsets"] if "offsets" in arrays else [])]
        what = f"the packed {k} x {n} weight"
        if missing := [name for name in names if name not in arrays]:
            raise ValueError(f"{what} has no {missing[0]}")
        found = {name: np.asarray(arrays[name]) for name in names}
        if (actual := _checksum(found)) != checksum:
            raise ValueError(f"{what} is damaged: its checksum is {actual}, not {checksum}")
        words, scales, offsets = (*map(jnp.asarray, found.values()), None)[:3]
        weight = cls(words, scales, offsets, (k, n), bits, group or None, formats[kind])
        weight.check()
        return weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # == of arrays is no bool
class PlainWeight:
    """A (K, N) weight w' = codes s that is not packed; a pytree, made by `QuantizedWeight.plain`.

    codes: (N, K), int8 or float8_e4m3fn: cuBLASLt reads both operands along k.
    scales: (N,) float32.
    """

    codes: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return k, n

    def check(self) -> None:
        """Raises ValueError unless the arrays fit each other."""
        codes, scales = self.codes, self.scales
        allowed = (jnp.int8, jnp.float8_e4m3fn)
        if codes.ndim != 2 or codes.dtype not in allowed or scales.shape != codes.shape[:1]:
            raise ValueError(
                f"a plain weight has int8 or float8_e4m3fn codes (N, K) and scales (N,), not"
                f" {codes.dtype} {codes.shape} and {scales.shape}"
            )
        if codes.dtype == jnp.int8 and codes.shape[1] > 2**17:
            raise ValueError(f"K={codes.shape[1]} is more than {2**17}: sums may leave int32")


@checked
def quantize(
    w: Float[Array, "K N"],
    *,
    bits: int = 4,
    group: int | None = 128,
    symmetric: bool = True,
    format: Format = "int",
) -> QuantizedWeight:
    """Packs a Linear's matrix (in, out) into `bits` bits a weight.

    group: 32, 64 or 128 consecutive k share a scale; None: all of a column.
    symmetric: without an offset for each group; formats fp8 and 2:4 have none.
    format: "int" of 8, 4, 2 or 1 bits; "fp8" (e4m3) of 8; "2:4" of 8 or 4, in groups of 64 or more.
    Weights that are not finite make their group NaN.  Raises ValueError for other options, or where
    K is not a multiple of the group.
    """
    mosaic.check_axes("K N", w=w)
    _check_format(w.shape, bits, group, symmetric, format)
    of = jax.typeof(w).sharding
    if any(of.spec):  # JAX cannot pack an array that is split over explicit mesh axes
        w = jax.sharding.reshard(w, of.update(spec=(None, None)))
    return _quantize(w, bits, group, symmetric, format)


@checked
def dequantize(weight: QuantizedWeight | PlainWeight, dtype=jnp.float32) -> Float[Array, "K N"]:
    """w' = level s + offset, computed in float32 (float64 for it) and rounded to dtype."""
    check_packed(weight)
    if isinstance(weight, PlainWeight):
        w = weight.codes.T.astype(weight.scales.dtype) * weight.scales
    else:
        w = unpack(weight.words, weight.bits, weight.format) * _across(weight, weight.scales)
        if weight.offsets is not None:
            w = w + _across(weight, weight.offsets)
    return mosaic.rounded(w[: weight.shape[0], : weight.shape[1]], dtype).astype(dtype)


def check_packed(weight) -> None:
    """Raises ValueError unless the weight is packed or plain, and undamaged."""
    if not isinstance(weight, QuantizedWeight | PlainWeight):
        raise ValueError(f"weight is {type(weight).__name__}, not packed: quantize() packs arrays")
    weight.check()


def _check_format(shape, bits, group, symmetric, format) -> None:
    """Raises ValueError for options or shapes that no weight has."""
    widths = {"int": (8, 4, 2, 1), "fp8": (8,), "2:4": (8, 4)}
    if format not in widths:
        raise ValueError(f"format={format!r} is not int, fp8 or 2:4")
    if bits not in widths[format]:
        allowed = " or ".join(map(str, widths[format]))
        raise ValueError(f"bits={bits} is not {allowed}, the width of format {format}")
    groups = (64, 128, None) if format == "2:4" else (32, 64, 128, None)
    if group not in groups:
        raise ValueError(f"group={group} is not one of {groups} for format {format}")
    if not symmetric and format != "int":
        raise ValueError(f"format {format} has no offsets: pass symmetric=True")
    (k, n), multiple = shape, group or (4 if format == "2:4" else 1)
    if not k or not n:
        raise ValueError(f"K={k}, N={n}: the weight has no elements")
    if k % multiple:
        what = "group" if group else "four weights of 2:4"
        raise ValueError(f"K={k}, N={n}: K is not a multiple of the {what}, {multiple}")


@jax.jit(static_argnums=(1, 2, 3, 4))
def _quantize(w, bits, group, symmetric, format):
    shape, w = w.shape, w.astype(jnp.float32)
    kept, places = _largest_two(w) if format == "2:4" else (None, None)
    by_group = lambda a: a.reshape(-1, group or shape[0], shape[1])
    w, chosen = by_group(w), None if kept is None else by_group(kept)
    # A power of 2: in its units no range, sum or square of a group leaves float32.
    unit = lax.reduce_precision(jnp.abs(w).max(1), 8, 0).clip(2.0**-126, 2.0**126)
    unit += (0 * w).sum(1)  # NaN if one of them is not finite; XLA's max on a CPU may lose it
    w, unit = w / unit[:, None], unit.astype(jnp.bfloat16)
    s, offset = _scales(w, chosen, bits, symmetric, format)
    codes = _encode(w, s, offset, bits, format).reshape(shape)
    words = _pack(codes, bits) if places is None else _pack_pairs(codes, places, bits)
    padded = words.shape[1] * (256 if places is not None else 256 // bits)
    groups = mosaic.cdiv(padded, group) if group else 1

    def by_columns(a):
        a = jnp.pad(a, ((0, groups - a.shape[0]), (0, -shape[1] % COLUMNS)))
        return a.reshape(groups, -1, 2, COLUMNS // 2).transpose(1, 0, 3, 2)

    offsets = None if offset is None else by_columns(offset * unit)
    return QuantizedWeight(words, by_columns(s * unit), offsets, shape, bits, group, format)


def _largest_two(w):
    """Whether each weight is one of the two largest of its four, and their places (K/4, 2, N)."""
    order = jnp.argsort(-jnp.abs(w.reshape(-1, 4, w.shape[1])), axis=1, stable=True)
    places = jnp.sort(order[:, :2], axis=1)
    return (jnp.arange(4)[:, None, None] == places[:, None]).any(2).reshape(w.shape), places


def _scales(w, kept, bits, symmetric, format):
    """s and offset (None if symmetric), (groups, N) bfloat16, of weights (groups, group, N)."""
    given = w if kept is None else jnp.where(kept, w, 0)
    low, high = levels(jnp.array([1 if symmetric and bits >= 4 else 0, 2**bits - 1]), bits, "int")
    if symmetric:
        middle, reach = None, jnp.abs(given).max(1) / (E4M3_MAX if format == "fp8" else high)
    else:
        middle, reach = (w.max(1) + w.min(1)) / 2, (w.max(1) - w.min(1)) / (high - low)
    if format == "fp8" or (symmetric and bits == 1):
        s = reach if format == "fp8" else jnp.abs(w).mean(1)
        return s.astype(jnp.bfloat16), None

    def at(clip):
        s = (reach * clip).astype(jnp.bfloat16)
        if symmetric:
            return s, None
        return s, (middle - s.astype(jnp.float32) * (low + high) / 2).astype(jnp.bfloat16)

    def error(clip):
        s, offset = at(clip)
        off = _decode(_encode(w, s, offset, bits, format), s, offset, bits, format) - w
        return jnp.sum(jnp.square(off if kept is None else jnp.where(kept, off, 0)), 1)

    clips = jnp.asarray(_CLIPS, jnp.float32)
    return at(clips[jnp.argmin(lax.map(error, clips), 0)])


def _encode(w, s, offset, bits, format):
    """Codes, uint32, of the nearest levels of weights (groups, group, N)."""
    s = s.astype(jnp.float32)[:, None]
    v = (w if offset is None else w - offset.astype(jnp.float32)[:, None]) / jnp.where(s == 0, 1, s)
    if format == "fp8":
        v = jnp.clip(v, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(v, jnp.uint8).astype(jnp.uint32)
    if bits == 1:
        return (v > 0).astype(jnp.uint32)
    middle = 2 ** (bits - 1) - (0.5 if bits == 2 else 0)
    low = 1 if offset is None and bits > 2 else 0
    return jnp.clip(jnp.round(v + middle), low, 2**bits - 1).astype(jnp.uint32)


def _decode(codes, s, offset, bits, format):
    w = levels(codes, bits, format) * s.astype(jnp.float32)[:, None]
    return w if offset is None else w + offset.astype(jnp.float32)[:, None]


def levels(codes, bits, format):
    """The levels, float32, of integer codes."""
    if format == "fp8":
        e4m3 = lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
        return e4m3.astype(jnp.float32)
    codes = codes.astype(jnp.float32)
    return 2 * codes - 1 if bits == 1 else codes - (2 ** (bits - 1) - (0.5 if bits == 2 else 0))


def _pack(codes, bits, parts=1):
    """Words (N/16, steps, parts, 32, 4) of codes (K, N), uint32; zeros up to whole steps."""
    planes = 16 // bits  # per part; also the pairs per word
    codes = mosaic.pad_axis(mosaic.pad_axis(codes, 0, TURN * 16 * planes * parts), 1, COLUMNS)
    # k = (step, part, plane, 8, j, half) and n = (tile, 8, r)
    codes = codes.reshape(-1, parts, planes, 2, 4, 2, codes.shape[1] // COLUMNS, 2, 8)
    codes = codes.transpose(6, 0, 1, 8, 4, 2, 3, 7, 5)
    codes = codes.reshape(*codes.shape[:3], LANES, WORDS, planes, 2)
    words = jnp.sum(codes << _shifts(bits), (-2, -1), dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def _shifts(bits):
    """The shifts of a word's pairs, and of both codes of a pair."""
    pairs = jnp.arange(16 // bits, dtype=jnp.uint32) * bits
    return pairs[:, None] + jnp.array([0, 16], jnp.uint32)


def _pack_pairs(codes, places, bits):
    """Words of 2:4: the kept codes and their places (K/4, 2, N)."""
    pairs = jnp.take_along_axis(codes.reshape(-1, 4, codes.shape[1]), places, 1)
    # For every 16 fours the first kept codes, then the second ones.
    pairs = mosaic.pad_axis(pairs, 0, 16).reshape(-1, 16, *pairs.shape[1:])
    values = pairs.swapaxes(1, 2).reshape(-1, codes.shape[1])
    places = (places[:, 0] + 4 * places[:, 1]).astype(jnp.uint32)
    return jnp.concatenate([_pack(values, bits, parts=bits // 2), _pack(places, 4)], 2)


def _planes(words, bits):
    """The codes (K, N) that `_pack` packed, with their padding."""
    tiles, steps, parts = words.shape[:3]
    words = lax.bitcast_convert_type(words, jnp.uint32)[..., None, None]
    codes = (words >> _shifts(bits)) & (2**bits - 1)
    codes = codes.reshape(tiles, steps, parts, 8, 4, 16 // bits, 2, 2, 2)
    return codes.transpose(1, 2, 5, 6, 4, 8, 0, 7, 3).reshape(-1, tiles * COLUMNS)


def unpack(words, bits, format):
    """The levels (K, N), float32, of words, with their padding; 0 where 2:4 keeps no weight."""
    if format != "2:4":
        return levels(_planes(words, bits), bits, format)
    values = levels(_planes(words[:, :, :-1], bits), bits, format)
    n = values.shape[-1]
    values = values.reshape(-1, 2, 16, n).swapaxes(1, 2).reshape(-1, 2, n)
    places = _planes(words[:, :, -1:], 4)
    at = jnp.arange(4)[:, None]
    first, second = (p[:, None] == at for p in (places & 3, places >> 2))
    pick = jnp.where(second, values[:, 1:], 0)
    return jnp.where(first, values[:, :1], pick).reshape(-1, n)


def _across(weight, a):
    """Scales or offsets of every weight, padding included."""
    a = a.transpose(1, 0, 3, 2).reshape(a.shape[1], -1).astype(mosaic.stat_dtype(a.dtype))
    k = weight.steps * weight.step
    return jnp.repeat(a, weight.group or k, 0)[:k]


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), checksum)
    return checksum & 0x7FFFFFFF  # the header has 32 signed bits
