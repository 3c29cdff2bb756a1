"""The text of --help: every key of the configuration with its type, meaning and default."""

import argparse
import json
import shutil
from typing import Annotated, get_args, get_origin

from jaxllm.config.loading import keys
from jaxllm.config.model import MODEL_CONFIGS
from jaxllm.config.sections import Config

INDENT = 32  # columns before the meaning of an option
_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false", type(None): "null"}


def columns() -> int:
    """Width of the help text: the terminal's, at least 60 and at most 100."""
    return max(60, min(100, shutil.get_terminal_size().columns))


def help_text() -> str:
    """The help of all sections: one group per section, one entry per key."""
    seen = {("model.type", "|".join(MODEL_CONFIGS), "the architecture", ""): [*MODEL_CONFIGS]}
    # Keys whose type, meaning or default depends on the model have several entries.
    for model_type in MODEL_CONFIGS:
        for key, field in keys(model_type).items():
            default = "" if field.is_required() else f" (default {json.dumps(field.default)})"
            entry = key, _type_name(field.annotation), field.description, default
            if key != "model.type":
                seen.setdefault(entry, []).append(model_type)
    heads = {name: field.annotation.__doc__ for name, field in Config.model_fields.items()}
    heads["model"] = "The architecture and its size."
    formatter = argparse.HelpFormatter("", max_help_position=INDENT, width=columns())
    for section, head in heads.items():
        formatter.start_section(f"{section}: {head}".removesuffix("."))
        for (key, kind, meaning, default), models in seen.items():
            only = f" [{', '.join(models)}]" if len(models) < len(MODEL_CONFIGS) else ""
            if key.startswith(f"{section}."):
                text = f"{meaning}{only}{default}".replace("%", "%%")
                formatter.add_argument(argparse.Action([f"--{key}"], key, metavar=kind, help=text))
        formatter.end_section()
    return formatter.format_help()


def _type_name(annotation) -> str:
    """The types or words that a value may have, such as FLOAT|null."""
    if isinstance(annotation, str):  # a word of a Literal
        return annotation
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if alternatives := get_args(annotation):
        return "|".join(map(_type_name, alternatives))
    return _NAMES.get(annotation, "SECTION")
