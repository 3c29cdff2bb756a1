"""Reads params.json, the configuration of Meta's and Mistral's own folders, and their tensor names.

The settings follow the rule of huggingface_config: each is applied or refused by name.
"""

import re
from pathlib import Path
from typing import Any

from jaxllm.config import ModelConfig, round_up
from jaxllm.errors import InputError
from jaxllm.weights.huggingface_config import Page, validated

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_EMBEDDING, _GATE = "tok_embeddings.weight", "layers.0.feed_forward.w1.weight"


def tensor_name(name: str) -> str:
    """The Hugging Face name of a tensor, or `name` for an unknown one."""
    found = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name)
    if not found or (new := _NAMES.get(found[2])) is None:
        return name  # refused later, by this name
    return f"model.{found[1]}{new}.weight" if found[1] else f"{new}.weight"


def model_config(page: dict[str, Any], path: Path, shapes: dict[str, list[int]]) -> ModelConfig:
    """The configuration in params.json; the tensors' shapes give the widths that it lacks.

    The file does not say whether RoPE is scaled by 8, as in Llama 3.1, or by 32, as in 3.2.
    """
    keys = Page(page, path)
    for name in (_EMBEDDING, _GATE):
        if len(shapes.get(name, ())) != 2:
            raise InputError(f"{path.parent} lacks the tensor {name}")
    vocab_size, d_ff = shapes[_EMBEDDING][0], shapes[_GATE][0]
    if keys.get("vocab_size", -1) not in (-1, vocab_size):  # Llama 1 and 2 have -1
        raise InputError(
            f"{path}: vocab_size={page['vocab_size']!r}, but {_EMBEDDING} has {vocab_size} rows"
        )
    multiple, width = keys.get("multiple_of", None), keys.get("hidden_dim", d_ff)
    factor = keys.get("ffn_dim_multiplier", None)
    if multiple is not None:
        width = int(2 * 4 * keys.number("dim") / 3)
        width = int(width * (1 if factor is None else keys.number("ffn_dim_multiplier")))
        width = round_up(width, int(keys.number("multiple_of")))
    if width != d_ff:
        raise InputError(f"{path}: its feed-forward width is {width}, but {_GATE} has {d_ff} rows")
    mistral = "hidden_dim" in page
    window = keys.get("sliding_window", None)
    theta = keys.get("rope_theta", None)
    if theta is None and mistral and window is None:
        raise InputError(f"{path} lacks rope_theta, whose default depends on the version")
    scaling, factor = None, keys.get("rope_scaling_factor", None)
    high = keys.get("rope_high_freq_factor", None)
    if keys.get("use_scaled_rope", False):
        if factor is None:
            raise InputError(
                f"{path} has use_scaled_rope but no factor; add rope_scaling_factor to it"
                " (8 for Llama 3.1, 32 for 3.2), or use the folder with a config.json"
            )
        scaling = dict(factor=factor) | ({} if high is None else dict(high_freq_factor=high))
    longest = 131072 if scaling else 32768 if mistral else 8192
    keys.only("model_type", "transformer")
    keys.only("causal", True)
    found = validated(
        dict(
            type="llama3",
            vocab_size=vocab_size,
            n_layers=keys.need("n_layers"),
            n_heads=keys.need("n_heads"),
            n_kv_heads=keys.get("n_kv_heads", page["n_heads"]),
            d_model=keys.need("dim"),
            d_head=keys.get("head_dim", None),
            d_ff=d_ff,
            max_seq_len=keys.get("max_seq_len", keys.get("max_position_embeddings", longest)),
            window=window,
            rope_theta=10000.0 if theta is None else theta,
            rope_scaling=scaling,
            tie_embeddings=keys.get("tied_embeddings", "output.weight" not in shapes),
            norm_eps=keys.get("norm_eps", 1e-5),
        ),
        path,
        {"n_layers": "n_layers", "d_model": "dim", "d_head": "head_dim"},
    )
    keys.refuse_rest({"max_batch_size", "vision_chunk_size", "vision_max_num_chunks"})
    return found
