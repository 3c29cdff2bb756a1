"""Reads weights from a Hugging Face folder, a run's directory or a folder of packed weights.

`open_weights` checks names, shapes and dtypes without reading a tensor; `load_params` then loads
the parameters onto the mesh one at a time.
"""

from pathlib import Path
from typing import Any

from flax import nnx

from jaxllm.config import TARGETS, Config, ModelConfig
from jaxllm.config.command_line import check_exists
from jaxllm.errors import InputError
from jaxllm.sharding import put
from jaxllm.weights import adapters, checksums
from jaxllm.weights.adapters import AdapterWeights, params_in_turn
from jaxllm.weights.huggingface import HuggingFaceWeights, unread_in
from jaxllm.weights.packed import PAGE, PackedWeights
from jaxllm.weights.places import map_params, named_params
from jaxllm.weights.run import RunWeights

Weights = HuggingFaceWeights | RunWeights | PackedWeights | AdapterWeights


def open_weights(directory: str | Path, step: int | None = None) -> Weights:
    """Opens the weights in a directory; raises InputError if they are inconsistent or damaged.

    step: of a run's checkpoint (None: the newest); other weights have one step.
    """
    directory = Path(directory).expanduser()
    if (directory / PAGE).is_file():
        weights = PackedWeights(directory)
    elif (directory / "config.yaml").is_file() and (directory / "checkpoints").is_dir():
        if (weights := RunWeights(directory, step)).config.adapters is not None:
            weights = adapters.of_run(weights, open_weights)
    elif (directory / adapters.PAGE).is_file():
        weights = adapters.of_peft(directory, open_weights)
    elif any((directory / name).is_file() for name in ("config.json", "params.json")):
        weights = HuggingFaceWeights(directory)
    else:
        check_exists(directory)
        raise InputError(
            f"{directory} is neither a Hugging Face folder (config.json, safetensors) nor a run's"
            f" directory (config.yaml, checkpoints){_near(directory) or unread_in(directory)}"
        )
    if step not in (None, weights.step):
        raise InputError(
            f"{directory} holds weights of step {weights.step}, not of step {step}: leave out the"
            " step, or name the run's directory"
        )
    return weights


def _near(directory: Path) -> str:
    """The end of an error that names a folder of weights around or inside a path, or ""."""
    path = directory.absolute()
    runs = [x for x in list(path.parents)[:3] if path.is_relative_to(x / "checkpoints")]
    main = [x.read_bytes() for at in (path, path.parent) for x in at.glob("refs/main")]
    inside = [*path.glob("*"), *path.glob("snapshots/*")]  # the last, and refs: the Hub's cache
    inside.sort(key=lambda x: (x.name.encode() not in main, x))
    pages = (PAGE, adapters.PAGE, "config.json", "params.json", "config.yaml")
    holds = lambda folder: any((folder / name).is_file() for name in pages)
    return next((f"; name {x}" for x in (*runs, path.parent, *inside) if holds(x)), "")


def check_weights(weights: Weights, config: Config) -> None:
    """Raises InputError unless training can start from the weights with this model and data."""
    _check_base(weights, config.model)
    ours, theirs = _fixed(config.model), _fixed(weights.config)
    for key in ours | theirs:
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"model.{key}={ours.get(key)!r} differs from {theirs.get(key)!r} of the weights in"
                f" {weights.folder}; change it, or remove model.init_from"
            )
    own = weights.text / "tokenizer.json"
    if config.data.trains_tokenizer:
        fix = own if own.exists() else "the tokenizer.json that encoded their data"
        raise InputError(
            f"data.tokenizer is null: a new tokenizer would not match the weights in"
            f" {weights.folder}; set data.tokenizer to {fix}"
        )


def _check_base(weights: Weights, model: ModelConfig) -> None:
    """Raises InputError if packed weights or adapters do not match the model's settings."""
    lora, where = model.adapters, f"model.init_from={weights.folder}"
    if isinstance(weights, PackedWeights):
        held = f"{where} holds packed weights ({weights.packing})"
        if lora is None:
            raise InputError(f"{held}; to train, name their source, or set model.lora.rank")
        if weights.packing.head is not None:
            raise InputError(f"{held}; a packed head cannot be trained on: convert without --head")
        if (given := getattr(model, "quantize", None)) is not None:
            raise InputError(f"{held}, not packed again: leave out model.quantize={given}")
    if lora is not None and (known := weights.config.adapters) is not None:
        ours, theirs = (
            x.model_dump(include={"rank", "alpha", "rslora"})
            | {"targets": [n for n in TARGETS if x.adapts(n)]}
            for x in (lora, known)
        )
        for key in ours:
            if ours[key] != theirs[key]:
                raise InputError(
                    f"model.lora.{key}={ours[key]} differs from {theirs[key]} of the adapters in"
                    f" {weights.folder}; change it, or merge them first with jaxllm convert --merge"
                )


def load_params(weights: Weights, abstract: nnx.State) -> nnx.State:
    """The parameters with the structure, the shardings and the dtypes of `abstract`.

    Packed weights keep the form and the dtypes in which they are stored.  At most AHEAD + 1 further
    tensors are in memory at a time.
    """
    leaves = {name: variable.get_value() for name, variable in named_params(abstract).items()}
    if isinstance(weights, PackedWeights):
        arrays = {name: weights.load(name, leaf.sharding) for name, leaf in leaves.items()}
    elif isinstance(weights, RunWeights):
        arrays = weights.load(leaves)
    else:  # adapters are merged
        found = zip(leaves.items(), params_in_turn(weights, leaves), strict=True)
        cast = lambda x, leaf: put(x.astype(leaf.dtype, copy=False), leaf.sharding)
        arrays = {name: cast(x, leaf) for (name, leaf), x in found}
        if isinstance(weights, AdapterWeights):
            weights.verify()
    return map_params(abstract, lambda name, _: arrays[name])


def _fixed(config: ModelConfig) -> dict[str, Any]:
    # Without learned positions max_seq_len does not affect the weights.
    free = checksums.FREE if config.type == "gpt2" else checksums.FREE | {"max_seq_len"}
    # pyrefly: ignore[bad-argument-type]
    values = config.model_dump(exclude=free) | {"d_ff": config.ff_width}
    return values | ({"d_head": config.head_dim} if config.type == "llama3" else {})
