"""Encodes conversations, with a mark of the tokens that have loss, once.

A folder of encoded conversations (in the cache, or from `jaxllm data prepare`) has
conversations.chat, a shard with the entry 2 id + (1 if the token has loss) for each token,
index.npz with the length of each conversation and a hash of its text as a number from 0 to 1, by
which some are held out for validation, and chat.json, which reports what went in.
"""

import datetime
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.cache import build_once, cache_folder, digest
from jaxllm.data.corpus import progress_bar
from jaxllm.data.loader import Tokens
from jaxllm.data.packing import Packed
from jaxllm.data.paths import PREPARED
from jaxllm.data.shards import ShardWriter, open_shard
from jaxllm.data.sources import Record, Source, hold_out_rank
from jaxllm.errors import InputError
from jaxllm.files import lock, write_json
from jaxllm.text import Tokenizer
from jaxllm.text.files import read_page

VERSION = 1  # increment it when the same conversations and tokenizer would give other tokens
_BATCH = 1 << 22  # characters encoded at a time
_NAMED = 3  # refused conversations that a report names for each reason; chat.json has all
COLUMNS = frozenset(
    "messages conversations prompt completion instruction input output system tools".split()
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"} | {
    name: name for name in ("assistant", "system", "tool")
}
# Some templates print today's date.  The ids must not depend on the day; Llama's fall back to this.
_DATE = datetime.datetime(2024, 7, 26)
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Refused(Exception):
    """Why a conversation cannot be trained on."""


