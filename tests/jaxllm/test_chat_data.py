"""Conversations as training data: files, rows, loss, and what is refused."""

import gzip
import itertools
import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conversations import (
    FORGETS,
    TEMPLATE,
    T,
    opened,
    pair,
    rows_of,
    settings,
    talks,
    with_template,
    write,
)
from data_settings import flipped_byte

from jaxllm.config import IGNORE, DataConfig
from jaxllm.data import encoded
from jaxllm.data.chat import Refused, conversation
from jaxllm.data.command import main
from jaxllm.data.packing import best_fit
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer
from jaxllm.train.launch import with_models_tokenizer


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path)


def conversations_in(rows):
    """(ids, labels) of every segment but the padding's, which has no labels."""
    found = []
    for row in rows:
        for segment in np.unique(row["segment_ids"]):
            at = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["positions"][at], np.arange(at.sum()))
            if (row["labels"][at] != IGNORE).any():
                found.append((tuple(row["tokens"][at]), tuple(row["labels"][at])))
    return found


# Files and rows


def test_files_of_all_kinds_in_a_folder_are_read(config, tmp_path):
    folder, lines = tmp_path / "data", talks(12)
    folder.mkdir()
    write(folder / "a.jsonl", lines[:4])
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        text = [{key: json.dumps(x) for key, x in line.items()} for line in lines[4:8]]
        file.write("\n".join(map(json.dumps, text)))  # a list may be given as JSON text
    table = pyarrow.Table.from_pylist([*lines[8:], {"messages": None}][:4])
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    (folder / "notes.txt").write_text("left out")
    data = opened(config, path=str(folder))
    whole = opened(config, path=str(write(tmp_path / "whole.jsonl", lines)))
    both = [conversations_in(rows_of(x)) for x in (data, whole)]
    assert sorted(both[0]) == sorted(both[1])
    (tmp_path / "whole.jsonl").rename(tmp_path / "chat.json")  # as the report of `prepare`
    named = opened(config, path=str(tmp_path / "chat.json"))
    assert sorted(conversations_in(rows_of(named))) == sorted(both[1])
    assert "12 conversations" in data.description
    assert "left out 1 file" in data.description
    for columns in ({"text": ["a"]}, {"role": ["user"], "content": ["a"]}):  # of a message
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "d.parquet")
        only = f"only {', '.join(columns)}$"
        match = rf"^\S+d\.parquet has no column .*'completion' .*'tools', {only}"
        with pytest.raises(InputError, match=match):
            opened(config, path=str(folder))


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary()], ids=str)
def test_conversations_of_binary_columns_are_text(config, tmp_path, kind):
    """Python's form of the bytes, b'cat', was trained on."""
    fields = lambda of: pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", of)]))
    schema = pyarrow.schema([("messages", fields(pyarrow.string()))])
    table = pyarrow.Table.from_pylist(lines := talks(9), schema)
    binary = table.cast(pyarrow.schema([("messages", fields(kind))]))
    pyarrow.parquet.write_table(binary, tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", lines)
    both = [opened(config, path=str(tmp_path / name)) for name in ("a.parquet", "a.jsonl")]
    assert sorted(conversations_in(rows_of(both[0]))) == sorted(conversations_in(rows_of(both[1])))
    latin = [{"messages": [{"role": "assistant", "content": b"\xe9"}]}]
    schema = pyarrow.schema([("messages", fields(pyarrow.binary()))])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(latin, schema), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"row 1: messages: content=b'\\xe9' must be text"):
        opened(config, path=str(tmp_path / "b.parquet"))


def test_best_fit_wastes_little_and_is_deterministic():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 61, 2000).tolist()
    rows = best_fit(lengths, 100)
    assert rows == best_fit(lengths, 100)
    assert sorted(itertools.chain(*rows)) == list(range(2000))
    totals = [sum(lengths[i] for i in row) for row in rows]
    assert max(totals) <= 100
    assert len(rows) <= 1.01 * sum(lengths) / 100 + 1
    # 6 leaves room 4 and 7 room 3: 3 goes where it fills the row, not where there is more room.
    assert best_fit([6, 7, 3, 4], 10) == [[1, 2], [0, 3]]
    assert best_fit([2, 2, 2], 4) == [[0, 1], [2]]
    assert best_fit([], 4) == []


