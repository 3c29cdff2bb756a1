"""A cache on disk for work that is done once.

Every entry is complete or absent, even if a process is killed while it writes.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.data.paths import open_bytes
from jaxllm.errors import InputError
from jaxllm.files import lock, new_folder, write_json

_COMPILED = 4 << 30  # bytes of compiled programs, which have a few MB each


def cache_folder(cache_dir: str | None) -> Path:
    """Returns `cache_dir`, or else $XDG_CACHE_HOME/jaxllm or ~/.cache/jaxllm."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")  # XDG's default
    if not os.path.isabs(base):  # a user without HOME and without an entry in passwd
        raise InputError("no home directory for the cache: set HOME, or XDG_CACHE_HOME to a folder")
    return Path(base) / "jaxllm"


def keep_compiled() -> None:
    """Makes JAX keep compiled programs for GPUs in our cache, and read them at the next start.

    If these and the steps of train/programs.py take more than _COMPILED bytes, the least recently
    read are deleted: JAX's own limit (jax_compilation_cache_max_size) needs locks, which some
    network file systems do not have.  JAX's settings come first: JAX_COMPILATION_CACHE_DIR names
    another folder for its programs, JAX_ENABLE_COMPILATION_CACHE=false keeps neither.
    """
    import jax  # here, as it takes seconds and must not start before XLA's flags are set

    if jax.default_backend() == "gpu":
        folder = cache_folder(None) / "compiled"
        _trim(folder)
        if not jax.config.jax_compilation_cache_dir:
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _trim(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process may delete them
        paths = [*folder.glob("*-cache"), *folder.glob("*.step*")]  # also remains of kills
        files = [(path, path.stat()) for path in paths]
        files.sort(key=lambda file: max(file[1].st_atime, file[1].st_mtime))
        excess = sum(stat.st_size for _, stat in files) - _COMPILED
        for path, stat in files:
            if excess <= 0:
                break
            path.unlink()
            excess -= stat.st_size


def digest(*parts: Any) -> str:
    """Returns the SHA-256 of JSON-like values as 64 hex digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """The digest of our code, as the process's first call found it: it may be edited later."""
    root = Path(__file__).parents[2]
    paths = [path for name in ("jaxllm", "pallas_kernels") for path in (root / name).rglob("*.py")]
    return digest({str(path.relative_to(root)): path.read_text() for path in sorted(paths)})


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`; if it is missing, one process fills it by `build(temporary folder)`."""
    if folder.is_dir():
        return folder
    try:
        with lock(folder.with_name(folder.name + ".lock")) as locked:
            if folder.is_dir():
                return folder
            # Whoever holds the lock knows that the processes that left these are dead.
            for stale in folder.parent.glob(folder.name + ".tmp-*") if locked else ():
                shutil.rmtree(stale, ignore_errors=True)
            with new_folder(folder) as temporary:
                build(temporary)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process finished first, without locks
            raise InputError(
                f"cannot write the data cache in {folder.parent}: {error}; set data.cache_dir"
            ) from error
    return folder


def cached(cache: Path, path: Path, what: str, compute: Callable[[], dict]) -> dict:
    """Returns `compute()`, a JSON-like fact about a file, and caches it until the file changes.

    A change means a new size or time; reading 100 GB at every start would be too slow.  `cp -p` and
    archives set the modification time, so two versions may share it, but not the change time.
    """
    stat = path.stat()
    key = digest(what, str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    note = cache / "files" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # older notes have no digest
        fact, noted = json.loads(note.read_text())
        if noted == digest(fact):
            return fact
    fact = compute()
    # A cache that cannot be written costs time at the next start, but must not fail this run.
    with contextlib.suppress(OSError):
        write_json(note, [fact, digest(fact)])
    return fact


def file_digest(cache: Path, path: Path) -> str:
    """Returns the SHA-256 of a file's decompressed content; caches it for a large file."""

    def compute() -> dict:
        with open_bytes(path) as (content, _):
            return {"sha256": hashlib.file_digest(content, "sha256").hexdigest()}

    if path.stat().st_size < 1 << 22:  # hashing 4 MiB takes 3 ms and is always right
        return compute()["sha256"]
    return cached(cache, path, "content", compute)["sha256"]
