"""Turns text and token shards into batches of (tokens, labels), in one resumable global order.

paths.py      a path -> its files, and what it leaves out; opens compressed ones
sources.py    files -> documents (standard library, text, JSON lines, parquet)
shards.py     token ids <-> llm.c shard files
cache.py      a cache on disk for work that is done once
corpus.py     a source and a tokenizer -> cached shards
loader.py     shards -> windows -> Grain -> batches
prepare.py    jaxllm data prepare: text -> shards, restartable
"""

from jaxllm.data.loader import Dataset, open_dataset

__all__ = ["Dataset", "open_dataset"]