def test_rows_hold_every_conversation_once_with_its_labels(config):
    data, tokenizer = opened(config), Tokenizer(config["tokenizer"])
    held = [data.val[i] for i in range(len(data.val))]
    assert 0 < len(conversations_in(held)) < 10
    right = []
    for record in talks(40):
        ids, mask = tokenizer.chat(record["messages"], answer=False)
        assert not any(mask)  # the template has no marks, so the test finds what is said itself
        ends = [i for i, x in enumerate(ids) if x == tokenizer.special["<|end_header_id|>"]]
        for nth, begin in enumerate(ends):
            stop = ids.index(tokenizer.special["<|eot_id|>"], begin)
            mask[begin + 1 : stop + 1] = [nth % 2] * (stop - begin)
        ids, mask = ids[: T + 1], mask[: T + 1]
        labels = [i if spoken else IGNORE for i, spoken in zip(ids, mask, strict=True)]
        right.append((tuple(ids[:-1]), tuple(labels[1:])))
    assert sorted(conversations_in([*rows_of(data), *held])) == sorted(right)
    assert data.train.tokens + data.val_tokens == sum(len(ids) + 1 for ids, _ in right)
    for row in rows_of(data):
        assert {x.dtype for x in row.values()} == {np.dtype(np.int32)}
        assert (np.diff(row["segment_ids"]) >= 0).all()


def test_loss_on_all_tokens(config):
    every, some = opened(config, loss="all"), opened(config)
    for ids, labels in conversations_in(rows_of(every)):
        assert labels[:-1] == ids[1:]
    assert every.fingerprint != some.fingerprint
    assert "100.0% with loss (all)" in every.description


def test_long_conversations_are_cut_or_left_out(config, tmp_path):
    tokenizer = Tokenizer(config["tokenizer"])
    messages = pair("cat " * 9, "dog " * 30)
    path = str(write(tmp_path / "b.jsonl", [{"messages": messages}, *talks(9)]))
    ids, _ = tokenizer.chat(messages, answer=False)
    assert len(ids) > T + 1
    others = str(write(tmp_path / "c.jsonl", talks(9, seed=1)))
    kept = {
        name: opened(config, path=path, val_path=others, too_long=name)
        for name in ("cut_end", "cut_start", "leave_out")
    }
    found = {name: conversations_in(rows_of(data)) for name, data in kept.items()}
    assert tuple(ids[:T]) in [x for x, _ in found["cut_end"]]
    assert tuple(ids[-T - 1 : -1]) in [x for x, _ in found["cut_start"]]
    assert len(found["leave_out"]) < len(found["cut_end"]) == 10
    assert re.search(r"\d+ cut at the end to 49 tokens", kept["cut_end"].description)
    assert re.search(r"\d+ cut at the beginning to 49", kept["cut_start"].description)
    assert re.search(r"\d+ left out, longer than 49 tokens", kept["leave_out"].description)
    assert len({data.fingerprint for data in kept.values()}) == 3


def test_the_split_is_by_conversation_and_keeps_equal_ones_together(config, tmp_path):
    lines = talks(200)
    data = opened(config, path=str(write(tmp_path / "b.jsonl", lines * 2)))
    train, val = (
        {ids for ids, _ in conversations_in([part[i] for i in range(len(part))])}
        for part in (data.train, data.val)
    )
    assert not train & val
    assert 0.02 < len(val) / (len(train) + len(val)) < 0.1
    two = opened(config, path=str(write(tmp_path / "c.jsonl", talks(2))))
    assert [len(conversations_in([part[0]])) for part in (two.train, two.val)] == [1, 1]


def test_what_validates_is_not_trained_on(config, tmp_path):
    lines = talks(40)
    path = str(write(tmp_path / "b.jsonl", [*lines[5:8], *lines[6:9], *talks(9, seed=1)]))
    data = opened(config, val_path=path)
    held = [data.val[i] for i in range(len(data.val))]
    found = [sorted(conversations_in(rows)) for rows in (rows_of(data), held)]
    alone = opened(config, path=str(write(tmp_path / "c.jsonl", lines[:5] + lines[9:])))
    assert found[0] == sorted(conversations_in([*rows_of(alone), alone.val[0]]))
    assert len(found[1]) == 15
    assert "; 4 also in data.val_path, so not trained on" in data.description
    both = str(write(tmp_path / "d.jsonl", [*lines, *talks(1, seed=2)]))
    with pytest.raises(InputError, match=r"each of 40 conversations of data\.path is in"):
        opened(config, val_path=both)


