"""What all models share: embedding, blocks, final norm, head, loss."""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from jaxtyping import Array, Float, Int

from jaxllm.config import ModelConfig
from jaxllm.layers import Embedding, LayerNorm, Linear, RMSNorm
from jaxllm.layers.vlstm import soft_cap
from jaxllm.sharding import BATCH, P, per_device
from pallas_kernels import linear_cross_entropy

STD = 0.02  # of all weights at the start


def block_weights(config: ModelConfig, rngs: nnx.Rngs) -> dict:
    """How the layers of a block draw their weights; 2 L branches add up on the residual stream."""
    return dict(std=STD, out_std=STD / math.sqrt(2 * config.n_layers), rngs=rngs)


class LanguageModel(nnx.Module):
    """A causal language model; a subclass names its block and norm, and has `mixing_flops`.

    block: class of the blocks, made as block(config, rngs=rngs) and called as
        block(branch, residual, positions, segment_ids) -> (branch, residual).  The residual
        stream is branch + residual: the addition is left to the next norm, which does it in the
        same pass.  A branch may be (x, bias) for x + bias: that norm's backward pass has the bias'
        gradient at hand.  Before the first block it is None.
    norm: class of the final norm.
    max_seq_len: learned positions are added to the embedding, None: not.
    tied: the head is the token embedding.
    logit_soft_cap: logits are capped as cap tanh(z / cap), None: not.
    """

    config: Any  # the subclass's kind of ModelConfig
    head: Linear | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        block: Callable[..., nnx.Module],
        norm: type[LayerNorm] | type[RMSNorm],
        max_seq_len: int | None = None,
        tied: bool = False,
        logit_soft_cap: float | None = None,
        rngs: nnx.Rngs,
    ):
        width, implementation = config.d_model, config.implementation
        self.config, self.logit_soft_cap = config, logit_soft_cap
        self.embedding = Embedding(
            config.vocab_size,
            width,
            padded_vocab_size=config.padded_vocab_size,
            max_seq_len=max_seq_len,
            std=STD,
            dtype=config.residual_dtype,
            implementation=implementation,
            rngs=rngs,
        )
        self.blocks = nnx.List([block(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = norm(
            width, eps=config.norm_eps, dtype=config.compute_dtype, implementation=implementation
        )
        if tied:
            self.head = None
        else:
            # The loss casts it, and makes its gradient in float32.
            self.head = Linear(width, config.padded_vocab_size, std=STD, copied=False, rngs=rngs)
            zero_columns(self.head.weight, config.vocab_size)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "..."] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        """The residual stream after the final norm, in the compute dtype.

        positions (T,) or (B, T): 0 ... T-1 if None; without effect on a vLSTM.  segment_ids: tokens
        of different segments do not see each other.
        """
        return self._from_embedding(self.embedding(tokens, positions), positions, segment_ids)

    def _from_embedding(self, embedded, positions, segment_ids):
        branch, residual = None, embedded
        for block in self.blocks:
            branch, residual = run_block(
                block, branch, residual, positions, segment_ids, remat=self.config.remat
            )
        return add_norm(self.norm, branch, residual)[0]

    def logits(self, hidden: Float[Array, "... C"], dtype=None) -> Float[Array, "... V"]:
        """Logits of the padded vocabulary; columns past config.vocab_size mean nothing.

        dtype: of the logits, None: that of `hidden`; in bf16 many of them are equal.
        """
        head = self.embedding.logits if self.head is None else self.head
        z = head(hidden, dtype)
        return z if self.logit_soft_cap is None else soft_cap(z, self.logit_soft_cap)

    def __call__(self, tokens: Int[Array, "B T"], **options) -> Float[Array, "B T V"]:
        """Logits of every position; options as in `hidden`."""
        return self.logits(self.hidden(tokens, **options))

    def loss(
        self,
        tokens: Int[Array, "B T"],
        labels: Int[Array, "B T"],
        *,
        positions: Int[Array, "..."] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        scale: Float[Array, ""] | float = 1.0,
    ) -> Float[Array, ""]:
        """`scale` x the cross-entropy summed over all labels but those that are -100, in float32.

        The logits are never held: head and loss are one op, which multiplies its gradients by
        `scale` (without a gradient itself) as it makes them.  positions, segment_ids: as in
        `hidden`.
        """
        head = self.head
        if head is None:
            embedded, weight = self.embedding.with_table(tokens, positions)
        else:
            embedded, weight = self.embedding(tokens, positions), head.weight[...]
        hidden = self._from_embedding(embedded, positions, segment_ids)
        shape = jax.sharding.get_abstract_mesh().shape
        if shape.get("fsdp", 1) > 1:
            weight = weight.astype(hidden.dtype)  # before it is gathered, which halves the bytes
        # Over the tensor axis the vocabulary is split, as the weight lies: its gradient stays where
        # it is made, and what moves is the gradient of `hidden`.
        tensor = "tensor" if shape.get("tensor", 1) > 1 else None
        loss = partial(
            linear_cross_entropy,
            vocab_size=self.config.vocab_size,
            softcap=self.logit_soft_cap,
            transposed=head is not None,
            reduction="sum",
            vocab_axis=tensor,
            implementation=self.config.implementation,
        )
        op = per_device(
            # One number for each part of the batch.
            lambda x, w, labels, scale: loss(x, w, labels, scale=scale)[None],
            in_specs=(P(BATCH), P(tensor) if head is None else P(None, tensor), P(BATCH), P()),
            out_specs=P(BATCH),
        )
        return op(hidden, weight, labels, jnp.asarray(scale)).sum()

    def mixing_flops(self, seq_len: int) -> float:
        """Operations of one token in the forward matmuls that have no parameters."""
        raise NotImplementedError


def run_block(block, branch, residual, positions, segment_ids, *, remat: str):
    """`block(branch, residual, positions, segment_ids)`, traced once for all equal blocks.

    remat: what the backward pass recomputes: "none", "dots": all but matmuls, "block": all.
    """
    graph, params = nnx.split(block)
    return _run_block(graph, remat, params, branch, residual, positions, segment_ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_block(graph, remat, params, branch, residual, positions, segment_ids):
    def run(params, *args):
        branch, residual = nnx.merge(graph, params)(*args)
        if remat == "block":
            # What a block receives is what stays in memory: one array rather than two.
            branch, residual = None, add(branch, residual)
        return branch, residual

    if remat == "block":
        run = jax.checkpoint(run)
    elif remat == "dots":
        run = jax.checkpoint(run, policy=_SAVED_DOTS)
    return run(params, branch, residual, positions, segment_ids)


# Matmuls with weights, and what the attention kernel names so: its output and log-sum-exp.  The
# matmuls of the XLA form of attention have batch axes and results quadratic in T: recomputed.
_SAVED_DOTS = checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable,
    checkpoint_policies.save_only_these_names("attention"),
)


def add(branch, residual):
    """branch + residual in the residual's dtype."""
    if branch is None:
        return residual
    x, bias = _apart(branch)
    x = x if bias is None else x + bias.astype(x.dtype)
    return residual + x.astype(residual.dtype)


def add_norm(norm, branch, residual):
    """(norm(s), s) of s = branch + residual, in one pass."""
    if branch is None:
        return norm(residual), residual
    x, bias = _apart(branch)
    return norm.add(x, residual, bias)


def _apart(branch):
    """(x, bias) of a branch x + bias, (x, None) of one without."""
    return branch if isinstance(branch, tuple) else (branch, None)


def zero_columns(weight: nnx.Param, start: int) -> None:
    """Sets the columns from `start` on to zero: the part of a head that pads the vocabulary."""
    weight[...] = jnp.where(jnp.arange(weight.shape[1]) < start, weight[...], 0)
