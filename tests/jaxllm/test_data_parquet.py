"""Documents in parquet files."""

import contextlib
import json
import random

import pyarrow
import pyarrow.parquet
import pytest
from data_settings import parquet, read

from jaxllm.data.sources import Source
from jaxllm.errors import InputError


def test_parquet(tmp_path):
    parquet(tmp_path / "a.parquet", body=["one", None, "", "two ☃"], n=[1, 2, 3, 4])
    pieces = read("parquet", tmp_path / "a.parquet", "body")
    assert [(p.document, p.text) for p in pieces] == [
        ("a.parquet:1", "one"),
        ("a.parquet:4", "two ☃"),
    ]
    assert pieces[-1].done == (tmp_path / "a.parquet").stat().st_size


def test_parquet_of_any_name(tmp_path, monkeypatch):
    """Arrow took s3:a as an address, and a name that is not UTF-8 not at all."""
    monkeypatch.chdir(tmp_path)
    for name in ("s3:a", "a\udcff"):
        path = parquet(tmp_path / "a.parquet", text=["one"]).rename(name)
        assert [piece.text for piece in read("parquet", path)] == ["one"]


def test_parquet_of_categories(tmp_path):
    column = pyarrow.array(["one", "two", "one"]).dictionary_encode()
    pieces = read("parquet", parquet(tmp_path / "a.parquet", text=column))
    assert [piece.text for piece in pieces] == ["one", "two", "one"]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary(), pyarrow.large_binary(),
     pyarrow.binary_view()],
    ids=str,
)  # fmt: skip
def test_every_text_type_of_arrow_is_read(tmp_path, kind):
    column = pyarrow.array(["one", None, "zwölf"]).cast(kind)
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
    with pytest.raises(InputError, match=r"has 2 columns 'text'; keep one"):
        read("parquet", tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"row 1 has no text under 'meta' .*of type dict"):
        read("parquet", tmp_path / "a.parquet", "meta")


