"""Configuration: one YAML file is one complete run, and every value can be overridden by a flag.

`load(name_or_path, overrides)` reads the file, applies `--section.key VALUE` overrides and checks
everything; whatever is wrong becomes an `InputError` of one line that names the key and the value.
"""

import difflib
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from jaxllm.config.model import (
    MODEL_CONFIGS,
    Count,
    Fraction,
    GPT2Config,
    Llama3Config,
    ModelConfig,
    Natural,
    Positive,
    Section,
    Seed,
    VLSTMConfig,
    divides,
    round_up,
)
from jaxllm.errors import InputError

__all__ = [
    "CONFIG_DIR",
    "MODEL_CONFIGS",
    "Config",
    "DataConfig",
    "GPT2Config",
    "InputError",
    "Llama3Config",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfileConfig",
    "SampleConfig",
    "TrainConfig",
    "VLSTMConfig",
    "help_text",
    "keys",
    "load",
    "round_up",
]

CONFIG_DIR = Path(__file__).resolve().parent.parent.parent / "configs"


SMALLEST_BPE = 257  # entries of a byte-level BPE: every byte, and the end of text
LARGEST_BPE = 2**22  # its library makes room for all at once, and aborts where there is none


class DataConfig(Section):
    """Where the text comes from."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "shards"] = Field(
        "stdlib", description="stdlib: the source text of Python's own library, always there"
    )
    path: str | None = Field(None, description="file, folder or glob of the training data")
    val_path: str | None = Field(None, description="of the validation data; null: a part held out")
    text_column: str = Field("text", description="the text's column in JSON lines and parquet")
    tokenizer: str | None = Field(
        None, description="a tokenizer.json; null: train a byte-level BPE on the data, once"
    )
    tokenizer_vocab_size: Annotated[int, Field(ge=SMALLEST_BPE, le=LARGEST_BPE)] = Field(
        4096, description="entries of the tokenizer that is trained"
    )
    cache_dir: str | None = Field(
        None,
        description="where trained tokenizers and encoded text are kept; null: jaxllm in"
        " $XDG_CACHE_HOME or ~/.cache",
    )
    pack: Literal["stream", "documents"] = Field(
        "stream",
        description="stream: a sequence runs on over the ends of documents; documents: no token"
        " sees another document, and positions restart with each",
    )
    shuffle: bool = Field(True, description="a new random order of the samples each epoch")
    prefetch: Natural = Field(8, description="batches read ahead; 0: none")

    @model_validator(mode="after")
    def _check(self):
        if self.source != "stdlib" and self.path is None:
            raise ValueError(f"source={self.source} needs data.path")
        return self


class TrainConfig(Section):
    """How long, how much, how often."""

    steps: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="optimizer steps")
    batch_size: Count = Field(description="sequences of one step, over all devices")
    seq_len: Count = Field(description="tokens of one sequence")
    grad_accum: Count = Field(1, description="parts in which the batch is computed, one by one")
    seed: Seed = Field(0, description="seed of the weights and of the data order")
    log_every: Count = Field(1, description="steps between two log lines")
    eval_every: Natural = Field(100, description="steps between two evaluations; 0: at the end")
    eval_batches: Count = Field(8, description="validation batches of one evaluation")
    checkpoint_every: Natural = Field(200, description="steps between checkpoints; 0: at the end")
    keep_checkpoints: Count = Field(2, description="newest checkpoints kept, besides the best")
    skip_spikes: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="skip updates whose loss exceeds the mean of the last 100 by so many standard"
        " deviations; 0: none (updates that are not finite are always skipped)",
    )
    max_skips: Count = Field(5, description="updates skipped in a row that end the run")
    deterministic: bool = Field(
        True, description="bit-for-bit repeatable programs (XLA flags; see README for the cost)"
    )

    @model_validator(mode="after")
    def _check(self):
        divides(self.grad_accum, self.batch_size, "grad_accum", "batch_size")
        return self


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: Positive = Field(description="its peak, which the warm-up reaches")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after the warm-up; wsd: constant, then a linear fall at the end"
    )
    warmup_steps: Natural = Field(0, description="steps of linear rise: (step + 1) / warmup")
    final_fraction: Fraction = Field(
        0.1, description="learning rate at the end, as a part of the peak"
    )
    decay_fraction: Fraction = Field(
        0.2, description="wsd: the part of all steps in which it falls"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="on matrices only")
    b1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="decay of the first moment")
    b2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="decay of the second moment")
    eps: Positive = Field(1e-8, description="added to the root of the second moment")
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global norm of the gradient; 0: no clipping"
    )


class MeshConfig(Section):
    """How the devices are divided: their product is the number of devices."""

    data: Annotated[int, Field(ge=-1)] = Field(
        -1, description="copies of the model that share the batch; -1: all remaining devices"
    )
    fsdp: Count = Field(1, description="devices that share the batch and split the parameters")
    tensor: Count = Field(1, description="devices that split each layer's heads and widths")
    distributed: bool = Field(
        False, description="several hosts: jax.distributed finds them in the cluster's environment"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.data == 0:
            raise ValueError("data=0 must be -1 or at least 1")
        return self


class SampleConfig(Section):
    """The text that the model writes at the end of the run, and on the way."""

    prompt: str = Field("def ", description="what the sample goes on from")
    tokens: Natural = Field(200, description="tokens to write; 0: no sample")
    every: Natural = Field(0, description="steps between two samples; 0: at the end")
    temperature: Annotated[float, Field(ge=0)] = Field(0.8, description="0: the likeliest token")
    top_k: Natural = Field(50, description="choose among the k likeliest; 0: among all")
    seed: Seed = Field(0, description="seed of the choice")

    @model_validator(mode="after")
    def _check(self):
        if any("\ud800" <= c <= "\udfff" for c in self.prompt):
            raise ValueError(f"prompt={self.prompt!r} is not UTF-8")
        return self


class ProfileConfig(Section):
    """A trace of a few steps."""

    steps: str | None = Field(
        None, description="10:15 traces the steps 10 to 14 and prints their ten largest kernels"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.steps is None:
            return self
        if not re.fullmatch(r"[1-9]\d{0,17}:[1-9]\d{0,17}", self.steps, re.ASCII):
            raise ValueError(
                f"steps={self.steps!r} is not FIRST:END; 10:15 traces the steps 10 to 14"
            )
        first, end = self.span
        if first >= end:
            raise ValueError(f"steps={self.steps!r} is empty; the end must exceed the first step")
        return self

    @property
    def span(self) -> tuple[int, int]:
        """(first step, the step after the last); (0, 0): none."""
        first, _, end = (self.steps or "0:0").partition(":")
        return int(first), int(end)


class Config(Section):
    """One complete run."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)

    @model_validator(mode="after")
    def _check(self):
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} exceeds"
                f" model.max_seq_len={self.model.max_seq_len}"
            )
        tokens = self.train.batch_size * self.train.seq_len
        if tokens >= 2**31:  # rows are counted in int32
            raise ValueError(
                f"train.batch_size={self.train.batch_size} x train.seq_len={self.train.seq_len} are"
                f" {tokens} tokens a step; at most {2**31 - 1}"
            )
        if self.profile.span[1] - 1 > self.train.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} ends after train.steps={self.train.steps};"
                f" its end is at most {self.train.steps + 1}"
            )
        return self

    def to_yaml(self) -> str:
        """The complete, resolved configuration; `load` reads it back."""
        return yaml.dump(self.model_dump(), Dumper=_YamlDumper, sort_keys=False)


