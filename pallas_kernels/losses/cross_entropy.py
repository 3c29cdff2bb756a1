"""Softmax cross-entropy of logits against labels, the loss of a language model.

    loss = log(total) - (z[label] - top),   total = sum_v exp(z[v] - top),   top = max_v z[v]
    dz[v] = dloss (exp(z[v] - top) / total - [v = label])       (v over the real vocabulary only)

Columns past `vocab_size` are padding: the sum leaves them out and their gradient is zero.
Everything is computed in float32.  The forward pass saves top and total, not their log-sum-exp,
which for logits near 1000 has a rounding error of 3e-5 that enters every probability.

The kernel, which linear_cross_entropy shares, computes the statistics of a row, its gradient, or
both.  A block takes one row.  It reads the row from memory for its maximum and its sum (Milakov
and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3), reads it again from
the L2 cache, and writes dz, over the row if allowed.  Its warpgroups share the row:

    a row              | part 0        | part 1        | part 2        | part 3        |
                         warp 0          warp 1          warp 2          warp 3     of every group
    a part, by groups  | 0 0 0 0 0 0 | 1 1 1 1 1 1 | ... | 0 | 1 | 2 | 3 | 0 | 1 | rest: group 3 |
                         `unroll` tiles, all real          tiles that may have padding

    load, online softmax  ->  meet (tops_smem, totals_smem, meet_bar)  ->  load, dz, store
                          ->  written_bar  ->  one thread corrects the column of the label
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
from pallas_kernels.mosaic import LOG2E
from pallas_kernels.options import checked, with_gradient

_LOWEST = float(jnp.finfo(jnp.float32).min)  # the initial maximum; finite, as -inf - -inf is NaN
# If the rows of all running blocks fit the L2 cache, two blocks on an SM hide each other's waits;
# they need narrow tiles, for at most 64 registers a thread.  Longer rows use wide tiles, whose
# registers leave room for one block.  Measured between matmuls: 8192x50304 0.642 ms, with wide
# tiles 0.717; 2048x128256 0.477 ms, with narrow tiles 0.541.
_GROUPS = 4  # warpgroups that share a row
_UNROLL = 6
_TILES = ((112 * 1024, 128), (None, 256))  # (maximum bytes of a row, columns of a warp's tile)


@checked
def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Integer[ids.Ids, "*batch"],
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "*batch"]:
    """logsumexp(logits) - logits[label] in nats, float32; 0 where the label is `ignore_index`.

    vocab_size: number of leading columns that are not padding (default: all).  Another label
    outside [0, vocab_size) makes the loss and the gradient of these columns NaN.
    The gradient has the dtype of logits.  The kernel needs columns in multiples of 128.
    """
    if not logits.ndim:
        raise ValueError("logits has shape (), but needs the vocabulary axis")
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
    labels, ignore_index = ids.labels(labels, ignore_index)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels have shape {labels.shape}, but logits need {logits.shape[:-1]}")
    if not 1 <= vocab_size <= v:
        raise ValueError(f"vocab_size={vocab_size} is not in [1, {v}], the columns of logits")
    options = dict(vocab_size=vocab_size, ignore_index=ignore_index)
    return dispatch.run("cross_entropy", FORMS, implementation, logits, labels, **options)


def _in_jnp(logits, labels, *, vocab_size, ignore_index):
    """The formula in jnp, in float32 (float64 for float64)."""
    z = logits.astype(mosaic.stat_dtype(logits.dtype))
    return mask_by_label(losses_of(z, labels, vocab_size), labels, vocab_size, ignore_index)


def losses_of(z, labels, valid, axis: str | None = None):
    """The losses of rows of logits, of which the first `valid` columns are not padding.

    labels: columns of z, or none.  axis: the mesh axis that splits the vocabulary, or None.
    """
    column = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    z = jnp.where(column < valid, z, -jnp.inf)
    top = lax.stop_gradient(z.max(-1))
    top = top if axis is None else lax.pmax(top, axis)
    # A masked sum instead of a gather: it needs no scatter and shards over the vocabulary.
    picked = jnp.where(column == labels[..., None], z, 0).sum(-1)
    total = jnp.exp(z - top[..., None]).sum(-1)
    if axis is not None:
        total, picked = lax.psum((total, picked), axis)
    return jnp.log(total) - (picked - top)


def why_not(logits, labels, **options) -> str | None:
    reason = mosaic.unsupported_dtype(logits=logits) or mosaic.empty(logits=logits)
    reason = reason or mosaic.too_many(rows=logits.size // logits.shape[-1])
    # The kernel would copy other widths to pad them, which is slower than XLA's form.
    return reason or mosaic.not_a_multiple(128, V=logits.shape[-1])


def why_slower(logits, labels, **options) -> str | None:
    """Why XLA's form is faster than the kernel, or None.

    Speed of an earlier kernel relative to XLA, forward / both directions, H100, JAX 0.11.2: 33 x
    128257 0.76 / 0.86, with a quarter of 132 SMs busy; 64 x 50257 1.25 / 1.47.  Few rows take as
    long as one, so the ratio grows to 0.95 at 41 rows.
    """
    few = f"{labels.size} rows, of one block each, are fewer than 41"
    return few if labels.size < 41 else None


def mask_by_label(value, labels, vocab_size, ignore_index):
    """`value` for a label in the vocabulary, 0 for ignore_index, NaN for any other label."""
    ignored = labels == ignore_index
    known = ignored | ((labels >= 0) & (labels < vocab_size))
    # The product makes the reference's gradient NaN too if the label is wrong.  NaN is computed by
    # sqrt, because jax_debug_nans would stop at a NaN constant.
    return jnp.where(ignored, 0.0, value * (1 + jnp.sqrt(jnp.where(known, 0.0, -1.0))))


def _forward(logits, labels, vocab_size, ignore_index):
    _, top, total, picked = _on_rows(logits, labels, None, vocab_size, write=False)
    loss = (jnp.log(total) - (picked - top)).reshape(labels.shape)
    loss = mask_by_label(loss, labels, vocab_size, ignore_index)
    return loss, (logits, labels, top, total, picked)


def _backward(vocab_size, ignore_index, saved, dloss):
    logits, labels, *given = saved
    scale = mask_by_label(dloss, labels, vocab_size, ignore_index).reshape(-1)
    options = dict(given=given, write=True, keep=True)
    return _on_rows(logits, labels, scale, vocab_size, **options)[0].reshape(logits.shape), None


def _on_rows(logits, labels, scale, vocab_size, **options):
    """`logits_kernel` of logits (..., V) without a cap."""
    labels = jnp.where((labels >= 0) & (labels < vocab_size), labels, -1).reshape(-1)
    logits = logits.reshape(-1, logits.shape[-1])
    return logits_kernel(logits, labels, scale, real=vocab_size, softcap=None, **options)


_cross_entropy = with_gradient(_forward, _backward, nondiff_argnums=(2, 3))

FORMS = Form("general", _cross_entropy, "sm_80", why_not, why_slower), Form("xla", _in_jnp)


# ---- the kernel --------------------------------------------------------------------------------


@jax.jit(static_argnames=("real", "softcap", "write", "keep"))
def logits_kernel(z, labels, scale, valid=None, given=(), *, real=0, softcap, write, keep=False):
    """Computes statistics of rows of logits and overwrites the rows with their gradient.

    z: (n, V), V a multiple of 128.  labels: (n,), a column or -1.  scale: (n,), multiplies dz, or
    None if not `write`.
    real or valid: the number of columns that are not padding, an int or an array ().
    given: top, total and z[label] of the rows, or ().
    keep: with `given`, whether dz is another array than z.
    Returns dz (None if not `write`) and, if not given, top and total of the capped logits and
    z[label] uncapped, (n,) float32.  Each row has one block.
    """
    n, v = z.shape
    tile = next(t for most, t in _TILES if most is None or v * z.dtype.itemsize <= most)
    cut, bar = _Cut(v // 4, tile, softcap), plgpu.Barrier(num_arrivals=_GROUPS)
    lines = plgpu.SMEM((_GROUPS, 4), jnp.float32)
    both = "" if given or not write else "_and_gradient"
    rows = jax.ShapeDtypeStruct((n, 4, cut.part), z.dtype)
    call = mosaic.kernel(
        functools.partial(_body, cut, real, write),
        name=f"linear_cross_entropy_{'gradient' if given else 'statistics'}{both}",
        out_type=[rows] * keep if given else [jax.ShapeDtypeStruct((n,), jnp.float32)] * 3,
        **mosaic.grid(row=n),
        num_threads=_GROUPS,
        scratch_types=({} if given else dict(tops_smem=lines, totals_smem=lines, meet_bar=bar))
        | (dict(written_bar=bar) if write else {}),
        # A thread overwrites only what it has read itself; the other threads read the label's logit
        # before the warps synchronise.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    arrays = labels, scale, None if valid is None else valid[None], given
    z = z.reshape(rows.shape)
    if given:
        dz = call(z, *arrays)[0] if keep else mosaic.in_place(call, z, *arrays)
        return (dz.reshape(n, v),)
    if not write:
        return None, *call(z, *arrays)
    z, stats = mosaic.in_place(call, z, *arrays, results=True)
    return z.reshape(n, v), *stats


class _Cut(NamedTuple):
    """How a row of logits is split: four parts of tiles, and a rest of each part."""

    part: int  # columns of a warp
    tile: int  # columns that a warp takes at a time
    softcap: Any  # a number or None

    @property
    def tiles(self) -> int:
        return self.part // self.tile

    @property
    def rest(self) -> int:
        return self.part % self.tile

    @property
    def unroll(self) -> int:
        """Loads that a thread has in flight."""
        # A cap takes registers: for a narrow tile, six loads need 87 and three need 62.
        return _UNROLL if self.softcap is None or self.tile != 128 else _UNROLL // 2

    def layout(self, width):
        return mosaic.warp_rows(next(k for k in (8, 4, 2, 1) if width % (32 * k) == 0))

    def columns(self, start, width):
        """The column of every element of a (4, width) array that starts at `start`."""
        layout = self.layout(width)
        part = plgpu.broadcasted_iota(jnp.int32, (4, width), 0, layout=layout) * self.part
        return part + plgpu.broadcasted_iota(jnp.int32, (4, width), 1, layout=layout) + start


def _online(state, *xs):
    """Updates (maximum, sum of exponentials relative to it) of each lane with more logits.

    The lanes are combined only at the end of the row.
    """
    old, total = state
    top = functools.reduce(jnp.maximum, xs, old)
    return top, sum((jnp.exp(x - top) for x in xs), start=total * jnp.exp(old - top))


class _Row(NamedTuple):
    """A block's row, as one of its warpgroups sees it."""

    z: Any  # (4, part)
    dz: Any  # where the gradient goes, often z itself
    group: Any
    valid: Any  # columns that are not padding
    whole: Any  # steps of `unroll` tiles for each group in which no warp reads padding
    first: Any  # this group's first tile after these steps
    more: Any  # number of this group's tiles after these steps

    def start(self, cut: _Cut, i, u):
        """The first column of the u-th tile of this group's i-th whole step."""
        return ((i * _GROUPS + self.group) * cut.unroll + u) * cut.tile

    def late_start(self, cut: _Cut, i):
        """The first column of this group's i-th tile after the whole steps."""
        return (self.first + i * _GROUPS) * cut.tile


