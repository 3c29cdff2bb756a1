"""Hugging Face folders are read as by transformers; each setting is applied or refused."""

from pathlib import Path

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
)
from loaded_models import logits

from jaxllm.errors import InputError
from jaxllm.weights.huggingface_config import config_json, model_config
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
        dict(rope_scaling=YARN | {"truncate": None, "rope_type": "yarn"}),
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
        dict(scale_attn_weights=None),
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
