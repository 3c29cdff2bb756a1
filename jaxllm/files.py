"""Files that are whole at any time, and locks that die with their process."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no lock, two processes may do the same work; renames stay atomic
    fcntl = None


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock, which the system frees when its process dies.

    Yields whether the lock is really held (some network file systems have none).
    Raises BlockingIOError if `wait` is false and another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        held = False
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                held = True
            except BlockingIOError:
                raise
            except OSError:
                pass
        yield held


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is at all times the old one or the new one, whoever is killed when."""
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, and makes the folder for it; see `write_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value).encode())
