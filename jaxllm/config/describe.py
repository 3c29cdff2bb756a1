"""The text of --help: every key of the configuration with its type, meaning and default."""

import json
import shutil
import textwrap
import types
from typing import Annotated, Literal, Union, get_args, get_origin

from jaxllm.config.loading import keys
from jaxllm.config.model import MODEL_CONFIGS
from jaxllm.config.sections import Config

INDENT = 32  # columns before the meaning of an option


def columns() -> int:
    """Width of the help text: the terminal's, at least 60 and at most 100."""
    return max(60, min(100, shutil.get_terminal_size().columns))


def help_text() -> str:
    """The help of all sections: one group per section, one entry per key."""
    heads = {name: field.annotation.__doc__ for name, field in Config.model_fields.items()}
    heads["model"] = "The architecture and its size."
    groups = {name: [f"{name}: {head}"] for name, head in heads.items()}
    groups["model"].append(_entry(f"--model.type {'|'.join(MODEL_CONFIGS)}", "the architecture"))
    seen = {}  # keys whose type, meaning or default depends on the model have several entries
    for model_type in MODEL_CONFIGS:
        for key, field in keys(model_type).items():
            default = "" if field.is_required() else f" (default {json.dumps(field.default)})"
            entry = key, _type_name(field.annotation), field.description, default
            seen.setdefault(entry, []).append(model_type)
    for (key, kind, meaning, default), models in seen.items():
        only = f" [{', '.join(models)}]" if len(models) < len(MODEL_CONFIGS) else ""
        if key != "model.type":
            entry = _entry(f"--{key} {kind}", f"{meaning}{only}{default}")
            groups[key.partition(".")[0]].append(entry)
    return "\n\n".join(map("\n".join, groups.values()))


def _entry(option: str, meaning: str) -> str:
    indent = " " * INDENT
    text = textwrap.fill(meaning, columns(), initial_indent=indent, subsequent_indent=indent)
    if len(option) > INDENT - 4:
        return f"  {option}\n{text}"
    return f"  {option}".ljust(INDENT) + text[INDENT:]


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
