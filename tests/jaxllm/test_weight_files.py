"""The files and tensors of a folder are read as by transformers, or named in one line."""

import json
import shutil
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from cases import slow
from huggingface_folders import PAGES, folder_of, meta_folder, weights_of
from safetensors.numpy import save_file

from jaxllm.data.paths import find_files
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer
from jaxllm.text.files import Pages
from jaxllm.weights.huggingface import AHEAD, read_ahead
from jaxllm.weights.places import places
from jaxllm.weights.pretrained import open_weights


def first_tensor(folder):
    weights = open_weights(folder)
    return weights.param("embedding.wte")[0, 0]


def test_which_files_count(tmp_path, capsys):
    folder = folder_of(tmp_path / "hf", "llama3")
    right = weights_of("llama3")["model.embed_tokens.weight"][0, 0]
    other = {name: x + 1 for name, x in weights_of("llama3").items()}
    shard, index = "model-00001-of-00001.safetensors", folder / "model.safetensors.index.json"
    save_file(other, folder / shard)
    save_file(other, folder / "model.fp16.safetensors")
    save_file(other, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert first_tensor(folder) == right
    assert capsys.readouterr().err == ""
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, shard)}))
    assert first_tensor(folder) == right
    assert "model.safetensors is read, not model.safetensors.index.json" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert first_tensor(folder) == right + 1
    for name in ("sub folder/é", "./a.safetensors"):  # the names of files are free
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        save_file(other, path)
        index.write_text(json.dumps({"weight_map": dict.fromkeys(other, name)}))
        assert first_tensor(folder) == right + 1
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, "../hf/a.safetensors")}))
    with pytest.raises(InputError, match="which is not in its folder"):
        open_weights(folder)
    (folder / "a.safetensors").unlink()
    index.unlink()
    with pytest.raises(InputError, match=r"holds no model\.safetensors and no .*consolidated"):
        open_weights(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"adapter_config\.json: base_model_name_or_path=None"):
        open_weights(folder)

    # Mistral's folders hold its own files beside those for transformers.
    meta = meta_folder(tmp_path / "meta", head_dim=8)
    (meta / "config.json").write_text(json.dumps(PAGES["llama3"]))
    assert first_tensor(meta) == right
    save_file(other, meta / "model.safetensors")
    assert first_tensor(meta) == right + 1

    pointer = folder_of(tmp_path / "pointer", "llama3")
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid")
    with pytest.raises(InputError, match="git lfs pull"):
        open_weights(pointer)


def test_a_path_around_or_inside_a_folder_of_weights_is_told_from_it(tmp_path):
    folder = folder_of(tmp_path / "models--a--b/snapshots/0f", "llama3")
    two = shutil.copytree(folder, tmp_path / "models--a--two/snapshots/1f")
    shutil.copytree(folder, two.parent / "0f")
    (two.parents[1] / "refs").mkdir()
    (two.parents[1] / "refs/main").write_text("1f")
    run = tmp_path / "run"
    (run / "checkpoints/6/state").mkdir(parents=True)
    (run / "config.yaml").touch()
    (tmp_path / "none").mkdir()
    for path, meant in (
        (folder / "model.safetensors", folder),
        (tmp_path / "models--a--b", folder),  # the Hub's cache
        (folder.parent, folder),
        (two.parents[1], two),  # its newest snapshot
        (two.parent, two),
        (run / "checkpoints/6/state", run),
        (tmp_path / "none", None),
    ):
        with pytest.raises(InputError, match="is neither a Hugging Face folder") as caught:
            open_weights(path)
        assert str(caught.value).endswith(f"; name {meant}" if meant else "checkpoints)")
    for name in ("model.safetensors", "config.json"):  # as in a cache that was copied by cp -r
        (folder / name).unlink()
        (folder / name).symlink_to("../blobs/1")
        with pytest.raises(InputError, match=rf"; {name} is a link to \.\./blobs/1, which"):
            open_weights(folder)
    with pytest.raises(InputError, match=r"config\.json cannot be read as JSON"):
        Pages(folder)  # not as if it were missing
    with pytest.raises(InputError, match="hf download org/name --local-dir DIR$"):
        open_weights("org/name")
    with pytest.raises(InputError, match="hf download org/name --local-dir DIR$"):
        Tokenizer("org/name")
    for kind in ("text", "shards"):
        with pytest.raises(InputError, match="download org/name --repo-type dataset --local-dir"):
            find_files(kind, "org/name")
    with pytest.raises(InputError, match="a Hugging Face folder$"):
        open_weights(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.gguf", "tf_model.h5", "model.npz", "a.ckpt"]
)
def test_weights_of_another_format_are_named_with_the_way_out(name, tmp_path):
    folder = folder_of(tmp_path / "hf", "llama3")
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InputError, match=f"; {name} is .*: write safetensors with save_"):
        open_weights(folder)


