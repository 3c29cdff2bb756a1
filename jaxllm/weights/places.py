"""Maps our parameters to the names and shapes of Hugging Face, and back.

A table for each model lists which of their tensors holds each of our parameters, and in which
shape.  A `Place` converts one tensor.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx

from jaxllm.config import ModelConfig
from jaxllm.errors import InputError
from jaxllm.models import abstract


class Place(NamedTuple):
    """A Hugging Face tensor and the parameters of ours that it holds.

    name: its Hugging Face name.
    dims: its shape, in the letters of `shape`.
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
        C, H = config.d_model, config.n_heads
        sizes = {"V": config.vocab_size, "C": C, "3C": 3 * C, "F": config.ff_width, "H": H}
        sizes["T"] = config.max_seq_len
        if config.type == "llama3":
            D = config.head_dim
            sizes |= dict(D=D, Q=H * D, K=config.n_kv_heads * D)
        elif config.type == "vlstm":
            sizes["Q"] = H * config.qk_dim
        return tuple(sizes[letter] for letter in self.dims.split())

    def to_ours(self, config: ModelConfig, x) -> dict[str, Any]:
        """{our dotted path: view or copy} of a Hugging Face tensor, in NumPy or JAX."""
        if self.form in ("rows", "columns"):
            x = np.pad(x, ((0, config.padded_vocab_size - x.shape[0]), (0, 0)))
        x = x.T if self.form in ("transposed", "columns") else x
        width = x.shape[-1] // len(self.ours)
        return {ours: x[..., i * width : (i + 1) * width] for i, ours in enumerate(self.ours)}

    def to_theirs(self, config: ModelConfig, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The Hugging Face tensor of our arrays, the inverse of `to_ours`."""
        x = np.concatenate([arrays[ours] for ours in self.ours], axis=-1)
        x = x.T if self.form in ("transposed", "columns") else x
        return x[: config.vocab_size] if self.form in ("rows", "columns") else x


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
    found = [p for p in [*table, *found] if not p.ours[0].endswith(tuple(absent))]
    theirs = {ours for place in found for ours in place.ours}
    own = {name for name in named_params(abstract(config, "none")) if ".adapter." not in name}
    if other := sorted(theirs ^ own):
        verb, folder = "has" if other[0] in own else "lacks", f"a Hugging Face {config.type}"
        raise InputError(f"this model {verb} {other[0]}, unlike {folder}")
    return found


def tied(config: ModelConfig) -> bool:
    """Whether the head is the token embedding."""
    return config.type == "gpt2" or (config.type == "llama3" and config.tie_embeddings)


def named_params(tree: nnx.Module | nnx.State) -> dict[str, nnx.Variable]:
    """{dotted path: parameter} of a model or of a state, such as its gradients."""
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree, nnx.Param)
    return {".".join(map(str, path)): p for path, p in nnx.to_flat_state(state)}


def difference(found: dict, wanted: dict, who: str = "config.yaml requires") -> str:
    """The first difference between a folder and its model, by name, or ""."""
    for name in [*wanted, *sorted(found.keys() - wanted.keys())]:
        has, needs = found.get(name, "not in it"), wanted.get(name, "no such name")
        if has != needs:
            return f"{name} is {has}; {who} {needs}"
    return ""


def map_params(state: nnx.State, value: Callable[[str, nnx.Variable], Any]) -> nnx.State:
    """The state with value(dotted path, variable) in every variable."""
    return nnx.map_state(lambda path, v: v.replace(value(".".join(map(str, path)), v)), state)


def _table(blocks: str, table: str) -> tuple[list[Place], list[Place]]:
    """(places of the model, of each block); blocks: the prefix of a block's tensor names."""
    whole, block = [], []
    for row in table.strip().splitlines():
        name, dims, ours, *form = (part.strip() for part in row.split("|"))
        # pyrefly: ignore[bad-argument-type]
        place = Place(name.replace("*", blocks), dims, tuple(ours.split()), *form)
        (block if name.startswith("*") else whole).append(place)
    return whole, block


# Their tensor (* a block's) | shape | ours | how ours differs
_TABLES = {
    # Its Conv1D is (in, out), as ours is.
    "gpt2": _table(
        "transformer.h.{i}.",
        """
        transformer.wte.weight | V C | embedding.wte | rows
        transformer.wpe.weight | T C | embedding.wpe
        transformer.ln_f.weight | C | norm.weight
        transformer.ln_f.bias | C | norm.bias
        *ln_1.weight | C | norm_1.weight
        *ln_1.bias | C | norm_1.bias
        *attn.c_attn.weight | C 3C | attention.q.weight attention.k.weight attention.v.weight
        *attn.c_attn.bias | 3C | attention.q.bias attention.k.bias attention.v.bias
        *attn.c_proj.weight | C C | attention.out.weight
        *attn.c_proj.bias | C | attention.out.bias
        *ln_2.weight | C | norm_2.weight
        *ln_2.bias | C | norm_2.bias
        *mlp.c_fc.weight | C F | mlp.up.weight
        *mlp.c_fc.bias | F | mlp.up.bias
        *mlp.c_proj.weight | F C | mlp.down.weight
        *mlp.c_proj.bias | C | mlp.down.bias
        """,
    ),
    "llama3": _table(
        "model.layers.{i}.",
        """
        model.embed_tokens.weight | V C | embedding.wte | rows
        model.norm.weight | C | norm.weight
        lm_head.weight | V C | head.weight | columns
        *input_layernorm.weight | C | norm_1.weight
        *self_attn.q_proj.weight | Q C | attention.q.weight | transposed
        *self_attn.k_proj.weight | K C | attention.k.weight | transposed
        *self_attn.v_proj.weight | K C | attention.v.weight | transposed
        *self_attn.o_proj.weight | C Q | attention.out.weight | transposed
        *self_attn.q_proj.bias | Q | attention.q.bias
        *self_attn.k_proj.bias | K | attention.k.bias
        *self_attn.v_proj.bias | K | attention.v.bias
        *self_attn.q_norm.weight | D | attention.q_norm.weight
        *self_attn.k_norm.weight | D | attention.k_norm.weight
        *post_attention_layernorm.weight | C | norm_2.weight
        *mlp.gate_proj.weight | F C | mlp.gate.weight | transposed
        *mlp.up_proj.weight | F C | mlp.up.weight | transposed
        *mlp.down_proj.weight | C F | mlp.down.weight | transposed
        """,
    ),
    "vlstm": _table(
        "backbone.blocks.{i}.",
        """
        backbone.embeddings.weight | V C | embedding.wte | rows
        backbone.out_norm.weight | C | norm.weight
        lm_head.weight | V C | head.weight | columns
        *norm_mlstm.weight | C | norm_1.weight
        *mlstm_layer.q.weight | Q C | vlstm.q.weight | transposed
        *mlstm_layer.k.weight | Q C | vlstm.k.weight | transposed
        *mlstm_layer.v.weight | C C | vlstm.v.weight | transposed
        *mlstm_layer.igate_preact.weight | H C | vlstm.i.weight | transposed
        *mlstm_layer.fgate_preact.weight | H C | vlstm.f.weight | transposed
        *mlstm_layer.ogate_preact.weight | C C | vlstm.o.weight | transposed
        *mlstm_layer.out_proj.weight | C C | vlstm.out.weight | transposed
        *mlstm_layer.igate_preact.bias | H | vlstm.i.bias
        *mlstm_layer.fgate_preact.bias | H | vlstm.f.bias
        *mlstm_layer.multihead_norm.weight | C | vlstm.norm.weight
        *norm_ffn.weight | C | norm_2.weight
        *ffn.proj_up_gate.weight | F C | mlp.gate.weight | transposed
        *ffn.proj_up.weight | F C | mlp.up.weight | transposed
        *ffn.proj_down.weight | C F | mlp.down.weight | transposed
        """,
    ),
}
