"""Finds the files that a path names, says what it leaves out, and opens compressed files."""

import contextlib
import glob
import gzip
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import yaml
from rich.filesize import decimal

from jaxllm.errors import InputError
from jaxllm.files import on_hub, read_json
from jaxllm.terminal import counted

# The suffixes to look for in a folder; a path to one file or a glob accepts any name.
_SUFFIXES = {
    "text": ("",),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".arrow"),
    "shards": (".bin",),
    "chat": (".jsonl", ".ndjson", ".json", ".parquet", ".arrow"),
}
_WORDS = "train training", "val valid validation dev", "test testing eval evaluation"  # the Hub's
_SPLITS = {word: words.split()[0] for words in _WORDS for word in words.split()}
_ABOUT = "readme", "license", "licence", "copying", "notice", "citation", "changelog"
# Files beside the data of a dataset; the Hub and datasets' load_from_disk skip them, too.
_CARDS = r"(dataset_infos?|dataset_dict|state|config)\.json|cache-\w+\.arrow"
PREPARED = "chat.json", "conversations.chat"  # in a folder of encoded conversations
_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # suffixes of text and JSON lines in a folder
# Leaves out what is no code to learn from: tests, character tables (a fifth of all text), installed
# packages, and build outputs, which differ from machine to machine.
_NOT_STDLIB = frozenset(
    "test tests idle_test encodings pydoc_data site-packages dist-packages __pycache__".split()
)


class Found(NamedTuple):
    """The files that a path names.

    files: sorted (name, path); names are relative to the folder, so that a corpus can move.
    left_out: what the path leaves out, for people: "; left out ...", or empty.
    splits: {name: split} as the README.md of a dataset says.
    """

    files: list[tuple[str, Path]]
    left_out: str = ""
    splits: dict[str, str] = {}

    def describe(self, purpose: str = "") -> str:
        """For people: the number of files (for a purpose), and how many are compressed."""
        kinds = [kind for _, path in self.files if (kind := _COMPRESSED.get(path.suffix))]
        of_them = f" ({len(kinds):,} {' and '.join(sorted(set(kinds)))}, decompressed)"
        number = f"{len(self.files):,} {purpose}" if purpose else counted(len(self.files), "file")
        return number + of_them * bool(kinds)


def find_files(kind: str, path: str | None, *, key: str = "data.path") -> Found:
    """Returns the files under a file, folder or glob, each once, however many names it has.

    key: the option that holds `path`, for errors. Raises InputError if no file is found, and for
    a path beside the kind "stdlib", which has a fixed one.
    """
    if kind == "stdlib":
        if path is not None:
            raise InputError(f"{key}={path} is not read with source=stdlib: choose text or another")
        return _stdlib()
    if not path:
        raise InputError(f"{key} is missing: a source of {kind} needs a file, a folder or a glob")
    root = os.path.expanduser(path)
    try:
        os.stat(root)
    except (OSError, ValueError) as error:
        if not glob.has_magic(root):
            why = f"cannot be read: {getattr(error, 'strerror', error)}"
            if isinstance(error, FileNotFoundError | NotADirectoryError | ValueError):
                why = f"does not exist{on_hub(root, ' --repo-type dataset')}"
            if os.path.islink(root):
                why = f"is a symbolic link to {os.readlink(root)}, which does not exist"
            raise InputError(f"{key}={path} {why}") from error
        found, what = _glob(root), "matches no file"
    else:
        if os.path.isfile(root):
            return Found([(os.path.basename(root), Path(root))])
        if not os.path.isdir(root):
            raise InputError(f"{key}={path} is neither a file nor a folder")
        if kind == "chat" and is_prepared(page := Path(root, PREPARED[0])):
            return Found([(page.name, page)])
        if all(os.path.isdir(os.path.join(root, x)) for x in ("blobs", "refs", "snapshots")):
            fix = f"with all revisions that were fetched; name one in {root}/snapshots"
            raise InputError(f"{key}={path} is a folder of the Hub's cache, {fix}")
        found = _folder(kind, Path(root))
        what = f"is a folder without *{' or *'.join(_SUFFIXES[kind])} files"
    if not found.files:
        fix = "; a glob names files that README.md does not" * ("data_files" in found.left_out)
        raise InputError(f"{key}={path} {what}{found.left_out}{fix}")
    return found


