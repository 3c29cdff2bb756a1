"""Bad input to train.py gives one line and exit status 2, and writes nothing."""

import contextlib
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from training_runs import REPO, error_of

from jaxllm import config as configs
from jaxllm.config import command_line
from jaxllm.data import open_dataset
from jaxllm.errors import InputError
from jaxllm.files import own
from jaxllm.train import launch, run
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.train.run import check_input
from pallas_kernels import dispatch

pytestmark = pytest.mark.usefixtures("same_environment")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--config is missing"),
        (["--confg", "llama3_small"], "arguments: --confg; did you mean --config?; see --help"),
        (["--resum", "--out_dir", "runs"], "arguments: --resum; did you mean --resume?; see"),
        (["--config", "llama3_small", "--steps", "3"], "key steps; did you mean train.steps?"),
        (["--config", "nothing"], "no configuration nothing"),
        (["--resume"], "--resume needs --out_dir"),
        (["--resume", "/tmp"], "unexpected argument /tmp; write --out_dir /tmp"),
        (["--config", "llama3_small", "--train.step", "3"], "did you mean train.steps?"),
        (["--config", "llama3_small", "--train.steps"], "--train.steps needs a value"),
        (["--config", "llama3_small", "--train.steps", "--train.seed", "1"], "needs a value"),
        (["--config", "llama3_small", "12"], "unexpected argument 12"),
        (["--config", "llama3_small", "--", "5"], "unexpected argument --; a value follows"),
        (["--config", "llama3_small", "--train.batch_size", "0"], "train.batch_size=0"),
        (["--config", "llama3_small", "--train.seq_len", "512"], "exceeds model.max_seq_len=256"),
        (["--config", "llama3_small", "--model.n_kv_heads", "3"], "not a multiple of n_kv_heads=3"),
        (
            ["--config", "llama3_small", "--mesh.tensor", "7"],
            "set mesh.data=-1 and the product of the other axes to a divisor of",
        ),
        (["--config", "llama3_small", "--mesh.data", "0"], "mesh data=0 x fsdp=1 x context=1"),
        (["--config", "llama3_small", "--mesh.fsdp", "64"], "--dry_run 64xH100 predicts it for 64"),
        (["--config", "llama3_small", "--mesh.data", "64"], "--dry_run 64xH100 predicts it for 64"),
        (["--config", "llama3_small", "--dry_run", ""], "--dry_run is not COUNTxKIND"),
        (["--config", "llama3_small", "--data.path", "/nothing", "--data.source", "text"], "/noth"),
        (
            ["--config", "llama3_small", "--data.path", "/nothing"],
            "not read with source=stdlib",
        ),
        (["--config", "llama3_small", "--data.text_column", "x"], "column=x is not read with sour"),
        (
            ["--config", "llama3_small", "--data.tokenizer", "/nothing"],
            "data.tokenizer=/nothing does not exist",
        ),
        (
            ["--config", "llama3_small", "--model.init_from", "/nothing"],
            "init_from=/nothing does n",
        ),
        (["--config", "llama3_small", "--model.compute_dtype", "float16"], "inference only"),
        (["--config", "llama3_small", "--model.residual_dtype", "float16"], "train in bfloat16"),
        (["--config", "llama3_small", "--profile.steps", "4:4"], "the end must exceed the first"),
        (["--config", "llama3_small", "--out_dir", "train.py"], "train.py is a file; name another"),
        (["--config", "llama3_small", "--out_dir", "train.py/x"], "train.py is a file; name anot"),
        (["--config", "llama3_small", "--out_dir", ""], "--out_dir: it is empty; name"),
        (["--config", "llama3_small", "--out_dir", 300 * "x"], "created: File name too long; name"),
        (
            ["--config", "llama3_small", "--out_dir", "gs://b/c"],
            "gs:/b/c cannot be created: it is",
        ),
        (["--resume", "--out_dir", 300 * "x"], "cannot be created: File name too long; name"),
        (["--config", 300 * "x"], "no configuration xxx"),
        (["--config", "configs"], "configuration configs is a folder; name a YAML file in it"),
        (["--config", "llama3_small", "--restart"], "--restart needs --resume"),
        (["--config", "llama3_small", "--processes", "9" * 20], "must be 1 to 64"),
        (
            ["--config", "llama3_small", "--data.cache_dir", "~nobody-here/x"],
            "~ or ~USER, which has no home directory",
        ),
    ],
)
def test_bad_command_lines_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    assert message in error_of(capsys, *words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.window", "8"),
        ("model.softcap", "30"),
        ("model.init_from", "/other"),  # its checkpoint has all weights
        ("data.pack", "documents"),
    ],
)
def test_a_resumed_run_cannot_change_what_a_token_sees(key, value, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    (tmp_path / "checkpoints").mkdir()
    message = error_of(capsys, "--resume", "--out_dir", tmp_path, f"--{key}", value)
    assert f"{key}=" in message
    assert "which the run in" in message


@pytest.mark.parametrize(
    ("name", "what"),
    [("config.json", "a model"), ("prepare.json", "prepared data"), ("loss.png", "a report")],
)
def test_a_run_does_not_begin_in_a_folder_of_something_else(name, what, tiny, capsys, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text("")
    message = error_of(capsys, "--config", tiny, "--out_dir", tmp_path / "x")
    assert f"x already holds {what}; name another" in message


def test_a_resumed_run_needs_no_initial_weights_but_a_base(tiny):
    lora = {"model.lora.rank": "4"}
    for more, resume, refused in (({}, True, False), ({}, False, True), (lora, True, True)):
        config = configs.load(str(tiny), {"model.init_from": "/nothing", **more})
        with pytest.raises(InputError, match="init_from") if refused else contextlib.nullcontext():
            check_input(config, resume, tiny.parent)


def test_checkpoints_are_not_written_where_orbax_loses_them(tmp_path):
    """In [a] a run ended well, and its checkpoints had no array; in a\\b they came to a/b."""
    (tmp_path / "link").symlink_to(tmp_path / "[a]")
    for name in ("[a]", "link/b", "a\\b", "a*", "a?", "a\udcff"):
        with pytest.raises(InputError, match="checkpoints cannot have .* rename it"):
            command_line.check_free(tmp_path / name)
    command_line.check_writable(tmp_path / "[a]")  # a Hugging Face folder


def test_a_broken_link_cannot_hold_a_run(capsys, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    message = error_of(capsys, "--config", "llama3_small", "--out_dir", tmp_path / "run")
    assert f"it is a symbolic link to {tmp_path / 'gone'}, which does not exist" in message


def test_an_edited_or_damaged_configuration_does_not_continue_a_run(tiny, capsys, tmp_path):
    """config.yaml must be what the newest checkpoint has, but for what a run may change."""
    run = tmp_path / "run"
    config = configs.load(str(tiny))
    checkpoints = Checkpoints(run / "checkpoints", 1)
    data = open_dataset(config)
    saved = config.model_dump()
    del saved["sample"]  # of an earlier version, which had no such setting
    saved["train"]["gone"] = 1
    about = {"config": saved, "data_fingerprint": data.fingerprint, "samples": 8}
    checkpoints.save(1, {"step": jax.numpy.int32(1)}, about, None)
    checkpoints.close()
    for name, value, message in (
        ("model.norm_eps", "1e-4", "model.norm_eps=0.0001 differs from 1e-05, which the run in"),
        ("model.rope_scaling.factor", "4", "model.rope_scaling='a section' differs from None"),
        ("optimizer.learning_rate", "1e-2", "is of another model"),  # it goes on, to the arrays
    ):
        edited = configs.load(str(tiny), {name: value})
        (run / "config.yaml").write_text(edited.to_yaml())
        assert message in error_of(capsys, "--resume", "--out_dir", run)


def test_a_run_whose_configuration_could_not_be_written_can_begin_again(
    tiny, capsys, tmp_path, monkeypatch
):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch, "compile_step", lambda *a: (None, None))
    with monkeypatch.context() as patch:
        patch.setattr(launch, "write_whole", full)
        message = error_of(capsys, "--config", tiny, "--out_dir", tmp_path / "x")
    assert "x: No space left on device" in message
    command_line.check_free(tmp_path / "x")


def test_a_lack_of_memory_names_what_to_lower(tiny, capsys, tmp_path, monkeypatch):
    """Whether a device finds it while a run is set up or while it trains."""

    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes")

    monkeypatch.setattr(launch, "compile_step", full)
    for name in ("set up", "trains"):
        assert run.main(["--config", str(tiny), "--out_dir", str(tmp_path / name)]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: the device is out of memory; lower train.batch_size=")
        monkeypatch.setattr(launch, "compile_step", lambda *a: (None, None))
        monkeypatch.setattr(run.Run, "_take_steps", full)


def test_a_copy_without_checkpoints_begins_again_only_with_restart(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    words = ["--resume", "--out_dir", str(tmp_path)]
    assert "has no checkpoints to resume from; copy" in error_of(capsys, *words)
    assert command_line.read([*words, "--restart"]).resume
    (tmp_path / "config.json").write_text("{}")  # whoever put it there, it stays a run
    assert command_line.read([*words, "--restart"]).resume
    # Its folder was emptied, and the run's metrics would have been lost.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 201, "loss": 3.5}\n')
    assert "has no checkpoints to resume from; copy" in error_of(capsys, *words)
    for every in (201, 0):  # killed before the first
        run.check_checkpoints(tmp_path, every)
    (tmp_path / "checkpoints" / "200.orbax-checkpoint-tmp").mkdir()  # and while it was saved
    run.check_checkpoints(tmp_path, 200)


@pytest.mark.parametrize("key", ["out_dir", "data.cache_dir"])
def test_a_run_does_not_write_into_its_own_data(key, tiny, capsys, tmp_path):
    """The run ended well, and could not resume: its files had become part of its data."""
    words = ["--data.path", tiny.parent, "--data.cache_dir", tmp_path / "c", "--out_dir", tmp_path]
    message = error_of(capsys, "--config", tiny, *words, f"--{key}", tiny.parent / "x")
    assert f"{tiny.parent / 'x'} is inside the data, {tiny.parent}: name one outside it" in message
    assert not (tiny.parent / "x").exists()


def test_checkpoints_that_cannot_be_written_are_noticed_before_a_resumed_run_trains(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "checkpoints")
    message = error_of(capsys, "--resume", "--out_dir", tmp_path)
    assert f"{tmp_path}/checkpoints is not writable" in message


def test_a_run_stores_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = {"data.source": "text", "data.path": "a/*.txt", "data.val_path": "~/b"}
    given |= {"data.tokenizer": "t.json", "data.cache_dir": "c", "model.init_from": "../w"}
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    config = command_line.read(["--config", "llama3_small", *words]).config
    assert (config.data.path, config.data.val_path) == (f"{tmp_path}/a/*.txt", "/home/me/b")
    assert (config.data.tokenizer, config.data.cache_dir) == (f"{tmp_path}/t.json", f"{tmp_path}/c")
    assert config.model.init_from == str(tmp_path.parent / "w")


def test_a_configuration_comes_from_standard_input(tmp_path):
    code = "import sys; from jaxllm.config import command_line as c; a = c.read(sys.argv[1:]);"
    code += "print(a.config.train.steps, a.out_dir)"
    for name in ("-", "/dev/stdin"):
        done = subprocess.run(
            [sys.executable, "-c", code, "--config", name],
            input=configs.load("gpt2_small", {"train.steps": "7"}).to_yaml(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("7 runs/stdin-")


def test_a_quoted_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = command_line.Parser()
    parser.option("--out FILE", "")
    assert parser.parse_args(["--out=~/x"]).out == Path("/home/me/x")
    with pytest.raises(KeyError, match="FLE"):  # else it would be text, with its tilde
        parser.option("--in FLE", "")


WRONG_PATHS = """
train --config llama3_small --data.source text --data.path /nothing
train --config llama3_small --data.source shards --data.path * --data.val_path /nothing/*.bin
train --config llama3_small --data.tokenizer /nothing
train --config llama3_small --model.init_from /nothing
generate --checkpoint /nothing --prompt a
evaluate --checkpoint /nothing
evaluate --checkpoint RUN --data.source text --data.path /nothing
convert /nothing OUT --quantize int4
train --config ~/nothing
train --config llama3_small --out_dir ~/nothing
train --config llama3_small --data.cache_dir ~/nothing
generate --checkpoint ~/nothing --prompt a
generate --checkpoint RUN --prompts ~/nothing
evaluate --checkpoint RUN --hellaswag ~/nothing
chat --checkpoint ~/nothing
report ~/nothing
"""


def test_wrong_paths_are_reported_before_jax_is_imported(tmp_path):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    (tmp_path / "tokenizer.json").touch()
    lines = WRONG_PATHS.strip().replace("RUN", str(tmp_path)).replace("~", "~no-one").splitlines()
    code = (
        "import sys\nfrom jaxllm.commands import main\n"
        f"for line in {lines!r}:\n    assert main(line.split()) == 2, line\n"
        "assert not {'jax', 'grain', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == len(lines)
    for line, error in zip(lines, errors, strict=True):
        wanted = "~ or ~USER, which has no home directory" if "~" in line else "/nothing"
        assert error.startswith("error: ")
        assert wanted in error


def test_the_second_of_two_runs_that_start_together_is_refused_before_it_compiles(
    tiny, tmp_path, capsys, monkeypatch
):
    """Both found the folder free when they read the command line."""
    out, first = tmp_path / "x", contextlib.ExitStack()
    check_kernels = launch.check_kernels
    monkeypatch.setattr(launch, "compile_step", lambda *a: pytest.fail("it compiles"))
    monkeypatch.setattr(launch, "check_kernels", lambda c: first.enter_context(own(out)))
    with first:
        message = error_of(capsys, "--config", tiny, "--out_dir", out)
        assert f"another process is writing to {out}" in message
        assert out.is_dir()
    assert not out.exists()  # neither wrote anything
    out.mkdir()
    monkeypatch.setattr(launch, "check_kernels", check_kernels)
    error_of(capsys, "--config", tiny, "--out_dir", out, "--model.vocab_size", "200")
    assert [path.name for path in out.iterdir()] == [".lock"]  # the user's folder stays


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there it runs")
def test_mosaic_is_refused_where_it_cannot_run(tiny, tmp_path, capsys):
    message = error_of(
        capsys, "--config", tiny, "--out_dir", tmp_path / "x", "--model.kernels", "mosaic"
    )
    assert "model.kernels=mosaic cannot run here: the platform is cpu, not gpu" in message
    assert not (tmp_path / "x").exists()


def test_mosaic_is_refused_where_an_op_has_no_kernel(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "device_lacks", lambda gpu: None)
    one_wide_head = "--model.d_model 320 --model.n_heads 1 --model.n_kv_heads 1".split()
    command = ["--config", tiny, "--out_dir", tmp_path / "x", "--model.kernels", "mosaic"]
    message = error_of(capsys, *command, *one_wide_head)
    assert "model.kernels=mosaic cannot run: attention has no Mosaic kernel" in message
    assert not (tmp_path / "x").exists()


def test_a_vocabulary_that_is_too_small_is_refused(tiny, tmp_path, capsys):
    message = error_of(
        capsys, "--config", tiny, "--out_dir", tmp_path / "x", "--model.vocab_size", "200"
    )
    assert "200" in message
    assert not (tmp_path / "x").exists()


def test_short_data_is_refused(tiny, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("the cat")
    message = error_of(capsys, "--config", tiny, "--data.path", tmp_path / "short.txt")
    assert "token" in message