def capped(u, softcap):
    """(capped logit, function from its gradient to the logit's) of a logit, inside a kernel."""
    if softcap is None:
        return u, lambda dz: dz
    # 1 - tanh^2 is 4 s (1 - s), and the fast exp2 is accurate enough.
    s = 1 / (jnp.exp2(u * (2 * LOG2E / softcap)) + 1)
    capped_u, slope = softcap - 2 * softcap * s, 4 * s * (1 - s)
    return capped_u, lambda dz: dz * slope


def _body(
    cut: _Cut, real, write, z_ref, labels_ref, scale_ref, valid_ref, given_refs, *out_refs,
    written_bar=None, **meeting,
):  # fmt: skip
    """A block computes the statistics of its row, unless given, and the gradient, if requested."""
    index, group = lax.axis_index("row"), lax.axis_index("wg")
    label = labels_ref[index]
    valid = real if valid_ref is None else valid_ref[0]
    dz_ref = out_refs[0] if given_refs and out_refs else z_ref
    # Distribute the tiles over the warpgroups.
    before_padding = cut.part - (4 * cut.part - valid)  # columns of the last part
    least = (max if isinstance(valid, int) else lax.max)(before_padding, 0)
    whole = least // (_GROUPS * cut.unroll * cut.tile)
    first = whole * (_GROUPS * cut.unroll) + group
    more = lax.div(cut.tiles - first + (_GROUPS - 1), jnp.int32(_GROUPS))
    row = _Row(z_ref.at[index], dz_ref.at[index], group, valid, whole, first, more)
    if given_refs:
        top, total, picked = (ref[index] for ref in given_refs)
    else:
        at_label = jnp.maximum(label, 0)
        picked = row.z[at_label // cut.part, at_label % cut.part].astype(jnp.float32)
        top, total = _meet(group, *_statistics(cut, row), **meeting)

        @pl.when(group == 0)
        def _():
            for ref, value in zip(out_refs, (top, total, picked), strict=True):
                ref[index] = value

    if write:
        _gradient(cut, row, label, top, total, picked, scale_ref.at[index], written_bar)


def _statistics(cut: _Cut, row: _Row):
    """Maximum and sum of exponentials of each warp's columns, (4,) for each warpgroup."""
    layout = cut.layout(cut.tile)

    def load(start, end=None, width=cut.tile):
        x = mosaic.load(row.z.at[:, pl.ds(start, width)], cut.layout(width))
        x, _ = capped(x, cut.softcap)
        return x if end is None else jnp.where(cut.columns(start, width) < end, x, -jnp.inf)

    # Load the rest of the row while the tiles are in flight.  Only the last group counts it.
    tail = None
    if cut.rest:
        end = jnp.where(row.group == _GROUPS - 1, row.valid, 0)
        tail = load(cut.tiles * cut.tile, end, cut.rest)

    # Compute the online softmax over the tiles.
    whole = lambda i, s: _online(s, *(load(row.start(cut, i, u)) for u in range(cut.unroll)))
    late = lambda i, s: _online(s, load(row.late_start(cut, i), row.valid))
    lowest = plgpu.layout_cast(jnp.full((4, cut.tile), _LOWEST, jnp.float32), layout)
    state = lowest, mosaic.zeros((4, cut.tile), layout)
    state = lax.fori_loop(0, row.whole, whole, state)
    tops, totals = lax.fori_loop(0, row.more, late, state)

    # Reduce the lanes of each warp and add the rest.
    top = jnp.max(tops, axis=1)
    if tail is not None:
        top = jnp.maximum(top, plgpu.layout_cast(jnp.max(tail, axis=1), layout.reduce(1)))
    total = jnp.sum(totals * jnp.exp(tops - mosaic.along(top, tops.shape, 0)), axis=1)
    if tail is not None:
        top_of_tail = plgpu.layout_cast(top, cut.layout(cut.rest).reduce(1))
        tail = jnp.exp(tail - mosaic.along(top_of_tail, tail.shape, 0))
        total += plgpu.layout_cast(jnp.sum(tail, axis=1), layout.reduce(1))
    return top, total


def _meet(group, top, total, tops_smem, totals_smem, meet_bar):
    """Reduces the warps' statistics to the row's, in every thread."""
    mosaic.store(tops_smem.at[group], top)
    mosaic.store(totals_smem.at[group], total)
    _wait_for_all(meet_bar)
    warps = [(g, w) for g in range(_GROUPS) for w in range(4)]
    top = functools.reduce(jnp.maximum, (tops_smem[i] for i in warps))
    return top, sum(totals_smem[i] * jnp.exp(tops_smem[i] - top) for i in warps)


def _wait_for_all(bar):
    plgpu.barrier_arrive(bar)  # every thread does, after its stores; no fence of 9.0 is needed
    plgpu.barrier_wait(bar)


def _gradient(cut: _Cut, row: _Row, label, top, total, picked, scale_ref, bar):
    scale = scale_ref[...]
    factor = scale / total
    write = functools.partial(_write, cut, row, top, factor)
    several = lambda i: write([row.start(cut, i, u) for u in range(cut.unroll)], cut.tile)
    pl.loop(0, row.whole)(several)
    pl.loop(0, row.more)(lambda i: write([row.late_start(cut, i)], cut.tile, masked=True))
    if cut.rest:
        rest = lambda: write([cut.tiles * cut.tile], cut.rest, masked=True)
        pl.when(row.group == _GROUPS - 1)(rest)

    # Correct the label's column afterwards: comparing every column took a third of the time.
    _wait_for_all(bar)

    @pl.when((row.group == 0) & (label >= 0))
    def _():
        x, through_cap = capped(picked, cut.softcap)
        dz = through_cap(factor * jnp.exp(x - top) - scale)
        row.dz[label // cut.part, label % cut.part] = dz.astype(row.dz.dtype)


def _write(cut: _Cut, row: _Row, top, factor, starts, width, masked=False):
    """Writes factor exp(z - top) for the logits of some tiles, and 0 for padding."""
    layout = cut.layout(width)
    xs = [mosaic.load(row.z.at[:, pl.ds(start, width)], layout) for start in starts]
    for start, x in zip(starts, xs, strict=True):
        x, through_cap = capped(x, cut.softcap)
        dz = through_cap(factor * jnp.exp(x - top))
        if masked:
            dz = jnp.where(cut.columns(start, width) < row.valid, dz, 0.0)
        mosaic.store(row.dz.at[:, pl.ds(start, width)], dz)
