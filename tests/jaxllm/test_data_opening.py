"""Opening data: shards, text, validation files and the cache."""

import contextlib
import gzip
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_settings import flipped_byte, opened, settings, write, write_shard

from jaxllm.data import corpus
from jaxllm.errors import InputError
from jaxllm.text import train_tokenizer

T = 4


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path)


# Shards


def test_the_error_for_a_token_outside_the_vocabulary_has_file_and_position(tmp_path, config):
    write_shard(tmp_path / "a.bin", [*range(20), 500, 501])
    config.source, config.path = "shards", str(tmp_path / "a.bin")
    with pytest.raises(InputError, match=r"a\.bin: token 501 at position 21 .*vocabulary of 500"):
        opened(config, seq_len=T, vocab_size=500)
    assert opened(config, seq_len=T, vocab_size=502).vocab_size == 502


def test_shards_of_both_versions_with_llm_c_names(tmp_path, config):
    write_shard(tmp_path / "x_train_000001.bin", range(40))
    write_shard(tmp_path / "x_train_000002.bin", range(40, 60), vocab_size=1 << 17)
    write_shard(tmp_path / "x_val_000000.bin", range(10))
    config.source, config.path = "shards", str(tmp_path)
    data = opened(config, seq_len=T)
    assert (len(data.train), data.val_tokens) == (60, 10)
    assert data.vocab_size == 1000  # as no tokenizer says it
    assert data.tokenizer is None
    assert data.train.read(38, 42).tolist() == [38, 39, 40, 41]


def test_one_training_and_one_validation_file(tmp_path, config):
    write_shard(tmp_path / "tiny_train.bin", range(40))
    write_shard(tmp_path / "tiny_val.bin", range(10))
    config.source, config.path = "shards", str(tmp_path)
    data = opened(config, seq_len=T, seed=2**40)
    assert (len(data.train), data.val_tokens) == (40, 10)
    with contextlib.closing(data.train_batches(2, 0, 1)) as batches:
        assert next(batches)["tokens"].shape == (2, T)


def test_a_validation_file_alone_is_split(tmp_path, config):
    write_shard(tmp_path / "x_val_000000.bin", range(100))
    config.source, config.path = "shards", str(tmp_path / "x_val_000000.bin")
    data = opened(config, seq_len=T)
    assert len(data.train) > 80


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_names_of_splits_say_what_trains(tmp_path, config, kind):
    """As on the Hub; a test split is not read.  A text without a split makes all training data."""
    names = ("train-00000-of-00002", "sub/train2/b", "validation", "eval1", "test")
    documents = {name: f"{name} says {i} " * 20 for i, name in enumerate(names)}
    for name, text in documents.items():
        content = json.dumps({"text": text}) if kind == "jsonl" else text
        write(tmp_path / "data" / f"{name}.{kind}", content)
    write(tmp_path / "data" / "README.md", "What the data are.")
    config.source, config.path = kind, str(tmp_path / "data")
    data = opened(config, seq_len=T)
    train, val = (data.tokenizer.decode(x.read(0, len(x))) for x in (data.train, data.val))
    assert [documents[name] in train for name in names] == [True, True, *[False] * 3]
    assert val == "<|endoftext|>" + documents["validation"]
    assert "; left out 2 files of a test split (eval1." in data.description
    config.val_path = write(tmp_path / f"mine.{kind}", content)
    data = opened(config, seq_len=T)
    again = data.tokenizer.decode(data.train.read(0, len(data.train)))
    assert again == train
    assert f"; left out 1 file of a validation split (validation.{kind})" in data.description
    config.val_path = None
    write(tmp_path / "data" / f"more.{kind}", content)
    data = opened(config, seq_len=T)
    expected = {
        "jsonl": "; left out 1 file without a split in the name (more.jsonl)",
        "text": "7 documents in 7 files",
    }
    assert expected[kind] in data.description
    (tmp_path / "data" / f"{names[0]}.{kind}").unlink()
    (tmp_path / "data" / f"{names[1]}.{kind}").unlink()
    data = opened(config, seq_len=T)
    if kind == "jsonl":  # what says no split is then the training data
        train = data.tokenizer.decode(data.train.read(0, len(data.train)))
        assert train.endswith(documents["test"])
        assert "left out 2 files of a test split" in data.description
        assert data.tokenizer.decode(data.val.read(0, len(data.val))) == val
    else:
        assert "5 documents in 5 files" in data.description


def test_a_validation_file_is_not_trained_on_beside_a_short_training_file(tmp_path, config):
    for name, text in (("train", "tiny"), ("validation", "only for validation " * 20)):
        write(tmp_path / "data" / f"{name}.jsonl", json.dumps({"text": text}))
    config.source, config.path = "jsonl", str(tmp_path / "data")
    with pytest.raises(
        InputError, match=r"data\.path has \d tokens, fewer than the 33 of one window"
    ):
        opened(config, seq_len=32)
    write(tmp_path / "data" / "train.jsonl", json.dumps({"text": str([*range(99)])}))
    write(tmp_path / "data" / "validation.jsonl", json.dumps({"text": "tiny"}))
    data = opened(config, seq_len=32)  # the end of the training data validates, too
    assert data.val_tokens == 33
    assert "tiny" not in data.tokenizer.decode(data.train.read(0, len(data.train)))


