"""Softmax cross-entropy of logits against labels, the loss of a language model.

    loss = log(total) - (z[label] - top),   total = sum_v exp(z[v] - top),   top = max_v z[v]
    dz[v] = dloss (exp(z[v] - top) / total - [v = label])       (v over the real vocabulary only)

Columns past `vocab_size` are padding: the sum leaves them out and their gradient is zero.  The
forward pass reads the logits once with a running maximum (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax", algorithm 3).  The backward pass reads them once and writes
their gradient.  Everything is computed in float32.  The forward pass saves top and total, not their
log-sum-exp, which for logits near 1000 has a rounding error of 3e-5 that enters every probability.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.options import checked, custom_vjp

# Loads of 8 elements that a thread has in flight.  4 reach 0.92 to 1.04 of a copy's bandwidth on an
# H100; 2 or 8 are up to 4% slower (docs/performance.md).
_UNROLL = 4
LOWEST = float(jnp.finfo(jnp.float32).min)  # the initial maximum; finite, as -inf - -inf is NaN


@checked
def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Integer[ids.Ids, "*batch"],
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*batch"]:
    """Cross-entropy of every position in float32, 0 where the label is `ignore_index`.

    vocab_size: number of leading columns that are not padding (default: all).  Another label
    outside [0, vocab_size) makes the loss and the gradient of these columns NaN.
    The gradient has the dtype of logits.  The kernel copies logits of fewer than 128 columns;
    other widths are read in place, odd ones with 2-byte loads.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic"
    for a call that the kernel does not support.
    """
    if not logits.ndim:
        raise ValueError("logits has shape (), but needs the vocabulary axis")
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
    labels, ignore_index = ids.labels(labels, ignore_index)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {labels.shape}, but logits {logits.shape} need {logits.shape[:-1]}"
        )
    if not 1 <= vocab_size <= v:
        raise ValueError(f"vocab_size={vocab_size} is not in [1, {v}], the columns of logits")
    options = dict(vocab_size=vocab_size, ignore_index=ignore_index)
    return dispatch.run("cross_entropy", FORMS, implementation, logits, labels, **options)


def cross_entropy_reference(logits, labels, *, vocab_size=None, ignore_index=-100):
    """The formula in jnp, in float32 (float64 for float64)."""
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    z = logits.astype(mosaic.stat_dtype(logits.dtype))
    z = jnp.where(column < vocab_size, z, -jnp.inf)
    top = lax.stop_gradient(z.max(-1, keepdims=True))
    # A masked sum instead of a gather: it needs no scatter and shards over the vocabulary.
    picked = jnp.where(column == labels[..., None], z, 0).sum(-1)
    loss = jnp.log(jnp.exp(z - top).sum(-1)) - (picked - top[..., 0])
    return mask_by_label(loss, labels, vocab_size, ignore_index)


def why_not(logits, labels, **options) -> str | None:
    """Why the kernel does not support this call, or None."""
    return (
        mosaic.unsupported_dtype(logits=logits)
        or mosaic.empty(logits=logits)
        or mosaic.too_many(rows=logits.size // logits.shape[-1])
    )


def why_slower(logits, labels, **options) -> str | None:
    """Why XLA's form is faster than the kernel (too few rows, of one block each), or None.

    Speed of the kernel relative to XLA, forward / both directions, H100, JAX 0.11.2 (python -m
    pallas_kernels.benchmark --untuned): 33 x 128257 0.76 / 0.86, with a quarter of 132 SMs busy;
    64 x 50257 1.25 / 1.47.  Few rows take as long as one, so the ratio grows to 0.95 at 41 rows.
    """
    if labels.size < 41:
        return f"{labels.size} rows, of one block each, are fewer than 41"
    return None


def mask_by_label(value, labels, vocab_size, ignore_index):
    """`value` for a label in the vocabulary, 0 for ignore_index, NaN for any other label."""
    ignored = labels == ignore_index
    known = ignored | ((labels >= 0) & (labels < vocab_size))
    # The product makes the reference's gradient NaN too if the label is wrong.
    return jnp.where(ignored, 0.0, value * jnp.where(known, 1.0, jnp.nan))


def online(state, *xs):
    """Updates (maximum, sum of exponentials relative to it) of each lane with more logits.

    The lanes are combined only at the end of the row.
    """
    old, total = state
    top = functools.reduce(jnp.maximum, xs, old)
    total = total * jnp.exp(old - top)
    for x in xs:
        total += jnp.exp(x - top)
    return top, total


def _tile(v: int, dtype):
    """Columns of a load and their register layout, for rows of v >= 128 columns."""
    # A row starts at a multiple of v elements, so an aligned vector must divide v.
    vec = 16 // jnp.dtype(dtype).itemsize
    while v % vec or v < 128 * vec:
        vec //= 2
    tile = 128 * vec * max(1, min(8 // vec, v // (128 * vec)))  # 8 elements a thread
    return tile, plgpu.Layout.WG_STRIDED((tile,), vec)


def _column_numbers(start, tile, layout):
    iota = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tile,), 0), layout)
    return iota + start


class _RowCut(NamedTuple):
    """How a block splits a row of logits of v columns.

    | _UNROLL tiles | ... | _UNROLL tiles | rest tiles | done ... vocab_size | padding ... v |
                 `steps` times                           the last tile ends at v and may overlap
    """

    v: int
    vocab_size: int
    tile: int
    layout: Any

    @classmethod
    def of(cls, logits, vocab_size):
        return cls(logits.shape[1], vocab_size, *_tile(logits.shape[1], logits.dtype))

    @property
    def steps(self) -> int:
        return self.vocab_size // self.tile // _UNROLL

    @property
    def rest(self) -> int:
        return self.vocab_size // self.tile % _UNROLL

    @property
    def done(self) -> int:
        """Columns before the last, partial tile."""
        return (self.steps * _UNROLL + self.rest) * self.tile


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(logits, labels, vocab_size, ignore_index):
    """Returns loss, top and total, all (N,) float32.  Each row has one block of 128 threads."""
    logits = mosaic.pad_axis(logits, 1, 128) if logits.shape[1] < 128 else logits
    n = logits.shape[0]
    return mosaic.kernel(
        functools.partial(_forward_row, _RowCut.of(logits, vocab_size), ignore_index),
        name="cross_entropy_forward",
        out_type=[jax.ShapeDtypeStruct((n,), jnp.float32)] * 3,
        **mosaic.grid(row=n),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(logits, labels)


def _forward_row(c: _RowCut, ignore_index, logits_ref, labels_ref, loss_ref, top_ref, total_ref):
    """A block computes an online softmax of its row in each thread, then combines the threads."""
    row = lax.axis_index("row")
    load = lambda start: mosaic.load(logits_ref.at[row, pl.ds(start, c.tile)], c.layout)

    # Compute the online softmax over the tiles.
    def step(i, state):
        start = i * (_UNROLL * c.tile)
        return online(state, *(load(start + u * c.tile) for u in range(_UNROLL)))

    lowest = plgpu.layout_cast(jnp.full((c.tile,), LOWEST, jnp.float32), c.layout)
    state = lax.fori_loop(0, c.steps, step, (lowest, mosaic.zeros((c.tile,), c.layout)))
    if c.rest:
        state = online(state, *[load((c.steps * _UNROLL + u) * c.tile) for u in range(c.rest)])
    if c.done < c.vocab_size:  # masks columns that are padding or were counted before
        start = min(c.done, c.v - c.tile)
        column = _column_numbers(start, c.tile, c.layout)
        new = (column >= c.done) & (column < c.vocab_size)
        state = online(state, jnp.where(new, load(start), -jnp.inf))

    # Reduce over the threads.
    tops, totals = state
    top = jnp.max(tops)
    total = jnp.sum(totals * jnp.exp(tops - top))

    # Compute and store the loss.
    label = labels_ref[row]
    picked = logits_ref[row, jnp.clip(label, 0, c.v - 1)].astype(jnp.float32)
    loss = jnp.log(total) - (picked - top)
    loss_ref[row] = mask_by_label(loss, label, c.vocab_size, ignore_index)
    top_ref[row] = top
    total_ref[row] = total


@functools.partial(jax.jit, static_argnums=(5, 6))
def _backward(logits, labels, top, total, dloss, vocab_size, ignore_index):
    """Returns dlogits (N, V) in logits' dtype.  Each row has one block of 128 threads."""
    width = logits.shape[1]
    logits = mosaic.pad_axis(logits, 1, 128) if width < 128 else logits
    dlogits = mosaic.kernel(
        functools.partial(_backward_row, _RowCut.of(logits, vocab_size), ignore_index),
        name="cross_entropy_backward",
        out_type=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        **mosaic.grid(row=logits.shape[0]),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(logits, labels, top, total, dloss)
    return dlogits[:, :width]


def _backward_row(
    c: _RowCut, ignore_index, logits_ref, labels_ref, top_ref, total_ref, dloss_ref, dlogits_ref
):
    """A block computes dz of its row, tile by tile."""
    row = lax.axis_index("row")
    label, top = labels_ref[row], top_ref[row]
    scale = mask_by_label(dloss_ref[row], label, c.vocab_size, ignore_index)
    factor = scale / total_ref[row]

    def write(starts, masked=False):
        blocks = [pl.ds(start, c.tile) for start in starts]
        xs = [mosaic.load(logits_ref.at[row, block], c.layout) for block in blocks]
        for start, block, x in zip(starts, blocks, xs, strict=True):
            column = _column_numbers(start, c.tile, c.layout)
            dz = factor * jnp.exp(x - top)
            dz = jnp.where(column == label, dz - scale, dz)
            if masked:
                dz = jnp.where(column < c.vocab_size, dz, 0.0)
            mosaic.store(dlogits_ref.at[row, block], dz)

    pl.loop(0, c.steps)(lambda i: write([(i * _UNROLL + u) * c.tile for u in range(_UNROLL)]))
    if c.rest:
        write([(c.steps * _UNROLL + u) * c.tile for u in range(c.rest)])
    # The last tile ends where the row ends.  If it overlaps the tile before, it writes the same
    # values again.
    last = lambda i: write([jnp.minimum(c.done + i * c.tile, c.v - c.tile)], masked=True)
    pl.loop(0, mosaic.cdiv(c.v - c.done, c.tile))(last)


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits, labels, vocab_size, ignore_index):
    return _forward(logits, labels, vocab_size, ignore_index)[0]


def _cross_entropy_forward(logits, labels, vocab_size, ignore_index):
    loss, *sums = _forward(logits, labels, vocab_size, ignore_index)
    return loss, (logits, labels, *sums)


def _cross_entropy_backward(vocab_size, ignore_index, saved, dloss):
    return _backward(*saved, dloss, vocab_size, ignore_index), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _kernels(logits, labels, *, vocab_size, ignore_index):
    rows = logits.reshape(-1, logits.shape[-1])
    loss = _cross_entropy(rows, labels.reshape(-1), vocab_size, ignore_index)
    return loss.reshape(labels.shape)


FORMS = (
    Form("general", _kernels, "sm_80", why_not, why_slower),
    Form("xla", cross_entropy_reference),
)
