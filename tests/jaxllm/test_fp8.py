"""train.fp8: what runs in fp8, that it trains as bfloat16 does, and that runs resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from tiny_models import tiny as tiny_model
from training_runs import devices_run, final_state, run

from jaxllm.config import Config, OptimizerConfig, TrainConfig
from jaxllm.errors import InputError
from jaxllm.models import create
from jaxllm.sharding import make_mesh
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.launch import check_kernels
from jaxllm.train.step import Trainer, step_model
from pallas_kernels import dispatch

BF16 = dict(compute_dtype="bfloat16", residual_dtype="bfloat16")
KINDS = ["gpt2", "llama3", "vlstm"]
# Matmuls of a block with all their axes in multiples of 16: not the gates of the vLSTM.
LAYERS = {"gpt2": 4, "llama3": 5, "vlstm": 5}


def trainer(kind, mode="matmuls", n_layers=2):
    config = Config(
        # The head needs a multiple of 64.
        model=tiny_model(kind, n_layers=n_layers, d_model=64 if mode == "all" else 32, **BF16),
        train=TrainConfig(steps=30, batch_size=8, seq_len=32, fp8=mode),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
    )
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))


def batches(seed=0):
    """Text of a kind: each token follows from the one before, but for one in ten."""
    rng = np.random.default_rng(seed)
    after = rng.permutation(16).astype(np.int32)
    while True:
        tokens = np.zeros((8, 33), np.int32)
        tokens[:, 0] = rng.integers(0, 16, 8)
        for t in range(32):
            noise = rng.random(8) < 0.1
            tokens[:, t + 1] = np.where(noise, rng.integers(0, 16, 8), after[tokens[:, t]])
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].copy()}


def losses(of, steps=30):
    program, state, data = of.trace_train_step().lower().compile(), of.init(), batches()
    found = []
    for _ in range(steps):
        state, metrics = program(state, of.put_batch(next(data)))
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.parametrize("kind", ["gpt2", slow("llama3"), slow("vlstm")])
def test_it_trains_as_bfloat16_does(kind):
    plain, rounded = losses(trainer(kind, "none")), losses(trainer(kind))
    assert not (plain == rounded).all()
    assert plain[0] - plain[-1] > 1.0  # it learns
    np.testing.assert_allclose(rounded, plain, atol=0.1)


@pytest.mark.parametrize("kind", [slow("gpt2"), "llama3", "vlstm"])  # the test above trains GPT-2
def test_the_matmuls_of_the_blocks_are_in_fp8_and_no_others(kind):
    dispatch.reset()
    jax.clear_caches()  # a cached block would not be traced
    of = trainer(kind)
    text = str(of.trace_train_step().jaxpr)
    lines = [line for line in dispatch.explain().splitlines() if "fp8_linear" in line]
    assert len(lines) == 1
    assert f"({2 * LAYERS[kind]} calls traced)" in lines[0]
    assert "f8_e4m3fn" in text
    assert "f8_e5m2" in text
    evaluated = []
    with pytest.MonkeyPatch.context() as patch:  # what eval_step gives to jit
        patch.setattr(jax, "jit", evaluated.append)
        of.eval_step()
    jaxpr = jax.make_jaxpr(evaluated[0])(of.abstract_params, of.abstract_batch())
    assert "f8_" not in str(jaxpr)
    assert "f8_" not in str(trainer(kind, "none").trace_train_step().jaxpr)
    dispatch.reset()


@pytest.mark.parametrize("kind", [slow("gpt2"), slow("llama3"), slow("vlstm")])
def test_the_head_is_in_fp8_if_all_is(kind):
    of = trainer(kind, "all")
    state, batch = of.init(), of.put_batch(next(batches()))
    train = of.config.train.model_copy(update={"fp8": "matmuls"})
    blocks = step_model(of.config.model_copy(update={"train": train}))[0]

    def head_and_block(graph):
        loss = lambda params: of._loss_sum(params, batch, graph=graph)[0]
        with jax.set_mesh(of.mesh):
            return jax.jit(jax.value_and_grad(loss))(state.params)

    found = [head_and_block(graph) for graph in (of.graph, blocks, of.step_graph)]
    losses, gradients = zip(*found, strict=True)
    table = lambda g: np.asarray((g.embedding.wte if kind == "gpt2" else g.head.weight)[...])
    plain, in_blocks, everywhere = map(table, gradients)
    distance = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(plain)
    # Of two forms in which the blocks round alike: how much they round depends on their kernels.
    assert 0.01 < distance(everywhere, in_blocks) < 0.05
    assert distance(everywhere, plain) < 0.1
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


def test_layers_of_other_widths_stay_in_bfloat16_and_say_so():
    dispatch.reset()
    jax.clear_caches()
    model = nnx.eval_shape(lambda: create(tiny_model("gpt2", d_ff=100), fp8="matmuls"))
    graph, params = nnx.split(model)
    tokens = jnp.zeros((2, 32), jnp.int32)
    jax.eval_shape(lambda params: nnx.merge(graph, params).loss(tokens, tokens), params)
    assert "float32, not fp8: N=100 is not a positive multiple of 16" in dispatch.explain()
    assert "float32, not fp8: K=100 is not a positive multiple of 16" in dispatch.explain()
    dispatch.reset()


def test_a_gpu_before_8_9_is_refused_in_one_line(monkeypatch):
    config = trainer("gpt2").config
    check_kernels(config)  # a CPU emulates it
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lack = "the GPU has compute capability 8.0, the kernel needs 8.9 or newer"
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: lack if gpu == "sm_89" else None)
    with pytest.raises(InputError, match="^train.fp8=matmuls cannot run here: .*; use none$"):
        check_kernels(config)
    check_kernels(trainer("gpt2", "none").config)


@pytest.mark.slow  # test_train.py and test_lora_runs.py resume, too
def test_a_run_resumes_bit_for_bit_and_goes_on_in_bfloat16(tmp_path):
    """From a checkpoint, with a new trainer; the checkpoint holds nothing of fp8."""
    of, data = trainer("gpt2", n_layers=1), batches()
    program, state = of.trace_train_step().lower().compile(), of.init()
    first, second = (of.put_batch(next(data)) for _ in range(2))
    state, _ = program(state, first)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, state.saved(), {}, None)
    checkpoints.close()
    straight, metrics = program(state, second)

    def resumed(mode):
        other = trainer("gpt2", mode, n_layers=1)
        checkpoints = Checkpoints(tmp_path, 1)
        saved = checkpoints.restore(1, other.abstract_state().saved())
        checkpoints.close()
        program = other.trace_train_step().lower().compile()
        return program(other.complete(saved), second)

    again, repeated = resumed("matmuls")
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(metrics["loss"]) == float(repeated["loss"])
    _, plain = resumed("none")
    assert float(plain["loss"]) != float(metrics["loss"])
    assert float(plain["loss"]) == pytest.approx(float(metrics["loss"]), abs=0.02)


@pytest.mark.slow
def test_the_command_line_resumes_and_changes_to_bfloat16(tiny, tmp_path):
    in_fp8, steps = (
        ["--train.fp8", "all"],
        ["--optimizer.schedule", "constant", "--train.steps"],
    )
    whole, part = tmp_path / "whole", tmp_path / "part"
    done = run(tiny, whole, *in_fp8, *steps, "10")
    assert "fp8      the blocks' linear layers and the head in e4m3" in done.stdout
    assert run(tiny, part, *in_fp8, *steps, "5").returncode == 0
    again = run(tiny, part, "--resume", *in_fp8, *steps, "10")
    assert again.returncode == 0, again.stderr
    for a, b in zip(*(jax.tree.leaves(final_state(x, 10)) for x in (whole, part)), strict=True):
        np.testing.assert_array_equal(a, b)
    done = run(tiny, part, "--resume", *steps, "12")
    assert done.returncode == 0, done.stderr
    assert "\nfp8 " not in done.stdout
    assert "f8" not in (part / "config.yaml").read_text().replace("fp8: none", "")


@pytest.mark.slow
def test_scales_are_those_of_whole_arrays_on_every_mesh():
    """A device's own scales would change the rounding of everything, by 1% and more.

    The last matmul's operands are those of one device but for the order of sums.  Where that moves
    a value over the middle between two fp8 values, earlier gradients change by a little.
    """
    for model, meshes in devices_run("fp8_devices.py", 8).items():
        for mesh, errors in meshes.items():
            assert errors.pop("loss") < 1e-4, (model, mesh)
            last = [
                e for name, e in errors.items() if "mlp" in name and name.endswith("weight'].value")
            ]
            assert last
            assert max(last) < 1e-4, (model, mesh)
            assert max(errors.values()) < 5e-3, (model, mesh)
