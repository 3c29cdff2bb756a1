"""Weights under Hugging Face's names and shapes, and back.

One table for each model says where every one of our parameters is kept there.  Both directions
work on plain dictionaries of numpy arrays, so that gradients can be renamed like weights.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.errors import InputError


class Place(NamedTuple):
    """Where parameters are kept: `name` holds `ours`, side by side in its last axis if several.

    form: "same"; "transposed" (PyTorch's linear layers are (out, in), ours (in, out)); "rows" and
    "columns": ours pads that axis of the vocabulary with zeros, and a head is also transposed.
    """

    name: str
    ours: tuple[str, ...]
    form: Literal["same", "transposed", "rows", "columns"] = "same"


def places(config: ModelConfig) -> list[Place]:
    """Every parameter of the model."""
    table, block = _TABLES[config.type]
    found = [
        Place(
            place.name.format(i=i),
            tuple(f"blocks.{i}.{ours}" for ours in place.ours),
            place.form,
        )
        for i in range(config.n_layers)
        for place in block
    ]
    tied = config.type == "gpt2" or (config.type == "llama3" and config.tie_embeddings)
    return [p for p in table if not (tied and p.ours == ("head.weight",))] + found


def from_huggingface(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{our dotted path: array} of tensors under Hugging Face's names; others are left alone.

    Raises InputError for a missing tensor.
    """
    found = {}
    for place in places(config):
        if place.name not in tensors:
            raise InputError(f"the weights lack {place.name}; are they of a {config.type}?")
        x = tensors[place.name]
        if place.form in ("rows", "columns"):
            x = np.pad(x, ((0, config.padded_vocab_size - x.shape[0]), (0, 0)))
        if place.form in ("transposed", "columns"):
            x = x.T
        parts = np.split(x, len(place.ours), axis=-1)
        found |= dict(zip(place.ours, parts, strict=True))
    return found


def to_huggingface(config: ModelConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{Hugging Face's name: array}, the inverse of `from_huggingface`."""
    found = {}
    for place in places(config):
        x = np.concatenate([np.asarray(arrays[ours]) for ours in place.ours], axis=-1)
        if place.form in ("transposed", "columns"):
            x = x.T
        if place.form in ("rows", "columns"):
            x = x[: config.vocab_size]
        found[place.name] = x
    return found


def set_params(model: nnx.Module, arrays: dict[str, np.ndarray]) -> None:
    """Puts {dotted path: array} into a model; raises InputError unless names and shapes agree."""
    params = named_params(model)
    if different := params.keys() ^ arrays.keys():
        raise InputError(f"weights and model differ in {', '.join(sorted(different)[:3])}")
    for path, param in params.items():
        if param.shape != arrays[path].shape:
            raise InputError(f"{path} has shape {arrays[path].shape}, the model {param.shape}")
        param[...] = jnp.asarray(arrays[path], param.dtype)


def named_params(tree: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    """{dotted path: parameter} of a model, or of a state such as its gradients."""
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree, nnx.Param)
    return {".".join(map(str, path)): p for path, p in nnx.to_flat_state(state)}


_GPT2 = (
    (
        Place("transformer.wte.weight", ("embedding.wte",), "rows"),
        Place("transformer.wpe.weight", ("embedding.wpe",)),
        Place("transformer.ln_f.weight", ("norm.weight",)),
        Place("transformer.ln_f.bias", ("norm.bias",)),
    ),
    (  # its Conv1D is (in, out), as ours is
        Place("transformer.h.{i}.ln_1.weight", ("norm_1.weight",)),
        Place("transformer.h.{i}.ln_1.bias", ("norm_1.bias",)),
        Place(
            "transformer.h.{i}.attn.c_attn.weight",
            ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
        ),
        Place(
            "transformer.h.{i}.attn.c_attn.bias",
            ("attention.q.bias", "attention.k.bias", "attention.v.bias"),
        ),
        Place("transformer.h.{i}.attn.c_proj.weight", ("attention.out.weight",)),
        Place("transformer.h.{i}.attn.c_proj.bias", ("attention.out.bias",)),
        Place("transformer.h.{i}.ln_2.weight", ("norm_2.weight",)),
        Place("transformer.h.{i}.ln_2.bias", ("norm_2.bias",)),
        Place("transformer.h.{i}.mlp.c_fc.weight", ("mlp.up.weight",)),
        Place("transformer.h.{i}.mlp.c_fc.bias", ("mlp.up.bias",)),
        Place("transformer.h.{i}.mlp.c_proj.weight", ("mlp.down.weight",)),
        Place("transformer.h.{i}.mlp.c_proj.bias", ("mlp.down.bias",)),
    ),
)
_LLAMA3 = (
    (
        Place("model.embed_tokens.weight", ("embedding.wte",), "rows"),
        Place("model.norm.weight", ("norm.weight",)),
        Place("lm_head.weight", ("head.weight",), "columns"),
    ),
    (
        Place("model.layers.{i}.input_layernorm.weight", ("norm_1.weight",)),
        *(
            Place(
                f"model.layers.{{i}}.self_attn.{theirs}_proj.weight",
                (f"attention.{ours}.weight",),
                "transposed",
            )
            for theirs, ours in [("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")]
        ),
        Place("model.layers.{i}.post_attention_layernorm.weight", ("norm_2.weight",)),
        *(
            Place(f"model.layers.{{i}}.mlp.{m}_proj.weight", (f"mlp.{m}.weight",), "transposed")
            for m in ("gate", "up", "down")
        ),
    ),
)
_VLSTM = (
    (
        Place("backbone.embeddings.weight", ("embedding.wte",), "rows"),
        Place("backbone.out_norm.weight", ("norm.weight",)),
        Place("lm_head.weight", ("head.weight",), "columns"),
    ),
    (
        Place("backbone.blocks.{i}.norm_mlstm.weight", ("norm_1.weight",)),
        *(
            Place(
                f"backbone.blocks.{{i}}.mlstm_layer.{theirs}.weight",
                (f"vlstm.{ours}.weight",),
                "transposed",
            )
            for theirs, ours in [
                ("q", "q"),
                ("k", "k"),
                ("v", "v"),
                ("igate_preact", "i"),
                ("fgate_preact", "f"),
                ("ogate_preact", "o"),
                ("out_proj", "out"),
            ]
        ),
        Place("backbone.blocks.{i}.mlstm_layer.igate_preact.bias", ("vlstm.i.bias",)),
        Place("backbone.blocks.{i}.mlstm_layer.fgate_preact.bias", ("vlstm.f.bias",)),
        Place("backbone.blocks.{i}.mlstm_layer.multihead_norm.weight", ("vlstm.norm.weight",)),
        Place("backbone.blocks.{i}.norm_ffn.weight", ("norm_2.weight",)),
        Place("backbone.blocks.{i}.ffn.proj_up_gate.weight", ("mlp.gate.weight",), "transposed"),
        Place("backbone.blocks.{i}.ffn.proj_up.weight", ("mlp.up.weight",), "transposed"),
        Place("backbone.blocks.{i}.ffn.proj_down.weight", ("mlp.down.weight",), "transposed"),
    ),
)
_TABLES = {"gpt2": _GPT2, "llama3": _LLAMA3, "vlstm": _VLSTM}