def load(name_or_path: str, overrides: dict[str, str] | None = None) -> Config:
    """Reads a configuration and applies overrides {"section.key": "value as typed"}.

    A bare name is looked up in configs/.  Raises InputError.
    """
    path = _find(name_or_path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_YamlLoader)
    except RecursionError as e:
        raise InputError(f"{path} cannot be read as YAML: it is nested too deep") from e
    except (yaml.YAMLError, ValueError, OSError) as e:  # of values: bytes, endless numbers
        raise InputError(f"{path} cannot be read as YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, not sections like model: and train:")
    for section, values in raw.items():
        if section in Config.model_fields and not isinstance(values, dict):
            raise InputError(f"{path}: {section} is {values!r}, not a section with keys")
    model = raw.get("model", {})
    kind = (overrides or {}).get("model.type", model.get("type"))
    if not isinstance(kind, str) or kind not in MODEL_CONFIGS:
        raise InputError(f"model.type={kind!r} is not one of {', '.join(MODEL_CONFIGS)}")
    known = keys(kind)
    for key in _flatten(raw):
        _check_known(key, known, f" in {path.name}", kind)
    for key, text in (overrides or {}).items():
        _check_known(key, known, "", kind)
        _set(raw, key, _parse(key, text, known[key].annotation))
    try:
        return Config.model_validate(raw)
    except ValidationError as e:
        raise InputError(_one_line(e)) from e


def keys(model_type: str) -> dict[str, Any]:
    """{"section.key": pydantic FieldInfo} of every value that a run of this model type has."""
    found = {}

    def walk(prefix, section):
        for name, field in section.model_fields.items():
            inner = _section_of(field.annotation)
            if inner is not None:
                walk(f"{prefix}{name}.", inner)
            if inner is None or type(None) in get_args(field.annotation):
                found[f"{prefix}{name}"] = field

    for name, field in Config.model_fields.items():
        walk(f"{name}.", MODEL_CONFIGS[model_type] if name == "model" else field.annotation)
    return found


