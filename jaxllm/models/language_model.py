"""The base class of all models: embedding, blocks, final norm, head, loss, residual stream."""

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies
from jaxtyping import Array, Float, Integer

from jaxllm.config import IGNORE, ModelConfig
from jaxllm.layers import MLP, Attention, Embedding, GatedMLP, Linear, VLSTMLayer
from jaxllm.layers.cache import Cache
from jaxllm.layers.layer import Layer
from jaxllm.layers.norm import Norm, plain
from jaxllm.layers.vlstm import soft_cap
from jaxllm.sharding import BATCH, PARTS, SHARDS, P, axis_size, constrain, in_order, per_device
from pallas_kernels import ids, linear_cross_entropy
from pallas_kernels.ids import Ids
from pallas_kernels.mosaic import plus

STD = 0.02  # initial standard deviation of all weights
# The methods that `of_row` replaces for a single row; a subclass may override them.
_OF_ROW = {Attention.with_cache, VLSTMLayer.with_cache, MLP.__call__, GatedMLP.__call__}


class Stream(NamedTuple):
    """The residual stream, (branch + bias) + residual; branch and bias may be None.

    The next norm adds them in its own pass over the stream, and its backward pass yields the bias
    gradient for free.  The first block receives no branch.
    """

    branch: Float[Array, "B T C"] | None
    bias: Float[Array, " C"] | None
    residual: Float[Array, "B T C"]

    def sum(self) -> Float[Array, "B T C"]:
        """The stream as one array, in the residual's dtype."""
        if self.branch is None:
            return self.residual
        return self.residual + plus(self.branch, self.bias).astype(self.residual.dtype)

    def normed(self, norm: Any) -> tuple[Float[Array, "B T C"], Float[Array, "B T C"]]:
        """(norm(s), s) for the sum s, in one pass unless the branch is wider than the residual."""
        s, own = self.residual, not plain(norm, Norm)
        if self.branch is None or not jnp.can_cast(self.branch.dtype, s.dtype) or own:
            return norm(s := self.sum()), s
        return norm.add(self.branch, s, self.bias)


class Block(Layer):
    """s += mixer(norm_1(s)); s += mlp(norm_2(s)), with attention or a vLSTM as the mixer."""

    def __init__(self, config: ModelConfig, make_norm, make_mlp, mixer: dict, *, fp8: bool, rngs):
        """mixer: {attention or vlstm: the function that makes it from width and heads}."""
        ((self.mixer, make_mixer),) = mixer.items()
        rows_std = STD / math.sqrt(2 * config.n_layers)  # 2 L branches add up on the stream
        linear = partial(Linear, std=STD, rows_std=rows_std, fp8=fp8, lora=config.adapters)
        options = dict(linear=linear, implementation=config.implementation, rngs=rngs)
        self.norm_1, self.norm_2 = make_norm(), make_norm()
        setattr(self, self.mixer, make_mixer(config.d_model, config.n_heads, **options))
        self.mlp: Any = make_mlp(config.d_model, config.ff_width, **options)

    def __call__(self, stream: Stream, positions=None, segment_ids=None, cache=None):
        """(stream, cache) after the block; without a cache the second is None."""
        mixer, x = getattr(self, self.mixer), stream.residual
        further = cache is not None and cache.arrays is not None and stream.branch is None
        further = further and {type(mixer).with_cache, type(self.mlp).__call__} <= _OF_ROW
        norm_1, norm_2 = (n if plain(n, Norm) else None for n in (self.norm_1, self.norm_2))
        # For the next token of one row every op takes at least 2 us, so the layers' kernels include
        # the norms and the residual additions.
        if further and norm_1 and norm_2 and mixer.takes_row(x) and self.mlp.takes_row(x):
            x, cache = mixer.of_row(x, norm_1, cache)
            return Stream(None, None, self.mlp.of_row(x, norm_2)), cache
        where = (positions,) if self.mixer == "attention" else ()
        # If both layers take add_bias, the next norms add the biases of `out` and `down` (GPT-2).
        ends = (mixer.out, self.mlp.down) if where and isinstance(self.mlp, MLP) else ()
        biases = [layer.bias[...] for layer in ends if layer.joins and layer.bias is not None]
        options = dict(add_bias=False) if (apart := len(biases) == 2) else {}
        out_bias, down_bias = biases if apart else (None, None)
        y, residual = stream.normed(self.norm_1)
        if cache is None:
            branch = mixer(y, *where, segment_ids, norm=norm_1, **options)
        else:
            branch, cache = mixer.with_cache(y, *where, cache, **options)
        y, residual = Stream(branch, out_bias, residual).normed(self.norm_2)
        return Stream(self.mlp(y, norm=norm_2, **options), down_bias, residual), cache


