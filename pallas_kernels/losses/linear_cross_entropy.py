"""The head of a language model fused with its loss, which computes the logits in chunks.

    z = x W^T, capped: cap tanh(x W^T / cap)         loss = sum of log(total) - (z[label] - top)
    top = max_v z[v], total = sum_v exp(z[v] - top)  dz[v] = exp(z[v] - top) / total - [v = label]
    dx = dz W,  dW = dz^T x

The (N, V) logits are the largest array of a training step (3 GB for 32768 tokens of GPT-2), so only
a few thousand tokens have logits at a time.  The loss is scalar, so each chunk's gradient is
known up to a constant factor as soon as its logits are: the forward pass also computes dx and dW
(three matmuls, none twice), and the backward pass only scales them, as in Liger (Hsu et al. 2024).
A factor that is known in advance is applied to dz (`scale`); if nothing else follows the loss, the
backward pass has nothing to do.

XLA runs the matmuls, at the hardware's limit.  The kernel between them is cross_entropy's: it reads
a row of logits and overwrites it with dz.  Statistics, loss and dW are float32; dz is rounded to
x's dtype for its matmuls.

With `fp8` z = Q4(x) Q4(W)^T, dx = Q5(dz) Q4(W), dW = Q5(dz)^T Q4(x), where Q4 and Q5 round to e4m3
and e5m2; the products are fp8_linear's.  dz = exp(z - log_sum) - [v = label] needs no maximum:
the factor of the loss multiplies the products instead, so dz lies in [-1, 1], and -1 is exact.
Another kernel writes dz once the sums of rows are known (docs/fp8.md).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.float8 import linear as fp8_linear
from pallas_kernels.float8 import quantize
from pallas_kernels.float8.quantize import TILE, Cast, cast
from pallas_kernels.losses.cross_entropy import capped, logits_kernel, losses_of, mask_by_label
from pallas_kernels.options import checked, custom_vjp
from pallas_kernels.totals import check_totals, summed

# Every chunk reads and writes all of dW, so chunks are as large as memory allows.  4096 and more
# tokens of GPT-2 take the same time within 2%; with 2048 instead of 4096 a step of Llama 1B takes
# 0.5% more, one of 8B's widths with 8 blocks 1.3% (docs/performance.md).
_BYTES = 960 * 2**20  # for the logits of a chunk and the copies of the weight
_LEAST_TOKENS = 4096  # per chunk


class _Options(NamedTuple):
    vocab_size: int
    ignore_index: int
    softcap: float | None
    transposed: bool
    vocab_axis: str | None
    fp8: bool
    chunk: int  # tokens


@checked
def linear_cross_entropy(
    x: Float[Array, "*batch C"],
    weight: Float[Array, "_ _"],
    labels: Integer[ids.Ids, "*batch"],
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    transposed: bool = False,
    reduction: Literal["mean", "sum"] = "mean",
    scale: Float[Array, ""] | float = 1.0,
    vocab_axis: str | None = None,
    fp8: bool = False,
    total: Float[Array, "_ _"] | None = None,
    chunk: int | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, ""]:
    """Mean (or sum) cross-entropy of x W^T in nats, over labels other than ignore_index, float32.

    weight: (V, C) like an embedding, or with transposed=True (C, V) like a dense layer; cast to x's
    dtype.  Its gradient is summed in float32 and has the weight's dtype.
    vocab_size: number of leading columns of the logits that are not padding (default: all).
    softcap: caps logits to softcap * tanh(z / softcap), if given.
    labels: one that is neither in [0, vocab_size) nor ignore_index makes loss and gradients NaN.
    scale: multiplies the result; it gets no gradient.  Dividing a sum by a count here and not
    afterwards saves a pass over the weight's gradient.  dz is rounded after this factor, as in the
    plain gradient of the product; a power of two changes no digit.
    vocab_axis: the mesh axis that splits the vocabulary, inside `shard_map` (check_vma=False).
    weight is then this device's part, while vocab_size and labels refer to the whole vocabulary.
    The loss is the whole vocabulary's; x's gradient is this part's share, which shard_map sums.
    Differentiate the shard_map: JAX sums the cotangents of a loss that is differentiated inside.
    fp8: whether the three matmuls take fp8 operands, where the number of tokens and C
    are multiples of 64; `dispatch.explain()` reports other calls, which stay in x's dtype.  It
    needs the flag of XLA that `fp8_linear` needs.
    total: the sum of the weight's gradients so far (totals.py), for reduction="sum"; the result's
    gradient must be 1, or the total's gradient is NaN: `scale` takes any other factor.
    chunk: tokens whose logits exist at a time (default: as many as fit 960 MiB beside the weight's
    copies, at least 4096).
    The kernel copies the weight to pad it if the vocabulary is not a multiple of 128.
    """
    vocab_size = _check(x, weight, labels, vocab_size, transposed, vocab_axis, scale, chunk)
    if total is not None:
        check_totals((total,), weight)
        if reduction == "mean":
            raise ValueError('a total needs reduction="sum", with 1 / count as a part of `scale`')
    labels, ignore_index = ids.labels(labels, ignore_index)
    reason = mosaic.not_a_multiple(TILE, tokens=labels.size, C=x.shape[-1]) if fp8 else None
    fp8 = fp8 and reason is None
    options = dict(vocab_size=vocab_size, ignore_index=ignore_index, softcap=softcap, fp8=fp8)
    options |= dict(transposed=transposed, vocab_axis=vocab_axis, chunk=chunk)
    options |= dict(reduction=reduction, scale=scale, total=total)
    call = "linear_cross_entropy", FP8 if fp8 else FORMS, implementation, x, weight, labels
    if reason:
        decision, why = dispatch.choose(*call, **options)[1], f"{x.dtype}, not fp8: {reason}"
        dispatch.record(decision._replace(kind="unsupported", why=why))
    return dispatch.run(*call, **options)


def _kernels(x, weight, labels, *, reduction, scale, chunk, total, **options):
    if options["fp8"]:
        fp8_linear.warn_of_flags()
    rows, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    scale = lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    # The smallest normal float16 is 6e-5: dz would lose digits, so the result is scaled instead.
    inside, after = scale, 1
    if x.dtype == jnp.float16:
        inside, after, weight, total = jnp.float32(1), scale, summed(weight, total), None
    o = _Options(**options, chunk=_tokens(rows, weight, chunk, **options))
    loss = _linear_cross_entropy(rows, weight, labels, inside, total, o)
    return _reduce(loss, labels, o.ignore_index, reduction) * after


def _tokens(x, weight, asked: int | None, *, fp8, transposed, **options) -> int:
    """Tokens whose logits exist at a time."""
    if asked is not None:
        return mosaic.cdiv(asked, TILE) * TILE if fp8 else asked
    n, v = x.shape[0], weight.shape[1 if transposed else 0]
    copies = 4 if weight.dtype == x.dtype else x.dtype.itemsize  # float32 dW, or bf16 W
    most = max(_LEAST_TOKENS, (_BYTES - weight.size * copies) // (v * x.dtype.itemsize))
    return mosaic.cdiv(n, 128 * mosaic.cdiv(n, most)) * 128  # chunks of equal size


def _check(x, weight, labels, vocab_size, transposed, vocab_axis, scale, chunk) -> int:
    """The vocabulary's size; raises ValueError if a value is wrong."""
    mosaic.check_axes("C V" if transposed else "V C", weight=weight)
    v, c = weight.shape[::-1] if transposed else weight.shape
    parts = 1 if vocab_axis is None else lax.axis_size(vocab_axis)
    vocab_size = v * parts if vocab_size is None else vocab_size
    if x.shape[-1:] != (c,):
        have = x.shape[-1] if x.ndim else "no axis"
        raise ValueError(f"weight has {c} features (shape {weight.shape}), but x has {have}")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"labels have shape {labels.shape}, but x {x.shape} needs {x.shape[:-1]}")
    if not 1 <= vocab_size <= v * parts:
        raise ValueError(f"vocab_size={vocab_size} is not in [1, {v * parts}], weight's vocabulary")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} is not at least 1 token")
    if jnp.shape(scale):
        raise ValueError(f"scale has shape {jnp.shape(scale)}, but must be one number")
    return vocab_size


