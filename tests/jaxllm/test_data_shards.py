import os
import struct

import numpy as np
import pytest

from jaxllm.data import shards
from jaxllm.data.shards import ShardWriter, check_shard, open_shard
from jaxllm.errors import InputError


def shard_bytes(magic, version, tokens, dtype, count=None):
    """The bytes of a shard, made without the code under test."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count).ljust(1024, b"\0")
    return header + np.asarray(tokens, dtype).tobytes()


GPT2 = (20240520, 1, [0, 1, 50256, 65535], "<u2")
LLAMA = (20240801, 7, [0, 65536, 128255, 2**31 - 1], "<u4")


@pytest.mark.parametrize("form", [GPT2, LLAMA], ids=["v1", "v7"])
def test_both_versions_are_written_and_read_to_the_byte(tmp_path, form):
    vocab_size = (1 << 16) + (form is LLAMA)  # which chooses the format
    writer = ShardWriter(tmp_path / "a.bin", vocab_size)
    writer.append(np.asarray(form[2][:1], np.uint32))
    writer.append(np.asarray(form[2][1:], np.uint32))
    writer.close()
    assert (tmp_path / "a.bin").read_bytes() == shard_bytes(*form)
    tokens = open_shard(tmp_path / "a.bin")
    assert tokens.tolist() == form[2]
    assert isinstance(tokens, np.memmap)


def test_a_shard_is_valid_only_after_close(tmp_path):
    writer = ShardWriter(tmp_path / "a.bin", 100)
    writer.append(np.arange(10))
    writer.sync()
    with pytest.raises(InputError, match="starts with 0"):
        open_shard(tmp_path / "a.bin")
    writer.close()
    assert len(open_shard(tmp_path / "a.bin")) == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes; a header has 1024"),
        (b"x" * 1023, "1023 bytes; a header has 1024"),
        (
            shard_bytes(12345, 1, [1], "<u2"),
            "starts with 12345, 1, expected 20240520, 1 or 20240801, 7; ids without",
        ),
        (shard_bytes(20240520, 7, [1], "<u2"), "with 20240520, 7, expected 20240520, 1"),
        (shard_bytes(20240801, 1, [1], "<u4"), "with 20240801, 1, expected 20240520, 1"),
        (shard_bytes(*GPT2)[:-1], "1031 bytes, expected 1032 for its header's 4 tokens"),
        (shard_bytes(*LLAMA)[:-3], "1037 bytes, expected 1040 for its header's 4 tokens"),
        (shard_bytes(*GPT2) + b"\0\0", "1034 bytes, expected 1032"),
        (shard_bytes(20240520, 1, [], "<u2", count=-1), "damaged"),
    ],
)
def test_foreign_and_damaged_shards_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        open_shard(path)
    assert str(path) in str(error.value)


def test_a_missing_shard_is_reported_by_name(tmp_path):
    with pytest.raises(InputError, match=r"none\.bin: No such file"):
        open_shard(tmp_path / "none.bin")


def test_a_token_outside_the_vocabulary_is_found_in_any_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK", 16)
    tokens = np.full(50, 9)
    tokens[37], tokens[48] = 10, 11
    path = tmp_path / "a.bin"
    path.write_bytes(shard_bytes(20240520, 1, tokens, "<u2"))
    with pytest.raises(InputError, match=r"a\.bin: token 11 at position 48 .* vocabulary of 10"):
        check_shard(path, tmp_path / "cache", 10)
    with pytest.raises(InputError, match="token 11 at position 48"):  # from the cached scan
        check_shard(path, tmp_path / "cache", 11)
    check_shard(path, tmp_path / "cache", 12)


def test_a_shard_is_scanned_once_until_it_changes(tmp_path, monkeypatch):
    path, cache = tmp_path / "a.bin", tmp_path / "cache"
    path.write_bytes(shard_bytes(20240520, 1, [1, 2, 3], "<u2"))
    first = check_shard(path, cache, 4)
    opened = []
    monkeypatch.setattr(shards, "open_shard", lambda path: opened.append(path) or open_shard(path))
    assert check_shard(path, cache, 4) == first
    assert not opened
    path.write_bytes(shard_bytes(20240520, 1, [1, 2, 0], "<u2"))
    os.utime(path, ns=(0, 1))
    assert check_shard(path, cache, 4) != first
    assert opened == [path]


def test_more_tokens_than_the_header_can_count_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_TOKENS", 10)
    writer = ShardWriter(tmp_path / "a.bin", 100)
    writer.append(np.arange(10))
    with pytest.raises(InputError, match="prepare"):
        writer.append(np.arange(1))
    writer.close()
