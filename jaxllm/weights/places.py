"""Maps our parameters to the names and shapes of Hugging Face, and back.

A table for each model lists which of their tensors holds each of our parameters, and in which
shape.  A `Place` converts one tensor; `from_huggingface` and `to_huggingface` convert dictionaries
of numpy arrays, such as weights or gradients.
"""

from typing import Literal, NamedTuple

import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.errors import InputError


class Place(NamedTuple):
    """A Hugging Face tensor and the parameters of ours that it holds.

    name: its Hugging Face name.
    dims: its shape, in the letters of `sizes`.
    ours: our dotted paths; several parameters are concatenated along the tensor's last axis.
    form: how ours differ: "transposed" (PyTorch's linear layers are (out, in), ours (in, out)),
        "rows" (our vocabulary axis is padded with zeros), "columns" (padded and transposed).
    """

    name: str
    dims: str
    ours: tuple[str, ...]
    form: Literal["same", "transposed", "rows", "columns"] = "same"

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        known = sizes(config)
        return tuple(known[letter] for letter in self.dims.split())

    def our_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape of each of our parameters."""
        first, *rest = self.shape(config)
        if self.form in ("rows", "columns"):
            first = config.padded_vocab_size
        shape = (first, *rest)
        if self.form in ("transposed", "columns"):
            shape = shape[::-1]
        return (*shape[:-1], shape[-1] // len(self.ours))

    def to_ours(self, config: ModelConfig, x: np.ndarray) -> dict[str, np.ndarray]:
        """{our dotted path: view or copy} of a Hugging Face tensor."""
        if self.form in ("rows", "columns"):
            x = np.pad(x, ((0, config.padded_vocab_size - x.shape[0]), (0, 0)))
        if self.form in ("transposed", "columns"):
            x = x.T
        return dict(zip(self.ours, np.split(x, len(self.ours), axis=-1), strict=True))

    def to_theirs(self, config: ModelConfig, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The Hugging Face tensor of our arrays, the inverse of `to_ours`."""
        parts = [np.asarray(arrays[ours]) for ours in self.ours]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        if self.form in ("transposed", "columns"):
            x = x.T
        if self.form in ("rows", "columns"):
            x = x[: config.vocab_size]
        return x


def sizes(config: ModelConfig) -> dict[str, int]:
    """The sizes that the letters of the tables stand for."""
    C, H = config.d_model, config.n_heads
    found = dict(V=config.vocab_size, C=C, T=config.max_seq_len, F=config.ff_width, H=H)
    if config.type == "gpt2":
        found |= {"3C": 3 * C}
    elif config.type == "llama3":
        found |= dict(Q=H * config.head_dim, K=config.n_kv_heads * config.head_dim)
        found |= dict(D=config.head_dim)
    elif config.type == "vlstm":
        found |= dict(Q=H * config.qk_dim)
    return found


def places(config: ModelConfig) -> list[Place]:
    """Every parameter of the model."""
    table, block = _TABLES[config.type]
    found = [
        place._replace(
            name=place.name.format(i=i), ours=tuple(f"blocks.{i}.{ours}" for ours in place.ours)
        )
        for i in range(config.n_layers)
        for place in block
    ]
    absent = ["head.weight"] * tied(config)
    if config.type == "llama3":
        absent += ["q.bias", "k.bias", "v.bias"] * (not config.qkv_bias)
        absent += ["q_norm.weight", "k_norm.weight"] * (not config.qk_norm)
    return [p for p in [*table, *found] if not p.ours[0].endswith(tuple(absent))]


def tied(config: ModelConfig) -> bool:
    """Whether the head is the token embedding."""
    return config.type == "gpt2" or (config.type == "llama3" and config.tie_embeddings)