def test_harmless_tensors_and_missing_prefixes(tmp_path, capsys):
    buffer = np.ones(4, np.float32)
    names = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    tensors = weights_of("llama3") | dict.fromkeys(names, buffer)
    bare = {name.removeprefix("model."): x for name, x in tensors.items()}
    mixed = tensors | {"norm.weight": tensors["model.norm.weight"]}
    del mixed["model.norm.weight"]
    half = {name: x.astype((np.float16, ml_dtypes.bfloat16, np.float64)[i % 3])
            for i, (name, x) in enumerate(tensors.items())}  # fmt: skip
    for i, stored in enumerate((tensors, bare, mixed, half)):
        weights = open_weights(folder_of(tmp_path / str(i), "llama3", stored))
        for place in places(weights.config):
            weights.param(place.ours[0])
    tied, name = weights_of("llama3_tied"), "model.embed_tokens.weight"
    renamed = {"lm_head.weight" if key == name else key: x for key, x in tied.items()}
    heads = [{"lm_head.weight": tied[name].astype(dtype)} for dtype in (np.float32, np.float64)]
    for i, stored in enumerate((tied, *(tied | head for head in heads), renamed)):
        weights = open_weights(folder_of(tmp_path / f"tied{i}", "llama3_tied", stored))
        assert weights.config.tie_embeddings
        np.testing.assert_array_equal(weights.param("embedding.wte")[:67], tied[name])
    assert capsys.readouterr().err == ""
    # transformers 5 keeps a stored head that differs from the embedding
    own = folder_of(tmp_path / "own", "llama3", tie_word_embeddings=True)
    assert open_weights(own).config == open_weights(tmp_path / "0").config
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().err


def test_wrong_tensors_are_named_in_one_line_with_their_shapes(tmp_path):
    tensors = weights_of("llama3")
    layer = "model.layers.0.self_attn."
    for name in "qkvo":
        tensors[f"{layer}{name}_proj.bias"] = np.ones(16, np.float32)
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    tensors["model.embed_tokens.weight"] = np.ones((70, 16), np.float32)
    with pytest.raises(InputError) as caught:
        open_weights(folder_of(tmp_path / "hf", "llama3", tensors))
    assert str(caught.value).endswith(
        "it lacks model.norm.weight [16], lm_head.weight [67, 16], has no place for"
        f" '{layer}k_proj.bias' [16], '{layer}o_proj.bias' [16], '{layer}q_proj.bias' [16] and 1"
        " more, holds model.embed_tokens.weight of shape [70, 16] instead of [67, 16];"
        " tie_word_embeddings=true uses the embedding as the head"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["gpt2", slow("llama3"), "llama3_tied", slow("xlstm")])
def test_a_device_converts_to_the_same_bits(name, dtype, tmp_path):
    tensors = {k: x.astype(dtype) for k, x in weights_of(name).items()}
    weights = open_weights(folder_of(tmp_path / "model", name, tensors))
    for ours in (ours for place in places(weights.config) for ours in place.ours):
        there, x = weights.param(ours, on_device=True), weights.param(ours)
        assert there.dtype == x.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(there), x)


def test_tensors_are_read_ahead_in_order_and_only_a_few():
    lock, reading, most = threading.Lock(), set(), 0

    def read(key):
        nonlocal most
        with lock:
            reading.add(key)
            most = max(most, len(reading))
        if key == 15:
            raise InputError("damaged")
        return key

    found = []

    def consume():
        for key in read_ahead(read, range(20)):
            found.append(key)
            time.sleep(0.01)  # the threads would go on if they could
            with lock:
                reading.discard(key)

    with pytest.raises(InputError, match="damaged"):
        consume()
    assert found == list(range(15))
    assert 1 < most <= AHEAD + 1


