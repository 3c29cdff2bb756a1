"""Which files a path names, and what it leaves out."""

import os
import sysconfig

import pytest
from data_settings import write

from jaxllm.data.paths import by_split, find_files
from jaxllm.data.sources import hold_out_rank
from jaxllm.errors import InputError


def test_files_of_a_folder_are_sorted_and_not_hidden(tmp_path):
    for name in ("b.txt", "a/z.md", ".hidden", ".git/x", "a/.x/y"):
        write(tmp_path / name, "x")
    assert [name for name, _ in find_files("text", str(tmp_path)).files] == ["a/z.md", "b.txt"]


def test_names_do_not_depend_on_the_location_of_the_corpus(tmp_path):
    for root in ("one", "two/three"):
        write(tmp_path / root / "a/1.txt", "x")
        write(tmp_path / root / "b/2.txt", "y")
    names = [
        [name for name, _ in find_files("text", str(tmp_path / root)).files]
        for root in ("one", "two/three", "one/**/*.txt", "two/three/*/*.txt")
    ]
    assert names == [["a/1.txt", "b/2.txt"]] * 4


def test_only_files_of_the_kind(tmp_path):
    for name in ("a.jsonl", "b.parquet", "c.bin", "d.txt"):
        write(tmp_path / name, "x")
    for kind, name in (("jsonl", "a.jsonl"), ("parquet", "b.parquet"), ("shards", "c.bin")):
        assert [n for n, _ in find_files(kind, str(tmp_path)).files] == [name]


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("text", None, "data.path is missing: a source of text needs"),
        ("text", "{}/none", "data.path={}/none does not exist"),
        ("text", "{}", r"is a folder without \* files"),
        ("jsonl", "{}", r"is a folder without \*.jsonl or"),
        ("shards", "{}/*.bin", "matches no file"),
    ],
)
def test_a_path_without_files_is_refused(tmp_path, kind, path, message):
    path = path and path.format(tmp_path)
    with pytest.raises(InputError, match=message.replace("{}", str(tmp_path))):
        find_files(kind, path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("gone"), "is a symbolic link to gone, which does not exist"),
        (lambda path: os.mkfifo(path), "is neither a file nor a folder"),
        (lambda path: path.symlink_to(path.name), "x is a symbolic link to x"),
    ],
)
def test_a_path_that_is_no_file_is_refused(tmp_path, make, message):
    make(tmp_path / "x")
    with pytest.raises(InputError, match=message):
        find_files("text", str(tmp_path / "x"))


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        find_files("text", 300 * "x")


def test_what_a_folder_leaves_out_is_said(tmp_path, monkeypatch):
    for name in ("a.jsonl", "B.JSONL", "b.jsonl.gz", "c.txt", "d.txt", "e.jsonl.bz2", ".x/f", "g"):
        write(tmp_path / name, "12345")
    (tmp_path / "h.jsonl").symlink_to("nowhere")
    (tmp_path / "i.jsonl").symlink_to("a.jsonl")
    os.link(tmp_path / "b.jsonl.gz", tmp_path / "j.jsonl.gz")
    write(tmp_path / "locked.jsonl", "12345")
    access = os.access  # the administrator may read anything
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))
    found = find_files("jsonl", str(tmp_path))
    monkeypatch.setattr(os, "access", access)
    assert [name for name, _ in found.files] == ["B.JSONL", "a.jsonl", "b.jsonl.gz"]
    assert found.describe() + found.left_out == (
        "3 files (1 gzip, decompressed); left out 9 files (40 bytes):"
        " 2 *.txt (c.txt, ...), 2 a second name of a file (i.jsonl, ...), 1 hidden (.x/f),"
        " 1 *.bz2 (e.jsonl.bz2), 1 without a suffix (g), 2 more kinds"
    )
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"is a folder without .*\*\.bin files; left out 11 files"):
        find_files("shards", str(tmp_path))