def conversation(values: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The messages of a record in any of the four forms, and how many are a prompt, without loss.

    Raises InputError for any other form.
    """
    given = {name: value for name, value in values.items() if value is not None}
    asked = 0
    if "messages" in given:
        messages = _said("messages", given["messages"])
    elif "conversations" in given:
        messages = _said("conversations", given["conversations"])
    elif "prompt" in given and "completion" in given:
        messages = _said("prompt", given["prompt"], "user")
        asked = len(messages)
        messages += _said("completion", given["completion"], "assistant")
    elif "instruction" in given and "output" in given:
        parts = [given["instruction"], given.get("input", "")]
        if not all(isinstance(part, str) for part in parts):
            raise InputError("instruction and input must be text")
        messages = _said("instruction", "\n\n".join(filter(None, parts)), "user")
        messages += _said("output", given["output"], "assistant")
    else:
        raise InputError(
            f"is in no known form (it has {', '.join(given) or 'nothing'}): a conversation is"
            " messages, conversations, prompt and completion, or instruction and output"
        )
    system = given.get("system")
    if isinstance(system, str) and messages and messages[0]["role"] != "system":
        messages, asked = [{"role": "system", "content": system}, *messages], asked + (asked > 0)
    return messages, asked


def _said(key: str, value: Any, role: str | None = None) -> list[dict[str, Any]]:
    """A list of messages, or text as one message of `role`."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise InputError(f"{key} must be a list of messages{' or text' * bool(role)}")
    return [_message(key, message) for message in value]


def _message(key: str, message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        return message
    if not isinstance(message, dict) or not isinstance(message.get("value"), str):
        raise InputError(f"{key} must hold messages with role and content, or with from and value")
    if message.get("from") not in _ROLES:
        raise InputError(f"from={message.get('from')!r} must be one of {', '.join(_ROLES)}")
    return {"role": _ROLES[message["from"]], "content": message["value"]}


def render(tokenizer: Tokenizer, values: dict[str, Any], loss: str) -> tuple[str, list]:
    """The text of a conversation by the chat template, and the spans of it that have loss.

    loss: "all", or "assistant": what {% generation %} marks or, in a template without this mark,
        what an assistant's message adds to the text of the messages before it.
    Raises InputError for a wrong form, Refused for a conversation that has no such spans.
    """
    messages, asked = conversation(values)
    tools = values.get("tools") or None

    def show(count: int, answer: bool = False) -> tuple[str, list]:
        options = dict(tools=tools, answer=answer, strftime_now=_DATE.strftime)
        try:
            text, spans = tokenizer.rendered(messages[:count], **options)
        except InputError as error:
            raise Refused(str(error)) from error
        # A lone surrogate (legal in JSON, not in UTF-8) would stop the tokenizer.
        return text.encode("utf-8", "replace").decode(), spans

    text, spans = show(len(messages))
    if loss == "all":
        return text, [(0, len(text))]
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= asked]
    if not spoken:
        raise Refused("no assistant's turn")
    if has_marks(tokenizer, tools):
        return text, spans[len(show(asked)[1]) if asked else 0 :]
    return text, [_added(tokenizer, show, text, i) for i in spoken]


def has_marks(tokenizer: Tokenizer, tools: Any = None) -> bool:
    """Whether the chat template marks what the assistant says with {% generation %}."""
    return _MARK.search(tokenizer.chat_template(tools)) is not None


def _added(tokenizer: Tokenizer, show: Callable, text: str, i: int) -> tuple[int, int]:
    """The span of message i in the text of the whole conversation, without its heading."""
    until = show(i + 1)[0]
    # R1's template asks for thoughts that its messages do not have; then the heading has loss, too.
    before = next((x for a in (True, False) if until.startswith(x := show(i, a)[0])), None)
    if before is None or not text.startswith(until):
        raise Refused(
            "the chat template has no {% generation %} and renders earlier messages differently"
            " when others follow"
        )
    ended = until.rstrip()  # what follows the token that ends a turn is not the assistant's
    end = len(ended) if ended.endswith(tuple(filter(None, tokenizer.special))) else len(until)
    return len(before), end


def text_key(tokenizer: Tokenizer) -> str:
    """A hash of all on which the ids of a conversation depend."""
    return digest(tokenizer.digest, tokenizer.chat_templates, tokenizer.chat_names)


def encode(source: Source, tokenizer: Tokenizer, loss: str, folder: Path, key: str) -> None:
    """Writes all conversations of a source to a folder, and last a report with the `key` of both.

    Raises InputError for conversations that cannot be read, and if none has a token with loss.
    """
    refused: dict[str, list[str]] = defaultdict(list)
    lengths, ranks, with_loss, largest = [], [], 0, 0
    sha = hashlib.sha256()
    writer = ShardWriter(folder / "conversations.chat", 2 * tokenizer.vocab_size)
    try:
        for batch in _rendered(source, tokenizer, loss, refused):
            pairs = tokenizer.encode_rendered([rendered for _, rendered in batch])
            for (record, (text, _)), (ids, mask) in zip(batch, pairs, strict=True):
                if not mask[1:].any():  # nothing predicts the first token
                    refused["no token with loss"].append(record.document)
                    continue
                entries = 2 * ids + mask
                writer.append(entries)
                sha.update(entries)
                lengths.append(len(ids))
                ranks.append(hold_out_rank(text))
                with_loss += int(mask.sum())
                largest = max(largest, int(ids.max()))
    finally:
        writer.close()
    if not lengths:
        why = "it is empty" if not refused else describe_refused(refused)
        raise InputError(f"no conversation of {source.files[0][1].parent} can be used: {why}")
    np.savez(folder / "index.npz", lengths=np.array(lengths), ranks=np.array(ranks))
    page = dict(conversations=len(lengths), tokens=sum(lengths), with_loss=with_loss, loss=loss)
    page |= dict(
        refused=refused, largest=largest, marks=has_marks(tokenizer), sha256=sha.hexdigest()
    )
    write_json(folder / PREPARED, page | dict(text=text_key(tokenizer), key=key))


def _rendered(
    source: Source, tokenizer: Tokenizer, loss: str, refused: dict[str, list[str]]
) -> Iterator[list[tuple[Record, tuple[str, list]]]]:
    """Yields batches of records with what `render` makes of them; collects the refused ones."""
    batch, characters = [], 0
    with progress_bar("encoding the conversations (once)", source.size) as done:
        for record in source.records(COLUMNS):
            try:
                batch.append((record, render(tokenizer, record.values, loss)))
            except Refused as error:
                refused[str(error)].append(record.document)
                continue
            except InputError as error:
                raise InputError(f"{record.where}: {error}") from error
            characters += len(batch[-1][1][0])
            if characters >= _BATCH:
                yield batch
                batch, characters = [], 0
            done(record.done)
    if batch:
        yield batch


def describe_refused(refused: dict[str, list[str]]) -> str:
    """For people: why conversations were refused, and which."""
    parts = []
    for reason, where in refused.items():
        more = ", ..." if len(where) > _NAMED else ""
        parts.append(f"{len(where):,} refused, {reason} ({', '.join(where[:_NAMED])}{more})")
    return "; ".join(parts)


def prepare_chat(source: Source, tokenizer: Tokenizer, loss: str, out: Path) -> list[str]:
    """Encodes the conversations of a source into a folder; returns lines about what went in.

    Raises InputError if the folder holds anything else.
    """
    key = _key(source, tokenizer, loss, cache_folder(None))
    try:
        with lock(out / ".lock", wait=False):
            page = read_page(out / PREPARED)
            if page.get("key", key) != key or any(out.glob("*.bin")):
                raise InputError(f"{out} holds other data: choose another --out or delete it")
            if not page:
                tokenizer.copy_to(out)
                encode(source, tokenizer, loss, out, key)
    except BlockingIOError as error:
        raise InputError(f"another process is writing to {out}") from error
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error}") from error
    found = Encoded(out, tokenizer, loss)
    return [f"{out}: {found.describe()}", found.describe_lengths()]


