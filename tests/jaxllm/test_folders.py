"""Hugging Face folders are read as by transformers; each setting is applied or refused."""

import json
import shutil
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from huggingface_folders import (
    LLAMA,
    PAGES,
    RELATIVES,
    SCALING,
    YARN,
    fixture,
    folder_of,
    meta_folder,
    weights_of,
)
from loaded_models import logits
from safetensors.numpy import save_file

from jaxllm.data.paths import find_files
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer
from jaxllm.text.files import Pages
from jaxllm.weights.huggingface import AHEAD, read_ahead
from jaxllm.weights.huggingface_config import config_json, model_config
from jaxllm.weights.places import places
from jaxllm.weights.pretrained import open_weights
from pallas_kernels import RopeScaling
from pallas_kernels.rotary import frequencies

# Keys of published config.json files (Llama 3.1, SmolLM2, TinyLlama, GPT-2, xLSTM 7B, fine-tunes)
# that do not affect the result.
METADATA = dict(
    _name_or_path="meta-llama/Llama-3.1-8B", architectures=["LlamaForCausalLM"], bos_token_id=1,
    eos_token_id=[2, 3], pad_token_id=0, initializer_range=0.02, pretraining_tp=2, use_cache=True,
    torch_dtype="bfloat16", transformers_version="4.43.0", attention_dropout=0.1, attn_pdrop=0.1,
    is_llama_config=True, rope_interleaved=False, unsloth_fixed=True, task_specific_params={"a": 1},
    quantization_config=None, summary_type="cls_index", reorder_and_upcast_attn=True, n_special=0,
    predict_special_tokens=True, _num_labels=1, is_causal=True, max_new_tokens=64,
    _flash_attn_2_enabled=True,
)  # fmt: skip
LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))
ROTARY = {"rope_type": "llama3", "rope_theta": 500.0} | SCALING


def read(name, **page):
    return model_config(PAGES[name] | page, Path("config.json"))


@pytest.mark.parametrize("name", list(PAGES))
def test_metadata_changes_nothing(name):
    assert read(name, **METADATA) == read(name)


