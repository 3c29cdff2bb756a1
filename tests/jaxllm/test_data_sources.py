import codecs
import gzip
import json
import os
import random
import sysconfig
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from jaxllm.data import sources
from jaxllm.data.paths import find_files, stdlib_files
from jaxllm.data.sources import Source, is_held_out
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, train_tokenizer


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(kind, path, column="text"):
    return list(Source(kind, find_files(kind, str(path)).files, column).pieces())


# Files


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
        ("text", "{}", "is a folder without files"),
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


# Compressed files, byte order marks, other encodings


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_files_are_read(tmp_path, compress):
    lines = b'{"text": "a"}\n', b'{"text": "b\xc3\xa4"}\n'
    members = b"".join(map(compress, lines))  # as bgzip, pigz and `cat` write them
    skipped = b"\x50\x2a\x4d\x18\1\0\0\0x" if compress is zstd else b""
    write(tmp_path / "a.jsonl.x", skipped + members)
    assert [p.text for p in read("jsonl", tmp_path / "a.jsonl.x")] == ["a", "bä"]
    pieces = read("text", tmp_path / "a.jsonl.x")  # by content, whatever the name
    assert "".join(p.text for p in pieces).encode() == b"".join(lines)
    assert pieces[-1].done == len(skipped + members)
    for damaged in (members[:-3], members[:9], members + b"rest"):
        write(tmp_path / "a.txt", damaged)
        with pytest.raises(InputError, match=r"^cannot read .*a\.txt: ") as error:
            read("text", tmp_path / "a.txt")
        assert "\n" not in str(error.value)
    source = Source("text", [("a", write(tmp_path / "a", compress(b"same")))])
    plain = Source("text", [("b", write(tmp_path / "b", b"same"))])
    assert not plain.without(source, tmp_path / "cache").files


def test_a_byte_order_mark_is_dropped(tmp_path):
    mark = codecs.BOM_UTF8
    write(tmp_path / "a.txt", mark + b"a\n")
    write(tmp_path / "b.txt", gzip.compress(mark + b"b\n"))
    write(tmp_path / "c.txt", mark)
    assert [p.text for p in read("text", tmp_path)] == ["a\n", "b\n"]
    line = b'{"text": "a"}\n'
    write(tmp_path / "a.jsonl", mark + line + mark + line + mark + b"\n" + b'{"text": "\\ufeffb"}')
    assert [p.text for p in read("jsonl", tmp_path / "a.jsonl")] == ["a", "a", "b"]
    parquet(tmp_path / "a.parquet", text=["\ufeffa", "\ufeff", "b\ufeff"])
    assert [p.text for p in read("parquet", tmp_path / "a.parquet")] == ["a", "b\ufeff"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_other_encodings_are_refused(tmp_path, encoding, kind):
    write(tmp_path / "a", '{"text": "a"}\n'.encode(encoding))
    with pytest.raises(InputError, match=f"is {encoding.upper()}.*, not UTF-8 text: convert it"):
        read(kind, tmp_path / "a")


def test_archives_and_arrays_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(write(tmp_path / "a.txt", "x"))
    with pytest.raises(InputError, match="is a tar archive, not text"):
        read("text", tmp_path / "a.tar.gz")
    write(tmp_path / "a.json", '[\n{"text": "a"}\n]')
    with pytest.raises(InputError, match="is a JSON array, not an object per line"):
        read("jsonl", tmp_path / "a.json")


# The standard library


def test_the_standard_library_without_its_tests():
    files = stdlib_files().files
    names = [name for name, _ in files]
    assert names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/base_events.py"} < set(names)
    for name in names:
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "idle_test", "site-packages"} & set(folders), name
    assert sum(path.stat().st_size for _, path in files) > 5e6
    held_out = sum(path.stat().st_size for name, path in files if is_held_out(name, 0.05))
    assert 0.02 < held_out / sum(path.stat().st_size for _, path in files) < 0.08


def test_what_is_left_out_of_the_standard_library(tmp_path, monkeypatch):
    kept = ["os.py", "json/__init__.py", "unittest/mock.py"]
    left_out = ["test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py",
                "__pycache__/e.py", "config-3.12/f.py", "_sysconfigdata_x.py", "g.txt"]  # fmt: skip
    for name in kept + left_out:
        write(tmp_path / name, "x = 1\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [name for name, _ in stdlib_files().files] == sorted(kept)


def test_a_python_without_sources_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="no source files"):
        stdlib_files()


def test_the_name_alone_decides_what_is_held_out():
    names = [f"{i}.py" for i in range(2000)]
    held_out = [name for name in names if is_held_out(name, 0.05)]
    assert 60 < len(held_out) < 140
    assert not any(is_held_out(name, 0.0) for name in names)


# Text


