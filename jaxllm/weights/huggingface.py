"""Reads and writes the safetensors of a Hugging Face folder, in one file or several.

Tensors are read and written one at a time.  A tensor that is missing, unexpected or of the wrong
shape is refused by name; huggingface_config does the same for settings.  Pickles (.bin, .pth) are
never opened.
"""

import itertools
import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxllm.config import Config, ModelConfig
from jaxllm.errors import InputError
from jaxllm.files import read_json, write_json
from jaxllm.weights import meta
from jaxllm.weights.huggingface_config import KINDS, UNQUANTIZED, model_config
from jaxllm.weights.places import places, tied

TAGS = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}  # numpy's names and safetensors'
SHARD_BYTES = 5 * 10**9  # largest file; the Hub and its tools expect several files above it
# Tensors read ahead.  NumPy converts and transposes without the GIL: 14336x4096 in 0.25 to 0.7 s.
AHEAD = 4
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
DTYPES = "F32 or F16 or BF16 or F64"
# Tensors that are not parameters: masks and frequencies that older versions stored.
_BUFFERS = re.compile(
    r"transformer\.h\.\d+\.attn\.(masked_)?bias|(.+\.)?rope\.freqs"
    r"|(.+\.)?rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)"
)


class HuggingFaceWeights:
    """The weights in a folder, checked against its configuration on opening.

    config: the configuration of our model.  run, step: no run wrote them.
    text: the folder with the tokenizer.  packing: nothing is packed.
    Also reads a folder with Meta's params.json and tensor names (meta.py) in safetensors.
    """

    run: Config | None = None
    packing = None
    step = 0

    def __init__(self, folder: Path):
        self.folder = self.text = folder
        page, params = folder / "config.json", folder / "params.json"
        theirs = any((folder / name).is_file() for name in (SINGLE, INDEX))
        self._interleaved = params.is_file() and not (page.is_file() and theirs)
        self._files, self._stored = _open_files(folder, self._interleaved)
        if self._interleaved:
            shapes = {name: self._slice(name).get_shape() for name in self._stored}
            self.config = meta.model_config(read_json(params), params, shapes)
            self._rename(meta.tensor_name)
        else:
            self.config = model_config(content := read_json(page), page)
            prefix = KINDS[content["model_type"]].prefix
            bare = lambda name: name.removeprefix(prefix)
            # A folder without the head, such as OpenAI's own, leaves out the prefix.
            self._rename(lambda n: bare(n) if bare(n) == HEAD else prefix + bare(n))
        self._check()
        self._holders = {ours: place for place in places(self.config) for ours in place.ours}

    def param(self, name: str, on_device: bool = False) -> Any:
        """A contiguous float32 copy of our parameter of a dotted path.

        on_device: as a JAX array.  A GPU transposes a matrix of the 8B in 20 ms, NumPy in 800.
        Raises InputError if the tensor is damaged or not finite.
        """
        place = self._holders[name]
        file, stored = self._stored[place.name]
        try:
            x = self._files[file].get_tensor(stored)
        except SafetensorError as e:
            raise InputError(f"{self.folder / file} is damaged at {stored}: {e}") from e
        rotated = place.name.endswith(("q_proj.weight", "k_proj.weight"))
        if self._interleaved and rotated and self.config.type == "llama3":
            # Meta rotates rows 2j and 2j + 1 of a head together, Hugging Face rows j and j + D/2.
            pairs = x.reshape(-1, self.config.head_dim // 2, 2, x.shape[-1])
            x = pairs.swapaxes(1, 2).reshape(x.shape)
        x = place.to_ours(self.config, jnp.array(x) if on_device else x)[name]
        x = x.astype(jnp.float32) if on_device else np.array(x, np.float32, order="C")
        check_finite(x, f"{self.folder}: {place.name}")
        return x

    def params(self, names: Iterable[str]) -> Iterator:
        """`param` of each name, in order; a single process converts block parameters on a GPU.

        The embedding and the head of an 8B would take more GPU memory than its packed blocks.
        """
        alone = jax.process_count() == 1 and jax.default_backend() == "gpu"
        read = lambda name: self.param(name, on_device=alone and name.startswith("blocks."))
        return read_ahead(read, names)

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
        """Raises InputError unless the folder has exactly the tensors of its configuration."""
        if self.config.n_layers > len(self._stored):  # avoids making a huge list of names
            raise InputError(
                f"{self.folder} declares {self.config.n_layers} layers, but holds only"
                f" {len(self._stored)} tensors"
            )
        for name in itertools.filterfalse(_BUFFERS.fullmatch, self._stored):
            if (dtype := self._slice(name).get_dtype()) not in DTYPES.split():
                raise InputError(f"{self.folder}: {name!r} is {dtype}, not {DTYPES}; {UNQUANTIZED}")
        table = places(self.config)[0].name
        if tied(self.config) and HEAD in self._stored and table not in self._stored:
            self._stored[table] = self._stored.pop(HEAD)  # one matrix, under its other name
        both = HEAD in self._stored and tied(self.config)
        if both and not _same(self._slice(HEAD), self._slice(table)):
            if self.config.type != "llama3":
                raise InputError(
                    f"{self.folder} holds the tensor {HEAD}, which differs from the embedding; a"
                    f" {self.config.type} has no head of its own: with tie_word_embeddings=true"
                    " remove the tensor"
                )
            _note(f"{self.folder}: {HEAD} differs from the embedding: tie_word_embeddings=false")
            self.config = self.config.model_copy(update={"tie_embeddings": False})
        wanted = {place.name: place.shape(self.config) for place in places(self.config)}
        shapes = {name: tuple(self._slice(name).get_shape()) for name in self._stored}
        missing = [f"{n} {list(wanted[n])}" for n in wanted if n not in shapes]
        extra = [
            f"{self._stored[n][1]!r} {list(shapes[n])}"
            for n in sorted(shapes.keys() - wanted.keys())
            if not _BUFFERS.fullmatch(n) and not (n == HEAD and tied(self.config))
        ]
        odd = [
            f"{n} of shape {list(shapes[n])} instead of {list(wanted[n])}"
            for n in wanted
            if shapes.get(n, wanted[n]) != wanted[n]
        ]
        wrong = (("lacks", missing), ("has no place for", extra), ("holds", odd))
        several = lambda x: ", ".join(x[:3]) + f" and {len(x) - 3} more" * (len(x) > 3)
        if found := [f"{verb} {several(names)}" for verb, names in wrong if names]:
            headless = table in shapes and any(name.startswith(HEAD) for name in missing)
            fix = "; tie_word_embeddings=true uses the embedding as the head" * headless
            raise InputError(
                f"{self.folder} is no {self.config.type} of {self.config.n_layers} layers as its"
                f" configuration says: it {', '.join(found)}{fix}"
            )


def read_ahead(read: Callable[[Any], Any], keys: Iterable) -> Iterator:
    """read(key) of each key, in order, while threads read the next AHEAD ones."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting = deque()
        for key in keys:
            waiting.append(pool.submit(read, key))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _same(a, b) -> bool:
    """Whether slices of safetensors are equal; True for dtypes that `_check` refuses."""
    if {a.get_dtype(), b.get_dtype()} - {*DTYPES.split()}:
        return True
    rows, *_ = (*a.get_shape(), 0)
    parts = [slice(i, min(i + 4096, rows)) for i in range(0, rows, 4096)] or [...]  # some MB each
    same = lambda part: np.array_equal(a[part], b[part])
    return a.get_shape() == b.get_shape() and all(map(same, parts))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def check_finite(x, name: str) -> None:
    """Raises InputError for a tensor with a NaN or an infinity; name: for the message."""
    for extreme in (x.max(), x.min()):  # needs no array of flags, and both propagate NaN
        if not np.isfinite(extreme):
            raise InputError(f"{name} holds {extreme}; weights must be finite")


def unread_in(folder: Path) -> str:
    """The end of an error that names a broken link or a pickle in the folder, or "" without one."""
    for path in sorted(folder.glob("*.*")):
        if not path.exists():  # the Hub's cache copied without the files that it links to
            return f"; {path.name} is a link to {path.readlink()}, which does not exist: cp -rL"
    kinds = dict.fromkeys(("bin", "pth", "pt", "ckpt"), "a pickle, which is never opened")
    kinds |= dict.fromkeys(("gguf", "h5", "msgpack", "onnx", "npz"), "of another format")
    for end, kind in kinds.items():
        for path in sorted(folder.glob(f"*.{end}")):
            return f"; {path.name} is {kind}: write safetensors with save_pretrained"
    return ""


def open_safetensors(path: Path) -> Any:
    """Opens a file for reading; raises InputError."""
    try:
        return safe_open(path, "numpy").__enter__()  # pyrefly: ignore[missing-attribute]
    except (SafetensorError, OSError) as e:
        pointer = "; if it is a pointer of Git LFS, run git lfs pull"
        pointer *= path.is_file() and path.stat().st_size < 1000
        fix = pointer or unread_in(path.parent) * (not path.is_file()) or "; fetch it again"
        why = f"{' '.join(str(e).split())}{fix}"
        raise InputError(f"{path} cannot be read as safetensors: {why}") from e


def _weight_files(folder: Path, meta: bool) -> tuple[list[str], dict[str, str]]:
    """(the files that transformers, or with `meta` Meta, reads; {tensor: file} of the index)."""
    parts = sorted(p.name for p in folder.glob("consolidated*.safetensors")) if meta else []
    if not parts and (folder / SINGLE).is_file():
        parts = [SINGLE]
        if (folder / INDEX).is_file():
            _note(f"{folder}: {SINGLE} is read, not {INDEX} beside it, as by transformers")
    if parts:
        return parts, {}
    if not (folder / INDEX).is_file():
        others = sorted(p.name for p in folder.glob("*.safetensors") if p.exists())
        held = f"; rename {others[0]}, or fetch the index" if others else unread_in(folder)
        raise InputError(f"{folder} holds no {SINGLE} and no {INDEX}{held}")
    listed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise InputError(f"{folder / INDEX} has no weight_map of file names")
    for name in listed.values():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{folder / INDEX} names {name!r}, which is not in its folder")
    return sorted(set(listed.values())), listed


def _open_files(folder: Path, meta: bool) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """({file: handle}, {tensor: (file, name in the file)}) of the safetensors in a folder."""
    names, listed = _weight_files(folder, meta)
    files, stored = {}, {}
    for name in names:
        files[name] = open_safetensors(folder / name)
        for tensor in files[name].keys():
            first, _ = stored.setdefault(tensor, (name, tensor))
            if first != name and not _same(*(files[x].get_slice(tensor) for x in (first, name))):
                raise InputError(
                    f"{folder}: {tensor!r} differs in {first} and {name}; tensors that are split"
                    " over files are not supported"
                )
            if listed.get(tensor) == name:
                stored[tensor] = (name, tensor)
    for tensor, name in listed.items():
        if stored.get(tensor, ("",))[0] != name:
            raise InputError(f"{folder / INDEX} puts {tensor!r} into {name!r}, where it is not")
    return files, stored


def write_tensors(
    folder: Path, config: ModelConfig, dtype: str, arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes model.safetensors, or several files and an index if it would be large.

    arrays: (Hugging Face name, array) in the order of `places(config)`, consumed one at a time: the
    header needs only names, shapes and offsets, which are known in advance.
    """
    kind = jnp.dtype(dtype)
    layout = {place.name: (place.shape(config), kind) for place in places(config)}
    sizes = {name: kind.itemsize * math.prod(shape) for name, (shape, _) in layout.items()}
    files: list[list[str]] = [[]]
    for name in layout:
        if files[-1] and sum(sizes[n] for n in files[-1]) + sizes[name] > SHARD_BYTES:
            files.append([])
        files[-1].append(name)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE]

    def converted() -> Iterator[tuple[str, np.ndarray]]:
        for name, x in arrays:
            check_finite(x, name)
            yield name, np.ascontiguousarray(x, kind)

    remaining = converted()
    for file_name, tensors in zip(names, files, strict=True):
        part = {name: layout[name] for name in tensors}
        write_safetensors(folder / file_name, part, itertools.islice(remaining, len(part)))
    if len(files) > 1:
        weight_map = {n: f for f, group in zip(names, files, strict=True) for n in group}
        page = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / INDEX, page, indent=2)


def write_safetensors(
    path: Path,
    layout: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Writes {name: (shape, dtype)} array by array; the library's writer takes all at once."""
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
