"""Compares layers with their formulas; tests dtypes, segments, positions, padding."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from kernel_checks import names_in
from tiny_models import tiny

from jaxllm.layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    HeadLayerNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    VLSTMLayer,
)
from jaxllm.layers.cache import Cache
from jaxllm.layers.linear import COLUMNS, ROWS, fan_out
from jaxllm.models import MODELS, create
from jaxllm.sharding import P, spec_of

WIDE = partial(Linear, std=0.5)


pytestmark = pytest.mark.usefixtures("no_tf32")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(actual, expected, tolerance=1e-5):
    scale = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=0, atol=tolerance * scale
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Attention, dict(n_heads=2)),
        (VLSTMLayer, dict(n_heads=2)),
        (MLP, dict(d_ff=24)),
        (GatedMLP, dict(d_ff=24)),
    ],
)
def test_an_output_projection_may_begin_at_zero(kind, options):
    layer = kind(16, linear=partial(Linear, rows_std=0.0), **options, rngs=nnx.Rngs(0))
    assert not jnp.any(layer(normal(0, 1, 3, 16)))


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), "vlstm"])
def test_models_run_without_jit_where_implicit_transfers_are_forbidden(kind):
    """JAX refused the numbers of a cap of gates, and the loss's scale."""
    model, tokens = create(tiny(kind)), jnp.arange(12).reshape(2, 6)
    with jax.transfer_guard("disallow"):
        loss = model.loss(tokens, tokens)
        getattr(model.blocks[0], model.blocks[0].mixer)(model.embedding(tokens))
    assert float(loss) > 0


@pytest.mark.parametrize("kind", [Linear, MLP, GatedMLP, Attention, VLSTMLayer, LayerNorm, RMSNorm])
def test_nnx_tabulates_a_layer(kind):
    """tabulate sets methods anew and so made one of a norm's op: no norm ran in this process."""
    layer = kind(8) if kind in (LayerNorm, RMSNorm) else kind(8, 2, rngs=nnx.Rngs(0))
    assert kind.__name__ in nnx.tabulate(layer, normal(0, 1, 3, 8))


@pytest.mark.parametrize(
    ("kind", "sizes", "shapes"),
    [
        (LayerNorm, (8,), [(1, 3, 8)]),
        (RMSNorm, (8,), [(1, 3, 8)]),
        (HeadLayerNorm, (2, 4), [(1, 3, 2, 4)] * 2),
        (Attention, (8, 2), [(1, 3, 8)]),
        (GatedMLP, (8, 16), [(1, 3, 8)]),
    ],
)
def test_a_linen_module_may_have_any_layer(kind, sizes, shapes):
    """nnx.bridge gives every module rngs, which the norms refused."""
    arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]
    layer = nnx.bridge.to_linen(kind, *sizes)
    found, variables = layer.init_with_output(jax.random.key(0), *arrays)
    assert set(variables) == {"params"}
    own = kind(*sizes, rngs=nnx.Rngs(0))
    state = nnx.state(own, nnx.Param)
    nnx.update(own, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(variables)))
    close(found, own(*arrays))


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "vlstm"])
def test_no_rows_and_no_tokens_give_empty_results(kind):
    model = create(tiny(kind))
    for shape in ((0, 4), (2, 0)):
        tokens = jnp.zeros(shape, jnp.int32)
        assert model(tokens).shape == (*shape, 128)
        assert model.loss(tokens, tokens) == 0
    for shape in ((4,), ()):  # of GPT-2's token () JAX said "tuple index out of range"
        with pytest.raises(ValueError, match=r"tokens has shape \(.*\), but needs 2 axes: B T"):
            model.embedding._embed(jnp.zeros(shape, jnp.int32), None, adds=True)


