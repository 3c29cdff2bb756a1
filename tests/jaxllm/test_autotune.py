"""The choice of XLA's matmul kernels: timed once, stored with the run."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_runs

from jaxllm.train.launch import compile_autotuned

LOAD, DUMP = (
    f"xla_gpu_{which}" for which in ("load_autotune_results_from", "dump_autotune_results_to")
)


class Lowered:
    """Records the options of compilations; writes the timings, as XLA does on a GPU."""

    def __init__(self, choices=True):
        self.options, self.choices = [], choices
        with jax.default_device(jax.devices("cpu")[0]):  # a GPU would write timings of its own
            self.program = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))

    def compile(self, options=None):
        self.options.append(options)
        if self.choices and options and (path := options.get(DUMP)):
            with open(path, "w") as f:
                f.write("timings")
        return self.program.compile(options)


def test_a_new_run_times_and_a_resumed_one_loads(tmp_path):
    timings, lowered = tmp_path / "compiled" / "timings.txt", Lowered()
    program = compile_autotuned(lowered, timings)
    first, second = lowered.options
    assert first["xla_gpu_deterministic_ops"] is False
    assert first[DUMP] != str(timings)  # so that a file with this name is whole
    assert second == {LOAD: str(timings)}
    assert [path.name for path in timings.parent.iterdir()] == [timings.name]
    assert program(np.ones((4, 4), np.float32))[0, 0] == 4
    resumed = Lowered()
    compile_autotuned(resumed, timings)
    assert resumed.options == [second]


def test_a_program_without_choices_has_no_timings(tmp_path):
    lowered = Lowered(choices=False)
    compile_autotuned(lowered, tmp_path / "timings.txt")
    assert lowered.options[1] is None
    assert not list(tmp_path.iterdir())


def test_without_timings_xla_takes_its_first_choice():
    lowered = Lowered()
    compile_autotuned(lowered, None)
    assert lowered.options == [None]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="only a GPU has kernels to choose from")
@pytest.mark.parametrize("program", ["kept", "compiled again"])
def test_a_resumed_run_repeats_the_bits_of_the_first(program, tiny, tmp_path):
    # Without the flags of tests/conftest.py, with which XLA times nothing.
    train = functools.partial(training_runs.run, tiny, tmp_path / "run", XLA_FLAGS="")
    out_dir, more = tmp_path / "run", ("--train.autotune", "true", "--train.keep_checkpoints", "99")
    first = train(*more)
    assert first.returncode == 0, first.stderr
    (timings,) = (out_dir / "compiled").glob("timings-*.txt")
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
