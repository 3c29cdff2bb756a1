"""Encodes conversations once, and marks the tokens that have loss.

A folder of encoded conversations (in the cache, or from `jaxllm data prepare`) has
conversations.chat, a shard with the entry 2 id + (1 if the token has loss) for each token,
index.npz with the length of each conversation and a hash of its text as a number from 0 to 1, by
which some are held out for validation, and chat.json, which reports what went in.
"""

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from jaxllm.data.cache import build_once, cache_folder, digest
from jaxllm.data.chat import COLUMNS, Refused, has_marks, render, text_key
from jaxllm.data.corpus import batched
from jaxllm.data.packing import Packed
from jaxllm.data.paths import PREPARED, is_prepared
from jaxllm.data.shards import ShardWriter, Tokens, check_shard, open_shard
from jaxllm.data.sources import Record, Source, hold_out_below, hold_out_rank
from jaxllm.errors import InputError
from jaxllm.files import own, read_json, write_json
from jaxllm.terminal import counted, progress_bar
from jaxllm.text import Tokenizer

VERSION = 12  # increment it when the same conversations and tokenizer would give other tokens
_NAMED = 3  # reasons to refuse that a report names, with as many conversations; chat.json has all


def encode(source: Source, tokenizer: Tokenizer, loss: str, folder: Path, key: str) -> None:
    """Writes all conversations of a source to a folder, then a report that includes `key`.

    Raises InputError for conversations that cannot be read, and if none has a token with loss.
    """
    refused: dict[str, list[str]] = defaultdict(list)
    lengths, ranks, with_loss, largest = [], [], 0, 0
    sha = hashlib.sha256()
    with closing(ShardWriter(folder / PREPARED[1], 2 * tokenizer.vocab_size)) as writer:
        for text, ids, mask in _encoded(source, tokenizer, loss, refused):
            entries = 2 * ids + mask
            writer.append(entries)
            sha.update(entries)
            lengths.append(len(ids))
            ranks.append(hold_out_rank(text))
            with_loss += int(mask.sum())
            largest = max(largest, int(ids.max()))
    if not lengths:
        why = "it is empty" if not refused else describe_refused(refused)
        at = source.files[0][1].parent if source.files[1:] else source.files[0][1]
        raise InputError(f"no conversation of {at} can be used: {why}")
    np.savez(folder / "index.npz", lengths=np.array(lengths), ranks=np.array(ranks))
    page = dict(conversations=len(lengths), tokens=sum(lengths), with_loss=with_loss, loss=loss)
    page |= dict(refused=refused, sha256=sha.hexdigest(), text=text_key(tokenizer), key=key)
    page |= dict(marks=has_marks(tokenizer), largest=largest, written=writer.sha256.hexdigest())
    write_json(folder / PREPARED[0], page)


