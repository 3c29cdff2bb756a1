"""Makes Hugging Face folders of the fixtures' models, for tests and fixtures/make_scores.py."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxllm.weights.places import places

FIXTURES = Path(__file__).resolve().parent / "fixtures"
LLAMA = dict(
    model_type="llama",
    vocab_size=67,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=16,
    head_dim=8,
    intermediate_size=24,
    max_position_embeddings=48,
    rms_norm_eps=1e-5,
)
SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
)
YARN = dict(factor=4.0, original_max_position_embeddings=12, beta_fast=1.0, beta_slow=0.01)
PUBLISHED = dict(  # config.json of Llama's relatives as published, but for the sizes
    vocab_size=67, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    hidden_size=16, intermediate_size=24, max_position_embeddings=48, hidden_act="silu",
    initializer_range=0.02, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16", use_cache=True,
    rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False, attention_dropout=0.0,
)  # fmt: skip
OF_LLAMA = dict(
    model_type="llama", attention_bias=False, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5,
    head_dim=8,
)  # fmt: skip
QWEN = dict(rms_norm_eps=1e-6, max_window_layers=1, use_sliding_window=False)
RELATIVES = {
    "mistral": dict(model_type="mistral", rms_norm_eps=1e-6, sliding_window=5),
    "qwen2": QWEN | dict(model_type="qwen2", sliding_window=48, tie_word_embeddings=True),
    "qwen3": QWEN | dict(model_type="qwen3", sliding_window=None, head_dim=8, attention_bias=False),
    "smollm2": OF_LLAMA
    | dict(is_llama_config=True, rope_interleaved=False, rope_theta=100000)
    | {"transformers.js_config": {"dtype": "q4"}, "tie_word_embeddings": True},
    "tinyllama": OF_LLAMA,
    "r1-distill-llama": OF_LLAMA
    | dict(rope_theta=500000.0, rope_scaling=SCALING | dict(rope_type="llama3")),
    "yarn-llama-2": OF_LLAMA
    | dict(rope_scaling=YARN | dict(rope_type="yarn", attention_factor=1.2)),
}
WEIGHTS = {"smollm2": "llama3_tied"}
WEIGHTS |= dict.fromkeys(("tinyllama", "r1-distill-llama", "yarn-llama-2"), "llama3")
XLSTM = dict(  # xLSTM 7B's config.json as published, but for the sizes and eps
    add_embedding_dropout=False, add_forward_backend_padding=False, add_out_norm=True,
    add_post_blocks_norm=True, add_post_norm=False, add_qk_norm=False, use_bias=False,
    autocast_kernel_dtype="bfloat16", cell_norm_eps=1e-6, norm_eps=1e-6,
    chunkwise_kernel="chunkwise--triton_xl_chunk", step_kernel="triton",
    ffn_round_up_to_multiple_of=64, mlstm_round_up_to_multiple_of=64, force_bos_token_insert=True,
    gate_soft_cap=15.0, output_logit_soft_cap=30.0, head_dim=8, igate_bias_init_range=-10.0,
    inference_state_dtype="float32", mode="inference", norm_reduction_force_float32=True,
    qk_dim_factor=0.5, v_dim_factor=1.0, return_last_states=True,
    sequence_kernel="native_sequence__triton", tie_word_embeddings=False, weight_mode="single",
)  # fmt: skip
PAGES = {  # the relevant parts of config.json as transformers writes it
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=67,
        n_layer=2,
        n_head=2,
        n_embd=16,
        n_inner=40,
        n_positions=48,
        activation_function="gelu_new",
    ),
    "llama3": LLAMA | dict(rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, **SCALING)),
    "llama3_tied": LLAMA | dict(tie_word_embeddings=True, rope_theta=10000.0, rope_scaling=None),
    "xlstm": XLSTM
    | dict(
        model_type="xlstm",
        vocab_size=67,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        ffn_proj_factor=4.0,
        chunk_size=16,
        eps=0.0,
    ),
} | {name: PUBLISHED | page for name, page in RELATIVES.items()}


def from_huggingface(config, tensors):
    """{our dotted path: array} of {Hugging Face name: array}."""
    found = {}
    for place in places(config):
        found |= place.to_ours(config, tensors[place.name])
    return found


def to_huggingface(config, arrays):
    """{Hugging Face name: array}, the inverse of `from_huggingface`."""
    return {place.name: place.to_theirs(config, arrays) for place in places(config)}


def fixture(name):
    return load_file(FIXTURES / f"{name}.safetensors")


def weights_of(name):
    stored = fixture(WEIGHTS.get(name, name))
    return {k: v for k, v in stored.items() if f"grad.{k}" in stored}


def folder_of(folder, name, tensors=None, **page):
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True)
    save_file(weights_of(name) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PAGES[name] | page))
    return folder


ADAPTED = {  # targets of adapters_for
    "mistral": ["q_proj", "k_proj", "o_proj"],
    "qwen2": ["k_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "gate_proj"],
}


def adapters_for(folder, name):
    """A relative of Llama as `folder`/base, and adapters of rank 3 with rslora as peft's folder."""
    base, rng, tensors = folder_of(folder / "base", name), np.random.default_rng(0), {}
    for key, x in sorted(weights_of(name).items()):
        module = key.removesuffix(".weight")
        if module.rpartition(".")[2] in ADAPTED[name] and key != module:
            for part, shape in (("A", (3, x.shape[1])), ("B", (x.shape[0], 3))):
                array = (0.3 * rng.standard_normal(shape)).astype(np.float32)
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = array
    save_file(tensors, folder / "adapter_model.safetensors")
    page = dict(peft_type="LORA", task_type="CAUSAL_LM", r=3, lora_alpha=2, use_rslora=True)
    page |= dict(base_model_name_or_path=str(base), target_modules=ADAPTED[name])
    (folder / "adapter_config.json").write_text(json.dumps(page))
    return folder