def test_pieces_join_to_the_text_and_their_ids_to_its_ids(tmp_path, monkeypatch):
    text = "def f(x):\n    return  x\n\n\n  # Zürich ☃ \r\n\tdone\n" * 9 + "the end \n\n"
    write(tmp_path / "a.txt", text)
    train_tokenizer([text], 300, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for block in (7, 40, 1000):  # 7: within characters of several bytes
        monkeypatch.setattr(sources, "_PIECE", block)
        pieces = read("text", tmp_path / "a.txt")
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert pieces[-1].done == len(text.encode())
        ids = [i for piece in pieces for i in tokenizer.encode(piece.text)]
        assert ids == tokenizer.encode(text)
        assert len(pieces) > 5 or block == 1000


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("name", list(WORDS))
@pytest.mark.parametrize("seed", range(4))
def test_pieces_have_the_words_of_the_whole(name, seed, tmp_path, monkeypatch):
    """The text has blank lines, lines of blanks, CRLF, and a last line without a newline."""
    parts = ["\n\n", "\n", "\r\n", " ", "  ", "\t", "def", "f", "x1", "):", "'s", "é", "☃", ".\n"]
    parts = parts[seed % 2 :] + [" word"] * 4
    text = "".join(random.Random(seed).choices(parts, k=3000)) + "def f" * 50
    write(tmp_path / "a.txt", text)
    monkeypatch.setattr(sources, "_PIECE", 64)
    pieces = [piece.text for piece in read("text", tmp_path / "a.txt")]
    words = lambda text: [word for word, _ in WORDS[name].pre_tokenize_str(text)]
    assert "".join(pieces) == text
    assert sum(map(words, pieces), []) == words(text)
    assert len(pieces) > 50


def test_text_without_a_place_to_cut_is_cut_anyway(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 10)
    monkeypatch.setattr(sources, "_LONGEST", 20)
    write(tmp_path / "a.txt", "x" * 95)
    pieces = read("text", tmp_path / "a.txt")
    assert "".join(piece.text for piece in pieces) == "x" * 95
    assert max(len(piece.text) for piece in pieces) == 20


@pytest.mark.parametrize("block", [3, 5, 1000])
def test_undecodable_text_is_reported_with_its_byte(tmp_path, monkeypatch, block):
    monkeypatch.setattr(sources, "_PIECE", block)
    write(tmp_path / "a.txt", "é☃x\n".encode() * 2 + b"\xe2\x98x")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 14"):
        read("text", tmp_path / "a.txt")
    with pytest.raises(InputError, match="in line 3$"):
        read("text", tmp_path / "a.txt")
    write(tmp_path / "a.txt", "ab☃".encode()[:-1])
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 2"):
        read("text", tmp_path / "a.txt")


def test_the_standard_library_may_hold_any_bytes(tmp_path):
    path = write(tmp_path / "a.py", b"# caf\xe9\n")
    (piece,) = Source("stdlib", [("a.py", path)]).pieces()
    assert piece.text == "# caf\ufffd\n"


# JSON lines


def test_json_lines(tmp_path):
    lines = ['{"text": "a\\nb", "n": 1}', "", '{"text": ""}', '{"text": "\\ud800c"}']
    lines += ['{"text": null}', '{"text": "d"}']  # no text, as in parquet
    write(tmp_path / "a.jsonl", "\n".join(lines))
    pieces = read("jsonl", tmp_path / "a.jsonl")
    assert [(p.document, p.text, p.begins) for p in pieces] == [
        ("a.jsonl:1", "a\nb", True),
        ("a.jsonl:4", "?c", True),
        ("a.jsonl:6", "d", True),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a"',
            r"a\.jsonl:3 is not JSON: Expecting ',' delimiter at character 14; every",
        ),
        (b'{"text": "\xff"}', r"a\.jsonl:3 is not JSON"),
        (b'{"body": "a", "n": 1}', r"a\.jsonl:3 has no text .*\(its columns of text: body\)"),
        (b'{"text": 5}', r"a\.jsonl:3 has no text under 'text' \(it has a value of type int\)"),
        (b"[" * 100_000, r"a\.jsonl:3 is not JSON: maximum recursion depth"),
        (b'["a"]', r"a\.jsonl:3 is a list; every line must be an object"),
        (b'{"text": "a", "text": "b"}', r"a\.jsonl:3 is not JSON: an object has 'text' twice"),
    ],
)
def test_bad_json_lines_are_reported(tmp_path, line, message):
    write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        read("jsonl", tmp_path / "a.jsonl")


# Parquet


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet(tmp_path):
    parquet(tmp_path / "a.parquet", body=["one", None, "", "two ☃"], n=[1, 2, 3, 4])
    pieces = read("parquet", tmp_path / "a.parquet", "body")
    assert [(p.document, p.text) for p in pieces] == [
        ("a.parquet:1", "one"),
        ("a.parquet:4", "two ☃"),
    ]
    assert pieces[-1].done == (tmp_path / "a.parquet").stat().st_size


