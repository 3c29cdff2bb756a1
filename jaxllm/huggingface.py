"""A Hugging Face folder: config.json, safetensors (one file or several), read and written.

Tensors pass one by one.  Whatever would make the model another one than its file says is refused by
name: a setting that we do not have, a tensor that is missing, unexpected or of another shape.
Pickles (.bin, .pth) are never opened.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from jaxllm.config import ModelConfig, round_up
from jaxllm.errors import InputError
from jaxllm.weights import Place, places, tied

DTYPES = {
    "float32": (np.dtype(np.float32), "F32"),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), "BF16"),
}
SHARD_BYTES = 5 * 10**9  # of one file; above it the Hub and its tools expect several
INDEX = "model.safetensors.index.json"
# Files of the tokenizer and of generation that go along with the weights.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
_READABLE = ("F32", "F16", "BF16")
# Tensors without parameters in them: masks and frequencies that older versions stored.
_BUFFERS = re.compile(
    r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|rope\.freqs"
)


class HuggingFaceWeights:
    """The weights in a folder, checked against its configuration when opened.

    config: of our model.  A folder with Meta's params.json and its names (in safetensors) is read
    too, see `_META`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files, self._stored = _open_files(folder)
        if (folder / "config.json").is_file():
            self.config = model_config(read_json(folder / "config.json"), folder / "config.json")
            self._interleaved = False
            bare = self.config.type == "gpt2" and "wte.weight" in self._stored
            if bare:  # OpenAI's own files: names of the model without its head
                self._rename(lambda n: n if n == "lm_head.weight" else f"transformer.{n}")
        else:
            path = folder / "params.json"
            shapes = {name: self._slice(name).get_shape() for name in self._stored}
            self.config = _meta_config(read_json(path), path, shapes)
            self._interleaved = True
            self._rename(_meta_name)
        self._check()

    def read(self, place: Place) -> dict[str, np.ndarray]:
        """{our dotted path: contiguous float32 array of its own} of one tensor."""
        parts = place.to_ours(self.config, self._read(place)).items()
        return {name: np.array(part, np.float32, order="C") for name, part in parts}

    def _read(self, place: Place) -> np.ndarray:
        file, name = self._stored[place.name]
        try:
            x = self._files[file].get_tensor(name)
        except SafetensorError as e:
            raise InputError(f"{self.folder / file} is damaged at {name}: {e}") from e
        rotated = place.name.endswith(("q_proj.weight", "k_proj.weight"))
        if self._interleaved and rotated and self.config.type == "llama3":
            # Meta rotates rows 2j and 2j + 1 of a head together, Hugging Face rows j and j + D/2.
            pairs = x.reshape(-1, self.config.head_dim // 2, 2, x.shape[-1])
            x = pairs.swapaxes(1, 2).reshape(x.shape)
        return x

    def _slice(self, name: str):
        file, stored = self._stored[name]
        return self._files[file].get_slice(stored)

    def _rename(self, new_name) -> None:
        renamed: dict[str, tuple[str, str]] = {}
        for name, at in self._stored.items():
            if new_name(name) in renamed:
                raise InputError(f"{self.folder} holds {name!r} under another name, too")
            renamed[new_name(name)] = at
        self._stored = renamed

    def _check(self) -> None:
        config = self.config
        if config.n_layers > len(self._stored):  # before so many names are made
            raise InputError(
                f"{self.folder} says {config.n_layers} layers, but holds only {len(self._stored)}"
                " tensors"
            )
        wanted = {place.name: place.shape(config) for place in places(config)}
        for name, shape in wanted.items():
            if name not in self._stored:
                raise InputError(
                    f"{self.folder} lacks the tensor {name}, which a {config.type} of"
                    f" {config.n_layers} layers has"
                )
            found = self._slice(name)
            if tuple(found.get_shape()) != shape:
                raise InputError(
                    f"{self.folder}: {name} has shape {list(found.get_shape())}, the configuration"
                    f" says {list(shape)}"
                )
            if found.get_dtype() not in _READABLE:
                raise InputError(
                    f"{self.folder}: {name} is {found.get_dtype()}, not one of"
                    f" {', '.join(_READABLE)}"
                )
        for name in sorted(self._stored.keys() - wanted.keys()):
            if _BUFFERS.fullmatch(name):
                continue
            if not (name == "lm_head.weight" and tied(config) and self._head_is_embedding()):
                raise InputError(
                    f"{self.folder} holds the tensor {name!r}, which a {config.type} of"
                    f" {config.n_layers} layers has not"
                )

    def _head_is_embedding(self) -> bool:
        head = self._slice("lm_head.weight")
        table = self._slice(places(self.config)[0].name)
        if head.get_shape() != table.get_shape() or head.get_dtype() != table.get_dtype():
            return False
        rows = self.config.vocab_size
        parts = [slice(i, min(i + 4096, rows)) for i in range(0, rows, 4096)]  # some MB at a time
        return all(np.array_equal(head[part], table[part]) for part in parts)


def _open_files(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """({file: opened}, {tensor: (file, name in it)}) of the safetensors in a folder."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            raise InputError(f"{folder / INDEX} has no weight_map of file names")
        names = sorted(set(listed.values()))
        for name in names:
            if Path(name).name != name:
                raise InputError(f"{folder / INDEX} names {name!r}, which is not in its folder")
    elif (folder / "model.safetensors").is_file():
        listed, names = {}, ["model.safetensors"]
    else:
        listed, names = {}, sorted(p.name for p in folder.glob("consolidated*.safetensors"))
    if not names:
        pickles = sorted(p.name for end in ("bin", "pth", "pt") for p in folder.glob(f"*.{end}"))
        why = f"; {pickles[0]} is a pickle, which is never opened" if pickles else ""
        raise InputError(f"{folder} holds no model.safetensors and no {INDEX}{why}")
    files, stored = {}, {}
    for name in names:
        try:
            # pyrefly: ignore[missing-attribute]
            files[name] = safe_open(folder / name, "numpy").__enter__()
            found = list(files[name].keys())
        except (SafetensorError, OSError) as e:
            raise InputError(f"{folder}: {name!r} cannot be read as safetensors: {e}") from e
        for tensor in found:
            if tensor in stored:
                raise InputError(
                    f"{folder}: {tensor!r} is in {stored[tensor][0]} and in {name}; parts of one"
                    " tensor cannot be joined here"
                )
            stored[tensor] = (name, tensor)
    for tensor, name in listed.items():
        if stored.get(tensor, ("",))[0] != name:
            raise InputError(f"{folder / INDEX} puts {tensor!r} into {name!r}, where it is not")
    return files, stored


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises InputError for anything else."""
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise InputError(f"{path} cannot be read as JSON: {' '.join(str(e).split())}") from e
    if not isinstance(page, dict):
        raise InputError(f"{path} holds {type(page).__name__}, not an object with keys")
    return page


def model_config(page: dict[str, Any], path: Path) -> ModelConfig:
    """Our configuration of the model of a config.json; `path` is for messages."""
    makers = {"gpt2": _gpt2, "llama": _llama, "xlstm": _xlstm}
    kind = page.get("model_type")
    if not isinstance(kind, str) or kind not in makers:
        raise InputError(f"{path}: model_type={kind!r} is not one of {', '.join(makers)}")
    if page.get("quantization_config"):
        raise InputError(f"{path}: quantization_config: quantized weights are not supported")
    return _validated(makers[kind](_Page(page, path)), path)


def _validated(fields: dict[str, Any], path: Path) -> ModelConfig:
    try:
        return TypeAdapter(ModelConfig).validate_python(fields)
    except ValidationError as e:
        error = e.errors()[0]
        key = ".".join(str(part) for part in error["loc"][1:])
        message = error["msg"].removeprefix("Value error, ")
        value = f"={error['input']!r}" if key else ""
        raise InputError(f"{path}: {key}{value}{': ' if key else ''}{message}"[:500]) from e


class _Page:
    """The keys of a configuration file, with errors that name them."""

    def __init__(self, page: dict[str, Any], path: Path):
        self.page, self.path = page, path

    def need(self, key: str):
        if self.page.get(key) is None:
            raise InputError(f"{self.path} lacks {key}")
        return self.page[key]

    def get(self, key: str, default):
        value = self.page.get(key)
        return default if value is None else value

    def number(self, key: str, default=None) -> float:
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise InputError(f"{self.path}: {key}={value!r} is not a positive number")
        return value

    def only(self, key: str, *allowed) -> None:
        """Refuses a setting that our model has not; the first one is the default."""
        if self.get(key, allowed[0]) not in allowed:
            names = " or ".join(map(repr, allowed))
            raise InputError(
                f"{self.path}: {key}={self.page[key]!r} is not supported, only {names}"
            )


def _gpt2(page: _Page) -> dict[str, Any]:
    page.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    page.only("scale_attn_weights", True)
    page.only("scale_attn_by_inverse_layer_idx", False)
    page.only("add_cross_attention", False)
    page.only("tie_word_embeddings", True)
    return dict(
        type="gpt2",
        vocab_size=page.need("vocab_size"),
        n_layers=page.need("n_layer"),
        n_heads=page.need("n_head"),
        d_model=page.need("n_embd"),
        d_ff=page.get("n_inner", None),
        max_seq_len=page.need("n_positions"),
        norm_eps=page.get("layer_norm_epsilon", 1e-5),
    )


def _llama(page: _Page) -> dict[str, Any]:
    page.only("hidden_act", "silu")
    page.only("attention_bias", False)
    page.only("mlp_bias", False)
    rope = page.get("rope_scaling", {}) or page.get("rope_parameters", {})  # transformers 4 and 5
    if not isinstance(rope, dict):
        raise InputError(f"{page.path}: rope_scaling={rope!r} is not an object with keys")
    rope = _Page(rope, page.path)
    rope.only("partial_rotary_factor", 1.0)
    if rope.page.get("rope_type") is None and rope.page.get("type") is not None:
        rope.page["rope_type"] = rope.page["type"]
    rope.only("rope_type", "default", "llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaled = rope.page.get("rope_type") == "llama3"
    return dict(
        type="llama3",
        vocab_size=page.need("vocab_size"),
        n_layers=page.need("num_hidden_layers"),
        n_heads=page.need("num_attention_heads"),
        n_kv_heads=page.get("num_key_value_heads", page.page["num_attention_heads"]),
        d_model=page.need("hidden_size"),
        d_head=page.get("head_dim", None),
        d_ff=page.need("intermediate_size"),
        max_seq_len=page.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta", page.get("rope_theta", 10000.0)),
        rope_scaling={key: rope.need(key) for key in keys} if scaled else None,
        tie_embeddings=page.get("tie_word_embeddings", False),
        norm_eps=page.get("rms_norm_eps", 1e-6),
    )


def _xlstm(page: _Page) -> dict[str, Any]:
    page.only("use_bias", False)
    page.only("tie_word_embeddings", False)
    page.only("add_out_norm", True)
    page.only("weight_mode", "single")
    page.only("qk_dim_factor", 0.5)
    page.only("v_dim_factor", 1.0)
    if page.page.get("eps") and page.number("eps") > 1e-5:  # ours is exact, as if it were 0
        raise InputError(f"{page.path}: eps={page.page['eps']} is not supported, only up to 1e-05")
    d_model = page.get("hidden_size", page.page.get("embedding_dim"))
    if not isinstance(d_model, int):
        raise InputError(f"{page.path}: hidden_size={d_model!r} is not a whole number")
    multiple = page.number("ffn_round_up_to_multiple_of", 64)
    wanted = d_model * page.number("ffn_proj_factor", 2.667)
    d_ff = int((wanted + multiple - 1) // multiple * multiple)
    return dict(
        type="vlstm",
        vocab_size=page.need("vocab_size"),
        n_layers=page.get("num_hidden_layers", page.page.get("num_blocks")),
        n_heads=page.need("num_heads"),
        d_model=d_model,
        d_ff=None if d_ff == round_up(int(2.667 * d_model), 64) else d_ff,
        max_seq_len=page.get("max_seq_len", 8192),  # any; xLSTM 7B has seen 8192
        gate_soft_cap=page.get("gate_soft_cap", 15.0),
        logit_soft_cap=page.get("output_logit_soft_cap", 30.0),
        norm_eps=page.get("norm_eps", 1e-6),
        chunk_size=page.get("chunk_size", 64),
    )


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model, the inverse of `model_config`; dtype: of the weights."""
    page = dict(
        vocab_size=config.vocab_size,
        torch_dtype=dtype,
        tie_word_embeddings=tied(config),
        # transformers' own defaults may lie outside this vocabulary
        bos_token_id=None,
        eos_token_id=None,
    )
    if config.type == "gpt2":
        return page | dict(
            model_type="gpt2",
            architectures=["GPT2LMHeadModel"],
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_embd=config.d_model,
            n_inner=config.d_ff,
            n_positions=config.max_seq_len,
            activation_function="gelu_new",
            layer_norm_epsilon=config.norm_eps,
        )
    if config.type == "llama3":
        scaling = config.rope_scaling
        return page | dict(
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            hidden_size=config.d_model,
            head_dim=config.head_dim,
            intermediate_size=config.d_ff,
            max_position_embeddings=config.max_seq_len,
            hidden_act="silu",
            rope_theta=config.rope_theta,
            rope_scaling=scaling and dict(rope_type="llama3", **scaling.model_dump()),
            rms_norm_eps=config.norm_eps,
            attention_bias=False,
            mlp_bias=False,
        )
    # Their width is factor x width rounded up: for widths that are no multiple of 64 the factor is
    # a little too large and rounding is left to the next whole number.
    given = config.d_ff is not None
    whole = given and config.ff_width % 64 != 0
    factor = (config.ff_width + (0.25 if whole else 0)) / config.d_model if given else 2.667
    return page | dict(
        model_type="xlstm",
        architectures=["xLSTMForCausalLM"],
        num_hidden_layers=config.n_layers,
        num_blocks=config.n_layers,
        num_heads=config.n_heads,
        hidden_size=config.d_model,
        embedding_dim=config.d_model,
        qk_dim_factor=0.5,
        v_dim_factor=1.0,
        use_bias=False,
        add_out_norm=True,
        weight_mode="single",
        ffn_proj_factor=factor,
        ffn_round_up_to_multiple_of=1 if whole else 64,
        gate_soft_cap=config.gate_soft_cap,
        output_logit_soft_cap=config.logit_soft_cap,
        norm_eps=config.norm_eps,
        eps=0.0,
        chunk_size=config.chunk_size,
        max_seq_len=config.max_seq_len,
    )


# Meta's own names of Llama, in the folders that also hold params.json.
_META = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"layers\.(\d+)\.attention\.w([qkvo])\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"model.layers.\1.mlp.up_proj.weight",
}


def _meta_name(name: str) -> str:
    for pattern, new in _META.items():
        if found := re.fullmatch(pattern, name):
            return found.expand(new)
    return name  # refused later, by this name


def _meta_config(page: dict[str, Any], path: Path, shapes: dict[str, list[int]]) -> ModelConfig:
    """The configuration of Meta's params.json; widths that it leaves out are read off the tensors.

    The file does not tell the stretching of Llama 3.1 (factor 8) from that of 3.2 (32).
    """
    keys = _Page(page, path)
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in shapes:
            raise InputError(f"{path.parent} lacks the tensor {name}")
    scaling = None
    if page.get("use_scaled_rope"):
        if page.get("rope_scaling_factor") is None:
            raise InputError(
                f"{path} has use_scaled_rope, but not its factor; add rope_scaling_factor to it"
                " (8 for Llama 3.1, 32 for 3.2), or use the folder with a config.json"
            )
        scaling = dict(factor=page["rope_scaling_factor"])
    return _validated(
        dict(
            type="llama3",
            vocab_size=shapes["tok_embeddings.weight"][0],
            n_layers=keys.need("n_layers"),
            n_heads=keys.need("n_heads"),
            n_kv_heads=keys.get("n_kv_heads", page["n_heads"]),
            d_model=keys.need("dim"),
            d_head=keys.get("head_dim", None),
            d_ff=shapes["layers.0.feed_forward.w1.weight"][0],
            max_seq_len=keys.get("max_seq_len", 131072 if scaling else 8192),
            rope_theta=keys.get("rope_theta", 10000.0),
            rope_scaling=scaling,
            tie_embeddings="output.weight" not in shapes,
            norm_eps=keys.get("norm_eps", 1e-5),
        ),
        path,
    )


def write_tensors(
    folder: Path, config: ModelConfig, dtype: str, arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes model.safetensors, in several files if large, with an index then.

    arrays: (Hugging Face's name, array) in the order of `places(config)`, taken one by one: the
    format allows it, since the header holds only names, shapes and places, all known before.
    """
    numpy_dtype, tag = DTYPES[dtype]
    shapes = {place.name: place.shape(config) for place in places(config)}
    sizes = {name: numpy_dtype.itemsize * int(np.prod(shape)) for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    for name in shapes:
        if files[-1] and sum(sizes[n] for n in files[-1]) + sizes[name] > SHARD_BYTES:
            files.append([])
        files[-1].append(name)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    remaining = iter(arrays)
    for file_name, tensors in zip(names, files, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in tensors:
            end = at + sizes[name]
            header[name] = {"dtype": tag, "shape": shapes[name], "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file_name).open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for expected in tensors:
                name, x = next(remaining)
                assert (name, x.shape) == (expected, shapes[name]), (name, x.shape)
                file.write(np.ascontiguousarray(x, numpy_dtype).tobytes())
    if len(files) > 1:
        weight_map = {n: f for f, group in zip(names, files, strict=True) for n in group}
        page = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(page, indent=2), encoding="utf-8")
