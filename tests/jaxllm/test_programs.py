"""A step that an earlier start has compiled: found by everything that its program follows from."""

import json
import os
import pickle
import sysconfig
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import training_runs
from cases import slow
from jax.experimental import serialize_executable
from jax.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

from jaxllm.config import Config, DataConfig, OptimizerConfig, TrainConfig
from jaxllm.data import cache
from jaxllm.sharding import make_mesh
from jaxllm.train import launch, programs
from jaxllm.train.step import Trainer
from pallas_kernels import dispatch, rms_norm

TRAIN = dict(steps=4, batch_size=4, seq_len=16)


def make(model=None, data=None, devices=1, **sections):
    """A trainer of a tiny GPT-2."""
    settings = {"train": TrainConfig(**TRAIN), "optimizer": OptimizerConfig(learning_rate=1e-2)}
    settings |= sections | ({"data": data} if data else {})
    config = Config(model=model or tiny_models.tiny("gpt2"), **settings)
    return Trainer(config, make_mesh(config.mesh, jax.devices()[:devices]))


def batch(seed, rows=4, width=17):
    tokens = np.random.default_rng(seed).integers(0, 100, (rows, width)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].copy()}


def steps(trainer, program, count=3):
    """The state after some steps, and the metrics of all."""
    state, metrics = trainer.init(), []
    for i in range(count):
        before = state
        state, values = program(state, trainer.put_batch(batch(i)))
        assert before.params is state.params or all(
            x.is_deleted() for x in jax.tree.leaves(before.params)
        )
        metrics.append(values)
    return jax.device_get((state, metrics))


def test_each_different_kernel_is_a_program_of_its_own():
    """What XLA compiles finds them compiled, so they must be the same calls."""

    def loss(x, weight):
        y = rms_norm(rms_norm(x, weight, implementation="mosaic"), weight, implementation="mosaic")
        return y.astype(jnp.float32).sum()

    x, weight = jnp.ones((8, 128), jnp.bfloat16), jnp.ones(128)
    traced = jax.jit(jax.grad(loss)).trace(x, weight)
    found = programs._kernels(traced.lower(lowering_platforms=("cuda",)))
    assert len(found) == 2  # forward and backward, each called twice
    with jax_mlir.make_ir_context():
        texts = [str(ir.Module.parse(program)) for program in found]
    for text, name in zip(texts, ("rms_norm_forward", "rms_norm_backward"), strict=True):
        assert "func.func @main(%arg0: tensor<" in text
        assert text.count("custom_call @mosaic_gpu") == 1
        assert name in text
    assert programs._kernels(jax.jit(jnp.sin).lower(x)) == []


def never(trainer):
    raise AssertionError("traced again")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The file of every trainer's step; ops are traced anew."""
    place = tmp_path / "cache" / "x.step"
    cache.source_digest()
    monkeypatch.setattr(programs, "_path_of_step", lambda trainer, name: place)
    jax.clear_caches()
    dispatch.reset()
    return place


def find(trace, trainer):
    return programs.find_or_compile(trainer, trace, None)


def test_a_kept_step_repeats_the_bits_and_the_decisions(place):
    first = find(launch.trace_step, trainer := make())
    decided, whole = dispatch.decisions(every=True), steps(trainer, first)
    assert decided
    assert len(decided) > len(set(decided))  # so it matters that calls are counted
    dispatch.reset()
    jax.clear_caches()
    again = find(never, trainer := make())
    assert sorted(dispatch.decisions(every=True)) == sorted(decided)
    assert jax.tree.structure(again.args_info) == jax.tree.structure(first.args_info)
    jax.tree.map(np.testing.assert_array_equal, steps(trainer, again), whole)


def test_matmuls_are_timed_in_a_step_of_few_blocks(place, tmp_path):
    traced = []

    def trace(trainer):
        traced.append(trainer.config.model.n_layers)
        return launch.trace_step(trainer)

    trainer = make(tiny_models.tiny("gpt2").model_copy(update={"n_layers": 4}))
    programs.find_or_compile(trainer, trace, tmp_path / "timings.txt")
    assert traced == [programs.BLOCKS, 4]
    decided = dispatch.decisions(every=True)
    place.unlink()
    jax.clear_caches()
    dispatch.reset()
    find(trace, trainer)
    assert dispatch.decisions(every=True) == decided
    assert traced == [programs.BLOCKS, 4, 4]


