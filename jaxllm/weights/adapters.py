"""Low-rank adapters and the frozen weights (the base) that they adapt, from a run or from peft.

A run with `model.lora` stores only its adapters, and the path, step and checksum of its base.  A
folder of peft (https://github.com/huggingface/peft) has the same in two files:

    adapter_model.safetensors   base_model.model.MODULE.lora_A.weight (rank, in) and lora_B (out,
                                rank), with MODULE as in the Hugging Face names of the base
    adapter_config.json         rank, alpha, targets, and the base as base_model_name_or_path
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save

from jaxllm.config import TARGETS, Config, ModelConfig, evaluated
from jaxllm.errors import InputError
from jaxllm.files import read_json, write_json
from jaxllm.models import create
from jaxllm.sharding import put
from jaxllm.text.files import ADAPTERS, find_base
from jaxllm.weights.checksums import array_checksums, joint_checksum
from jaxllm.weights.huggingface import DTYPES, HuggingFaceWeights, check_finite, open_safetensors
from jaxllm.weights.huggingface_config import Page, validated
from jaxllm.weights.packed import PackedWeights, base_packing, frozen, frozen_shardings
from jaxllm.weights.places import map_params, named_params, places
from jaxllm.weights.run import RunWeights
from pallas_kernels.quantized.formats import dequantize

PAGE, ARRAYS = ADAPTERS, "adapter_model.safetensors"
# Keys that peft's page may set: they are read below, or do not affect the result.
_FREE = set(
    """auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern
    layers_to_transform lora_alpha lora_dropout megatron_core peft_version
    qalora_group_size r revision target_modules task_type use_rslora""".split()
)


class Base(NamedTuple):
    """What identifies a base: the checksum covers all its parameters in float32."""

    path: str
    step: int | None  # of a run
    checksum: str
    packed: str | None = None  # how it is packed, "" if it is not; None: an older page

    def check(self, checksum: str, packed: str | None) -> None:
        """Raises InputError unless the loaded base's checksum and packing equal this one's."""
        if self.checksum != checksum:
            raise InputError(
                f"the base {self.path} changed since the adapters were trained (checksum"
                f" {checksum}, was {self.checksum}); restore it, or train new adapters"
            )
        if self.packed not in (None, packed):
            was, now = (x or "not packed" for x in (self.packed, packed))
            raise InputError(f"the base {self.path} is {now}; the adapters need one that is {was}")


@dataclass
class AdapterWeights:
    """Adapters with their base."""

    folder: Path
    config: ModelConfig  # of the model with the adapters
    base: HuggingFaceWeights | RunWeights | PackedWeights
    arrays: dict[str, np.ndarray]
    expected: Base | None  # the base in training; None if a peft folder does not say
    run: Config | None = None  # None for a peft folder
    step: int = 0

    def __post_init__(self):
        own = (self.folder / "tokenizer.json").exists(follow_symlinks=False)
        self.text = self.folder if own else self.base.folder  # the folder with the tokenizer
        self.packing = self.base.packing or base_packing(self.config)
        self._sums: dict[str, str] = {}

    @property
    def plain(self) -> ModelConfig:
        """The configuration of the model without adapters."""
        return self.config.model_copy(update={"lora": None, "quantize": None, "init_from": None})

    def param(self, name: str) -> np.ndarray:
        """The merged parameter of a dotted path in float32, as it was trained."""
        x = self.base.param(name)
        self._sums |= array_checksums({name: x})
        return np.asarray(self._merged(name, x))

    def verify(self) -> None:
        """Raises InputError if the adapters belong to another base; needs the whole base read."""
        if self.expected is not None:
            checksum = getattr(self.base, "source", None) or joint_checksum(self._sums)
            self.expected.check(checksum, str(self.base.packing or ""))

    def load(self, config: ModelConfig, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
        """(graph, parameters) of a model for inference.

        Merged where the base is not packed; otherwise with the adapters beside it.
        config: of the model, with any kernels.  Raises InputError if the base changed.
        """
        plain = config.model_copy(update={"lora": None, "quantize": None})
        model = nnx.eval_shape(lambda: create(evaluated(config) if self.packing else plain))
        graph, adapters, rest = nnx.split(model, nnx.LoRAParam, nnx.Param)
        merge = None if self.packing else self._merged
        base, checksum = load_base(self.base, config, rest, mesh, merge)
        if self.expected is not None:
            self.expected.check(checksum, str(self.base.packing or ""))
        return graph, nnx.merge_state(self.adapters(adapters, mesh), base)

    def adapters(self, abstract: nnx.State, mesh: Mesh) -> nnx.State:
        """The adapters with the structure of `abstract`, on the mesh."""
        whole = jax.NamedSharding(mesh, jax.P())
        return map_params(abstract, lambda name, _: jax.device_put(self.arrays[name], whole))

    def _merged(self, name: str, x: np.ndarray) -> Any:
        """A parameter of the base merged with its adapter; x: the stored parameter in float32."""
        rounded = self.run is not None or self.packing is not None  # peft rounds none
        if rounded and x.ndim > 1 and not isinstance(self.base, PackedWeights):  # as in training
            if own := self.packing and self.packing.of(name, x.shape):
                x = np.asarray(dequantize(own.pack(jnp.asarray(x))))
            else:
                dtype = jnp.bfloat16 if self.packing else self.config.compute_dtype
                x = x.astype(dtype).astype(np.float32)
        a, b = (self.arrays.get(name.replace(".weight", f".adapter.{part}")) for part in "ab")
        if a is None or b is None:
            return x
        # pyrefly: ignore[missing-attribute]
        return x + self.config.lora.scale * jnp.matmul(a, b, precision="highest")


def load_base(
    base, config: ModelConfig, params: nnx.State, mesh: Mesh, merge: Callable | None = None
) -> tuple[nnx.State, str]:
    """(the frozen parameters, the base's checksum); read, packed and placed one by one.

    params: shapes of the base's parameters.  merge: changes the float32 array of a name.
    """
    packing = base.packing or base_packing(config)
    shapes = frozen(params, config, packing)
    at, variables = named_params(frozen_shardings(shapes, mesh)), named_params(shapes)
    if isinstance(base, PackedWeights):
        place = lambda name: jax.tree.leaves(at[name].get_value())[0]
        return map_params(shapes, lambda name, _: base.load(name, place(name))), base.source
    arrays, sums = {}, {}
    for name, x in zip(variables, params_in_turn(base, variables), strict=True):
        if own := packing and packing.of(name, x.shape):
            x = jnp.asarray(x)  # moved once, for the checksum and the packing
        sums |= array_checksums({name: x})
        x = x if merge is None else merge(name, x)
        sharding = at[name].get_value()
        if own:
            arrays[name] = jax.device_put(own.pack(x), sharding)
        else:
            arrays[name] = put(x.astype(variables[name].get_value().dtype), sharding)
    return map_params(shapes, lambda name, _: arrays[name]), joint_checksum(sums)


def params_in_turn(weights, names: Iterable[str]) -> Iterator:
    """The float32 parameters of dotted paths, one at a time."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.params(names)
    return map(weights.param, names)


def of_run(run: RunWeights, open_weights: Callable) -> AdapterWeights:
    """The adapters of a checkpoint; raises InputError if they or their base are damaged."""
    expected = Base(**run.about["base"])
    base = _open_base(run.folder, expected.path, expected.step, open_weights)
    arrays = run.read(_shapes(run.config))
    return AdapterWeights(run.folder, run.config, base, arrays, expected, run.run, run.step)


def _open_base(folder: Path, path: str, step: int | None, open_weights: Callable):
    if (found := find_base(folder, path)) is None:
        raise InputError(
            f"{folder} holds adapters of the base {path}, which is no folder here; put it there,"
            f" or, in a folder of peft, name another as base_model_name_or_path in {PAGE}"
        )
    both = found.samefile(folder)  # the base and its adapters lie in one folder
    run = (found / "config.yaml").exists()  # else the folder has one step, perhaps a run's merged
    base = HuggingFaceWeights(found) if both else open_weights(found, step if run else None)
    if isinstance(base, AdapterWeights):
        raise InputError(
            f"{folder} holds adapters of {path}, which holds adapters, too; merge those first:"
            f" jaxllm convert {path} OUT --merge, and name OUT as base_model_name_or_path"
        )
    return base


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{our dotted path: shape} of the adapters."""
    params = named_params(nnx.eval_shape(lambda: create(config)))
    return {n: p.shape for n, p in params.items() if isinstance(p, nnx.LoRAParam)}


def _places(config: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """(peft's name, our dotted path, target) of every adapter array that a block may have."""
    for place in places(config):
        if place.form == "transposed" and place.name.startswith("model.layers."):
            module, (ours,) = place.name.removesuffix(".weight"), place.ours
            for theirs, part in (("lora_A", "a"), ("lora_B", "b")):
                path = ours.replace(".weight", f".adapter.{part}")
                yield f"base_model.model.{module}.{theirs}.weight", path, module.split(".")[-1]


def of_peft(folder: Path, open_weights: Callable) -> AdapterWeights:
    """The adapters in a folder of peft; raises InputError for what is not supported."""
    page = read_json(folder / PAGE)
    keys = Page({"peft_type": None} | page, folder / PAGE)  # the type is named before its keys
    free = _FREE | {k for k, v in (("peft_type", "LORA"), ("bias", "none")) if page.get(k) == v}
    if page.get("init_lora_weights") in (True, "gaussian", "orthogonal"):
        free.add("init_lora_weights")  # other ways to draw them change the base, too
    keys.refuse_rest(free, "merge with peft's merge_and_unload")
    path = page.get("base_model_name_or_path")
    if not isinstance(path, str) or not path:
        raise InputError(f"{keys.path}: base_model_name_or_path={path!r} is not a folder's name")
    file = open_safetensors(folder / ARRAYS)
    stored, about = set(file.keys()), file.metadata() or {}
    checksum = about.get("base_checksum")
    step = int(about["base_step"]) if "base_step" in about else None
    base = _open_base(folder, path, step, open_weights)
    if base.config.type != "llama3":
        raise InputError(f"{folder}: adapters of a {base.config.type} are not read, only Llama's")
    known = {theirs: (ours, target) for theirs, ours, target in _places(base.config)}
    adapted = {known[name][1] for name in stored if name in known}
    wanted = {theirs for theirs, (_, target) in known.items() if target in adapted}
    module, listed = lambda name: name.partition(".lora_")[0], page.get("target_modules")
    some = page.get("exclude_modules") or page.get("layers_to_transform") is not None
    if some or isinstance(listed, str):  # perhaps in some layers only
        modules = set(map(module, stored))
        wanted = {name for name in wanted if module(name) in modules}
    elif isinstance(listed, list) and "." in str(listed):  # as peft writes its "all-linear"
        wanted = {name for name in wanted if module(name).endswith(tuple(map(str, listed)))}
    if different := sorted(stored ^ wanted) or ([] if stored else ["no tensor at all"]):
        verb = "lacks" if different[0] in wanted else "holds"
        raise InputError(
            f"{folder / ARRAYS} is of another model than {path}, or not only adapters of"
            f" {', '.join(TARGETS)}: it {verb} {different[0]}"
        )
    theirs_of = dict(rank="r", alpha="lora_alpha", dropout="lora_dropout", rslora="use_rslora")
    given = dict(lora_dropout=0.0, use_rslora=False) | page
    lora = {ours: given.get(key) for ours, key in theirs_of.items()} | {"targets": sorted(adapted)}
    names = {f"lora.{ours}": key for ours, key in theirs_of.items()}
    config = validated(base.config.model_dump() | {"lora": lora}, folder / PAGE, names)
    shapes = _shapes(config)
    arrays = {ours: np.zeros(shape, np.float32) for ours, shape in shapes.items()}
    for theirs in stored:
        ours = known[theirs][0]
        if (dtype := file.get_slice(theirs).get_dtype()) not in DTYPES.split():
            raise InputError(f"{folder / ARRAYS}: {theirs} is {dtype}, not {DTYPES}")
        if (x := file.get_tensor(theirs).T).shape != shapes[ours]:
            raise InputError(
                f"{folder / ARRAYS} is of another model than {path}: {theirs} is"
                f" {list(x.T.shape)}, that model needs {list(shapes[ours])[::-1]}"
            )
        arrays[ours] = np.array(x, np.float32, order="C")
        check_finite(arrays[ours], theirs)
    expected = Base(path, step, checksum) if checksum else None
    return AdapterWeights(folder, config, base, arrays, expected)


def write_peft(weights: AdapterWeights, folder: Path) -> None:
    """Writes the adapters as peft stores them, in float32."""
    lora, base = weights.config.lora, weights.base  # pyrefly: ignore[missing-attribute]
    found = {
        theirs: np.ascontiguousarray(weights.arrays[ours].T)
        for theirs, ours, target in _places(weights.config)
        if lora.adapts(target)
    }
    about = {"format": "pt"}
    if (known := weights.expected) is not None:
        about |= {"base_checksum": known.checksum}
        about |= {} if known.step is None else {"base_step": str(known.step)}
    (folder / ARRAYS).write_bytes(save(found, about))
    page = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none", inference_mode=True)
    page |= dict(
        base_model_name_or_path=str(base.folder.absolute()),
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[name for name in TARGETS if lora.adapts(name)],
        use_rslora=lora.rslora,
        fan_in_fan_out=False,
    )
    write_json(folder / PAGE, page, indent=2)
