import gzip
import json
import os
import re
import shutil
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.data import corpus, open_dataset
from jaxllm.data.loader import Tokens
from jaxllm.data.shards import ShardWriter
from jaxllm.errors import InputError
from jaxllm.text import train_tokenizer

T = 4


@pytest.fixture
def config(tmp_path):
    """A data configuration with its own cache; tests set its attributes."""
    return SimpleNamespace(
        source="text",
        path=None,
        val_path=None,
        text_column="text",
        tokenizer=None,
        special_tokens="text",
        end_token=None,
        tokenizer_vocab_size=300,
        cache_dir=str(tmp_path / "cache"),
        shuffle=True,
        pack="stream",
        prefetch=2,
    )


def write_shard(path, tokens, vocab_size=1000):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # truncating a mapped file would raise a bus error
    writer = ShardWriter(path, vocab_size)
    writer.append(np.asarray(tokens))
    writer.close()
    return path


def counting(tmp_path, config, *, seed=0, sizes=(31, 50), val=21):
    """A dataset whose tokens are 0, 1, 2, ... over several shards: token = position."""
    start = 0
    for i, size in enumerate(sizes):
        write_shard(tmp_path / f"train/{i}.bin", np.arange(start, start + size))
        start += size
    write_shard(tmp_path / "val/0.bin", np.arange(val))
    config.source, config.path = "shards", str(tmp_path / "train")
    config.val_path = str(tmp_path / "val")
    return open_dataset(config, seq_len=T, seed=seed, vocab_size=1000)


def take(iterator, n):
    """The first token of each window in the first n batches; closes the iterator."""
    firsts = [batch["tokens"][:, 0].tolist() for batch in islice(iterator, n)]
    iterator.close()
    return firsts


def flat(batches):
    return [x for batch in batches for x in batch]


# Windows


def test_every_token_but_the_first_is_a_label_once_an_epoch(tmp_path, config):
    data = counting(tmp_path, config)  # 81 tokens = 20 windows of 4 predictions, over two files
    batches = data.train_batches(5, 0, 1)
    labels = []
    for batch in islice(batches, 4):
        assert batch["tokens"].shape == batch["labels"].shape == (5, T)
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        np.testing.assert_array_equal(batch["labels"], batch["tokens"] + 1)
        labels += batch["labels"].ravel().tolist()
    batches.close()
    assert sorted(labels) == list(range(1, 81))


def test_tokens_are_read_across_files(tmp_path):
    tokens = Tokens([np.arange(3), np.zeros(0), np.arange(3, 4), np.arange(4, 9)])
    assert len(tokens) == 9
    for start in range(9):
        for stop in range(start + 1, 10):
            assert tokens.read(start, stop).tolist() == list(range(start, stop))
            part = tokens.slice(start, stop)
            assert part.read(0, len(part)).tolist() == list(range(start, stop))


# Order


def test_every_epoch_has_its_own_order(tmp_path, config):
    samples = flat(take(counting(tmp_path, config).train_batches(5, 0, 1), 12))
    epochs = [samples[i : i + 20] for i in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(0, 80, T))] * 3
    assert len({tuple(epoch) for epoch in [*epochs, sorted(epochs[0])]}) == 4


def test_the_seed_determines_the_order(tmp_path, config):
    data = counting(tmp_path, config, seed=1)
    first, again = (take(data.train_batches(5, 0, 1), 8) for _ in range(2))
    assert first == again
    other = take(counting(tmp_path, config, seed=0).train_batches(5, 0, 1), 8)
    assert other != first
    assert other[4:] != first[:4]  # it is not the other seed's next epoch either
    assert first[4:] != other[:4]


def test_without_shuffle_samples_keep_the_order_of_the_text(tmp_path, config):
    config.shuffle = False
    data = counting(tmp_path, config)
    assert flat(take(data.train_batches(10, 0, 1), 4)) == [*range(0, 80, T)] * 2


@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_order_does_not_depend_on_the_world(tmp_path, config, world):
    data = counting(tmp_path, config)
    alone = flat(take(data.train_batches(6, 0, 1), 10))
    ranks = [take(data.train_batches(6, rank, world), 10) for rank in range(world)]
    for step in range(10):
        union = flat(ranks[rank][step] for rank in range(world))
        assert union == alone[6 * step : 6 * step + 6]