def by_split(kind: str, found: Found, given: Found | None = None) -> tuple[Found, Found]:
    """The files to train on and to validate on, where names say which, as on the Hub.

    given: the files of data.val_path; then only these validate.
    Words like train, validation and test in the name of a file or folder say it; for shards, val.
    The README.md of a dataset on the Hub takes precedence over names.
    Files without such a word are left out if there are train files, else trained on.  If a text has
    none, all are trained on: code may have tests and a train.py (READMEs, licenses do not count).
    """
    groups = {"train": [], "val": [], "test": [], "no": []}
    usual = "train" if kind == "shards" else "no"
    for name, path in found.files:
        words = re.split(r"[^a-z]+", found.splits.get(name, name).lower())  # also train1
        groups[next(filter(None, map(_SPLITS.get, words)), usual)].append((name, path))
    train, val, test, no = groups.values()
    is_data = lambda file: not file[1].stem.lower().startswith(_ABOUT)
    if not train and kind != "text":
        train, no = no, []
    if not train or (kind == "text" and any(map(is_data, no))):
        return found, Found([])
    unread = {"of a test split": test, "without a split in the name": no}
    if given is not None:
        named = {path.resolve() for _, path in given.files}
        unread["of a validation split"] = [x for x in val if x[1].resolve() not in named]
        val = []
    more = [
        f"; left out {counted(len(x), 'file')} {why} ({x[0][0]})" for why, x in unread.items() if x
    ]
    return Found(train, found.left_out + "".join(more)), Found(val)


def is_prepared(path: Path) -> bool:
    """Whether a file is the report of `jaxllm data prepare`, not conversations of that name."""
    return path.name == PREPARED[0] and path.with_name(PREPARED[1]).is_file()


def _folder(kind: str, root: Path) -> Found:
    """The files of a folder, also through symbolic links, but not hidden ones."""
    reasons: dict[Path, str] = {}
    unreadable = lambda error: reasons.setdefault(Path(error.filename), "unreadable")
    paths, visited, old = [], set(), set()
    for folder, folders, names in os.walk(root, onerror=unreadable, followlinks=True):
        if (here := _identity(folder)) in visited:  # by a second link, or one to a folder above
            folders.clear()
            continue
        visited.add(here)
        folders.sort()
        paths += [Path(folder, name) for name in names]
        arrow = [name for name in names if name.endswith(".arrow")]
        about = ("dataset_dict.json", "splits", folders), ("state.json", "_data_files", arrow)
        for page, key, saved in about:  # datasets' save_to_disk leaves what earlier ones wrote
            if saved and page in names:
                last = str(read_json(Path(folder, page)).get(key, saved))
                old |= {Path(folder, x) for x in saved if repr(x) not in last}
    splits = None if kind == "shards" else _card(kind, root)
    packed = _COMPRESSED if kind in ("text", "jsonl", "chat") else ()
    suffixes = tuple(a + b for a in _SUFFIXES[kind] for b in ("", *packed))
    for path in paths:
        if not old.isdisjoint((path, *path.parents)):
            reasons[path] = "of an earlier save"
        elif "/." in f"/{path.relative_to(root).as_posix()}":
            reasons[path] = "hidden"
        elif not path.name.lower().endswith(suffixes):
            reasons[path] = f"*{path.suffix}" if path.suffix else "without a suffix"
        elif kind != "text" and re.fullmatch(_CARDS, path.name):
            reasons[path] = "about a dataset"
        elif splits is not None and path.relative_to(root).as_posix() not in splits:
            reasons[path] = "not in README.md's data_files"
    return _choose(paths, root, reasons)._replace(splits=splits or {})


def _card(kind: str, root: Path) -> dict[str, str] | None:
    """{name: split} of the files that a dataset's README.md names in `configs`, as on the Hub."""
    try:
        text = (root / "README.md").read_text(encoding="utf-8", errors="replace")
        page = yaml.safe_load(text.split("\n---", 1)[0]) if text.startswith("---\n") else {}
        configs = [dict(x) for x in page.get("configs") or []]
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError):
        return None  # no card
    usual = [x for x in configs if x.get("default") or x.get("config_name") == "default"]
    if len(chosen := usual[:1] or configs) > 1:
        raise InputError(
            f"{root}/README.md has the configurations"
            f" {', '.join(str(x.get('config_name')) for x in configs):.200}, none of them default:"
            f" name the files of one, or of all as a glob such as '{root}/**/*{_SUFFIXES[kind][0]}'"
        )
    splits: dict[str, str] = {}
    listed = lambda x: x if isinstance(x, list) else [x]
    for config in chosen:
        folder = config.get("data_dir") or "."
        for part in listed(config.get("data_files") or {"path": "**/*", "split": None}):
            part = part if isinstance(part, dict) else {"path": part, "split": "train"}
            patterns = [f"{folder}/{pattern}" for pattern in listed(part.get("path"))]
            for name in chain(*(glob.glob(x, root_dir=root, recursive=True) for x in patterns)):
                name = os.path.normpath(name).replace(os.sep, "/")
                splits[name] = str(part.get("split") or name)
    return splits if chosen else None


