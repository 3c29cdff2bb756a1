"""The folder of encoded data: built once, by one, whole or not at all."""

import os
import threading

import pytest

from jaxllm.data.cache import build_once, cache_folder, file_digest
from jaxllm.errors import InputError
from jaxllm.files import lock


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(None) == tmp_path / ".cache/jaxllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(None) == tmp_path / "x/jaxllm"
    assert cache_folder("~/y") == tmp_path / "y"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As in a container with --user: an error about ~ named a path that the user had not given."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(InputError, match="set HOME, or XDG_CACHE_HOME"):
        cache_folder(None)


def test_only_one_of_several_threads_builds(tmp_path):
    built, go = [], threading.Barrier(4)

    def build(folder):
        built.append(folder)
        (folder / "a").write_text("a")

    def run():
        go.wait()
        assert (build_once(tmp_path / "x", build) / "a").read_text() == "a"

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    def build(folder):
        (folder / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "x", build)
    assert [path.name for path in tmp_path.iterdir()] == ["x.lock"]
    (tmp_path / "x.tmp-of-a-killed-process").mkdir()
    build_once(tmp_path / "x", lambda folder: (folder / "a").write_text("a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.lock"]


def test_a_lock_is_exclusive(tmp_path):
    with lock(tmp_path / "a"):
        with pytest.raises(BlockingIOError), lock(tmp_path / "a", wait=False):
            pass
    with lock(tmp_path / "a", wait=False):
        pass


def test_large_files_are_hashed_once_until_they_change(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(5 << 20))
    first = file_digest(tmp_path / "cache", path)
    (note,) = (tmp_path / "cache/files").iterdir()
    assert first in note.read_text()
    note.write_text(note.read_text().replace(first, first[::-1]))
    assert file_digest(tmp_path / "cache", path) == first
    path.write_bytes(bytes(5 << 20) + b"x")
    second = file_digest(tmp_path / "cache", path)
    os.utime(path, ns=(0, 0))
    assert file_digest(tmp_path / "cache", path) == second != first
    path.write_bytes(bytes(5 << 20) + b"y")  # as `cp -p` of a file whose archive dates all alike
    os.utime(path, ns=(0, 0))
    assert file_digest(tmp_path / "cache", path) != second
