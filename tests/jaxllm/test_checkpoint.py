import contextlib
import resource
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import failing_saves

from jaxllm import config as configs
from jaxllm.errors import InputError, RunError, memory_errors, quiet_orbax
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.weights.checksums import array_checksums
from jaxllm.weights.run import RunWeights

ABOUT = {"samples": 0}


def state(value):
    noise = np.random.default_rng(value).random((300, 300))  # compresses badly
    return {"a": jnp.asarray(noise, jnp.float32), "b": jnp.int32(value)}


@contextlib.contextmanager
def full_disk():
    """Limits the size of files to 20 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait(checkpoints):
    while checkpoints.manager.is_saving_in_progress():
        time.sleep(0.01)


@failing_saves
def test_a_full_disk_costs_only_one_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.save(1, state(1), ABOUT, None) is None
    wait(checkpoints)
    with full_disk():
        problems = [checkpoints.save(2, state(2), ABOUT, None)]
        wait(checkpoints)
    assert Checkpoints(tmp_path, keep=1).newest() == 1
    problems.append(checkpoints.save(3, state(3), ABOUT, None))
    (problem,) = [line for line in problems if line]
    assert "the checkpoint of step 2 could not be written" in problem
    assert "the newest complete one is of step 1" in problem
    checkpoints.close()
    after = Checkpoints(tmp_path, keep=1)
    assert after.newest() == 3
    np.testing.assert_array_equal(after.restore(3, state(0))["a"], state(3)["a"])


def test_a_full_disk_is_not_reported_as_out_of_memory():
    with pytest.raises(ValueError, match="No space left"), memory_errors("lower the batch"):
        raise ValueError('RESOURCE_EXHAUSTED: Error writing "a/0": No space left on device')
    with pytest.raises(RunError, match="checkpoint"), memory_errors("lower the batch"):
        raise RunError("the checkpoint of step 3 could not be written (RESOURCE_EXHAUSTED)")
    with pytest.raises(RunError, match="lower the batch"), memory_errors("lower the batch"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_a_disk_without_room_for_one_checkpoint_is_reported(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    checkpoints.check_disk_space(state(1))
    for total, free in ((10**9, 360_003), (0, 0)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _, t=total, f=free: SimpleNamespace(total=t, free=f)
        )
        if total:
            with pytest.raises(InputError, match=r"run: its disk has 0\.4 MB free, one checkpoint"):
                checkpoints.check_disk_space(state(1))
        else:  # this file system does not report its size
            checkpoints.check_disk_space(state(1))


def damages(content):
    middle = len(content) // 2
    yield content[:middle]
    for at in (middle, 3 * len(content) // 4):
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_damage_is_reported_with_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "whole", keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), ABOUT, None)
    checkpoints.close()
    files = sorted((tmp_path / "whole" / "2").rglob("*"), key=lambda p: -p.stat().st_size)
    array, page = files[0], tmp_path / "whole" / "2" / "about" / "metadata"
    assert array.stat().st_size > 200_000
    for victim, named in ((array, " at a "), (page, "")):
        content = victim.read_bytes()
        for damaged in damages(content):
            victim.write_bytes(damaged)
            with pytest.raises(InputError) as error:
                Checkpoints(tmp_path / "whole", 2).restore(2, state(0))
            said = str(error.value)
            assert f"checkpoint {tmp_path / 'whole' / '2'} is damaged{named}" in said
            assert "to continue from step 1, delete that folder and --resume again" in said
            assert "bound method" not in said
        victim.write_bytes(content)
    for restored in (1, 2):
        back = Checkpoints(tmp_path / "whole", 2).restore(restored, state(0))
        np.testing.assert_array_equal(back["a"], state(restored)["a"])
    shutil.rmtree(tmp_path / "whole" / "1")
    array.write_bytes(array.read_bytes()[:-99_999])
    with pytest.raises(InputError, match="there is no earlier one: start a new run"):
        Checkpoints(tmp_path / "whole", 2).restore(2, state(0))


def test_metrics_that_cannot_be_read_are_named(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), ABOUT, 4.0)
    checkpoints.close()
    metrics = folder / "1" / "metrics" / "metrics"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole.replace(b"4.0", b"1.0"))  # it would be the best
    with pytest.raises(InputError, match=rf"1 is damaged .*page was changed.*delete {metrics}"):
        Checkpoints(folder, keep=2).newest()
    metrics.write_bytes((folder / "2" / "metrics" / "metrics").read_bytes())
    with pytest.raises(InputError, match=rf"1 is damaged .*loss is of step 2.*delete {metrics}"):
        Checkpoints(folder, keep=2).newest()
    metrics.write_bytes(b'{"val_loss": 4.0}')  # as an earlier version wrote it
    assert Checkpoints(folder, keep=2).newest() == 2
    metrics.write_bytes(b"")
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    for reads in (Checkpoints(folder, keep=2).newest, lambda: RunWeights(tmp_path)):
        with pytest.raises(
            InputError, match=rf"checkpoint {folder}/1 is damaged .*delete {metrics}"
        ):
            reads()
    metrics.unlink()
    assert Checkpoints(folder, keep=2).newest() == 2


def test_a_checkpoint_under_the_name_of_another_is_damage(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, {"step": jnp.int32(step)}, ABOUT, None)
    checkpoints.close()
    assert Checkpoints(tmp_path, 2).restore(2, {"step": jnp.int32(0)})["step"] == 2
    with pytest.raises(InputError, match=r"of another model: step is \[\[\], 'int32'\]; this mo"):
        Checkpoints(tmp_path, 2).restore(2, {"step": jnp.zeros(3)})
    shutil.rmtree(tmp_path / "2")
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    with pytest.raises(
        InputError, match=r"2 is damaged \(ValueError: it is of step 1\); to contin"
    ):
        Checkpoints(tmp_path, 2).restore(2, {"step": jnp.int32(0)})


def test_tracebacks_of_orbax_are_hidden_and_no_others(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: shown.append(str(told.exc_value)))
    quiet_orbax()
    details = "Encountered error while reading. See full TensorStore details: <bound method"
    for said in ("Event loop is closed", details, "another"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(said)))
    assert shown == ["another"]


def test_checksums_depend_on_every_bit_position_and_dtype():
    x = np.random.default_rng(0).integers(0, 256, 4 * 6 * 8, np.uint8)
    seen = set()
    for dtype in (np.float32, jnp.bfloat16, np.int8):
        whole = np.resize(x, 48 * np.dtype(dtype).itemsize).view(dtype).reshape(6, 8)
        first = array_checksums({"a": whole, "b": jnp.asarray(whole)})
        assert first["a"] == first["b"]
        for at in range(0, whole.nbytes, 7):
            other = whole.copy()
            other.view(np.uint8).reshape(-1)[at] ^= 1 << at % 8
            seen.add(array_checksums({"a": other})["a"])
        seen |= {first["a"], array_checksums({"a": whole[::-1]})["a"]}
    assert len(seen) == 3 * 2 + sum(len(range(0, 48 * n, 7)) for n in (4, 2, 1))


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


def test_a_kill_during_deletion_does_not_prevent_resuming(tmp_path):
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


@failing_saves
def test_an_old_checkpoint_that_cannot_be_deleted_is_not_a_failed_save(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.save(1, state(1), ABOUT, None) is None
    checkpoints.close()
    remove = shutil.rmtree

    def guarded(path, *rest, **options):
        if Path(path).name == "1":
            raise PermissionError(13, "Permission denied")
        remove(path, *rest, **options)

    monkeypatch.setattr(shutil, "rmtree", guarded)
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.save(2, state(2), ABOUT, None) is None
    with pytest.raises(RunError, match=r"^a checkpoint before step 2's could not be deleted \(Per"):
        checkpoints.close()
    assert steps(tmp_path) == [1, 2]


@failing_saves
def test_a_last_checkpoint_that_fails_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    with full_disk():
        first = checkpoints.save(1, state(1), ABOUT, None)
        if first is None:
            with pytest.raises(RunError, match="the newest complete one is none"):
                checkpoints.close()
        else:
            assert "the newest complete one is none" in first


def test_remains_of_a_killed_save_are_deleted_even_if_they_vanish_meanwhile(tmp_path):
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
