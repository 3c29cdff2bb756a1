"""A record in one of four forms -> its messages -> text by the chat template, and what has loss."""

import datetime
import re
from collections.abc import Callable
from typing import Any

from jaxllm.data.cache import digest
from jaxllm.errors import InputError
from jaxllm.files import parse_json
from jaxllm.text import Tokenizer

COLUMNS = frozenset(
    "messages conversations prompt completion instruction input output system system_prompt tools"
    " functions history label chat_template_kwargs".split()
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"} | {
    name: name for name in ("assistant", "system", "tool")
}
# Other trainers' keys for messages without loss, and the value that leaves the loss on.
_MASKS = {"train": True, "training": True, "loss": True, "mask": False, "train_detail": []}
# Some templates print today's date.  The ids must not depend on it; Llama's fall back to this day.
_DATE = datetime.datetime(2024, 7, 26)
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Refused(Exception):
    """Why a conversation cannot be trained on."""


def conversation(values: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The messages of a record in one of the four forms, and how many are a prompt without loss."""
    given = {name: value for name, value in values.items() if value is not None}
    asked = 0
    if key := next((key for key in ("messages", "conversations") if key in given), None):
        messages = _said(key, given[key])
    elif "prompt" in given and "completion" in given:
        if given.get("label") is False:  # preference data
            raise Refused("label=false: a completion to unlearn")
        messages = _said("prompt", given["prompt"], "user")
        asked = len(messages)
        messages += _said("completion", given["completion"], "assistant")
    elif "instruction" in given and "output" in given:
        parts = [given["instruction"], given.get("input", "")]
        if not all(isinstance(part, str) for part in parts):
            raise InputError("instruction and input must be text")
        if given.get("history"):
            raise InputError("history is not read: write its turns and this one as messages")
        messages = _said("instruction", "\n\n".join(filter(None, parts)), "user")
        messages += _said("output", given["output"], "assistant")
    else:
        raise InputError(
            f"is in no known form (it has {', '.join(given) or 'nothing'}): a conversation is"
            " messages, conversations, prompt and completion, or instruction and output"
        )
    if not isinstance(system := given.get("system") or given.get("system_prompt", ""), str):
        raise InputError(f"system={system!r:.50} must be text")
    if system and messages and messages[0]["role"] != "system":
        messages, asked = [{"role": "system", "content": system}, *messages], asked + (asked > 0)
    return messages, asked


def _said(key: str, value: Any, role: str | None = None) -> list[dict[str, Any]]:
    """A list of messages, or text as one message of `role`."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_message(key, message) for message in _list(key, value, " or text" * bool(role))]


def _list(key: str, value: Any, more: str = "") -> list[Any]:
    """A list, or one in JSON, as parquet often has it; more: what else the key takes."""
    if isinstance(value, str):
        try:
            value = [] if value.strip() == "null" else parse_json(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{key} are not JSON: {error}") from error
    if not isinstance(value, list):
        raise InputError(f"{key}={value!r:.50} must be a list{more}")
    return value


def _message(key: str, message: Any) -> dict[str, Any]:
    known = isinstance(message, dict) and (message.get("role") or message.get("from"))
    if not isinstance(known, str):
        raise InputError(f"{key} must hold messages with role and content, or with from and value")
    if message.get("weight", 1) not in (0, 1, None):
        raise InputError(f"{key}: weight={message['weight']!r:.50} must be 0 or 1")
    for name, usual in _MASKS.items():
        if (value := message.get(name)) not in (usual, None):
            raise InputError(f"{key}: {name}={value!r:.50} is not read; weight=0 means no loss")
    if not message.get("role"):
        if known not in _ROLES:
            raise InputError(f"from={known!r} must be one of {', '.join(_ROLES)}")
        said = {"role": _ROLES[known], "content": message.get("value")}
        message = {key: x for key, x in message.items() if key not in ("from", "value")} | said
    if isinstance(calls := message.get("tool_calls"), str | list):
        message = message | {"tool_calls": (calls and _list("tool_calls", calls)) or None}
    if message.get("content") is None and not message.get("tool_calls"):
        raise Refused("a message with neither content nor tool_calls")
    if isinstance(said := message.get("content"), bytes) or said != said:
        raise InputError(f"{key}: content={said!r:.50} must be text")
    return message


def render(tokenizer: Tokenizer, values: dict[str, Any], loss: str) -> tuple[str, list]:
    """The text of a conversation by the chat template, and the spans of it that have loss.

    loss: "all", or "assistant": what {% generation %} marks or, in a template without this mark,
        what an assistant's message adds to the text of the messages before it.  A message with
        weight 0 has none.
    Raises InputError for a wrong form, Refused for a conversation that has no such spans.
    """
    messages, asked = conversation(values)
    if not messages:
        raise Refused("no message")
    if values.get("functions"):
        raise InputError("functions is not read: write them as tools, and calls as tool_calls")
    tools = _list("tools", values.get("tools") or []) or None

    def show(count: int, answer: bool = False) -> tuple[str, list]:
        options: dict[str, Any] = dict(tools=tools, answer=answer, whole=count == len(messages))
        options |= {"chat_template_kwargs": values.get("chat_template_kwargs")}
        try:
            return tokenizer.rendered(messages[:count], strftime_now=_DATE.strftime, **options)
        except InputError as error:
            raise Refused(" ".join(str(error).split())) from error

    text, spans = show(len(messages))
    silent = {i for i, m in enumerate(messages) if m.get("weight") == 0}
    if loss == "all":
        spans = [_added(tokenizer, show, text, i) for i in sorted(silent - {0})]
        if 0 in silent:
            until, said = show(1)[0], messages[0].get("content")
            if not text.startswith(until) or (isinstance(said, str) and said.strip() not in until):
                raise Refused("the chat template does not show where a message of weight 0 is")
            spans.insert(0, (0, len(until)))
        edges = [0, *(edge for span in spans for edge in span), len(text)]
        return text, list(zip(edges[::2], edges[1::2], strict=True))
    silent |= set(range(asked))
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if silent.issuperset(answers):
        raise Refused("no assistant's turn")
    if has_marks(tokenizer, tools):
        without = [_added(tokenizer, show, text, i) for i in answers if i in silent]
        return text, [(a, b) for a, b in spans if all(b <= x or y <= a for x, y in without)]
    return text, [_added(tokenizer, show, text, i) for i in answers if i not in silent]


def has_marks(tokenizer: Tokenizer, tools: Any = None) -> bool:
    """Whether the chat template marks what the assistant says with {% generation %}."""
    return _MARK.search(tokenizer.chat_template(tools)) is not None


def _added(tokenizer: Tokenizer, show: Callable, text: str, i: int) -> tuple[int, int]:
    """The span of message i in the text of the whole conversation, without its heading."""
    until = show(i + 1)[0]
    heading = "" if i else show(1, True)[0].removeprefix(until)
    if heading and heading in until:  # a template may put more before a first message, or need one
        before = until[: until.index(heading) + len(heading)]
    else:  # R1's heading asks for thoughts that messages do not have; then it has loss, too
        before = next((x for a in (True, False) if until.startswith(x := show(i, a)[0])), None)
    if before is None or not text.startswith(until):
        raise Refused(
            "the chat template renders earlier messages differently when others follow;"
            " {% generation %} helps only where every answer has loss"
        )
    ended = until.rstrip()  # what follows the token that ends a turn is not the assistant's
    end = len(ended) if ended.endswith(tuple(filter(None, tokenizer.special))) else len(until)
    return len(before), end


def text_key(tokenizer: Tokenizer) -> str:
    """A hash of all that a conversation's ids depend on; raises InputError without a template."""
    tokenizer.chat_template()
    return digest(tokenizer.digest, tokenizer.chat_templates, tokenizer.chat_names)
