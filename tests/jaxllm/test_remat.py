"""What each choice of model.remat saves and recomputes; the gradients stay those without."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType
from tiny_models import tiny

from jaxllm.config import Config, GPT2Config, Llama3Config, VLSTMConfig
from jaxllm.models import create, language_model
from jaxllm.models.language_model import Stream, run_block
from jaxllm.sharding import abstract_mesh
from jaxllm.train.estimate import equations
from jaxllm.train.step import Trainer
from pallas_kernels.bench.traced import kernels_of

CHOICES = ["dots", "mlp", "attention", "block"]
B, T, C, F = 2, 512, 256, 768


def make(kind, **options):
    shape = dict(vocab_size=250, n_layers=1, n_heads=2, d_model=C, d_ff=F, max_seq_len=T)
    if kind == "llama3":
        return Llama3Config(**shape | {"n_kv_heads": 1} | options)
    return (GPT2Config if kind == "gpt2" else VLSTMConfig)(**shape | options)


def block_of(config, batch=B, fp8=False):
    """(function of (parameters, branch, residual), abstract arguments) of a block after others."""
    block = nnx.eval_shape(lambda: create(config, fp8="all" if fp8 else "none")).blocks[0]
    graph, params = nnx.split(block)
    of = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16 if a.ndim == 2 else jnp.float32)
    x = jax.ShapeDtypeStruct((batch, T, C), jnp.bfloat16)

    def run(params, branch, residual):
        stream = Stream(branch, None, residual)
        return run_block(graph, params, config.remat, stream, jnp.arange(T), None, None)[0].sum()

    return run, (jax.tree.map(of, params), x, x)


def saved(config, batch=B, fp8=False) -> Counter:
    """The arrays of activations that the backward pass of a block keeps besides its inputs."""
    run, arguments = block_of(config, batch, fp8)
    traced = jax.make_jaxpr(lambda *a: jax.vjp(run, *a)[1])(*arguments).jaxpr
    kept = {v: v.aval for v in traced.outvars if isinstance(v, Var) and v not in traced.invars}
    shapes = {p.shape for p in jax.tree.leaves(arguments[0])}
    big = [a for a in kept.values() if a.shape not in shapes and a.size >= B * T]  # no angles
    return Counter(f"{a.dtype}{list(a.shape)}" for a in big)


def arrays(*shapes, dtype="bfloat16") -> Counter:
    return Counter(f"{dtype}{list(shape)}" for shape in shapes)


def named(kind, kernels):
    """(the mixing's output with its sums, the products before the activation) of a block."""
    out, sums = arrays((B, T, 2, 128)), []
    hidden = [(B, T, F)] * (1 if kind == "gpt2" else 2)
    if kernels == "mosaic":
        # The kernel pads the rows of lse to whole tiles, and the vLSTM's sums are those of chunks.
        sums = [(B, 2, T // 64, 64)] * 2 if kind == "vlstm" else [(B, 2, 768)]
    elif kind != "vlstm":
        sums = [(B, 2, T)]
    return out + arrays(*sums, dtype="float32"), arrays(*hidden)


@pytest.mark.parametrize("kernels", [slow("xla"), "mosaic"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "vlstm"])
def test_a_block_saves_what_its_choice_names(kind, kernels):
    of = {remat: saved(make(kind, kernels=kernels, remat=remat)) for remat in ("none", *CHOICES)}
    mixing, hidden = named(kind, kernels)
    assert of["block"] == Counter()
    assert of["attention"] == mixing
    assert of["mlp"] == mixing + hidden
    inputs = {"gpt2": [(3 * C)], "llama3": [2 * C], "vlstm": [3 * C]}[kind]
    products = arrays(*((B, T, n) for n in inputs), (B, T, C), *[(B, T, F)] * len(hidden))
    if kind != "gpt2":
        products = arrays(*((B, T, n) for n in inputs), (B, T, C), (B, T, F), (B, T, F))
    missing = (mixing + products) - of["dots"]
    assert not missing, missing
    assert sum(of["none"].values()) > sum(of["dots"].values())


def test_a_block_saves_the_same_on_a_mesh():
    """shard_map lies between the policy and the names."""
    types = dict(axis_types=(AxisType.Auto,) * 4)
    mesh = AbstractMesh((2, 1, 1, 1), ("data", "fsdp", "context", "tensor"), **types)
    with jax.sharding.use_abstract_mesh(mesh):
        for kernels in ("xla", "mosaic"):
            found = saved(make("llama3", kernels=kernels, remat="mlp"), batch=2 * B)
            whole = lambda n: arrays((2 * B, T, n), (2 * B, T, n))
            lse = (2 * B, 2, 768 if kernels == "mosaic" else T)
            mixing = arrays((2 * B, T, 2, 128)) + arrays(lse, dtype="float32")
            assert found == mixing + whole(F)


def launches(kind, kernel):
    """How often a block runs the kernel, forward and backward, for each value of model.remat."""

    # Equations are counted, not names in the text, which shows a shared function once.
    def calls(remat):
        run, arguments = block_of(make(kind, kernels="mosaic", remat=remat))
        loss = lambda *a: run(*a).astype(jnp.float32).sum()
        traced = jax.make_jaxpr(jax.value_and_grad(loss))(*arguments)
        return sum(k.launches for k in kernels_of(traced.jaxpr) if k.name == kernel)

    return [calls(remat) for remat in ("none", *CHOICES)]


@pytest.mark.parametrize(
    ("kind", "kernel"), [("llama3", "attention_forward"), ("vlstm", "vlstm_forward")]
)
def test_only_block_runs_the_forward_kernel_of_the_mixing_again(kind, kernel):
    assert launches(kind, kernel) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", ["llama3", slow("vlstm")])
def test_the_activation_runs_again_where_its_result_is_not_saved(kind):
    assert launches(kind, "swiglu_forward") == [1, 2, 2, 2, 2]
    assert launches(kind, "swiglu_mlp_backward") == [1] * 5


@pytest.mark.parametrize("kernels", ["xla", "mosaic"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_fp8_saves_the_same_products(kind, kernels):
    found = saved(make(kind, kernels=kernels, remat="mlp"), fp8=True)
    hidden = [(B, T, F)] * (1 if kind == "gpt2" else 2)
    if kernels == "mosaic":
        hidden = [(B * T, F) for _ in hidden]
    assert not arrays(*hidden) - found
    assert not [a for a in found if a.startswith("float8")]


@pytest.mark.parametrize("kind", [slow("gpt2"), "llama3"])
def test_fp8_takes_no_maximum_again(kind):
    def calls(remat):
        run, arguments = block_of(make(kind, kernels="mosaic", remat=remat), fp8=True)
        loss = lambda *a: run(*a).astype(jnp.float32).sum()
        traced = jax.make_jaxpr(jax.grad(loss))(*arguments)
        of = lambda name: sum(k.launches for k in kernels_of(traced.jaxpr) if k.name == name)
        return of("fp8_maximum") + of("swiglu_maxima"), of("quantize_fp8")

    once, casts = calls("none")
    for remat in CHOICES:
        maxima, more = calls(remat)
        assert maxima == once
        assert more > casts


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), slow("vlstm")])
def test_recomputation_changes_no_gradient(kind):
    shape = dict(d_model=32, d_ff=48, max_seq_len=32, kernels="xla")
    shape |= dict(compute_dtype="float32", residual_dtype="float32")
    if kind == "vlstm":
        shape |= dict(chunk_size=8)
    rng = np.random.default_rng(0)
    draw = lambda a: jnp.asarray(0.3 * rng.standard_normal(a.shape), jnp.float32)
    graph, params = nnx.split(nnx.eval_shape(lambda: create(make(kind, **shape))).blocks[0])
    params = jax.tree.map(draw, params)
    branch, residual, weights = (draw(np.zeros((2, 21, 32))) for _ in range(3))

    def gradients(remat):
        def loss(params, branch, residual):
            stream = Stream(branch, None, residual)
            stream, *_ = run_block(graph, params, remat, stream, jnp.arange(21), None, None)
            return (stream.sum() * weights).sum()

        with jax.default_matmul_precision("highest"):
            found = jax.jit(jax.grad(loss, (0, 1, 2)))(params, branch, residual)
        return {jax.tree_util.keystr(k): np.asarray(g) for k, g in jax.tree.leaves_with_path(found)}

    expected = gradients("none")
    # A gradient that is zero up to rounding (the keys' biases) is as large as the others' eps.
    largest = max(np.abs(g).max() for g in expected.values())
    for remat in CHOICES:
        found = gradients(remat)
        for path, g in expected.items():
            # A CPU repeats the same sums; a GPU's fusions may differ, as the sum of the block's
            # own output with its bias does.
            exact = jax.default_backend() == "cpu" and "['down']['bias']" not in path
            allowed = 0 if exact else 1e-5 * np.abs(g).max() + np.finfo(np.float32).eps * largest
            np.testing.assert_allclose(
                found[path], g, rtol=0, atol=allowed, err_msg=f"{remat} {path}"
            )


def barriers(remat: str, **mesh) -> int:
    """How many arrays the barriers of a train step hold, on two devices."""
    config = Config(
        model=tiny("llama3", remat=remat, n_layers=3, n_kv_heads=2),
        train=dict(steps=1, batch_size=8, seq_len=8),
        optimizer=dict(learning_rate=1e-3),
        mesh=mesh,
    )
    trainer = Trainer(config, abstract_mesh(config.mesh, 2))
    loss = lambda params, batch: nnx.merge(trainer.graph, params).loss(**batch)
    batch = dict.fromkeys(("tokens", "labels"), jax.ShapeDtypeStruct((8, 8), jnp.int32))
    with jax.sharding.use_abstract_mesh(trainer.mesh):
        traced = jax.make_jaxpr(jax.grad(loss))(trainer.abstract_params, batch)
    found = [e for e in equations(traced.jaxpr) if e.primitive.name == "optimization_barrier"]
    return sum(len(e.invars) for e in found)


@pytest.mark.parametrize(
    ("remat", "mesh", "blocks"),
    [("block", dict(data=2), 1), ("mlp", dict(fsdp=2), 1), ("block", dict(context=2), 2)],
)
def test_several_devices_keep_activations_of_few_blocks(remat, mesh, blocks, monkeypatch):
    """Gradients end with their block, or one block later; XLA would postpone them all."""
    ordered = barriers(remat, **mesh)
    monkeypatch.setattr(language_model, "in_order", lambda params, stream: (params, stream))
    arrays_of_a_block = 9 + 1  # and the gradient of the stream
    assert ordered - barriers(remat, **mesh) == blocks * arrays_of_a_block
