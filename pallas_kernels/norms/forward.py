"""The forward kernels of layer norm and RMS norm, and what the backward ones share with them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import ampere, mosaic
from pallas_kernels.activations.elementwise import sigmoid
from pallas_kernels.norms.ring import Ring, fetch_weights, ring_types, stream
from pallas_kernels.norms.tiles import LINES, Tiling, choose_general_tiling, choose_tiling


class Norm(NamedTuple):
    """A norm of the rows of x, as functions of register arrays.

    statistics(tiling, mean, x, eps): from x(chunk), one number for each line; mean(f) has the row
    means of f(chunk), of which it takes `most` at once, and is called twice at most.
    normalise(tiling, x, *statistics): n.
    differentiate(tiling, n, g, means, *statistics): dx from g = weight dy and the row means of
    averaged(n, g).
    """

    name: str
    statistics: Callable
    normalise: Callable
    averaged: Callable
    differentiate: Callable
    count: int  # number of statistics
    most: int  # means at once


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # traced and lowered once for all layers
def forward(kind, eps, general, x, residual, weight, bias, gate):
    """y = n weight + bias for the rows of x, or of s = x + residual, in one pass over memory.

    With a gate y is multiplied by sigmoid(gate).  The gate may be the last heads of a wider array,
    which is read in place.
    Returns y, s (None without a residual) and the statistics, float32 (heads, sets of rows, lines).
    """
    shape = x.shape
    name = name_of(kind, "forward", residual, gate, general)
    x, residual, gate, weight, bias = flatten(x, (weight, bias), (x, residual, gate))
    streams, weights = given(x=x, residual=residual, gate=gate), given(weight=weight, bias=bias)
    if general:
        t = choose_general_tiling("forward", x.shape, x.dtype)
    else:
        t = choose_tiling("forward", x.shape, streams, weights)
    like = lambda a: jax.ShapeDtypeStruct(t.view_shape, a.dtype)
    stat = jax.ShapeDtypeStruct((t.heads, t.tiles * t.groups, t.height), jnp.float32)
    y, s, stats = launch(
        functools.partial(_forward_tiles if t.slots else _forward_tile, kind, eps, t),
        name,
        t,
        [like(x), None if residual is None else like(residual), (stat,) * kind.count],
        (ring_types(t, streams, weights) if t.slots else {})
        | dict(means_smem=means_type(t, 2 * t.groups * kind.most)),
        gate,
    )(*jax.tree.map(t.view, (x, residual, gate, weight, bias)))
    y, s = jax.tree.map(lambda a: t.unview(a).reshape(shape), (y, s))
    return (y, s), stats


def _forward_tile(
    kind, eps, t: Tiling, x_ref, residual_ref, gate_ref, weight_ref, bias_ref, y_ref, s_ref,
    stat_refs, *, means_smem,
):  # fmt: skip
    """A block without TMA normalises one tile from global memory to global memory."""
    tile, head = lax.axis_index("program"), lax.axis_index("head")
    rows_of = lambda ref: ref.at[*t.place(ref, tile)]
    source = jax.tree.map(rows_of, given(x=x_ref, residual=residual_ref, gate=gate_ref))
    result = jax.tree.map(rows_of, given(x=y_ref, residual=s_ref))
    weights = {k: ref.at[head] for k, ref in given(weight=weight_ref, bias=bias_ref).items()}
    _normalise(kind, eps, t, tile, source, result, weights, stat_refs, means_smem.at[0])


def _forward_tiles(
    kind, eps, t: Tiling, x_ref, residual_ref, gate_ref, weight_ref, bias_ref, y_ref, s_ref,
    stat_refs, *, bars, weight_bar, means_smem, **smem,
):  # fmt: skip
    """A persistent block overwrites each of its tiles with the result in shared memory."""
    streams, weights = (
        given(x=x_ref, residual=residual_ref, gate=gate_ref),
        given(weight=weight_ref, bias=bias_ref),
    )
    ring = Ring(streams, weights, given(x=y_ref, residual=s_ref), smem, bars, weight_bar)
    fetch_weights(t, ring)
    part = lax.axis_index("part")

    def step(slot, tile, carry):
        rows = {k: smem[k].at[part, slot] for k in streams}
        of_part = {k: smem[k].at[part] for k in weights}
        _normalise(kind, eps, t, tile, rows, rows, of_part, stat_refs, means_smem.at[slot])
        return carry

    stream(t, ring, step, 0)


def _normalise(kind, eps, t: Tiling, tile, source, result, weights, stat_refs, means_smem):
    """Normalises a tile from the refs in `source` to those in `result`, which may be the same."""
    places = iter(range(0, means_smem.shape[0], kind.most))

    def mean(f):
        """Row means of f(chunk), or of each array of a tuple."""
        parts = [jax.tree.map(lambda x, c=c: t.once(x, c), f(c)) for c in t.chunks]
        total, tree = jax.tree.flatten(
            functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
        )
        return tree.unflatten(row_means(t, total, means_smem.at[pl.ds(next(places), kind.most)]))

    def load(group):
        each = lambda ref: [mosaic.load(t.lines(ref, group, c), t.layout) for c in t.chunks]
        return {k: each(ref) for k, ref in source.items()}

    # Without slots no copy runs ahead, and no load passes a store: all loads come first.
    loaded = None if t.slots else [load(group) for group in range(t.groups)]
    for group in range(t.groups):
        at = lambda refs, k, c, group=group: t.lines(refs[k], group, c)
        rows = loaded[group] if loaded else load(group)

        # Add the residual to x.
        data = rows["x"]
        for c, r in enumerate(rows.get("residual", ())):
            s = (data[c] + r).astype(source["residual"].dtype)  # y is the norm of the rounded s
            mosaic.store(at(result, "residual", c), s)
            data[c] = s.astype(jnp.float32)

        # Compute and save the statistics.
        stats = kind.statistics(t, mean, data.__getitem__, eps)
        for ref, value in zip(stat_refs, stats, strict=True):
            mosaic.store(ref.at[lax.axis_index("head"), tile * t.groups + group], value)

        # Normalise and store.
        for c in t.chunks:
            y = kind.normalise(t, data[c], *stats)
            y = y * t.weight(weights["weight"], c) if "weight" in weights else y
            y = y + t.weight(weights["bias"], c) if "bias" in weights else y
            y = y * sigmoid(rows["gate"][c]) if "gate" in rows else y
            mosaic.store(at(result, "x", c), y)


# ---- both directions ---------------------------------------------------------------------------


def means_type(t: Tiling, count: int):
    """Each slot has its own, so that a warp that is a step ahead overwrites nothing."""
    return plgpu.SMEM((t.slots or 2, count, t.parts, LINES), jnp.float32)


def row_means(t: Tiling, arrays, means_smem, means_bar: Any = None):
    """The row means of register arrays; the warps of a wide row synchronise once for all of them.

    means_smem: (number of arrays or more, parts, LINES).
    """
    sums = [jnp.sum(x, axis=1) for x in arrays]
    if t.wide:
        for i, x in enumerate(sums):
            mosaic.store(means_smem.at[i, lax.axis_index("part")], x)
        ampere.meet()
        if t.parts > 1:
            plgpu.barrier_arrive(means_bar)
            plgpu.barrier_wait(means_bar)
        warps = [(part, warp) for part in range(t.parts) for warp in range(LINES)]
        sums = [t.every_line(sum(means_smem[i, *at] for at in warps)) for i in range(len(sums))]
    return [x / t.cols for x in sums]


def launch(body, name, t: Tiling, out_type, scratch_types, gate=None):
    return mosaic.kernel(
        body,
        name=name,
        out_type=out_type,
        scratch_types=scratch_types,
        **mosaic.grid(program=t.programs, head=t.heads),
        num_threads=t.parts,
        thread_name="part",
        # A barrier at every load and store is too slow.  A lane overwrites only what it has read
        # itself; commit_smem, barrier_wait and the reductions synchronise warps and copies.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            # The exp of the sigmoid in two instructions; 16-bit results hide its error.
            approx_math=gate is not None and gate.dtype.itemsize == 2,
        ),
    )


def name_of(kind, direction, add, gate, general):
    fused = ("" if add is None else "add_") + ("" if gate is None else "gated_")
    return f"{'general_' if general else ''}{fused}{kind.name}_{direction}"


def flatten(x, weights, arrays) -> tuple[Any, ...]:
    """Reshapes `arrays` to (rows, heads, cols) and `weights` to (heads, cols).

    All arrays have x's shape; only a gate may have more heads.
    """
    heads = next((w.shape[0] for w in weights if w is not None and w.ndim == 2), 1)
    rows, cols = x.size // (heads * x.shape[-1]), x.shape[-1]
    arrays = [a if a is None else a.reshape(rows, -1, cols) for a in arrays]
    return *arrays, *(w if w is None else w.reshape(heads, cols) for w in weights)


def given(**arrays):
    return {k: a for k, a in arrays.items() if a is not None}