@pytest.mark.slow
def test_a_verified_step_is_kept(place):
    find(Trainer.trace_verified_step, trainer := make())
    again = find(never, trainer)
    count = len(jax.tree.leaves(trainer.checked()))
    unseen = jax.device_put(np.zeros((1, count, 2), np.uint32), trainer.state_shardings.step)
    state, _, sums = again(trainer.init(), trainer.put_batch(batch(0)), unseen)
    assert state.step == 0
    state, _, sums = again(state, trainer.put_batch(batch(0)), sums)
    assert state.step == 1


@pytest.mark.slow
def test_runs_on_a_mesh_repeat_the_bits_of_the_run_that_kept_their_steps():
    results = training_runs.devices_run("kept_steps.py", 4)
    assert results["kept"] == ["trace_step.step", "trace_verified_step.step"]
    assert len(results["first"]) == 12
    assert results["first"] == results["second"] == results["resumed"]


def test_where_a_step_is_kept(monkeypatch, tmp_path):
    """On a GPU, unless JAX's settings, dumps or matmuls that are timed together forbid it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(programs, "cache_is_used", lambda: True)
    main = programs.sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", __file__, raising=False)
    trainer = make()
    place = lambda: programs._path_of_step(trainer, "trace_step")
    assert place() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert place().parent == tmp_path / "jaxllm" / "compiled"
    assert place() == programs._path_of_step(make(), "trace_step")
    assert place() != programs._path_of_step(trainer, "trace_verified_step")
    for variable in ("JAX_DUMP_IR_TO", "MOSAIC_GPU_DUMP_PTX"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            assert place() is None
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        first = place()
        patch.setattr(jax, "process_index", lambda: 1)
        assert len({first, place(), None}) == 3  # each process has its own
        trainer = make(train=TrainConfig(**TRAIN, deterministic=False))
        assert place() is None  # they would time matmuls together
    with monkeypatch.context() as patch:  # a notebook: nothing tells what it has changed
        patch.delattr(main, "__file__")
        assert place() is None
    monkeypatch.setattr(programs, "cache_is_used", lambda: False)
    assert place() is None


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU's steps are kept")
def test_a_second_run_finds_the_step_of_the_first(tiny, tmp_path):
    kept, found = [], []
    for name in "ab":
        more = ["--train.autotune", "true"]
        done = training_runs.run(
            tiny, tmp_path / name, *more, XDG_CACHE_HOME=str(tmp_path / "cache")
        )
        assert done.returncode == 0, done.stderr
        assert "cannot be read" not in done.stdout + done.stderr
        found.append(training_runs.losses(tmp_path / name))
        files = (tmp_path / "cache").rglob("*.step")
        kept.append({path: path.stat().st_mtime_ns for path in files})
    assert len(kept[0]) == 1
    assert kept[0] == kept[1]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind", ["bit", slow("end"), slow("empty"), slow("another pickle"), slow("another step")]
)
def test_a_damaged_file_is_replaced_after_one_line(kind, place, caplog):
    find(launch.trace_step, trainer := make())
    whole, traced = place.read_bytes(), []
    content = bytearray(whole)
    content[len(whole) // 2] ^= 1
    other = pickle.dumps(((b"x", None, None), {}, None))
    other = programs._checksum(place, other) + other
    cut = {"bit": bytes(content), "end": whole[:-1], "empty": b"", "another pickle": other}
    cut["another step"] = programs._checksum(place.with_name("y.step"), whole[32:]) + whole[32:]
    place.write_bytes(cut[kind])
    assert not caplog.messages

    def trace(trainer):
        traced.append(trainer)
        return launch.trace_step(trainer)

    program = find(trace, trainer)
    assert traced == [trainer]
    (line,) = caplog.messages
    assert line.startswith(f"{place} cannot be read, compiling again: ")
    assert "\n" not in line
    assert int(program(trainer.init(), trainer.put_batch(batch(0)))[0].step) == 1
    find(never, trainer)  # it is whole again
    assert len(caplog.messages) == 1


def test_a_cache_folder_that_is_a_file_costs_one_line(place, caplog):
    place.parent.touch()
    program = find(launch.trace_step, trainer := make())
    assert [line.partition(":")[0] for line in caplog.messages] == ["the compiled step is not kept"]
    assert int(program(trainer.init(), trainer.put_batch(batch(0)))[0].step) == 1


def test_a_pickle_of_another_user_is_not_opened(place, monkeypatch, caplog):
    place.parent.mkdir()
    place.write_bytes(programs._checksum(place, b"x") + b"x")
    monkeypatch.setattr(programs.os, "getuid", lambda: place.stat().st_uid + 1)
    monkeypatch.setattr(programs.pickle, "loads", lambda content: pytest.fail("it is opened"))
    assert programs.read(place, make(), None) is None
    assert caplog.messages[0].endswith("compiling again: ValueError: it belongs to another user")


def test_what_cannot_be_kept_is_said_in_one_line(place, monkeypatch, caplog):
    def fail(program):
        raise NotImplementedError("no\nserialization")

    monkeypatch.setattr(serialize_executable, "serialize", fail)
    program = find(launch.trace_step, trainer := make())
    why = "NotImplementedError: no serialization"
    assert caplog.messages == [f"the compiled step is not kept: {why}"]
    assert not place.exists()
    assert int(program(trainer.init(), trainer.put_batch(batch(0)))[0].step) == 1


def test_a_step_is_not_kept_if_the_code_was_edited_after_the_start(place, monkeypatch):
    monkeypatch.setattr(cache, "digest", lambda *parts: "another")
    find(launch.trace_step, make())
    assert not place.exists()
    monkeypatch.undo()
    monkeypatch.setattr(programs, "_path_of_step", lambda trainer, name: place)
    find(launch.trace_step, make())
    assert place.exists()


def test_every_file_of_our_code_counts(tmp_path, monkeypatch):
    for name in ("jaxllm/data/cache.py", "jaxllm/a.py", "pallas_kernels/b/c.py", "other/d.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "jaxllm/data/cache.py"))
    found = []
    for name in ("other/d.py", "jaxllm/a.py", "pallas_kernels/b/c.py", "pallas_kernels/e.py"):
        (tmp_path / name).write_text("edited")
        found.append(cache.source_digest.__wrapped__())
    (tmp_path / "jaxllm/a.py").rename(tmp_path / "jaxllm/f.py")
    found.append(cache.source_digest.__wrapped__())
    assert len(set(found)) == len(found)


@pytest.fixture(scope="module")
def compiled():
    trainer = make()
    return trainer, launch.trace_step(trainer).lower().compile()


@pytest.mark.parametrize(
    ("kept", "own", "found", "after"),
    [
        (b"a", None, True, b"a"),  # a new run takes the times of the step
        (b"a", b"a", True, b"a"),  # a resumed one has them
        (b"a", b"b", False, b"b"),  # or those of another program
        (None, None, True, None),  # there was nothing to choose
        (None, b"b", False, b"b"),
    ],
)
def test_a_step_follows_the_times_of_its_run(kept, own, found, after, compiled, place, tmp_path):
    (trainer, program), timings = compiled, tmp_path / "run" / "timings.txt"
    earlier = tmp_path / "earlier.txt"
    if kept is not None:
        earlier.write_bytes(kept)
    programs.write(place, program, {}, earlier)
    if own is not None:
        programs.write_new(timings, own)
    assert (programs.read(place, trainer, timings) is not None) == found
    assert (timings.read_bytes() if timings.exists() else None) == after
    assert place.exists()


def part_of_key(monkeypatch, change):
    """The parts of the key that a change makes different."""
    trainer = make()
    before = programs.step_parts(trainer, "trace_step")
    assert json.dumps(before) == json.dumps(programs.step_parts(make(), "trace_step"))
    trainer = change(monkeypatch) or trainer
    after = programs.step_parts(trainer, "trace_step")
    assert (cache.digest(before) != cache.digest(after)) == (before != after)
    return {name for name in before if json.dumps(before[name]) != json.dumps(after[name])}


def _source(patch):
    patch.setattr(programs, "source_digest", lambda: "of other code")


def _package(patch):
    patch.setattr(programs.sys, "path", [*programs.sys.path, _package.folder])


def _module(path, text):
    """Another text in a module's file."""

    def change(patch):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        os.utime(path, (3e9, 3e9))  # the newest of all
        patch.setitem(programs.sys.modules, path.stem, SimpleNamespace(__file__=str(path)))

    return change


