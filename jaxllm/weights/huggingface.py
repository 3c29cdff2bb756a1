"""Reads and writes the safetensors of a Hugging Face folder, in one file or several.

Tensors are read and written one at a time.  A tensor that is missing, unexpected or of the wrong
shape is refused by name; huggingface_config does the same for settings.  Pickles (.bin, .pth) are
never opened.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.config import ModelConfig
from jaxllm.errors import InputError
from jaxllm.weights.huggingface_config import Page, model_config, read_json, validated
from jaxllm.weights.places import Place, places, tied

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TAGS = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}  # numpy's names and safetensors'
SHARD_BYTES = 5 * 10**9  # largest file; the Hub and its tools expect several files above it
INDEX = "model.safetensors.index.json"
# Files of the tokenizer and of generation that are copied with the weights.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
_READABLE = ("F32", "F16", "BF16")
# Tensors that are not parameters: masks and frequencies that older versions stored.
_BUFFERS = re.compile(
    r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    r"|rope\.freqs"
)


class HuggingFaceWeights:
    """The weights in a folder, checked against its configuration on opening.

    config: the configuration of our model.
    Also reads a folder with Meta's params.json and tensor names (`_META`) in safetensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files, self._stored = _open_files(folder)
        if (folder / "config.json").is_file():
            self.config = model_config(read_json(folder / "config.json"), folder / "config.json")
            self._interleaved = False
            bare = self.config.type == "gpt2" and "wte.weight" in self._stored
            if bare:  # OpenAI's own files name the tensors of the model without its head
                self._rename(lambda n: n if n == "lm_head.weight" else f"transformer.{n}")
        else:
            path = folder / "params.json"
            shapes = {name: self._slice(name).get_shape() for name in self._stored}
            self.config = _meta_config(read_json(path), path, shapes)
            self._interleaved = True
            self._rename(_meta_name)
        self._check()

    def read(self, place: Place) -> dict[str, np.ndarray]:
        """{our dotted path: contiguous float32 copy} of one tensor.

        Raises InputError if the tensor is damaged or not finite.
        """
        parts = place.to_ours(self.config, self._read(place)).items()
        found = {name: np.array(part, np.float32, order="C") for name, part in parts}
        for x in found.values():
            check_finite(x, f"{self.folder}: {place.name}")
        return found

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
                raise InputError(f"{self.folder} holds {name!r} under another name as well")
            renamed[new_name(name)] = at
        self._stored = renamed

    def _check(self) -> None:
        config = self.config
        if config.n_layers > len(self._stored):  # avoids making a huge list of names
            raise InputError(
                f"{self.folder} declares {config.n_layers} layers, but holds only"
                f" {len(self._stored)} tensors"
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
                    f"{self.folder}: {name} has shape {list(found.get_shape())}; the configuration"
                    f" requires {list(shape)}"
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
                    f" {config.n_layers} layers does not have"
                )

    def _head_is_embedding(self) -> bool:
        head = self._slice("lm_head.weight")
        table = self._slice(places(self.config)[0].name)
        if head.get_shape() != table.get_shape() or head.get_dtype() != table.get_dtype():
            return False
        rows = self.config.vocab_size
        parts = [slice(i, min(i + 4096, rows)) for i in range(0, rows, 4096)]  # some MB at a time
        return all(np.array_equal(head[part], table[part]) for part in parts)


def check_finite(x: np.ndarray, name: str) -> None:
    """Raises InputError for a tensor with a NaN or an infinity; name: for the message."""
    for extreme in (x.max(), x.min()):  # needs no array of flags, and both propagate NaN
        if not np.isfinite(extreme):
            raise InputError(f"{name} holds {extreme}; weights must be finite")


def pickle_in(folder: Path) -> str:
    """The end of an error that names a pickle in the folder, or "" without one."""
    pickles = sorted(p.name for end in ("bin", "pth", "pt") for p in folder.glob(f"*.{end}"))
    return f"; {pickles[0]} is a pickle, which is never opened" if pickles else ""


def _open_files(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """({file: handle}, {tensor: (file, name in the file)}) of the safetensors in a folder."""
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
        raise InputError(f"{folder} holds no model.safetensors and no {INDEX}{pickle_in(folder)}")
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
                    f"{folder}: {tensor!r} is in {stored[tensor][0]} and in {name}; tensors that"
                    " are split over files are not supported"
                )
            stored[tensor] = (name, tensor)
    for tensor, name in listed.items():
        if stored.get(tensor, ("",))[0] != name:
            raise InputError(f"{folder / INDEX} puts {tensor!r} into {name!r}, where it is not")
    return files, stored


# Meta's tensor names of Llama, in the folders with params.json.
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
    """The configuration in Meta's params.json; the tensors' shapes give the widths that it lacks.

    The file does not distinguish the RoPE scaling of Llama 3.1 (factor 8) from that of 3.2 (32).
    """
    keys = Page(page, path)
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in shapes:
            raise InputError(f"{path.parent} lacks the tensor {name}")
    scaling = None
    if page.get("use_scaled_rope"):
        if page.get("rope_scaling_factor") is None:
            raise InputError(
                f"{path} has use_scaled_rope but no factor; add rope_scaling_factor to it"
                " (8 for Llama 3.1, 32 for 3.2), or use the folder with a config.json"
            )
        scaling = dict(factor=page["rope_scaling_factor"])
    return validated(
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
        {"n_layers": "n_layers", "d_model": "dim", "d_head": "head_dim"},
    )


def write_tensors(
    folder: Path, config: ModelConfig, dtype: str, arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes model.safetensors, or several files and an index if it would be large.

    arrays: (Hugging Face name, array) in the order of `places(config)`, consumed one at a time: the
    header needs only names, shapes and offsets, which are known in advance.
    """
    numpy_dtype = DTYPES[dtype]
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

    def converted(count: int) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in itertools.islice(remaining, count):
            check_finite(x, name)
            yield name, np.ascontiguousarray(x, numpy_dtype)

    for file_name, tensors in zip(names, files, strict=True):
        layout = {name: (shapes[name], numpy_dtype) for name in tensors}
        write_safetensors(folder / file_name, layout, converted(len(tensors)))
    if len(files) > 1:
        weight_map = {n: f for f, group in zip(names, files, strict=True) for n in group}
        page = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(page, indent=2), encoding="utf-8")


def write_safetensors(
    path: Path,
    layout: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes a safetensors file of {name: (shape, dtype)}, one array at a time, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (shape, dtype) in layout.items():
        end = at + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": TAGS[dtype.name], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (expected, kind), (name, x) in zip(layout.items(), arrays, strict=True):
            assert (name, (x.shape, x.dtype)) == (expected, kind), (name, x.shape, x.dtype)
            file.write(np.ascontiguousarray(x).tobytes())