def test_linear_is_xw_plus_b_and_can_return_float32():
    layer = Linear(32, 48, bias=True, std=0.5, rngs=nnx.Rngs(0))
    layer.bias[...] = normal(1, 48)
    x = normal(2, 2, 3, 32)
    expected = x @ layer.weight[...] + layer.bias[...]
    close(layer(x), expected)
    x = x.astype(jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    y = layer(x, jnp.float32)
    exact = x.astype(jnp.float32) @ layer.weight[...].astype(jnp.bfloat16).astype(jnp.float32)
    close(y, exact + layer.bias[...])  # neither the sum nor the bias was rounded to bf16
    x = normal(3, 1000, 32).astype(jnp.bfloat16)  # nor are the sums of the bias' gradient
    gradient = nnx.grad(lambda layer: (layer(x) * layer(x)).sum())(layer)
    close(gradient.bias[...], 2 * layer(x).astype(jnp.float32).sum(0))


@pytest.mark.parametrize(
    ("kind", "names"), [(Attention, "qkv"), (VLSTMLayer, "qkvo"), (VLSTMLayer, "if")]
)
def test_a_missing_bias_is_zero(kind, names):
    """Where some of the joint layers had biases, JAX refused shapes, or shared one number."""
    rngs, x = nnx.Rngs(0), normal(0, 1, 3, 16)
    layer = kind(16, 1, rngs=rngs)
    for name in names:
        setattr(layer, name, Linear(*getattr(layer, name).weight.shape, bias=True, rngs=rngs))
    one, *others = (getattr(layer, name) for name in names)
    one.bias[...] = normal(1, *one.bias.shape)
    expected = layer(x)
    for other in others:
        other.bias = None
    np.testing.assert_array_equal(layer(x), expected)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_gated_mlp_adds_the_bias_of_a_layer_that_was_put_in(name):
    """It was ignored, or refused."""
    rngs, x = nnx.Rngs(0), normal(0, 1, 3, 16)
    layer = GatedMLP(16, 24, linear=WIDE, rngs=rngs)
    biased = Linear(*getattr(layer, name).weight.shape, bias=True, rngs=rngs)
    biased.bias[...] = normal(1, *biased.bias.shape)
    setattr(layer, name, biased)
    close(layer(x), layer.down(jax.nn.silu(layer.gate(x)) * layer.up(x)))


def test_fan_out_adds_gradients_with_the_newest_product_on_the_left():
    x, weights = normal(0, 8, 4), [normal(i, 4, 4) for i in (1, 2, 3)]

    def f(x):
        return sum((y @ w).sum() for y, w in zip(fan_out(x, 3), weights, strict=True))

    close(jax.grad(f)(x), sum(jnp.ones((8, 4)) @ w.T for w in weights))
    text = jax.jit(jax.grad(f)).lower(x).as_text()
    made_by = {m[1]: m[2] for m in re.finditer(r"(%\w+) = stablehlo\.(\w+)", text)}
    sums = re.findall(r"= stablehlo\.add (%\w+), (%\w+) : tensor<8x4xf32>", text)
    assert [(made_by[a], made_by[b]) for a, b in sums] == [
        ("dot_general", "dot_general"),
        ("dot_general", "add"),
    ]


def test_a_pair_of_linears_is_split_by_columns_and_then_by_rows():
    up, down = (Linear(8, 8, axes=a, bias=True, rngs=nnx.Rngs(0)) for a in (COLUMNS, ROWS))
    assert spec_of(up.weight) == P(("fsdp", "context"), "tensor")
    assert spec_of(up.bias) == P("tensor")
    assert spec_of(down.weight) == P(("tensor", "fsdp", "context"), None)
    assert spec_of(down.bias) == P()


def test_embedding_adds_given_or_default_positions():
    layer = Embedding(10, 8, max_seq_len=7, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 9, 0, 3, 3], [2, 2, 5, 0, 8]])
    y = layer(tokens)
    assert y.dtype == jnp.bfloat16
    close(y, layer.wte[...][tokens] + layer.wpe[...][:5], 2**-8)
    given = jnp.array([3, 0, 6, 1, 1])
    close(layer(tokens, given), layer.wte[...][tokens] + layer.wpe[...][given], 2**-8)
    given = jnp.stack([given, given[::-1]])
    close(layer(tokens, given), layer.wte[...][tokens] + layer.wpe[...][given], 2**-7)
    close(layer.logits(y.astype(jnp.float32)), y.astype(jnp.float32) @ layer.wte[...].T)