def find_encoded(source: Source, tokenizer: Tokenizer, loss: str, cache: Path) -> "Encoded":
    """The conversations of a source, as prepared or, encoded once, from the cache."""
    (name, path), *_ = source.files
    if name == PREPARED:
        return Encoded(path.parent, tokenizer, loss)
    key = _key(source, tokenizer, loss, cache)
    build = lambda folder: encode(source, tokenizer, loss, folder, key)
    return Encoded(build_once(cache / f"chat-{key[:16]}", build), tokenizer, loss)


def _key(source: Source, tokenizer: Tokenizer, loss: str, cache: Path) -> str:
    return digest("chat", VERSION, source.digest(cache), text_key(tokenizer), loss)


class Encoded:
    """The encoded conversations in a folder; raises InputError if they are not as described."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, loss: str):
        key = text_key(tokenizer)
        try:
            self.page = json.loads((folder / PREPARED).read_text())
            index = np.load(folder / "index.npz")
            self.lengths, self.ranks = index["lengths"], index["ranks"]
            made = (self.page["text"], self.page["loss"])
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{folder} is damaged ({error}); delete it") from error
        if made[0] != key:
            raise InputError(
                f"{folder} was prepared with another tokenizer or chat template than"
                f" {tokenizer.folder}'s: run jaxllm data prepare again with that one"
            )
        if made[1] != loss:
            raise InputError(f"{folder} was prepared with --loss {made[1]}, not data.loss={loss}")
        self.entries = Tokens([open_shard(folder / "conversations.chat")[0]])
        if len(self.entries) != self.lengths.sum():
            raise InputError(f"{folder} is damaged: its files differ in length; delete it")

    def describe(self) -> str:
        """For people: what went in."""
        page = self.page
        share = page["with_loss"] / page["tokens"]
        by = "by the template's generation marks" if page["marks"] else "by prefixes of messages"
        whose = f"the assistant's, {by}" if page["loss"] == "assistant" else "all"
        text = f"{page['conversations']:,} conversations, {page['tokens']:,} tokens, {share:.1%}"
        text += f" with loss ({whose})"
        return f"{text}; {why}" if (why := describe_refused(page["refused"])) else text

    def describe_lengths(self) -> str:
        """For people: how many conversations are longer than usual values of train.seq_len."""
        sizes = [2**i for i in range(9, 17) if 2**i < self.lengths.max() - 1]
        longer = [f"{int((self.lengths > n + 1).sum()):,} than {n:,}" for n in sizes]
        text = f"the longest conversation has {int(self.lengths.max()):,} tokens"
        return f"{text}; longer for a train.seq_len: {', '.join(longer)}" if longer else text

    def fit(self, seq_len: int, too_long: str) -> None:
        """Cuts or leaves out the conversations of more than seq_len + 1 tokens.

        Raises InputError if this leaves nothing with loss.
        """
        size, stops = seq_len + 1, np.cumsum(self.lengths)
        self.spans = np.stack([stops - self.lengths, stops], 1)
        self.kept, self.longer = np.ones(len(stops), bool), self.lengths > size
        for i in np.flatnonzero(self.longer):
            start, stop = self.spans[i]
            start, stop = (stop - size, stop) if too_long == "cut_start" else (start, start + size)
            self.spans[i] = start, stop
            has_loss = (self.entries.read(start + 1, stop) & 1).any()
            self.kept[i] = too_long != "leave_out" and has_loss
        if not self.kept.any():
            why = "longer than" if too_long == "leave_out" else "without loss in the kept part of"
            raise InputError(
                f"all {len(stops):,} conversations are {why} train.seq_len + 1 = {size:,} tokens"
                f" (data.too_long={too_long}): raise train.seq_len"
            )
        self.seq_len, self.too_long = seq_len, too_long

    def describe_fit(self) -> str:
        """For people: how many conversations were cut or left out."""
        cut, gone = int((self.longer & self.kept).sum()), int((~self.kept).sum())
        side = "beginning" if self.too_long == "cut_start" else "end"
        size = f"{self.seq_len + 1:,} tokens"
        why = f"longer than {size}" * (self.too_long == "leave_out")
        why = why or f"without loss in the {size} kept"
        text = f"; {cut:,} cut at the {side} to {size}" if cut else ""
        return text + (f"; {gone:,} left out, {why}" if gone else "")

    def held_out(self, fraction: float) -> np.ndarray:
        """Whether each conversation is for validation, by its hash: one at least, and not all.

        Raises InputError if there are no two different conversations.
        """
        ranks = self.ranks[self.kept]
        if ranks.min() == ranks.max():
            raise InputError(
                "the data has one conversation, and none to hold out for validation: name some"
                " with data.val_path"
            )
        return self.ranks < min(max(fraction, np.nextafter(ranks.min(), 1)), ranks.max())

    def packed(self, chosen: np.ndarray) -> Packed:
        """Rows of the chosen conversations, as far as they fit."""
        return Packed(self.entries, self.spans[chosen & self.kept], self.seq_len)