class LanguageModel(Layer):
    """A causal language model; a subclass names the parts of its blocks.

    norms: class of all norms; mlps: of the feed-forward layers.
    block: class of the blocks, if they are wired differently from Block.
    learns_positions: whether it has config.max_seq_len learned positions.
    tied: whether the head is the token embedding, whatever config.tie_embeddings says.
    """

    norms: type[Norm]
    mlps: Callable[..., Layer]
    block: type[Block] = Block
    learns_positions = tied = False
    config: Any  # the ModelConfig of the subclass
    head: Linear | None

    def mixer(self) -> dict[str, Any]:
        """{attention or vlstm: the function that makes the mixer from width and heads}."""
        raise NotImplementedError

    def __init__(self, config: ModelConfig, *, fp8: str = "none", rngs: nnx.Rngs):
        """fp8: which matmuls of `loss` take fp8 operands, a value of `train.fp8`."""
        if fp8 not in ("none", "matmuls", "all"):
            raise ValueError(f"fp8={fp8!r} is not one of none, matmuls, all")
        self.config, self.fp8_head = config, fp8 == "all"
        # Caps the logits as cap tanh(z / cap); None: no cap.
        self.logit_soft_cap = getattr(config, "logit_soft_cap", None)
        rows = config.padded_vocab_size
        self.embedding = Embedding(
            rows,
            config.d_model,
            max_seq_len=config.max_seq_len if self.learns_positions else None,
            std=STD,
            dtype=config.residual_dtype,
            implementation=config.implementation,
            rngs=rngs,
        )
        # Vocabulary padding is zero.  .at[].set would be a scatter, which deterministic XLA
        # turns into a loop over all elements.
        real, wte = jnp.arange(rows) < config.vocab_size, self.embedding.wte
        wte[...] = jnp.where(real[:, None], wte[...], 0)
        make_norm = partial(
            self.norms,
            config.d_model,
            eps=config.norm_eps,
            dtype=config.compute_dtype,
            implementation=config.implementation,
        )
        parts = make_norm, self.mlps, self.mixer()
        make = partial(self.block, config, *parts, fp8=fp8 != "none", rngs=rngs)
        self.blocks = nnx.List([make() for _ in range(config.n_layers)])
        self.norm = make_norm()
        if self.tied or getattr(config, "tie_embeddings", False):
            self.head = None
        else:
            # No copy: the loss casts the head itself and computes its gradient in float32.
            self.head = Linear(config.d_model, rows, std=STD, copied=False, rngs=rngs)
            self.head.weight[...] = jnp.where(real, self.head.weight[...], 0)

    def hidden(
        self,
        tokens: Integer[Ids, "B T"],
        *,
        positions: Integer[Ids, "..."] | None = None,
        segment_ids: Integer[Ids, "B T"] | None = None,
    ) -> Float[Array, "B T C"]:
        """The residual stream after the final norm, (B, T, C) in the compute dtype.

        positions: (T,) or (B, T); None: 0 ... T-1; a vLSTM ignores them.
        segment_ids: tokens see only their own segment.
        """
        embedded = self.embedding(tokens, positions)
        return self.advance(embedded, positions=positions, segment_ids=segment_ids)[0]

    def advance(
        self, embedded: Float[Array, "B T C"], **options
    ) -> tuple[Float[Array, "B T C"], list[Cache | None]]:
        """Runs blocks and final norm on embedded tokens: (output of the norm, updated caches).

        Takes the options of `walk`.
        """
        *_, last = walked = list(self.walk(embedded, **options))
        return last[0].normed(self.norm)[0], [cache for _, cache in walked]

    def walk(
        self,
        embedded: Float[Array, "B T C"],
        *,
        positions: Integer[Ids, "..."] | None = None,
        segment_ids: Integer[Ids, "B T"] | None = None,
        caches: list[Cache] | None = None,
    ) -> Iterator[tuple[Stream, Cache | None]]:
        """Runs the blocks on embedded tokens; yields each block's output and updated cache.

        caches: one per block, for generation.  positions, segment_ids: as in `hidden`.
        """
        if caches is not None and axis_size("context") > 1:
            raise ValueError("generation needs whole sequences: use sharding.whole_sequences(mesh)")
        if caches is not None and segment_ids is not None:
            raise ValueError("segment_ids do not go with caches: pass one text a row")
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"{len(caches)} caches do not fit {len(self.blocks)} blocks")
        # Converted here and in `loss`: jit and shard_map would cut numpy's int64 to 32 bits.
        (segment_ids,) = ids.segments(segment_ids)
        positions = None if positions is None else ids.saturated("positions", positions)
        stream = Stream(None, None, embedded)
        # Generation has no backward pass, so nothing needs recomputation.
        remat = self.config.remat if caches is None else "none"
        trained = nnx.Param if self.config.adapters is None else nnx.LoRAParam
        params = {}
        for i, block in enumerate(self.blocks):
            # One block later gradient sums overlap with this block; long sequences lack the memory.
            j = i + (axis_size("context") == 1)
            if remat != "none" and 0 < i and j < len(self.blocks):  # backward, block 0 is last
                params[j], stream = in_order(nnx.state(self.blocks[j], trained), stream)
            where = positions, segment_ids, None if caches is None else caches[i]
            graph, state = nnx.split(block)  # only now: the block before may have changed it
            state = nnx.merge_state(state, params.pop(i)) if i in params else state
            stream, cache, changed = run_block(graph, state, remat, stream, *where)
            if changed:
                nnx.update(block, changed)
            yield stream, cache

    def logits(self, hidden: Float[Array, "... C"], dtype=None) -> Float[Array, "... V"]:
        """Logits over the padded vocabulary; ignore the columns past config.vocab_size.

        dtype: of the logits; None: `hidden`'s.  In bf16 many logits are equal.
        """
        z = (self.embedding.logits if self.head is None else self.head)(hidden, dtype)
        return z if self.logit_soft_cap is None else soft_cap(z, self.logit_soft_cap)

    def __call__(self, tokens: Integer[Ids, "B T"], **options) -> Float[Array, "B T V"]:
        """Logits of every position, (B, T, V); takes the options of `hidden`."""
        return self.logits(self.hidden(tokens, **options))

    def loss(
        self,
        tokens: Integer[Ids, "B T"],
        labels: Integer[Ids, "B T"],
        *,
        positions: Integer[Ids, "..."] | None = None,
        segment_ids: Integer[Ids, "B T"] | None = None,
        scale: Float[Array, ""] | float = 1.0,
    ) -> Float[Array, ""]:
        """`scale` x the sum of the cross-entropy over all labels but -100, () float32.

        The logits are never stored: head and loss are one op, which multiplies its gradients by
        `scale` as it computes them.  `scale` itself gets no gradient.
        positions, segment_ids: as in `hidden`.
        """
        labels, ignored = ids.labels(labels, IGNORE)
        head, biased = self.head, getattr(self.head, "bias", None) is not None
        last: tuple = (self.embedding, Embedding, "logits") if head is None else (head, Linear)
        if biased or not (plain(*last) and plain(self, LanguageModel, "hidden", "logits")):
            raise ValueError(f"no loss has this {type(self).__name__}'s logits: use cross_entropy")
        if head is None:
            embedded, (weight, total) = self.embedding.with_table(tokens, positions)
        else:
            embedded, (weight, total) = self.embedding(tokens, positions), head.held.operands()
        hidden = self.advance(embedded, positions=positions, segment_ids=segment_ids)[0]
        if axis_size(*SHARDS) > 1:
            # A cast before the gather halves its bytes; without the constraint XLA casts after it.
            axes = ("tensor", SHARDS) if head is None else (SHARDS, "tensor")
            weight = constrain(weight.astype(hidden.dtype), *axes)
        # The tensor axis shards the vocabulary, as it does the weight: the weight's gradient stays
        # on its device, and only the gradient of `hidden` moves.
        tensor = "tensor" if axis_size("tensor") > 1 else None
        part = P(BATCH, "context")
        loss = partial(
            linear_cross_entropy,
            vocab_size=self.config.vocab_size,
            ignore_index=ignored,
            softcap=self.logit_soft_cap,
            transposed=head is not None,
            reduction="sum",
            vocab_axis=tensor,
            fp8=self.fp8_head,
            total=total,
            implementation=self.config.implementation,
        )
        op = per_device(
            # Each part of the tokens yields one number.
            lambda x, w, labels, scale: loss(x, w, labels, scale=scale)[None],
            in_specs=(part, P(tensor) if head is None else P(None, tensor), part, P()),
            out_specs=P(PARTS),
        )
        return op(hidden, weight, labels, scale).sum()

    def mixing_flops(self, seq_len: int) -> float:
        """Operations per token in the forward matmuls without parameters.

        Of attention: 4 D per head for each key that a query sees on average, which without a window
        is T / 2.  A sequence counts as one document, even if it packs several.
        """
        config = self.config
        window = min(config.window or seq_len, seq_len)
        seen = window - window * window / (2 * seq_len)
        return 4.0 * config.n_layers * seen * config.n_heads * config.head_dim


