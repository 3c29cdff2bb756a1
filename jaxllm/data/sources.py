"""Reads documents from Python's standard library, text files, JSON lines and parquet."""

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxllm.data.cache import digest, file_digest
from jaxllm.errors import InputError

# The files to look for in a folder; a path to one file or a glob accepts any name.
_PATTERNS = {
    "text": ("*",),
    "jsonl": ("*.jsonl", "*.ndjson", "*.json"),
    "parquet": ("*.parquet",),
    "shards": ("*.bin",),
}
# Leaves out what is not code to be read: tests, character tables (a fifth of all text), installed
# packages, and build outputs, which differ from machine to machine.
_NOT_STDLIB = frozenset(
    "test tests idle_test encodings pydoc_data site-packages dist-packages __pycache__".split()
)
_PIECE = 1 << 15  # bytes; short pieces encode faster than whole files (CPU caches, even load)
_LONGEST = 1 << 20  # characters; a piece without a good place to cut is cut here anyway


class Piece(NamedTuple):
    """A part of a document; most documents are one piece."""

    document: str  # name, unique in its source and the same on every machine
    text: str
    begins: bool  # whether this is the document's first piece
    done: int  # bytes of the source's files read so far


def find_files(kind: str, path: str | None, *, key: str = "data.path") -> list[tuple[str, Path]]:
    """Returns sorted (name, path) of the files under a file, folder or glob.

    Names are relative to the folder, so that a corpus can move. key: the option that holds `path`,
    for errors. Raises InputError if no file is found.
    """
    if not path:
        raise InputError(f"{key} is missing: a source of {kind} needs a file, a folder or a glob")
    root = Path(path).expanduser()
    if root.is_file():
        return [(root.name, root)]
    if root.is_dir():
        found = {file for pattern in _PATTERNS[kind] for file in root.rglob(pattern)}
        what = f"is a folder without {' or '.join(_PATTERNS[kind])} files"
        if kind == "text":
            what = "is a folder without files"
    elif glob.has_magic(str(root)):
        found = {Path(name) for name in glob.glob(str(root), recursive=True)}
        root = Path(os.path.commonpath([file.parent for file in found] or ["."]))
        what = "matches no file"
    else:
        raise InputError(f"{key}={path} does not exist")
    files = [(file.relative_to(root).as_posix(), file) for file in found if file.is_file()]
    files = [(name, file) for name, file in files if "/." not in f"/{name}"]  # not hidden
    if not files:
        raise InputError(f"{key}={path} {what}")
    return sorted(files)


