"""Reads documents from Python's standard library, text, JSON lines, parquet and Arrow."""

import codecs
import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm.data.cache import digest, file_digest
from jaxllm.data.paths import open_bytes
from jaxllm.errors import InputError
from jaxllm.files import parse_json

_MARK = "\ufeff"  # a byte order mark
_BLANK = b" \t\r\n\xef\xbb\xbf"  # blanks, and the bytes of a mark

_CSV = (  # a CSV may begin with a byte order mark, and have fields of any length
    'python -c "import csv, json, sys; csv.field_size_limit(sys.maxsize); [print(json.dumps(row))'
    " for row in csv.DictReader(open(sys.argv[1], newline='', encoding='utf-8-sig'),"
    " delimiter='{0}')]\" {1} > {2}"
)
_NOT_TEXT = (  # (offset, bytes that no text has there, the format that has them)
    (257, b"ustar", "a tar archive"),
    (0, b"PK\3\4", "a zip archive"),
    (0, b"\xfd7zXZ\0", "compressed with xz"),
    (0, b"version https://git-lfs.", _LFS := "a pointer of Git LFS"),
    (4, b"1AY&SY", "compressed with bzip2"),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4"),
)
_TABLES = b"PAR1", b"ARRO", b"\xff\xff\xff\xff"  # parquet; Arrow's files and streams
_PIECE = 1 << 15  # bytes; short pieces encode faster than whole files (CPU caches, even load)
_SHORTEST = 512  # characters of a piece, but for a document's last, to test a cut before it with
_LONGEST = 1 << 20  # characters; a piece without a good place to cut is cut here anyway


class Record(NamedTuple):
    """An object of JSON lines, or a row of parquet or Arrow."""

    document: str  # as in Piece
    where: str  # its file and line, for errors
    values: dict[str, Any]
    done: int  # as in Piece


class Piece(NamedTuple):
    """A part of a document; most documents are one piece."""

    document: str  # name, unique in its source and the same on every machine
    text: str
    begins: bool  # whether this is the document's first piece
    done: int  # bytes of the source's files read so far


