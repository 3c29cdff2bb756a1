import io
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow
from flax import nnx
from kernel_checks import names_in
from tiny_models import tiny

from jaxllm.config import (
    IGNORE,
    Config,
    GPT2Config,
    Llama3Config,
    OptimizerConfig,
    TrainConfig,
    VLSTMConfig,
)
from jaxllm.data.loader import documents
from jaxllm.errors import InputError
from jaxllm.infer import decode
from jaxllm.models import MODELS, abstract, flops_per_token
from jaxllm.models.gpt2 import GPT2
from jaxllm.models.llama3 import Llama3
from jaxllm.sharding import make_mesh
from jaxllm.terminal import lossy_stream
from jaxllm.train import optim, verify
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import RunLog, peak_memory, read_metrics
from jaxllm.train.step import Trainer

SHAPE = dict(vocab_size=250, n_layers=1, n_heads=2, d_model=128, max_seq_len=64)
FP32 = dict(compute_dtype="float32", residual_dtype="float32")
LLAMA = SHAPE | FP32 | dict(kernels="xla", n_kv_heads=1, d_ff=128)


def make(model, **train):
    config = Config(
        model=model,
        train=TrainConfig(**{"steps": 4, "batch_size": 8, "seq_len": 16} | train),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:1]))


def random_batch(seed=0, shape=(8, 17)):
    tokens = np.random.default_rng(seed).integers(0, 250, shape).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].copy()}