REFUSED = {
    "llama3": [
        dict(hidden_act="gelu"), dict(attention_bias=True), dict(mlp_bias=True),
        dict(rope_scaling={"type": "linear"}), dict(rope_scaling={"factor": 2.0}),
        dict(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "rope_type": "yarn"}),
        dict(rope_scaling=YARN | {"truncate": False, "rope_type": "yarn"}),
        dict(rope_scaling={"rope_type": "longrope", "long_factor": [2.0] * 4}),
        dict(rope_scaling={"full_attention": ROTARY}),
        dict(rope_scaling=ROTARY | {"attention_factor": 0.5}), dict(partial_rotary_factor=0.5),
        dict(rope_scaling={"rope_type": "default", "partial_rotary_factor": 0.5}),
        dict(sliding_window=16), dict(logit_scale=0.5), dict(num_local_experts=8),
        dict(attn_logit_softcapping=50.0), dict(layer_types=["sliding_attention"] * 2),
        dict(per_layer_config={"0": {"mlp_bias": True}}), dict(rope_interleaved=True),
        dict(quantization_config={"quant_method": "fp8"}), dict(compression_config={"a": 1}),
        dict(transformers_weights="other.safetensors"), dict(tie_word_embeddings="no"),
        dict(tie_word_embeddings=None, model_type="qwen2_moe"), dict(is_causal=False),
    ],
    "qwen2": [dict(rope_scaling={"rope_type": "yarn"}), dict(attention_bias=True)],
    "qwen3": [dict(attention_bias=True), dict(num_experts=8), dict(mlp_bias=True)],
    "gpt2": [
        dict(activation_function="gelu"), dict(scale_attn_weights=False), dict(n_inner=0),
        dict(scale_attn_by_inverse_layer_idx=True), dict(add_cross_attention=True),
        dict(tie_word_embeddings=False), dict(hidden_size=32), dict(rope_scaling=LINEAR),
    ],
    "xlstm": [
        dict(use_bias=True), dict(weight_mode="fused"), dict(qk_dim_factor=1.0), dict(eps=0.1),
        dict(tie_word_embeddings=True), dict(num_blocks=1), dict(embedding_dim=32),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_setting_that_changes_the_result_is_refused_by_name(name):
    for page in REFUSED[name]:
        with pytest.raises(InputError) as caught:
            read(name, **page)
        assert any(key in str(caught.value) for key in page), (page, str(caught.value))
        assert "\n" not in str(caught.value)


def test_settings_are_applied_as_by_transformers():
    plain = LLAMA | dict(rope_theta=500.0)
    llama = lambda **page: model_config(plain | page, Path("config.json"))
    scaled = llama(rope_scaling=ROTARY)
    assert scaled.rope_scaling.model_dump(exclude_none=True) == SCALING
    old = {"type" if key == "rope_type" else key: x for key, x in ROTARY.items()}
    assert llama(rope_scaling=old) == scaled
    assert llama(rope_parameters=ROTARY) == scaled
    assert llama(rope_theta=7.0, rope_parameters=ROTARY) == scaled  # the inner one counts
    assert llama(rope_scaling=ROTARY, rope_parameters=LINEAR) == scaled  # the older name counts
    length = "original_max_position_embeddings"
    assert llama(rope_scaling=ROTARY | {length: 40}, **{length: 24}) == scaled  # the outer one
    without = {key: x for key, x in ROTARY.items() if key != length}
    assert llama(rope_scaling=without).rope_scaling.original_max_position_embeddings == 48
    assert llama(rope_scaling={"rope_type": "default", "factor": 2.0}) == llama()
    assert llama(hidden_act="swish", head_dim=None).head_dim == 4
    assert llama(num_key_value_heads=None).n_kv_heads == 4
    assert llama(sliding_window=5, use_sliding_window=False) == llama()
    assert llama(layer_types=["full_attention"] * 2) == llama()
    gpt2 = {key: x for key, x in PAGES["gpt2"].items() if key != "n_embd"}
    assert model_config(gpt2 | dict(hidden_size=16), Path("config.json")) == read("gpt2")
    blocks = dict(num_hidden_layers=None, num_blocks=2, hidden_size=None, embedding_dim=16)
    assert read("xlstm", **blocks) == read("xlstm")


def test_linear_scaling_divides_every_frequency():
    config = read("llama3", rope_scaling=LINEAR)
    scaling = RopeScaling(**config.rope_scaling.model_dump())
    np.testing.assert_array_equal(frequencies(8, 1e4, scaling), frequencies(8, 1e4) / 2)
    page = config_json(config, "float32")
    assert page["rope_scaling"] == LINEAR
    assert model_config(page, Path("config.json")) == config
    assert read("llama3", rope_scaling={"type": "linear", "factor": 2}) == config


def test_yarn_has_the_defaults_of_transformers_and_dynamic_is_plain(capsys):
    usual = {"type": "yarn", "factor": 4.0, "finetuned": True}
    found = read("llama3", rope_scaling=usual).rope_scaling.model_dump()
    assert found.pop("attention_factor") == pytest.approx(0.1 * np.log(4) + 1)
    expected = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=32.0)
    assert found == expected | dict(original_max_position_embeddings=48)
    whole = dict(beta_fast=None, beta_slow=0, truncate=True, original_max_position_embeddings=48)
    assert read("llama3", rope_scaling=usual | whole) == read("llama3", rope_scaling=usual)
    assert capsys.readouterr().err == ""
    plain = read("llama3", rope_parameters=None)
    assert read("llama3", rope_parameters=None, rope_scaling=DYNAMIC) == plain
    note = "note: config.json: rope_scaling: dynamic has no effect up to max_position_embeddings=48"
    assert capsys.readouterr().err == f"{note}, our limit\n"


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_llama_are_read_and_written(name, tmp_path):
    stored = fixture("relatives")
    right = stored[name]
    found = logits(folder_of(tmp_path / "hf", name), stored["tokens"])
    np.testing.assert_allclose(found, right, rtol=0, atol=4e-6 * np.abs(right).max())
    config = read(name)
    config = config.model_copy(update={"d_head": config.head_dim})
    page = config_json(config, "float32")
    assert model_config(page, Path("config.json")) == config
    same = {"model_type", "sliding_window", "use_sliding_window", "head_dim", "rope_scaling"}
    same |= {"tie_word_embeddings", "rms_norm_eps", "rope_theta", "num_key_value_heads"}
    given = {key: x for key, x in PAGES[name].items() if key in same}
    if "use_sliding_window" in given:
        given["sliding_window"] = None  # what transformers makes of it
    assert given.items() <= page.items()
    assert page["architectures"] == [f"{page['model_type'].title()}ForCausalLM"]


