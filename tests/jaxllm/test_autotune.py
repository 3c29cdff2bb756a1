"""The choice of XLA's matmul kernels: timed once, stored with the run."""

import functools
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_runs
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.data import cache as data_cache
from jaxllm.train import programs
from jaxllm.train.programs import compile_autotuned

LOAD, DUMP = (
    f"xla_gpu_{which}" for which in ("load_autotune_results_from", "dump_autotune_results_to")
)


class Step:
    """Records the options of compilations; writes the timings, as XLA does on a GPU."""

    def __init__(self, choices=True, size=4):
        self.options, self.choices = [], choices
        with jax.default_device(jax.devices("cpu")[0]):  # a GPU would write timings of its own
            self.program = jax.jit(lambda x: x @ x).lower(jnp.ones((size, size)))

    def compile(self, options=None):
        self.options.append(options)
        if self.choices and options and (path := options.get(DUMP)):
            with open(path, "w") as f:
                f.write("timings")
        return self.program.compile(None)

    def as_text(self):
        return self.program.as_text()

    def compiler_ir(self, dialect):
        return self.program.compiler_ir(dialect)

    def lower(self):
        return self


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache, as on a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache" / "compiled"))
    yield tmp_path / "cache" / "jaxllm"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_a_program_does_not_wait_for_its_kernels(monkeypatch):
    """One from JAX's cache needs none."""
    needed, compiled = threading.Event(), []
    wait = lambda program: compiled.append(needed.wait(60))
    monkeypatch.setattr(programs, "_kernels", lambda lowered: [b"first", b"second"])
    monkeypatch.setattr(programs, "_compile", wait)
    compile_autotuned(Step().lower, None)
    assert not compiled
    needed.set()


def test_a_new_run_times_and_a_resumed_one_loads(tmp_path, cache):
    timings, step = tmp_path / "compiled" / "timings.txt", Step()
    program = compile_autotuned(step.lower, timings)
    first, second = step.options
    assert first["xla_gpu_deterministic_ops"] is False
    assert first[DUMP] != str(timings)  # so that a file with this name is whole
    loaded = Path(second[LOAD])
    assert loaded.read_text() == timings.read_text() == "timings"
    assert [path.name for path in timings.parent.iterdir()] == [timings.name]
    assert program(np.ones((4, 4), np.float32))[0, 0] == 4
    resumed = Step()
    shutil.rmtree(cache)
    compile_autotuned(resumed.lower, timings)
    assert resumed.options == [second]
    assert loaded.exists()


def test_another_run_of_the_program_takes_the_same_times_and_paths(tmp_path):
    first, second, other = Step(), Step(), Step(size=5)
    compile_autotuned(first.lower, tmp_path / "a" / "timings.txt")
    compile_autotuned(second.lower, tmp_path / "b" / "timings.txt")
    assert second.options == first.options[1:]  # so the compiled program is found, too
    assert (tmp_path / "b" / "timings.txt").read_text() == "timings"
    compile_autotuned(other.lower, tmp_path / "c" / "timings.txt")
    assert len(other.options) == 2


def test_without_the_cache_each_run_times_its_own(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        for run in "ab":
            compile_autotuned((step := Step()).lower, tmp_path / run / "timings.txt")
            assert len(step.options) == 2
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("full", [False, True])
def test_a_cache_that_takes_no_file_costs_only_time(full, tmp_path, monkeypatch):
    if full:
        write = programs.write_new

        def write_new(path, content):
            if "cache" in path.parts:
                raise OSError(28, "No space left on device")
            write(path, content)

        monkeypatch.setattr(programs, "write_new", write_new)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    timings = tmp_path / "compiled" / "timings.txt"
    compile_autotuned((step := Step()).lower, timings)
    assert step.options[1] == {LOAD: str(timings)}
    compile_autotuned((again := Step()).lower, timings)
    assert again.options == step.options[1:]


def test_a_part_of_a_program_in_jaxs_cache_is_compiled_again(tmp_path):
    """JAX writes into its cache in place, so a killed process may leave a part."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    Step().program.compile()
    (path,) = (tmp_path / "cache" / "compiled").glob("*-cache")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    jax.clear_caches()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        program = compile_autotuned(Step().lower, None)
    assert program(np.ones((4, 4), np.float32))[0, 0] == 4


def test_a_step_of_few_blocks_is_timed_instead(tmp_path):
    step, few = Step(), Step(size=3)
    compile_autotuned(step.lower, tmp_path / "timings.txt", few)
    (timed,), (loaded,) = few.options, step.options
    assert DUMP in timed
    assert Path(loaded[LOAD]).read_text() == "timings"
    compile_autotuned((again := Step()).lower, tmp_path / "other" / "timings.txt", few)
    assert again.options == step.options
    assert len(few.options) == 1


def test_a_program_without_choices_has_no_timings(tmp_path):
    step = Step(choices=False)
    compile_autotuned(step.lower, tmp_path / "timings.txt")
    assert step.options[1] is None
    assert not list(tmp_path.glob("*.txt"))


def test_without_timings_xla_takes_its_first_choice():
    step = Step()
    compile_autotuned(step.lower, None)
    assert step.options == [None]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU has kernels to choose from")
@pytest.mark.parametrize("program", ["kept", "compiled again"])
def test_a_resumed_run_repeats_the_bits_of_the_first(program, tiny, tmp_path):
    # Without the flags of tests/conftest.py, with which XLA times nothing.
    train = functools.partial(training_runs.run, tiny, tmp_path / "run", XLA_FLAGS="")
    out_dir, more = tmp_path / "run", ("--train.autotune", "true", "--train.keep_checkpoints", "99")
    first = train(*more)
    assert first.returncode == 0, first.stderr
    (timings,) = (out_dir / "compiled").glob("timings.txt")
    whole, stored = training_runs.losses(out_dir), timings.read_bytes()
    for checkpoint in (out_dir / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > 20:
            shutil.rmtree(checkpoint)
    if program == "compiled again":
        for path in (out_dir / "compiled").iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != timings:
                path.unlink()
    resumed = train("--resume", *more)
    assert resumed.returncode == 0, resumed.stderr
    assert "from the checkpoint of step 20" in resumed.stdout
    assert training_runs.losses(out_dir) == whole
    assert timings.read_bytes() == stored


def test_programs_read_longest_ago_are_deleted_above_the_limit(cache, monkeypatch):
    folder, other = cache / "compiled", cache / "users"
    other.mkdir(parents=True)
    folder.mkdir()
    for name, read, written in (
        ("a.step", 5, 1),
        ("b.step", 2, 2),
        ("c", 1, 3),
        ("d", 4, 4),
        ("e.step.tmp-f", 3, 3),  # of a killed process
    ):
        path = folder / (name if "." in name else f"{name}-cache")
        path.write_bytes(b"x" * 10)
        os.utime(path, (read, written))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(data_cache, "_COMPILED", 25)
    jax.config.update("jax_compilation_cache_dir", None)
    data_cache.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.step", "d-cache"]
    (other / "e-cache").write_bytes(b"x")
    jax.config.update("jax_compilation_cache_dir", str(other))
    monkeypatch.setattr(data_cache, "_COMPILED", 0)
    data_cache.keep_compiled()  # in a folder that the user names nothing is deleted
    assert jax.config.jax_compilation_cache_dir == str(other)
    assert len(list(other.iterdir())) == 1
    assert not list(folder.iterdir())  # the steps are never there
