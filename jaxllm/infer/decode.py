"""Generates tokens: one forward pass over the prompts, then one position per further token."""

import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig, SampleConfig, Sampling, round_up
from jaxllm.data.cache import keep_compiled
from jaxllm.errors import InputError, RunError
from jaxllm.layers.cache import Cache
from jaxllm.layers.linear import Transposed
from jaxllm.sharding import P, constrain, spec_of
from jaxllm.terminal import counted
from jaxllm.text import Tokenizer, present
from jaxllm.weights.adapters import AdapterWeights
from jaxllm.weights.packed import create_packed
from jaxllm.weights.places import map_params
from jaxllm.weights.pretrained import Weights, load_params

WIDTHS = 64  # prompts and caches are padded to multiples of it, so few shapes are compiled


def open_tokenizer(weights: Weights) -> Tokenizer:
    """Opens the tokenizer in the weights' folder; raises InputError."""
    if not present(weights.text):
        fix = "copy the tokenizer.json that encoded the run's data there"
        raise InputError(f"{weights.text / 'tokenizer.json'} is missing: {fix}")
    end_token = None if weights.run is None else weights.run.data.end_token
    tokenizer = Tokenizer(weights.text, end_token=end_token, entries=weights.config.vocab_size)
    if said := tokenizer.describe_sampling():
        print(said, file=sys.stderr)
    return tokenizer