@pytest.mark.parametrize("start", [1, 12, 19, 20, 47])
def test_a_run_resumes_at_any_sample_with_another_world_or_batch(tmp_path, config, start):
    data = counting(tmp_path, config)
    alone = flat(take(data.train_batches(6, 0, 1), 12))
    assert flat(take(data.train_batches(4, 0, 1, start), 4)) == alone[start : start + 16]
    for rank in range(2):
        mine = [x for g, x in enumerate(alone[start:]) if g % 4 // 2 == rank]
        assert flat(take(data.train_batches(4, rank, 2, start), 4)) == mine[:8]


def test_prefetching_changes_nothing(tmp_path, config):
    orders = []
    for config.prefetch in (0, 1, 8):
        orders.append(take(counting(tmp_path, config).train_batches(6, 0, 1, 3), 20))
    assert orders[0] == orders[1] == orders[2]


def test_one_window_is_enough(tmp_path, config):
    data = counting(tmp_path, config, sizes=(5,), val=6)
    assert take(data.train_batches(2, 0, 1), 2) == [[0, 0], [0, 0]]
    assert take(data.val_batches(2, 0, 1, 9), 9) == [[0, 0]]


@pytest.mark.parametrize(("batch", "world"), [(6, 4), (2, 4), (0, 1)])
def test_a_batch_that_the_ranks_cannot_divide_is_refused(tmp_path, config, batch, world):
    data = counting(tmp_path, config)
    for batches in (data.train_batches, lambda *args: data.val_batches(*args, 1)):
        with pytest.raises(InputError, match=f"={batch} is not a .*multiple of the {world}"):
            batches(batch, 0, world)


# Validation


def test_validation_ends_and_is_the_same_each_time(tmp_path, config):
    data = counting(tmp_path, config, val=4 * 11 + 1)
    whole = take(data.val_batches(4, 0, 1, None), 99)
    assert len(whole) == 2  # 11 windows
    assert whole == take(data.val_batches(4, 0, 1, 5), 99)
    assert len(set(flat(whole))) == 8
    ranks = [flat(take(data.val_batches(4, rank, 2, None), 99)) for rank in range(2)]
    assert ranks == [flat(batch[at] for batch in whole) for at in (slice(2), slice(2, 4))]


def test_few_validation_batches_are_spread_over_all_windows(tmp_path, config):
    data = counting(tmp_path, config, val=4 * 12 + 1)
    assert take(data.val_batches(4, 0, 1, 1), 99) == [[0, 12, 24, 36]]
    assert take(data.val_batches(4, 0, 1, 3), 99) == [
        [0, 4, 8, 12],
        [16, 20, 24, 28],
        [32, 36, 40, 44],
    ]


def test_too_few_validation_windows_repeat(tmp_path, config):
    data = counting(tmp_path, config, val=4 * 3 + 1)
    assert take(data.val_batches(8, 0, 1, 4), 99) == [[0, 4, 8, 0, 4, 8, 0, 4]]


def test_the_end_of_the_tokens_is_held_out_by_default(tmp_path, config):
    write_shard(tmp_path / "train/0.bin", np.arange(401))
    config.source, config.path = "shards", str(tmp_path / "train")
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=1000)
    assert (data.train_tokens, data.val_tokens) == (401 - 21, 21)  # 5 of 100 windows
    assert data.train.read(379, 380) == [379]
    assert data.val.read(0, 1) == [380]


def test_the_error_for_short_data_has_both_numbers(tmp_path, config):
    with pytest.raises(InputError, match=r"data\.path has 4 tokens, fewer than the 5"):
        counting(tmp_path, config, sizes=(2, 2))
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(InputError, match=r"data\.val_path has 3 tokens, fewer than the 5"):
        counting(tmp_path, config, val=3)
    config.val_path = None
    write_shard(tmp_path / "short.bin", np.arange(9))
    config.path = str(tmp_path / "short.bin")
    with pytest.raises(InputError, match="the data has 9 tokens, fewer than the 10"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=1000)
    write_shard(tmp_path / "short.bin", np.arange(10))
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=1000)
    assert (data.train_tokens, data.val_tokens) == (5, 5)


