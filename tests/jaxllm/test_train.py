"""Runs the trainer: an uninterrupted run, stopped runs that resume, and a run that diverges."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from datetime import timedelta

import jax
import numpy as np
import pytest
import yaml
from training_runs import REPO, STEPS, command, devices, error_of, final_state, losses, run

import train
from jaxllm import config as configs
from jaxllm.errors import InputError, RunError
from jaxllm.files import own
from jaxllm.infer import generate
from jaxllm.text import Tokenizer
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.metrics import read_metrics
from jaxllm.train.run import Run
from jaxllm.weights.pretrained import open_weights

pytestmark = pytest.mark.usefixtures("same_environment")


def run_until(tiny, out_dir, step, signal_number, *more):
    """Starts a run, sends a signal once it prints the sample of `step`; (status, output)."""
    process = subprocess.Popen(
        command(tiny, out_dir, *more), cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step}/"):
            process.send_signal(signal_number)
    process.stdout.close()
    return process.wait(), "".join(lines)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """An uninterrupted run: (its directory, the finished process)."""
    out_dir = tmp_path_factory.mktemp("runs") / "straight"
    done = run(tiny, out_dir, JAX_LOG_COMPILES="1")
    assert done.returncode == 0, done.stderr
    return out_dir, done


def texts(out_dir):
    rows = read_metrics(out_dir / "metrics.jsonl")
    return [(r["step"], r["sample"]) for r in rows if "sample" in r]


def test_a_run_writes_everything_it_promises(straight):
    out_dir, done = straight
    rows = read_metrics(out_dir / "metrics.jsonl")
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    for key in ("lr", "grad_norm", "step_ms", "tokens_per_second"):
        assert all(np.isfinite(r[key]) for r in steps)
    evaluations = {r["step"]: r["val_loss"] for r in rows if "val_loss" in r}
    assert list(evaluations) == [20, 40, 60]
    assert evaluations[60] < 0.8 * steps[0]["loss"]
    samples = {r["step"]: r["sample"] for r in rows if "sample" in r}
    assert list(samples) == [30, 60]
    assert all(text.startswith("the ") and len(text) > 8 for text in samples.values())
    assert (out_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out_dir / "tensorboard").glob("events*"))
    report = (out_dir / "report.html").read_text()
    device = "1 x cpu" if jax.default_backend() == "cpu" else "1 x"
    for promised in ("attention", "Loss", device, "step 30</figcaption>", "step 60</figcaption>"):
        assert promised in report
    assert configs.load(str(out_dir / "config.yaml")).train.steps == STEPS
    for promised in ("parameters", "tokens", "mesh", "kernels  ", "sample:\nthe "):
        assert promised in done.stdout
    assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows)


def test_a_run_ends_with_a_summary(straight):
    out_dir, done = straight
    rows = read_metrics(out_dir / "metrics.jsonl")
    loss = {r["step"]: r["loss"] for r in rows if "loss" in r}
    ending = done.stdout[done.stdout.index(f"done: {out_dir}\n") :]
    duration = timedelta(seconds=round(rows[-1]["seconds"]))
    for line in (
        f"loss     {loss[1]:.4f} at step 1, {loss[STEPS]:.4f} at step {STEPS}, validation ",
        f"speed    {8 * 32 * STEPS:,} tokens in {duration}, ",
        f"look at  {out_dir}/loss.png, {out_dir}/report.html\n",
        f" -m jaxllm generate --checkpoint {out_dir} --prompt 'the '\n",
    ):
        assert line in ending
    assert str(duration) in (out_dir / "report.html").read_text()
    words = shlex.split(ending.partition("try it   ")[2])
    assert generate._read(words[words.index("--checkpoint") :]).prompt == "the "


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU runs kernels")
def test_on_a_cpu_one_line_says_why_no_kernel_runs(straight):
    lines = straight[1].stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("kernels"))
    assert "all ops run on XLA: the platform is cpu, not gpu" in lines[at]
    assert lines[at + 1].startswith("compiled in ")


def test_every_program_is_compiled_once(straight):
    lines = straight[1].stderr.splitlines()
    for program in ("_train_step", "_loss_sum", "first", "further"):
        assert len([x for x in lines if f"Compiling jit({program})" in x]) == 1, program


def test_the_newest_and_the_best_checkpoints_are_kept(straight):
    out_dir, _ = straight
    rows = read_metrics(out_dir / "metrics.jsonl")
    best = min((r["val_loss"], r["step"]) for r in rows if "val_loss" in r)[1]
    kept = {int(p.name) for p in (out_dir / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {55, 60, best}


def test_a_stopped_run_resumes_bit_for_bit(tiny, straight, tmp_path):
    out_dir = tmp_path / "broken"
    status, output = run_until(tiny, out_dir, 30, signal.SIGTERM)
    assert status == 143
    assert (out_dir / "report.html").exists()
    assert "stopped by SIGTERM after step" in output
    assert f" and saved: continue with --resume --out_dir {out_dir}\n" in output
    done = run(tiny, out_dir, "--resume")
    assert done.returncode == 0, done.stderr
    for kept in ("loss", "lr", "grad_norm", "tokens", "val_loss"):
        value = lambda out_dir, key=kept: [
            r[key] for r in read_metrics(out_dir / "metrics.jsonl") if key in r
        ]
        assert value(out_dir) == value(straight[0])
    assert texts(out_dir) == texts(straight[0])
    for mine, theirs in zip(
        jax.tree.leaves(final_state(out_dir)),
        jax.tree.leaves(final_state(straight[0])),
        strict=True,
    ):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda rows: [rows[0], "\0" * 50, *rows[2:40]], "it lacks 26 rows"),  # a loss of power
        (lambda rows: [*rows, '{"step": 61, "lo'], ""),  # a kill after the checkpoint
        (lambda rows: [rows[0].replace("5", "4", 1), *rows[1:]], "a row of this run was changed"),
    ],
)
def test_a_damaged_file_of_metrics_is_noticed(damage, said, straight, tmp_path, capsys):
    whole = (straight[0] / "metrics.jsonl").read_text().splitlines()
    assert len(whole) == 65  # 60 losses, 3 evaluations, 2 samples
    shutil.copytree(straight[0], tmp_path / "x")
    (tmp_path / "x" / "metrics.jsonl").write_text("\n".join(damage(whole)))
    words = ["--resume", "--out_dir", str(tmp_path / "x"), "--train.steps", "61"]
    assert train.main([*words, "--sample.tokens", "0"]) == 0
    output = capsys.readouterr().out
    assert (f"metrics.jsonl is damaged: {said}" in output) == ("is damaged" in output) == bool(said)
    steps = [row["step"] for row in read_metrics(tmp_path / "x" / "metrics.jsonl")]
    assert len(steps) == (65 - 26 + 1 if "26" in said else 65) + 2  # it evaluates step 60 again
    assert steps[-1] == 61


def test_a_run_that_diverges_says_where_and_keeps_its_checkpoint(tiny, tmp_path, capsys):
    more = ["--optimizer.learning_rate", "1e30", "--optimizer.warmup_steps", "0"]
    more += ["--train.checkpoint_every", "1", "--train.max_skips", "3"]
    status = train.main(["--config", str(tiny), "--out_dir", str(tmp_path / "x"), *more])
    captured = capsys.readouterr()
    assert status == 1, captured.err
    assert "update skipped (2 in a row)" in captured.out
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("error: 3 updates in a row were skipped"), last
    where = re.search(r"step (\d+) on samples (\d+) to (\d+);", last)
    step, first, end = map(int, where.groups())
    assert (first, end) == (8 * (step - 1), 8 * step - 1)
    assert "first not finite: the gradient" in last
    skips = [r.get("skips", 0) for r in read_metrics(tmp_path / "x" / "metrics.jsonl")]
    assert skips[-3:] == [1, 2, 3]
    # Checkpoints of skipped steps would have replaced those that are good.
    assert Checkpoints(tmp_path / "x" / "checkpoints", 1).newest() == step - 3


def test_a_run_whose_model_is_not_finite_does_not_end_well(tiny, tmp_path, capsys):
    """It ended with status 0, and saved a model of NaN as its newest checkpoint."""
    more = ["--optimizer.name", "muon", "--optimizer.muon_learning_rate", "1e30"]
    more += ["--train.steps", "3", "--train.checkpoint_every", "1"]
    assert train.main(["--config", str(tiny), "--out_dir", str(tmp_path / "x"), *more]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: the run ends at a loss of nan; first not finite: blocks.0"), last
    assert Checkpoints(tmp_path / "x" / "checkpoints", 1).newest() == 1


def test_a_run_of_spikes_is_not_blamed_on_a_layer(tiny):
    run = Run.__new__(Run)
    run.config, run.samples, run.start = configs.load(str(tiny), {"train.skip_spikes": "6"}), 80, 10
    assert run._why_skipped(12, finite=True) == (
        "5 updates in a row were skipped (train.max_skips), up to step 12 on samples 88 to 95;"
        " its loss is a spike; raise train.skip_spikes=6.0"
    )


def test_a_run_ends_where_its_folder_is_gone(tmp_path):
    run = Run.__new__(Run)
    run.out_dir = tmp_path / "run"
    with own(run.out_dir) as run.holds:
        assert run.holds()
        shutil.move(run.out_dir, tmp_path / "moved")
        assert not run.holds()
        with own(run.out_dir):  # another run has taken its place
            with pytest.raises(RunError, match="run was deleted or moved while"):
                run._evaluate_sample_save(5, {"checkpoint"})
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


class TestFinishedRun:
    @pytest.fixture
    def copy(self, straight, tmp_path):
        out_dir = tmp_path / "copy"
        shutil.copytree(straight[0], out_dir)
        return out_dir

    def test_a_new_run_in_its_directory_is_refused(self, tiny, copy, capsys):
        before = (copy / "metrics.jsonl").read_bytes()
        line = error_of(capsys, "--config", tiny, "--out_dir", copy)
        assert line.endswith("already holds a run; add --resume to continue it, or name another")
        assert (copy / "metrics.jsonl").read_bytes() == before
        (copy / "config.yaml").unlink()  # without it --resume has nothing to continue
        line = error_of(capsys, "--config", tiny, "--out_dir", copy)
        assert line.endswith("already holds a run; name another")

    def test_resuming_without_steps_left_is_refused(self, copy, capsys):
        assert "raise --train.steps" in error_of(capsys, "--resume", "--out_dir", copy)

    def test_resuming_completes_a_run_killed_after_its_last_checkpoint(
        self, straight, copy, capsys, monkeypatch
    ):
        lines = (copy / "metrics.jsonl").read_text().splitlines()
        lines = [x for x in lines if json.loads(x)["step"] < STEPS or "loss" in json.loads(x)]
        (copy / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
        (copy / "loss.png").unlink()
        os.utime(copy / "report.html", (0, 0))  # from an earlier stop
        prompts, prompt = [], Tokenizer.prompt
        monkeypatch.setattr(
            Tokenizer, "prompt", lambda self, text: prompts.append(text) or prompt(self, text)
        )
        status = train.main(["--resume", "--out_dir", str(copy)])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert prompts == ["the "]  # the sample's prompt includes the tokenizer's prefix
        rows = [r for r in read_metrics(copy / "metrics.jsonl") if r["step"] == STEPS]
        wanted = [r for r in read_metrics(straight[0] / "metrics.jsonl") if r["step"] == STEPS]
        # This process has other XLA flags than a run, so the last bits may differ on a GPU.
        assert [r.keys() for r in rows] == [r.keys() for r in wanted]
        assert [r["val_loss"] for r in rows if "val_loss" in r] == pytest.approx(
            [r["val_loss"] for r in wanted if "val_loss" in r], rel=1e-3
        )
        assert (copy / "loss.png").exists()
        assert f"step {STEPS}</figcaption>" in (copy / "report.html").read_text()
        assert "raise --train.steps" in error_of(capsys, "--resume", "--out_dir", copy)

    def test_a_run_stopped_in_its_trace_and_before_its_evaluation_catches_up(
        self, straight, copy, capsys, same_environment
    ):
        rows = read_metrics(copy / "metrics.jsonl")
        lines = [json.dumps(r) + "\n" for r in rows if r["step"] < STEPS or "loss" in r]
        (copy / "metrics.jsonl").write_text("".join(lines))
        more = f"--train.steps {STEPS + 3} --profile.steps {STEPS - 2}:{STEPS + 3}".split()
        status = train.main(["--resume", "--out_dir", str(copy), *more])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert f"profile  {copy / 'profile'}: no kernels" in out or "kernels 0" in out
        logged = read_metrics(copy / "metrics.jsonl")
        kinds = [{"loss", "val_loss", "sample"} & r.keys() for r in logged if r["step"] == STEPS]
        assert kinds == [{"loss"}, {"val_loss"}, {"sample"}]

    def test_a_changed_tokenizer_is_refused(self, copy, capsys):
        path = copy / "tokenizer.json"
        path.write_text(path.read_text().replace('"added_tokens":', '"more": 1, "added_tokens":'))
        with pytest.raises(InputError, match=r"tokenizer.json was changed since"):
            open_weights(copy)

    def test_a_second_process_is_refused(self, copy, capsys):
        more = ["--train.steps", "70"]
        with own(copy):
            message = error_of(capsys, "--resume", "--out_dir", copy, *more)
        assert "another process is writing to" in message

    def test_a_resumed_run_may_change_its_rate_if_the_command_line_says_so(
        self, copy, tmp_path, capsys, same_environment
    ):
        changed = yaml.safe_load((copy / "config.yaml").read_text())
        changed["optimizer"]["learning_rate"] = 1e-4
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
        resumed = ["--resume", "--out_dir", str(copy), "--train.steps", str(STEPS + 2)]
        message = error_of(capsys, *resumed, "--config", tmp_path / "changed.yaml")
        assert "to change it say --optimizer.learning_rate 0.0001 here, or start a new" in message
        assert f"--model.init_from {copy}, another --out_dir" in message
        # Its weights would be refused, too.
        message = error_of(capsys, *resumed, "--model.n_layers", "3")
        assert message.endswith("keeps: restore it, or start a new run")
        assert train.main([*resumed, "--optimizer.learning_rate", "1e-4"]) == 0
        # Said, too, for a rate that was edited in config.yaml.
        assert "; changed: optimizer.learning_rate=0.0001 (was 0.003)" in capsys.readouterr().out
        rates = [r["lr"] for r in read_metrics(copy / "metrics.jsonl") if r.get("loss")]
        assert len(rates) == STEPS + 2
        assert max(rates) > 2e-3
        assert 1e-5 <= rates[-1] < rates[-2] < 2e-5  # 0.1 of 1e-4 at the end
        stored = yaml.safe_load((copy / "config.yaml").read_text())
        assert stored["optimizer"]["learning_rate"] == 1e-4  # also for the next --resume

    def test_resuming_with_another_model_is_refused(self, copy, capsys):
        more = ["--train.steps", "70", "--model.n_layers", "3"]
        message = error_of(capsys, "--resume", "--out_dir", copy, *more)
        assert "model.n_layers=3 differs from 2" in message
        message = error_of(capsys, "--resume", "--out_dir", copy, "--config", "gpt2_small")
        assert "model.type='gpt2' differs from 'llama3'" in message

    def test_the_configuration_of_another_model_is_refused(self, copy, capsys):
        stored = yaml.safe_load((copy / "config.yaml").read_text())
        stored["model"]["d_ff"] = 192
        (copy / "config.yaml").write_text(yaml.safe_dump(stored))
        message = error_of(capsys, "--resume", "--out_dir", copy, "--train.steps", "70")
        assert "model.d_ff=192 differs from 128, which the run in" in message

    def test_other_data_is_refused(self, copy, tmp_path, capsys):
        (tmp_path / "other.txt").write_text("another cat and another rat " * 2000)
        more = ["--train.steps", "70", "--data.path", tmp_path / "other.txt"]
        message = error_of(capsys, "--resume", "--out_dir", copy, *more)
        assert "the data changed since the checkpoint" in message

    def test_a_damaged_checkpoint_is_reported(self, copy, capsys):
        newest = copy / "checkpoints" / str(STEPS)
        for path in newest.rglob("*"):
            if path.is_file() and path.stat().st_size > 1000:
                path.write_bytes(path.read_bytes()[:-500])
        before = (copy / "metrics.jsonl").read_bytes()
        message = error_of(capsys, "--resume", "--out_dir", copy, "--train.steps", "70")
        assert f"checkpoint {newest} is damaged" in message
        assert (copy / "metrics.jsonl").read_bytes() == before

    def test_generate_names_a_damaged_checkpoint_and_reads_the_one_before(self, copy, capsys):
        command = ["--checkpoint", str(copy), "--prompt", "the ", "--tokens", "2"]
        newest = copy / "checkpoints" / str(STEPS)
        older = ["--step", str(STEPS - 5)]
        page, manifest = newest / "about" / "metadata", newest / "state" / "manifest.ocdbt"
        # The largest file alone may hold nothing but moments, which generate does not read.
        files = [path for path in (newest / "state").rglob("*") if path.is_file()]
        arrays = [path for path in files if path.stat().st_size > 1000 and path != manifest]
        for victims, left in ((arrays, 1000), ([manifest], None), ([page], 50)):
            for victim in victims:
                victim.write_bytes(victim.read_bytes()[:left]) if left else victim.unlink()
            assert generate.main(command) == 2
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert f"error: checkpoint {newest} is damaged (" in err
            assert (
                f"generate, evaluate and convert take the previous one with {' '.join(older)}"
                in err
            )
            assert "bound method" not in err
        assert generate.main(command + older) == 0
        assert capsys.readouterr().out.startswith("the ")
        (newest / "metrics" / "metrics").write_text("{")
        assert generate.main(command) == 2
        assert f"error: checkpoint {newest} is damaged" in capsys.readouterr().err

    @pytest.mark.slow  # test_processes.py continues on other devices, too
    def test_training_can_continue_on_other_devices(self, tiny, copy, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(copy, other)
        more = ["--train.steps", "64", "--sample.tokens", "0"]
        done = run(copy / "config.yaml", copy, "--resume", *more)
        assert done.returncode == 0, done.stderr
        assert list(losses(copy)) == list(range(1, 65))
        more += ["--mesh.fsdp", "2", "--train.grad_accum", "2"]
        done = run(other / "config.yaml", other, "--resume", *more, **devices(4))
        assert done.returncode == 0, done.stderr
        assert "mesh {'data': 2, 'fsdp': 2, 'context': 1, 'tensor': 1}" in done.stdout
        for step in range(
            61, 65
        ):  # the same data, divided differently, so bf16 sums have another order
            assert losses(other)[step] == pytest.approx(losses(copy)[step], rel=2e-3)
        mine, theirs = (jax.tree.leaves(final_state(x, 64).params) for x in (copy, other))
        for a, b in zip(mine, theirs, strict=True):  # restores from four devices onto these
            np.testing.assert_allclose(a, b, atol=2e-3)
