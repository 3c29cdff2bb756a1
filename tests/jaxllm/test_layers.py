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
from layer_checks import WIDE, close, normal
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
from jaxllm.layers.linear import COLUMNS, ROWS, fan_out, fused_linear
from jaxllm.models import create
from jaxllm.sharding import P, spec_of
from pallas_kernels import quantize

pytestmark = pytest.mark.usefixtures("no_tf32")


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


@pytest.mark.parametrize("kind", [slow("gpt2"), slow("llama3"), "vlstm"])
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
        # With a cache it was "integer modulo by zero".
        cache = Cache(jnp.ones(shape[0], jnp.int32), 8)
        hidden, _ = model.advance(model.embedding(tokens), caches=[cache] * 2)
        assert hidden.shape == (*shape, 32)
    for shape in ((4,), ()):  # of GPT-2's token () JAX said "tuple index out of range"
        with pytest.raises(ValueError, match=r"tokens has shape \(.*\), but needs 2 axes: B T"):
            model.embedding._embed(jnp.zeros(shape, jnp.int32), None, adds=True)


def test_packed_layers_side_by_side_take_no_rows():
    """It was "integer modulo by zero"."""
    layer = Linear(128, 16, rngs=nnx.Rngs(0))
    layer.weight.set_value(quantize(layer.weight[...]))
    assert fused_linear(jnp.ones((0, 3, 128), jnp.bfloat16), layer, layer).shape == (0, 3, 32)


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
