"""Which updates a step takes: none from a loss or gradient that is not finite, none from a spike.

The choice is made on the device, so that a bad step costs nothing and needs no waiting; the loop
reads afterwards how many were skipped in a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.language_model import LanguageModel
from jaxllm.models.stream import Stream

WINDOW = 100  # losses that say what a spike is


class Watch(NamedTuple):
    """What a step knows of the steps before it; part of the state and of every checkpoint."""

    losses: jax.Array  # (WINDOW,) fp32, of the updates taken last; inf where there were fewer
    skips: jax.Array  # int32, updates skipped since the last one that was taken


def new_watch() -> Watch:
    """Before the first step."""
    return Watch(jnp.full(WINDOW, jnp.inf), jnp.int32(0))


def judge(
    watch: Watch, loss: jax.Array, grad_norm: jax.Array, spike: float
) -> tuple[jax.Array, Watch]:
    """(whether to take the update, the watch after it).

    spike: a loss that exceeds the window's mean by so many standard deviations is one; 0: none is.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:  # the deviation is NaN and the comparison false until the window is full
        good &= ~(loss > watch.losses.mean() + spike * watch.losses.std())
    losses = jnp.where(good, jnp.append(watch.losses[1:], loss), watch.losses)
    return good, Watch(losses, jnp.where(good, 0, watch.skips + 1))


def choose(good: jax.Array, new: Any, old: Any) -> Any:
    """The tree `new` if `good`, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def first_not_finite(graph, params, tokens, labels, **documents) -> str:
    """Name of the first layer whose output on this batch holds a NaN or an infinity.

    "the gradient" if the whole forward pass is finite.  documents: segment_ids and positions of a
    batch that has them.
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

    flags = finite(params, tokens, labels, documents)  # a dict comes back in the order of its names
    order = ["embedding", *(f"blocks.{i}" for i in range(len(flags) - 3)), "norm", "loss"]
    return next((name for name in order if not flags[name]), "the gradient")
