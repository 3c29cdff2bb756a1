"""Rotary position embedding (RoPE) of queries and keys, in one kernel.

    angle[t, i] = position[t] freq[i],   freq[i] = theta^(-2 i / D),   i < D/2
    (a, b) -> (a cos - b sin, b cos + a sin)

Su et al. 2021, "RoFormer", equation 34.  Pair i is (x[i], x[i + D/2]) in the layout "half" (Hugging
Face), and (x[2 i], x[2 i + 1]) in "interleaved" (Meta), which runs on XLA.  The backward pass
rotates by the negative angle: it uses the same kernel and saves only the positions.

Each block computes cos and sin of its positions in registers and uses them for all of its heads,
without a table in memory.  The frequencies and the angle are float32, as in Hugging Face.  The
angle's rounding error, up to p 6e-8 at position p, is part of the function and not an error of the
kernel: the reference uses the same float32 angle even in float64.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked, with_gradient
from pallas_kernels.packed import Packed, operands_of, shapes, split

Layout = Literal["half", "interleaved"]

# Heads whose loads a thread issues before it computes, if they divide the heads: 2.75 and 2.81 TB/s
# on an H100, where a copy reaches 3.03; with 2 or 4 about 2.72 (docs/performance.md).
_IN_FLIGHT = 8


class RopeScaling(NamedTuple):
    """Llama 3.1's scaling of long wavelengths; the defaults are 3.1 8B's.

    With O for original_max_position_embeddings, wavelengths up to O / high_freq_factor stay the
    same, wavelengths above O / low_freq_factor grow by `factor`, and the others are interpolated.
    With an attention_factor they are interpolated by index, as in YaRN (Peng et al. 2023).
    `rope` leaves q and k unscaled: pass attention's scale=attention_factor**2 / sqrt(D).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float | None = None


@checked
def rope(
    q: Float[Array, "B T H D"] | Packed,
    k: Float[Array, "B T K D"] | None,
    positions: Integer[ids.Ids, "*rows T"],
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    layout: Layout = "half",
    implementation: dispatch.Implementation | None = None,
) -> Any:
    """Rotates pair n of q and k by position theta^(-2 n / D) (Su et al. 2021), in float32: (q, k).

    q: or a `Packed` of q, k and v, with k=None; the result is then a `Packed`, q and k rotated.
        The kernel rotates them in place where nothing else uses the array.
    positions: (B, T), or (T,) for all batch rows; exact up to 2^24; without a gradient.
    theta: base of the frequencies.  scaling: scales them, if given.
    layout: how pairs are stored, "half" or "interleaved".
    The results have the inputs' dtypes.
    """
    operands = operands_of(q, dict(k=k), "qkv")
    of_q, of_k, *_ = shapes(operands)
    positions = _check(of_q, of_k, positions)
    options = dict(theta=theta, scaling=scaling, layout=layout)
    return dispatch.run("rope", FORMS, implementation, operands, positions, **options)


