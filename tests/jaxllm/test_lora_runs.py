"""Runs with adapters: resume, export, merge, a packed or changed base, refusals."""

import shutil

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import error_of, final_state, write_tiny

import train
from jaxllm.errors import InputError
from jaxllm.infer import evaluate, generate
from jaxllm.weights import convert
from jaxllm.weights.pretrained import open_weights

pytestmark = pytest.mark.usefixtures("no_tf32")


PROMPT = ["--prompt", "the", "--tokens", "4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, words of a LoRA run): a tiny base as a run and as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("lora")
    words = ["--config", str(write_tiny(folder)), "--model.kernels", "xla", "--sample.tokens", "0"]
    # A run of more steps is the same program, which JAX finds in its cache.
    words += ["--train.eval_every", "0", "--optimizer.schedule", "constant"]
    assert train.main([*words, "--out_dir", str(folder / "run"), "--train.steps", "2"]) == 0
    assert convert.main([str(folder / "run"), str(folder / "hf")]) == 0
    words += ["--data.tokenizer", str(folder / "run" / "tokenizer.json")]
    words += ["--model.init_from", str(folder / "hf"), "--model.lora.rank", "4"]
    words += ["--train.steps", "4", "--train.checkpoint_every", "2"]
    options = ["--model.lora.dropout", "0.1", "--model.quantize", "int4"]
    options += ["--train.verify_every", "3"]
    assert train.main([*words, *options, "--out_dir", str(folder / "lora")]) == 0
    return folder, words


@pytest.mark.slow  # test_kills_and_full_disks.py kills runs of whole models
def test_a_killed_run_resumes_bit_for_bit(runs):
    folder, _ = runs
    again = folder / "again"
    shutil.copytree(folder / "lora", again)  # as a process leaves it that is killed after step 2
    shutil.rmtree(again / "checkpoints" / "4")
    (again / "report.html").unlink()
    moved = folder / "moved"  # what the run names may lie elsewhere now
    words = ["--model.init_from", str(moved), "--data.tokenizer", str(again / "tokenizer.json")]
    shutil.move(folder / "hf", moved)
    try:
        assert train.main(["--resume", "--out_dir", str(again), *words]) == 0
    finally:
        shutil.move(moved, folder / "hf")
    pair = [jax.tree.leaves(final_state(folder / name, 4)) for name in ("lora", "again")]
    for a, b in zip(*pair, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    saved = final_state(folder / "lora", 4)
    assert jax.tree.leaves(saved.base) == []
    assert sum(p.size for p in jax.tree.leaves(saved.params)) == 8192


def test_a_run_becomes_a_folder_of_peft_and_a_merged_model(runs, capsys):
    folder, _ = runs
    for words in (["peft"], ["merged", "--merge"], ["packed", "--merge", "--quantize", "int8"]):
        words = [str(folder / "lora"), str(folder / words[0]), *words[1:], "--group", "64"]
        words = words if "--quantize" in words else words[:-2]
        assert convert.main(words) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "peft").iterdir()
    }
    said = capsys.readouterr().out
    packed = "which cannot say that their base was int4, groups of 64; --merge keeps that"
    assert f"the adapters of step 4 as a folder of peft, {packed}\n" in said
    weights, empty = open_weights(folder / "lora"), folder / "of_run"
    weights.base = open_weights(folder / "run")
    empty.mkdir()
    said = convert._to_ours(weights, empty, empty, None, merge=False)
    assert f"cannot read their base {folder / 'run'}: name" in said
    with safe_open(folder / "merged" / "model.safetensors", "numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
    assert convert.main([str(folder / "merged"), str(folder / "again_run")]) == 0
    losses = {}
    for name in ("lora", "peft", "again_run", "packed"):
        capsys.readouterr()
        where = ["--data.source", "text", "--data.path", str(folder / "0.txt")]
        assert evaluate.main(["--checkpoint", str(folder / name), *where]) == 0
        losses[name] = float(capsys.readouterr().out.split("loss ")[1].split()[0])
        assert generate.main(["--checkpoint", str(folder / name), *PROMPT]) == 0
    # The merged model has the base as it was trained, in int4; the folder of peft the whole one.
    assert losses["again_run"] == pytest.approx(losses["lora"], rel=2e-3)
    assert losses["packed"] == pytest.approx(losses["lora"], rel=5e-3)
    assert losses["peft"] == pytest.approx(losses["lora"], rel=2e-2)


def test_a_folder_of_peft_is_no_run(runs, capsys):
    """--resume --restart began a run there, and replaced its config.yaml."""
    folder, words = runs
    peft = folder / "peft_of_run"
    assert convert.main([str(folder / "lora"), str(peft)]) == 0
    before = {path.name: path.read_bytes() for path in peft.iterdir()}
    for begin in (["--resume"], ["--resume", "--restart"], words):
        assert "holds adapters for peft" in error_of(capsys, *begin, "--out_dir", peft)
    assert {path.name: path.read_bytes() for path in peft.iterdir()} == before


def test_adapters_go_on_from_a_folder_of_peft(runs, capsys):
    folder, words = runs
    if not (folder / "peft2").exists():
        assert convert.main([str(folder / "lora"), str(folder / "peft2")]) == 0
    out = ["--model.init_from", str(folder / "peft2"), "--out_dir", str(folder / "on")]
    assert train.main([*words, *out, "--train.steps", "1"]) == 0
    other = ["--model.init_from", str(folder / "peft2"), "--out_dir", str(folder / "x")]
    line = error_of(capsys, *words, *other, "--model.lora.rank", "8")
    assert "model.lora.rank=8 differs from 4 of the adapters in" in line
    line = error_of(capsys, *words, *other, "--model.lora.targets", "q_proj")
    assert "model.lora.targets=['q_proj'] differs from ['q_proj', 'k_proj'" in line


@pytest.mark.slow
def test_a_packed_base_is_trained_as_it_is(runs, capsys):
    folder, words = runs
    packed = folder / "base_int8"
    words_of = ["--quantize", "int8", "--group", "64"]
    assert convert.main([str(folder / "hf"), str(packed), *words_of]) == 0
    words = [*words, "--model.init_from", str(packed)]
    assert train.main([*words, "--out_dir", str(folder / "on_packed"), "--train.steps", "1"]) == 0
    assert "the others are int8, groups of 64" in capsys.readouterr().out
    assert generate.main(["--checkpoint", str(folder / "on_packed"), *PROMPT]) == 0
    line = error_of(capsys, *words, "--out_dir", folder / "x", "--model.quantize", "int4")
    assert "holds packed weights (int8, groups of 64), not packed again: leave out model.qu" in line
    # The same weights before they were packed have the same checksum, and other losses.
    again = ["--resume", "--out_dir", folder / "on_packed", "--train.steps", "2"]
    line = error_of(capsys, *again, "--model.init_from", folder / "hf")
    wrong = "is not packed; the adapters need one that is int8, groups of 64"
    assert f"the base {folder / 'hf'} {wrong}" in line
    shutil.rmtree(packed)
    shutil.copytree(folder / "hf", packed)
    for command, more in ((generate, PROMPT), (convert, [str(folder / "z"), "--merge"])):
        name = ["--checkpoint"] * (command is generate)
        assert command.main([*name, str(folder / "on_packed"), *more]) == 2
        assert f"the base {packed} {wrong}" in capsys.readouterr().err


def test_a_base_that_changed_is_refused(runs, capsys):
    folder, _ = runs
    other = folder / "changed"
    shutil.copytree(folder / "hf", other)
    kept = folder / "hf_kept"
    tensors = load_file(folder / "hf" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01
    save_file(tensors, other / "model.safetensors")
    again = ["--resume", "--out_dir", folder / "lora", "--train.steps", "9"]
    line = error_of(capsys, *again, "--model.init_from", other)  # named anew beside the first
    assert f"the base {other} changed since the adapters were trained" in line
    shutil.move(folder / "hf", kept)
    try:
        line = error_of(capsys, *again)
        assert f"{folder / 'hf'} does not exist" in line
        shutil.copytree(kept, folder / "hf")
        save_file(tensors, folder / "hf" / "model.safetensors")
        line = error_of(capsys, *again)
        assert f"the base {folder / 'hf'} changed since the adapters were trained" in line
        assert generate.main(["--checkpoint", str(folder / "lora"), *PROMPT]) == 2
        assert "changed since the adapters were trained" in capsys.readouterr().err
        assert convert.main([str(folder / "lora"), str(folder / "y"), "--merge"]) == 2
        assert "changed since the adapters were trained" in capsys.readouterr().err
    finally:
        shutil.rmtree(folder / "hf", ignore_errors=True)
        shutil.move(kept, folder / "hf")


def test_a_base_that_trained_on_says_why_its_checkpoint_is_gone(runs):
    """The run of the base keeps its newest checkpoints, not the one that adapters need."""
    folder, _ = runs
    on = shutil.copytree(folder / "run", folder / "trains_on")
    newer = (on / "checkpoints" / "2").rename(on / "checkpoints" / "5")
    shutil.rmtree(newer / "metrics")
    with pytest.raises(InputError, match="step 2; it has 5: a run that trains on deletes old"):
        open_weights(on, 2)
    with pytest.raises(InputError, match="step 9; it has 5$"):
        open_weights(on, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.lora.targets", "q_proj,w_proj"], "names 'w_proj', which does not exist; there"),
        (["--train.fp8", "all"], "train.fp8=all does not go with model.lora"),
        (["--model.lora.dropout", "1"], "model.lora.dropout=1.0: must be less than 1"),
        (["--model.init_from", "null"], "model.lora needs model.init_from"),
        (["--model.lora", "null", "--model.quantize", "int4"], "quantize=int4 needs model.lora"),
    ],
)
def test_settings_that_do_not_fit_are_refused(runs, capsys, options, message):
    folder, words = runs
    if options[0] == "--model.lora":
        at = words.index("--model.lora.rank")
        words = [*words[:at], *words[at + 2 :]]
        options = options[2:]
    assert message in error_of(capsys, *words, "--out_dir", folder / "refused", *options)


def test_a_dry_run_refuses_the_weights_that_the_run_would_refuse(runs, capsys):
    _, words = runs
    at = words.index("--model.lora.rank")
    words = [*words[:at], *words[at + 2 :], "--model.rope_theta", "1000"]
    message = error_of(capsys, *words, "--dry_run")
    assert "model.rope_theta=1000.0 differs from 500000.0 of the weights in" in message
