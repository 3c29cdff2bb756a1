"""Tests shapes, initial weights, counts, causality, padding and recomputation of the models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from kernel_checks import kernels_run_here
from tiny_models import NEEDED, tiny

from jaxllm.config import MODEL_CONFIGS, SampleConfig, load
from jaxllm.infer import decode
from jaxllm.layers import MLP, GatedMLP, Linear
from jaxllm.models import MODELS, create, flops_per_token
from jaxllm.models.llama3 import Llama3
from jaxllm.models.vlstm import VLSTM
from jaxllm.weights.places import named_params

all_models = pytest.mark.parametrize("kind", MODELS)


pytestmark = pytest.mark.usefixtures("no_tf32")


@functools.cache
def shaken_params(config):
    """Parameters far from their initial values, so that every part of the model matters."""
    params = jax.jit(lambda: nnx.state(create(config)))()
    rng = np.random.default_rng(0)
    for path, p in named_params(params).items():
        if not path.endswith(("wte", "head.weight")):
            p[...] = p[...] + 0.2 * rng.standard_normal(p.shape, np.float32)
        if path.endswith("i.bias"):
            p[...] = p[...] + 10
    return params


def shaken(config):
    """(graph, parameters), with the same parameters for every dtype and remat."""
    graph = nnx.split(nnx.eval_shape(lambda: create(config)))[0]
    same = dict(remat="none", compute_dtype="float32", residual_dtype="float32")
    return graph, jax.tree.map(jnp.copy, shaken_params(config.model_copy(update=same)))


def tokens_of(config, seed=0, shape=(2, 21)):
    return jax.random.randint(jax.random.key(seed), shape, 0, config.vocab_size)


def test_every_model_has_a_class_and_settings():
    assert set(MODELS) == set(MODEL_CONFIGS) >= set(NEEDED)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_355m", 354_823_168),
        ("gpt2_1558m", 1_557_611_200),
        ("llama3_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("xlstm_7b", 6_865_424_896),
    ],
)
def test_real_models_have_the_published_number_of_parameters(name, count):
    config = load(name).model
    model = nnx.eval_shape(lambda: create(config))
    tables = 1 if model.head is None else 2
    padding = tables * (config.padded_vocab_size - config.vocab_size) * config.d_model
    assert sum(p.size for p in named_params(model).values()) == count + padding


@pytest.mark.parametrize("fp8", ["yes", "fp8", ""])
def test_fp8_is_one_of_three_values(fp8):
    """Any other was "matmuls", and so was True."""
    with pytest.raises(ValueError, match=f"^fp8={fp8!r} is not one of none, matmuls, all$"):
        create(tiny("gpt2"), fp8=fp8)


def test_flops_per_token():
    gpt2 = load("gpt2_124m").model
    matrices = 50257 * 768 + 12 * 12 * 768**2  # tied head and blocks; no positions, no padding
    assert flops_per_token(gpt2, 1024) == 6 * matrices + 6 * 12 * 768 * 1024
    narrow = gpt2.model_copy(update={"window": 256})  # 224 keys of 1024 on average, not 512
    assert flops_per_token(narrow, 1024) == 6 * matrices + 6 * 12 * 768 * 448
    wide = gpt2.model_copy(update={"window": 2048})
    assert flops_per_token(wide, 1024) == flops_per_token(gpt2, 1024)
    llama = load("llama3_8b").model
    block = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    matrices = 128256 * 4096 + 32 * block  # the untied embedding is looked up
    assert flops_per_token(llama, 8192) == 6 * matrices + 6 * 32 * 4096 * 8192
    vlstm = load("vlstm_124m").model
    assert (vlstm.qk_dim, vlstm.v_dim, vlstm.chunk_size) == (64, 128, 64)
    per_head = 64 * (64 + 128) + 4 * 64 * 128
    matmuls = 768 * (vlstm.vocab_size + 12 * (4 * 768 + 2 * 6 + 3 * vlstm.ff_width))
    assert flops_per_token(vlstm, 1024) == 6 * matmuls + 3 * 12 * 6 * per_head


@all_models
def test_initial_weights(kind):
    config = tiny(kind, d_model=128)
    params = {path: np.asarray(p[...]) for path, p in named_params(create(config)).items()}
    for path, w in params.items():
        if path.endswith("bias"):
            assert kind == "vlstm" or not w.any()
        elif w.ndim == 1:
            assert path.split(".")[-2].startswith("norm")
            assert (w == 1).all()
        elif path.split(".")[-2] in ("i", "f", "o"):
            assert not w.any()
        else:
            std = 0.02 / 2 if path.endswith(("out.weight", "down.weight")) else 0.02
            real = w[:100] if path.endswith("wte") else w[:, :100] if "head" in path else w
            np.testing.assert_allclose(real.std(), std, rtol=0.06)
            assert abs(real.mean()) < std / 10
    assert params["embedding.wte"].shape == (128, 128)
    assert not params["embedding.wte"][100:].any()
    assert not params.get("head.weight", np.zeros((1, 1)))[:, 100:].any()


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), "vlstm"])
def test_a_token_does_not_affect_earlier_outputs(kind):
    config = tiny(kind)
    graph, params = shaken(config)
    tokens = tokens_of(config)
    changed = tokens.at[:, 13].add(1) % config.vocab_size
    logits = jax.jit(lambda p, t: nnx.merge(graph, p)(t))
    before, after = logits(params, tokens), logits(params, changed)
    np.testing.assert_array_equal(before[:, :13], after[:, :13])
    assert (np.abs(before - after).max((0, 2))[13:] > 1e-3).all()


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_what_pads_the_vocabulary_is_zero(kind):
    model = create(tiny(kind, n_layers=1, vocab_size=300))
    tables = [model.embedding.wte[...]]
    tables += [] if model.head is None else [model.head.weight[...].T]
    for table in tables:
        assert table.shape[0] == 384
        assert table[:300].all()
        assert not table[300:].any()


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), slow("vlstm")])
def test_padding_of_the_vocabulary_has_no_effect(kind):
    config = tiny(kind, n_layers=1)
    graph, params = shaken(config)
    tokens, labels = tokens_of(config), tokens_of(config, 1).at[0, :4].set(-100)

    @jax.value_and_grad
    def loss(params, labels):
        return nnx.merge(graph, params).loss(tokens, labels)

    run = jax.jit(loss)
    total, grads = run(params, labels)
    assert total.dtype == jnp.float32
    # Only positions with a label contribute.
    of = lambda where: float(run(params, jnp.where(where, labels, -100))[0])
    only = np.zeros(labels.shape, bool)
    only[0, :4] = True
    assert of(only) == 0
    assert of(~only) == float(total)
    first = np.arange(labels.shape[0])[:, None] == 0
    assert 0 < of(first) < float(total)
    tied = "head.weight" not in named_params(params)
    path = "embedding.wte" if tied else "head.weight"
    rows = named_params(grads)[path][...]
    rows = rows if tied else rows.T
    assert not rows[100:].any()
    assert rows[:100].all()
    head = named_params(params)[path]
    head[...] = head[...].at[(slice(100, None) if tied else np.s_[:, 100:])].set(7.0)
    assert run(params, labels)[0] == total


def test_a_tied_table_gets_the_sum_of_both_gradients():
    model = create(tiny("gpt2", n_layers=1, d_model=128))
    tokens, labels = tokens_of(model.config), tokens_of(model.config, 1)
    model.embedding.implementation = "mosaic"
    graph, params = nnx.split(model)

    def apart(wte, head):
        merged = nnx.merge(graph, params)
        merged.embedding.wte, merged.embedding.implementation = nnx.Param(wte), "xla"
        z = (merged.hidden(tokens) @ head.T)[..., : model.config.vocab_size]
        return -0.5 * jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1).sum()

    def loss(wte):
        merged = nnx.merge(graph, params)
        merged.embedding.wte = nnx.Param(wte)
        return merged.loss(tokens, labels, scale=0.5)

    wte = model.embedding.wte[...]
    total, both = jax.jit(jax.value_and_grad(apart, (0, 1)))(wte, wte)
    with kernels_run_here():
        actual, grad = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(wte))
    np.testing.assert_allclose(actual, total, rtol=1e-6)
    np.testing.assert_allclose(grad, sum(both), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "kind"),
    [
        (remat, kind) if kind == "gpt2" or remat in ("none", "block") else slow(remat, kind)
        for remat in ("none", "dots", "mlp", "attention", "block")
        for kind in MODELS
    ],
)
def test_equal_blocks_are_traced_once(kind, remat, monkeypatch):
    config = tiny(kind, remat=remat, n_layers=5, d_model=64)
    graph, params = nnx.split(nnx.eval_shape(lambda: create(config)))
    block = type(nnx.merge(graph, params).blocks[0])
    traced, original = [], block.__call__
    monkeypatch.setattr(block, "__call__", lambda s, *a: (traced.append(1), original(s, *a))[1])
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    jax.clear_caches()
    jax.jit(jax.grad(lambda p, t: nnx.merge(graph, p).loss(t, t))).trace(params, tokens)
    # The first block has no branch to add yet.  Blocks that save little return none: they add it.
    assert 1 <= len(traced) <= (2 if remat in ("none", "dots") else 1)


@pytest.mark.parametrize("kind", [slow("gpt2"), slow("llama3"), "vlstm"])
def test_bfloat16_is_close_to_float32(kind):
    tokens = tokens_of(tiny(kind))

    def logits(**dtypes):
        graph, params = shaken(tiny(kind, **dtypes))
        z = jax.jit(lambda p: nnx.merge(graph, p)(tokens))(params)
        assert z.dtype == dtypes.get("compute_dtype", jnp.float32)
        return np.asarray(z[..., :100], np.float32)

    truth = logits()
    for residual in ("bfloat16", "float32"):
        error = logits(compute_dtype="bfloat16", residual_dtype=residual) - truth
        # The median, because where q . k is near 0, the sign of a vLSTM's first output is random.
        assert 1e-4 < np.median(error.std(-1)) / truth.std() < 0.03


def plain_logits(model, tokens):
    """A GPT-2 or Llama with window and softcap, and attention in plain jnp."""
    config, T = model.config, tokens.shape[1]
    t = jnp.arange(T)
    seen = (t[None] <= t[:, None]) & (t[None] > t[:, None] - config.window)

    def turn(x):
        theta = getattr(config, "rope_theta", None)
        if theta is None:
            return x
        angle = t[:, None, None] * theta ** (-jnp.arange(0, 1, 2 / x.shape[-1]))
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(layer, x):
        q, k, v = (
            w(x).reshape(*x.shape[:2], -1, layer.head_dim) for w in (layer.q, layer.k, layer.v)
        )
        k, v = (jnp.repeat(y, config.n_heads // y.shape[2], axis=2) for y in (turn(k), v))
        z = jnp.einsum("bqhd,bkhd->bhqk", turn(q), k) / layer.head_dim**0.5
        z = jnp.where(seen, config.softcap * jnp.tanh(z / config.softcap), -jnp.inf)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(z), v)
        return layer.out(y.reshape(x.shape[0], T, -1))

    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + attend(block.attention, block.norm_1(x))
        x = x + block.mlp(block.norm_2(x))
    return model.logits(model.norm(x))[..., : config.vocab_size]


@pytest.mark.parametrize("base", [Llama3, slow(VLSTM)])
def test_a_block_may_have_a_bias_in_one_of_its_halves(base):
    """Only blocks whose mixer had one, too, could have GPT-2's MLP: the others raised TypeError."""
    kind = type("Mixed", (base,), {"mlps": MLP})
    model = kind(tiny(base.__name__.lower()), rngs=nnx.Rngs(0))
    tokens = tokens_of(model.config)
    x = model.embedding(tokens)
    mixer = getattr(model.blocks[-1], model.blocks[-1].mixer)
    mixer.out = Linear(*mixer.out.weight.shape, bias=True, rngs=nnx.Rngs(1))  # one has both
    mixer.out.bias[...] = 1 - jnp.arange(32.0)
    for block in model.blocks:
        block.mlp.down.bias[...] = jnp.arange(32.0)
        x += getattr(block, block.mixer)(block.norm_1(x))
        x += block.mlp(block.norm_2(x))
    expected = model.logits(model.norm(x))
    np.testing.assert_allclose(model(tokens), expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("kind", [slow("gpt2"), "llama3"])
def test_window_and_softcap_match_attention_in_plain_jnp(kind):
    config = tiny(kind, window=5, softcap=0.7)
    graph, params = shaken(config)
    tokens, labels = tokens_of(config), tokens_of(config, 1)

    def plain(params):
        z = jax.nn.log_softmax(plain_logits(nnx.merge(graph, params), tokens))
        return -jnp.take_along_axis(z, labels[..., None], -1).sum()

    def ours(params):
        return nnx.merge(graph, params).loss(tokens, labels)

    # On an H100, XLA of JAX 0.12.0.1 computes one gradient of `plain` wrong (that of Llama's first
    # norm), so it runs on the CPU.
    with jax.default_device(jax.devices("cpu")[0]):
        expected, grads = jax.jit(jax.value_and_grad(plain))(params)
    loss, found = jax.jit(jax.value_and_grad(ours))(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        allowed = 2e-5 * np.abs(theirs).max() + np.finfo(np.float32).eps * largest
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=allowed)


def test_segments_give_the_logits_of_separate_texts():
    config = tiny("gpt2")
    graph, params = shaken(config)
    tokens = tokens_of(config, shape=(1, 20))
    run = jax.jit(lambda p, t, **options: nnx.merge(graph, p)(t, **options))
    t = jnp.arange(20)
    packed = run(params, tokens, positions=(t % 10)[None], segment_ids=(t // 10)[None])
    alone = run(params, tokens.reshape(2, 10)).reshape(1, 20, -1)
    np.testing.assert_allclose(packed, alone, atol=1e-5 * np.abs(alone).max())


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), slow("vlstm")])
def test_ids_of_any_integer_dtype(kind):
    """As a shard has them (uint16), and from numpy (int64)."""
    model = create(tiny(kind, vocab_size=300))
    inputs = dict(
        tokens=np.array([[7, 256, 299, 3, 200, 1]]),
        labels=np.array([[256, 299, 3, 200, 1, 7]]),
        positions=np.array([[0, 1, 2, 0, 1, 2]]),
        segment_ids=np.array([[1, 1, 1, 0, 0, 0]]),
    )
    expected = model.loss(**jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), inputs))
    for dtype in ("uint16", "int64"):
        narrow = {name: x.astype(dtype) for name, x in inputs.items()}
        narrow["positions"] = inputs["positions"].astype("uint8" if dtype == "uint16" else dtype)
        assert model.loss(**narrow) == expected
        if dtype == "uint16":
            assert model.loss(**jax.tree.map(jnp.asarray, narrow)) == expected
    far = inputs["segment_ids"] * 2**32 + 1  # int64 ids that are equal in 32 bits
    assert model.loss(**(inputs | dict(segment_ids=far))) == expected


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), slow("vlstm")])
def test_parameters_and_results_have_their_dtypes_under_stricter_settings(kind):
    """Under jax_enable_x64 all parameters were float64; adding a bias promoted ranks.

    Strict promotion refused a residual stream of another dtype than the layers'.
    """
    mixed = functools.partial(tiny, kind, compute_dtype="bfloat16")  # with a float32 stream
    config, tokens = mixed(), np.zeros((2, 8), np.int64)
    graph, params = nnx.split(nnx.eval_shape(lambda: create(config)), nnx.Param)
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    prompts = like("int32", 2, 8), like("int32", 2), like("uint32", 2, 3)

    def shapes():
        jax.clear_caches()
        decode._programs.cache_clear()
        loss = lambda params: nnx.merge(graph, params).loss(tokens, tokens)
        first, further = decode._programs(graph, 64, kind != "vlstm", 1.1, 1.0, 3, 0.9)
        token, arrays = jax.eval_shape(first, params, params, *prompts)
        after = params, params, token, arrays, like("int32"), *prompts[1:]
        results = jax.eval_shape(jax.value_and_grad(loss), params), jax.eval_shape(further, *after)
        lora = dict(lora=dict(dropout=0.5)) if kind == "llama3" else {}
        return nnx.eval_shape(lambda: nnx.state(create(mixed(**lora)))), results

    expected = shapes()
    with jax.enable_x64(True):
        assert jax.tree.leaves(shapes()) == jax.tree.leaves(expected)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.tree.leaves(shapes()) == jax.tree.leaves(expected)