@dataclass(frozen=True)
class Source:
    """Documents in files, in a fixed order."""

    kind: str  # "stdlib", "text", "jsonl", "parquet" or "chat"
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

    def without(self, other: "Source", cache: Path) -> "Source":
        """Returns this source without the files whose content is in `other`, by whatever name."""
        contents = {file_digest(cache, path) for _, path in other.files}
        files = [file for file in self.files if file_digest(cache, file[1]) not in contents]
        return replace(self, files=files)

    def pieces(self) -> Iterator[Piece]:
        """Yields the documents in bounded memory, long ones in pieces; skips empty ones.

        Drops the byte order mark that may begin a document.
        Raises InputError with the file and the position for data that cannot be read.
        """
        for piece in self._each(self._column if self.kind in ("jsonl", "parquet") else self._text):
            if piece.begins and piece.text.startswith(_MARK):
                piece = piece._replace(text=piece.text[1:])
            while len(text := piece.text) > 2 * _LONGEST:  # encoding takes 120 bytes a character
                cut = _place_to_cut(text[:_LONGEST]) or _LONGEST
                yield piece._replace(text=text[:cut])
                piece = piece._replace(text=text[cut:], begins=False)
            if piece.text:
                yield piece

    def records(self, columns: Collection[str]) -> Iterator[Record]:
        """Yields the objects of JSON lines, or rows of parquet and Arrow with only `columns`."""
        return self._each(partial(self._records, columns))

    def _each(self, read: Callable[[str, Path], Iterator[Any]]) -> Iterator[Any]:
        """Yields from `read` for each file, and adds the sizes of earlier files to `done`."""
        before = 0
        for name, path in self.files:
            for part in read(name, path):
                yield part._replace(done=before + part.done)
            before += path.stat().st_size

    def _records(self, columns: Collection[str], name: str, path: Path) -> Iterator[Record]:
        with open_bytes(path) as (content, _):
            start = content.peek(512)[:512]
        table = start[:4] in _TABLES and self.kind in ("parquet", "chat")
        if not table:
            _check_encoding(path, start)
            plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
            if plain.suffix in (".csv", ".tsv") and not start.lstrip(_BLANK).startswith(b"{"):
                names = (shlex.quote(name) for name in (str(plain), f"{plain}.jsonl"))
                command = _CSV.format({".csv": ",", ".tsv": "\\t"}[plain.suffix], *names)
                then, kind = "unpack it; " * (plain != path), self.kind.replace("parquet", "jsonl")
                raise InputError(f"{path} is CSV: {then}as JSON lines, source={kind}: {command}")
        return _rows(name, path, columns) if table or self.kind == "parquet" else _lines(name, path)

    def _text(self, name: str, path: Path) -> Iterator[Piece]:
        errors = "replace" if self.kind == "stdlib" else "strict"
        decoder = codecs.getincrementaldecoder("utf-8")(errors)
        begins, rest, read, lines = True, "", 0, 1
        with open_bytes(path) as (content, file):
            while True:
                block = content.read(_PIECE)
                if not read:
                    _check_encoding(path, block)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    line = lines + error.object[: error.start].count(b"\n")
                    raise InputError(
                        f"{path} is not UTF-8 text: {error.reason} at byte"
                        f" {read - pending + error.start}, in line {line}"
                    ) from error
                read += len(block)
                lines += text.count("\n")
                rest += text
                cut = _place_to_cut(rest) if block else len(rest)
                if not cut and len(rest) >= _LONGEST:
                    cut = len(rest)
                if cut:
                    yield Piece(name, rest[:cut], begins, file.tell())
                    begins, rest = False, rest[cut:]
                if not block:
                    return

    def _column(self, name: str, path: Path) -> Iterator[Piece]:
        column = self.text_column
        for document, where, values, done in self._records([column], name, path):
            if isinstance(text := values.get(column, 0), bytes):
                raise InputError(f"{where} is not UTF-8 text")
            if text is not None and not isinstance(text, str):
                has = f"it has a value of type {type(text).__name__}"
                if column not in values:
                    names = [name for name in values if isinstance(values[name], str)]
                    has = f"its columns of text: {', '.join(names) or 'none'}"
                raise InputError(f"{where} has no text under {column!r} ({has}); set text_column")
            if text:
                # A lone surrogate (legal in JSON, not in UTF-8) would stop the tokenizer.
                yield Piece(document, text.encode("utf-8", "replace").decode(), True, done)


def _lines(name: str, path: Path) -> Iterator[Record]:
    """The objects of a file of JSON lines."""
    with open_bytes(path) as (lines, file):
        for number, line in enumerate(lines, 1):
            content = line.strip(_BLANK)
            if number == 1 and content.startswith(b"["):
                raise InputError(f"{path} is a JSON array, not an object per line: use jq -c '.[]'")
            if content:
                where = f"{path}:{number}"
                yield Record(f"{name}:{number}", where, _object(line, where), file.tell())