# Text


def corpus_of(folder, documents):
    for i, text in enumerate(documents):
        path = folder / f"{i:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


DOCUMENTS = [f"document {i} says hello\nand {i * i}\n" for i in range(60)]


def test_text_is_encoded_with_a_separator_before_each_document(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    data = opened(config, seq_len=T, vocab_size=300)
    assert data.vocab_size == data.tokenizer.vocab_size <= 300
    text = [data.tokenizer.decode(x.read(0, len(x))) for x in (data.train, data.val)]
    documents = [x.split("<|endoftext|>") for x in text]
    assert [x[0] for x in documents] == ["", ""]
    train, val = (x[1:] for x in documents)
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert train == [x for x in DOCUMENTS if x in train]  # in the order of the files
    assert 1 <= len(val) <= 10
    assert "60 documents in 60 files" in data.description
    assert f"{len(data.train):,} training and {data.val_tokens:,}" in data.description


def test_opening_again_reads_the_cache(tmp_path, config, monkeypatch):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    first = opened(config, seq_len=T)

    def never(*args):
        raise AssertionError("encoded or trained again")

    monkeypatch.setattr(corpus, "encode", never)
    monkeypatch.setattr(corpus, "train_tokenizer", never)
    second = opened(config, seq_len=T)
    assert second.fingerprint == first.fingerprint
    assert second.train.read(0, 99).tolist() == first.train.read(0, 99).tolist()
    (counts,) = (tmp_path / "cache").glob("tokens-*/counts.json")
    for name in ("train.bin", "val.bin"):
        content = (counts.parent / name).read_bytes()
        flipped_byte(counts.parent / name)
        with pytest.raises(InputError, match=f"{name} is damaged: its tokens have changed"):
            opened(config, seq_len=T)
        write(counts.parent / name, content)
    (trained,) = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    content = trained.read_bytes()
    trained.write_bytes(content.replace(b'"version"', b'"Version"'))
    with pytest.raises(InputError, match=r"tokenizer\.json is damaged: it has changed; delete"):
        opened(config, seq_len=T)
    trained.write_bytes(content)
    counts.unlink()  # as what cleans /tmp and ~/.cache may do
    with pytest.raises(InputError, match=r"counts\.json cannot be read"):
        opened(config, seq_len=T)


def test_the_fingerprint_depends_on_text_split_and_tokenizer(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)

    def fingerprint():
        return opened(config, seq_len=T).fingerprint

    seen = [fingerprint()]
    config.tokenizer_vocab_size = 290
    seen.append(fingerprint())
    (tmp_path / "text/000.txt").write_text("Document 0 says hello\n")
    seen.append(fingerprint())
    config.val_path = corpus_of(tmp_path / "val", DOCUMENTS[:3])
    seen.append(fingerprint())
    assert len(set(seen)) == 4
    config.cache_dir = str(tmp_path / "other")
    shutil.move(config.path, tmp_path / "moved")
    config.path = str(tmp_path / "moved")
    assert fingerprint() == seen[-1]  # the same text in another folder, with another cache


def test_separate_validation_text(tmp_path, config, capsys):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    config.val_path = corpus_of(tmp_path / "val", ["held out text\n"])
    data = opened(config, seq_len=T)
    assert data.tokenizer.decode(data.val.read(0, data.val_tokens)[1:]) == "held out text\n"
    assert list(data.train.read(0, len(data.train))).count(data.tokenizer.separator) == 60
    assert re.findall("encoding.*", capsys.readouterr().err) == [
        "encoding the training text (once)",
        "encoding the validation text (once)",
    ]


@pytest.mark.parametrize("name", ["the file", "a folder", "a link", "a copy", "an archive"])
def test_validation_text_is_not_trained_on(tmp_path, config, name):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    file, elsewhere = tmp_path / "text/007.txt", tmp_path / "elsewhere/x.txt"
    elsewhere.parent.mkdir()
    val = {"the file": file, "a folder": elsewhere.parent}.get(name, elsewhere)
    if name == "a link":
        elsewhere.symlink_to(os.path.relpath(file, elsewhere.parent))
    elif name == "an archive":
        elsewhere.write_bytes(gzip.compress(file.read_bytes()))
    elif val is not file:
        elsewhere.write_bytes(file.read_bytes())
    config.val_path = os.path.relpath(val)
    data = opened(config, seq_len=T)
    train, val = (data.tokenizer.decode(x.read(0, len(x))) for x in (data.train, data.val))
    assert val == "<|endoftext|>" + DOCUMENTS[7]
    assert train == "".join("<|endoftext|>" + x for x in DOCUMENTS if x != DOCUMENTS[7])
    said = "60 training (1 also in data.val_path, so not trained on) and 1 validation files, "
    assert said in data.description


def test_validation_shards_are_not_trained_on(tmp_path, config):
    for i in range(3):
        write_shard(tmp_path / f"s/{i}.bin", np.arange(100 * i, 100 * i + 50))
    config.source, config.path = "shards", f"{tmp_path}/s/*.bin"
    config.val_path = str(tmp_path / "s/1.bin")
    data = opened(config, seq_len=T)
    assert data.train.read(0, 100).tolist() == [*range(50), *range(200, 250)]
    assert data.val.read(0, 50).tolist() == [*range(100, 150)]
    config.val_path = config.path
    with pytest.raises(InputError, match=r"has no file outside the validation data"):
        opened(config, seq_len=T)


@pytest.mark.parametrize("source", ["text", "shards"])
def test_without_training_only_the_validation_data_is_read(tmp_path, config, source, capsys):
    config.source = source
    config.path = config.val_path = corpus_of(tmp_path / "text", ["abc"])
    if source == "shards":
        config.path = config.val_path = str(write_shard(tmp_path / "a.bin", [1, 2]))
    data = opened(config, seq_len=64, training=False)
    assert (len(data.train), data.val_tokens) == (0, 2)
    config.path = "/gone"  # as on another machine
    assert opened(config, seq_len=64, training=False).val_tokens == 2
    assert "encoding the training text" not in capsys.readouterr().err
    write_shard(tmp_path / "a.bin", [1])
    config.source = "shards"
    config.path = config.val_path = str(tmp_path / "a.bin")
    with pytest.raises(InputError, match="has 1 token, fewer than the 2"):
        opened(config, seq_len=64, training=False)


@pytest.mark.parametrize("name", ["a.txt", "31.txt"])  # the hash of the second name holds it out
def test_one_file_is_split_at_its_end(tmp_path, config, name):
    (tmp_path / name).write_text("".join(DOCUMENTS))
    config.path = str(tmp_path / name)
    data = opened(config, seq_len=T)
    assert data.vocab_size > 257  # it was trained on something
    ids = [*data.train.read(0, len(data.train)), *data.val.read(0, data.val_tokens)]
    assert data.tokenizer.decode(ids[1:]) == "".join(DOCUMENTS)
    assert 0.02 < data.val_tokens / len(data.train) < 0.1


def test_empty_text(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", ["", ""])
    with pytest.raises(InputError, match=r"data\.path=.*/text is empty"):
        opened(config, seq_len=T)
    config.path, config.val_path = corpus_of(tmp_path / "full", DOCUMENTS), config.path
    with pytest.raises(InputError, match=r"data\.val_path=.*/text is empty"):
        opened(config, seq_len=T, training=False)
    config.val_path = None
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    config.source, config.path = "jsonl", str(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="the data is empty"):
        opened(config, seq_len=T)


def test_bad_text_is_reported_with_and_without_training_a_tokenizer(tmp_path, config):
    (tmp_path / "a.txt").write_bytes(b"hello \xff")
    config.path = str(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 6"):
        opened(config, seq_len=T)
    train_tokenizer(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    config.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 6"):
        opened(config, seq_len=T)
    assert not list((tmp_path / "cache").glob("t*[!k]"))  # only locks are left


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, config):
    train_tokenizer(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    config.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"has 300 entries, more than the model's 270 \(model"):
        opened(config, seq_len=T, vocab_size=270)
    data = opened(config, seq_len=T, vocab_size=300)
    assert data.vocab_size == 300
    largest = max(tokens.read(0, len(tokens)).max() for tokens in (data.train, data.val))
    with pytest.raises(InputError, match=rf"\(id {largest}\), which is beyond the"):
        opened(config, seq_len=T, vocab_size=int(largest))
    # A few tokens may be beyond the model if no text has them.
    page = json.loads(Path(config.tokenizer).read_text())
    more = page["added_tokens"][0] | {"id": 300, "content": "<|more|>", "special": False}
    Path(config.tokenizer).write_text(
        json.dumps(page | {"added_tokens": [*page["added_tokens"], more]})
    )
    assert opened(config, seq_len=T, vocab_size=300).vocab_size == 300


@pytest.mark.parametrize("key", ["path", "val_path"])
def test_a_path_without_its_source_is_not_ignored(config, key):
    config.source = "stdlib"
    setattr(config, key, "my.txt")
    with pytest.raises(InputError, match=rf"data\.{key}=my\.txt is not read"):
        opened(config, seq_len=T)


# The cache


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    (tmp_path / "file").write_text("")
    config.cache_dir = str(tmp_path / "file/cache")
    with pytest.raises(InputError, match=r"cannot write the data cache.*set data\.cache_dir"):
        opened(config, seq_len=T)