def quantized(*names, dtype=np.int32):
    """Tensors as another program's quantization stores a matrix: under these names."""
    tensors = weights_of("llama3")
    matrix = "model.layers.1.self_attn.q_proj."
    kept = {key: x for key, x in tensors.items() if not key.startswith(matrix)}
    return kept | {f"{matrix}{name}": np.ones((32, 2), dtype) for name in names}


FOREIGN = {  # the section of config.json, what is said of it, tensors
    "gptq": (
        dict(bits=4, checkpoint_format="gptq", damp_percent=0.01, desc_act=False, group_size=128,
             model_file_base_name=None, quant_method="gptq"),
        "bits: 4, quant_method: gptq",
        quantized("qweight", "qzeros", "g_idx"),
    ),
    "bitsandbytes": (
        dict(bnb_4bit_quant_type="nf4", load_in_4bit=True, load_in_8bit=False, _load_in_4bit=True,
             quant_method="bitsandbytes"),
        "bnb_4bit_quant_type: nf4, load_in_4bit: True, quant_method: bitsandbytes",
        quantized("weight", "weight.absmax", dtype=np.uint8),
    ),
    "compressed-tensors": (
        dict(config_groups={"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
             format="pack-quantized", quant_method="compressed-tensors"),
        "num_bits: 4, quant_method: compressed-tensors",
        quantized("weight_packed", "weight_shape"),
    ),
    "fp8": (
        dict(quant_method="fp8", weight_block_size=[128, 128]),
        "quant_method: fp8",
        quantized("weight", dtype=ml_dtypes.float8_e4m3fn),
    ),
    "a text": ("x", "x", quantized("weight", dtype=np.uint32)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FOREIGN))
def test_weights_that_others_quantized_are_named_with_the_way_out(name, tmp_path):
    section, said, tensors = FOREIGN[name]
    fix = "name the folder of the unquantized model, and pack it with jaxllm convert --quantize"
    for key in ("quantization_config", "quantization", "compression_config"):
        folder = folder_of(tmp_path / key, "llama3", tensors, **{key: section})
        with pytest.raises(InputError, match=f"{key}={said} is not supported; .*{fix}"):
            open_weights(folder)
    # config.json says nothing
    with pytest.raises(InputError, match=rf"q_proj\.\w+' is \w+, not F32 or .*{fix}"):
        open_weights(folder_of(tmp_path / "plain", "llama3", tensors))
    meta = meta_folder(tmp_path / "meta", head_dim=8, quantization=section)
    with pytest.raises(InputError, match=f"quantization={said} is not supported; .*{fix}"):
        open_weights(meta)


def in_parts(folder, changed=0.0):
    """The model in two files that both hold the norm; `changed` is added in the second one."""
    folder_of(folder, "llama3").joinpath("model.safetensors").unlink()
    tensors, norm = weights_of("llama3"), "model.norm.weight"
    files = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(tensors)}
    for i, file in enumerate(sorted(set(files.values()))):
        part = {key: x for key, x in tensors.items() if files[key] == file}
        save_file(part | {norm: tensors[norm] + i * np.float32(changed)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def test_parts_that_lack_or_repeat_something(tmp_path):
    right = weights_of("llama3")
    same = open_weights(in_parts(tmp_path / "same"))
    np.testing.assert_array_equal(same.param("norm.weight"), right["model.norm.weight"])
    with pytest.raises(InputError, match=r"'model\.norm\.weight' differs in model-00001.* and mod"):
        open_weights(in_parts(tmp_path / "other", 1.0))
    folder = tmp_path / "same"
    part = folder / "model-00002-of-00002.safetensors"
    shutil.copy(folder / "model-00001-of-00002.safetensors", part)
    with pytest.raises(InputError, match=r"puts '.*' into 'model-00002.*', where it is not"):
        open_weights(folder)
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])  # half a download
    with pytest.raises(InputError, match="file not fully covered; fetch it again"):
        open_weights(folder)
    part.unlink()
    with pytest.raises(InputError, match=f"No such file or directory: {part}; fetch it again"):
        open_weights(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"; rename model-00001.*safetensors, or fetch the index"):
        open_weights(folder)


def test_only_a_folder_with_an_embedding_is_told_to_tie_its_head(tmp_path):
    other = {f"module.{key}": x for key, x in weights_of("llama3").items()}
    with pytest.raises(InputError) as caught:
        open_weights(folder_of(tmp_path / "hf", "llama3", other))
    assert "tie_word_embeddings" not in str(caught.value)
