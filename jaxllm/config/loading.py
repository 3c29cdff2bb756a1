"""Loads a YAML file and overrides into a checked `Config`, or raises a one-line InputError."""

import difflib
import os
import re
from inspect import isclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxllm.config import yaml_text
from jaxllm.config.model import MODEL_CONFIGS, Section
from jaxllm.config.sections import Config, Sampling
from jaxllm.errors import InputError
from jaxllm.files import read_text

_PACKAGE = Path(__file__).resolve().parent.parent
_SHIPPED = _PACKAGE / "configs"  # in a wheel; a checkout has them beside the packages
CONFIG_DIR = _SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent / "configs"


def load(name_or_path: str, overrides: dict[str, Any] | None = None) -> Config:
    """Reads a configuration and applies overrides {"section.key": value, perhaps as typed}.

    A bare name is looked up in configs/.  Raises InputError.
    """
    path = _find(name_or_path)
    try:
        raw = yaml_text.read(read_text(path))
    except RecursionError as e:
        raise InputError(f"{path} cannot be read as YAML: it is nested too deep") from e
    except (yaml.YAMLError, ValueError, OSError) as e:  # ValueError: bad UTF-8, huge integers
        raise InputError(f"{path} cannot be read as YAML: {' '.join(str(e).split())}") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds {type(raw).__name__}, not sections like model: and train:")
    for section, values in raw.items():
        if section in Config.model_fields and not isinstance(values, dict):
            raise InputError(f"{path}: {section} is {values!r}, not a section with keys")
    kind = (overrides or {}).get("model.type", raw.get("model", {}).get("type"))
    if not isinstance(kind, str) or kind not in MODEL_CONFIGS:
        raise InputError(f"model.type={kind!r} is not one of {', '.join(MODEL_CONFIGS)}")
    known = keys(kind)
    for key in flat(raw):
        if key not in Config.model_fields:
            _check_known(key, known, f" in {path.name}", kind)
    for key, text in (overrides or {}).items():
        _check_known(key, known, "", kind)
        *sections, name = key.split(".")
        values = raw
        for section in sections:
            if not isinstance(values.get(section), dict):
                values[section] = {}
            values = values[section]
        values[name] = parse(key, str(text), known[key].annotation)
    try:
        return Config.model_validate(raw)
    except ValidationError as e:
        raise InputError(first_error(e, path)) from e


def keys(model_type: str) -> dict[str, Any]:
    """{"section.key": pydantic FieldInfo} of every setting of a run with this model type."""
    found = {}

    def walk(prefix, section):
        for name, field in section.model_fields.items():
            kinds = (field.annotation, *get_args(field.annotation))
            inner = next((k for k in kinds if isclass(k) and issubclass(k, Section)), None)
            if inner is not None:
                walk(f"{prefix}{name}.", inner)
            if inner is None or type(None) in get_args(field.annotation):
                found[f"{prefix}{name}"] = field

    for name, field in Config.model_fields.items():
        walk(f"{name}.", MODEL_CONFIGS[model_type] if name == "model" else field.annotation)
    return found


def sampling(mark: str = "", **options: Any) -> Sampling:
    """Checked settings of the section `sample`; raises InputError, with `mark` before the name."""
    known = [name for name in Sampling.model_fields if name not in ("prompt", "every")]  # a run's
    if unknown := sorted(options.keys() - set(known)):
        raise InputError(f"{mark}{unknown[0]}: there are only {', '.join(known)}")
    plain = lambda x: x.item() if getattr(x, "ndim", None) == 0 else x  # a number of NumPy or JAX
    try:
        return Sampling(**{name: plain(x) for name, x in options.items()})
    except ValidationError as e:
        raise InputError(mark + first_error(e, Path())) from e


def _find(name_or_path: str) -> Path:
    # Accepts llama3_small, llama3_small.yaml or a path, also of a pipe; configs/ comes last.
    tried = [Path(f"{name_or_path}{end}").expanduser() for end in ("", ".yaml")]
    for path in (*tried, *(CONFIG_DIR / p for p in tried)):
        if os.path.exists(path) and not path.is_dir():
            return path
    if os.path.islink(tried[0]):  # pathlib would raise for a name that is too long
        gone = os.readlink(tried[0])
        raise InputError(f"configuration {name_or_path} is a link to {gone}, which does not exist")
    if os.path.isdir(tried[0]):
        raise InputError(f"configuration {name_or_path} is a folder; name a YAML file in it")
    known = sorted(p.stem for p in CONFIG_DIR.glob("*.yaml"))
    near = difflib.get_close_matches(Path(name_or_path).stem, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; configs/ has {', '.join(known)}"
    raise InputError(f"no configuration {name_or_path}{hint}")


def _check_known(key: str, known: dict, where: str, model_type: str) -> None:
    if key not in known:
        if others := [other for other in MODEL_CONFIGS if key in keys(other)]:
            raise InputError(
                f"{key}{where} is for model.type={' and '.join(others)}, not {model_type}: omit it"
            )
        meant = re.sub(r"\blr\b", "learning_rate", key.lower())
        near = [other for other in known if other.endswith(f".{meant.rpartition('.')[2]}")]
        near = near or difflib.get_close_matches(meant, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown key {key}{where}{hint}")


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value} of nested sections; a section's own value is "a section"."""
    found = {}
    for name, value in values.items():
        found[prefix + name] = "a section" if isinstance(value, dict) else value
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
    return found


def parse(key: str, text: str, annotation: Any) -> Any:
    """The value of a key from its text on the command line; raises InputError."""
    if text.lower() in ("null", "none") and type(None) in get_args(annotation):
        return None
    try:
        value = TypeAdapter(annotation).validate_strings(text)
    except ValidationError as e:
        raise InputError(f"{key}={text!r}: {_plain(e.errors()[0]['msg'])}") from e
    # pydantic reads 1_0 as 10 and 010 as 10, which YAML 1.1 reads as 8.
    if type(value) in (int, float) and re.search(r"_|^\s*[-+]?0\d", text):
        raise InputError(f"{key}={text!r}: must be a number without _ or leading zeros")
    return value


def first_error(e: ValidationError, path: Path) -> str:
    """pydantic's first error in one line; path: the file that may lack a key."""
    error = e.errors()[0]
    # The union of the models adds the type that pydantic chose.
    key = ".".join(str(part) for part in error["loc"] if part not in MODEL_CONFIGS)
    message = _plain(error["msg"])
    if error["type"] == "missing":
        return f"{key} is missing in {path}"
    if error["type"] == "value_error":  # our own checks already name the value
        return f"{key}: {message}" if key else message
    return f"{key}={error['input']!r}: {message}"


_WORDS = (  # pydantic's wording, which addresses programmers, and ours
    ("Input should be ", "must be "),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("an object", "a section with keys"),
    ("String should have at least 1 character", "must not be empty"),
    ("Extra inputs are not permitted", "is no key; in YAML a.b is the key b of a section a"),
)


def _plain(message: str) -> str:
    """Translates pydantic's message into our wording."""
    message = message.removeprefix("Value error, ").partition(", unable to")[0]
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    plain = lambda x: f"{x[1]} {float(x[2]):.15g}"  # 1e-30, not 0.000000000000000000000000000001
    return re.sub(r"\b(least|most) (\d+\.?\d*)", plain, message)