def linear_cross_entropy_reference(
    x, weight, labels, *, vocab_size=None, ignore_index=-100, softcap=None, transposed=False,
    reduction="mean", scale=1.0, vocab_axis=None, fp8=False, chunk=None, total=None,
):  # fmt: skip
    """The formula in jnp, with all logits at once, rounded to x's dtype as a matmul rounds them."""
    weight = summed(weight, total)
    if fp8 and x.dtype != jnp.float64:  # float64 is not rounded: tests take it as the truth
        w = weight if transposed else weight.T
        z = fp8_linear.linear(x, w, None, None, None, False)
    else:
        z = _logits(x, weight.astype(x.dtype), transposed)
    z = z.astype(mosaic.stat_dtype(x.dtype))
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    vocab_size = z.shape[-1] if vocab_size is None else vocab_size
    loss = losses_of(z, *_local(labels, z.shape[-1], vocab_size, vocab_axis), vocab_axis)
    loss = mask_by_label(loss, labels, vocab_size, ignore_index)
    scale = lax.stop_gradient(jnp.asarray(scale, loss.dtype))
    return _reduce(loss.sum(), labels, ignore_index, reduction) * scale


def why_not(x, weight, labels, *, softcap, **options) -> str | None:
    reason = mosaic.lossy_softcap(softcap) or mosaic.unsupported_dtype(x=x, weight=weight)
    return reason or mosaic.empty(x=x, weight=weight)


