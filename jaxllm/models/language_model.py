"""What all models share: embedding, blocks, final norm, head, loss."""

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from jaxtyping import Array, Float, Int

from jaxllm.config import GPT2Config, Llama3Config, ModelConfig
from jaxllm.layers import Embedding, LayerNorm, Linear, RMSNorm
from jaxllm.layers.cache import Cache
from jaxllm.layers.vlstm import soft_cap
from jaxllm.models.stream import Stream
from jaxllm.sharding import BATCH, P, per_device
from pallas_kernels import linear_cross_entropy

STD = 0.02  # of all weights at the start
IGNORE = -100  # label of a position that takes no part in the loss


def block_weights(config: ModelConfig, rngs: nnx.Rngs) -> dict:
    """How the layers of a block draw their weights; 2 L branches add up on the residual stream."""
    return dict(std=STD, out_std=STD / math.sqrt(2 * config.n_layers), rngs=rngs)


class LanguageModel(nnx.Module):
    """A causal language model; a subclass names its block and norm, and has `mixing_flops`.

    block: class of the blocks, made as block(config, rngs=rngs) and called as
        block(stream, positions, segment_ids, cache) -> (stream, cache), a Stream and a Cache;
        without a cache the one returned is None.
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
        embedded = self.embedding(tokens, positions)
        return self.advance(embedded, positions=positions, segment_ids=segment_ids)[0]

    def advance(
        self, embedded: Float[Array, "B T C"], **options
    ) -> tuple[Float[Array, "B T C"], list[Cache | None]]:
        """(the stream after the final norm, the caches after it) of embedded tokens.

        Options as in `walk`.
        """
        *_, last = walked = list(self.walk(embedded, **options))
        return last[0].normed(self.norm)[0], [cache for _, cache in walked]

    def walk(
        self,
        embedded: Float[Array, "B T C"],
        *,
        positions: Int[Array, "..."] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        caches: list[Cache] | None = None,
    ) -> Iterator[tuple[Stream, Cache | None]]:
        """Yields what each block hands on, and its cache after it, for embedded tokens.

        caches: in generation, one for each block.  positions, segment_ids: as in `hidden`.
        """
        stream = Stream(None, None, embedded)
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            # Without a backward pass nothing is recomputed.
            remat = self.config.remat if caches is None else "none"
            stream, cache = run_block(block, stream, positions, segment_ids, cache, remat=remat)
            yield stream, cache

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
        hidden = self.advance(embedded, positions=positions, segment_ids=segment_ids)[0]
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


def run_block(block, stream, positions, segment_ids, cache, *, remat: str):
    """`block(stream, positions, segment_ids, cache)`, traced once for all equal blocks.

    remat: what the backward pass recomputes: "none", "dots": all but matmuls, "block": all.
    """
    graph, params = nnx.split(block)
    return _run_block(graph, remat, params, stream, positions, segment_ids, cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_block(graph, remat, params, *args):
    def run(params, *args):
        stream, cache = nnx.merge(graph, params)(*args)
        if remat == "block":
            # What a block receives is what stays in memory: one array rather than two.
            stream = Stream(None, None, stream.sum())
        return stream, cache

    if remat == "block":
        run = jax.checkpoint(run)
    elif remat == "dots":
        run = jax.checkpoint(run, policy=_SAVED_DOTS)
    return run(params, *args)


# Matmuls with weights, and what the attention kernel names so: its output and log-sum-exp.  The
# matmuls of the XLA form of attention have batch axes and results quadratic in T: recomputed.
_SAVED_DOTS = checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable,
    checkpoint_policies.save_only_these_names("attention"),
)


def attention_flops(config: GPT2Config | Llama3Config, seq_len: int) -> float:
    """4 D for each key that a query sees on average, in every head: T / 2 of them without a window.

    A sequence counts as one document, also where several are packed into it.
    """
    window = min(config.window or seq_len, seq_len)
    seen = window - window * window / (2 * seq_len)
    return 4.0 * config.n_layers * seen * config.n_heads * config.head_dim


def zero_columns(weight: nnx.Param, start: int) -> None:
    """Sets the columns from `start` on to zero: the part of a head that pads the vocabulary."""
    weight[...] = jnp.where(jnp.arange(weight.shape[1]) < start, weight[...], 0)
