"""The windows of a dataset, their order, and what is held out."""

import os
import shutil
from itertools import islice

import numpy as np
import pytest
from data_settings import opened, settings, write_shard

from jaxllm.config import IGNORE
from jaxllm.data.shards import Tokens, open_shard
from jaxllm.errors import InputError, RunError

T = 4


def test_a_shard_that_is_cut_while_a_run_reads_it_is_one_line(tmp_path):
    """The system killed the run (SIGBUS)."""
    tokens = Tokens([open_shard(write_shard(tmp_path / "a.bin", np.arange(9000)))])
    part = tokens.slice(10, 8990)
    assert part.read(8000, 8004).tolist() == [8010, 8011, 8012, 8013]
    os.truncate(tmp_path / "a.bin", 4096)
    with pytest.raises(RunError, match=r"a\.bin was cut to 4096 bytes"):
        part.read(8000, 8004)


@pytest.fixture
def config(tmp_path):
    return settings(tmp_path)


def counting(tmp_path, config, *, seed=0, sizes=(31, 50), val=21):
    """A dataset whose tokens are 0, 1, 2, ... over several shards: token = position."""
    start = 0
    for i, size in enumerate(sizes):
        write_shard(tmp_path / f"train/{i}.bin", np.arange(start, start + size))
        start += size
    write_shard(tmp_path / "val/0.bin", np.arange(val))
    config.source, config.path = "shards", str(tmp_path / "train")
    config.val_path = str(tmp_path / "val")
    return opened(config, seq_len=T, seed=seed, vocab_size=1000)


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
    assert take(data.val_batches(2, 0, 1, 9), 9) == [[0, 4]]  # the second has one label


@pytest.mark.parametrize(("batch", "world"), [(6, 4), (2, 4)])
def test_a_batch_that_the_ranks_cannot_divide_is_refused(tmp_path, config, batch, world):
    data = counting(tmp_path, config)
    for batches in (data.train_batches, lambda *args: data.val_batches(*args, 1)):
        with pytest.raises(InputError, match=f"={batch} is not a .*multiple of the {world}"):
            batches(batch, 0, world)


# Validation


def test_validation_ends_and_is_the_same_each_time(tmp_path, config):
    data = counting(tmp_path, config, val=4 * 11 + 1)
    whole = take(data.val_batches(4, 0, 1, None), 99)
    assert len(whole) == 3  # 11 windows
    assert whole == take(data.val_batches(4, 0, 1, 5), 99)
    assert len(set(flat(whole))) == 11
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


@pytest.mark.parametrize("tokens", [4 * 3 + 1, 4 * 3 + 3, 4 * 8 + 1, 4 * 9])
def test_validation_that_has_room_for_all_takes_every_label_once(tmp_path, config, tokens):
    data = counting(tmp_path, config, val=tokens)
    batches = list(data.val_batches(8, 0, 1, 4))
    assert {batch["labels"].shape for batch in batches} == {(8, 4)}
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    assert labels[labels != IGNORE].tolist() == data.val.read(1, tokens).tolist()


def test_the_end_of_the_tokens_is_held_out_by_default(tmp_path, config):
    write_shard(tmp_path / "train/0.bin", np.arange(401))
    config.source, config.path = "shards", str(tmp_path / "train")
    data = opened(config, seq_len=T)
    assert (len(data.train), data.val_tokens) == (401 - 21, 21)  # 5 of 100 windows
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
        opened(config, seq_len=T)
    write_shard(tmp_path / "short.bin", np.arange(10))
    data = opened(config, seq_len=T)
    assert (len(data.train), data.val_tokens) == (5, 5)