def _logits(x, weight, transposed):
    return jnp.matmul(x, weight if transposed else weight.T, preferred_element_type=x.dtype)


def _reduce(total, labels, ignore_index, reduction):
    if reduction == "sum":
        return total
    return total / jnp.maximum((labels != ignore_index).sum(), 1).astype(total.dtype)


def _local(labels, v, vocab_size, vocab_axis):
    """Labels as columns of this device's v logits (-1: elsewhere), and its unpadded columns."""
    column, valid = labels, vocab_size
    if vocab_axis is not None:
        first = lax.axis_index(vocab_axis) * v
        column, valid = labels - first, jnp.clip(vocab_size - first, 0, v)
    return jnp.where((column >= 0) & (column < valid), column, -1), valid


def _run(x, weight, labels, scale, dw, o: _Options, differentiate: bool, frozen=False) -> tuple:
    """(`scale` times the sum of all losses, (dx, dw + dW in float32)), each gradient or None.

    dw: float32 or None, which stands for 0.
    frozen: the weight needs no gradient, so dW is None.
    """
    v = weight.shape[1 if o.transposed else 0]
    padded = lambda a: mosaic.pad_axis(a, 1 if o.transposed else 0, 128)  # of the vocabulary
    w = padded(weight if o.fp8 else weight.astype(x.dtype))
    if o.fp8:
        w = cast(w, fp8_linear.FORWARD, True)
        w = w if o.transposed else w._replace(values=w.transposed, transposed=w.values)
    local, valid = _local(labels, v, o.vocab_size, o.vocab_axis)
    # fp8: 1, so that dz = -1 is exact; the products are multiplied by `scale`.
    factor = jnp.float32(1) if o.fp8 else scale
    factor = mask_by_label(factor, labels, o.vocab_size, o.ignore_index)
    loss, dx, dw = jnp.float32(0), [], None if dw is None else padded(dw)
    chunk = functools.partial(_fp8_chunk, scale) if o.fp8 else functools.partial(_chunk, w)
    how = valid, o, differentiate, frozen
    for start in range(0, x.shape[0], o.chunk):
        of = lambda a, start=start: a[start : start + o.chunk]
        x_now, w_now = of(x), w
        if dx:  # delays the next logits until the last dz can be freed
            # Without dx, XLA postpones its matmuls on a mesh, to overlap them with the sum of dw
            # over the devices, and keeps all logits until then.
            x_now, w_now, dw, dx[-1] = lax.optimization_barrier((x_now, w, dw, dx[-1]))
        some, more_dx, more = chunk(x_now, w_now, of(local), of(factor), *how)
        loss += jnp.where(of(labels) == o.ignore_index, 0, some).sum()
        if differentiate:
            dx.append(more_dx)
        if more is not None:
            dw = more if dw is None else dw + more
    if dw is not None:
        dw = dw[:, :v] if o.transposed else dw[:v]
    dx = jnp.concatenate(dx) if dx else None
    if o.fp8:
        loss, dx = loss * scale, None if dx is None else (dx * scale).astype(x.dtype)
    return loss, (dx, dw)


def _chunk(w, x, w_now, local, scale, valid, o: _Options, differentiate, frozen):
    """The losses of some tokens times `scale`, their dx and their dW; w_now is w for the logits."""
    z = _logits(x, w_now, o.transposed)
    kernel = functools.partial(logits_kernel, z, local, scale, softcap=o.softcap)
    if o.vocab_axis is None:
        dz, top, total, picked = kernel(real=valid, write=differentiate)
    else:
        top, total, picked, own_picked = _sums(z, local, valid, o)
        dz = kernel(valid, (top, total, own_picked), write=True)[0] if differentiate else None
    losses = _loss(top, total, picked, o) * scale
    if dz is None:
        return losses, None, None
    dx = jnp.matmul(dz, w.T if o.transposed else w, preferred_element_type=x.dtype)
    if frozen:
        return losses, dx, None
    pair = (x, dz) if o.transposed else (dz, x)
    return losses, dx, jnp.matmul(pair[0].T, pair[1], preferred_element_type=jnp.float32)


