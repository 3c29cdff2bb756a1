"""Converts weights from Hugging Face folders and back by command (tests/fixtures)."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import slow
from flax import nnx
from huggingface_folders import (
    FIXTURES,
    PAGES,
    RELATIVES,
    fixture,
    folder_of,
    meta_folder,
    weights_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_models import abstract_model, logits
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import devices

import train
from jaxllm import config as configs
from jaxllm.data.shards import ShardWriter
from jaxllm.errors import InputError
from jaxllm.models import MODELS
from jaxllm.models.gpt2 import GPT2
from jaxllm.train.checkpoint import Checkpoints
from jaxllm.weights import convert, huggingface, huggingface_config
from jaxllm.weights import places as places_module
from jaxllm.weights.places import Place, places
from jaxllm.weights.pretrained import load_params, open_weights

REPO = Path(__file__).resolve().parents[2]


def sharded(folder, name):
    """A Hugging Face folder with two files and an index."""
    folder.mkdir()
    tensors = weights_of(name)
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(tensors)}
    for file in names:
        save_file({k: v for k, v in tensors.items() if weight_map[k] == file}, folder / file)
    (folder / "config.json").write_text(json.dumps(PAGES[name]))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def run(*words):
    return convert.main([str(word) for word in words])


def assert_same_tensors(folder, expected):
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(expected)
        assert file.metadata() == {"format": "pt"}
    for key, x in load_file(folder / "model.safetensors").items():
        assert x.dtype == expected[key].dtype
        assert x.tobytes() == expected[key].tobytes(), key


def assert_same_logits(directory, name):
    stored = fixture("relatives" if name in RELATIVES else name)
    expected = stored[name if name in RELATIVES else "logits"]
    found = logits(directory, stored["tokens"])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("name", [slow(x) if x in RELATIVES and x != "qwen3" else x for x in PAGES])
def test_a_round_trip_is_exact(name, tmp_path, capsys):
    theirs = folder_of(tmp_path / "theirs", name)
    shutil.copyfile(FIXTURES / "evaluation" / "tokenizer.json", theirs / "tokenizer.json")
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert run(theirs, ours) == 0
    assert run(ours, back) == 0
    assert capsys.readouterr().err == ""
    assert_same_logits(ours, name)
    assert_same_tensors(back, weights_of(name))
    written, given = open_weights(back).config, open_weights(theirs).config
    if name in RELATIVES:  # the width of a head is written even if it is the default
        given = given.model_copy(update={"d_head": given.head_dim})
    assert written == given
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", "ours", "back"}
    config = configs.load(str(ours / "config.yaml"))  # its init_from is its own directory
    saved = Checkpoints(ours / "checkpoints", 1)  # a checkpoint like those of a run
    restored = saved.restore(0, {"params": abstract_model(config.model)[1]})
    assert_equal_trees(restored["params"], load_params(open_weights(theirs), restored["params"]))
    assert config.model.init_from == str(ours)
    assert config.data.tokenizer == str(ours / "tokenizer.json")


def test_the_suggested_command_and_the_configuration_work_in_every_directory(
    tmp_path, monkeypatch, capsys
):
    theirs = folder_of(tmp_path / "theirs", "gpt2")
    monkeypatch.chdir(tmp_path)
    assert run(theirs, "its run") == 0
    words = shlex.split(capsys.readouterr().out.strip().rpartition("; to train on your text: ")[2])
    assert words[:4] == ["jaxllm", "train", "--config", f"{tmp_path}/its run/config.yaml"]
    assert words[4:] == ["--data.source", "text", "--data.path", "FILE_OR_FOLDER"]
    assert configs.load(words[3]).model.init_from == f"{tmp_path}/its run"
    assert run("its run", "packed", "--quantize", "int8", "--group", "none") == 0
    words = shlex.split(capsys.readouterr().out.strip().rpartition("; to use: ")[2])
    assert words == ["jaxllm", "generate", "--checkpoint", f"{tmp_path}/packed"]


def test_bfloat16_and_several_files(tmp_path, monkeypatch):
    theirs = sharded(tmp_path / "theirs", "llama3")
    expected = weights_of("llama3")
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert run(theirs, ours) == 0
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    assert run(ours, back, "--step", 0, "--dtype", "bfloat16") == 0
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(p.name for p in back.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index.values()))
    for name in files:
        assert sum(x.nbytes for x in load_file(back / name).values()) <= 4000
        for key, x in load_file(back / name).items():
            assert index[key] == name
            assert np.array_equal(x, expected.pop(key).astype(ml_dtypes.bfloat16))
    assert not expected
    assert run(back, tmp_path / "again") == 0  # reads bfloat16 and several files


def test_openai_names_and_a_stored_tied_head(tmp_path, capsys):
    tensors = {k.removeprefix("transformer."): v for k, v in weights_of("gpt2").items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 48, 48), np.float32)}  # the causal mask
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    assert run(folder_of(tmp_path / "theirs", "gpt2", tensors), tmp_path / "ours") == 0
    assert run(tmp_path / "ours", tmp_path / "back") == 0
    assert_same_tensors(tmp_path / "back", weights_of("gpt2"))
    for extra in (
        "transformer.ln_f.bias",
        "lm_head.weight",
    ):  # a duplicate; a head that is not the embedding
        changed = tensors | {extra: np.ones_like(tensors.get(extra, tensors["ln_f.bias"]))}
        assert_refused(
            folder_of(tmp_path / extra, "gpt2", changed), tmp_path / "none", extra, capsys
        )


def test_metas_names_and_rotary_order_are_read(tmp_path, capsys):
    theirs = meta_folder(tmp_path / "theirs", head_dim=8)
    assert run(theirs, tmp_path / "ours") == 0, capsys.readouterr().err
    assert run(tmp_path / "ours", tmp_path / "back") == 0
    assert_same_tensors(tmp_path / "back", weights_of("llama3"))
    scaled = meta_folder(tmp_path / "scaled", use_scaled_rope=True)
    assert run(scaled, tmp_path / "none") == 2
    assert "rope_scaling_factor" in capsys.readouterr().err


def edited(**changes):
    return lambda tensors: tensors | changes


def without(key):
    return lambda tensors: {k: v for k, v in tensors.items() if k != key}


QUERY = "model.layers.1.self_attn.q_proj.weight"
BAD = {
    "missing": (without(QUERY), {}, QUERY),
    "unexpected": (edited(**{"model.extra\n": np.ones(3, np.float32)}), {}, "'model.extra\\n'"),
    "shape": (edited(**{QUERY: np.ones((32, 15), np.float32)}), {}, QUERY),
    "transposed": (edited(**{QUERY: np.ones((16, 32), np.float32)}), {}, QUERY),
    "dtype": (edited(**{QUERY: np.ones((32, 16), np.int32)}), {}, QUERY),
    "bias": (None, {"attention_bias": True}, "attention_bias"),
    "layers": (None, {"num_hidden_layers": 10**15}, "layers"),
    "heads": (None, {"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
    "type": (None, {"hidden_size": "16"}, "hidden_size='16': must be a whole number"),
    "NaN": (edited(**{QUERY: np.full((32, 16), np.nan, np.float32)}), {}, f"{QUERY} holds nan"),
    "null": (None, {"num_attention_heads": None}, "num_attention_heads"),
    "rope": (None, {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    "model": (None, {"model_type": "gemma2"}, "gemma2"),
    "relative": (None, {"model_type": "qwen2"}, "q_proj.bias"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_unsupported_tensors_and_settings_are_refused_by_name(case, tmp_path, capsys):
    change, page, message = BAD[case]
    tensors = weights_of("llama3")
    folder = folder_of(tmp_path / "theirs", "llama3", change and change(tensors), **page)
    assert_refused(folder, tmp_path / "ours", message, capsys)


def test_heads_that_do_not_divide_the_width_are_those_of_a_mistral(tmp_path):
    """transformers refuses them in a Llama."""
    name = "model.layers.{}.self_attn.{}_proj.weight"
    tensors = weights_of("llama3")
    for i in range(2):  # three heads of 8 in a width of 16
        for x in "qkvo":
            key = name.format(i, x)
            rows = 8 if x in "kv" else 24
            new = tensors[key].T if x == "o" else tensors[key]
            new = np.ascontiguousarray(new[:rows])
            tensors[key] = np.ascontiguousarray(new.T) if x == "o" else new
    page = dict(num_attention_heads=3, num_key_value_heads=1)
    folder = folder_of(tmp_path / "theirs", "llama3", tensors, **page)
    assert run(folder, tmp_path / "ours") == 0
    assert run(tmp_path / "ours", tmp_path / "back") == 0
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["model_type"], written["sliding_window"]) == ("mistral", None)
    assert_same_tensors(tmp_path / "back", tensors)
    one, two = (logits(path, [[1, 2, 3]]) for path in (folder, tmp_path / "back"))
    np.testing.assert_array_equal(one, two)


def test_a_changed_byte_in_a_run_is_not_converted(tmp_path, capsys):
    assert run(folder_of(tmp_path / "theirs", "gpt2"), tmp_path / "ours") == 0
    files = (tmp_path / "ours" / "checkpoints").rglob("*")
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    errors = []
    for at in range(len(content) // 16, len(content), len(content) // 16):
        largest.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        capsys.readouterr()
        if run(tmp_path / "ours", tmp_path / f"back{at}") == 0:  # nothing reads this byte
            assert_same_tensors(tmp_path / f"back{at}", weights_of("gpt2"))
        else:
            errors.append(capsys.readouterr().err)
    assert all("is damaged" in line and "there is no earlier one" in line for line in errors)
    assert any("the checksum of params." in line for line in errors)


def assert_refused(folder, out, message, capsys):
    before = {p.name for p in out.parent.iterdir()}
    assert run(folder, out) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert {p.name for p in out.parent.iterdir()} == before


def test_damaged_and_foreign_folders_are_refused(tmp_path, capsys):
    out = tmp_path / "ours"
    folder = sharded(tmp_path / "theirs", "gpt2")
    first = "model-00001-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    whole, listed = (folder / first).read_bytes(), index.read_text()
    for cut in (0, 7, 100, len(whole) - 1):
        (folder / first).write_bytes(whole[:cut])
        assert_refused(folder, out, first, capsys)
    (folder / first).write_bytes(whole)
    index.write_text(listed.replace(first, f"../theirs/{first}"))
    assert_refused(folder, out, "not in its folder", capsys)
    index.write_text("[" * 100_000)
    assert_refused(folder, out, index.name, capsys)
    index.write_text(listed)
    (folder / "config.json").write_text("{")
    assert_refused(folder, out, "config.json", capsys)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "consolidated.00.pth").write_bytes(b"\x80\x04.")
    assert_refused(tmp_path / "pickled", out, "consolidated.00.pth is a pickle", capsys)
    assert_refused(tmp_path / "nothing", out, "nothing", capsys)
    out.mkdir()
    (out / "precious").write_text("kept")
    assert_refused(folder_of(tmp_path / "good", "gpt2"), out, "exists", capsys)
    assert (out / "precious").read_text() == "kept"
    link = tmp_path / "link"  # which a folder cannot replace, as it cannot replace a mount point
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    assert_refused(tmp_path / "good", link, "link exists: choose another folder", capsys)


@pytest.mark.parametrize("direction", ["ours", "theirs"])
def test_a_full_disk_leaves_nothing_behind(direction, tmp_path, monkeypatch, capsys):
    source = folder_of(tmp_path / "theirs", "gpt2")
    if direction == "theirs":
        assert run(source, source := tmp_path / "ours") == 0

    def no_space(*_):
        raise OSError(28, "No space left on device")

    name = "to_ours" if direction == "ours" else "to_theirs"
    monkeypatch.setattr(Place, name, no_space)
    before = {p.name for p in tmp_path.iterdir()}
    capsys.readouterr()
    assert run(source, tmp_path / "out") == 1
    assert "out: " in (error := capsys.readouterr().err)
    assert "No space left" in error
    assert {p.name for p in tmp_path.iterdir()} == before


def test_config_json_refuses_settings_that_transformers_lacks():
    model = configs.load("gpt2_small").model  # max_seq_len is 256
    for key, value in (("window", 255), ("softcap", 30.0)):
        with pytest.raises(InputError, match=rf"^model\.{key}={value} cannot be converted: "):
            huggingface_config.config_json(model.model_copy(update={key: value}), "float32")
    whole = huggingface_config.config_json(model.model_copy(update={"window": 256}), "float32")
    assert whole == huggingface_config.config_json(model, "float32")


def test_a_run_of_a_model_that_transformers_lacks_is_read_but_not_converted(
    tmp_path, monkeypatch, capsys
):
    made = tmp_path / "run"
    assert run(folder_of(tmp_path / "theirs", "gpt2"), made) == 0
    monkeypatch.delitem(places_module._TABLES, "gpt2")
    monkeypatch.delitem(huggingface_config.KINDS, "gpt2")
    assert logits(made, [[1, 2, 3]]).shape == (1, 3, 67)
    message = "model.type=gpt2 cannot be converted: transformers has no such model"
    assert_refused(made, tmp_path / "out", message, capsys)


def test_a_model_of_other_parameters_is_not_converted(tmp_path, monkeypatch, capsys):
    """Its own parameters were dropped in silence; those that it lacks were a KeyError."""

    def shared(config, **options):
        model = GPT2(config, **options)
        model.blocks[-1] = model.blocks[0]
        return model

    def scaled(config, **options):
        model = GPT2(config, **options)
        model.scale = nnx.Param(jnp.ones(()))
        return model

    theirs = folder_of(tmp_path / "theirs", "gpt2")
    config = open_weights(theirs).config
    for made, message in ((shared, "lacks blocks.1.attention.k.bias"), (scaled, "has scale")):
        monkeypatch.setitem(MODELS, "gpt2", made)
        message = f"this model {message}, unlike a Hugging Face gpt2"
        with pytest.raises(InputError, match=f"^{message}$"):
            places(config)  # of what is written
        assert_refused(theirs, tmp_path / "out", message, capsys)


@pytest.mark.parametrize("name", ["gpt2_1558m", "llama3_1b", "llama3_8b", "vlstm_124m", "xlstm_7b"])
def test_config_json_round_trip_keeps_the_model(name):
    config = configs.load(name).model
    for update in ({}, {"d_ff": 1000}, {"d_ff": 1001}):
        wanted = config.model_copy(update=update)
        page = json.loads(json.dumps(huggingface_config.config_json(wanted, "float32")))
        found = huggingface_config.model_config(page, Path("config.json"))
        free = ("kernels", "remat", "d_head", "compute_dtype", "residual_dtype")
        assert found.model_dump(exclude=free) == wanted.model_dump(exclude=free)
        assert getattr(found, "head_dim", 0) == getattr(wanted, "head_dim", 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_give_weights_or_an_error(data, tmp_path_factory):
    folder = folder_of(tmp_path_factory.mktemp("fuzz") / "theirs", "gpt2")
    path = folder / data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    content = bytearray(path.read_bytes())
    header = min(len(content), 4000)
    for at in data.draw(st.lists(st.integers(0, header - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.sampled_from(b'\x00\xff"0149,:{}[]-e.FU8'))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), header]))])
    try:
        weights = open_weights(folder)
        said = f"{len([weights.param(place.ours[0]) for place in places(weights.config)])} tensors"
    except InputError as error:  # reading a tensor finds its NaN
        said = str(error)
    assert "\n" not in said


@pytest.mark.slow
def test_training_starts_from_converted_weights_on_a_mesh(tmp_path, capsys):
    theirs = sharded(tmp_path / "theirs", "llama3")
    tokens = np.random.default_rng(0).integers(0, 67, 2000).astype(np.uint16)
    (tmp_path / "shards").mkdir()
    writer = ShardWriter(tmp_path / "shards" / "train_000000.bin", 67)
    writer.append(tokens)
    writer.close()
    assert run(theirs, tmp_path / "ours") == 0
    # In float32 a step of 1e-30 changes nothing, so the run keeps its initial weights.
    words = f"""--config {tmp_path / "ours" / "config.yaml"} --data.source shards --data.path
        {tmp_path / "shards"} --train.steps 1 --train.batch_size 4 --train.seq_len 16
        --optimizer.learning_rate 1e-30 --optimizer.warmup_steps 0 --sample.tokens 0
        --train.eval_batches 1 --mesh.fsdp 2""".split()

    def start(source, out, *more):
        words_now = [*words, "--model.init_from", str(source), "--out_dir", str(out), *more]
        return subprocess.run(
            [sys.executable, "train.py", *words_now],
            cwd=REPO,
            env=os.environ | devices(2),
            capture_output=True,
            text=True,
            check=False,
        )

    done = start(theirs, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "run", tmp_path / "back", "--step", 1) == 0
    assert_same_tensors(tmp_path / "back", weights_of("llama3"))

    (theirs / "tokenizer.json").write_text("not read")
    text = ["--data.source", "text", "--data.path", str(theirs / "tokenizer.json")]
    for change, said in (
        (text, "theirs/tokenizer.json"),
        (["--model.n_layers", "3"], "model.n_layers=3 differs from 2"),
        (["--model.init_from", str(tmp_path / "shards")], "neither a Hugging Face folder"),
    ):
        out = tmp_path / "refused"
        arguments = [*words, "--model.init_from", str(theirs), *change, "--out_dir", str(out)]
        arguments = [w for w in arguments if w not in ("--mesh.fsdp", "2")]
        capsys.readouterr()
        assert train.main(arguments) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()
    # A converted folder holds no moments and no data position, so it cannot be resumed.
    folder = ["--out_dir", str(tmp_path / "ours")]
    for words in (["--resume", *folder], ["--resume", "--restart", *folder]):
        assert train.main(words) == 2
        assert "holds weights from jaxllm convert, not a run to" in capsys.readouterr().err
    assert train.main(["--config", str(tmp_path / "ours" / "config.yaml"), *folder]) == 2
    assert "holds weights from jaxllm convert; name another" in capsys.readouterr().err
