"""Skips updates whose loss or gradient is not finite, or whose loss is a spike.

The device decides, so that the host need not wait; the loop later reads how many updates were
skipped in a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.language_model import LanguageModel, Stream

WINDOW = 100  # number of losses that define a spike


class Watch(NamedTuple):
    """The history that detects spikes; part of the training state and of every checkpoint."""

    losses: jax.Array  # (WINDOW,) fp32, losses of the last accepted updates, padded with inf
    skips: jax.Array  # () int32, updates skipped since the last accepted one


def new_watch() -> Watch:
    """The history before the first step."""
    return Watch(jnp.full(WINDOW, jnp.inf), jnp.int32(0))


def check_update(
    watch: Watch, loss: jax.Array, grad_norm: jax.Array, spike: float
) -> tuple[jax.Array, Watch]:
    """(whether to accept the update, the new history).

    spike: rejects a loss that exceeds the mean of the window by this many standard deviations; 0:
    accepts every finite loss.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:  # until the window is full, the deviation is NaN and the comparison false
        good &= ~(loss > watch.losses.mean() + spike * watch.losses.std())
    losses = jnp.where(good, jnp.append(watch.losses[1:], loss), watch.losses)
    return good, Watch(losses, jnp.where(good, 0, watch.skips + 1))


def select(good: jax.Array, new: Any, old: Any) -> Any:
    """The tree `new` if `good`, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def first_not_finite(graph, params, tokens, labels, **documents) -> str:
    """Name of the first layer whose output on this batch has a NaN or an infinity.

    Returns "the gradient" if the forward pass is finite.
    documents: segment_ids and positions, if the batch has them.
    """

    @jax.jit
    def finite(params, tokens, labels, documents):
        model: LanguageModel = nnx.merge(graph, params)
        embedded = model.embedding(tokens, documents.get("positions"))
        stream, outputs = Stream(None, None, embedded), {"embedding": embedded}
        for i, (stream, _) in enumerate(model.walk(embedded, **documents)):
            outputs[f"blocks.{i}"] = stream.sum()
        outputs["norm"] = stream.normed(model.norm)[0]
        outputs["loss"] = model.loss(tokens, labels, **documents)
        return {name: jnp.isfinite(x).all() for name, x in outputs.items()}

    flags = finite(params, tokens, labels, documents)  # jit sorts the keys of a dict
    order = ["embedding", *(f"blocks.{i}" for i in range(len(flags) - 3)), "norm", "loss"]
    return next((name for name in order if not flags[name]), "the gradient")