@jax.jit(static_argnums=(6, 7, 8))  # lowered once for all chunks
def _fp8_chunk(scale, x, w, local, known, valid, o: _Options, differentiate, frozen):
    """The same with fp8 operands; known: 0 where a label is ignored, NaN where it is wrong."""
    valid = o.vocab_size if o.vocab_axis is None else valid  # an int, as it was before jit
    x8 = cast(x, fp8_linear.FORWARD, True)
    z = fp8_linear.times(x8, w, x.dtype)
    top, total, picked, _ = _sums(z, local, valid, o)
    losses = _loss(top, total, picked, o) * known
    if not differentiate:
        return losses, None, None
    log_sum = jnp.where(known == 0, jnp.inf, (top + jnp.log(total)) * known)
    target = jnp.where(known == 0, -1, local)  # ignore_index may be a class
    dz8 = fp8_gradient(z, target, log_sum, valid, o.softcap)
    dx = fp8_linear.times_weight(dz8, w, x.dtype)
    if frozen:
        return losses, dx, None
    dz8 = dz8._replace(inverse=dz8.inverse * scale)  # in float32 here, so any factor is exact
    pair = (x8, dz8) if o.transposed else (dz8, x8)
    return losses, dx, fp8_linear.weight_gradient(*pair, jnp.float32)


def fp8_gradient(z, labels, log_sum, valid, softcap) -> Cast:
    """dz of rows of logits, in both orders.

    labels: (n,), a column or -1.  log_sum: (n,), of the exponentials of the capped logits; infinite
    for rows without a gradient.  valid: columns that are not padding, an int or an array ().
    """
    rows = [log_sum, labels]
    known: Any = valid if isinstance(valid, int) else None  # the tile is hashed: it holds no array
    if known is None:
        rows.append(jnp.full(labels.shape, valid))

    def tile(u, log_sum, label, valid=known):
        x, through_cap = capped(u, softcap)
        column = quantize.column_numbers()
        dz = jnp.exp(x - log_sum)
        dz = through_cap(jnp.where(column == label, dz - 1, dz))
        return (jnp.where(column < valid, dz, 0.0),)

    name, one = "linear_cross_entropy_gradient_fp8", [jnp.float32(1)]
    options = dict(rows=rows, name=name, approx=True)
    return quantize.cast_results(tile, [z], one, fp8_linear.BACKWARD, **options)[0][0]


def _sums(z, local, valid, o: _Options):
    """top, total and z[label] of rows, of the devices of vocab_axis together, and our z[label]."""
    kernel = functools.partial(logits_kernel, z, local, None, softcap=o.softcap, write=False)
    if o.vocab_axis is None:
        _, top, total, picked = kernel(real=valid)
        return top, total, picked, picked
    _, own_top, total, own_picked = kernel(valid)
    top = lax.pmax(own_top, o.vocab_axis)
    total = total * jnp.exp(own_top - top)
    picked = jnp.where(local >= 0, own_picked, 0)
    total, picked = lax.psum((total, picked), o.vocab_axis)
    return top, total, picked, own_picked


def _loss(top, total, picked, o: _Options):
    if o.softcap is not None:
        picked = o.softcap * jnp.tanh(picked / o.softcap)
    return jnp.log(total) - (picked - top)


@functools.partial(custom_vjp, nondiff_argnums=(5,))
def _linear_cross_entropy(x, weight, labels, scale, total, o):
    return _run(x, weight, labels, scale, None, o, False)[0]


def _forward(x, weight, labels, scale, total, o):
    values = x.value, weight.value, labels.value, scale.value, total and total.value
    loss, gradients = _run(*values, o, True, frozen=total is None and not weight.perturbed)
    return loss, (gradients, jnp.zeros((), weight.value.dtype) if total is None else None)


def _backward(o, saved, g):
    (dx, dw), like = saved
    # All devices of the axis hold the same loss, and each got a share of its gradient.
    g = g if o.vocab_axis is None else lax.psum(g, o.vocab_axis)
    dx = (dx * g).astype(dx.dtype)
    if like is None:  # with a total
        return dx, None, None, None, jnp.where(g == 1, dw, jnp.sqrt(jnp.where(g == 1, 0.0, -1.0)))
    return dx, None if dw is None else (dw * g).astype(like.dtype), None, None, None


_linear_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


FORMS = Form("general", _kernels, "sm_80", why_not), Form("xla", linear_cross_entropy_reference)
FP8 = (FORMS[0]._replace(gpu="sm_89"), FORMS[1])
