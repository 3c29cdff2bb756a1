"""Turns text into llm.c shards in bounded memory; the same command continues after an interruption.

The folder holds train_000000.bin, ..., val_000000.bin, ..., tokenizer.json and prepare.json.
prepare.json counts the encoded pieces of text and the tokens of each split on disk. It is written
after the tokens, so a restart truncates anything newer. A shard gets its final name only when it is
complete.
"""

import contextlib
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data.cache import cache_folder, digest
from jaxllm.data.corpus import VERSION, encode
from jaxllm.data.shards import MAX_TOKENS, ShardWriter, check_shard
from jaxllm.data.sources import Source, hold_out_below, hold_out_rank
from jaxllm.errors import InputError
from jaxllm.files import own, read_json, write_json
from jaxllm.terminal import progress_bar
from jaxllm.text import Tokenizer
from jaxllm.text.files import beside

_MANY = 2000  # documents; at 1%, one corpus in 5e8 of this size would hold out none by chance


class _Split:
    """The shards of one split; state: complete shards, and tokens in the one being written."""

    def __init__(self, folder: Path, name: str, vocab_size: int, limit: int, state: list[int]):
        self._folder, self._name, self._vocab_size, self._limit = folder, name, vocab_size, limit
        self._shards, tokens = state
        # Some shards may be newer than the state.
        for path in (*folder.glob(f"{name}_*.bin"), *folder.glob(f".{name}_*.partial")):
            if (index := int(path.stem.rpartition("_")[2])) == self._shards and tokens:
                path.rename(self._partial(index))
            elif index >= self._shards or path.suffix == ".partial":
                path.unlink()
        self._writer = ShardWriter(self._partial(self._shards), vocab_size, keep=tokens)

    def _partial(self, index: int) -> Path:
        return self._folder / f".{self._name}_{index:06d}.partial"

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            room = self._limit - self._writer.count
            self._writer.append(ids[:room])
            ids = ids[room:]
            if self._writer.count == self._limit:
                self._finish()
                self._writer = ShardWriter(self._partial(self._shards), self._vocab_size)

    def _finish(self) -> None:
        self._writer.close()
        os.rename(self._writer.path, self._folder / f"{self._name}_{self._shards:06d}.bin")
        self._shards += 1

    def state(self) -> list[int]:
        self._writer.sync()
        return [self._shards, self._writer.count]

    def total(self) -> int:
        return self._shards * self._limit + self._writer.count

    def finish(self) -> None:
        """Completes the last shard, which may be shorter."""
        if self._writer.count:
            self._finish()
        else:
            self.close()
            self._writer.path.unlink()

    def close(self) -> None:
        """Closes the file without completing it."""
        self._writer.close(complete=False)


def prepare(source: Source, tokenizer: Tokenizer, args: Namespace) -> dict[str, int]:
    """Encodes all documents into shards of `shard_tokens`.

    args: the options of `jaxllm data prepare`.
    Returns the tokens of each split, and the number of names of special tokens in the text, which
    are plain text or, with special_tokens="tokens", these tokens.
    The validation shards get `val_fraction` of the documents, chosen by a hash of their names, and
    at least one document unless there is only one.
    Raises InputError if `out` holds anything but this same job, incomplete or done.
    """
    out, special = args.out, args.special_tokens
    shard_tokens, val_fraction = args.shard_tokens, args.val_fraction
    if not 0 < shard_tokens <= MAX_TOKENS:
        raise InputError(f"--shard_tokens={shard_tokens} is not in 1 ... {MAX_TOKENS}")
    if not 0 <= val_fraction < 1:
        raise InputError(f"--val_fraction={val_fraction} is not in [0, 1)")
    options = (shard_tokens, val_fraction, special, tokenizer.begin, tokenizer.finish)
    job = digest(VERSION, source.digest(cache_folder(None)), tokenizer.digest, *options)
    path = out / "prepare.json"
    with own(out), contextlib.ExitStack() as stack:
        if (state := _begun(path, job))["done"]:
            return state["tokens"]
        tokenizer.copy_to(out)
        write_json(path, state)  # from now on this job owns everything in the folder
        size, names = tokenizer.vocab_size, ("train", "val")
        splits = {name: _Split(out, name, size, shard_tokens, state[name]) for name in names}
        for split in splits.values():
            stack.callback(split.close)
        held_out = _held_out(source, val_fraction)
        done = stack.enter_context(progress_bar(f"encoding into {out}", source.size))
        for batch in encode(source.pieces(), tokenizer, special, state["pieces"]):
            for part in batch:
                validates = hold_out_rank(part.document) < held_out
                splits["val" if validates else "train"].append(part.ids)
                state["pieces"] += part.pieces
                state["names"] += part.names
            state |= {name: split.state() for name, split in splits.items()}
            write_json(path, state)
            done(batch[-1].done)
        tokens = {name: split.total() for name, split in splits.items()}
        if not any(tokens.values()):
            raise InputError("the data is empty: no document in it has any text")
        for split in splits.values():
            split.finish()
        tokens["names"] = state["names"]
        each, cache = sorted(out.glob("*.bin")), cache_folder(None)
        page = {"sha256": {shard.name: check_shard(shard, cache, size) for shard in each}}
        page |= {"beside": beside(out)}
        page |= {"job": job, "done": True, "tokens": tokens, "end_token": args.end_token}
        write_json(path, page)
        return tokens


def _begun(path: Path, job: str) -> dict[str, Any]:
    """What prepare.json says of this job; for a new job, that nothing is encoded yet."""
    state, out = read_json(path, optional=True), path.parent
    if state.get("job", job) != job and (state["done"] or state["pieces"]):
        raise InputError(f"{out} holds other data or options: choose another --out or delete it")
    if not state and any(out.glob("*.bin")):
        raise InputError(f"{out} holds shards of other origin: choose another --out")
    if state.get("job") != job:  # another job failed on bad input before it encoded anything
        state = dict(job=job, done=False, pieces=0, names=0, train=[0, 0], val=[0, 0])
    return state


def _held_out(source: Source, fraction: float) -> float:
    """The rank below which a document is for validation: some of a few documents, but not all."""
    ranks = []
    for piece in source.pieces() if fraction else ():
        if piece.begins:
            ranks.append(hold_out_rank(piece.document))
            if min(ranks) < fraction <= max(ranks) or len(ranks) == _MANY:
                return fraction
    return hold_out_below(ranks, fraction) if len(ranks) > 1 else 0.0
