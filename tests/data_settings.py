"""What tests of the data set and write: a configuration, and shards."""

from types import SimpleNamespace

import numpy as np

from jaxllm.data.shards import ShardWriter


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


def write_shard(path, tokens, vocab_size=1000):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # truncating a mapped file would raise a bus error
    writer = ShardWriter(path, vocab_size)
    writer.append(np.asarray(tokens))
    writer.close()
    return path
