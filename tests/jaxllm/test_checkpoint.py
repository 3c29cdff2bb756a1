import contextlib
import resource
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.errors import RunError

ABOUT = {"samples": 0}


def state(value):
    noise = np.random.default_rng(value).random((300, 300))  # compresses badly
    return {"a": jnp.asarray(noise, jnp.float32), "b": jnp.int32(value)}


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond 20 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait(checkpoints):
    while checkpoints.manager.is_saving_in_progress():
        time.sleep(0.01)


# Orbax's thread tells its failure on standard error, too, and drops what it had begun.
failing = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine:RuntimeWarning",
)


@failing
def test_a_full_disk_costs_a_checkpoint_and_no_other(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.save(1, state(1), ABOUT, None) is None
    wait(checkpoints)
    with full_disk():
        told = [checkpoints.save(2, state(2), ABOUT, None)]
        wait(checkpoints)
    assert Checkpoints(tmp_path, keep=1).newest() == 1
    told.append(checkpoints.save(3, state(3), ABOUT, None))
    (problem,) = [line for line in told if line]
    assert "the checkpoint of step 2 could not be written" in problem
    assert "the newest complete one is of step 1" in problem
    checkpoints.close()
    after = Checkpoints(tmp_path, keep=1)
    assert after.newest() == 3
    np.testing.assert_array_equal(after.restore(3, state(0))["a"], state(3)["a"])


def steps(folder):
    return sorted(int(p.name) for p in folder.iterdir())


def test_a_resumed_run_keeps_the_best(tmp_path):
    for begin, losses in ((1, [4.0, 3.0, 3.5]), (4, [3.7, None, float("nan")])):
        checkpoints = Checkpoints(tmp_path, keep=1)
        for step, loss in enumerate(losses, begin):
            assert checkpoints.save(step, state(step), ABOUT, loss) is None
        checkpoints.close()
    assert steps(tmp_path) == [2, 6]
    np.testing.assert_array_equal(
        Checkpoints(tmp_path, keep=1).restore(2, state(0))["a"], state(2)["a"]
    )


def test_a_process_killed_while_it_deleted_is_no_obstacle(tmp_path):
    checkpoints = Checkpoints(tmp_path / "whole", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), ABOUT, 4.0 - step)
    checkpoints.close()
    missing = (".", "metrics/metrics", "state/_METADATA", "_CHECKPOINT_METADATA")
    for number, gone in enumerate(missing):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        victim = folder / "1" / gone
        assert victim.exists()
        for path in [*victim.rglob("*"), victim]:
            if path.is_file():
                path.unlink()
        after = Checkpoints(folder, keep=1)
        assert after.newest() == 3
        np.testing.assert_array_equal(after.restore(3, state(0))["a"], state(3)["a"])
        assert after.save(4, state(4), ABOUT, 2.0) is None
        after.close()
        assert steps(folder) == [3, 4]


@failing
def test_a_last_checkpoint_that_fails_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    with full_disk():
        first = checkpoints.save(1, state(1), ABOUT, None)
        if first is None:
            with pytest.raises(RunError, match="the newest complete one is none"):
                checkpoints.close()
        else:
            assert "the newest complete one is none" in first


def test_what_a_killed_save_left_is_deleted_and_may_vanish_meanwhile(tmp_path):
    rest = tmp_path / "7.orbax-checkpoint-tmp" / "state"
    rest.mkdir(parents=True)
    for number in range(2000):
        (rest / str(number)).touch()
    one, other = (Checkpoints(tmp_path, keep=1) for _ in range(2))
    with ThreadPoolExecutor() as pool:  # both delete the same files
        assert list(pool.map(Checkpoints.newest, (one, other))) == [None, None]
    assert other.save(8, state(8), ABOUT, None) is None
    other.close()
    assert steps(tmp_path) == [8]