def test_parquet_of_categories(tmp_path):
    column = pyarrow.array(["one", "two", "one"]).dictionary_encode()
    pieces = read("parquet", parquet(tmp_path / "a.parquet", text=column))
    assert [piece.text for piece in pieces] == ["one", "two", "one"]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.large_binary(),
     pyarrow.binary_view(), pyarrow.json_()],
    ids=str,
)  # fmt: skip
def test_every_text_type_of_arrow_is_read(tmp_path, kind):
    storage = getattr(kind, "storage_type", kind)
    column = pyarrow.array(["one", None, "zwölf"]).cast(storage)
    if storage != kind:
        column = pyarrow.ExtensionArray.from_storage(kind, column)
    pieces = read("parquet", parquet(tmp_path / "a.parquet", text=column))
    assert [piece.text for piece in pieces] == ["one", "zwölf"]


def test_parquet_of_nulls_bytes_and_dotted_names(tmp_path):
    assert read("parquet", parquet(tmp_path / "a.parquet", text=pyarrow.nulls(3))) == []
    parquet(tmp_path / "a.parquet", text=pyarrow.array([b"a", b"\xff"]))
    with pytest.raises(InputError, match=r"a\.parquet: row 2 is not UTF-8 text"):
        read("parquet", tmp_path / "a.parquet")
    parquet(tmp_path / "a.parquet", **{"a": [{"b": "nested"}], "a.b": ["top"]})
    assert [p.text for p in read("parquet", tmp_path / "a.parquet", "a.b")] == ["top"]


def test_ambiguous_and_nested_columns_are_refused(tmp_path):
    names = ["text", "text", "body", "n", "meta"]
    columns = [["a"], ["b"], ["c"], [1], [{"text": "d"}]]
    table = pyarrow.table(list(map(pyarrow.array, columns)), names=names)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"has 2 columns 'text' \(its .*: text, body\)"):
        read("parquet", tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"column 'meta' is struct<text: string>, not text"):
        read("parquet", tmp_path / "a.parquet", "meta")


def test_parquet_without_the_column_or_without_text_in_it(tmp_path):
    parquet(tmp_path / "a.parquet", body=["x"], n=[1])
    with pytest.raises(InputError, match=r"no column 'text' \(its columns of text: body\)"):
        read("parquet", tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'n' is int64, not text"):
        read("parquet", tmp_path / "a.parquet", "n")


def test_damaged_parquet_is_reported(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=[f"document {i}" for i in range(5000)])
    content = path.read_bytes()
    for damaged in (b"no parquet", b"", content[:-20], content[:4] + b"\xff" * 99 + content[103:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.parquet is not a readable parquet file"):
            read("parquet", path)


# The digest of a source


def test_the_digest_depends_on_content_names_and_column(tmp_path):
    def of(column="text"):
        files = find_files("jsonl", str(tmp_path / "data")).files
        return Source("jsonl", files, column).digest(tmp_path / "cache")

    write(tmp_path / "data/a.jsonl", json.dumps({"text": "a"}))
    first = of()
    assert of() == first
    assert of("other") != first
    write(tmp_path / "data/a.jsonl", json.dumps({"text": "b"}))
    changed = of()
    (tmp_path / "data/a.jsonl").rename(tmp_path / "data/b.jsonl")
    assert len({first, changed, of()}) == 3


# Tokenizers


@pytest.fixture
def tokenizer_path(tmp_path):
    train_tokenizer(["hello world, hello text\n"] * 3, 280, tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_every_text_survives_a_round_trip(tokenizer_path):
    tokenizer = Tokenizer(tokenizer_path)
    text = "hello  wörld ☃\r\n\t\0 <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size <= 280
    assert tokenizer.decode([tokenizer.eos]) == "<|endoftext|>"
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == text
    assert [x.tolist() for x in tokenizer.encode_parts([("", text)])] == [ids]


def test_training_is_deterministic(tokenizer_path):
    again = tokenizer_path.with_name("again.json")
    train_tokenizer(["hello world, hello text\n"] * 3, 280, again)
    assert again.read_bytes() == tokenizer_path.read_bytes()


def test_the_truncation_of_a_tokenizer_is_ignored(tokenizer_path):
    content = json.loads(tokenizer_path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    write(tokenizer_path, json.dumps(content))
    assert len(Tokenizer(tokenizer_path).encode("a b c d e f")) > 5


def test_bad_tokenizers_are_refused(tmp_path, tokenizer_path):
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        Tokenizer(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"bad\.json is not a tokenizer\.json"):
        Tokenizer(write(tmp_path / "bad.json", "{}"))
    with pytest.raises(InputError, match=r"data\.end_token=<eos> is not a token of"):
        Tokenizer(tokenizer_path, end_token="<eos>")
    with pytest.raises(InputError, match="tokenizer_vocab_size=256 is not from 257"):
        train_tokenizer(["x"], 256, tmp_path / "small.json")


def test_the_incremental_decoder_exposes_pending_bytes():
    """The byte position in the error relies on this."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoder.decode("☃".encode()[:2])
    assert len(decoder.getstate()[0]) == 2