def test_batches_do_not_depend_on_the_number_of_processes_and_resume(config):
    data, names = opened(config), {"tokens", "labels", "segment_ids", "positions"}
    whole = list(islice(data.train_batches(4, 0, 1), 9))
    halves = [list(islice(data.train_batches(4, rank, 2), 9)) for rank in range(2)]
    resumed = list(islice(opened(config).train_batches(4, 0, 1, 20), 4))
    for i, batch in enumerate(whole):
        assert set(batch) == names
        for name, rows in batch.items():
            np.testing.assert_array_equal(rows, np.concatenate([h[i][name] for h in halves]))
            if i >= 5:
                np.testing.assert_array_equal(rows, resumed[i - 5][name])
    assert any((a["tokens"] != b["tokens"]).any() for a, b in itertools.pairwise(whole))


# Preparation, cache, errors


def prepare(config, out, *more):
    words = ["prepare", "--source=chat", f"--path={config['path']}", f"--out={out}", *more]
    return main([*words, f"--tokenizer={config['tokenizer']}"])


def test_a_tokenizer_of_other_origin_is_not_overwritten(config, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    assert prepare(config, tmp_path / "out") == 2
    assert "out/tokenizer.json is of another tokenizer" in capsys.readouterr().err
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"


def test_a_prepared_folder_is_the_same_data_and_reports_what_went_in(config, tmp_path, capsys):
    lines = talks(40)
    lines[6] = {"messages": [{"role": "user", "content": "?"}]}
    lines[8] = {"messages": [{"role": "critic", "content": "?"}, *pair("Q", "A")]}
    write(tmp_path / "a.jsonl", lines)
    assert prepare(config, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "38 conversations" in said
    assert "1 refused, no assistant's turn (a.jsonl:7)" in said
    assert "refuses the conversation: no critics (a.jsonl:9)" in said
    assert re.search(r"[\d,]+ tokens, \d\d\.\d% with loss \(the assistant's, by prefixes", said)
    assert "the longest conversation has" in said
    page = json.loads((tmp_path / "out/chat.json").read_text())
    assert page["conversations"] == 38
    raw, ready = opened(config), opened(config, path=str(tmp_path / "out"), tokenizer=None)
    assert raw.fingerprint == ready.fingerprint
    for mine, theirs in zip(rows_of(raw), rows_of(ready), strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name])
    assert "no assistant's turn (a.jsonl:7)" in ready.description
    before = (tmp_path / "out/conversations.chat").stat().st_mtime_ns
    assert prepare(config, tmp_path / "out") == 0  # done already
    assert (tmp_path / "out/conversations.chat").stat().st_mtime_ns == before
    entries = (tmp_path / "out/conversations.chat").read_bytes()
    flipped_byte(tmp_path / "out/conversations.chat")
    with pytest.raises(
        InputError, match=r"conversations\.chat is damaged: its tokens have changed"
    ):
        opened(config, path=str(tmp_path / "out"))
    (tmp_path / "out/conversations.chat").write_bytes(entries)
    index = (tmp_path / "out/index.npz").read_bytes()
    for damaged in (b"", index[:99]):  # a copy that was interrupted
        (tmp_path / "out/index.npz").write_bytes(damaged)
        with pytest.raises(InputError, match="out is damaged"):
            opened(config, path=str(tmp_path / "out"))
    (tmp_path / "out/chat.json").unlink()  # as if it had been killed
    assert prepare(config, tmp_path / "out") == 0
    capsys.readouterr()
    assert prepare(config, tmp_path / "out", "--loss=all") == 2
    assert "holds other data" in capsys.readouterr().err
    assert prepare(config, tmp_path / "out", "--val_fraction=0.5") == 2
    assert "--val_fraction is not for --source=chat; omit it" in capsys.readouterr().err
    with pytest.raises(InputError, match="was prepared with --loss assistant, not data.loss=all"):
        opened(config, path=str(tmp_path / "out"), loss="all")
    other = with_template(tmp_path / "other", TEMPLATE + " ")
    with pytest.raises(InputError, match="another tokenizer or chat template than"):
        opened(config, path=str(tmp_path / "out"), tokenizer=str(other))


def test_of_several_prepared_folders_none_is_left_out_in_silence(config, tmp_path):
    for name in ("a", "b"):
        assert prepare(config, tmp_path / "all" / name) == 0
    for path in ("all", "all/*/chat.json"):
        with pytest.raises(InputError, match="all/a is prepared, so nothing is read beside it"):
            opened(config, path=str(tmp_path / path))


def test_the_cache_knows_data_template_and_loss(config, tmp_path, monkeypatch):
    fingerprint = opened(config).fingerprint
    monkeypatch.setattr(encoded, "encode", None)
    assert opened(config).fingerprint == fingerprint  # from the cache
    monkeypatch.undo()
    changed = with_template(tmp_path / "other", TEMPLATE.replace("\n", "\n\n"))
    assert opened(config, tokenizer=str(changed)).fingerprint != fingerprint
    write(tmp_path / "a.jsonl", talks(40, seed=1))
    assert opened(config).fingerprint != fingerprint


USER = {"role": "user", "content": "?"}


def test_calls_may_be_json_text():
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": "\u00e9"}}}
    said = lambda calls: conversation({"messages": [{"role": "assistant", "tool_calls": calls}]})
    assert said(json.dumps([call])) == said([call])
    answer = {"role": "assistant", "content": "a"}
    for empty in ("", "[]", "null", []):  # a template may ask whether the key is there
        messages = json.dumps([answer | {"tool_calls": empty}])
        assert conversation({"messages": messages})[0] == [answer | {"tool_calls": None}]
    for empty in ("", "[]", "null", [], None):
        with pytest.raises(Refused, match="a message with neither content nor tool_calls"):
            said(empty)
    with pytest.raises(InputError, match="^tool_calls are not JSON: "):
        said("now()")
    with pytest.raises(InputError, match="^tool_calls={'a': 1} must be a list$"):
        said('{"a": 1}')


LONG = [{"messages": pair("Q" * 99 + name, "A")} for name in "abc"]


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        (["{}", '{"messages": '], {}, r"a\.jsonl:1: is in no known form \(it has nothing\)"),
        ([talks(1)[0], '{"a": '], {}, r"a\.jsonl:2 is not JSON: Expecting value at character"),
        ([{"text": "x"}], {}, r"a\.jsonl:1: is in no known form \(it has text\): a conversation"),
        ([{"messages": "x"}], {}, r"a\.jsonl:1: messages are not JSON: Expecting value"),
        ([{"messages": {"a": 1}}], {}, r"a\.jsonl:1: messages={'a': 1} must be a list$"),
        ([{"messages": pair("Q", "A"), "system": ["x"]}], {}, r"system=\['x'\] must be text$"),
        ([{"instruction": "Q", "output": "A", "history": [["q", "a"]]}], {}, "history is not read"),
        ([{"messages": pair("Q", "A"), "functions": [{"name": "f"}]}], {}, "functions is not read"),
        ([{"messages": pair("Q", "A"), "tools": {"a": 1}}], {}, r"tools={'a': 1} must be a list$"),
        ([{"messages": []}], {"loss": "all"}, r"of \S+/a.jsonl can be .*: 1 refused, no m"),
        ([{"messages": [{"role": "user", "value": "Q"}]}], {}, "1 refused, a message with neither"),
        ([{"messages": [{"role": "assistant", "tool_calls": []}]}], {}, "1 refused, a message wi"),
        (
            [{"messages": [USER | {"train": None}, USER | {"train": True}, USER | {"loss": 0}]}],
            {},
            r"a\.jsonl:1: messages: loss=0 is not read; weight=0 means no loss$",
        ),
        (
            [{"messages": [USER | {"train_detail": []}, USER | {"train_detail": [{}]}]}],
            {},
            r"a\.jsonl:1: messages: train_detail=\[{}\] is not read; weight=0 means no loss$",
        ),
        ([{"messages": [3]}], {}, r"a\.jsonl:1: messages must hold messages with role and"),
        ([{"conversations": [{"from": "ai", "value": ""}]}], {}, r"from='ai' must be one of hum"),
        ([{"conversations": [{"from": "gpt", "value": None}]}], {}, "1 refused, a message with ne"),
        ([{"conversations": [{"value": "A"}]}], {}, "conversations must hold messages with role"),
        ([{"prompt": 3, "completion": ""}], {}, "prompt=3 must be a list or text"),
        (
            [{"prompt": "Q", "completion": "A", "label": False}],
            {},
            "1 refused, label=false: a completion to unlearn",
        ),
        (
            [{"messages": [USER]}] * 5,
            {},
            r"5 refused, no assistant's turn \(a\.jsonl:1, .*, \.\.\.",
        ),
        ([{"messages": [{"role": "critic", "content": ""}]}], {}, "refuses the .*: no critics"),
        (LONG[:1], {}, "each of 1 conversation is without loss in the kept part of train.seq_len"),
        (LONG, {}, "each of 3 conversations is without loss in the kept part of train.seq_len"),
        (
            LONG,
            {"too_long": "leave_out"},
            r"each of 3 conversations is longer than train\.seq_len \+ 1 = 49",
        ),
        ([{"messages": pair("Q", "A"), "tools": "{"}], {}, r"a\.jsonl:1: tools are not JSON"),
        (talks(1) * 2, {}, "has one conversation: name others with data.val_path"),
        (['{"messages": [], "messages": []}'], {}, r"a\.jsonl:1 .* an object has 'messages' twice"),
        (
            ['{"messages": [{"role": "user", "content": "a"}, {"role": "a", "role": "b"}]}'],
            {},
            r"a\.jsonl:1 is not JSON: an object has 'role' twice$",
        ),
        (
            [{"messages": '[{"role": "user", "content": "a", "content": "b"}]'}],
            {},
            r"a\.jsonl:1: messages are not JSON: an object has 'content' twice$",
        ),
        (['{"messages": [{"role": "user", "content": NaN}]}'], {}, "content=nan must be text$"),
        ([], {}, "can be used: it is empty"),
    ],
)
def test_bad_conversations_give_one_line(config, tmp_path, lines, changes, message):
    write(tmp_path / "a.jsonl", lines)
    with pytest.raises(InputError, match=message) as error:
        opened(config, **changes)
    assert "\n" not in str(error.value)


