"""Encodes a source into token ids, cached as two llm.c shards (train.bin, val.bin)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.data.cache import build_once, digest, file_digest
from jaxllm.data.shards import ShardWriter
from jaxllm.data.sources import Piece, Source, hold_out_rank
from jaxllm.errors import InputError
from jaxllm.files import read_json, write_json
from jaxllm.terminal import progress_bar
from jaxllm.text import AROUND, Tokenizer, train_tokenizer

VAL_FRACTION = 0.05
_BATCH = 1 << 22  # characters encoded at a time
_TOKENIZER_TEXT = 1 << 26  # characters; a BPE learns little more after the first 64 Mi
VERSION = 3  # increment it when the same files and tokenizer would give different tokens


class Part(NamedTuple):
    """Some pieces of one document that are encoded as one text."""

    document: str
    before: str  # the end of the document's text before these pieces
    text: str
    begins: bool  # whether they begin the document
    ends: bool
    pieces: int
    done: int  # bytes of the source's files read so far
    ids: np.ndarray = np.zeros(0, np.uint32)
    names: int = 0  # number of special tokens' names in the text


def encode(
    pieces: Iterator[Piece], tokenizer: Tokenizer, special: str, skip: int = 0
) -> Iterator[list[Part]]:
    """Yields batches of parts, whose ids together make whole documents.

    Pieces between which `tokenizer` permits no cut are encoded as one.  Each document stands
    between `tokenizer.begin` and `tokenizer.finish`.
    special: how to read the names of special tokens in a text: as "tokens" or as "text".
    skip: pieces that are encoded already.
    """
    are_tokens, count = special == "tokens", tokenizer.count_special
    for batch in batched(_joined(pieces, tokenizer, are_tokens, skip), lambda part: len(part.text)):
        texts, parts = [(part.before, part.text) for part in batch], []
        for part, ids in zip(batch, tokenizer.encode_parts(texts, special=are_tokens), strict=True):
            around = tokenizer.begin * part.begins, tokenizer.finish * part.ends
            begin, finish = (np.asarray(ids, np.uint32) for ids in around)
            names = count(part.before + part.text) - count(part.before)
            parts.append(part._replace(ids=np.concatenate([begin, ids, finish]), names=names))
        yield parts


def batched[T](items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields lists of items that are long enough to keep all cores busy while encoding."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= _BATCH:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _joined(
    pieces: Iterator[Piece], tokenizer: Tokenizer, special: bool, skip: int
) -> Iterator[Part]:
    """Yields parts without ids."""

    def part(ends: bool) -> Part:
        (document, _, begins, _), text = joined[0], "".join(piece.text for piece in joined)
        return Part(document, before, text, begins, ends, len(joined), joined[-1].done)

    before = left = ""
    for piece in islice(pieces, skip):
        before = left = (left * (not piece.begins) + piece.text)[-AROUND:]
    joined = []
    for piece in pieces:
        if joined and (piece.begins or tokenizer.can_cut(left, piece.text, special=special)):
            yield part(piece.begins)
            before, joined = left, []
        if piece.begins:
            before = left = ""
        joined.append(piece)
        left = (left + piece.text)[-AROUND:]
    if joined:
        yield part(True)


def cached_tokenizer(
    source: Source, content: str, held_out: float, vocab_size: int, cache: Path
) -> Path:
    """The tokenizer.json of a BPE, trained once, without the held-out fraction of documents."""

    def build(folder: Path) -> None:
        path, what = folder / "tokenizer.json", f"training a tokenizer of {vocab_size} entries"
        with progress_bar(f"{what} (once)", min(source.size, _TOKENIZER_TEXT)) as done:
            train_tokenizer(_tokenizer_texts(source, held_out, done), vocab_size, path)
        write_json(folder / "written.json", {"sha256": file_digest(cache, path)})

    key = digest("bpe", VERSION, content, held_out, vocab_size)[:16]
    folder = build_once(cache / f"tokenizer-{key}", build)
    path, written = folder / "tokenizer.json", folder / "written.json"  # older ones have no hash
    if path.exists() and written.exists():
        if read_json(written).get("sha256") != file_digest(cache, path):
            raise InputError(f"{path} is damaged: it has changed; delete {folder}")
    return path


def _tokenizer_texts(source: Source, held_out: float, done: Callable[[int], None]) -> Iterator[str]:
    """The first texts of a source without the held-out ones, unless all are held out."""
    characters = 0
    names = (piece.document for piece in source.pieces())
    all_held_out = all(hold_out_rank(name) < held_out for name in names)  # stops at the first
    for piece in source.pieces():
        if all_held_out or hold_out_rank(piece.document) >= held_out:
            characters += len(piece.text)
            yield piece.text
        done(piece.done)
        if characters >= _TOKENIZER_TEXT:
            return


def cached_tokens(
    parts: list[tuple[str, Source, float]], tokenizer: Tokenizer, special: str, folder: Path
) -> Path:
    """Returns the folder with train.bin, val.bin and counts.json, and writes it if needed.

    parts: (a description for people, the documents, the fraction of them that val.bin gets, chosen
        by a hash of their names).
    special: how to read the names of special tokens in the text, as for `encode`.
    """

    def encoded(what: str, source: Source) -> Iterator[Part]:
        with progress_bar(f"encoding the {what} (once)", source.size) as done:
            for batch in encode(source.pieces(), tokenizer, special):
                yield from batch
                done(batch[-1].done)

    def build(folder: Path) -> None:
        counts = {"train": 0, "val": 0, "names": 0, "largest": 0}
        size = tokenizer.vocab_size
        writers = {name: ShardWriter(folder / f"{name}.bin", size) for name in ("train", "val")}
        each = ((part, held) for what, source, held in parts for part in encoded(what, source))
        try:
            for part, fraction in each:
                name = "val" if hold_out_rank(part.document) < fraction else "train"
                writers[name].append(part.ids)
                counts[name] += part.begins
                counts["names"] += part.names
                counts["largest"] = max(counts["largest"], int(part.ids.max(initial=0)))
            if not counts["train"] + counts["val"]:
                raise InputError("the data is empty: no document in it has any text")
        finally:
            for writer in writers.values():
                writer.close()
        sha256 = {writer.path.name: writer.sha256.hexdigest() for writer in writers.values()}
        write_json(folder / "counts.json", counts | {"sha256": sha256})

    return build_once(folder, build)
