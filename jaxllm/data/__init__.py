"""Turns text and token shards into batches of (tokens, labels), in one resumable global order.

paths.py      a path -> its files, and what it leaves out; opens compressed ones
sources.py    files -> documents (standard library, text, JSON lines, parquet, Arrow)
shards.py     token ids <-> llm.c shard files
cache.py      a cache on disk for work that is done once
corpus.py     a source and a tokenizer -> cached shards
opening.py    a configuration -> the tokens to train on and to validate on
loader.py     tokens -> windows -> Grain -> batches
chat.py       a record -> messages -> text by the chat template, and which parts have loss
encoded.py    conversations -> tokens with and without loss, cached or prepared
packing.py    encoded conversations -> rows
prepare.py    jaxllm data prepare: text -> shards, restartable
command.py    the command line of jaxllm data
"""

from jaxllm.data.loader import Dataset
from jaxllm.data.opening import open_dataset

__all__ = ["Dataset", "open_dataset"]