def load_model(weights: Weights, mesh: jax.sharding.Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """Loads the model onto `mesh`: (graph, parameters); uses kernels where they can run.

    Linear's matrices are loaded in the compute dtype, to which every matmul would cast them.
    """
    keep_compiled()
    kernels = "xla" if weights.config.kernels == "xla" else "auto"
    config = weights.config.model_copy(update={"kernels": kernels})
    if isinstance(weights, AdapterWeights):
        return weights.load(config, mesh)
    model = nnx.eval_shape(lambda: create_packed(config, weights.packing))
    graph, params = nnx.split(model, nnx.Param)

    def held(_, p):
        dtype = config.compute_dtype if weights.packing is None and _is_matrix(p) else p.dtype
        return jax.ShapeDtypeStruct(p.shape, dtype, sharding=jax.NamedSharding(mesh, spec_of(p)))

    return graph, load_params(weights, map_params(params, held))


def block_size() -> int:
    """The number of tokens per row that one device call computes.

    A call has fixed overhead: an H100 takes 0.243 ms per token of GPT-2 with 32, 0.255 with 8.  On
    a CPU 32 tokens would take long, and tokens after the end of a text are wasted.
    """
    return 32 if jax.default_backend() == "gpu" else 8


def most_tokens(config: ModelConfig) -> int | None:
    """The largest number of tokens of prompt and answer together; None: unlimited."""
    return None if config.type == "vlstm" else config.max_seq_len


def check_fits(ids: Sequence[int], tokens: int, most: int | None) -> None:
    """Raises InputError unless `tokens` can follow a prompt; most: from `most_tokens`."""
    if not ids:
        raise InputError("the prompt has no tokens; give at least one character")
    if most is not None and len(ids) + tokens > most:
        raise InputError(
            f"the prompt's {counted(len(ids), 'token')} and --tokens={tokens} exceed"
            f" model.max_seq_len={most}; shorten the prompt or lower --tokens"
        )


def generate(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompt: list[int],
    config: SampleConfig,
    *,
    sample: int = 0,
    rows: int = 1,
    ends: Collection[int] = (),
) -> list[int]:
    """The token ids that follow `prompt`: config.tokens, or as many as fit.

    prompt: at least one id; if it is too long for the model, only its end is used.
    sample: number of the sample; each has its own random numbers.
    rows: number of identical rows to compute, so that a mesh can divide the batch.
    ends: the text stops before the first of these ids.
    """
    most, count = most_tokens(nnx.merge(graph, params).config), config.tokens
    if most is not None:
        prompt = prompt[-max(most - count, most // 2, 1) :]
        count = min(count, most - len(prompt))
    config = config.model_copy(update={"tokens": count})
    stream = stream_tokens(graph, params, [prompt] * rows, config, samples=[(0, sample)] * rows)
    return list(takewhile(lambda token: token not in ends, [int(step[0]) for step in stream]))


def stream_tokens(
    graph: nnx.GraphDef,
    params: nnx.State,
    prompts: list[list[int]],
    config: SampleConfig,
    *,
    samples: Sequence[tuple[int, int]] | None = None,
    float8_cache: bool = False,
    few_shapes: bool = False,
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, (B,) int32, config.tokens times.

    prompts: at least one id each, of any lengths.
    samples: (prompt, sample) of each row, two numbers (default: the row's number, 0).  Only they
    and config.seed determine the row's random numbers, whatever the other rows are.
    float8_cache: whether keys and values are kept in float8 (e4m3), half the bytes of bfloat16.
    few_shapes: pads to powers of 2, so that a growing conversation compiles few programs.
    The pass over the prompts gives the first token.  The others are computed in blocks, and the
    devices stay one block ahead.
    Raises RunError if the logits are not finite.
    """
    if config.tokens == 0:
        return
    longest = max(map(len, prompts))
    padded = lambda n: 1 << max(8, (n - 1).bit_length()) if few_shapes else round_up(n, WIDTHS)
    width = padded(longest)
    model_config = nnx.merge(graph, params).config
    if (most := most_tokens(model_config)) is not None:
        width = max(longest, min(width, most))
    size = block_size()
    blocks = -(-(config.tokens - 1) // size)
    slots = padded(width + blocks * size)
    rule = Sampling(**config.model_dump())  # a run's `sample` lacks min_p and penalty
    options = rule.temperature, rule.top_k, rule.top_p, rule.min_p
    first, further = _programs(graph, slots, float8_cache, rule.repetition_penalty, *options)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    samples = samples or [(row, 0) for row in range(len(prompts))]
    streams = np.array([(config.seed, *sample) for sample in samples], np.uint32)
    matrices = in_compute_dtype(params, model_config.compute_dtype)
    place = getattr(jax.tree.leaves(params)[0], "sharding", None)  # None for a NumPy array
    # On several devices only XLA knows how the caches are sharded.
    if blocks and isinstance(place, jax.NamedSharding) and place.num_devices == 1:
        lowered = first.lower(params, matrices, tokens, lengths, streams)
        held = jax.tree.map(lambda x: x.update(sharding=place.update(spec=P())), lowered.out_info)
        with ThreadPoolExecutor(1) as pool:  # compiles both at once; the calls below find them
            pool.submit(lowered.compile)
            further.lower(params, matrices, *held, jnp.int32(1), lengths, streams).compile()
    token, arrays = first(params, matrices, tokens, lengths, streams)
    pending, left = token[None], config.tokens
    for block in range(blocks + 1):
        ready, number = pending, jnp.int32(1 + block * size)
        if block < blocks:
            rest = number, lengths, streams
            pending, token, arrays = further(params, matrices, token, arrays, *rest)
        if ((found := np.asarray(ready)) < 0).any():  # -1 from `choose`
            raise RunError("the model's logits are not finite, so no token can be chosen")
        yield from found[:left]
        left -= len(found)


@lru_cache(maxsize=16)
def _programs(
    graph: nnx.GraphDef, size: int, float8: bool, penalty: float, *options: Any
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    """The jitted programs: the pass over the prompts, and a block of further tokens.

    size: slots of the caches.
    float8: whether they hold float8.
    penalty: divides positive logits of tokens that the text has, and multiplies negative ones.
    options: as `choose` takes them.
    The further tokens are a loop on the device; a call per token would make Python wait for each.
    """
    block = block_size()

    @jax.vmap
    def keys(stream):
        """The random key of each row, (B,), from its seed, prompt and sample (B, 3)."""
        seed, prompt, sample = stream
        key = jax.random.key(seed, impl="threefry2x32")  # rbg's vmap uses only the first key
        return jax.random.fold_in(jax.random.fold_in(key, prompt), sample)

    def pick(model, hidden, keys, number, seen):
        """The tokens (B,) that follow `hidden` (B, 1, C); seen: (B, V), which ids the text has."""
        logits = model.logits(hidden, jnp.float32)[:, 0, : model.config.vocab_size]
        if seen is not None:
            less = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(seen, less, logits)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        token = jax.vmap(lambda z, key: choose(z, key, *options))(logits, keys)
        token = constrain(token)  # replicated, so that every host can read it
        return token, seen if seen is None else seen.at[jnp.arange(len(token)), token].set(True)

    @jax.jit
    def first(params, matrices, tokens, lengths, streams):
        # Token lookups use the float32 table.
        embedding, model = nnx.merge(graph, params).embedding, nnx.merge(graph, matrices)
        cache = Cache(lengths, size, float8)
        hidden, caches = model.advance(embedding(tokens), caches=[cache for _ in model.blocks])
        hidden = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
        none = jnp.zeros(model.config.vocab_size, bool)
        has = lambda ids, n: none.at[ids].max(jnp.arange(ids.size) < n)
        seen = None if penalty == 1 else jax.vmap(has)(tokens, lengths)
        token, seen = pick(model, hidden, keys(streams), 0, seen)
        return token, ([cache.arrays for cache in caches], seen)

    @partial(jax.jit, donate_argnames="arrays")
    def further(params, matrices, token, arrays, number, lengths, streams):
        """number: tokens picked so far."""
        rows = keys(streams)

        def step(i, carry):
            token, tokens, (arrays, seen) = carry
            # Copied, so that the variables belong to the loop: a user's layer may change them.
            whole, model = (nnx.merge(graph, x, copy=True) for x in (params, matrices))
            positions = (lengths + number + i - 1)[:, None]
            embedded = whole.embedding(token[:, None], positions)
            caches = [Cache(lengths + number + i, size, float8, layer) for layer in arrays]
            hidden, caches = model.advance(embedded, positions=positions, caches=caches)
            token, seen = pick(model, hidden, rows, number + i, seen)
            # A select, because XLA would update a slice on another stream, outside its CUDA graph.
            tokens = jnp.where(jnp.arange(block)[:, None] == i, token, tokens)
            return token, tokens, ([cache.arrays for cache in caches], seen)

        tokens = jnp.zeros((block, len(token)), jnp.int32)
        token, tokens, arrays = jax.lax.fori_loop(0, block, step, (token, tokens, arrays))
        return tokens, token, arrays

    return first, further


def in_compute_dtype(
    params: nnx.State, dtype, *, table: bool = True, consume: bool = False
) -> nnx.State:
    """Casts the matrices to the compute dtype, once for all tokens; transposes Linear's on a GPU.

    Each step reads every weight once: 2 bytes in bf16, but 10 to read float32, cast it and read the
    result.  All other arrays, such as packed weights, are taken from `params`: a program that
    returned them would copy them.
    table: also the embedding, if it is the head; lookups take the one in `params`.
    consume: frees the matrices of `params` that are not in the result, one by one.
    """
    # A layer with an adapter takes no transposed matrix, so a copy gains little.
    adapted = bool(jax.tree.leaves(nnx.filter_state(params, nnx.LoRAParam)))
    also = "embedding.wte" if table and "head" not in params else None

    def change(name, p):
        x, linear = p.get_value(), _is_matrix(p) and not adapted
        transposes = linear and by_rows()
        casts = (linear or name == also) and x.dtype != jnp.dtype(dtype)
        if not (transposes or casts):
            return x
        new = _cast(x, transposes, dtype)
        if consume:
            x.delete()
        return new

    return map_params(params, change)


@partial(jax.jit, static_argnums=(1, 2))
def _cast(x, transposes, dtype):
    x = x.astype(dtype)
    return Transposed(x.T) if transposes else x


def _is_matrix(p: nnx.Variable) -> bool:
    """Whether a variable holds a plain matrix of Linear, whose metadata includes `copied`."""
    return "copied" in p.get_metadata() and hasattr(p.get_value(), "dtype")


def by_rows() -> bool:
    """Whether to transpose Linear's matrices; a CPU takes up to 5 times as long with these."""
    return jax.default_backend() == "gpu"


def choose(
    logits: jax.Array, key: jax.Array, temperature: float, top_k: int, top_p=1.0, min_p=0.0
) -> jax.Array:
    """Samples one token id, () int32, from logits (V,); -1 if the largest is not finite.

    temperature: of the softmax; 0 takes the most likely token.
    top_k: samples among the k most likely tokens; 0: all.
    top_p: of these, samples among the fewest most likely whose probabilities add up to top_p.
    min_p: of these, samples among those with at least min_p times the largest probability.
    Of tokens that are equally likely, the first counts as the most likely one.
    """
    best = jnp.max(logits)  # NaN if any is NaN
    if temperature == 0:
        token = jnp.argmax(logits)
    else:
        # The temperature and its reciprocal must be normal numbers.  A difference of 0 stays 0,
        # and -inf stays -inf.
        scale = 1 / min(max(temperature, 2.0**-126), 2.0**126)
        kept = min(top_k or logits.size, logits.size)
        ids = None
        if kept < logits.size or top_p < 1:
            logits, ids = jax.lax.top_k(logits, kept)
        logits = (logits - best) * scale
        if top_p < 1:
            p = jax.nn.softmax(logits)
            before = jnp.cumsum(p) - p
            first = jnp.arange(kept) == 0  # at least the most likely token
            logits = jnp.where(first | (before < top_p), logits, -jnp.inf)
        if min_p > 0:
            logits = jnp.where(logits < jnp.log(min_p), -jnp.inf, logits)
        token = jax.random.categorical(key, logits, mode="high")
        token = token if ids is None else ids[token]
    return jnp.where(jnp.isfinite(best), token, -1).astype(jnp.int32)