@pytest.mark.parametrize(
    "model",
    [
        slow(GPT2Config(**SHAPE, **FP32, kernels="xla")),
        Llama3Config(**LLAMA, tie_embeddings=False),
    ],
)
def test_gradient_accumulation_equals_the_large_batch(model):
    batch = random_batch()
    batch["labels"][2, 3:] = IGNORE  # parts with fewer labels must not have more weight
    results = {}
    for parts in (1, 4):
        t = make(model, grad_accum=parts)
        with jax.default_matmul_precision("highest"):  # a GPU would round to TF32
            program = t.trace_train_step().lower().compile()
        again, _ = program(t.init(), t.put_batch(batch))
        state, metrics = program(t.init(), t.put_batch(batch))
        jax.tree.map(np.testing.assert_array_equal, state, again)
        results[parts] = (metrics, optax.tree.get(state.opt_state, "mu"))
    # Compare first moments, which are the gradients.  The parameters moved by lr sign(gradient),
    # even where the gradient is rounding noise.
    for a, b in zip(jax.tree.leaves(results[1][1]), jax.tree.leaves(results[4][1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    assert float(results[1][0]["loss"]) == pytest.approx(float(results[4][0]["loss"]), rel=1e-6)
    norms = [float(results[n][0]["grad_norm"]) for n in (1, 4)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class Looped(Llama3):
    """Runs its blocks twice, and looks up a token more."""

    def walk(self, embedded, **options):
        *_, (stream, _) = super().walk(embedded, **options)
        extra = self.embedding(jnp.zeros(embedded.shape[:2], jnp.int32))
        yield from super().walk(stream.sum() + extra, **options)


def shared(config, **options):
    """Two blocks with one feed-forward layer."""
    model = Llama3(config, **options)
    model.blocks[-1].mlp = model.blocks[0].mlp
    return model


def replaced(name):
    """A parameter that lacks what Linear says about its own."""

    def make(config, **options):
        model = Llama3(config, **options)
        layer = getattr(model.blocks[0].mlp, name)
        layer.weight = nnx.Param(layer.weight[...])
        return model

    return make


# Like a model that was added to jaxllm.
Added = type("Added", (Looped,), {"__module__": "jaxllm.models.added"})


@pytest.mark.parametrize(
    "made", [Looped, slow(Added), shared, *map(slow, map(replaced, ("up", "gate")))], ids=range(5)
)
def test_parts_of_a_batch_may_use_a_matrix_twice(made, monkeypatch):
    """Each use added the whole sum so far: the first parts counted several times."""
    monkeypatch.setitem(MODELS, "llama3", made)
    gradients = []
    for parts in (1, 2):
        t = make(Llama3Config(**LLAMA | dict(n_layers=2), tie_embeddings=True), grad_accum=parts)
        with jax.default_matmul_precision("float32"):  # a GPU would take TF32
            gradients.append(jax.jit(t._gradients)(t.init(), t.put_batch(random_batch())))
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_our_models_sum_gradients_in_place():
    assert all(make(tiny(kind)).sums_in_place for kind in MODELS)


def test_another_model_of_the_same_settings_is_not_the_old_one(monkeypatch):
    """The step computed with the class that had been in MODELS before."""
    config = tiny("gpt2")
    monkeypatch.setitem(MODELS, "gpt2", type("Other", (GPT2,), {}))
    assert type(abstract(config, "none")).__name__ == "Other"
    monkeypatch.undo()
    assert type(abstract(config, "none")) is GPT2


def test_parameters_may_begin_as_one_array(monkeypatch):
    """It was donated twice, and deleted for the next run."""
    zero = jnp.zeros(())

    class Scaled(GPT2):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.a, self.b = nnx.Param(zero), nnx.Param(zero)

    monkeypatch.setitem(MODELS, "gpt2", Scaled)
    assert make(tiny("gpt2")).init().params["a"].get_value() == zero


def test_low_rank_matrices_of_a_users_model_freeze_none(monkeypatch):
    """The operations of a step were those of a model with only these trained."""

    class Adapted(GPT2):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.a = nnx.LoRAParam(jnp.ones((4, 2)))

    plain = flops_per_token(tiny("gpt2"), 16)
    monkeypatch.setitem(MODELS, "gpt2", Adapted)
    assert flops_per_token(tiny("gpt2"), 16) == plain + 6 * 4 * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_a_parameter_of_another_dtype_is_refused(dtype, monkeypatch):
    """The second step refused the dtypes of its arguments."""

    class Other(GPT2):
        def __init__(self, *given, **options):
            super().__init__(*given, **options)
            self.blocks[0].scale = nnx.data(nnx.Param(jnp.ones((), dtype)))

    monkeypatch.setitem(MODELS, "gpt2", Other)
    message = f"^the model's blocks.0.scale is {dtype}: make it a float32 parameter$"
    with pytest.raises(InputError, match=message):
        make(tiny("gpt2"))


@pytest.mark.parametrize(
    "model",
    [
        GPT2Config(**SHAPE),
        Llama3Config(**SHAPE, n_kv_heads=1, d_ff=128),
        VLSTMConfig(**SHAPE, d_ff=128),
    ],
)
def test_only_the_matrices_of_the_blocks_have_copies(model):
    t = make(model)
    copied = [path for path, copied in jax.tree.leaves_with_path(t.copied) if copied]
    matrices = [
        path
        for path, p in jax.tree.leaves_with_path(t.abstract_params)
        if p.ndim == 2 and path[0].key == "blocks"
    ]
    assert copied == matrices
    assert len(matrices) >= 6
    assert not any(jax.tree.leaves(make(model.model_copy(update=FP32)).copied))


@pytest.mark.slow  # test_remat.py compares the gradients
def test_remat_choices_train_alike():
    losses = []
    for remat in ("none", "dots", "block"):
        t = make(Llama3Config(**SHAPE, **FP32, kernels="xla", n_kv_heads=1, d_ff=128, remat=remat))
        state = t.init()
        step = t.trace_train_step().lower().compile()
        for seed in range(2):  # the second loss depends on the gradients of the first
            state, metrics = step(state, t.put_batch(random_batch(seed)))
        losses.append(float(metrics["loss"]))
    on_gpu = jax.default_backend() == "gpu"  # where float32 matmuls use TF32
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5 if on_gpu else 1e-6)


EVERY = """encoder_forward encoder_backward_sums encoder_backward_vocabulary attention_forward
    attention_backward_dq attention_backward_dkv linear_cross_entropy_statistics_and_gradient"""
KERNELS = {
    "gpt2": """layer_norm_forward layer_norm_backward add_layer_norm_forward add_layer_norm_backward
    gelu_mlp_backward""",
    "llama3": """rms_norm_forward rms_norm_backward add_rms_norm_forward add_rms_norm_backward
    swiglu_forward swiglu_mlp_backward rope_forward rope_backward""",
}


@pytest.mark.parametrize("model_type", [slow("gpt2"), "llama3"])
def test_the_step_contains_every_kernel_forward_and_backward(model_type):
    shape = dict(SHAPE, kernels="mosaic")
    model = (
        GPT2Config(**shape)
        if model_type == "gpt2"
        else Llama3Config(**shape, n_kv_heads=1, d_ff=128)
    )
    text = make(model).trace_train_step().lower(lowering_platforms=("cuda",)).as_text()
    assert set(f"{KERNELS[model_type]} {EVERY}".split()) <= names_in(text)


# The effect on the loss of a batch that begins with this token.
NAN, INFINITE, BAD_GRADIENT, SPIKE = 249, 248, 247, 246


class Poisoned(Trainer):
    def _loss_sum(self, params, batch, scale=1.0):
        loss, count = super()._loss_sum(params, batch, scale)
        first = batch["tokens"][0, 0]
        factor = jnp.where(first == NAN, jnp.nan, jnp.where(first == INFINITE, jnp.inf, 1))
        factor = jnp.where(first == SPIKE, 1.5, factor)
        weight = jax.tree.leaves(params)[0].ravel()[0]
        # at 0, sqrt is finite but its slope is infinite
        slope = jnp.sqrt(
            jnp.where(first == BAD_GRADIENT, weight - jax.lax.stop_gradient(weight), 1)
        )
        return loss * factor + slope - 1, count


def assert_applied(lr, before, after, config):
    """The final norm's weight moved at the rate `lr`."""
    weight = lambda tree: np.asarray(tree["norm"]["weight"][...], np.float64)
    adam = next(s for s in after.opt_state[1] if isinstance(s, optax.ScaleByAdamState))
    mean = weight(adam.mu) / (1 - config.b1 ** int(adam.count))
    square = weight(adam.nu) / (1 - config.b2 ** int(adam.count))
    moved, wanted = weight(before.params) - weight(after.params), mean / (square**0.5 + config.eps)
    np.testing.assert_allclose(moved, lr * wanted, rtol=1e-2, atol=1e-5)


def test_an_update_that_is_not_finite_or_a_spike_is_skipped_and_counted():
    plain = make(GPT2Config(**SHAPE, **FP32, kernels="xla"), skip_spikes=4.0)
    t = Poisoned(plain.config, plain.mesh)
    step = t.trace_train_step().lower().compile()
    state, skips, loss = t.init(), [], 0.0
    order = (0, NAN, INFINITE, 0, BAD_GRADIENT, SPIKE, SPIKE, 0)
    for i, first in enumerate(order):
        batch = random_batch(i)
        batch["tokens"][0, 0] = first
        if i == 6:  # the first of two spikes comes before the window is full
            noise = np.random.default_rng(0).normal(0, 0.1, optim.WINDOW)
            losses = jnp.asarray(loss / 1.5 + noise, jnp.float32)
            state = state._replace(watch=optim.Watch(losses, state.watch.skips))
        before = jax.tree.map(np.array, state)  # copies: the step takes the buffers
        state, metrics = step(state, t.put_batch(batch))
        loss = float(metrics["loss"])
        skips.append(int(metrics["skips"]))
        if not skips[-1]:
            assert_applied(float(metrics["lr"]), before, state, t.config.optimizer)
        same = jax.tree.map(np.array_equal, before[1:3], state[1:3])
        assert all(jax.tree.leaves(same)) == bool(skips[-1]), first
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert skips == [0, 1, 2, 0, 1, 0, 1, 0]
    assert int(state.step) == len(order)


def test_an_update_is_made_under_strict_promotion():
    """optax raises a float to an integer step."""
    t = make(GPT2Config(**SHAPE, **FP32, kernels="xla"))
    state, loss = t.abstract_state(), jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(t._updated, state, loss, state.params)[2]["lr"].dtype == jnp.float32


def test_the_losses_in_the_window_define_spikes():
    with jax.debug_infs(True):  # JAX stopped at the infinities of an empty window
        watch = make(Llama3Config(**LLAMA)).init().watch
    for i in range(optim.WINDOW):
        good, watch = optim.check_update(watch, jnp.float32(5 + i % 2), jnp.float32(1), 3.0)
        assert good  # nothing is a spike before the window is full
    # mean 5.5, standard deviation 0.5
    assert optim.check_update(watch, jnp.float32(6.9), jnp.float32(1), 3.0)[0]
    assert not optim.check_update(watch, jnp.float32(7.1), jnp.float32(1), 3.0)[0]
    assert optim.check_update(watch, jnp.float32(7.1), jnp.float32(1), 0.0)[0]
    assert not optim.check_update(watch, jnp.float32(5), jnp.float32(jnp.inf), 0.0)[0]
    for loss, skips in ((7.1, 1), (0.0, 0)):  # a spike, and a batch without a label
        good, after = optim.check_update(watch, jnp.float32(loss), jnp.float32(1), 3.0)
        assert int(after.skips) == skips
        np.testing.assert_array_equal(after.losses, watch.losses)


@pytest.mark.parametrize("layer", ["embedding", *map(slow, ("blocks.1", "norm")), "the gradient"])
def test_the_first_layer_that_is_not_finite_is_found(layer):
    t = make(GPT2Config(**SHAPE | {"n_layers": 3}, **FP32, kernels="xla"))
    model = nnx.merge(t.graph, t.init().params)
    broken = {
        "embedding": model.embedding.wpe,
        "blocks.1": model.blocks[1].mlp.down.bias,
        "norm": model.norm.weight,
    }
    if layer in broken:
        broken[layer][...] = broken[layer][...] * 0 + jnp.inf
    batch = random_batch()
    if layer == "blocks.1":
        batch |= documents(batch["tokens"], 7)
    found = verify.first_not_finite(t.graph, nnx.state(model, nnx.Param), **batch)
    assert found == layer


def test_sampling_chooses_among_the_most_likely():
    logits = jnp.array([0.0, 5.0, 4.0, -3.0])
    assert int(decode.choose(logits, jax.random.key(0), 0, 0)) == 1
    drawn = {int(decode.choose(logits, k, 2.0, 2)) for k in jax.random.split(jax.random.key(0), 64)}
    assert drawn == {1, 2}


def test_greedy_samples_follow_the_full_forward_pass():
    t = make(GPT2Config(**SHAPE, **FP32, kernels="xla"))
    params = t.init().params
    config = t.config.sample.model_copy(update={"tokens": 20, "temperature": 0.0})
    got = decode.generate(t.graph, params, [5, 6, 7], config)
    forward = jax.jit(lambda p, tokens: nnx.merge(t.graph, p)(tokens))
    seen = [5, 6, 7]
    for _ in range(20):
        logits = forward(params, jnp.array([seen + [0] * (32 - len(seen))]))
        seen.append(int(jnp.argmax(logits[0, len(seen) - 1, :250])))
    assert got == seen[3:]
    text = decode.generate(t.graph, params, [5, 6, 7], config, ends={got[9]})
    assert text == got[: got.index(got[9])]


def test_the_peak_memory_is_that_of_the_fullest_device(monkeypatch):
    class Device:
        def __init__(self, gib):
            self.memory_stats = lambda: gib and {"peak_bytes_in_use": gib * 2**30}

    for peaks, wanted in (((3, 5, None), 5), ((None,), None)):
        monkeypatch.setattr(jax, "local_devices", lambda peaks=peaks: [Device(g) for g in peaks])
        assert peak_memory() == wanted


def test_a_run_survives_a_closed_pipe(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", lossy_stream(writer, "utf-8"))  # as a run has it
    log = RunLog(tmp_path, 10, 0, tokens=100, flops=1e9, peak=None)
    log.train(1, loss=5.0, lr=1e-3, grad_norm=1.0, seconds=0.01)
    log.sample(1, "text")
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1]


def terminal_of(columns: int, monkeypatch) -> io.StringIO:
    """Standard output as a terminal of this width."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return terminal


def test_a_command_above_the_progress_bar_can_be_copied(tmp_path, monkeypatch):
    terminal = terminal_of(40, monkeypatch)
    log = RunLog(tmp_path, 10, 0, tokens=100, flops=1e9, peak=None)
    assert not log.bar.disable
    log.message(command := "jaxllm generate --checkpoint runs/a --prompt 'def main('")
    log.close()
    assert command in terminal.getvalue()


def test_a_terminal_that_says_it_has_no_columns_gets_lines(tmp_path, monkeypatch):
    """The bar cropped every line to nothing, losses and the summary included."""
    terminal = terminal_of(0, monkeypatch)
    log = RunLog(tmp_path, 10, 0, tokens=100, flops=1e9, peak=None)
    log.train(1, loss=5.0, lr=1e-3, grad_norm=1.0, seconds=0.01)
    log.close()
    assert "step 1/10  loss 5.0000" in terminal.getvalue()


def test_a_step_takes_over_the_memory_of_a_restored_state(tmp_path):
    t = make(GPT2Config(**SHAPE))
    memory = lambda state: {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(0, t.init().saved(), {}, None)
    checkpoints.close()
    saved = Checkpoints(tmp_path / "checkpoints", 1).restore(0, t.abstract_state().saved())
    state = t.complete(saved)
    before = memory(state)
    after, _ = t.trace_train_step().lower().compile()(state, t.put_batch(random_batch()))
    assert memory(after) == before
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_metrics_of_repeated_steps_are_dropped(tmp_path):
    def log(start):
        return RunLog(tmp_path, 10, start, tokens=100, flops=1e9, peak=1e12)

    first = log(0)
    for step in range(1, 6):
        first.train(step, loss=5.0 - step, lr=1e-3, grad_norm=1.0, seconds=0.01)
    first.evaluation(4, 1.5)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 6, "lo')  # a process killed while writing
    second = log(3)
    second.train(4, loss=float("nan"), lr=1e-3, grad_norm=1.0, seconds=0.01)
    second.draw()
    second.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[2]["mfu"] == pytest.approx(0.1)
    assert rows[3]["loss"] is None
    assert [r["tokens"] for r in rows] == [100, 200, 300, 400]
    assert (tmp_path / "loss.png").stat().st_size > 1000
    for _ in range(2):  # a chat's first sample is at step 0, which a new beginning repeats
        third = log(0)
        third.sample(0, "> Hello")
        third.close()
        assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [0]