# Shards


def test_the_error_for_a_token_outside_the_vocabulary_has_file_and_position(tmp_path, config):
    write_shard(tmp_path / "a.bin", [*range(20), 500, 501])
    config.source, config.path = "shards", str(tmp_path / "a.bin")
    with pytest.raises(InputError, match=r"a\.bin: token 500 at position 20 .*vocabulary of 500"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=500)
    assert open_dataset(config, seq_len=T, seed=0, vocab_size=502).vocab_size == 502


def test_shards_of_both_versions_with_llm_c_names(tmp_path, config):
    write_shard(tmp_path / "x_train_000001.bin", range(40))
    write_shard(tmp_path / "x_train_000002.bin", range(40, 60), vocab_size=1 << 17)
    write_shard(tmp_path / "x_val_000000.bin", range(10))
    config.source, config.path = "shards", str(tmp_path)
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert (data.train_tokens, data.val_tokens) == (60, 10)
    assert data.vocab_size == 128256  # of the larger format
    assert data.tokenizer is None
    assert data.train.read(38, 42).tolist() == [38, 39, 40, 41]


def test_one_training_and_one_validation_file(tmp_path, config):
    write_shard(tmp_path / "tiny_train.bin", range(40))
    write_shard(tmp_path / "tiny_val.bin", range(10))
    config.source, config.path = "shards", str(tmp_path)
    data = open_dataset(config, seq_len=T, seed=2**40, vocab_size=None)
    assert (data.train_tokens, data.val_tokens) == (40, 10)
    assert len(take(data.train_batches(2, 0, 1), 1)) == 1


def test_a_validation_file_alone_is_split(tmp_path, config):
    write_shard(tmp_path / "x_val_000000.bin", range(100))
    config.source, config.path = "shards", str(tmp_path / "x_val_000000.bin")
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert data.train_tokens > 80
    assert data.vocab_size == 50257


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
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=300)
    assert data.vocab_size == data.tokenizer.vocab_size <= 300
    text = [data.tokenizer.decode(x.read(0, len(x))) for x in (data.train, data.val)]
    documents = [x.split("<|endoftext|>") for x in text]
    assert [x[0] for x in documents] == ["", ""]
    train, val = (x[1:] for x in documents)
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert train == [x for x in DOCUMENTS if x in train]  # in the order of the files
    assert 1 <= len(val) <= 10
    assert "60 documents in 60 files" in data.description
    assert f"{data.train_tokens:,} training and {data.val_tokens:,}" in data.description


def test_opening_again_reads_the_cache(tmp_path, config, monkeypatch):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    first = open_dataset(config, seq_len=T, seed=0, vocab_size=None)

    def never(*args):
        raise AssertionError("encoded or trained again")

    monkeypatch.setattr(corpus, "encode", never)
    monkeypatch.setattr(corpus, "train_tokenizer", never)
    second = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert second.fingerprint == first.fingerprint
    assert second.train.read(0, 99).tolist() == first.train.read(0, 99).tolist()


def test_the_fingerprint_depends_on_text_split_and_tokenizer(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)

    def fingerprint():
        return open_dataset(config, seq_len=T, seed=0, vocab_size=None).fingerprint

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
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert data.tokenizer.decode(data.val.read(0, data.val_tokens)[1:]) == "held out text\n"
    assert list(data.train.read(0, data.train_tokens)).count(data.tokenizer.separator) == 60
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
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    train, val = (data.tokenizer.decode(x.read(0, len(x))) for x in (data.train, data.val))
    assert val == "<|endoftext|>" + DOCUMENTS[7]
    assert train == "".join("<|endoftext|>" + x for x in DOCUMENTS if x != DOCUMENTS[7])
    said = "60 files (1 also in data.val_path, so not trained on) and, for validation, 1 files, "
    assert said in data.description