@functools.partial(jax.jit, static_argnums=(0, 2))
def run_block(graph, params, remat: str, stream, *args):
    """Calls a split block on (stream, positions, segment_ids, cache); traces equal blocks once.

    remat: how much of the block the backward pass recomputes, a value of `model.remat`.
    Returns (stream, cache, the variables that the layers changed or sowed).
    """

    def run(params, *args):
        block, arrays = nnx.merge(graph, params), jax.tree.leaves
        before = {path: arrays(x) for path, x in nnx.to_flat_state(params)}
        changed = lambda p, x: [*map(id, arrays(x))] != [*map(id, before.get(p, [None]))]
        stream, cache = block(*args)
        if remat in ("mlp", "attention", "block"):
            # Each block's input is kept for the backward pass: one array rather than two.
            stream = Stream(None, None, stream.sum())
        return stream, cache, nnx.state(block, changed)

    run = run if remat == "none" else jax.checkpoint(run, policy=_SAVED[remat])
    return run(params, stream, *args)


_either = checkpoint_policies.save_from_both_policies
# The output of attention and its log-sum-exp, or the vLSTM's output and normalizer.  Our kernels
# and the XLA forms name them; cuDNN's attention is one primitive.
_mixing_saveable = _either(
    checkpoint_policies.save_only_these_names("attention", "vlstm", "fp8_largest"),
    lambda primitive, *_, **__: primitive.name.startswith("dot_product_attention_fwd"),
)
# What each value of `model.remat` saves of a block, besides its input and, in fp8, the scalars that
# scales are computed from, each of which takes a pass over an array.
_SAVED = {
    # Matmuls with weights.  The matmuls within the XLA form of attention have batch axes and are
    # recomputed: their results are quadratic in T.
    "dots": _either(checkpoint_policies.dots_with_no_batch_dims_saveable, _mixing_saveable),
    # The products before the activation: "gelu" is the op's name for product + bias.
    "mlp": _either(checkpoint_policies.save_only_these_names("mlp", "gelu"), _mixing_saveable),
    "attention": _mixing_saveable,
    "block": checkpoint_policies.save_only_these_names("fp8_largest"),
}
