"""Tests the tracker, with the real package offline if it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest
from training_runs import error_of

from jaxllm.train import metrics
from jaxllm.train.metrics import RunLog, Wandb, read_metrics

ROW = dict(loss=5.0, lr=1e-3, grad_norm=1.0, seconds=0.01)


def test_a_missing_package_gives_one_line(tiny, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    without_wandb = lambda name: None if name == "wandb" else find_spec(name)
    monkeypatch.setattr(importlib.util, "find_spec", without_wandb)
    message = error_of(capsys, "--config", tiny, "--train.tracker", "wandb")
    assert "train.tracker=wandb needs the package wandb: pip install 'wandb" in message


def test_a_failing_tracker_does_not_stop_the_run(tmp_path, capsys):
    class Broken(Wandb):
        def __init__(self):
            self.run = self

        def log(self, values, step):
            raise RuntimeError("the service is gone")

    log = RunLog(tmp_path, 10, 0, tokens=100, flops=1e9, peak=None, tracker=Broken())
    for step in (1, 2):
        log.train(step, **ROW)
    log.close()
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert list((tmp_path / "tensorboard").glob("events*"))
    out = capsys.readouterr().out
    assert out.count("stopped writing values for wandb (the service is gone)") == 1


def test_events_are_written_without_importing_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    code = "import sys; from pathlib import Path; from jaxllm.train.metrics import Board;"
    code += " Board(Path(sys.argv[1]), 0).close(); print('written'); import torch"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.stderr) == ("written\n", "torch is imported\n")


def test_evaluations_draw_for_a_twentieth_of_the_time(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(metrics, "draw_loss", lambda *_: drawn.append(time.sleep(0.1)))
    log = RunLog(tmp_path, 10, 0, tokens=100, flops=1e9, peak=None)
    for step in range(1, 10):
        log.evaluation(step, 3.0)
    assert len(drawn) == 1
    log.draws_from -= 2.5
    log.evaluation(10, 3.0)
    log.draw()  # at the end always
    log.close()
    assert len(drawn) == 3


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="of the extra wandb")
def test_weights_and_biases_gets_every_value_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    code = f"""
import json, pathlib
from jaxllm.train.metrics import RunLog, Wandb
out_dir = pathlib.Path({str(tmp_path)!r})
tracker = Wandb(out_dir, {{"train": {{"steps": 2}}}})
log = RunLog(out_dir, 2, 0, tokens=100, flops=1e9, peak=None, tracker=tracker)
log.train(1, **{ROW!r})
log.evaluation(2, 3.25)
log.close()
print(tracker.where)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = written.read_bytes()
    for word in (b"val_loss", b"3.25", b"grad_norm", json.dumps(2).encode()):
        assert word in content
    assert f"offline; `wandb sync {written.parent}` sends it" in done.stdout
    assert done.stderr == ""