def test_validation_shards_are_not_trained_on(tmp_path, config):
    for i in range(3):
        write_shard(tmp_path / f"s/{i}.bin", np.arange(100 * i, 100 * i + 50))
    config.source, config.path = "shards", f"{tmp_path}/s/*.bin"
    config.val_path = str(tmp_path / "s/1.bin")
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=1000)
    assert data.train.read(0, 100).tolist() == [*range(50), *range(200, 250)]
    assert data.val.read(0, 50).tolist() == [*range(100, 150)]
    config.val_path = config.path
    with pytest.raises(InputError, match=r"has no file besides those of data\.val_path"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=1000)


@pytest.mark.parametrize("source", ["text", "shards"])
def test_without_training_only_the_validation_data_is_read(tmp_path, config, source, capsys):
    config.source = source
    config.path = config.val_path = corpus_of(tmp_path / "text", ["abc"])
    if source == "shards":
        config.path = config.val_path = str(write_shard(tmp_path / "a.bin", [1, 2]))
    data = open_dataset(config, seq_len=64, seed=0, vocab_size=None, training=False)
    assert (data.train_tokens, data.val_tokens) == (0, 2)
    assert "encoding the training text" not in capsys.readouterr().err
    write_shard(tmp_path / "a.bin", [1])
    config.source = "shards"
    config.path = config.val_path = str(tmp_path / "a.bin")
    with pytest.raises(InputError, match="has 1 tokens, fewer than the 2"):
        open_dataset(config, seq_len=64, seed=0, vocab_size=None, training=False)


@pytest.mark.parametrize("name", ["a.txt", "31.txt"])  # the hash of the second name holds it out
def test_one_file_is_split_at_its_end(tmp_path, config, name):
    (tmp_path / name).write_text("".join(DOCUMENTS))
    config.path = str(tmp_path / name)
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert data.vocab_size > 257  # it was trained on something
    ids = [*data.train.read(0, data.train_tokens), *data.val.read(0, data.val_tokens)]
    assert data.tokenizer.decode(ids[1:]) == "".join(DOCUMENTS)
    assert 0.02 < data.val_tokens / data.train_tokens < 0.1


def test_empty_text(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", ["", ""])
    with pytest.raises(InputError, match="is empty"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    config.source, config.path = "jsonl", str(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="the data is empty"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)


def test_bad_text_is_reported_with_and_without_training_a_tokenizer(tmp_path, config):
    (tmp_path / "a.txt").write_bytes(b"hello \xff")
    config.path = str(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 6"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    train_tokenizer(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    config.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8 text: .* at byte 6"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)
    assert not list((tmp_path / "cache").glob("t*[!k]"))  # only locks are left


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, config):
    train_tokenizer(DOCUMENTS, 300, tmp_path / "tokenizer.json")
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    config.tokenizer = str(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"has 300 entries, more than the model's 270 \(model"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=270)
    data = open_dataset(config, seq_len=T, seed=0, vocab_size=300)
    assert data.vocab_size == 300
    largest = max(tokens.read(0, len(tokens)).max() for tokens in (data.train, data.val))
    with pytest.raises(InputError, match=rf"\(id {largest}\), which is beyond the"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=int(largest))
    # A few tokens may be beyond the model if no text has them.
    page = json.loads(Path(config.tokenizer).read_text())
    more = page["added_tokens"][0] | {"id": 300, "content": "<|more|>", "special": False}
    Path(config.tokenizer).write_text(
        json.dumps(page | {"added_tokens": [*page["added_tokens"], more]})
    )
    assert open_dataset(config, seq_len=T, seed=0, vocab_size=300).vocab_size == 300


@pytest.mark.parametrize("key", ["path", "val_path"])
def test_a_path_without_its_source_is_not_ignored(config, key):
    config.source = "stdlib"
    setattr(config, key, "my.txt")
    with pytest.raises(InputError, match=rf"data\.{key}=my\.txt is not read"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)


# The cache


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, config):
    config.path = corpus_of(tmp_path / "text", DOCUMENTS)
    (tmp_path / "file").write_text("")
    config.cache_dir = str(tmp_path / "file/cache")
    with pytest.raises(InputError, match=r"cannot write the data cache.*set data\.cache_dir"):
        open_dataset(config, seq_len=T, seed=0, vocab_size=None)
