"""What tests of the data set, write and read: a configuration, files and shards."""

from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet

from jaxllm.data import open_dataset
from jaxllm.data.paths import find_files
from jaxllm.data.shards import ShardWriter
from jaxllm.data.sources import Source


def settings(tmp_path):
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


def opened(data, *, seq_len=8, seed=0, vocab_size=1000, training=True):
    """The data set of a run with this data configuration."""
    train = SimpleNamespace(seq_len=seq_len, seed=seed)
    run = SimpleNamespace(data=data, train=train, model=SimpleNamespace(vocab_size=vocab_size))
    return open_dataset(run, training=training)


def write_shard(path, tokens, vocab_size=1000):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # truncating a mapped file would raise a bus error
    writer = ShardWriter(path, vocab_size)
    writer.append(np.asarray(tokens))
    writer.close()
    return path


def flipped_byte(path):
    """Changes a byte in the middle of a shard."""
    content = bytearray(path.read_bytes())
    content[(len(content) + 1024) // 2] ^= 1  # behind the header of a shard
    path.unlink()
    path.write_bytes(content)


def write(path, content):
    """Writes text or bytes to a file, in a new folder if need be; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(kind, path, column="text"):
    """The pieces of all documents in a path."""
    return list(Source(kind, find_files(kind, str(path)).files, column).pieces())


def parquet(path, **columns):
    """Writes columns to a parquet file."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path
