"""Compares generation with caches to the full forward pass, and tests how tokens are drawn."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from tiny_models import tiny

from jaxllm.config import MeshConfig, SampleConfig
from jaxllm.config.loading import sampling
from jaxllm.errors import RunError
from jaxllm.infer import decode, generate, writer
from jaxllm.layers import GatedMLP, RMSNorm
from jaxllm.layers.attention import _to_float8
from jaxllm.layers.cache import Cache
from jaxllm.models import MODELS, create
from jaxllm.models.llama3 import Llama3
from jaxllm.sharding import make_mesh, shardings
from pallas_kernels import dispatch

SHAPE = dict(vocab_size=250, d_model=64, max_seq_len=160)
# The window is shorter than prompts and answer, and spans the padding between them.
NARROW = dict(window=7, softcap=1.5)
SWITCHED = dict(window=7, qkv_bias=True, qk_norm=True, d_head=16)
TOKENS = 20  # three calls of 8 on a CPU; the last one is used in part


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [(name, "float32", {}) for name in MODELS if name != "llama3"]
    + [slow(name, "bfloat16", {}) for name in MODELS]
    + [slow("gpt2", "float32", NARROW), slow("llama3", "float32", NARROW)]
    + [slow("llama3", "float32", {}), ("llama3", "float32", SWITCHED)],
)
def test_greedy_rows_of_several_lengths_follow_the_full_forward_pass(name, dtype, options):
    """float32 must agree token for token; in bfloat16, tokens may differ if their logits tie."""
    model = create(tiny(name, **SHAPE, **options, compute_dtype=dtype, residual_dtype=dtype))
    graph, params = nnx.split(model, nnx.Param)
    # Large weights and open gates make tokens depend on the whole text.
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, params)
    if name == "vlstm":
        for block in params["blocks"].values():
            block["vlstm"]["i"]["bias"][...] = jnp.zeros(2)
    # Prompts of several chunks and more than WIDTHS tokens, of one token, and in between.
    prompts = [list(range(5, 82)), [100], [249, 3, 17] * 7]
    penalty = 1.3 if options else 1.0
    greedy = sampling(tokens=TOKENS, temperature=0.0, repetition_penalty=penalty)

    @jax.jit
    def forward(params, tokens):
        model = nnx.merge(graph, params)
        return model.logits(model.hidden(tokens), jnp.float32)[..., :250]

    with jax.default_matmul_precision("highest"):  # a GPU would take TF32
        got = np.stack(list(decode.stream_tokens(graph, params, prompts, greedy)), axis=1)
        text = np.zeros((3, 100), np.int32)
        for row, prompt, answer in zip(text, prompts, got, strict=True):
            row[: len(prompt) + TOKENS] = [*prompt, *answer]
        logits = np.asarray(forward(params, text))
    after = [slice(len(prompt) - 1, len(prompt) - 1 + TOKENS) for prompt in prompts]
    logits = np.stack([row[where] for row, where in zip(logits, after, strict=True)])
    for rows, prompt, answer in zip(logits, prompts, got, strict=True):
        for n, z in enumerate(rows):  # as transformers penalizes what the text has so far
            seen = [*prompt, *answer[:n]]
            z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
    chosen = np.take_along_axis(logits, got[..., None], axis=-1)[..., 0]
    likeliest = logits.argmax(-1)
    if dtype == "float32":
        assert likeliest.tolist() == got.tolist()
    else:
        assert (likeliest == got).mean() > 0.9
        rounding = 4 * float(jnp.finfo(dtype).eps) * np.abs(logits).max()
        assert (logits.max(-1) - chosen).max() <= rounding < logits.std() / 5
    assert len(set(got.ravel().tolist())) > 5


@pytest.mark.parametrize("name", [slow("gpt2"), "llama3"])
def test_a_float8_cache_changes_little(name):
    model = create(tiny(name, **SHAPE, compute_dtype="float32", residual_dtype="float32"))
    layer = model.blocks[0].attention
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 41, 64)), jnp.float32)
    lengths = jnp.array([40, 17])
    last = x[jnp.arange(2), lengths][:, None]
    x = jnp.where(jnp.arange(40)[:, None] < lengths[:, None, None], x[:, :40], 1e6)  # unread

    def error_of(y, exact):
        return float(jnp.sqrt(jnp.mean((y - exact) ** 2) / jnp.mean(exact**2)))

    def run(float8):
        _, cache = layer.with_cache(x, jnp.arange(40), Cache(lengths, 48, float8))
        after = replace(cache, lengths=lengths + 1)
        return layer.with_cache(last, lengths[:, None], after)

    (exact, _), (y, cache) = run(False), run(True)
    assert [a.dtype for a in cache.arrays] == ["float8_e4m3fn"] * 2 + ["float32"] * 2
    assert 0 < error_of(y, exact) < 2**-4  # of a number in float8 it is at most that
    tiny_keys = jnp.full((1, 3, 1, 2), 1e-37)  # a scale was subnormal, taken for 0, and keys NaN
    assert jnp.isfinite(_to_float8(tiny_keys, True)[0].astype(jnp.float32)).all()

    def follow(float8):  # a prompt of one token with small keys and values
        cache, outputs = Cache(jnp.ones(2, jnp.int32), 16, float8), []
        for n in range(16):
            part = x[:, n : n + 1] * (0.01 if n == 0 else 1)
            y, cache = layer.with_cache(part, jnp.full((2, 1), n), cache)
            cache, outputs = replace(cache, lengths=cache.lengths + 1), [*outputs, y]
        return jnp.concatenate(outputs, 1)

    assert error_of(follow(True), follow(False)) < 2**-4
    graph, params = nnx.split(model, nnx.Param)
    config = SampleConfig(tokens=TOKENS, temperature=0.0)
    tokens = list(decode.stream_tokens(graph, params, [[1, 2], [3]], config, float8_cache=True))
    assert np.stack(tokens).shape == (TOKENS, 2)


def test_a_float8_cache_of_a_vlstm_is_refused(capsys, monkeypatch, tmp_path):
    weights = SimpleNamespace(config=tiny("vlstm"))
    monkeypatch.setattr(writer, "open_weights", lambda *_: weights)
    command = f"--checkpoint {tmp_path} --prompt x --kv_cache_dtype float8"
    assert generate.main(command.split()) == 2
    assert "a vLSTM has no keys and values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("gpt2", False),
        slow("gpt2", True),
        ("llama3", True),
        slow("vlstm", True),
        slow("llama3", False),
        slow("vlstm", False),
    ],
)
def test_transposed_matrices_give_the_same_tokens(monkeypatch, name, fused):
    """As a GPU has them; several rows are multiplied by a matmul.

    One row is multiplied as a sum of products, or by row_linear with what is before and after it.
    """
    shape = SHAPE | dict(n_layers=1)
    if fused:
        shape |= dict(d_model=256, d_ff=256, kernels="auto")
    graph, params = nnx.split(create(tiny(name, **shape)), nnx.Param)
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x + 0.1, params)
    if fused:  # otherwise a token is followed by itself
        params["embedding"] = jax.tree.map(lambda x: x / 8, params["embedding"])
    dispatch.reset()
    greedy = SampleConfig(tokens=9, temperature=0.0)
    got = []
    with jax.default_matmul_precision("highest"):
        for transposed, rows in ((False, 2), (True, 1), (True, 2))[: 2 if fused else 3]:
            monkeypatch.setattr(decode, "by_rows", lambda transposed=transposed: transposed)
            decode._programs.cache_clear()
            tokens = decode.stream_tokens(graph, params, [[100, 7, 33]] * rows, greedy)
            got.append([int(token[0]) for token in tokens])
    decode._programs.cache_clear()
    assert all(tokens == got[0] for tokens in got)
    assert len(set(got[0])) > 3
    ran = {decision.op for decision in dispatch.decisions()}
    assert ("row_linear" in ran, "layer_norm" in ran or "rms_norm" in ran) == (fused, True)


class OwnMLP(nnx.Module):
    def __init__(self, d_model, d_ff, *, linear, implementation, rngs):
        self.w = linear(d_model, d_model, rngs=rngs)

    def __call__(self, x, *, norm=None):
        return self.w(jnp.tanh(x))


class Negative(GatedMLP):
    def __call__(self, x, *, norm=None):
        return -super().__call__(x, norm=norm)


class NegativeNorm(RMSNorm):
    def __call__(self, x):
        return -super().__call__(x)


@pytest.mark.parametrize(
    "parts", [dict(mlps=OwnMLP), slow(dict(mlps=Negative)), slow(dict(norms=NegativeNorm))]
)
def test_one_row_calls_the_layers_of_a_users_model(monkeypatch, parts):
    """The kernels of a single row took the weights of a subclass; a block asked for mlp.down."""
    config = tiny("llama3", **SHAPE | dict(n_layers=1, d_model=256, d_ff=256, kernels="auto"))
    graph, params = nnx.split(type("Own", (Llama3,), parts)(config, rngs=nnx.Rngs(0)), nnx.Param)
    params = jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x + 0.1, params)
    params["embedding"] = jax.tree.map(lambda x: x / 8, params["embedding"])
    monkeypatch.setattr(decode, "by_rows", lambda: True)
    greedy, text = SampleConfig(tokens=3, temperature=0.0), [100, 7, 33]
    for token in decode.stream_tokens(graph, params, [text], greedy):
        assert token == nnx.merge(graph, params)(np.array([text]))[0, -1, :250].argmax()
        text = [*text, int(token[0])]


def test_one_program_serves_prompts_and_seeds_of_one_shape():
    model = create(tiny("llama3", **SHAPE))
    graph, params = nnx.split(model, nnx.Param)
    config = SampleConfig(tokens=4, temperature=1.0, seed=0)
    decode._programs.cache_clear()
    for prompt, seed in (([1, 2, 3], 0), ([4], 1)):
        again = nnx.split(nnx.merge(graph, params), nnx.Param)[0]  # as another call would make it
        list(
            decode.stream_tokens(again, params, [prompt], config.model_copy(update={"seed": seed}))
        )
    assert decode._programs.cache_info().misses == 1
    size = decode.round_up(decode.WIDTHS + decode.block_size(), decode.WIDTHS)
    programs = decode._programs(graph, size, False, 1.0, 1.0, 50, 1.0, 0.0)
    assert [program._cache_size() for program in programs] == [1, 1]


@pytest.mark.parametrize("rows", [False, True])
def test_programs_compiled_side_by_side_are_those_that_run(rows, caplog, monkeypatch):
    monkeypatch.setattr(decode, "by_rows", lambda: rows)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    graph, params = nnx.split(create(tiny("vlstm", **SHAPE)), nnx.Param)
    params = jax.device_put(params, shardings(params, mesh))  # as weights are loaded
    decode._programs.cache_clear()
    with jax.log_compiles():  # of this thread
        list(decode.stream_tokens(graph, params, [[1, 2]], SampleConfig(tokens=TOKENS)))
    names = ("jit(first)", "jit(further)")
    # Another thread has compiled the first program meanwhile, and the calls compile nothing.
    assert [caplog.text.count(f"Finished XLA compilation of {name}") for name in names] == [0, 1]


def test_top_p_keeps_the_most_likely_tokens_that_reach_it():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.3, 0.1]))
    keys = jax.random.split(jax.random.key(0), 64)
    for top_p, kept in ((0.0, {1}), (0.4, {1}), (0.6, {1, 2}), (1.0, {0, 1, 2, 3})):
        assert {int(decode.choose(logits, k, 1.0, 0, top_p)) for k in keys} == kept
    for min_p, temperature, kept in ((1.0, 1.0, {1}), (0.5, 1.0, {1, 2}), (0.19, 0.5, {1, 2})):
        rule = (temperature, 3, 1.0, min_p)  # of 25 : 9 : 1 at temperature 0.5
        assert {int(decode.choose(logits, k, *rule)) for k in keys} == kept


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-30, 0.7, 3.0, 1e30, 1e39, 1e308])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (99, 0.999999)])
def test_every_temperature_gives_the_softmax(temperature, top_k, top_p):
    logits = np.array([1.0, -40.0, 3.0, 3.0, 2.5, -np.inf], np.float32)
    keys = jax.random.split(jax.random.key(0), 4000)
    got = jax.vmap(lambda key: decode.choose(jnp.asarray(logits), key, temperature, top_k, top_p))
    share = np.bincount(got(keys), minlength=6) / len(keys)
    z = np.full(6, -np.inf)  # in float64
    kept = np.argsort(-logits, stable=True)[: top_k or 6]
    with np.errstate(over="ignore"):
        z[kept] = (logits[kept].astype(np.float64) - 3) / temperature
    p = np.exp(z) / np.exp(z).sum()
    np.testing.assert_allclose(share, p, atol=0.03)
    assert not share[p == 0].any()


def test_ties_do_not_widen_top_k_and_top_p():
    keys = jax.random.split(jax.random.key(0), 64)
    for top_k, top_p, count in ((2, 1.0, 2), (0, 0.0, 1), (0, 1e-50, 1), (0, 0.5, 3), (3, 0.5, 2)):
        got = {int(decode.choose(jnp.zeros(6), key, 1.0, top_k, top_p)) for key in keys}
        assert got == set(range(count))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad, temperature):
    logits = jnp.array([0.0, bad, 1.0])
    for options in ((0, 1.0), (2, 0.9)):
        assert decode.choose(logits, jax.random.key(0), temperature, *options) == -1
    graph, params = nnx.split(create(tiny("gpt2", **SHAPE, n_layers=1)), nnx.Param)
    params = jax.tree.map(lambda x: x * bad, params)
    config = SampleConfig(tokens=3, temperature=temperature)
    with pytest.raises(RunError, match="the model's logits are not finite"):
        list(decode.stream_tokens(graph, params, [[1, 2]], config))


def test_a_sample_depends_on_its_seed_and_number_alone():
    shape = SHAPE | dict(n_layers=1, compute_dtype="float32", residual_dtype="float32")
    graph, params = nnx.split(create(tiny("gpt2", **shape)), nnx.Param)

    def texts(seed, samples):
        config = SampleConfig(tokens=5, temperature=1.0, top_k=0, seed=seed)
        rows = [[7 + prompt] for prompt, _ in samples]
        stream = decode.stream_tokens(graph, params, rows, config, samples=samples)
        return [tuple(row) for row in np.stack(list(stream), axis=1).tolist()]

    samples = [(prompt, sample) for prompt in range(2) for sample in range(3)]
    together = texts(0, samples)
    assert together[2:5] == texts(0, samples[2:5])
    assert together[::-1] == texts(0, samples[::-1])
    decode._programs.cache_clear()
    with jax.default_prng_impl("rbg"):
        assert together[2:5] == texts(0, samples[2:5])
    assert len({*together, *texts(1, samples), *texts(2**32 - 1, samples)}) == 18
