"""Layers that a user puts in: subclasses, biases, precisions, foreign norms, heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from layer_checks import WIDE, close, normal
from tiny_models import tiny

from jaxllm.layers import (
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
from jaxllm.layers.linear import COLUMNS, ROWS
from jaxllm.models import MODELS, create

pytestmark = pytest.mark.usefixtures("no_tf32")


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


class Doubled(Linear):
    def __call__(self, x, *given, **options):
        return 2 * super().__call__(x, *given, **options)


class Shifted(RMSNorm):
    def __call__(self, x):
        return 3 + super().__call__(x)


@pytest.mark.parametrize("kind", ["llama3", slow("vlstm")])
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


@pytest.mark.parametrize("kind", [slow("gpt2"), slow("llama3"), "vlstm"])
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
