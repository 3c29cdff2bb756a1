"""Encodes a source into token ids, cached as two llm.c shards (train.bin, val.bin)."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.data.cache import build_once, digest
from jaxllm.data.shards import ShardWriter
from jaxllm.data.sources import Piece, Source, is_held_out
from jaxllm.errors import InputError
from jaxllm.files import write_json
from jaxllm.text import AROUND, Tokenizer, train_tokenizer

VAL_FRACTION = 0.05
_BATCH = 1 << 22  # characters encoded at a time
_TOKENIZER_TEXT = 1 << 26  # characters; a BPE learns little more after the first 64 Mi
VERSION = 3  # increment it when the same files and tokenizer would give different tokens


class Part(NamedTuple):
    """Some pieces of one document, and their ids."""

    document: str
    ids: np.ndarray
    begins: bool  # whether they begin the document
    pieces: int
    done: int  # bytes of the source's files read so far
    names: int  # of special tokens in the text


def encode(
    pieces: Iterator[Piece], tokenizer: Tokenizer, special: str, before: Piece | None = None
) -> Iterator[list[Part]]:
    """Yields batches of parts, whose ids together are those of whole documents.

    Pieces between which `tokenizer` permits no cut are encoded as one.  Each document stands
    between `tokenizer.begin` and `tokenizer.finish`.
    special: what the names of special tokens in a text are: "tokens" or "text".
    before: the piece before the first of `pieces`, already encoded.
    """
    batch: list[tuple[str, list[Piece], bool]] = []
    characters = 0
    for entry in _joined(pieces, tokenizer, special == "tokens", before):
        batch.append(entry)
        characters += sum(len(piece.text) for piece in entry[1])
        if characters >= _BATCH:
            yield _encoded(batch, tokenizer, special == "tokens")
            batch, characters = [], 0
    if batch:
        yield _encoded(batch, tokenizer, special == "tokens")


def _joined(
    pieces: Iterator[Piece], tokenizer: Tokenizer, special: bool, before: Piece | None
) -> Iterator[tuple[str, list[Piece], bool]]:
    """Yields (text before, pieces to encode as one, whether they end their document)."""
    context = left = "" if before is None else before.text[-AROUND:]
    joined: list[Piece] = []
    for piece in pieces:
        if joined and (piece.begins or tokenizer.can_cut(left, piece.text, special=special)):
            yield context, joined, piece.begins
            context, joined = left, []
        if piece.begins:
            context = left = ""
        joined.append(piece)
        left = (left + piece.text)[-AROUND:]
    if joined:
        yield context, joined, True


def _encoded(
    batch: list[tuple[str, list[Piece], bool]], tokenizer: Tokenizer, special: bool
) -> list[Part]:
    texts = ["".join(piece.text for piece in joined) for _, joined, _ in batch]
    contexts = [context for context, _, _ in batch]
    found = tokenizer.encode_parts(list(zip(contexts, texts, strict=True)), special=special)
    parts = []
    for (_, joined, ends), text, ids in zip(batch, texts, found, strict=True):
        first, last = joined[0], joined[-1]
        around = (tokenizer.begin if first.begins else [], tokenizer.finish if ends else [])
        begin, finish = (np.asarray(x, np.uint32) for x in around)
        ids = np.concatenate([begin, ids, finish])
        names = tokenizer.count_special(text)
        parts.append(Part(first.document, ids, first.begins, len(joined), last.done, names))
    return parts


@contextlib.contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal; yields a function that sets the bytes done."""
    if not sys.stderr.isatty():
        print(description, file=sys.stderr, flush=True)
        yield lambda done: None
        return
    from rich import progress
    from rich.console import Console

    columns = [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def cached_tokenizer(
    source: Source, content: str, held_out: float, vocab_size: int, cache: Path
) -> Path:
    """The tokenizer.json of a BPE trained on the source; trains it once, then caches it.

    The fraction `held_out` of the documents is for validation, so the BPE does not see it.
    """

    def texts() -> Iterator[str]:
        characters = 0
        names = (piece.document for piece in source.pieces())
        all_held_out = all(is_held_out(name, held_out) for name in names)  # stops at the first
        with progress_bar(
            f"training a tokenizer of {vocab_size} entries (once)",
            min(source.size, _TOKENIZER_TEXT),
        ) as done:
            for piece in source.pieces():
                if all_held_out or not is_held_out(piece.document, held_out):
                    characters += len(piece.text)
                    yield piece.text
                done(piece.done)
                if characters >= _TOKENIZER_TEXT:
                    return

    key = digest("bpe", VERSION, content, held_out, vocab_size)[:16]
    folder = build_once(
        cache / f"tokenizer-{key}",
        lambda folder: train_tokenizer(texts(), vocab_size, folder / "tokenizer.json"),
    )
    return folder / "tokenizer.json"


def cached_tokens(
    source: Source,
    val_source: Source | None,
    tokenizer: Tokenizer,
    special: str,
    key: str,
    cache: Path,
) -> Path:
    """Returns a folder with train.bin, val.bin and counts.json, and writes it if needed.

    special: what names of special tokens in the text are, for `encode`.
    Without a `val_source`, val.bin gets about 5% of the documents, chosen by a hash of their names.
    """

    if val_source is None:
        of = lambda name: ("val",) if is_held_out(name, VAL_FRACTION) else ("train",)
        parts = [("text", source, of)]
    elif val_source == source:  # jaxllm evaluate names its data as both
        parts = [("text", source, lambda name: ("train", "val"))]
    else:
        parts = [
            ("training text", source, lambda name: ("train",)),
            ("validation text", val_source, lambda name: ("val",)),
        ]

    def build(folder: Path) -> None:
        counts = {"train": 0, "val": 0, "names": 0, "largest": 0}
        writers = {
            x: ShardWriter(folder / f"{x}.bin", tokenizer.vocab_size) for x in ("train", "val")
        }
        try:
            for what, part, splits in parts:
                with progress_bar(f"encoding the {what} (once)", part.size) as done:
                    _write(encode(part.pieces(), tokenizer, special), splits, writers, counts, done)
            if not counts["train"] + counts["val"]:
                raise InputError("the data is empty: no document in it has any text")
        finally:
            for writer in writers.values():
                writer.close()
        write_json(folder / "counts.json", counts)

    return build_once(cache / f"tokens-{key[:16]}", build)


def _write(
    batches: Iterator[list[Part]],
    splits: Callable[[str], tuple[str, ...]],
    writers: dict[str, ShardWriter],
    counts: dict[str, int],
    done: Callable[[int], None],
) -> None:
    """Appends each document to the writers that `splits` names for it, and counts it there."""
    for batch in batches:
        for part in batch:
            for name in splits(part.document):
                writers[name].append(part.ids)
                counts[name] += part.begins
            counts["names"] += part.names
            counts["largest"] = max(counts["largest"], int(part.ids.max(initial=0)))
        done(batch[-1].done)