def _object(line: bytes, where: str) -> dict:
    try:
        value = parse_json(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:  # its message would count lines from here
        why = f"{error.msg} at character {error.pos + 1}; every line must be one object"
        raise InputError(f"{where} is not JSON: {why} (jq -c . writes them)") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{where} is a {type(value).__name__}; every line must be an object")
    return value


def _rows(name: str, path: Path, columns: Collection[str]) -> Iterator[Record]:
    """The rows of a file of parquet or Arrow, with the columns among `columns` that it has."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with open(path, "rb") as raw, contextlib.ExitStack() as stack:
            batches, kind = None, raw.peek(4)[:4]
            if kind == _TABLES[1]:
                file = stack.enter_context(pyarrow.ipc.open_file(raw))
                batches = map(file.get_batch, range(file.num_record_batches))
            elif kind == _TABLES[2]:  # as datasets' save_to_disk writes them
                batches = file = stack.enter_context(pyarrow.ipc.open_stream(raw))
            else:
                file = stack.enter_context(ParquetFile(raw, page_checksum_verification=True))
            schema = file.schema if batches else file.schema_arrow
            if not (found := [column for column in schema.names if column in columns]):
                fix = "; name the column of the text with text_column" * (len(columns) == 1)
                wanted, has = " or ".join(map(repr, sorted(columns))), ", ".join(schema.names)
                raise InputError(f"{path} has no column {wanted}, only {has}{fix}")
            if twice := next((column for column in found if found.count(column) > 1), None):
                raise InputError(f"{path} has {found.count(twice)} columns {twice!r}; keep one")
            total, size = 0 if batches else max(1, file.metadata.num_rows), path.stat().st_size
            batches = batches or file.iter_batches(256, columns=found)
            parts = (b for b in batches if total or b.validate(full=True) is None)
            rows = (x for b in parts for x in b.select(found).to_pylist(maps_as_pydicts="strict"))
            for number, values in enumerate(rows, 1):
                values = {x: _plain(values[x], schema.field(x).type) for x in found}
                done = size * number // total if total else raw.tell()
                yield Record(f"{name}:{number}", f"{path}: row {number}", values, done)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: a row after {number} is not UTF-8 text: {error}") from error
    except (InputError, MemoryError):
        raise
    except Exception as error:  # for a damaged file or an odd value Arrow may raise any
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{path} is not a readable file of parquet or Arrow: {reason}") from error


def _plain(value: Any, kind: Any) -> Any:
    """A value of an Arrow type, without the nulls that structs have for keys that a row lacks."""
    if value is not None and getattr(kind, "extension_name", None) == "arrow.json":  # datasets'
        return parse_json(value)
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):  # it may be an image
            return value.decode()
    if isinstance(value, dict):
        of = lambda key: getattr(kind, "item_type", None) or kind.field(key).type  # of a map
        return {key: _plain(x, of(key)) for key, x in value.items() if x is not None}
    return [_plain(x, kind.value_type) for x in value] if isinstance(value, list) else value


def _check_encoding(path: Path, start: bytes) -> None:
    """Raises InputError for the first bytes of UTF-16 and UTF-32, and of an archive or a table."""
    if start[:4] in _TABLES:
        raise InputError(f"{path} is of parquet or Arrow, not text: name parquet as its source")
    for at, mark, kind in _NOT_TEXT:
        if start[at : at + len(mark)] == mark:
            fix = "run git lfs pull" if kind == _LFS else "unpack it; gzip and zstd are read as is"
            raise InputError(f"{path} is {kind}, not text: {fix}")
    # Detected by a byte order mark, or by where zeros are; UTF-8 may have a few zeros, too.
    few = start.count(0) * 4 < len(start)
    encoding = json.detect_encoding(start.replace(b"\0", b" ") if few else start)
    if not encoding.startswith("utf-8"):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")  # as iconv spells it
        raise InputError(f"{path} is {name}, not UTF-8 text: convert it (iconv -f {name} -t UTF-8)")


def _place_to_cut(text: str) -> int:
    """Returns an index near the end where a cut does not change the token ids, or 0.

    GPT-2's, Llama 3's and most other tokenizers separate words there whatever follows.  It is the
    last index after a newline between two visible characters; among several blanks a cut would
    change the ids, because GPT-2 splits off the last blank and Llama 3 joins all.  If there is no
    such newline, it is the last index before a space between two letters.
    """
    end = len(text)
    while (end := text.rfind("\n", _SHORTEST, end)) > 0:
        if not (
            text[end - 1].isspace() or text[end + 1 : end + 2].isspace() or end + 1 == len(text)
        ):
            return end + 1
    end = len(text)
    while (end := text.rfind(" ", _SHORTEST, end)) > 0:
        if text[end - 1].isalpha() and text[end + 1 : end + 2].isalpha():
            return end
    return 0


def hold_out_below(ranks: Sequence[float] | np.ndarray, fraction: float) -> float:
    """The rank below which `fraction` is held out: at least one of different ranks, and not all."""
    return min(max(fraction, float(np.nextafter(min(ranks), 1))), max(ranks))


def hold_out_rank(document: str) -> float:
    """Hashes a document's name to a number from 0 to 1, below which a fraction is held out."""
    # With this prefix, 5.2% of Python 3.12's library is held out, of many kinds.  Without it, 12%
    # would be held out, half of it pydoc's topics (prose, unlike the rest).
    name = f"val:{document}".encode("utf-8", "surrogateescape")  # a file's name may have any bytes
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) / 2.0**64
