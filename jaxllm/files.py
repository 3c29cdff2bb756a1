"""Text files of any system, atomic writes, and locks that are freed when their process dies."""

import codecs
import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxllm.errors import InputError


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock, which the system frees when its process dies.

    Yields whether the lock is held; some network file systems have no locks.
    Raises BlockingIOError if `wait` is false and another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except BlockingIOError:
            raise
        except OSError:
            locked = False
        yield locked


@contextlib.contextmanager
def own(folder: Path) -> Iterator[Callable[[], bool]]:
    """Creates a folder, if need be, and locks it against other processes that write there.

    Yields a function that tells whether the folder is still this one, not deleted or replaced.
    At the end, removes the folder if it was created here and is empty: the work was refused.
    Raises InputError if another process holds the lock, or if the folder is not writable.
    """
    path, new = folder / ".lock", [x for x in (folder, *folder.parents) if not x.exists()]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(path, wait=False))
            if not path.exists():  # its holder has just removed it
                raise BlockingIOError
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing to {folder}; wait for it, or name another"
            ) from error
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
        stack.callback(_remove_unused, path, new)
        inode = path.stat().st_ino
        yield lambda: path.exists() and path.stat().st_ino == inode


def _remove_unused(path: Path, new: list[Path]) -> None:
    with contextlib.suppress(OSError):  # it is gone, or another process is in a folder above
        if new and os.listdir(path.parent) == [path.name]:
            path.unlink()
            for folder in new:
                folder.rmdir()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `folder` at the end; after an error it is removed.

    Raises OSError if `folder` exists at the end and is not an empty folder.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def inside(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, which need not exist, is a folder or lies in it, with all links resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def on_hub(path: str | Path, kind: str = "") -> str:
    """The end of an error about a missing path, if it looks like a name on Hugging Face's Hub."""
    asked = os.path.relpath(path)  # a configuration holds absolute paths
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", asked) and not Path(path).parent.exists()
    return f"; the Hub's tool fetches it: hf download {asked}{kind} --local-dir DIR" * bool(named)


def read_text(path: Path) -> str:
    """Reads UTF-8 text, without a byte order mark and with newlines as \\n.

    Raises OSError, or ValueError with the line that is not UTF-8.
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16: convert it (iconv -f UTF-16 -t UTF-8)") from error
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"line {line} is not UTF-8 text: {error.reason}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers; raises InputError.

    what: the option that names the file.
    """
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise InputError(f"{what} {path} cannot be read: {error}") from error
    if not (found := [(number, line) for number, line in enumerate(lines, 1) if line.strip()]):
        raise InputError(f"{what} {path} has no line of text")
    return found


def parse_json(text: str) -> Any:
    """Parses JSON; raises ValueError, also if an object has a name twice: json keeps the last."""

    def unique(pairs):
        if len(found := dict(pairs)) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise ValueError(f"an object has {twice!r} twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Reads a JSON object, {} for a missing file that is optional; raises InputError."""
    try:
        page = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as e:
        if optional and isinstance(e, FileNotFoundError) and not path.is_symlink():
            return {}
        raise InputError(f"{path} cannot be read as JSON: {' '.join(str(e).split())}") from e
    if not isinstance(page, dict):
        raise InputError(f"{path} holds {type(page).__name__}, not an object with keys")
    return page


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file atomically: even if the process is killed, it has the old or new content."""
    temporary = Path(f"{path}.tmp-{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Writes a value as JSON atomically, and creates the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=indent).encode())