def _encoded(
    source: Source, tokenizer: Tokenizer, loss: str, refused: dict[str, list[str]]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (text, ids, whether each has loss) of conversations; collects the refused ones."""
    for batch in batched(_rendered(source, tokenizer, loss, refused), lambda x: len(x[1][0])):
        pairs = tokenizer.encode_rendered([rendered for _, rendered in batch])
        for (record, (text, _)), (ids, mask) in zip(batch, pairs, strict=True):
            if mask[1:].any():  # nothing predicts the first token
                yield text, ids, mask
            else:
                refused["no token with loss"].append(record.document)


def _rendered(
    source: Source, tokenizer: Tokenizer, loss: str, refused: dict[str, list[str]]
) -> Iterator[tuple[Record, tuple[str, list]]]:
    """Yields records with the results of `render`; collects the refused ones."""
    with progress_bar("encoding the conversations (once)", source.size) as done:
        for record in source.records(COLUMNS):
            try:
                yield record, render(tokenizer, record.values, loss)
            except Refused as error:
                refused[str(error)].append(record.document)
            except InputError as error:
                raise InputError(f"{record.where}: {error}") from error
            done(record.done)


def describe_refused(refused: dict[str, list[str]]) -> str:
    """For people: why conversations were refused, and which."""
    parts, groups = [], sorted(refused.items(), key=lambda group: -len(group[1]))
    for reason, where in groups[:_NAMED]:
        more = ", ..." if len(where) > _NAMED else ""
        parts.append(f"{len(where):,} refused, {reason} ({', '.join(where[:_NAMED])}{more})")
    if rest := sum(len(where) for _, where in groups[_NAMED:]):
        parts.append(f"{rest:,} refused for other reasons")
    return "; ".join(parts)


def prepare_chat(source: Source, tokenizer: Tokenizer, loss: str, out: Path) -> list[str]:
    """Encodes the conversations of a source into a folder; returns lines about what went in."""
    key = _key(source, tokenizer, loss, cache_folder(None))
    with own(out):
        page = read_json(out / PREPARED[0], optional=True)
        if page.get("key", key) != key or any(out.glob("*.bin")):
            raise InputError(f"{out} holds other data: choose another --out or delete it")
        if not page:
            tokenizer.copy_to(out)
            encode(source, tokenizer, loss, out, key)
    found = Encoded(out, tokenizer, loss)
    return [f"{out}: {found.describe()}", found.describe_lengths()]


def find_encoded(source: Source, tokenizer: Tokenizer, loss: str, cache: Path) -> "Encoded":
    """The encoded conversations of a source: as prepared, or from the cache, encoded once."""
    prepared = [path.parent for _, path in source.files if is_prepared(path)]
    if prepared and source.files[1:]:
        raise InputError(f"{prepared[0]} is prepared, so nothing is read beside it: name it alone")
    if prepared:
        return Encoded(prepared[0], tokenizer, loss)
    key = _key(source, tokenizer, loss, cache)
    build = lambda folder: encode(source, tokenizer, loss, folder, key)
    return Encoded(build_once(cache / f"chat-{key[:16]}", build), tokenizer, loss)


def _key(source: Source, tokenizer: Tokenizer, loss: str, cache: Path) -> str:
    return digest("chat", VERSION, source.digest(cache), text_key(tokenizer), loss)


class Encoded:
    """The encoded conversations in a folder; raises InputError if they are not as described."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, loss: str):
        try:
            self.page = json.loads((folder / PREPARED[0]).read_text())
            with open(folder / "index.npz", "rb") as file:
                index = np.load(file)
                self.lengths, self.ranks = index["lengths"], index["ranks"]
            made = (self.page["text"], self.page["loss"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{folder} is damaged ({str(error).partition('. ')[0]}); delete it"
            ) from error
        if made[0] != text_key(tokenizer):
            raise InputError(
                f"{folder} was prepared with another tokenizer or chat template than"
                f" {tokenizer.folder}'s: run jaxllm data prepare again with that one"
            )
        if made[1] != loss:
            raise InputError(f"{folder} was prepared with --loss {made[1]}, not data.loss={loss}")
        path = folder / PREPARED[1]
        check_shard(path, cache_folder(None), 1 << 32, self.page.get("written"))
        self.entries = Tokens([open_shard(path)])
        if len(self.entries) != self.lengths.sum():
            raise InputError(f"{folder} is damaged: its files differ in length; delete it")

    def describe(self) -> str:
        """For people: what went in."""
        page = self.page
        share = page["with_loss"] / page["tokens"]
        by = "by the template's generation marks" if page["marks"] else "by prefixes of messages"
        whose = f"the assistant's, {by}" if page["loss"] == "assistant" else "all"
        text = counted(page["conversations"], "conversation") + ", "
        text += f"{counted(page['tokens'], 'token')}, {share:.1%} with loss ({whose})"
        return f"{text}; {why}" if (why := describe_refused(page["refused"])) else text

    def describe_lengths(self) -> str:
        """For people: how many conversations are longer than usual values of train.seq_len."""
        sizes = [2**i for i in range(9, 17) if 2**i < self.lengths.max() - 1]
        longer = [f"{int((self.lengths > n + 1).sum()):,} than {n:,}" for n in sizes]
        text = f"the longest conversation has {int(self.lengths.max()):,} tokens"
        return f"{text}; longer for a train.seq_len: {', '.join(longer)}" if longer else text


class Fitted:
    """The conversations that fit into seq_len + 1 tokens: whole, cut, or left out.

    validation: conversations to leave out, too.  Raises InputError if none with loss is left.
    """

    def __init__(
        self, encoded: Encoded, seq_len: int, too_long: str, validation: "Fitted | None" = None
    ):
        size, stops = seq_len + 1, np.cumsum(encoded.lengths)
        spans = np.stack([stops - encoded.lengths, stops], 1)
        new = ~np.isin(encoded.ranks, [] if validation is None else validation._ranks)
        if not new.any():
            raise InputError(
                f"each of {counted(len(new), 'conversation')} of data.path is in data.val_path, too"
                ", and not trained on; name other data, or omit data.val_path to hold out a part"
            )
        kept, longer = new.copy(), encoded.lengths > size
        for i in np.flatnonzero(longer):
            start, stop = spans[i]
            start, stop = (stop - size, stop) if too_long == "cut_start" else (start, start + size)
            spans[i] = start, stop
            kept[i] &= too_long != "leave_out" and (encoded.entries.read(start + 1, stop) & 1).any()
        why = "longer than" if too_long == "leave_out" else "without loss in the kept part of"
        if not kept.any():
            raise InputError(
                f"each of {counted(int(new.sum()), 'conversation')} is {why} train.seq_len + 1 ="
                f" {size:,} tokens (data.too_long={too_long}): raise train.seq_len"
            )
        cut, gone, known = (x.sum() for x in (longer & kept, new & ~kept, ~new))
        side = "beginning" if too_long == "cut_start" else "end"
        self.description = encoded.describe()
        self.description += f"; {cut:,} cut at the {side} to {size:,} tokens" * bool(cut)
        self.description += f"; {gone:,} left out, {why} {size:,} tokens" * bool(gone)
        self.description += f"; {known:,} also in data.val_path, so not trained on" * bool(known)
        self._entries, self._spans, self._seq_len = encoded.entries, spans[kept], seq_len
        self._ranks = encoded.ranks[kept]

    def rows(self) -> Packed:
        """Rows of all conversations."""
        return self._packed(slice(None))

    def split(self, fraction: float) -> tuple[Packed, Packed]:
        """Rows for training and, by conversations' hashes, for validation: at least one each."""
        if self._ranks.min() == self._ranks.max():
            raise InputError("the data has one conversation: name others with data.val_path")
        held = self._ranks < hold_out_below(self._ranks, fraction)
        return self._packed(~held), self._packed(held)

    def _packed(self, chosen: np.ndarray | slice) -> Packed:
        return Packed(self._entries, self._spans[chosen], self._seq_len)
