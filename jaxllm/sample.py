"""Text from a model: the prompts in one forward pass, then one position for each further token."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig, SampleConfig
from jaxllm.data.tokenizer import Tokenizer
from jaxllm.errors import InputError
from jaxllm.layers.cache import Cache
from jaxllm.models import create
from jaxllm.models.language_model import add_norm
from jaxllm.pretrained import RunWeights, load_params, open_weights
from jaxllm.sharding import constrain, shardings


def open_run(directory: str | Path, step: int | None = None) -> RunWeights:
    """The weights in a run's newest checkpoint, or in that of `step`; raises InputError."""
    weights = open_weights(directory)
    if not isinstance(weights, RunWeights):
        raise InputError(
            f"{directory} is not a run's directory; make one of it with"
            f" python -m jaxllm.convert {directory} OUT"
        )
    return weights if step is None else RunWeights(weights.folder, step)


def open_tokenizer(weights: RunWeights) -> Tokenizer:
    """The tokenizer that the run left in its directory; raises InputError."""
    path = weights.folder / "tokenizer.json"
    if not path.exists():
        raise InputError(f"{path} is missing: the run's data had no tokenizer; copy it there")
    tokenizer = Tokenizer(path)
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise InputError(
            f"{path} has {tokenizer.vocab_size} entries, more than the model's"
            f" {weights.config.vocab_size}: it is of another model"
        )
    return tokenizer


def put_model(weights: RunWeights, mesh: jax.sharding.Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """(graph, parameters) of the run's model, lying on `mesh`; kernels where they can run."""
    kernels = "xla" if weights.config.kernels == "xla" else "auto"
    config = weights.config.model_copy(update={"kernels": kernels})
    model = nnx.eval_shape(lambda: create(config))
    graph, params = nnx.split(model, nnx.Param)
    abstract = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        params,
        shardings(params, mesh),
    )
    return graph, load_params(weights, abstract)


def most_tokens(config: ModelConfig) -> int | None:
    """Tokens of prompt and answer together that the model can hold; None: any number."""
    return None if config.type == "vlstm" else config.max_seq_len


def generate(
    graph: nnx.GraphDef, params: nnx.State, prompt: list[int], config: SampleConfig, *, rows=1
) -> list[int]:
    """Token ids that follow `prompt` (at least one id): config.tokens, or as many as fit.

    Of a prompt that fills the model, the end is read.  rows: equal copies that are computed, so
    that a mesh can divide the batch.
    """
    most = most_tokens(nnx.merge(graph, params).config)
    count = config.tokens
    if most is not None:
        prompt = prompt[-max(most - count, most // 2, 1) :]
        count = min(count, most - len(prompt))
    config = config.model_copy(update={"tokens": count})
    return [int(tokens[0]) for tokens in stream(graph, params, [prompt] * rows, config)]


def stream(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: list[list[int]],
    config: SampleConfig,
    *,
    top_p: float = 1.0,
) -> Iterator[np.ndarray]:
    """Yields config.tokens times the next token of every row, (B,) int32.

    prompts: at least one id each, of any lengths.  Two programs are compiled: one takes the
    prompts in, one makes every further token.  The devices are one token ahead of the caller.
    """
    if config.tokens == 0:
        return
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    size = tokens.shape[1] + config.tokens

    def advance(params, tokens, lengths, arrays, number):
        """Tokens (B, T) in; (the token after each row, arrays of the caches) out."""
        model = nnx.merge(graph, params)
        caches = [Cache(lengths, size, kept) for kept in arrays or [None] * len(model.blocks)]
        positions = None if arrays is None else lengths[:, None] - 1
        branch, residual = None, model.embedding(tokens, positions)
        for block, cache in zip(model.blocks, caches, strict=True):
            branch, residual = block(branch, residual, positions, None, cache)
        hidden = add_norm(model.norm, branch, residual)[0]
        if arrays is None:
            hidden = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
        logits = model.logits(hidden)[:, 0, : model.config.vocab_size].astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(config.seed), number)
        keys = jax.random.split(key, len(prompts))
        pick = lambda z, key: choose(z, key, config.temperature, config.top_k, top_p)
        token = constrain(jax.vmap(pick)(logits, keys))  # whole on every device: any host reads it
        return token, [cache.arrays for cache in caches]

    def further(params, token, lengths, arrays, number):
        token, arrays = advance(params, token[:, None], lengths, arrays, number)
        return token, lengths + 1, arrays, number + 1

    first = jax.jit(advance, static_argnums=3)
    token, arrays = first(params, tokens, lengths, None, jnp.int32(0))
    state = token, jnp.asarray(lengths + 1), arrays, jnp.int32(1)
    program = jax.jit(further, donate_argnums=3)
    for _ in range(config.tokens - 1):
        waiting = state[0]
        state = program(params, *state)
        yield np.asarray(waiting)
    yield np.asarray(state[0])


def choose(
    logits: jax.Array, key: jax.Array, temperature: float, top_k: int, top_p: float = 1.0
) -> jax.Array:
    """One token id from logits (V,): softmax at a temperature over the k likeliest (0: all), of
    these the likeliest whose probabilities reach top_p.  Temperature 0 takes the likeliest token.
    """
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    if 0 < top_k < logits.size:
        least = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    logits = logits / temperature
    if top_p < 1:
        likeliest = jnp.sort(logits)[::-1]
        p = jax.nn.softmax(likeliest)
        before = jnp.cumsum(p) - p
        kept = (before < top_p) | (before == 0)  # at least the likeliest
        least = jnp.min(jnp.where(kept, likeliest, jnp.inf))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)