def test_records_are_those_of_json_lines(tmp_path):
    """A struct of Arrow has all keys of its column, null where a row lacks one; a map is pairs."""
    said = lambda name, **given: {"role": "tool", "call": {"name": name, "arguments": given}}
    structs = [said("time", zone="UTC"), said("add", a=1, b=[2, None]), {"role": "user"}]
    maps = [{"content": {"kind": "text", "text": "a"}}]
    kind = pyarrow.map_(pyarrow.string(), pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pairs = pyarrow.array([[(key, list(x.items())) for key, x in maps[0].items()]], kind)
    for column, right in ((structs, structs), (pairs, maps)):
        source = Source("chat", [("a", parquet(tmp_path / "a.parquet", messages=column))])
        assert [x.values["messages"] for x in source.records(["messages"])] == right
    table = pyarrow.table([["a"], ["b"]], names=["messages", "messages"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"^\S+a\.parquet has 2 columns 'messages'"):
        list(source.records(["messages"]))


@pytest.mark.parametrize("write", [pyarrow.parquet.write_table, "stream"])
def test_json_of_arrow_is_what_it_says(tmp_path, write):
    """datasets' Json, which load_dataset("json") takes where messages differ in form."""
    rows = [
        [{"role": "user", "content": "a"}, {"role": "tool", "calls": [1, {"b": None}]}],
        [{"role": "user", "content": '"'}],
    ]
    page = {"type": "object", "properties": {"unit": {"enum": [1, "x"]}}}
    written = lambda values: pyarrow.ExtensionArray.from_storage(
        pyarrow.json_(), pyarrow.array(map(json.dumps, values), pyarrow.string())
    )
    table = pyarrow.table(
        {
            "messages": pyarrow.ListArray.from_arrays([0, 2, 3], written([*rows[0], *rows[1]])),
            "tools": pyarrow.StructArray.from_arrays(
                [pyarrow.array(["object"] * 2), written([page["properties"]] * 2)], list(page)
            ),
            "system": written([None, "zwölf"]),
        }
    )
    if write == "stream":
        with pyarrow.ipc.new_stream(tmp_path / "a", table.schema) as file:
            file.write_table(table)
    else:
        write(table, tmp_path / "a")
    source = Source("chat", [("a", tmp_path / "a")])
    found = [x.values for x in source.records(table.column_names)]
    assert [x["messages"] for x in found] == rows
    assert [x["tools"] for x in found] == [page, page]
    assert [x["system"] for x in found] == [None, "zwölf"]
    assert [piece.text for piece in read("parquet", tmp_path / "a", "system")] == ["zwölf"]
    bad = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(["{"]))
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a")
    twice = pyarrow.StructArray.from_arrays([pyarrow.array([1])] * 2, ["x", "x"])
    pyarrow.parquet.write_table(pyarrow.table({"text": twice}), tmp_path / "b")
    for name in ("a", "b"):
        with pytest.raises(InputError, match="is not a readable file of parquet or Arrow: [EC]"):
            read("parquet", tmp_path / name)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pyarrow.array([2**62], pyarrow.timestamp("us")), "date value out of range"),
        (
            pyarrow.array([[("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            r".* duplicate keys .* 'a'",
        ),
        (pyarrow.array(["[" * 10**5], pyarrow.json_()), ".*recursion"),
        (pyarrow.array(['{"a": 1, "a": 2}'], pyarrow.json_()), "an object has 'a' twice"),
    ],
    ids=["year", "keys", "deep", "names"],
)
def test_values_that_python_cannot_hold_give_one_line(tmp_path, values, reason):
    """Tracebacks of OverflowError, KeyError, RecursionError; of two values the last was taken."""
    path = parquet(tmp_path / "a.parquet", text=values)
    with pytest.raises(InputError, match=rf"a\.parquet is not a readable file of .*: {reason}"):
        read("parquet", path)


def test_parquet_without_the_column_or_without_text_in_it(tmp_path):
    parquet(tmp_path / "a.parquet", body=["x"], n=[1])
    with pytest.raises(InputError, match=r"no column 'text', only body, n; name the column"):
        read("parquet", tmp_path / "a.parquet")
    with pytest.raises(InputError, match="row 1 has no text under 'n' .*of type int"):
        read("parquet", tmp_path / "a.parquet", "n")


def test_damaged_parquet_is_reported(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=[f"document {i}" for i in range(5000)])
    content = path.read_bytes()
    for damaged in (b"no parquet", b"", content[:-20], content[:4] + b"\xff" * 99 + content[103:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.parquet is not a readable file of parquet"):
            read("parquet", path)
    texts = pyarrow.table({"text": [f"document {i}" for i in range(99)]})
    options = dict(write_page_checksum=True, compression="none", use_dictionary=False)
    pyarrow.parquet.write_table(texts, path, **options)
    path.write_bytes(path.read_bytes().replace(b"document 7", b"document 8"))
    with pytest.raises(InputError, match=r"a\.parquet is not a readable .*CRC checksum"):
        read("parquet", path)


@pytest.mark.parametrize("write", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
def test_arrow_is_read_as_parquet_is(tmp_path, write):
    """datasets' save_to_disk writes streams of batches."""
    chat = [[{"role": "user", "content": "a"}]] * 2500
    table = pyarrow.table({"text": [f"document {i}" for i in range(2500)], "messages": chat})
    path = tmp_path / "a.arrow"
    with write(path, table.schema) as file:
        file.write_table(table, 1000)
    pieces = read("parquet", path)
    assert [piece.text for piece in pieces] == table["text"].to_pylist()
    assert 0 < pieces[0].done <= pieces[-1].done <= path.stat().st_size
    records = list(Source("chat", [("a", path)]).records(["messages"]))
    assert [record.values["messages"] for record in records] == chat
    with pytest.raises(InputError, match=r"no column 'x', only text, messages; name the column"):
        read("parquet", path, "x")
    for source in ("text", "jsonl"):
        with pytest.raises(InputError, match="is of parquet or Arrow, not text: name parquet"):
            read(source, path)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(InputError, match=r"a\.arrow is not a readable file of parquet or Arrow"):
        read("parquet", path)


def test_damaged_arrow_does_not_abort_the_process(tmp_path):
    """Unchecked offsets into a column's text end it in C++."""
    path, rng = tmp_path / "a.arrow", random.Random(0)
    table = pyarrow.table({"text": [f"d{i}" for i in range(3000)]})
    with pyarrow.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, 500)
    content = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[rng.randrange(400)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError, MemoryError):
            read("parquet", path)