def family_folder(folder, family):
    """A folder of a family of tokenizers (fixtures/text) with a tiny model of its type."""
    text = FIXTURES / "text" / family
    page = json.loads((text / "config.json").read_text())
    kind = page["model_type"]
    name = kind if kind in ("gpt2", "mistral", "qwen2") else "tinyllama"
    page |= {"vocab_size": 512, "model_type": PAGES[name]["model_type"]}
    page |= {"n_positions": 64} if name == "gpt2" else {"max_position_embeddings": 64}
    tables = ("wte.weight", "embed_tokens.weight", "lm_head.weight")
    rows = lambda x, n: np.resize(x, (n, x.shape[1]))
    tensors = {
        key: rows(x, 512) if key.endswith(tables) else x for key, x in weights_of(name).items()
    }
    tensors = {key: rows(x, 64) if "wpe" in key else x for key, x in tensors.items()}
    folder_of(folder, name, tensors, **page)
    for path in text.iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    return folder


def text_files(folder):
    """{name: SHA-256} of the files without tensors."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".safetensors")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def meta_folder(folder, **page):
    """Meta's names and order: it rotates rows 2j and 2j + 1 of a head together."""
    names = dict(input_layernorm="attention_norm", post_attention_layernorm="ffn_norm")
    names |= {f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkvo"}
    names |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "lm_head": "output"}
    names |= {"embed_tokens": "tok_embeddings"}
    tensors = {}
    for key, x in weights_of("llama3").items():
        new = key.removeprefix("model.")
        for a, b in names.items():
            new = new.replace(a, b)
        if new.endswith(("wq.weight", "wk.weight")):
            meta = np.empty_like(x)
            for row in range(len(x)):
                head, i = divmod(row, 8)
                meta[8 * head + 2 * (i % 4) + i // 4] = x[row]
            x = meta
        tensors[new] = x
    folder.mkdir()
    save_file(tensors, folder / "consolidated.safetensors")
    keys = dict(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, norm_eps=1e-5, rope_theta=10000.0)
    (folder / "params.json").write_text(json.dumps(keys | page))
    return folder
