"""The head of a language model and its loss in one: logits are made, used and dropped in chunks.

    z = x W^T, capped: cap tanh(x W^T / cap)         loss = sum of log(total) - (z[label] - top)
    top = max_v z[v], total = sum_v exp(z[v] - top)  dz[v] = exp(z[v] - top) / total - [v = label]
    dx = dz W,  dW = dz^T x

The (N, V) logits are the largest array of a training step (3 GB for 32768 tokens of GPT-2), so only
those of some thousand tokens exist at a time.  As the loss is one number, its gradient is known but
for a factor once a chunk's logits are: the forward pass makes dx and dW too (three matmuls, none
twice) and the backward pass only scales them, as in Liger (Hsu et al. 2024).  A factor known before
goes into dz (`scale`): where nothing follows the loss, nothing is left to do.

The matmuls are XLA's, which run at the ceiling.  Ours is the kernel between them: one block reads a
row of logits from memory, takes its maximum and sum, reads it again from the second-level cache and
writes dz over it.  Statistics, loss and dW are float32; dz is rounded to x's dtype for its matmuls.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, mosaic
from pallas_kernels.losses.cross_entropy import LOWEST, cross_entropy_reference, judge, online

# Bytes for the logits of a chunk and the copies of the weight, and the least tokens of a chunk:
# every chunk reads and writes all of dW.  Measured on an H100, forward and backward, bf16 with
# float32 weights, milliseconds and GiB of temporaries (with a slower kernel than today's):
#
#   32768x768x50304   10624 tokens 12.9 and 1.12   8192: 12.8 and 0.90   5504: 13.0   4096: 13.1
#   8192x2048x128256   4096 tokens 19.3 and 1.52   2048: 20.3 and 1.02   1664: 22.0   1024: 22.6
_BYTES = 960 * 2**20
_LEAST_TOKENS = 2048

# The kernel: warpgroups that share a row, loads of a thread that are under way together, columns
# that a warp takes at a time.  As long as the rows that all blocks work on fit the second-level
# cache, two blocks on an SM hide each other's waits: up to 64 registers a thread, narrow tiles.
# For longer rows wide tiles, whose registers leave room for one block.  Measured between matmuls:
# 8192x50304 0.642 ms, with wide tiles 0.717; 2048x128256 0.477 ms, with narrow tiles 0.541.
_GROUPS = 4
_UNROLL = 6
_TILES = ((112 * 1024, 128), (None, 256))  # bytes of a row, columns


class _Options(NamedTuple):
    vocab_size: int
    ignore_index: int
    softcap: float | None
    transposed: bool
    vocab_axis: str | None
    chunk: int  # tokens


def linear_cross_entropy(
    x: Float[Array, "*batch C"],
    weight: Float[Array, "_ _"],
    labels: Int[Array, "*batch"],
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    transposed: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
    scale: Float[Array, ""] | float = 1.0,
    vocab_axis: str | None = None,
    chunk: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, ""]:
    """Mean (or sum) cross-entropy of x W^T over all labels that are not ignore_index, in float32.

    weight: (V, C) as an embedding, transposed=True: (C, V) as a dense layer; cast to x's dtype, its
    gradient has its own dtype, and is summed in float32.  vocab_size: how many leading columns of
    the logits are real (default: all).  softcap: logits are cap tanh(z / cap), None: not.  A label
    outside [0, vocab_size) that is not ignore_index makes loss and gradients NaN.
    scale: the result is multiplied by it; it gets no gradient.  To divide a sum by a count here
    rather than afterwards spares a pass over the weight's gradient.  dz is rounded after it, as in
    the plain gradient of the product: a power of two changes no digit.
    vocab_axis: inside `shard_map` (check_vma=False), the mesh axis over which the vocabulary is
    split: weight is this device's part, vocab_size and labels count over all; the loss is that of
    all parts, the gradient of x this part's share, which shard_map sums.
    chunk: tokens whose logits exist at a time (default: as fit 1 GiB, but at least 2048).
    A vocabulary that is no multiple of 128 costs the kernel a padded copy of the weight.
    Raises ValueError for shapes that do not fit, NotImplementedError under implementation="mosaic".
    """
    mosaic.check_axes("C V" if transposed else "V C", weight=weight)
    mosaic.check_whole_numbers(labels=labels)
    v, c = weight.shape[::-1] if transposed else weight.shape
    parts = 1 if vocab_axis is None else lax.axis_size(vocab_axis)
    vocab_size = v * parts if vocab_size is None else vocab_size
    if x.shape[-1:] != (c,):
        have = x.shape[-1] if x.ndim else "no axis"
        raise ValueError(f"weight has {c} features (shape {weight.shape}), x has {have}")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels have shape {labels.shape}, x {x.shape} needs {x.shape[:-1]}")
    if not 1 <= vocab_size <= v * parts:
        raise ValueError(f"vocab_size={vocab_size} is not in [1, {v * parts}], the rows of weight")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} is not positive")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} is not at least 1 token")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is not one of mean, sum")
    if jnp.shape(scale):
        raise ValueError(f"scale has shape {jnp.shape(scale)}, it is one number for all tokens")
    options = dict(
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        softcap=softcap,
        transposed=transposed,
        vocab_axis=vocab_axis,
    )
    reason = why_not(x, weight, softcap)
    if not dispatch.use_kernel("linear_cross_entropy", implementation, reason, "sm_90"):
        return linear_cross_entropy_reference(
            x, weight, labels, reduction=reduction, scale=scale, **options
        )
    rows, labels = x.reshape(-1, c), labels.reshape(-1).astype(jnp.int32)
    n = rows.shape[0]
    if chunk is None:
        copies = 4 if weight.dtype == x.dtype else x.dtype.itemsize  # dW in float32, or W in bf16
        most = max(_LEAST_TOKENS, (_BYTES - weight.size * copies) // (v * x.dtype.itemsize))
        chunk = mosaic.cdiv(n, 128 * mosaic.cdiv(n, most)) * 128  # all of one size
    scale = lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    # The smallest normal float16 is 6e-5: there dz would lose digits, and is scaled afterwards.
    inside, after = (jnp.float32(1), scale) if x.dtype == jnp.float16 else (scale, 1)
    loss = _linear_cross_entropy(rows, weight, labels, inside, _Options(**options, chunk=chunk))
    return _reduce(loss, labels, ignore_index, reduction) * after


def linear_cross_entropy_reference(
    x,
    weight,
    labels,
    *,
    vocab_size=None,
    ignore_index=-100,
    softcap=None,
    transposed=False,
    reduction="mean",
    scale=1.0,
    vocab_axis=None,
):
    """The formula in jnp, with all logits at once, rounded to x's dtype as a matmul does."""
    z = _logits(x, weight.astype(x.dtype), transposed).astype(mosaic.stat_dtype(x.dtype))
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    if vocab_axis is None:
        options = dict(vocab_size=vocab_size, ignore_index=ignore_index)
        loss = cross_entropy_reference(z, labels, **options)
    else:
        column = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
        local, valid = _local(labels, z.shape[-1], vocab_size, vocab_axis)
        z = jnp.where(column < valid, z, -jnp.inf)
        top = lax.pmax(lax.stop_gradient(z.max(-1)), vocab_axis)
        picked = jnp.where(column == local[..., None], z, 0).sum(-1)
        total = jnp.exp(z - top[..., None]).sum(-1)
        total, picked = lax.psum((total, picked), vocab_axis)
        loss = judge(jnp.log(total) - (picked - top), labels, vocab_size, ignore_index)
    scale = lax.stop_gradient(jnp.asarray(scale, loss.dtype))
    return _reduce(loss.sum(), labels, ignore_index, reduction) * scale


