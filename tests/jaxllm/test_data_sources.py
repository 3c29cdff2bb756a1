"""Documents in text files and JSON lines: encodings, pieces, refusals, digests."""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import random
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from data_settings import parquet, read, write
from tokenizers import pre_tokenizers

from jaxllm.data import sources
from jaxllm.data.paths import find_files
from jaxllm.data.sources import Source, hold_out_rank
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer, train_tokenizer


def converted_by(error, path):
    """The file that an error's command for iconv makes of a file."""
    command = shlex.split(re.search(r"\((iconv .*)\)", str(error.value))[1])
    done = subprocess.run([*command, str(path)], check=True, capture_output=True)
    path.write_bytes(done.stdout)
    return path


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


def test_how_to_unpack_zstd_with_a_long_window_is_said(tmp_path):
    """`zstd --long=31` writes such frames, for Reddit's dumps for example."""
    window, raw_block = bytes([(31 - 10) << 3]), (1 | 2 << 3).to_bytes(3, "little")
    write(tmp_path / "a.zst", b"\x28\xb5\x2f\xfd\0" + window + raw_block + b"ab")
    with pytest.raises(InputError, match=r"too much memory .*; unpack it: zstd -d --long=31$"):
        read("text", tmp_path / "a.zst")


def test_a_byte_order_mark_is_dropped(tmp_path):
    mark = codecs.BOM_UTF8
    write(tmp_path / "a.txt", mark + b"a\n")
    write(tmp_path / "b.txt", gzip.compress(mark + b"b\n"))
    write(tmp_path / "c.txt", mark)
    nul = write(tmp_path / "d.txt", "c\0d, not UTF-16\n").read_text()
    assert [p.text for p in read("text", tmp_path)] == ["a\n", "b\n", nul]
    line = b'{"text": "a"}\n'
    write(tmp_path / "a.jsonl", mark + line + mark + line + mark + b"\n" + b'{"text": "\\ufeffb"}')
    assert [p.text for p in read("jsonl", tmp_path / "a.jsonl")] == ["a", "a", "b"]
    parquet(tmp_path / "a.parquet", text=["\ufeffa", "\ufeff", "b\ufeff"])
    assert [p.text for p in read("parquet", tmp_path / "a.parquet")] == ["a", "b\ufeff"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_other_encodings_are_refused_with_a_command_that_converts_them(tmp_path, encoding, kind):
    line = '{"text": "a"}\n'
    write(tmp_path / "a", line.encode(encoding))
    with pytest.raises(InputError, match=r", not UTF-8 text: convert it \(iconv -f ") as error:
        read(kind, tmp_path / "a")
    converted = converted_by(error, tmp_path / "a")
    assert [p.text for p in read(kind, converted)] == [line if kind == "text" else "a"]


def test_archives_and_arrays_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(write(tmp_path / "a.txt", "x"))
    with pytest.raises(InputError, match="is a tar archive, not text"):
        read("text", tmp_path / "a.tar.gz")
    for content, kind in (
        (bz2.compress(b"x"), "compressed with bzip2"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (lzma.compress(b"x"), "compressed with xz"),
        (b"PK\3\4\x14", "a zip archive"),
        (pyarrow.compress(b"x", "lz4", asbytes=True), "compressed with lz4"),
    ):
        for source in ("text", "jsonl"):
            with pytest.raises(InputError, match=f"is {kind}, not text: (unpack|run git lfs)"):
                read(source, write(tmp_path / "a.txt", content))
    path = parquet(tmp_path / "a.parquet", text=["a"])
    for source in ("text", "jsonl"):
        with pytest.raises(InputError, match="is of parquet or Arrow, not text: name parquet"):
            read(source, path)
    write(tmp_path / "a.json", '[\n{"text": "a"}\n]')
    with pytest.raises(InputError, match="is a JSON array, not an object per line"):
        read("jsonl", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("a.csv", "utf-8"), ("a.tsv", "utf-8"), ("a.csv", "utf-8-sig"), ('it\'s $A "b".csv', "utf-8")],
)
def test_csv_is_refused_with_a_command_that_converts_it(tmp_path, name, encoding):
    rows = [("text", "n"), ('two\nlines, "quoted"\t', "1"), ("ä" * 140_000, "2")]
    path = tmp_path / name
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter="\t" if ".tsv" in name else ",").writerows(rows)
    for source, wanted in (("parquet", "jsonl"), ("jsonl", "jsonl"), ("chat", "chat")):
        match = f"is CSV: as JSON lines, source={wanted}: python -c "
        with pytest.raises(InputError, match=match) as error:
            list(Source(source, [("a", path)]).records(["text"]))
    command = str(error.value).partition(": python")[2]
    subprocess.run(sys.executable + command, shell=True, check=True)
    found = read("jsonl", Path(f"{path}.jsonl"))
    assert [piece.text for piece in found] == [text for text, _ in rows[1:]]
    (packed := Path(f"{path}.gz")).write_bytes(gzip.compress(path.read_bytes()))
    match = f"is CSV: unpack it; as JSON lines, .* > {re.escape(shlex.quote(f'{path}.jsonl'))}"
    with pytest.raises(InputError, match=match):
        list(Source("jsonl", [("a", packed)]).records(["text"]))
    lines = write(tmp_path / "lines.csv", '{"text": "a"}\n')  # by content
    assert [piece.text for piece in read("jsonl", lines)] == ["a"]


def test_the_name_alone_decides_what_is_held_out():
    names = [f"{i}.py" for i in range(2000)]
    held_out = [name for name in names if hold_out_rank(name) < 0.05]
    assert 60 < len(held_out) < 140
    assert 0 < min(map(hold_out_rank, names)) < max(map(hold_out_rank, names)) < 1


def test_pieces_join_to_the_text_and_their_ids_to_its_ids(tmp_path, monkeypatch):
    text = "def f(x):\n    return  x\n\n\n  # Zürich ☃ \r\n\tdone\n" * 9 + "the end \n\n"
    write(tmp_path / "a.txt", text)
    train_tokenizer([text], 300, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(sources, "_SHORTEST", 0)
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
    monkeypatch.setattr(sources, "_SHORTEST", 0)
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


def test_a_long_document_of_json_lines_comes_in_pieces(tmp_path, monkeypatch):
    """Encoding one of 29 MB as a whole took 3.6 GB."""
    monkeypatch.setattr(sources, "_LONGEST", 40)
    monkeypatch.setattr(sources, "_SHORTEST", 0)
    texts = ["the cat sat on a mat\n" * 50, "short", "x" * 95]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    pieces = read("jsonl", write(tmp_path / "a.jsonl", lines))
    for number, text in enumerate(texts, 1):
        found = [piece for piece in pieces if piece.document == f"a.jsonl:{number}"]
        assert "".join(piece.text for piece in found) == text
        assert [piece.begins for piece in found] == [True] + [False] * (len(found) - 1)
        assert max(len(piece.text) for piece in found) <= 80


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
        (
            b'{"text": "a", "m": {"n": 1, "n": 2}}',
            r"a\.jsonl:3 .* object has 'n' twice",
        ),
    ],
)
def test_bad_json_lines_are_reported(tmp_path, line, message):
    write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message):
        read("jsonl", tmp_path / "a.jsonl")


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