def test_a_mistral_has_a_window():
    mistral = lambda **page: read("llama3", model_type="mistral", **page)
    assert mistral().window == 4096
    assert mistral(sliding_window=None) == read("llama3")
    assert mistral(num_key_value_heads=None).n_kv_heads == 4
    assert read("mistral").window == 5
    layers = lambda *kinds: [f"{kind}_attention" for kind in kinds]  # as by its AutoModel
    assert mistral(layer_types=layers("full", "full")).window is None
    assert mistral(layer_types=layers("sliding", "sliding")) == mistral()
    for window, kinds in ((5, ("full", "sliding")), (None, ("sliding", "sliding"))):
        with pytest.raises(InputError, match="a window in some layers only is not supported"):
            mistral(sliding_window=window, layer_types=layers(*kinds))
    assert config_json(read("llama3"), "float32")["model_type"] == "llama"


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_window_of_qwen_holds_in_all_layers_or_is_refused(name):
    qwen = lambda **page: read(name, **{"sliding_window": 7} | page)
    layers = lambda *kinds: [f"{kind}_attention" for kind in kinds]
    assert qwen().window is None
    assert qwen(layer_types=layers("full", "full"), use_sliding_window=True).window is None
    assert qwen(max_window_layers=2, use_sliding_window=True).window is None
    assert qwen(max_window_layers=0).window is None
    found = qwen(max_window_layers=0, use_sliding_window=True, head_dim=8)
    assert found.window == 7
    slides = layers("sliding", "sliding")
    assert qwen(layer_types=slides, use_sliding_window=True, head_dim=8) == found
    page = config_json(found, "float32")
    assert model_config(page, Path("config.json")) == found
    assert (page["use_sliding_window"], page["max_window_layers"]) == (True, 0)
    for wrong in (
        dict(use_sliding_window=True),
        dict(use_sliding_window=True, layer_types=layers("full", "sliding")),
        dict(use_sliding_window=False, layer_types=slides),
    ):
        with pytest.raises(InputError, match="a window in some layers only is not supported"):
            qwen(**wrong)
    both = read(name).model_copy(update=dict(qkv_bias=True, qk_norm=True))
    refused = "qkv_bias=true, qk_norm=true cannot be converted: transformers has no such"
    with pytest.raises(InputError, match=refused):
        config_json(both, "float32")


META = {  # published forms of params.json, beside the keys of `meta_folder`
    "Llama 3.1": (dict(vocab_size=67, multiple_of=8, ffn_dim_multiplier=0.5), {}),
    "Llama 2": (dict(vocab_size=-1, max_seq_len=48, max_batch_size=4), dict(max_seq_len=48)),
    "Mistral": (dict(hidden_dim=24, vocab_size=67, sliding_window=4), dict(window=4)),
    "Mistral tied": (dict(hidden_dim=24, tied_embeddings=False, sliding_window=None), {}),
    "Mistral new": (dict(model_type="transformer", causal=True, max_position_embeddings=9), {}),
    "scaled": (dict(use_scaled_rope=True, rope_scaling_factor=8), {}),
}
META_REFUSED = [
    dict(vocab_size=66), dict(hidden_dim=32), dict(multiple_of=64), dict(ffn_dim_multiplier=0.5,
    multiple_of=32), dict(moe={"num_experts": 8}), dict(hidden_dim=24, rope_theta=None),
    dict(quantization={"qformat_weight": "fp8_e4m3"}), dict(yarn={"factor": 4}), dict(softcap=3.0),
    dict(lora_args={"rank": 8}), dict(vision_encoder={"a": 1}), dict(use_scaled_rope=True),
    dict(model_type="mamba"),
]  # fmt: skip


def test_params_json_is_applied_or_refused(tmp_path):
    for name, (page, expected) in META.items():
        config = open_weights(meta_folder(tmp_path / name, head_dim=8, **page)).config
        for key, value in expected.items():
            assert getattr(config, key) == value, name
        assert (config.vocab_size, config.d_ff, config.tie_embeddings) == (67, 24, False)
        assert (config.rope_scaling is not None) == (name == "scaled")
    for i, page in enumerate(META_REFUSED):
        folder = meta_folder(tmp_path / str(i), head_dim=8, **page)
        with pytest.raises(InputError) as caught:
            open_weights(folder)
        words = {"multiple_of": "width", "hidden_dim": "width", "rope_theta": "rope_theta"}
        assert any(words.get(key, key) in str(caught.value) for key in page), str(caught.value)


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
@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama3_tied", "xlstm"])
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