@pytest.mark.parametrize("positions", [[-3, -1, 0], [5, 6, 7]])
def test_embedding_clips_positions_of_all_rows_and_of_each_row(positions):
    layer = Embedding(10, 8, max_seq_len=7, rngs=nnx.Rngs(0))
    tokens, positions = jnp.ones((1, 3), jnp.int32), jnp.array(positions)
    expected = layer.wte[...][tokens] + layer.wpe[...][jnp.clip(positions, 0, 6)]
    close(layer(tokens, positions), expected)
    close(layer(tokens, positions[None]), expected)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_add_the_residual_in_its_own_dtype(kind):
    norm = kind(32, eps=1e-3)
    norm.weight[...] = normal(0, 32)
    if kind is LayerNorm:
        norm.bias[...] = normal(1, 32)
    branch, residual = normal(2, 2, 3, 32), 2 + normal(3, 2, 3, 32)
    s = branch + residual
    mean = s.mean(-1, keepdims=True) if kind is LayerNorm else 0
    y = (s - mean) / jnp.sqrt(((s - mean) ** 2).mean(-1, keepdims=True) + 1e-3) * norm.weight[...]
    y += norm.bias[...] if kind is LayerNorm else 0
    close(norm(s), y)
    for actual, expected in zip(norm.add(branch, residual), (y, s), strict=True):
        close(actual, expected)
    bias = normal(4, 32)
    for actual, expected in zip(norm.add(branch - bias, residual, bias), (y, s), strict=True):
        close(actual, expected)
    narrow = kind(32, dtype=jnp.bfloat16)
    y, s = narrow.add(branch.astype(jnp.bfloat16), residual)
    assert (y.dtype, s.dtype) == (jnp.bfloat16, jnp.float32)
    assert narrow(residual).dtype == jnp.bfloat16
    close(s, branch.astype(jnp.bfloat16) + residual, 1e-7)


def test_head_layer_norm_normalizes_each_head_separately():
    norm = HeadLayerNorm(3, 16, eps=1e-6)
    assert norm.weight.ndim == 1  # weight decay would apply to a matrix
    norm.weight[...] = normal(0, 48)
    x = normal(1, 2, 5, 3, 16) * jnp.array([1.0, 100.0, 0.01])[:, None]
    z = x - x.mean(-1, keepdims=True)
    expected = z / jnp.sqrt((z * z).mean(-1, keepdims=True) + 1e-6)
    gate = normal(2, *x.shape)
    expected = expected * norm.weight[...].reshape(3, 16) / (1 + jnp.exp(-gate))
    close(norm(x, gate), expected)


def test_attention_with_groups_is_attention_with_repeated_kv_heads():
    D = 8
    grouped = Attention(
        16, 4, n_kv_heads=2, head_dim=D, rope_theta=1e4, rngs=nnx.Rngs(0), linear=WIDE
    )
    full = Attention(16, 4, head_dim=D, rope_theta=1e4, rngs=nnx.Rngs(0))
    full.q.weight[...] = grouped.q.weight[...]
    full.out.weight[...] = grouped.out.weight[...]
    for name in "kv":  # query head h reads kv head h // (H / K)
        w = getattr(grouped, name).weight[...].reshape(16, 2, D)
        getattr(full, name).weight[...] = jnp.repeat(w, 2, axis=1).reshape(16, 4 * D)
    x = normal(1, 2, 9, 16)
    close(grouped(x), full(x))


@pytest.mark.parametrize("kind", ["attention", "vlstm"])
def test_segments_do_not_see_each_other(kind):
    if kind == "attention":
        layer = Attention(16, 2, rope_theta=1e4, linear=WIDE, rngs=nnx.Rngs(0))
        run = jax.jit(lambda x, segments: layer(x, None, segments))
    else:
        layer = VLSTMLayer(16, 2, linear=WIDE, chunk_size=4, rngs=nnx.Rngs(0))
        layer.i.bias[...] = jnp.zeros(2)
        run = jax.jit(lambda x, segments: layer(x, segments))
    x = normal(1, 2, 11, 16)
    segments = jnp.broadcast_to(jnp.array([0] * 5 + [1] * 6), (2, 11))
    packed = run(x, segments)
    # RoPE is relative, so a segment may start at position 5 or at 0.
    alone = jnp.concatenate([run(x[:, :5], None), run(x[:, 5:], None)], axis=1)
    close(packed, alone, 1e-4)
    assert np.abs(packed - run(x, None))[:, 5:].max() > 1e-3


def test_positions_of_attention_are_relative_but_not_ignored():
    layer = Attention(16, 2, rope_theta=1e4, linear=WIDE, rngs=nnx.Rngs(0))
    x = normal(1, 2, 9, 16)
    t = jnp.arange(9)
    close(layer(x, t + 5), layer(x), 1e-4)
    close(layer(x, jnp.stack([t, t + 3])), layer(x), 1e-4)
    assert np.abs(layer(x, 2 * t) - layer(x)).max() > 1e-3


