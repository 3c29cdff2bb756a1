"""What a run prints beside its metrics: the kernels, the data's vocabulary, the next command."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm import config as configs
from jaxllm.config import SampleConfig, TrainConfig
from jaxllm.data import open_dataset
from jaxllm.sharding import make_mesh
from jaxllm.train import launch, report
from jaxllm.train.run import Run
from jaxllm.train.step import Trainer
from pallas_kernels import dispatch


def test_the_kernel_summary_is_one_line_if_all_reasons_are_equal(monkeypatch):
    decide = lambda op, runs, why: dispatch.Decision(op, runs, "unsupported", why)
    for decisions, ending in (
        ([decide("a", "xla", "asked for")], "all ops run on XLA: asked for"),
        ([decide("a", "xla", "no"), decide("b", "xla", "no")], "all ops run on XLA: no"),
        ([decide("a", "xla", "no"), decide("b", "xla", "other")], "op by op"),
        ([decide("a", "xla", "no"), decide("b", "cudnn", "no")], "op by op"),
        ([decide("a", "hopper", "supported")], "op by op"),
    ):
        monkeypatch.setattr(dispatch, "decisions", lambda decisions=decisions: decisions)
        monkeypatch.setattr(dispatch, "explain", lambda: "op by op")
        assert launch.kernel_summary().endswith(ending)


def test_the_suggested_command_starts_as_the_run_did_in_every_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    more = f"--checkpoint {tmp_path}/a --prompt 'it'\"'\"'s'"
    for program, uv, on_path, wanted in (
        ("/x/bin/jaxllm", False, True, "jaxllm generate"),
        ("/x/bin/jaxllm", True, True, "uv run jaxllm generate"),
        ("train.py", True, False, "uv run python -m jaxllm generate"),
        ("train.py", False, True, "python -m jaxllm generate"),
        ("train.py", False, False, f"{sys.executable} -m jaxllm generate"),
    ):
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setattr(shutil, "which", lambda _, on=on_path: sys.executable if on else None)
        monkeypatch.delenv("UV", raising=False)
        if uv:
            monkeypatch.setenv("UV", "/usr/bin/uv")
        assert report.generate_command(Path("a"), "it's") == f"{wanted} {more}"
    assert report.generate_command(Path("a"), "---").endswith(f"{tmp_path}/a --prompt=---")


def test_a_row_has_the_mean_time_of_the_steps_since_the_last_row():
    """On a CPU a step before an evaluation may end 2 ms after the step before it is recorded: with
    both every 10 steps, a run of 7,000 tokens/s reported 114,000."""
    run = Run.__new__(Run)
    sizes = dict(steps=7, batch_size=1, seq_len=1, log_every=3)
    run.config = SimpleNamespace(train=TrainConfig(**sizes), sample=SampleConfig())
    rows, run.canary, run.times = [], None, []
    run.log = SimpleNamespace(train=lambda *row: rows.append(row), message=print)
    for step, seconds in enumerate((2.0, 3.0, 1.0, 4.0, 3.0, 8.0, 5.0), 1):
        values = dict(loss=1.0, lr=1.0, grad_norm=1.0, skips=float(step == 4))
        run._record(step, values, seconds)
    assert [(row[0], row[4]) for row in rows] == [(3, 2.0), (4, 4.0), (6, 5.5), (7, 5.0)]


def test_the_summary_weighs_rows_by_their_steps(tmp_path):
    """Every 10 of 12 steps: 10 of 0.1 s and 2 of 0.4 s are 1.8 s, not 12 x 0.25."""
    rows = [{"step": n, "loss": 1.0, "step_ms": ms} for n, ms in ((10, 100.0), (12, 400.0))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "run.json").write_text('{"tokens_per_step": 15}')
    said = report.summarize_run(tmp_path, "")
    assert "speed    180 tokens in 0:00:00, of which 1.8 s are steps: 100 tokens/s" in said


def test_a_fresh_run_deletes_only_its_own_times(tmp_path, monkeypatch):
    """With --out_dir . a user's folder "compiled" was deleted."""
    (tmp_path / "compiled").mkdir()
    for name in ("timings.txt", "mine.o"):
        (tmp_path / "compiled" / name).write_text("")
    monkeypatch.setattr(launch, "find_or_compile", lambda *_, **__: None)
    config = SimpleNamespace(train=TrainConfig(steps=1, batch_size=1, seq_len=1))
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]))
    trainer = SimpleNamespace(config=config, mesh=mesh)
    launch.compile_step(trainer, tmp_path, False, lambda: None)
    assert len(list((tmp_path / "compiled").iterdir())) == 2
    launch.compile_step(trainer, tmp_path, True, lambda: None)
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == ["mine.o"]


def test_the_bytes_of_a_token_are_those_of_all_validation_data(tiny, tmp_path):
    """Of data that ends in another language, only the start was counted: 4.07 bits, not 6.36."""
    text = "the cat sat on a mat " * 20_000 + "".join(chr(0x4E00 + i % 9999) for i in range(40_000))
    (tmp_path / "val.txt").write_text(text)
    config = configs.load(str(tiny), {"data.val_path": str(tmp_path / "val.txt")})
    data = open_dataset(config)
    trainer = Trainer(config, make_mesh(config.mesh))
    launch.open_log(trainer, data, tmp_path / "run", 0, {}).close()
    each = json.loads((tmp_path / "run" / "run.json").read_text())["bytes_per_token"]
    assert each == pytest.approx(len(text.encode()) / (len(data.val) - 1), rel=0.01)


@pytest.mark.parametrize(("vocab_size", "noted"), [(500, False), (5000, True)])
def test_odd_sizes_are_mentioned(tiny, vocab_size, noted, capsys):
    """A vocabulary far larger than the data's, a warm-up without an end."""
    sizes = {"model.vocab_size": str(vocab_size), "train.steps": str(5 - noted)}
    config = configs.load(str(tiny), sizes)
    data = open_dataset(config)
    launch.print_header(Trainer(config, make_mesh(config.mesh)), data)
    said = capsys.readouterr().out
    for note in (
        f"the data has {data.vocab_size} of the 5,000 ids of model.vocab_size",
        "optimizer.warmup_steps=5 exceeds train.steps=4: the learning rate ends at 0.8 of its peak",
    ):
        assert (note in said) == noted
