"""What layers refuse, each in one line: sizes, dtypes, shapes, and what is no array."""

import inspect
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny

from jaxllm.layers import (
    MLP,
    Attention,
    Embedding,
    GatedMLP,
    HeadLayerNorm,
    Linear,
    RMSNorm,
    VLSTMLayer,
)
from jaxllm.layers.cache import Cache
from jaxllm.models import create
from pallas_kernels import RopeScaling

KINDS = [Linear, MLP, GatedMLP, Attention, VLSTMLayer]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda rngs: Attention(256, 3, rngs=rngs), "d_model=256 is not a multiple of n_heads=3"),
        (
            lambda rngs: Attention(256, 4, n_kv_heads=3, rngs=rngs),
            "n_heads=4 is not a multiple of n_kv_heads=3",
        ),
        (
            lambda rngs: VLSTMLayer(250, 4, rngs=rngs),
            "d_model=250 is not a multiple of 2 n_heads=8",
        ),
        (
            lambda rngs: Attention(256, 4, n_kv_heads=0, rngs=rngs),
            "n_heads=4 is not a multiple of n_kv_heads=0",
        ),
        (lambda rngs: Attention(256, 0, rngs=rngs), "n_heads=0 is not a multiple of n_kv_heads=0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        layer(nnx.Rngs(0))


def test_a_mesh_of_other_axes_is_refused_in_one_line():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for layer in (RMSNorm(8), Linear(8, 4, rngs=nnx.Rngs(0))):
        with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match="make_mesh$"):
            layer(jnp.ones((2, 3, 8)))


def test_what_would_silently_be_another_computation_is_refused():
    check = inspect.unwrap(Linear.check)  # without the type checks that only tests have
    for dtype in (jnp.int32, jnp.bool, jnp.float8_e4m3fn):  # to which the weights would be cast
        with pytest.raises(ValueError, match=rf"^x is {jnp.dtype(dtype)}: cast it to bfloat16"):
            check(Linear(8, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 2, 8), dtype))
    x = jnp.ones((1, 3, 1, 16))  # one head of 16 where the norm has two of 8
    with pytest.raises(ValueError, match=r"weight has shape \(2, 8\)"):
        HeadLayerNorm(2, 8)(x, x)
    tokens = jnp.zeros((2, 4), jnp.int32)
    for shape in ((3, 4), (1, 4), (2, 1), (5,), (3,), ()):  # of other rows, or not of 4 tokens
        with pytest.raises(ValueError, match=r"^positions have shape .*, none of \(\(4,\), \(2, "):
            Embedding(10, 8, max_seq_len=8, rngs=nnx.Rngs(0))(tokens, jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match=r"^rope_scaling=.* needs rope_theta, which it scales$"):
        Attention(8, 2, rope_scaling=RopeScaling(), rngs=nnx.Rngs(0))
    for cap in (0.0, -1.0, np.nan):  # NaN where a gate is 0, the same as 1.0, NaN everywhere
        with pytest.raises(ValueError, match=rf"^gate_soft_cap={cap} must be positive$"):
            VLSTMLayer(8, 2, gate_soft_cap=cap, rngs=nnx.Rngs(0))


@pytest.fixture
def untyped():
    """Layers without the type checks that only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_layer_takes_is_named(kind, untyped):
    """It was AttributeError, or "not enough values to unpack"."""
    layer, of_rows = kind(8, 2, rngs=nnx.Rngs(0)), kind in (Attention, VLSTMLayer)
    for wrong in (None, [1.0], "x", 3):
        with pytest.raises(ValueError, match=f"^x must be an array, not {type(wrong).__name__}: "):
            layer(wrong)
    for shape in ((), (2, 9), (1, 2, 9)) + of_rows * ((8,), (1, 1, 2, 8)):
        axes = r"but needs 3 axes: B T C|not \(\.\.\., in_features=8\)"
        with pytest.raises(ValueError, match=rf"^x has shape {re.escape(str(shape))}, ({axes})$"):
            layer(jnp.ones(shape))


def test_what_is_passed_in_place_of_positions_and_a_scaling_is_named(untyped):
    """A mask turned heads by 0 or 1, or had no effect; a dict was AttributeError."""
    x, rngs = jnp.ones((1, 2, 8)), nnx.Rngs(0)
    for theta in (None, 1e4):
        attends = Attention(8, 2, rope_theta=theta, rngs=rngs)
        for mask in (jnp.ones((1, 2), bool), np.ones((1, 2), bool), jnp.ones((1, 2))):
            with pytest.raises(ValueError, match=rf"^positions is {mask.dtype}: cast it to an int"):
                attends(x, mask)
    attends = Attention(8, 2, rope_theta=1e4, rope_scaling={"factor": 8.0}, rngs=rngs)
    with pytest.raises(ValueError, match=r"^scaling={'factor': 8\.0} is not a pallas_kernels.Rope"):
        attends(x)


def test_positions_and_segments_in_a_list_are_named(untyped):
    x, attends = jnp.ones((1, 2, 8)), Attention(8, 2, rope_theta=1e4, rngs=nnx.Rngs(0))
    for layer, options in (
        (attends, dict(positions=[0, 1])),
        (attends, dict(segment_ids=[[0, 1]])),
        (VLSTMLayer(8, 2, rngs=nnx.Rngs(0)), dict(segment_ids=[[0, 1]])),
    ):
        with pytest.raises(ValueError, match=r"^(positions|segment_ids\S*) must be an array, not "):
            layer(x, **options)


def test_embedding_refuses_a_text_longer_than_its_positions():
    layer = Embedding(10, 8, max_seq_len=7, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="T=8 exceeds max_seq_len=7"):
        layer(jnp.zeros((1, 8), jnp.int32))


@pytest.mark.parametrize("name", ["llama3", "vlstm"])
def test_segments_with_a_cache_are_refused(name):
    """They were ignored: the segments of a row saw each other."""
    model = create(tiny(name))
    embedded, caches = model.embedding(jnp.zeros((1, 4), jnp.int32)), [Cache(jnp.array([4]), 8)]
    with pytest.raises(ValueError, match="segment_ids do not go with caches"):
        model.advance(embedded, segment_ids=jnp.array([[0, 0, 1, 1]]), caches=caches)


@pytest.mark.parametrize("name", ["llama3", "vlstm"])
def test_caches_of_other_blocks_or_tokens_are_refused(name):
    """Of too many the last were ignored; two tokens were `gate has shape (1, 2, ...)`."""
    model, cache = create(tiny(name)), Cache(jnp.array([4]), 8)
    embedded = model.embedding(jnp.zeros((1, 4), jnp.int32))
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"^{count} caches do not fit 2 blocks$"):
            model.advance(embedded, caches=[cache] * count)
    _, caches = model.advance(embedded, caches=[cache] * 2)
    with pytest.raises(ValueError, match="T=2 (positions: .* needs 1|tokens .* takes one token)"):
        model.advance(embedded[:, :2], caches=caches)


def test_prompts_longer_than_their_cache_are_refused():
    layer, x = Attention(16, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 9, 16))
    with pytest.raises(ValueError, match="T=9 positions are more than the cache's size=8"):
        layer.with_cache(x, None, Cache(jnp.array([9]), 8))