def test_feed_forward_layers_match_their_formulas():
    x = normal(1, 2, 5, 16)
    mlp = MLP(16, 40, linear=WIDE, rngs=nnx.Rngs(0))
    mlp.up.bias[...] = normal(2, 40)
    hidden = jax.nn.gelu(x @ mlp.up.weight[...] + mlp.up.bias[...], approximate=True)
    close(mlp(x), hidden @ mlp.down.weight[...])
    gated = GatedMLP(16, 40, linear=WIDE, rngs=nnx.Rngs(0))
    hidden = jax.nn.silu(x @ gated.gate.weight[...]) * (x @ gated.up.weight[...])
    close(gated(x), hidden @ gated.down.weight[...])


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_layer_keeps_its_own_fp8(name):
    """The first of q, k and v, or `up`, decided for the others."""
    linear = lambda *sizes, **options: WIDE(*sizes, **options, fp8=options["name"] != name)
    x = normal(1, 2, 16, 32)
    mlp = GatedMLP(32, 64, linear=linear, rngs=nnx.Rngs(0))
    close(mlp(x), mlp.down(jax.nn.silu(mlp.gate(x)) * mlp.up(x)))
    layer = Attention(32, 2, linear=linear, rngs=nnx.Rngs(0))
    q, k, v = (each(x).reshape(2, 16, 2, 16) for each in (layer.q, layer.k, layer.v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    close(layer(x), layer.out(y.reshape(x.shape)))


@pytest.mark.parametrize(
    ("kind", "activation", "rows", "d_ff", "fused"),
    [
        (MLP, "gelu", 128, 256, True),
        (MLP, "gelu", 120, 256, False),
        (GatedMLP, "swiglu", 128, 256, True),
        (GatedMLP, "swiglu", 128, 192, False),
    ],
)
def test_mosaic_uses_the_activation_kernel_where_the_fused_one_does_not_apply(
    kind, activation, rows, d_ff, fused
):
    """The fused op would raise there."""
    layer = kind(64, d_ff, implementation="mosaic", rngs=nnx.Rngs(0))
    loss = lambda x: layer(x).astype(jnp.float32).sum()
    lowered = jax.jit(jax.grad(loss)).trace(jnp.ones((1, rows, 64), jnp.bfloat16))
    names = names_in(lowered.lower(lowering_platforms=("cuda",)).as_text())
    assert (f"{activation}_mlp_backward" in names) == fused
    assert (f"{activation}_backward" in names) == (not fused)


def test_vlstm_layer_starts_with_gates_that_ignore_the_input():
    layer = VLSTMLayer(32, 4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.i.bias[...], [-10] * 4)
    np.testing.assert_array_equal(layer.f.bias[...], [3, 4, 5, 6])
    assert not any(w.weight[...].any() for w in (layer.i, layer.f, layer.o))
    assert layer.q.weight.shape == layer.k.weight.shape == (32, 16)
    x = normal(1, 1, 6, 32).astype(jnp.bfloat16)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    layer.o.weight[...] = layer.o.weight[...] + 1e3 * jnp.sign(x[0, 0, :, None])
    close(layer(x)[0, 0], 2 * np.float32(y[0, 0]), 0.02)  # sigmoid(0) = 1/2 became 1


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_the_row_norm_of_a_norm_is_a_bound(norm):
    """Also of rows of one large value, which reach it, in bfloat16."""
    layer = norm(64)
    layer.weight[...] = normal(1, 64)
    if norm is LayerNorm:
        layer.bias[...] = normal(2, 64)
    x = jnp.concatenate([normal(3, 1, 64, 64), 1e4 * jnp.eye(64)[None]], axis=1)
    norms = jnp.linalg.norm(layer(x.astype(jnp.bfloat16)).astype(jnp.float32), axis=-1)
    assert 0.5 * float(layer.row_norm()) < float(norms.max()) <= float(layer.row_norm())


class Doubled(Linear):
    def __call__(self, x, *given, **options):
        return 2 * super().__call__(x, *given, **options)


class Shifted(RMSNorm):
    def __call__(self, x):
        return 3 + super().__call__(x)


@pytest.mark.parametrize("kind", ["llama3", "vlstm"])
def test_a_subclass_computes_what_its_call_says(kind):
    """Larger ops took its weight instead, except with a cache and in the first block's norm."""
    model, x = create(tiny(kind)), normal(0, 2, 5, 32)
    block = model.blocks[1]
    mixer, mlp = getattr(block, block.mixer), block.mlp
    for layer, names in ((mixer, ("q", "v", "out")), (mlp, ("up", "gate", "down"))):
        for name in names:
            plain = layer(x)
            old = getattr(layer, name)
            axes = ROWS if name in ("out", "down") else COLUMNS
            new = Doubled(*old.weight.shape, axes=axes, rngs=nnx.Rngs(0))
            new.weight[...] = old.weight[...]
            setattr(layer, name, new)
            found = layer(x)
            setattr(layer, name, old)
            old.weight[...] *= 2
            close(found, layer(x))
            assert np.abs(found - plain).max() > 0
    tokens = jnp.arange(10).reshape(2, 5)
    block.norm_1, block.norm_2 = Shifted(32, eps=1e-3), Shifted(32, eps=1e-3)
    y = model.embedding(tokens)
    for each in model.blocks:
        y += getattr(each, each.mixer)(each.norm_1(y))
        y += each.mlp(each.norm_2(y))
    close(model.hidden(tokens), model.norm(y))


class ShiftedHeads(HeadLayerNorm):
    def __call__(self, x, gate):
        return 3 + super().__call__(x, gate)


def test_a_norm_of_heads_is_called_or_refused():
    """The vLSTM's was called with a cache only, those of q and k never: their eps was q's."""
    layer, x = VLSTMLayer(32, 2, rngs=nnx.Rngs(0)), normal(0, 2, 5, 32)
    layer.norm = ShiftedHeads(2, 16)
    close(layer(x), layer.with_cache(x, Cache(jnp.array([5, 5]), 8))[0])
    for norm in (Shifted(16), LayerNorm(16), RMSNorm(16, eps=1e-3), lambda x: x):
        attends = Attention(32, 2, qk_norm=1e-5, rngs=nnx.Rngs(0))
        attends.k_norm = norm
        with pytest.raises(ValueError, match="^q_norm and k_norm are not called: use an RMSNorm "):
            attends(x)


class Positive(nnx.Module):
    def __call__(self, x):
        return abs(x)


@pytest.mark.parametrize("kind", MODELS)
def test_any_module_may_be_a_norm(kind):
    """It had no attribute `plain`."""
    model, tokens = create(tiny(kind)), jnp.arange(10).reshape(2, 5)
    for block in model.blocks:
        block.norm_1, block.norm_2 = Positive(), nnx.RMSNorm(32, rngs=nnx.Rngs(0))
    model.norm = Positive()
    y = model.embedding(tokens)
    for each in model.blocks:
        y += getattr(each, each.mixer)(abs(y))
        y += each.mlp(each.norm_2(y))
    close(model.hidden(tokens), abs(y))
    caches = [Cache(jnp.array([5, 5]), 8) for _ in model.blocks]
    close(model.advance(model.embedding(tokens), caches=caches)[0], abs(y))


class Scaled(Embedding):
    def __call__(self, *given):
        return 2 * super().__call__(*given)


class Sharper(Embedding):
    def logits(self, *given):
        return 2 * super().logits(*given)


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_a_loss_of_other_logits_is_refused(kind):
    """The loss had the logits of the weights alone, unlike a call and generation."""
    config, tokens, rngs = tiny(kind), jnp.arange(10).reshape(2, 5), nnx.Rngs(0)
    twice = lambda name: (
        lambda self, *given, **options: 2 * getattr(super(own, self), name)(*given, **options)
    )
    refused = pytest.raises(ValueError, match="^no loss has this .*'s logits: use cross_entropy$")
    for name in ("logits", "hidden", "__call__"):
        own = type("Own", (MODELS[kind],), {name: twice(name)})
        with refused:
            own(config, rngs=rngs).loss(tokens, tokens)
    model = create(config)
    for part in (Scaled(128, 32, max_seq_len=32, rngs=rngs), Sharper(128, 32, rngs=rngs)):
        if kind == "gpt2":
            model.embedding = part
            with refused:
                model.loss(tokens, tokens)
    for part in (Doubled(32, 128, rngs=rngs), Linear(32, 128, bias=True, rngs=rngs)):
        model.head = nnx.data(part)
        with refused:
            model.loss(tokens, tokens)
