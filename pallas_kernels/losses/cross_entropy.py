"""Softmax cross-entropy of logits against labels, the loss of a language model.

    loss = log(total) - (z[label] - top),   total = sum_v exp(z[v] - top),   top = max_v z[v]
    dz[v] = dloss (exp(z[v] - top) / total - [v = label])       (v over the real vocabulary only)

Columns past `vocab_size` are padding: the sum leaves them out and their gradient is zero.  The
forward pass reads the logits once, the backward pass reads them once and writes their gradient, by
the kernel of linear_cross_entropy (kernels.py).  Everything is computed in float32.  The forward
pass saves top and total, not their log-sum-exp, which for logits near 1000 has a rounding error of
3e-5 that enters every probability.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from pallas_kernels import dispatch, ids, mosaic
from pallas_kernels.dispatch import Form
from pallas_kernels.losses.kernels import COLUMNS, logits_kernel
from pallas_kernels.options import checked, with_gradient


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
    The gradient has the dtype of logits.  The kernel reads logits in place if their columns are a
    multiple of 128, and copies others, for which XLA is faster.
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


def cross_entropy_reference(logits, labels, *, vocab_size=None, ignore_index=-100):
    """The formula in jnp, in float32 (float64 for float64)."""
    v = logits.shape[-1]
    vocab_size = v if vocab_size is None else vocab_size
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
    return reason or mosaic.too_many(rows=logits.size // logits.shape[-1])


def why_slower(logits, labels, **options) -> str | None:
    """Why XLA's form is faster than the kernel, or None.

    Speed of an earlier kernel relative to XLA, forward / both directions, H100, JAX 0.11.2: 33 x
    128257 0.76 / 0.86, with a quarter of 132 SMs busy; 64 x 50257 1.25 / 1.47.  Few rows take as
    long as one, so the ratio grows to 0.95 at 41 rows.
    """
    if labels.size < 41:
        return f"{labels.size} rows, of one block each, are fewer than 41"
    if logits.shape[-1] % COLUMNS:
        return f"V={logits.shape[-1]} is not a multiple of {COLUMNS}, so the kernel would copy"
    return None


def mask_by_label(value, labels, vocab_size, ignore_index):
    """`value` for a label in the vocabulary, 0 for ignore_index, NaN for any other label."""
    ignored = labels == ignore_index
    known = ignored | ((labels >= 0) & (labels < vocab_size))
    # The product makes the reference's gradient NaN too if the label is wrong.
    return jnp.where(ignored, 0.0, value * jnp.where(known, 1.0, jnp.nan))


# ---- kernel ----------------------------------------------------------------------------------


def _forward(logits, labels, vocab_size, ignore_index):
    _, top, total, picked = _on_rows(logits, labels, None, vocab_size, write=False)
    loss = mask_by_label(jnp.log(total) - (picked - top), labels, vocab_size, ignore_index)
    return loss, (logits, labels, top, total, picked)


def _backward(vocab_size, ignore_index, saved, dloss):
    logits, labels, *given = saved
    scale = mask_by_label(dloss, labels, vocab_size, ignore_index)
    (dlogits,) = _on_rows(logits, labels, scale, vocab_size, given=given, write=True, keep=True)
    return dlogits[:, : logits.shape[1]], None


def _on_rows(logits, labels, scale, vocab_size, **options):
    """`logits_kernel` of logits (N, V) without a cap, padded to whole tiles."""
    labels = jnp.where((labels >= 0) & (labels < vocab_size), labels, -1)
    logits = mosaic.pad_axis(logits, 1, COLUMNS)
    return logits_kernel(logits, labels, scale, real=vocab_size, softcap=None, **options)


_cross_entropy = with_gradient(_forward, _backward, nondiff_argnums=(2, 3))


def _kernels(logits, labels, *, vocab_size, ignore_index):
    rows = logits.reshape(-1, logits.shape[-1])
    loss = _cross_entropy(rows, labels.reshape(-1), vocab_size, ignore_index)
    return loss.reshape(labels.shape)


FORMS = (
    Form("general", _kernels, "sm_80", why_not, why_slower),
    Form("xla", cross_entropy_reference),
)
