"""Renders a conversation with a folder's chat template, as transformers' apply_chat_template.

A template is untrusted code, so it runs in Jinja2's sandbox.
"""

import contextlib
import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable
from itertools import accumulate, product
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.errors import InputError

# Marks around what {% generation %} renders; random in each process, so no text has them.
_START, _STOP = (f"\ufdd0{secrets.randbits(128)}\ufdd0" for _ in range(2))
_json = functools.partial(json.dumps, ensure_ascii=False)  # Jinja2's own filter escapes HTML
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_CALLS = ("tool_calls", "function_call")


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        at, context = next(parser.stream).lineno, nodes.ContextReference()
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked", [context]), [], [], body).set_lineno(at)

    def _marked(self, context, caller) -> str:
        return caller() if _START in context else f"{_START}{caller()}{_STOP}"


def _raise(message: str):
    raise jinja2.TemplateError(message)


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
    for name, given in dict(messages=messages, tools=variables.get("tools") or []).items():
        if not (isinstance(given, list | tuple) and all(isinstance(x, dict) for x in given)):
            raise InputError(f"{name} must be a list of objects (JSON), not {given!r:.50}")
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    for i, message in enumerate(messages):  # templates read thoughts under the first two names
        if thoughts := [message[key] for key in _THOUGHTS if key in message]:
            messages[i] = {"thinking": thoughts[0]} | message | {_THOUGHTS[0]: thoughts[0]}
    parts = [str(x) for m in messages if (x := m.get("content")) and isinstance(x, list | dict)]
    variables = {"documents": None} | variables
    shown = lambda m, **more: _compiled(template).render(variables | {"messages": m} | more)
    try:
        number = _START[1:-1]  # stands for JSON text: does the template quote it?
        asked = _opened(messages, lambda _: number)
        if asked != messages and f'"{number}"' in shown(asked):
            messages = _opened(messages, json.loads)
        marked = shown(messages)
        if any(part in marked for part in parts):  # as Python prints a list
            raise ValueError("it takes content as text")
        said = re.split(f"{_START}|{_STOP}", marked)  # every second part in {% generation %}
        if said[1:] and shown(messages, **{_START: True}) != "".join(said):
            raise ValueError("{% generation %} must be around what is printed, after trim and such")
    except Exception as error:  # whatever the template does
        fix = "; content must be text: join the texts of its parts" * bool(parts)
        raise InputError(f"the chat template refuses the conversation: {error}{fix}") from error
    # A system message may belong to a last question, and calls may replace the content beside them.
    whose = lambda i, m: i if isinstance(m.get("content"), list) else str(m.get("role"))
    last = {whose(i, m): i for i, m in enumerate(messages) if not any(map(m.get, _CALLS))}
    last.pop("system", None)
    asked = [*product(range(len(messages)), _CALLS), *product(sorted(last.values()), ["content"])]
    lost = {}
    for i, key in asked if whole else ():
        for other in _others(key, messages[i][key]) if messages[i].get(key) else ():
            with contextlib.suppress(Exception):  # the template needs the calls
                found = shown([*messages[:i], messages[i] | {key: other}, *messages[i + 1 :]])
                lost |= dict.fromkeys([f"{key} (message {i + 1})"] * (found == marked))
    if lost:
        raise InputError(
            f"the chat template leaves out {', '.join(lost)}: write parts and calls as text, or"
            ' "content": null where it then shows calls, and other roles as roles that it shows'
        )
    # A lone surrogate (legal in JSON, not in UTF-8) would stop the tokenizer.
    text, ends = "".join(said).encode("utf-8", "replace").decode(), [*accumulate(map(len, said))]
    return text, list(zip(ends[::2], ends[1::2], strict=False))


def _opened(value: Any, read: Callable[[str], Any]) -> Any:
    """Messages in which `read` parses calls' arguments that are JSON text, as in OpenAI's API."""
    if not isinstance(value, dict):
        return [_opened(x, read) for x in value] if isinstance(value, list) else value
    found = {key: _opened(value[key], read) for key in (*_CALLS, "function") if key in value}
    if isinstance(text := value.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            found["arguments"] = read(text)
    return value | found


def _others(key: str, value: Any) -> list[Any]:
    """Variants that a template should show differently: one call less, or a part's text longer."""
    if key != "content":
        return [value[:-1] if isinstance(value, list) else []]
    if isinstance(value, dict):
        return [value | {".": "."}]
    if not isinstance(value, list):
        return [f"{value}." if isinstance(value, str) else not value]
    texts = [x.get("text") if isinstance(x, dict) else x for x in value]
    longer = lambda x: x | {"text": f"{x['text']}."} if isinstance(x, dict) else f"{x}."
    places = [i for i, text in enumerate(texts) if isinstance(text, str)]
    return [[*value[:i], longer(value[i]), *value[i + 1 :]] for i in places]
