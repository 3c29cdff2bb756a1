"""A run survives kills at any moment and full disks."""

import gc
import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import failing_saves
from training_runs import REPO, command, final_state, losses

import train
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import RunLog, draw_loss

pytestmark = pytest.mark.usefixtures("same_environment", "own_programs")

KILLS = int(os.environ.get("KILLS", 1))
STEPS = 16


@pytest.mark.timeout(600 + 20 * KILLS)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="forks, which CUDA does not support")
def test_a_run_killed_at_random_moments_resumes_bit_for_bit(tiny, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    script, words = str(REPO / "tests/jaxllm/killed_runs.py"), ["--config", str(tiny)]
    words += ["--train.checkpoint_every", "2", "--sample.tokens", "0"]  # saves often
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(KILLS), str(seed), str(STEPS), "--", *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(result := json.loads(done.stdout.splitlines()[-1]))
    assert result["kills"] == KILLS
    assert result["in_save"] >= KILLS // 8
    assert "Traceback" not in (tmp_path / "log").read_text()
    straight, *runs = map(Path, result["runs"])
    wanted = final_state(straight, STEPS)
    assert list(losses(straight)) == list(range(1, STEPS + 1))
    for out_dir in runs:
        assert losses(out_dir) == losses(straight)
        same = jax.tree.map(np.array_equal, final_state(out_dir, STEPS), wanted)
        assert all(jax.tree.leaves(same))


@failing_saves
def test_a_full_disk_does_not_stop_a_run(tiny, tmp_path, capsys, monkeypatch):
    save, limits = Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)
    frozen = []  # number of objects that the garbage collector ignores during training

    def save_or_fill_the_disk(self, step, *more):
        frozen.append(gc.get_freeze_count())
        if step in (4, 8):  # limits the size of files for four steps
            resource.setrlimit(resource.RLIMIT_FSIZE, (600 if step == 4 else limits[0], limits[1]))
        return save(self, step, *more)

    monkeypatch.setattr(Checkpoints, "save", save_or_fill_the_disk)
    at_once = property(lambda self: 0, lambda self, later: None)
    monkeypatch.setattr(RunLog, "draws_from", at_once, raising=False)
    # Other processes would find half of a file in JAX's cache.
    monkeypatch.setattr(jax._src.lru_cache.LRUCache, "put", lambda *more: None)
    more = ["--train.steps", "12", "--train.checkpoint_every", "2", "--train.eval_every", "4"]
    more += ["--sample.tokens", "0"]
    # The run resumes without a checkpoint, as if the first process was killed early.
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    shutil.copy(tiny, tmp_path / "x" / "config.yaml")
    (tmp_path / "x" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "lo')
    status = train.main(["--resume", "--out_dir", str(tmp_path / "x"), *more])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert min(frozen) > 50_000
    assert gc.get_freeze_count() == 0
    for message in (
        "holds no complete checkpoint: starting again",
        "the checkpoint of step 4 could not be written",
        "the newest complete one is of step 2",
        "metrics.jsonl cannot be written now",
        "loss.png could not be drawn",
        "stopped writing TensorBoard events",
    ):
        assert message in captured.out
    assert list(losses(tmp_path / "x")) == list(range(1, 13))
    assert Checkpoints(tmp_path / "x" / "checkpoints", 1).newest() == 12
    assert "Traceback" not in captured.err


@pytest.mark.slow  # what goes on is shown above
def test_a_real_full_disk_does_not_stop_a_run_but_prevents_a_new_one(tiny, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=3m tmpfs {disk}"  # exists only inside this command
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system does not permit mounting a disk")

    def trained(name):
        words = command(tiny, disk / name, "--train.steps", "20", "--train.keep_checkpoints", "2")
        return shlex.join([*words, "--sample.tokens", "0", "--train.eval_every", "5"])

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount}; {trained('a')}; echo status $?;"
         f"ls {disk}/a {disk}/a/checkpoints; {trained('b')};"
         f"echo status $?; ls {disk}/b"],
        cwd=REPO, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    whole, full = done.stdout.split("status", 1)
    failed = "the checkpoint of step 15 could not be written (the disk is full: free some space);"
    assert f"{failed} the newest complete one is of step 10" in whole
    assert "step 20/20  validation loss" in whole
    assert full.startswith(" 1\n")  # its last checkpoint is missing
    assert {"report.html", "loss.png", "10"} <= set(full.split())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the checkpoint of step 20 could not be written (the disk is full" in errors[0]
    assert "Event loop is closed" not in done.stderr
    assert "compiled" not in full.partition("status")[0]  # before that
    assert "its disk has 0." in errors[1]
    assert "MB free, one checkpoint takes 1.5 MB" in errors[1]
    assert "status 2" in full


def test_a_full_disk_leaves_no_part_of_a_picture(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 3.5}\n{"step": 2, "loss": 3.4}\n')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            draw_loss(metrics, tmp_path / "loss.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [metrics]
