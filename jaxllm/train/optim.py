"""Clipping by global norm, then AdamW or Muon in optax, with decoupled weight decay of matrices.

An update whose loss or gradient is not finite, or whose loss is a spike, is skipped.  The device
decides, so that the host need not wait; the loop later reads how many were skipped in a row.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; Jordan et al. 2024, "Muon: An
optimizer for hidden layers in neural networks".
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxllm.config import OptimizerConfig

_NEWTON = 3.4445, -4.7750, 2.0315  # optax.contrib.muon's
_BATCH = 2**26  # elements in a batch of matrices: 128 MB in bf16
WINDOW = 100  # number of losses that define a spike


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Step (from 0) -> learning rate: a linear warm-up, then the schedule over the other steps."""
    peak, end, warmup = config.learning_rate, config.final_fraction, config.warmup_steps
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=end)
    elif config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:  # linear; or wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM)
        part = 1.0 if config.schedule == "linear" else config.decay_fraction
        falling = min(max(round(part * steps), 1), rest)
        after = optax.linear_schedule(peak, end * peak, falling, rest - falling)
    if not warmup:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def at_step(opt_state: optax.OptState, step: jax.Array) -> optax.OptState:
    """The optimizer's state with the learning rate of `step`, also after skipped updates."""
    of_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    return jax.tree.map(
        lambda x: x._replace(count=step) if of_schedule(x) else x, opt_state, is_leaf=of_schedule
    )


def global_norm(tree) -> jax.Array:
    """Square root of the sum of all squares, () float32, like `optax.tree.norm` but faster."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:  # each device sums its own part of every array
        return optax.tree.norm(tree)
    # XLA uses two kernels of 2 us to sum any array to a number, even a small one: 222 of the 539
    # small kernels in a step of GPT-2 124M.  With row sums, each matrix takes one kernel, and all
    # vectors together take two.  The barrier keeps XLA from undoing the concatenation.
    rows = [jnp.square(x).sum(range(1, x.ndim)) for x in map(jnp.atleast_1d, jax.tree.leaves(tree))]
    return jnp.sqrt(jax.lax.optimization_barrier(jnp.concatenate(rows)).sum())


def clip_by_global_norm(largest: float) -> optax.GradientTransformation:
    """Like `optax.clip_by_global_norm`, with our `global_norm`."""

    def clip(updates, _):
        norm = global_norm(updates)
        return jax.tree.map(lambda x: jnp.where(norm < largest, x, x / norm * largest), updates)

    return optax.stateless(clip)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clips, then applies AdamW, or Muon to the blocks' matrices; vectors are not decayed."""
    rule = optax.adamw(
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
    )
    if config.name == "muon":
        name = lambda path, p: "muon" if path[0].key == "blocks" and p.ndim == 2 else "adamw"
        names = lambda params: jax.tree.map_with_path(name, params)
        rule = optax.partition({"muon": muon(config, steps), "adamw": rule}, names)
    if not config.clip_norm:
        return rule
    return optax.chain(clip_by_global_norm(config.clip_norm), rule)


def muon(config: OptimizerConfig, steps: int, dtype=jnp.bfloat16) -> optax.GradientTransformation:
    """`optax.contrib.muon` of matrices, with Newton-Schulz iterations in `dtype`.

    Each matrix is orthogonalized by itself; q, k and v are three matrices.
    """
    each = lambda tree: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)
    rate = config.model_copy(update={"learning_rate": config.muon_learning_rate})
    return optax.chain(
        # With ns_steps=0: Nesterov momentum, divided by its norm.
        optax.contrib.scale_by_muon(ns_steps=0, weight_dimension_numbers=each),
        optax.stateless(lambda updates, _: orthogonal(updates, dtype)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(learning_rate(rate, steps)),
    )


def orthogonal(matrices, dtype):
    """Matrices (in, out) of norm 1, nearly orthogonalized, times sqrt(max(1, out / in)).

    X = a X + b (X X^T) X + c (X X^T)^2 X, five times, drives singular values to 0.7 to 1.2.  Equal
    shapes share batched matmuls: one of 768 x 768 would fill a quarter of an H100.
    """
    leaves, structure = jax.tree.flatten(matrices)
    wide = [x.T if x.shape[0] > x.shape[1] else x for x in leaves]
    groups, results = {}, list(leaves)
    for i, x in enumerate(wide):
        groups.setdefault(x.shape, []).append(i)
    for shape, members in groups.items():
        count = max(1, _BATCH // math.prod(shape))
        for at in range(0, len(members), count):
            some = members[at : at + count]
            x = jnp.stack([wide[i] for i in some]).astype(dtype)
            for _ in range(5):
                square = x @ x.mT
                x = _NEWTON[0] * x + (_NEWTON[1] * square + _NEWTON[2] * square @ square) @ x
            for i, y in zip(some, x.astype(jnp.float32), strict=True):
                rows, columns = leaves[i].shape
                results[i] = (y.T if rows > columns else y) * max(1, columns / rows) ** 0.5
    return jax.tree.unflatten(structure, results)


class Watch(NamedTuple):
    """The history that detects spikes; part of the training state and of every checkpoint."""

    losses: jax.Array  # (WINDOW,) fp32, of the last accepted updates; first finfo.max (not inf)
    skips: jax.Array  # () int32, updates skipped since the last accepted one


def check_update(
    watch: Watch, loss: jax.Array, grad_norm: jax.Array, spike: float
) -> tuple[jax.Array, Watch]:
    """(whether to accept the update, the new history).

    spike: rejects a loss that exceeds the mean of the window by this many standard deviations; 0:
    accepts every finite loss.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if spike:  # until the window is full, the deviation is infinite and the comparison false
        good &= ~(loss > watch.losses.mean() + spike * watch.losses.std())
    losses = jnp.where(good & (loss > 0), jnp.append(watch.losses[1:], loss), watch.losses)
    return good, Watch(losses, jnp.where(good, 0, watch.skips + 1))