def why_not(x, weight, softcap=None) -> str | None:
    """Why the kernel cannot take this call, or None."""
    return (
        mosaic.lossy_softcap(softcap)
        or mosaic.unsupported_dtype(x=x, weight=weight)
        or mosaic.empty(x=x, weight=weight)
    )


def _logits(x, weight, transposed):
    return jnp.matmul(x, weight if transposed else weight.T, preferred_element_type=x.dtype)


def _reduce(total, labels, ignore_index, reduction):
    if reduction == "sum":
        return total
    return total / jnp.maximum((labels != ignore_index).sum(), 1).astype(total.dtype)


def _local(labels, v, vocab_size, vocab_axis):
    """Labels as columns of this device's v logits (-1: not among them), and its real columns."""
    if vocab_axis is None:
        column, valid = labels, vocab_size
    else:
        first = lax.axis_index(vocab_axis) * v
        column, valid = labels - first, jnp.clip(vocab_size - first, 0, v)
    return jnp.where((column >= 0) & (column < valid), column, -1), valid


@functools.partial(jax.jit, static_argnames=("real", "softcap", "write"))
def _rows(z, labels, scale, valid=None, given=(), *, real=0, softcap, write):
    """Statistics of rows of logits, and their gradient in their place.  One block for each row.

    z (n, V), V a multiple of 128; labels (n,): a column, or -1; scale (n,): what dz is multiplied
    by; real or valid (): columns that are real, a number or an array; given: top, total and
    z[label] of the rows, or nothing.
    Returns dz (None if not `write`) and, if not given, top and total of the capped logits and
    z[label] uncapped, (n,) float32.
    """
    n, v = z.shape
    part = v // 4  # a row is four parts, one for each warp of a warpgroup
    tile = next(t for most, t in _TILES if most is None or v * z.dtype.itemsize <= most)
    tiles, rest = divmod(part, tile)
    groups, unroll = _GROUPS, _UNROLL
    layout = mosaic.warp_rows(tile // 32)
    rest_layout = mosaic.warp_rows(next(k for k in (4, 2, 1) if rest % (32 * k) == 0))
    bound = [] if valid is None else [valid[None]]
    stats = [jax.ShapeDtypeStruct((n,), jnp.float32)] * 3

    def cap(u):
        """(capped logit, its derivative), through exp, whose fast form is exact enough."""
        s = 1 / (jnp.exp(u * (2 / softcap)) + 1)
        return softcap - 2 * softcap * s, 4 * s * (1 - s)

    def kernel(z_ref, labels_ref, scale_ref, *refs):
        row, group = lax.axis_index("row"), lax.axis_index("group")
        bound_ref, refs = refs[: len(bound)], refs[len(bound) :]
        label, valid = labels_ref[row], bound_ref[0][0] if bound else real
        # Steps in which no warp meets a column that is not real.
        least = lax.max(part - (v - valid), 0) if bound else max(part - (v - real), 0)
        whole = least // (groups * unroll * tile)
        at = lambda start, width: z_ref.at[row, :, pl.ds(start, width)]

        def columns(start, width, layout):
            line = plgpu.broadcasted_iota(jnp.int32, (4, width), 0, layout=layout)
            return (
                line * part
                + plgpu.broadcasted_iota(jnp.int32, (4, width), 1, layout=layout)
                + start
            )

        def load(start, width=tile, layout=layout, end=None):
            x = mosaic.load(at(start, width), layout)
            x = x if softcap is None else cap(x)[0]
            return x if end is None else jnp.where(columns(start, width, layout) < end, x, -jnp.inf)

        start_of = lambda i, u: ((i * groups + group) * unroll + u) * tile
        first = whole * (groups * unroll) + group  # of this group's tiles after the whole steps
        more = lax.div(tiles - first + (groups - 1), jnp.int32(groups))

        def statistics():
            if rest:  # under way while the others are
                mine = jnp.where(group == groups - 1, valid, 0)  # the others count none of it
                x = load(tiles * tile, rest, rest_layout, mine)

            lowest = plgpu.layout_cast(jnp.full((4, tile), LOWEST, jnp.float32), layout)
            state = lax.fori_loop(
                0,
                whole,
                lambda i, s: online(s, *(load(start_of(i, u)) for u in range(unroll))),
                (lowest, mosaic.zeros((4, tile), layout)),
            )
            tops, totals = lax.fori_loop(
                0,
                more,
                lambda i, s: online(s, load((first + i * groups) * tile, end=valid)),
                state,
            )
            top = jnp.max(tops, axis=1)
            if rest:
                # pyrefly: ignore[unbound-name]
                tail = plgpu.layout_cast(jnp.max(x, axis=1), layout.reduce(1))
                top = jnp.maximum(top, tail)
            total = jnp.sum(totals * jnp.exp(tops - mosaic.along(top, (4, tile), 0)), axis=1)
            if rest:
                top_of_rest = plgpu.layout_cast(top, rest_layout.reduce(1))
                x = jnp.exp(x - mosaic.along(top_of_rest, (4, rest), 0))
                total += plgpu.layout_cast(jnp.sum(x, axis=1), layout.reduce(1))
            return top, total

        def meet(top, total, tops, totals, bar):
            """The statistics of the row from those of its warps, in every thread."""
            mosaic.store(tops.at[group], top)
            mosaic.store(totals.at[group], total)
            plgpu.commit_smem()
            plgpu.barrier_arrive(bar)
            plgpu.barrier_wait(bar)
            warps = [(g, w) for g in range(groups) for w in range(4)]
            top = functools.reduce(jnp.maximum, (tops[i] for i in warps))
            return top, sum(totals[i] * jnp.exp(tops[i] - top) for i in warps)

        def gradient(top, total, picked, bar):
            scale = scale_ref[row]
            factor = scale / total

            def write(starts, width=tile, layout=layout, masked=False):
                xs = [mosaic.load(at(start, width), layout) for start in starts]
                for start, x in zip(starts, xs, strict=True):
                    x, slope = (x, None) if softcap is None else cap(x)
                    dz = factor * jnp.exp(x - top)
                    dz = dz if softcap is None else dz * slope
                    if masked:
                        dz = jnp.where(columns(start, width, layout) < valid, dz, 0.0)
                    mosaic.store(at(start, width), dz)

            pl.loop(0, whole)(lambda i: write([start_of(i, u) for u in range(unroll)]))
            pl.loop(0, more)(lambda i: write([(first + i * groups) * tile], masked=True))
            if rest:
                pl.when(group == groups - 1)(
                    lambda: write([tiles * tile], rest, rest_layout, masked=True)
                )
            # The label's column again: to compare every column with it took a third of the time.
            plgpu.commit_smem()
            plgpu.barrier_arrive(bar)
            plgpu.barrier_wait(bar)

            @pl.when((group == 0) & (label >= 0))
            def _():
                x, slope = (picked, 1.0) if softcap is None else cap(picked)
                dz = (factor * jnp.exp(x - top) - scale) * slope
                z_ref[row, label // part, label % part] = dz.astype(z_ref.dtype)

        if given:
            top_ref, total_ref, picked_ref, bar = refs
            gradient(top_ref[row], total_ref[row], picked_ref[row], bar)
        else:
            top_ref, total_ref, picked_ref, lines, more_lines, bar, *last = refs
            at_label = jnp.maximum(label, 0)
            picked = z_ref[row, at_label // part, at_label % part].astype(jnp.float32)
            top, total = meet(*statistics(), lines, more_lines, bar)

            @pl.when(group == 0)
            def _():
                top_ref[row] = top
                total_ref[row] = total
                picked_ref[row] = picked

            if write:
                gradient(top, total, picked, *last)

    both = "" if given or not write else "_and_gradient"
    kernel.__name__ = (
        "linear_cross_entropy_gradient" if given else f"linear_cross_entropy_statistics{both}"
    )
    bar = plgpu.Barrier(num_arrivals=groups)
    lines = [] if given else [*[plgpu.SMEM((groups, 4), jnp.float32)] * 2, bar]
    call = mosaic.kernel(
        kernel,
        out_type=stats if not given else [],
        grid=(n,),
        grid_names=("row",),
        num_threads=groups,
        thread_name="group",
        scratch_types=[*lines, bar] if write else lines,
        # Every thread overwrites what it alone has read, but for the logit of the label, which is
        # read before the warps meet.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    z = z.reshape(n, 4, part)
    if given:
        z = mosaic.in_place(call, z, labels, scale, *bound, *given)
        return (z.reshape(n, v),)
    if not write:
        return None, *call(z, labels, scale, *bound)

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
        z, *others = mosaic.apart(arrays)
        z = jax.new_ref(z)
        out = call(z, *others)
        # Tied together, as jax.checkpoint would drop a call whose statistics nobody wants.
        return mosaic.apart((jax.freeze(z), out))

    z, out = run(z, labels, scale, *bound)
    return z.reshape(n, v), *out


def _run(x, weight, labels, scale, o: _Options, differentiate: bool):
    """`scale` times the sum of all losses and, if asked for, its gradients dx and dW (float32)."""
    w = weight.astype(x.dtype)
    v = w.shape[1] if o.transposed else w.shape[0]
    w = mosaic.pad_axis(w, 1 if o.transposed else 0, 128)
    local, valid = _local(labels, v, o.vocab_size, o.vocab_axis)
    scale = judge(scale, labels, o.vocab_size, o.ignore_index)
    loss, dx, dw = jnp.float32(0), [], None
    for start in range(0, x.shape[0], o.chunk):
        of = lambda a, start=start: a[start : start + o.chunk]
        x_part, w_now = of(x), w
        if dw is not None:  # the next logits only when the last dz is no longer needed
            x_part, w_now, dw = lax.optimization_barrier((x_part, w, dw))
        z = _logits(x_part, w_now, o.transposed)
        rows = functools.partial(_rows, z, of(local), of(scale), softcap=o.softcap)
        if o.vocab_axis is None:
            dz, top, total, picked = rows(real=valid, write=differentiate)
        else:
            _, own_top, total, own_picked = rows(valid, write=False)
            top = lax.pmax(own_top, o.vocab_axis)
            total = total * jnp.exp(own_top - top)
            picked = jnp.where(of(local) >= 0, own_picked, 0)
            total, picked = lax.psum((total, picked), o.vocab_axis)
            if differentiate:
                dz, *_ = rows(valid, (top, total, own_picked), write=True)
        if o.softcap is not None:
            picked = o.softcap * jnp.tanh(picked / o.softcap)
        losses = (jnp.log(total) - (picked - top)) * of(scale)
        loss += jnp.where(of(labels) == o.ignore_index, 0, losses).sum()
        if differentiate:
            # pyrefly: ignore[unbound-name]
            dx.append(jnp.matmul(dz, w.T if o.transposed else w, preferred_element_type=x.dtype))
            pair = (x_part, dz) if o.transposed else (dz, x_part)
            more = jnp.matmul(pair[0].T, pair[1], preferred_element_type=jnp.float32)
            dw = more if dw is None else dw + more
    if dw is None:  # nor dx
        return loss
    dw = dw[:, :v] if o.transposed else dw[:v]
    return loss, jnp.concatenate(dx), dw


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _linear_cross_entropy(x, weight, labels, scale, o):
    return _run(x, weight, labels, scale, o, False)


def _forward(x, weight, labels, scale, o):
    loss, dx, dw = _run(x, weight, labels, scale, o, True)
    return loss, (dx, dw, jnp.zeros((), weight.dtype))


def _backward(o, saved, g):
    dx, dw, like = saved
    # Every device of the axis got its share of the gradient of the one loss that they all hold.
    g = g if o.vocab_axis is None else lax.psum(g, o.vocab_axis)
    return (dx * g).astype(dx.dtype), (dw * g).astype(like.dtype), None, None


_linear_cross_entropy.defvjp(_forward, _backward)