class Busy(GatedMLP):
    """Sows its input, counts its calls, and draws random numbers from a stream of all blocks."""

    def __init__(self, *given, random, **options):
        super().__init__(*given, **options)
        self.random, self.calls = random, nnx.Variable(jnp.int32(0))

    def __call__(self, x, *, norm=None):
        self.sow(nnx.Intermediate, "seen", x)
        self.calls[...] += 1
        return super().__call__(x) * jax.random.bernoulli(self.random.drop(), 0.5, x.shape)


def busy(**options):
    mlps = functools.partial(Busy, random=nnx.Rngs(drop=0))
    own = type("Own", (Llama3,), dict(mlps=mlps))
    return own(tiny("llama3", **options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("remat", [slow("none"), "block"])
def test_what_layers_change_or_sow_in_a_block_stays(remat):
    """A block was called as a copy: each call dropped the same, and what it sowed was lost."""
    model, by_hand, tokens = busy(remat=remat), busy(), jnp.arange(10).reshape(2, 5)
    y, inputs = by_hand.embedding(tokens), []
    for block in by_hand.blocks:
        y += block.attention(block.norm_1(y))
        inputs.append(block.norm_2(y))
        with pytest.warns(DeprecationWarning, match="sow"):
            y += block.mlp(inputs[-1])
    found, seen = nnx.capture(model.hidden, nnx.Intermediate)(tokens)
    np.testing.assert_allclose(found, by_hand.norm(y), atol=1e-5)
    for i, x in enumerate(inputs):
        np.testing.assert_allclose(seen["blocks"][i]["mlp"]["seen"][0], x, atol=1e-5)
    loss = lambda model: nnx.capture(model.loss, nnx.Intermediate)(tokens, tokens)
    step = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    (first, seen), _ = step(model)
    assert step(model)[0][0] != first
    assert len(seen["blocks"]) == 2
    assert [int(block.mlp.calls[...]) for block in model.blocks] == [3, 3]
    assert model.blocks[0].mlp.random.drop.count[...] == 6


def test_generation_leaves_what_layers_change():
    graph, state = nnx.split(busy())
    with pytest.warns(DeprecationWarning, match="sow"):
        assert len(decode.generate(graph, state, [1, 2], SampleConfig(tokens=3))) == 3
    assert state["blocks"][0]["mlp"]["calls"][...] == 0


@pytest.mark.parametrize(
    ("compute", "residual"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_residual_stream_has_its_dtype(compute, residual):
    """Beside float32 it became float32 after the first norm, unlike in generation."""
    config = tiny("llama3", compute_dtype=compute, residual_dtype=residual)
    graph, params = nnx.split(nnx.eval_shape(lambda: create(config)))

    def run(params, tokens):
        model = nnx.merge(graph, params)
        walked = list(model.walk(model.embedding(tokens)))
        return [stream.sum() for stream, _ in walked], walked[-1][0].normed(model.norm)

    streams, (y, s) = jax.eval_shape(run, params, jnp.zeros((1, 8), jnp.int32))
    assert {x.dtype for x in (*streams, s)} == {jnp.dtype(residual)}
    assert y.dtype == compute
