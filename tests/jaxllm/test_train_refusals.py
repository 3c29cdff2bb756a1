"""Bad input to train.py gives one line and exit status 2, and writes nothing."""

import subprocess
import sys

import jax
import pytest
from training_runs import REPO, error_of

from jaxllm import config as configs
from pallas_kernels import dispatch

pytestmark = pytest.mark.usefixtures("same_environment")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--config is missing"),
        (["--config", "nothing"], "no configuration nothing"),
        (["--resume"], "--resume needs --out_dir"),
        (["--config", "llama3_small", "--train.step", "3"], "did you mean train.steps?"),
        (["--config", "llama3_small", "--train.steps"], "--train.steps needs a value"),
        (["--config", "llama3_small", "--train.steps", "--train.seed", "1"], "needs a value"),
        (["--config", "llama3_small", "12"], "unexpected argument 12"),
        (["--config", "llama3_small", "--train.batch_size", "0"], "train.batch_size=0"),
        (["--config", "llama3_small", "--train.seq_len", "512"], "exceeds model.max_seq_len=256"),
        (["--config", "llama3_small", "--model.n_kv_heads", "3"], "not a multiple of n_kv_heads=3"),
        (
            ["--config", "llama3_small", "--mesh.tensor", "7"],
            "set mesh.data=-1 and the other axes to divisors of",
        ),
        (["--config", "llama3_small", "--data.path", "/nothing", "--data.source", "text"], "/noth"),
        (
            ["--config", "llama3_small", "--data.path", "/nothing"],
            "not read with data.source=stdlib",
        ),
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
        (["--config", "llama3_small", "--out_dir", "train.py"], "out_dir train.py is a file"),
        (["--config", "llama3_small", "--out_dir", "train.py/x"], "train.py is a file; name anot"),
        (["--config", "llama3_small", "--out_dir", ""], "--out_dir is empty"),
    ],
)
def test_bad_command_lines_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    assert message in error_of(capsys, *words)


@pytest.mark.parametrize(
    ("key", "value"), [("model.window", "8"), ("model.softcap", "30"), ("data.pack", "documents")]
)
def test_a_resumed_run_cannot_change_what_a_token_sees(key, value, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    message = error_of(capsys, "--resume", "--out_dir", tmp_path, f"--{key}", value)
    assert f"{key}=" in message
    assert "of the run in" in message


WRONG_PATHS = """
train --config llama3_small --data.source text --data.path /nothing
train --config llama3_small --data.source shards --data.path * --data.val_path /nothing/*.bin
train --config llama3_small --data.tokenizer /nothing
train --config llama3_small --model.init_from /nothing
generate --checkpoint /nothing --prompt a
evaluate --checkpoint /nothing
evaluate --checkpoint RUN --data.source text --data.path /nothing
convert /nothing OUT --quantize int4
"""


def test_wrong_paths_are_reported_before_jax_is_imported(tmp_path):
    (tmp_path / "config.yaml").write_text(configs.load("gpt2_small").to_yaml())
    lines = WRONG_PATHS.strip().replace("RUN", str(tmp_path)).splitlines()
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
    assert all(error.startswith("error: ") and "/nothing" in error for error in errors)


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