def stdlib_files() -> list[tuple[str, Path]]:
    """Returns sorted (name, path) of the standard library's modules, without its tests."""
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [x for x in folders if x not in _NOT_STDLIB and not x.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                files.append((path.relative_to(root).as_posix(), path))
    if not files:
        raise InputError(
            f"this Python has no source files of its standard library in {root}: "
            "set data.source and data.path"
        )
    return sorted(files)


@dataclass(frozen=True)
class Source:
    """Documents in files, in a fixed order."""

    kind: str  # "stdlib", "text", "jsonl" or "parquet"
    files: list[tuple[str, Path]]
    text_column: str = "text"

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(path.stat().st_size for _, path in self.files)

    def digest(self, cache: Path) -> str:
        """Returns a hash of the files' names and contents and of how they are read."""
        contents = [(name, file_digest(cache, path)) for name, path in self.files]
        column = self.text_column if self.kind in ("jsonl", "parquet") else ""
        return digest(self.kind, column, contents)

    def pieces(self) -> Iterator[Piece]:
        """Yields the documents in bounded memory, long ones in pieces; skips empty ones.

        Raises InputError with the file and the position for data that cannot be read.
        """
        read = {"jsonl": self._json_lines, "parquet": self._parquet}.get(self.kind, self._text)
        before = 0
        for name, path in self.files:
            try:
                for piece in read(name, path):
                    yield piece._replace(done=before + piece.done)
            except OSError as error:
                raise InputError(f"cannot read {path}: {error.strerror or error}") from error
            before += path.stat().st_size

    def _text(self, name: str, path: Path) -> Iterator[Piece]:
        errors = "replace" if self.kind == "stdlib" else "strict"
        decoder = codecs.getincrementaldecoder("utf-8")(errors)
        begins, rest, done = True, "", 0
        with open(path, "rb") as file:
            while True:
                block = file.read(_PIECE)
                pending = len(decoder.getstate()[0])
                try:
                    rest += decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    position = done - pending + error.start
                    raise InputError(
                        f"{path} is not UTF-8 text: {error.reason} at byte {position}"
                    ) from error
                done += len(block)
                cut = _place_to_cut(rest) if block else len(rest)
                if not cut and len(rest) >= _LONGEST:
                    cut = len(rest)
                if cut:
                    yield Piece(name, rest[:cut], begins, done)
                    begins, rest = False, rest[cut:]
                if not block:
                    return

    def _json_lines(self, name: str, path: Path) -> Iterator[Piece]:
        done = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                done += len(line)
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:  # its own text counts lines from here
                    raise InputError(
                        f"{path}:{number} is not JSON: {error.msg} at character {error.pos + 1}"
                    ) from error
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{path}:{number} is not JSON: {error}") from error
                if isinstance(value, dict) and value.get(self.text_column, "") is None:
                    continue  # as in parquet: this document has no text
                text = value.get(self.text_column) if isinstance(value, dict) else None
                if not isinstance(text, str):
                    has = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                    if isinstance(value, dict) and self.text_column in value:
                        has = f"a value of type {type(text).__name__}"
                    raise InputError(
                        f"{path}:{number} has no text under {self.text_column!r} (it has {has}); "
                        "name the column of the text with text_column"
                    )
                if text:
                    # A lone surrogate (legal in JSON, not in UTF-8) would stop the tokenizer.
                    text = text.encode("utf-8", "replace").decode("utf-8")
                    yield Piece(f"{name}:{number}", text, True, done)

    def _parquet(self, name: str, path: Path) -> Iterator[Piece]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self._check_column(path, file.schema_arrow)
                rows, size = max(1, file.metadata.num_rows), path.stat().st_size
                batches = file.iter_batches(256, columns=[self.text_column])
                texts = (text for batch in batches for text in batch.column(0).to_pylist())
                for number, text in enumerate(texts, 1):
                    if text:
                        yield Piece(f"{name}:{number}", text, True, size * number // rows)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # from the system, not the content
                raise
            reason = " ".join(str(error).split())
            raise InputError(f"{path} is not a readable parquet file: {reason}") from error

    def _check_column(self, path: Path, schema) -> None:
        """Raises InputError if a parquet file has no column of text under `text_column`."""
        from pyarrow import types

        if self.text_column not in schema.names:
            raise InputError(
                f"{path} has no column {self.text_column!r} (it has"
                f" {', '.join(schema.names)}); name the column of the text with text_column"
            )
        kind = schema.field(self.text_column).type
        if types.is_dictionary(kind):  # a pandas category
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise InputError(f"{path}: column {self.text_column!r} is {kind}, not text")


def _place_to_cut(text: str) -> int:
    """Returns an index near the end where a cut does not change the token ids, or 0.

    GPT-2's, Llama 3's and most other tokenizers separate words there whatever follows.  It is the
    last index after a newline between two visible characters; among several blanks a cut would
    change the ids, because GPT-2 splits off the last blank and Llama 3 joins all.  If there is no
    such newline, it is the last index before a space between two letters.
    """
    end = len(text)
    while (end := text.rfind("\n", 0, end)) > 0:
        if not (
            text[end - 1].isspace() or text[end + 1 : end + 2].isspace() or end + 1 == len(text)
        ):
            return end + 1
    end = len(text)
    while (end := text.rfind(" ", 0, end)) > 0:
        if text[end - 1].isalpha() and text[end + 1 : end + 2].isalpha():
            return end
    return 0


def is_held_out(document: str, fraction: float) -> bool:
    """Returns whether a document is for validation, by a hash of its name."""
    return hold_out_rank(document) < fraction


def hold_out_rank(document: str) -> float:
    """Hashes a document's name to a number from 0 to 1."""
    # With this prefix, 5.2% of Python 3.12's library is held out, of many kinds.  Without it, 12%
    # would be held out, half of it pydoc's topics (prose, unlike the rest).
    return int.from_bytes(hashlib.sha256(f"val:{document}".encode()).digest()[:8]) / 2.0**64