def test_many_reasons_are_counted(config, tmp_path):
    lines = [{"messages": [{"role": "critic", "content": str(i)}]} for i in range(9)]
    write(tmp_path / "a.jsonl", [*lines, *talks(9)])
    each = TEMPLATE.replace("'no critics'", "'no\\ncritic ' ~ m.content")
    data = opened(config, tokenizer=str(with_template(tmp_path / "each", each)))
    assert data.description.count("refuses the conversation: no critic ") == 3
    assert "; 6 refused for other reasons" in data.description


def test_bad_templates_give_one_line(config, tmp_path):
    none = with_template(tmp_path / "none", None)
    with pytest.raises(InputError, match=r"none has no chat template: put a chat_template\.jinja"):
        opened(config, tokenizer=str(none))
    with pytest.raises(InputError, match=r"source=chat needs a tokenizer with a chat template"):
        opened(config, tokenizer=None)
    data = DataConfig(source="chat", path="x", tokenizer=config["tokenizer"])
    with pytest.raises(InputError, match="model has another chat template than .*none, which is"):
        with_models_tokenizer(data, none)
    other = data.model_copy(update={"tokenizer": str(none)})
    mine = f"{config['tokenizer']}/tokenizer.json"  # which has the template
    for given in (other, data):
        assert with_models_tokenizer(given, Path(config["tokenizer"])).tokenizer == mine
    forgets = with_template(tmp_path / "forgets", FORGETS)
    data = opened(config, tokenizer=str(forgets))  # conversations of one turn are used
    turns = [len(record["messages"]) // 2 for record in talks(40)]
    assert f"{turns.count(1)} conversations" in data.description
    assert f"{40 - turns.count(1)} refused, the chat template renders earl" in data.description
