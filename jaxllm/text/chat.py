"""Renders a conversation with a folder's chat template, as transformers' apply_chat_template.

A template is untrusted code, so it runs in Jinja2's sandbox.
"""

import contextlib
import datetime
import functools
import json
import re
import secrets
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.errors import InputError

# They surround what {% generation %} renders; no text has them, as they differ in each process.
_START, _STOP = (f"\ufdd0{secrets.token_hex(16)}\ufdd0" for _ in range(2))
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        return f"{_START}{caller()}{_STOP}"


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Unlike Jinja2's own filter, escapes no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    now = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template, {"raise_exception": _raise, "strftime_now": now})


def render(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any], whole=True
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the spans in it that the assistant says; whole: see rendered.

    Raises InputError with what the template complains about.
    """
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    for i, message in enumerate(messages):  # templates read thoughts under the first two names
        if thoughts := [message[key] for key in _THOUGHTS if key in message]:
            named = {"reasoning_content": thoughts[0]}
            messages[i] = {"thinking": thoughts[0]} | message | named
    tools = variables.get("tools") or []
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f"tools must be a list of objects (JSON schemas), not {tools!r:.50}")
    parts = [str(x) for m in messages if (x := m.get("content")) and isinstance(x, list | dict)]
    page = {"documents": None} | variables
    shown = lambda messages: _compiled(template).render(page | {"messages": messages})
    try:
        marked = shown(messages)
        if any(part in marked for part in parts):  # as Python prints a list
            raise ValueError("it takes content as text")
    except Exception as error:  # whatever the template does
        fix = "; content must be text: join the texts of its parts" * bool(parts)
        raise InputError(f"the chat template refuses the conversation: {error}{fix}") from error
    lost = []
    for i, message in enumerate(messages):
        if whole and message.get("tool_calls"):
            other = [*messages[:i], message | {"tool_calls": []}, *messages[i + 1 :]]
            with contextlib.suppress(Exception):  # the template needs the calls
                lost += [str(i + 1)] * (shown(other) == marked)
    if lost:
        raise InputError(
            f"the chat template leaves out tool_calls (message {', '.join(lost)}): write them as"
            ' content, or "content": null where it then shows them'
        )
    # A lone surrogate (legal in JSON, not in UTF-8) would stop the tokenizer.
    marked, text, spans = marked.encode("utf-8", "replace").decode(), "", []
    for part in re.split(f"({_START}.*?{_STOP})", marked, flags=re.DOTALL):
        spoken = part.removeprefix(_START).removesuffix(_STOP)
        if spoken != part:
            spans.append((len(text), len(text) + len(spoken)))
        text += spoken
    return text, spans
