"""A folder of packed weights: the matrices of the blocks in 8 to 1 bits, for generate and evaluate.

    config.yaml          the run's configuration
    tokenizer.json       and its companions
    packed.safetensors   for each matrix NAME the arrays of `QuantizedWeight.to_arrays`, as
                         NAME.words, NAME.scales, ...; every other parameter under its own name
    packed.json          the version of the packing, format, bits, group, symmetric, head; step;
                         checksums

A matrix stays unpacked if it is the embedding or the positions (bfloat16), or one of the vLSTM's
two gates (float32): a gate has few columns, and its error adds up over the tokens.  The head is
bfloat16, or is packed; then a tied head becomes a separate matrix, and only the lookup reads the
embedding.  Norms and biases are float32.  docs/decoding.md defines the formats.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm import config as configs
from jaxllm.config import FORMATS, ModelConfig
from jaxllm.data.cache import digest
from jaxllm.errors import InputError
from jaxllm.files import read_json, write_json
from jaxllm.layers import Linear
from jaxllm.models import abstract, create
from jaxllm.models.language_model import LanguageModel
from jaxllm.sharding import spec_of
from jaxllm.weights import checksums
from jaxllm.weights.huggingface import TAGS, check_finite, open_safetensors, write_safetensors
from jaxllm.weights.places import difference, map_params, named_params
from pallas_kernels import QuantizedWeight, quantize
from pallas_kernels.quantized.formats import Format, dequantize

PAGE, ARRAYS = "packed.json", "packed.safetensors"
VERSION = 2  # of the packing; a kernel that reads another packing changes it
GATES = ("vlstm.i.weight", "vlstm.f.weight")
HEAD, TABLE = "head.weight", "embedding.wte"


class Packing(NamedTuple):
    """The options of `quantize`, and the format and bits of the head (None: bfloat16)."""

    format: Format
    bits: int
    group: int | None
    symmetric: bool
    head: tuple[Format, int] | None = None

    def of(self, name: str, shape: tuple[int, ...]) -> "Packing | None":
        """How a parameter is packed; None: not at all."""
        if name == HEAD and self.head is not None:
            format, bits = self.head
            # Only int has offsets; asymmetric blocks may have an fp8 head.
            return Packing(format, bits, self.group, self.symmetric or format != "int")
        matrix = name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2
        return self._replace(head=None) if matrix and not name.endswith(GATES) else None

    def pack(self, w: jax.Array) -> QuantizedWeight:
        return quantize(
            w, bits=self.bits, group=self.group, symmetric=self.symmetric, format=self.format
        )

    def __str__(self) -> str:
        scales = f"groups of {self.group}" if self.group else "one scale for each column"
        head = f", head {_name(*self.head)}" if self.head else ""
        asymmetric = "" if self.symmetric else ", asymmetric"
        return f"{_name(self.format, self.bits)}{head}, {scales}{asymmetric}"


@functools.cache  # a model has few shapes
def _packed(packing: Packing, shape: tuple[int, ...]) -> QuantizedWeight:
    """The shapes of a packed matrix.  Raises ValueError if it cannot be packed."""
    return jax.eval_shape(packing.pack, jax.ShapeDtypeStruct(shape, jnp.float32))


def _name(format: Format, bits: int) -> str:
    name = "fp8" if format == "fp8" else f"int{bits}"
    return f"2:4 of {name}" if format == "2:4" else name


def create_packed(config: ModelConfig, packing: Packing | None) -> LanguageModel:
    """The model, with a separate head if the head is packed; for nnx.eval_shape."""
    model = create(config)
    if packing is not None and packing.head is not None and model.head is None:
        model.head = nnx.data(Linear(config.d_model, config.padded_vocab_size, rngs=nnx.Rngs(0)))
    return model


def base_packing(config: ModelConfig) -> Packing | None:
    """How `model.quantize` packs, by the largest group that fits; raises InputError."""
    if getattr(config, "quantize", None) is None:
        return None
    packing = Packing(*FORMATS[config.quantize], None, True)  # pyrefly: ignore[missing-attribute]
    one = config.model_copy(update={"n_layers": 1})  # all blocks have the same shapes
    for group in _groups(named_params(nnx.eval_shape(lambda: create(one))), packing):
        return packing._replace(group=group)
    layout(config, packing)  # says why


def frozen(base: nnx.State, config: ModelConfig, packing: Packing | None) -> nnx.State:
    """Shapes of a model's weights as they are held while frozen.

    Matrices are packed, or in the compute dtype (bfloat16 beside packed ones); vectors in float32.
    """

    def hold(name, variable):
        if own := packing and packing.of(name, variable.shape):
            return _packed(own, variable.shape)
        narrow = jnp.bfloat16 if packing else config.compute_dtype
        return jax.ShapeDtypeStruct(variable.shape, narrow if variable.ndim > 1 else jnp.float32)

    return map_params(base, hold)


def frozen_shardings(base: nnx.State, mesh) -> nnx.State:
    """The shardings of a state that `frozen` describes; packed matrices are replicated."""

    def place(_, variable):
        packed = isinstance(variable.get_value(), QuantizedWeight)
        sharding = jax.NamedSharding(mesh, jax.P() if packed else spec_of(variable))
        return jax.tree.map(lambda _: sharding, variable.get_value())

    return map_params(base, place)


Layout = dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]]


def layout(config: ModelConfig, packing: Packing) -> Layout:
    """{our path: {name in the file: (shape, dtype)}}; raises InputError if packing fails."""
    found: Layout = {}
    params = named_params(nnx.eval_shape(lambda: create_packed(config, packing)))
    for name, param in params.items():
        if (own := packing.of(name, param.shape)) is None:
            wide = param.ndim < 2 or name.endswith(GATES)
            found[name] = {name: (param.shape, jnp.dtype(jnp.float32 if wide else jnp.bfloat16))}
            continue
        try:
            weight = _packed(own, param.shape)
        except ValueError as e:
            another = "another " + ("--head" if name == HEAD else "format")
            if groups := list(_groups(params, packing)):
                *most, last = [str(group).lower() for group in groups]
                another = f"--group {', '.join(most)}{' or ' if most else ''}{last}"
            raise InputError(f"{name}: {e}; choose {another}") from e
        arrays = {"words": weight.words, "scales": weight.scales, "offsets": weight.offsets}
        part = {key: (a.shape, np.dtype(a.dtype)) for key, a in arrays.items() if a is not None}
        part["header"] = ((7,), np.dtype(np.int32))
        found[name] = {f"{name}.{key}": at for key, at in part.items()}
    return found


def _groups(params: dict[str, nnx.Variable], packing: Packing) -> Iterator[int | None]:
    """The groups, largest first, in which every matrix can be packed."""
    for group in (128, 64, 32, None):
        ways = {name: packing._replace(group=group).of(name, p.shape) for name, p in params.items()}
        with contextlib.suppress(ValueError):
            for name in filter(ways.get, ways):
                _packed(ways[name], params[name].shape)
            yield group


def write_packed(folder: Path, config: ModelConfig, packing: Packing, weights, about: dict) -> int:
    """Writes packed.safetensors and packed.json; returns the size of packed.safetensors in bytes.

    weights: their `param` is called once for each dotted path, in turn; it returns float32.
    about: further keys of packed.json, with `step`.
    """
    parts, tied = layout(config, packing), abstract(config, "none").head is None
    plain, sums = {}, {}  # checksums of unpacked arrays; of all before packing or rounding

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for name, part in parts.items():
            x = weights.param(TABLE).T if name == HEAD and tied else weights.param(name)
            check_finite(x, name)
            if not (name == HEAD and tied):
                sums.update(checksums.array_checksums({name: x}))
            if (own := packing.of(name, x.shape)) is not None:
                packed = own.pack(jnp.asarray(x)).to_arrays()
                yield from ((at, packed[at.removeprefix(f"{name}.")]) for at in part)
                continue
            x = np.asarray(x, part[name][1])
            plain.update(checksums.array_checksums({name: x}))
            yield name, x

    flat = {at: kind for part in parts.values() for at, kind in part.items()}
    write_safetensors(folder / ARRAYS, flat, arrays())
    page = {"packing": VERSION, **packing._asdict(), **about, "checksums": plain}
    page["source"] = checksums.joint_checksum(sums)
    write_json(folder / PAGE, checksums.with_digest(page), indent=1)
    return (folder / ARRAYS).stat().st_size


class PackedWeights:
    """The packed weights in a folder, checked against its config.yaml on opening.

    run, config, step: of the checkpoint that was packed.
    source: the checksum of its parameters in float32.
    """

    def __init__(self, folder: Path):
        self.folder = self.text = folder
        self.run = configs.load(str(folder / "config.yaml"))
        self.config: ModelConfig = self.run.model
        page = read_json(folder / PAGE)
        if page.get("digest") != digest({k: v for k, v in page.items() if k != "digest"}):
            raise self._damaged(f"{PAGE} was changed")
        if page["packing"] != VERSION:
            raise InputError(
                f"{folder} has packing {page['packing']}, and this version of jaxllm reads"
                f" {VERSION}; convert its source again"
            )
        head = page.get("head")  # older folders have none
        keys = ("format", "bits", "group", "symmetric")
        self.packing = Packing(*(page[key] for key in keys), head=head and tuple(head))
        self.step: int = page["step"]
        self._checksums = page["checksums"]
        self.source: str = page.get("source", page["digest"])
        self._layout = layout(self.config, self.packing)
        try:
            self._file = open_safetensors(folder / ARRAYS)
        except InputError as e:
            raise self._damaged(str(e)) from e
        at = {name: self._file.get_slice(name) for name in self._file.keys()}
        stored = {name: f"{x.get_dtype()} {tuple(x.get_shape())}" for name, x in at.items()}
        wanted = {
            name: f"{TAGS[dtype.name]} {tuple(shape)}"
            for part in self._layout.values()
            for name, (shape, dtype) in part.items()
        }
        if different := difference(stored, wanted):
            raise self._damaged(f"in {ARRAYS} {different}")
        whole = dict.fromkeys(name for name, part in self._layout.items() if name in part)
        if different := sorted(whole.keys() ^ self._checksums.keys()):
            raise self._damaged(f"{PAGE} has other parameters than config.yaml: {different[0]}")
        checksums.check_folder(folder, page, self.config, PAGE)

    def param(self, name: str) -> np.ndarray:
        """The parameter of a dotted path in float32; a packed one is dequantized."""
        x = self.load(name, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        return np.asarray(dequantize(x) if isinstance(x, QuantizedWeight) else x, np.float32)

    def load(self, name: str, sharding) -> jax.Array | QuantizedWeight:
        """The parameter of a dotted path, packed or in the dtype in which it is stored.

        Packed weights are replicated: XLA does not partition the kernel that reads them.
        """
        part = self._layout[name]
        arrays = {at.removeprefix(f"{name}."): self._file.get_tensor(at) for at in part}
        if name in part:
            if checksums.first_mismatch(arrays, self._checksums):
                raise self._damaged(f"the checksum of {name} differs")
            return jax.device_put(arrays[name], sharding)
        try:
            weight = QuantizedWeight.from_arrays(arrays)
        except ValueError as e:
            raise self._damaged(f"{name}: {e}") from e
        found = Packing(weight.format, weight.bits, weight.group, weight.offsets is None)
        if found != (own := self.packing.of(name, weight.shape)):
            raise self._damaged(f"{name} is {found}, not {own}")
        if isinstance(sharding, jax.NamedSharding):
            sharding = jax.NamedSharding(sharding.mesh, jax.P())
        return jax.device_put(weight, sharding)

    def _damaged(self, why: str) -> InputError:
        return InputError(
            f"the packed weights in {self.folder} are damaged ({why}); convert their source again"
        )