def _device(name, value):
    """The device of a trainer with another attribute."""

    def change(patch):
        trainer = make()
        device = trainer.mesh.devices.flat[0]
        sizes = "device_kind", "compute_capability", "core_count", "shared_memory_per_block_optin"
        fields = {size: getattr(device, size, None) for size in sizes}
        other = SimpleNamespace(**fields | {"id": device.id, "client": device.client, name: value})
        trainer.mesh = SimpleNamespace(devices=np.array([other]))
        return trainer

    return change


MODEL = tiny_models.tiny("gpt2")
CHANGES = {
    "an edit": (_source, {"sources"}),
    "another release": (_package, {"installed"}),
    "Python": (lambda patch: patch.setattr(programs.sys, "version", "3.99"), {"installed"}),
    "ptxas": (lambda patch: patch.setattr(dispatch, "compiler", lambda: "x"), {"compilers"}),
    "the driver's client": (
        _device("client", SimpleNamespace(platform_version="x")),
        {"compilers"},
    ),
    "the kind": (_device("device_kind", "NVIDIA H200"), {"devices"}),
    "fewer SMs": (_device("core_count", 114), {"devices"}),
    "the capability": (_device("compute_capability", "10.0"), {"devices"}),
    "the device": (_device("id", 3), {"devices"}),
    "a layer": (lambda _: make(MODEL.model_copy(update={"n_layers": 3})), {"config", "arrays"}),
    "kernels": (lambda _: make(MODEL.model_copy(update={"kernels": "auto"})), {"config"}),
    "remat": (lambda _: make(MODEL.model_copy(update={"remat": "block"})), {"config"}),
    "a rate": (lambda _: make(optimizer=OptimizerConfig(learning_rate=0.5)), {"config"}),
    "steps": (lambda _: make(train=TrainConfig(**TRAIN | {"steps": 5})), {"config"}),
    "the seed": (lambda _: make(train=TrainConfig(**TRAIN, seed=7)), {"config"}),
    "parts": (lambda _: make(train=TrainConfig(**TRAIN, grad_accum=2)), {"config"}),
    "fp8": (lambda _: make(train=TrainConfig(**TRAIN, fp8="all")), {"config"}),
    "the batch": (
        lambda _: make(train=TrainConfig(**TRAIN | {"batch_size": 8})),
        {"config", "arrays"},
    ),
    "documents": (lambda _: make(data=DataConfig(pack="documents")), {"config", "arrays"}),
    "XLA_FLAGS": (
        lambda patch: patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_x"),
        {"environment"},
    ),
    "our kernels": (lambda patch: patch.setenv("JAXLLM_KERNELS", "general"), {"environment"}),
    "Mosaic": (lambda patch: patch.setenv("MOSAIC_GPU_X", "1"), {"environment"}),
    "Flax": (lambda patch: patch.setenv("FLAX_X", "1"), {"environment"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_part_of_the_key_makes_another_step(what, monkeypatch, tmp_path):
    (tmp_path / "jaxlib-9.9.dist-info").mkdir()
    _package.folder = str(tmp_path)
    change, parts = CHANGES[what]
    assert part_of_key(monkeypatch, change) == parts


def test_a_script_and_an_edited_package_make_another_step(monkeypatch, tmp_path):
    """A script may replace a layer, also from a checkout; JAX or optax may be edited in place."""
    assert part_of_key(monkeypatch, _module(tmp_path / "script.py", "a")) == {"sources"}
    assert part_of_key(monkeypatch, _module(tmp_path / "script.py", "b")) == {"sources"}
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "jaxllm" / "train" / "programs.py"))
    assert part_of_key(monkeypatch, _module(tmp_path / "script2.py", "b")) == {"sources"}
    assert not part_of_key(monkeypatch, _module(tmp_path / "jaxllm" / "x.py", "b"))
    place = tmp_path / "site-packages" / "optax.py"
    assert part_of_key(monkeypatch, _module(place, "a")) == {"installed"}


def test_both_commands_find_the_same_step(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.delitem(programs.sys.modules, "train")
    (tmp_path / "jaxllm").write_text("the package's console command")
    for path in (training_runs.REPO / "train.py", tmp_path / "jaxllm"):
        starts = SimpleNamespace(__file__=str(path))
        assert not part_of_key(
            monkeypatch, lambda patch, x=starts: patch.setitem(programs.sys.modules, "started", x)
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_default_matmul_precision", "highest"), ("jax_default_prng_impl", "rbg")],
)
def test_every_setting_of_jax_makes_another_step(name, value, monkeypatch):
    before = jax.config.values[name]
    try:
        assert part_of_key(monkeypatch, lambda _: jax.config.update(name, value)) == {"settings"}
    finally:
        jax.config.update(name, before)