def frequencies(d: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> np.ndarray:
    """The d/2 frequencies in radians a position: computed in float64, rounded once to float32."""
    if not theta > 2**-30:  # the angle of a far position might leave float32
        raise ValueError(f"theta={theta} must be more than 2^-30")
    freq = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if scaling is not None:
        factor, low, high, original, yarn = scaling
        if not factor > 2**-30:
            raise ValueError(f"factor={factor} must be more than 2^-30")
        if not low < high:
            raise ValueError(f"low_freq_factor={low} must be less than high_freq_factor={high}")
        keep = (original * freq / (2 * math.pi) - low) / (high - low)  # 1: unchanged, 0: scaled
        if yarn is not None:  # between whole pairs, even beyond the last one
            turns = original / (2 * math.pi) * theta ** (-np.arange(0, 2 * d, 2) / d)
            first, last = max((turns >= high).sum() - 1, 0), (turns[:-1] > low).sum()
            keep = 1 - (np.arange(d // 2) - first) / (last - first or 0.001)
        keep = np.clip(keep, 0, 1)
        freq = (1 - keep) * freq / factor + keep * freq
    return freq.astype(np.float32)


def rope_reference(q, k, positions, *, theta=10000.0, scaling=None, layout="half"):
    """The formula in jnp, in float32 (float64 for float64, with the same float32 angle)."""

    def rotate(x):
        dtype, pairs = mosaic.stat_dtype(x.dtype), x.shape[-1] // 2
        cos, sin = cos_sin(positions[..., None], x.shape[-1], theta, scaling, dtype)
        pair, shape = (-2, (2, pairs)) if layout == "half" else (-1, (pairs, 2))
        a, b = jnp.moveaxis(x.astype(dtype).reshape(*x.shape[:-1], *shape), pair, 0)
        y = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=pair)
        return y.reshape(x.shape).astype(x.dtype)

    return rotate(q), rotate(k)


def cos_sin(positions, d: int, theta, scaling, dtype=jnp.float32):
    """(cos, sin) of the angles, (..., D/2) for positions (...)."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies(d, theta, scaling)
    return jnp.cos(angle.astype(dtype)), jnp.sin(angle.astype(dtype))


def _in_jnp(operands, positions, **options):
    q, k, *v = split(operands)
    rotated = rope_reference(q, k, positions, **options)
    if not v:
        return rotated
    flat = [x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (*rotated, *v)]
    return dataclasses.replace(operands, array=jnp.concatenate(flat, axis=2))


def why_not(operands, positions, *, layout, **options) -> str | None:
    q, k, *v = shapes(operands)
    if v and q.shape[3] != v[0].shape[3]:
        return f"q has D={q.shape[3]} and v {v[0].shape[3]}, so heads are not one axis"
    if layout != "half":
        return f"layout={layout!r} is not half"
    reason = mosaic.unsupported_dtype(q=q, k=k) or mosaic.empty(q=q, k=k)
    return reason or mosaic.too_many(**{"B T": q.shape[0] * q.shape[1]})


def why_slower(operands, positions, **options) -> str | None:
    """Why XLA's form is faster than the kernel (tiles fit the head or the rows badly), or None.

    On an H100 (JAX 0.11.2, benchmark --untuned) the kernel had 0.15 to 0.39 of XLA's speed with
    tiles of 1 and 8 pairs, 0.53 with rows left over, and 1.86 with 16 pairs and no row left over.
    """
    q, k, *_ = shapes(operands)
    b, t, _, d = q.shape
    if t == 1:  # in generation the number of kernels decides the time
        return "XLA fuses the rotation of one position with other ops"
    tile = _tile(d // 2, max(q.dtype.itemsize, k.dtype.itemsize))
    if tile.pairs < 16:
        return f"tiles of {tile.pairs} pairs, for D={d}, are smaller than 16 pairs"
    if b * t % tile.rows:
        return f"B T={b * t} is not a multiple of {tile.rows}, the positions of a tile"
    return None


def _check(q, k, positions) -> jax.Array:
    """The positions in the dtype that the kernels read; raises ValueError for what does not fit."""
    mosaic.check_axes("B T H D", q=q, k=k)
    b, t, _, d = q.shape
    if k.shape[:2] != (b, t) or k.shape[3] != d:
        raise ValueError(f"q {q.shape} and k {k.shape} differ in more than their heads (axis 2)")
    if d % 2:
        raise ValueError(f"D={d} is odd; RoPE rotates pairs")
    positions = ids.positions(positions)
    if positions.shape not in ((t,), (b, t)):
        raise ValueError(f"positions have shape {positions.shape}, neither ({t},) nor ({b}, {t})")
    return positions


class _PairTile(NamedTuple):
    """A block's tile of one head, and how its 128 threads hold it in registers."""

    rows: int  # positions
    pairs: int
    layout: Any  # of the first or the second numbers of the pairs, (rows, pairs)


def _tile(pairs: int, itemsize: int) -> _PairTile:
    """Puts as many lanes as fit along a head's pairs, and the others along the positions."""
    vec = math.gcd(pairs, 16 // itemsize)  # 16-byte loads, if they divide the width
    lanes = math.gcd(pairs // vec, 16)
    rows, width = 32 // lanes, lanes * vec  # of each of the 4 warps
    if lanes == 1:  # the same layout without its dimension of size 1, which Mosaic rejects
        layout = plgpu.Layout.TILED(plgpu.Tiling(((4 * rows, vec), (rows, vec))), (-4,), (-2,), -1)
    else:
        tiling = plgpu.Tiling(((4 * rows, width), (rows, width), (vec,)))
        layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    return _PairTile(4 * rows, width, layout)


@jax.jit(static_argnums=(0, 1, 2), static_argnames="backward")
def _rotate(theta, scaling, in_place, arrays, positions, *, backward=False):
    """Rotates every array (B, T, heads, D) by its angles, or by the negative angles.

    in_place: 0, or how many heads of a single array to rotate in place; the others stay.
    """
    b, t, _, d = arrays[0].shape
    n = b * t
    tile = _tile(d // 2, max(x.dtype.itemsize for x in arrays))
    # Kernels do not check bounds, so arrays that do not fill the tiles are copied.
    pad = lambda x: mosaic.pad_axis(x, 0, tile.rows)
    flat = [pad(x.reshape(n, x.shape[2], 2, d // 2)) for x in arrays]
    if positions.ndim == 2 or t % tile.rows:  # else all batch rows share the positions
        positions = pad(jnp.broadcast_to(positions, (b, t)).reshape(n))
    heads = [in_place or x.shape[1] for x in flat]
    body = functools.partial(_body, tile, heads, backward)
    call = lambda body, out_type: mosaic.kernel(
        body,
        name="rope_backward" if backward else "rope_forward",
        out_type=out_type,
        **mosaic.grid(row=len(flat[0]) // tile.rows, column=d // 2 // tile.pairs),
    )
    given = frequencies(d, theta, scaling), positions
    if in_place:
        turn = call(lambda freq, at, x: body(freq, at, [x], [x]), [])
        results = [mosaic.in_place(lambda x, *given: turn(*given, x), flat[0], *given)]
    else:
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
        (results,) = call(body, [like])(*given, flat)
    return tuple(y[:n].reshape(x.shape) for x, y in zip(arrays, results, strict=True))


def _body(tile: _PairTile, heads, backward, freq_ref, positions_ref, sources, targets):
    """A block rotates all heads at one tile of positions."""
    # Compute the sines and cosines of the angles.
    row = lax.axis_index("row") * tile.rows
    rows = pl.ds(row, tile.rows)
    columns = pl.ds(lax.axis_index("column") * tile.pairs, tile.pairs)
    shape = tile.rows, tile.pairs
    at = pl.ds(lax.rem(row, jnp.int32(positions_ref.shape[0])), tile.rows)
    position = mosaic.load(positions_ref.at[at], tile.layout.reduce(1))
    freq = mosaic.load(freq_ref.at[columns], tile.layout.reduce(0))
    angle = mosaic.along(position, shape, 0) * mosaic.along(freq, shape, 1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if backward:
        sin = -sin

    # Rotate several heads at a time.
    for x_ref, y_ref, count in zip(sources, targets, heads, strict=True):
        turn = functools.partial(_rotate_heads, tile, x_ref, y_ref, rows, columns, cos, sin)
        together = math.gcd(count, _IN_FLIGHT)
        pl.loop(0, count, step=together)(lambda i, turn=turn, n=together: turn(i, n))


def _rotate_heads(tile: _PairTile, x_ref, y_ref, rows, columns, cos, sin, head, count):
    """Rotates `count` heads from `head` on: loads all, then computes and stores each."""
    half = lambda ref, i, j: ref.at[rows, head + i, j, columns]
    pairs = [[mosaic.load(half(x_ref, i, j), tile.layout) for j in (0, 1)] for i in range(count)]
    # A fused multiply-add leaves one of two products unrounded.  The barrier fixes which one,
    # wherever the heads lie, so a Packed gets the same bits as separate operands.
    exact = lambda x, y: lax.optimization_barrier(x * y)
    for i, (a, b) in enumerate(pairs):
        turned = a * cos - exact(b, sin), b * cos + exact(a, sin)
        for j, value in enumerate(turned):
            mosaic.store(half(y_ref, i, j), value)


_rope = with_gradient(
    lambda *args: (_rotate(*args), args[-1]),
    lambda *args: (_rotate(*args[:3], args[4], args[3], backward=True), None),
    nondiff_argnums=(0, 1, 2),
)


def _kernel(operands, positions, *, theta, scaling, layout):
    if not isinstance(operands, Packed):
        return _rope(theta, scaling, 0, operands, positions)
    (h, d), (k, _), _ = operands.parts
    x = operands.array.reshape(*operands.array.shape[:2], operands.array.shape[2] // d, d)
    (x,) = _rope(theta, scaling, h + k, (x,), positions)
    return dataclasses.replace(operands, array=x.reshape(operands.array.shape))


FORMS = Form("general", _kernel, "sm_80", why_not, why_slower), Form("xla", _in_jnp)