def from_huggingface(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{our dotted path: array} of {Hugging Face name: array}; ignores other tensors.

    Raises InputError for a missing tensor.
    """
    found = {}
    for place in places(config):
        if place.name not in tensors:
            raise InputError(f"the weights lack {place.name}; are they of a {config.type}?")
        found |= place.to_ours(config, tensors[place.name])
    return found


def to_huggingface(config: ModelConfig, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{Hugging Face name: array}, the inverse of `from_huggingface`."""
    return {place.name: place.to_theirs(config, arrays) for place in places(config)}


def named_params(tree: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    """{dotted path: parameter} of a model or of a state, such as its gradients."""
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree, nnx.Param)
    return {".".join(map(str, path)): p for path, p in nnx.to_flat_state(state)}


_GPT2 = (
    (
        Place("transformer.wte.weight", "V C", ("embedding.wte",), "rows"),
        Place("transformer.wpe.weight", "T C", ("embedding.wpe",)),
        Place("transformer.ln_f.weight", "C", ("norm.weight",)),
        Place("transformer.ln_f.bias", "C", ("norm.bias",)),
    ),
    (  # its Conv1D is (in, out), as ours is
        Place("transformer.h.{i}.ln_1.weight", "C", ("norm_1.weight",)),
        Place("transformer.h.{i}.ln_1.bias", "C", ("norm_1.bias",)),
        Place(
            "transformer.h.{i}.attn.c_attn.weight",
            "C 3C",
            ("attention.q.weight", "attention.k.weight", "attention.v.weight"),
        ),
        Place(
            "transformer.h.{i}.attn.c_attn.bias",
            "3C",
            ("attention.q.bias", "attention.k.bias", "attention.v.bias"),
        ),
        Place("transformer.h.{i}.attn.c_proj.weight", "C C", ("attention.out.weight",)),
        Place("transformer.h.{i}.attn.c_proj.bias", "C", ("attention.out.bias",)),
        Place("transformer.h.{i}.ln_2.weight", "C", ("norm_2.weight",)),
        Place("transformer.h.{i}.ln_2.bias", "C", ("norm_2.bias",)),
        Place("transformer.h.{i}.mlp.c_fc.weight", "C F", ("mlp.up.weight",)),
        Place("transformer.h.{i}.mlp.c_fc.bias", "F", ("mlp.up.bias",)),
        Place("transformer.h.{i}.mlp.c_proj.weight", "F C", ("mlp.down.weight",)),
        Place("transformer.h.{i}.mlp.c_proj.bias", "C", ("mlp.down.bias",)),
    ),
)
_LLAMA3 = (
    (
        Place("model.embed_tokens.weight", "V C", ("embedding.wte",), "rows"),
        Place("model.norm.weight", "C", ("norm.weight",)),
        Place("lm_head.weight", "V C", ("head.weight",), "columns"),
    ),
    (
        Place("model.layers.{i}.input_layernorm.weight", "C", ("norm_1.weight",)),
        *(
            Place(
                f"model.layers.{{i}}.self_attn.{theirs}_proj.weight",
                dims,
                (f"attention.{ours}.weight",),
                "transposed",
            )
            for theirs, dims, ours in [
                ("q", "Q C", "q"),
                ("k", "K C", "k"),
                ("v", "K C", "v"),
                ("o", "C Q", "out"),
            ]
        ),
        *(
            Place(f"model.layers.{{i}}.self_attn.{x}_proj.bias", dims, (f"attention.{x}.bias",))
            for x, dims in [("q", "Q"), ("k", "K"), ("v", "K")]
        ),
        *(
            Place(f"model.layers.{{i}}.self_attn.{x}.weight", "D", (f"attention.{x}.weight",))
            for x in ("q_norm", "k_norm")
        ),
        Place("model.layers.{i}.post_attention_layernorm.weight", "C", ("norm_2.weight",)),
        *(
            Place(
                f"model.layers.{{i}}.mlp.{m}_proj.weight", dims, (f"mlp.{m}.weight",), "transposed"
            )
            for m, dims in [("gate", "F C"), ("up", "F C"), ("down", "C F")]
        ),
    ),
)
_VLSTM = (
    (
        Place("backbone.embeddings.weight", "V C", ("embedding.wte",), "rows"),
        Place("backbone.out_norm.weight", "C", ("norm.weight",)),
        Place("lm_head.weight", "V C", ("head.weight",), "columns"),
    ),
    (
        Place("backbone.blocks.{i}.norm_mlstm.weight", "C", ("norm_1.weight",)),
        *(
            Place(
                f"backbone.blocks.{{i}}.mlstm_layer.{theirs}.weight",
                dims,
                (f"vlstm.{ours}.weight",),
                "transposed",
            )
            for theirs, dims, ours in [
                ("q", "Q C", "q"),
                ("k", "Q C", "k"),
                ("v", "C C", "v"),
                ("igate_preact", "H C", "i"),
                ("fgate_preact", "H C", "f"),
                ("ogate_preact", "C C", "o"),
                ("out_proj", "C C", "out"),
            ]
        ),
        Place("backbone.blocks.{i}.mlstm_layer.igate_preact.bias", "H", ("vlstm.i.bias",)),
        Place("backbone.blocks.{i}.mlstm_layer.fgate_preact.bias", "H", ("vlstm.f.bias",)),
        Place("backbone.blocks.{i}.mlstm_layer.multihead_norm.weight", "C", ("vlstm.norm.weight",)),
        Place("backbone.blocks.{i}.norm_ffn.weight", "C", ("norm_2.weight",)),
        Place(
            "backbone.blocks.{i}.ffn.proj_up_gate.weight", "F C", ("mlp.gate.weight",), "transposed"
        ),
        Place("backbone.blocks.{i}.ffn.proj_up.weight", "F C", ("mlp.up.weight",), "transposed"),
        Place(
            "backbone.blocks.{i}.ffn.proj_down.weight", "C F", ("mlp.down.weight",), "transposed"
        ),
    ),
)
_TABLES = {"gpt2": _GPT2, "llama3": _LLAMA3, "vlstm": _VLSTM}
