"""Softmax cross-entropy of logits against labels, the loss of a language model.

    loss = log(total) - (z[label] - top),   total = sum_v exp(z[v] - top),   top = max_v z[v]
    dz[v] = dloss (exp(z[v] - top) / total - [v = label])       (v over the real vocabulary only)

Columns past `vocab_size` are padding: they take no part in the sum and get a zero gradient.  The
forward pass reads the logits once with a running maximum (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax", algorithm 3), and the backward pass reads them once and writes
their gradient.  Everything is computed in float32.  What is saved is top and total, not their
log-sum-exp: where logits are near 1000 that rounds by 3e-5, an error in every probability.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic

# Loads of 8 elements a thread that are under way together.  Measured on an H100 (copy of 1 GiB:
# 2.94 TB/s), bf16, milliseconds for 8192x50304, 4096x128256 and, with rows at odd elements,
# 8192x50257:
#
#   forward  0.269, 0.347, 0.302 (3.06, 3.03, 2.73 TB/s)   unroll 2: 0.277; 8: 0.269
#   backward 0.575, 0.740, 0.601 (2.87, 2.84, 2.74 TB/s)   unroll 2: 0.581, 0.752, 0.624; 1: 0.588
_UNROLL = 4
LOWEST = float(jnp.finfo(jnp.float32).min)  # a first maximum that is finite: -inf - -inf is NaN


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Int[Array, "*batch"],
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*batch"]:
    """Cross-entropy of every position in float32, 0 where the label is `ignore_index`.

    vocab_size: how many leading columns are real (default: all).  A label outside [0, vocab_size)
    that is not ignore_index gives a loss of NaN, and a gradient of NaN in the real columns.
    The gradient has the dtype of logits.  The kernel copies the logits only if they have fewer
    than 128 columns.  Any other number of them is taken in place; an odd one costs 2-byte loads.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic".
    """
    if not logits.ndim:
        raise ValueError("logits has shape (), it needs the axis of the vocabulary")
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
    mosaic.check_whole_numbers(labels=labels)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {labels.shape}, logits {logits.shape} need {logits.shape[:-1]}"
        )
    if not 1 <= vocab_size <= v:
        raise ValueError(f"vocab_size={vocab_size} is not in [1, {v}], the columns of logits")
    options = dict(vocab_size=vocab_size, ignore_index=ignore_index)
    reason, slower = why_not(logits), why_slower(labels)
    if not dispatch.use_kernel("cross_entropy", implementation, reason, slower=slower):
        return cross_entropy_reference(logits, labels, **options)
    rows = logits.reshape(-1, v)
    loss = _cross_entropy(rows, labels.reshape(-1).astype(jnp.int32), vocab_size, ignore_index)
    return loss.reshape(labels.shape)


def cross_entropy_reference(logits, labels, *, vocab_size=None, ignore_index=-100):
    """The formula in jnp, in float32 (float64 for float64)."""
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    z = logits.astype(mosaic.stat_dtype(logits.dtype))
    z = jnp.where(column < vocab_size, z, -jnp.inf)
    top = lax.stop_gradient(z.max(-1, keepdims=True))
    # A masked sum, not a gather: its gradient is no scatter, and it shards over the vocabulary.
    picked = jnp.where(column == labels[..., None], z, 0).sum(-1)
    loss = jnp.log(jnp.exp(z - top).sum(-1)) - (picked - top[..., 0])
    return judge(loss, labels, vocab_size, ignore_index)


def why_not(logits) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return mosaic.unsupported_dtype(logits=logits) or mosaic.empty(logits=logits)


def why_slower(labels) -> str | None:
    """Why XLA's form is faster than the kernel, or None: too few rows, of one block each.

    Speed of the kernel relative to XLA, forward / both directions, H100, JAX 0.11.2 (python -m
    pallas_kernels.benchmark --untuned): 33 x 128257 0.76 / 0.86, of 132 SMs a quarter at work;
    64 x 50257 1.25 / 1.47.  So few rows take as long as one: it grows with them, to 0.95 at 41.
    """
    if labels.size < 41:
        return f"{labels.size} rows, fewer than 41, give the kernel one block each"
    return None


def judge(value, labels, vocab_size, ignore_index):
    """`value` for a label of the vocabulary, 0 for ignore_index, NaN for any other."""
    ignored = labels == ignore_index
    known = ignored | ((labels >= 0) & (labels < vocab_size))
    # A product, so that the reference's gradient is NaN too where the label is wrong.
    return jnp.where(ignored, 0.0, value * jnp.where(known, 1.0, jnp.nan))


def online(state, *xs):
    """(maximum, sum of exponentials from it) of each lane after more logits.

    Each thread keeps its own: nothing crosses threads until the end of the row.
    """
    old, total = state
    top = functools.reduce(jnp.maximum, xs, old)
    total = total * jnp.exp(old - top)
    for x in xs:
        total += jnp.exp(x - top)
    return top, total


def _tile(v: int, dtype):
    """Columns of one load and their register layout, for rows of v >= 128 columns."""
    # A row starts at a multiple of v elements, so the widest vector that is aligned divides v.
    vec = 16 // jnp.dtype(dtype).itemsize
    while v % vec or v < 128 * vec:
        vec //= 2
    tile = 128 * vec * max(1, min(8 // vec, v // (128 * vec)))  # 8 elements a thread
    return tile, plgpu.Layout.WG_STRIDED((tile,), vec)


def _columns(start, tile, layout):
    iota = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tile,), 0), layout)
    return iota + start


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(logits, labels, vocab_size, ignore_index):
    """loss, top and total, all (N,) float32.  One block of 128 threads for each row."""
    logits = mosaic.pad_axis(logits, 1, 128) if logits.shape[1] < 128 else logits
    n, v = logits.shape
    tile, layout = _tile(v, logits.dtype)
    steps, rest = divmod(vocab_size // tile, _UNROLL)
    done = (steps * _UNROLL + rest) * tile

    def cross_entropy_forward(logits_ref, labels_ref, loss_ref, top_ref, total_ref):
        row = lax.axis_index("row")

        def load(start):
            return mosaic.load(logits_ref.at[row, pl.ds(start, tile)], layout)

        def step(i, state):
            start = i * (_UNROLL * tile)
            return online(state, *(load(start + u * tile) for u in range(_UNROLL)))

        lowest = plgpu.layout_cast(jnp.full((tile,), LOWEST, jnp.float32), layout)
        state = lax.fori_loop(0, steps, step, (lowest, mosaic.zeros((tile,), layout)))
        if rest:
            xs = [load((steps * _UNROLL + u) * tile) for u in range(rest)]
            state = online(state, *xs)
        if done < vocab_size:  # the last columns, with some that were counted or are padding
            start = min(done, v - tile)
            column = _columns(start, tile, layout)
            new = (column >= done) & (column < vocab_size)
            state = online(state, jnp.where(new, load(start), -jnp.inf))
        tops, totals = state
        top = jnp.max(tops)
        total = jnp.sum(totals * jnp.exp(tops - top))
        label = labels_ref[row]
        picked = logits_ref[row, jnp.clip(label, 0, v - 1)].astype(jnp.float32)
        loss = jnp.log(total) - (picked - top)
        loss_ref[row] = judge(loss, label, vocab_size, ignore_index)
        top_ref[row] = top
        total_ref[row] = total

    return mosaic.kernel(
        cross_entropy_forward,
        out_type=[jax.ShapeDtypeStruct((n,), jnp.float32)] * 3,
        grid=(n,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(logits, labels)


@functools.partial(jax.jit, static_argnums=(5, 6))
def _backward(logits, labels, top, total, dloss, vocab_size, ignore_index):
    """dlogits (N, V) in logits' dtype.  One block of 128 threads for each row."""
    width = logits.shape[1]
    logits = mosaic.pad_axis(logits, 1, 128) if width < 128 else logits
    n, v = logits.shape
    tile, layout = _tile(v, logits.dtype)
    steps, rest = divmod(vocab_size // tile, _UNROLL)
    done = (steps * _UNROLL + rest) * tile

    def cross_entropy_backward(logits_ref, labels_ref, top_ref, total_ref, dloss_ref, dlogits_ref):
        row = lax.axis_index("row")
        label, top = labels_ref[row], top_ref[row]
        scale = judge(dloss_ref[row], label, vocab_size, ignore_index)
        factor = scale / total_ref[row]

        def write(starts, masked=False):
            blocks = [pl.ds(start, tile) for start in starts]
            xs = [mosaic.load(logits_ref.at[row, block], layout) for block in blocks]
            for start, block, x in zip(starts, blocks, xs, strict=True):
                column = _columns(start, tile, layout)
                dz = factor * jnp.exp(x - top)
                dz = jnp.where(column == label, dz - scale, dz)
                if masked:
                    dz = jnp.where(column < vocab_size, dz, 0.0)
                mosaic.store(dlogits_ref.at[row, block], dz)

        @pl.loop(0, steps)
        def _(i):
            write([(i * _UNROLL + u) * tile for u in range(_UNROLL)])

        if rest:
            write([(steps * _UNROLL + u) * tile for u in range(rest)])

        # The last tile ends at the end of the row; what it shares with its neighbour it writes
        # again, with the same values.
        @pl.loop(0, mosaic.cdiv(v - done, tile))
        def _(i):
            write([jnp.minimum(done + i * tile, v - tile)], masked=True)

    dlogits = mosaic.kernel(
        cross_entropy_backward,
        out_type=jax.ShapeDtypeStruct((n, v), logits.dtype),
        grid=(n,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(logits, labels, top, total, dloss)
    return dlogits[:, :width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits, labels, vocab_size, ignore_index):
    return _forward(logits, labels, vocab_size, ignore_index)[0]


def _cross_entropy_forward(logits, labels, vocab_size, ignore_index):
    loss, *sums = _forward(logits, labels, vocab_size, ignore_index)
    return loss, (logits, labels, *sums)


def _cross_entropy_backward(vocab_size, ignore_index, saved, dloss):
    return _backward(*saved, dloss, vocab_size, ignore_index), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