def help_text() -> str:
    """Every key with its type, meaning and default, for --help."""
    lines, seen = [], {}
    for model_type in MODEL_CONFIGS:
        for key, field in keys(model_type).items():
            # A key may mean something else, or have another default, in another model.
            meaning = (_type_name(field.annotation), field.description, field.default)
            same = (key,) if key == "model.type" else (key, *meaning)
            seen.setdefault(same, (field, []))[1].append(model_type)
    for (key, *_), (field, models) in seen.items():
        required = field.is_required() or key == "model.type"
        default = "" if required else f" (default {_shown(field)})"
        only = (
            ""
            if len(models) == len(MODEL_CONFIGS) or key == "model.type"
            else (f" [{', '.join(models)}]")
        )
        kind = "|".join(MODEL_CONFIGS) if key == "model.type" else _type_name(field.annotation)
        lines.append(f"  --{key} {kind}\n      {field.description}{only}{default}")
    return "\n".join(lines)


class _YamlLoader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number and refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.YAMLError(f"key {key!r} is not a name{key_node.start_mark}")
            if key in seen:
                raise yaml.YAMLError(f"key {key} is given twice{key_node.start_mark}")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _YamlDumper(yaml.SafeDumper):
    """SafeDumper that quotes a text which the loader would take for a number."""


# YAML 1.1 would also take 1_0 for 10, 010 for 8 and 1:30 for 90.
_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
    for first, found in _YamlLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in (
    ("int", r"^[-+]?(0|[1-9][0-9]*)$"),
    (
        "float",
        r"^[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
        r"|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$",
    ),
):
    for _yaml in (_YamlLoader, _YamlDumper):
        _yaml.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+.0123456789")
        )


def _find(name_or_path: str) -> Path:
    # llama3_small, llama3_small.yaml and a path all work; configs/ is looked at last.
    tried = [Path(name_or_path), Path(f"{name_or_path}.yaml")]
    tried += [CONFIG_DIR / p for p in tried]
    for path in tried:
        if path.is_file():
            return path
    known = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))
    near = difflib.get_close_matches(Path(name_or_path).stem, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; configs/ has {', '.join(known)}"
    raise InputError(f"no configuration {name_or_path}{hint}")


def _check_known(key: str, known: dict, where: str, model_type: str) -> None:
    if key not in known:
        others = [other for other in MODEL_CONFIGS if key in keys(other)]
        if others:
            raise InputError(
                f"{key}{where} is a key of model.type={' and '.join(others)}, not of {model_type};"
                " leave it out"
            )
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown key {key}{where}{hint}")


def _flatten(raw: dict, prefix: str = "") -> list[str]:
    found = []
    for name, value in raw.items():
        if isinstance(value, dict) and value:
            found += _flatten(value, f"{prefix}{name}.")
        elif prefix or name not in Config.model_fields or not isinstance(value, dict):
            found.append(f"{prefix}{name}")
    return found


def _set(raw: dict, key: str, value) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(raw.get(section), dict):
            raw[section] = {}
        raw = raw[section]
    raw[name] = value


def _parse(key: str, text: str, annotation):
    if text.lower() in ("null", "none") and type(None) in get_args(annotation):
        return None
    try:
        value = TypeAdapter(annotation).validate_strings(text)
    except ValidationError as e:
        raise InputError(f"{key}={text!r}: {sentence(e.errors()[0]['msg'])}") from e
    if not isinstance(value, str) and "_" in text:  # pydantic takes 1_0 for 10
        raise InputError(f"{key}={text!r}: must be a number without _")
    return value


def _section_of(annotation) -> type[Section] | None:
    for a in (annotation, *get_args(annotation)):
        if isinstance(a, type) and issubclass(a, Section):
            return a
    return None


def _one_line(e: ValidationError) -> str:
    error = e.errors()[0]
    # pydantic puts the chosen member of the model union into the location: leave it out
    at = [str(p) for p in error["loc"]]
    if len(at) > 1 and at[0] == "model" and at[1] in MODEL_CONFIGS:
        del at[1]
    key, message = ".".join(at), sentence(error["msg"])
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] == "value_error":  # our own checks name their values themselves
        return f"{key}: {message}" if key else message
    return f"{key}={error['input']!r}: {message}"


_WORDS = (  # pydantic's, which speaks to programmers, and ours
    ("Input should be ", "must be "),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("an object", "a section with keys"),
)


def sentence(message: str) -> str:
    """pydantic's message in our words."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return message


def _shown(field) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def _type_name(annotation) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(map(str, get_args(annotation)))
    if origin in (Union, types.UnionType):
        return "|".join("null" if a is type(None) else _type_name(a) for a in get_args(annotation))
    return {"int": "INT", "float": "FLOAT", "str": "TEXT", "bool": "true|false"}.get(
        getattr(annotation, "__name__", ""), "SECTION"
    )
