"""llm.c token shards: a header of 256 little-endian int32, then the token ids.

header[0] = 20240520, header[1] = 1, header[2] = number of tokens, then uint16 (GPT-2);
header[0] = 20240801, header[1] = 7, header[2] = number of tokens, then uint32 (Llama 3).
"""

import hashlib
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from jaxllm.data.cache import cached
from jaxllm.errors import InputError, RunError

HEADER_BYTES = 256 * 4
# magic -> (version, dtype)
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}
MAX_TOKENS = 2**31 - 1  # header[2] is an int32
_CHUNK = 1 << 22  # tokens that the scan reads at a time: at most 16 MiB


class Tokens:
    """Several token arrays, usually memory-mapped files, read as one."""

    def __init__(self, parts: list[np.ndarray]):
        self.parts = [part for part in parts if len(part)]
        self._starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def slice(self, start: int, stop: int) -> "Tokens":
        """Returns tokens [start, stop) without reading them."""
        bounds = zip(self.parts, self._starts, strict=False)
        return Tokens([part[max(0, start - s) : max(0, stop - s)] for part, s in bounds])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop): (stop - start,) int32."""
        pieces, i = [], bisect_right(self._starts, start) - 1
        while start < stop:
            file = getattr(part := self.parts[i], "_mmap", None)
            if file and file.size() < len(file):  # the system would kill the process
                name = getattr(part, "filename", "a shard")
                raise RunError(f"{name} was cut to {file.size()} bytes while the run read it")
            offset = start - self._starts[i]
            pieces.append(part[offset : offset + stop - start].astype(np.int32))
            start += len(pieces[-1])
            i += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def open_shard(path: Path) -> np.ndarray:
    """Memory-maps a shard's tokens; raises InputError if its header or its size is wrong."""
    try:
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", 256)
    except OSError as error:
        raise InputError(f"cannot read token shard {path}: {error.strerror}") from error
    if len(header) < 256:
        raise InputError(f"{path} is not a token shard: {size} bytes; a header has {HEADER_BYTES}")
    magic, version, count = (int(x) for x in header[:3])
    expected, dtype = FORMATS.get(magic, (None, np.dtype("V1")))
    if version != expected:
        known = " or ".join(f"{magic}, {version}" for magic, (version, _) in FORMATS.items())
        raise InputError(
            f"{path} is not a token shard: it starts with {magic}, {version}, expected {known}; ids"
            " without llm.c's header, such as nanoGPT's, come from jaxllm data prepare anew"
        )
    required = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != required:
        raise InputError(
            f"{path} is damaged: {size} bytes, expected {required} for its header's {count} tokens"
        )
    if count == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,))


def check_shard(path: Path, cache: Path, vocab_size: int, written: str | None = None) -> str:
    """Returns the SHA-256 of a shard's tokens; reads them once and caches the result.

    Raises InputError if the hash differs from `written` (None: unknown), or if the largest token is
    not below `vocab_size`; the error gives its position.
    """

    def scan() -> dict:
        tokens = open_shard(path)
        sha, largest, position = hashlib.sha256(), -1, 0
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.asarray(tokens[start : start + _CHUNK])
            sha.update(chunk)
            if chunk.max() > largest:
                largest, position = int(chunk.max()), start + int(chunk.argmax())
        return {"sha256": sha.hexdigest(), "largest": largest, "position": position}

    fact = cached(cache, path, "shard", scan)
    if written not in (None, fact["sha256"]):
        raise InputError(f"{path} is damaged: its tokens have changed; delete {path.parent}")
    if fact["largest"] >= vocab_size:
        raise InputError(
            f"{path}: token {fact['largest']} at position {fact['position']} is outside the"
            f" vocabulary of {vocab_size}"
        )
    return fact["sha256"]


class ShardWriter:
    """Writes one shard; the file is a valid shard only after `close`.

    keep: tokens of an incomplete file to keep and append to.
    sha256: of the tokens appended, as `check_shard` returns it.
    """

    def __init__(self, path: Path, vocab_size: int, *, keep: int = 0):
        self.path, self.count, self.sha256 = path, keep, hashlib.sha256()
        self._magic = 20240520 if vocab_size <= 1 << 16 else 20240801  # the narrower, if it fits
        self._version, self._dtype = FORMATS[self._magic]
        end = HEADER_BYTES + keep * self._dtype.itemsize
        if keep and not (path.exists() and path.stat().st_size >= end):
            raise InputError(f"{path} is missing or shorter than {keep} tokens; delete its folder")
        self._file = open(path, "r+b" if keep else "wb")
        self._file.truncate(end)
        self._file.seek(end)

    def append(self, ids: np.ndarray) -> None:
        """Adds ids, which must be in the vocabulary."""
        if self.count + len(ids) > MAX_TOKENS:
            raise InputError(
                f"more than {MAX_TOKENS} tokens do not fit into one token file: turn the text "
                "into shards first (jaxllm data prepare)"
            )
        tokens = ids.astype(self._dtype).tobytes()
        self._file.write(tokens)
        self.sha256.update(tokens)
        self.count += len(ids)

    def sync(self) -> None:
        """Flushes the appended tokens to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, complete: bool = True) -> None:
        """Closes the file; it becomes a valid shard if `complete`, else it can be continued."""
        if complete:
            header = np.zeros(256, "<i4")
            header[:3] = self._magic, self._version, self.count
            self._file.seek(0)
            self._file.write(header.tobytes())
            self.sync()
        self._file.close()
