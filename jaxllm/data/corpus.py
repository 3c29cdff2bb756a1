"""Encodes a source into token ids, cached as two llm.c shards (train.bin, val.bin)."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxllm.data.cache import build_once, digest
from jaxllm.data.shards import ShardWriter
from jaxllm.data.sources import Piece, Source, is_held_out
from jaxllm.data.tokenizer import Tokenizer, train_tokenizer
from jaxllm.errors import InputError
from jaxllm.files import write_json

VAL_FRACTION = 0.05
_BATCH = 1 << 22  # characters encoded at a time
_TOKENIZER_TEXT = 1 << 26  # characters; a BPE learns little more after the first 64 Mi
VERSION = 3  # increment it when the same files and tokenizer would give different tokens


def encode(
    pieces: Iterator[Piece], tokenizer: Tokenizer
) -> Iterator[list[tuple[Piece, np.ndarray]]]:
    """Yields batches of (piece, ids); each document begins with the end-of-text token."""
    batch: list[Piece] = []
    characters = 0

    def encoded() -> list[tuple[Piece, np.ndarray]]:
        ids = tokenizer.encode_batch([piece.text for piece in batch])
        separator = np.asarray([tokenizer.end_of_text], np.uint32)
        return [
            (piece, np.concatenate([separator, x]) if piece.begins else x)
            for piece, x in zip(batch, ids, strict=True)
        ]

    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH:
            yield encoded()
            batch, characters = [], 0
    if batch:
        yield encoded()


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
) -> Tokenizer:
    """Returns a BPE of `vocab_size` entries trained on the source; trains it once, then caches it.

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
    return Tokenizer(folder / "tokenizer.json")


def cached_tokens(
    source: Source,
    val_source: Source | None,
    held_out: float,
    tokenizer: Tokenizer,
    key: str,
    cache: Path,
) -> Path:
    """Returns a folder with train.bin, val.bin and counts.json, and writes it if needed.

    val.bin gets the fraction `held_out` of the source's documents, chosen by a hash of their names,
    and all of `val_source`.
    """
    parts = [("text", source, held_out)]
    if val_source is not None:
        parts = [("training text", source, held_out), ("validation text", val_source, 1.0)]

    def build(folder: Path) -> None:
        counts = {"train": 0, "val": 0}
        writers = {x: ShardWriter(folder / f"{x}.bin", tokenizer.vocab_size) for x in counts}
        try:
            for what, part, fraction in parts:
                with progress_bar(f"encoding the {what} (once)", part.size) as done:
                    _write(part, fraction, tokenizer, writers, counts, done)
            if not any(counts.values()):
                raise InputError("the data is empty: no document in it has any text")
        finally:
            for writer in writers.values():
                writer.close()
        write_json(folder / "counts.json", counts)

    return build_once(cache / f"tokens-{key[:16]}", build)


def _write(
    source: Source,
    held_out: float,
    tokenizer: Tokenizer,
    writers: dict[str, ShardWriter],
    counts: dict[str, int],
    done: Callable[[int], None],
) -> None:
    """Appends each document to the writer of its split, and counts it there."""
    for batch in encode(source.pieces(), tokenizer):
        for piece, ids in batch:
            name = "val" if is_held_out(piece.document, held_out) else "train"
            writers[name].append(ids)
            counts[name] += piece.begins
        done(batch[-1][0].done)