def _glob(pattern: str) -> Found:
    """The files that a pattern matches; a folder that it matches is left out with its files."""
    matches = [Path(name) for name in glob.glob(pattern, recursive=True)]
    paths = [path for path in matches if not path.is_dir()]
    folders = [glob.escape(str(path)) for path in matches if path.is_dir()]
    inside = {Path(name) for folder in folders for name in glob.glob(f"{folder}/*")}
    reasons = {path: "in folders that the pattern matches" for path in inside - set(matches)}
    root = Path(os.path.commonpath([path.parent for path in paths] or ["."]))
    return _choose([*paths, *reasons], root, reasons)


def _choose(paths: list[Path], root: Path, reasons: dict[Path, str]) -> Found:
    """The paths without a reason to leave them out; the others are counted by their reasons."""
    files, seen = [], set()
    for path in sorted(set(paths) - reasons.keys()):
        if (identity := _identity(path)) is None or not path.is_file():
            reasons[path] = "no file (a broken link, a pipe)"
        elif not os.access(path, os.R_OK):
            reasons[path] = "unreadable"
        elif identity in seen:
            reasons[path] = "a second name of a file"
        else:
            seen.add(identity)
            files.append((os.path.relpath(path, root).replace(os.sep, "/"), path))
    return Found(sorted(files), _left_out(reasons, root))


def _identity(path: str | Path) -> tuple[int, int] | None:
    """What all names of a file or folder share: symbolic and hard links, relative and absolute."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino


def _left_out(reasons: dict[Path, str], root: Path) -> str:
    """For people: how many files each reason leaves out, the most frequent reasons first."""
    parts, ranked = [], Counter(reasons[path] for path in sorted(reasons)).most_common()
    for reason, count in ranked[:5]:
        first = min(os.path.relpath(path, root) for path in reasons if reasons[path] == reason)
        parts.append(f"{count:,} {reason} ({first}{', ...' * (count > 1)})")
    more = f", {counted(len(ranked) - 5, 'more kind')}" * (len(ranked) > 5)
    size = decimal(sum(os.path.getsize(path) for path in reasons if os.path.exists(path)))
    left_out = f"; left out {counted(len(reasons), 'file')} ({size}): {', '.join(parts)}{more}"
    return left_out * bool(parts)


def _stdlib() -> Found:
    """The standard library's modules, without its tests."""
    root, files = sysconfig.get_paths()["stdlib"], []
    for folder, folders, names in os.walk(root):
        folders[:] = [x for x in folders if x not in _NOT_STDLIB and not x.startswith("config-")]
        paths = [Path(folder, x) for x in names if not x.startswith("_sysconfigdata")]
        files += [(x.relative_to(root).as_posix(), x) for x in paths if x.suffix == ".py"]
    if not files:
        raise InputError(f"{root} has no source of Python's modules: set data.source, data.path")
    return Found(sorted(files))


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[tuple[BufferedReader, BufferedReader]]:
    """Yields (a file's content without gzip or zstd, the file, whose `tell` says what was read)."""
    try:
        with open(path, "rb") as file:
            if (head := file.peek(4)[:4]).startswith(b"\x1f\x8b"):
                yield BufferedReader(gzip.GzipFile(fileobj=file)), file
            # A data frame, or a skippable frame, such as pzstd's.
            elif head == b"\x28\xb5\x2f\xfd" or (head[1:] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
                import pyarrow

                yield BufferedReader(pyarrow.CompressedInputStream(file, "zstd")), file
            else:
                yield file, file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        reason += "; unpack it: zstd -d --long=31" * ("too much memory" in reason)
        raise InputError(f"cannot read {path}: {reason}") from error