def test_json_about_a_dataset_is_no_data(tmp_path):
    for name in ("dataset_infos.json", "data/a.json", "data/state.json", "info.json"):
        write(tmp_path / name, "{}")
    for kind, more in (("jsonl", []), ("chat", []), ("text", ["data/state.json"])):
        found = find_files(kind, str(tmp_path))
        cards = ["dataset_infos.json"] * (kind == "text")
        assert [name for name, _ in found.files] == ["data/a.json", *more, *cards, "info.json"]
        assert ("2 about a dataset (data/state.json, ...)" in found.left_out) == (not more)
    for name in ("a.arrow", "cache-0f.arrow"):  # the second is of a map
        write(tmp_path / "data" / name, "x")
    assert [name for name, _ in find_files("parquet", str(tmp_path)).files] == ["data/a.arrow"]


def test_files_of_an_earlier_save_to_disk_are_no_data(tmp_path):
    """datasets 5.2 deletes none when a folder is saved again, and reads those of state.json."""
    for i in range(4):
        write(tmp_path / f"data-{i:05}-of-00004.arrow", "old")
    write(tmp_path / "data-00000-of-00001.arrow", "new")
    write(tmp_path / "state.json", '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    for kind in ("parquet", "chat"):
        found = find_files(kind, str(tmp_path))
        assert [name for name, _ in found.files] == ["data-00000-of-00001.arrow"]
        assert "4 of an earlier save (data-00000-of-00004.arrow, ...)" in found.left_out


def test_splits_of_an_earlier_save_to_disk_are_no_data(tmp_path):
    for name in ("train", "validation"):
        write(tmp_path / name / "data-00000-of-00001.arrow", name)
    write(tmp_path / "dataset_dict.json", '{"splits": ["train"]}')
    found = find_files("parquet", str(tmp_path))
    assert [name for name, _ in found.files] == ["train/data-00000-of-00001.arrow"]
    assert "1 of an earlier save (validation/data-00000-of-00001.arrow)" in found.left_out
    assert len(find_files("parquet", str(tmp_path / "validation")).files) == 1  # as named


def test_a_folder_of_the_hubs_cache_is_refused(tmp_path):
    """It gave the documents of all revisions, also those that the README.md leaves out."""
    (tmp_path / "refs").mkdir()
    for revision in ("0a", "1b"):
        write(tmp_path / "blobs" / revision, f'{{"text": "{revision}"}}')
        (folder := tmp_path / "snapshots" / revision).mkdir(parents=True)
        (folder / "train.jsonl").symlink_to(f"../../blobs/{revision}")
    with pytest.raises(InputError, match=r"the Hub's cache, with .*; name one in .*snapshots$"):
        find_files("jsonl", str(tmp_path))
    assert len(find_files("jsonl", str(folder)).files) == 1


CARDS = [  # `configs` in a README.md, files to train on, and to validate on; as datasets 5.2
    ("[{config_name: default, data_files: [{split: train, path: data/a-*}, {split: test, path: b/*}"
     ", {split: validation, path: [c.jsonl]}]}]", ["data/a-0.jsonl"], ["c.jsonl"]),
    ("[{config_name: x, data_files: c.jsonl}]", ["c.jsonl"], []),
    ("[{config_name: x, data_files: [./c.jsonl, b/*.jsonl]}]", ["b/1.jsonl", "c.jsonl"], []),
    ("[{config_name: x, data_files: '**/*.jsonl'}]",
     ["b/1.jsonl", "c.jsonl", "data/a-0.jsonl", "data/more.jsonl"], []),
    ("[{config_name: x, data_dir: b}]", ["b/1.jsonl"], []),
    ("[{config_name: x, data_files: c.jsonl}, {config_name: y, default: true, data_dir: b}]",
     ["b/1.jsonl"], []),
    ("[{config_name: x, data_files: [{split: train_sft, path: b/*}, {split: test_sft, path: c*}]}]",
     ["b/1.jsonl"], []),
]  # fmt: skip


@pytest.mark.parametrize(("configs", "train", "val"), CARDS)
def test_the_readme_of_a_dataset_says_which_files_are_of_which_split(configs, train, val, tmp_path):
    """Names alone say no split here, and files to test on were trained on."""
    for name in ("data/a-0", "data/more", "b/1", "c"):
        write(tmp_path / f"{name}.jsonl", "{}")
    write(tmp_path / "README.md", f"---\nlicense: mit\nconfigs: {configs}\n---\n# A dataset\n")
    found = by_split("jsonl", find_files("jsonl", str(tmp_path)))
    assert [[name for name, _ in part.files] for part in found] == [train, val]


def test_a_readme_that_chooses_no_files_is_reported(tmp_path):
    write(tmp_path / "a.jsonl", "{}")
    two = "configs: [{config_name: en, data_files: a.jsonl}, {config_name: fr, data_dir: fr}]"
    for page, said in (
        (two, r"README.md has the configurations en, fr, .*/\*\*/\*.jsonl'$"),
        ("configs: [{data_files: b.jsonl}]", r"1 not in README.md's data_files.*; a glob names"),
    ):
        write(tmp_path / "README.md", f"---\n{page}\n---\n")
        with pytest.raises(InputError, match=said):
            find_files("jsonl", str(tmp_path))
        assert len(find_files("jsonl", f"{tmp_path}/**/*.jsonl").files) == 1
    for page in ("---\nconfigs: {\n---\n", "---\na\n---\n", "# no card\n"):
        write(tmp_path / "README.md", page)
        assert len(find_files("jsonl", str(tmp_path)).files) == 1


def test_the_files_of_a_folder_that_a_pattern_matches_are_said_to_be_left_out(tmp_path):
    for name in ("a.txt", "sub/b.txt", "sub/c.txt"):
        write(tmp_path / name, "x")
    assert (
        "left out 2 files (2 bytes): 2 in folders" in find_files("text", f"{tmp_path}/*").left_out
    )
    found = find_files("text", f"{tmp_path}/**/*")
    assert ([name for name, _ in found.files], found.left_out) == (
        ["a.txt", "sub/b.txt", "sub/c.txt"],
        "",
    )


def test_linked_folders_are_read_once_and_loops_end(tmp_path):
    write(tmp_path / "other/b.txt", "x")
    write(tmp_path / "corpus/a.txt", "x")
    for name in ("link", "link2"):
        (tmp_path / "corpus" / name).symlink_to(tmp_path / "other")
    (tmp_path / "corpus/loop").symlink_to(tmp_path / "corpus")
    found = find_files("text", str(tmp_path / "corpus"))
    assert [name for name, _ in found.files] == ["a.txt", "link/b.txt"]


def test_the_standard_library_without_its_tests():
    files = find_files("stdlib", None).files
    names = [name for name, _ in files]
    assert names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/base_events.py"} < set(names)
    for name in names:
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "idle_test", "site-packages"} & set(folders), name
    assert sum(path.stat().st_size for _, path in files) > 5e6
    held_out = sum(path.stat().st_size for name, path in files if hold_out_rank(name) < 0.05)
    assert 0.02 < held_out / sum(path.stat().st_size for _, path in files) < 0.08


def test_what_is_left_out_of_the_standard_library(tmp_path, monkeypatch):
    kept = ["os.py", "json/__init__.py", "unittest/mock.py"]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py",
                "__pycache__/e.py", "config-3.12/f.py", "_sysconfigdata_x.py", "g.txt"]  # fmt: skip
    for name in kept + left_out:
        write(tmp_path / name, "x = 1\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [name for name, _ in find_files("stdlib", None).files] == sorted(kept)


def test_a_python_without_sources_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="no source of Python"):
        find_files("stdlib", None)
