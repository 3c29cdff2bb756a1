"""Token files -> windows -> batches, through Grain.

The global order of samples does not depend on the number of ranks: sample g is window
`shuffle(epoch)[g % windows]` with `epoch = g // windows`. In step s all ranks together take samples
[s batch, (s+1) batch), and rank r of `world` the r-th part of them: their concatenated rows, and
with them the rows of each device, do not depend on the number of ranks either. The number of
samples taken is all that a run needs to resume, even with another world or batch size.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.data.cache import cache_folder, digest
from jaxllm.data.corpus import VAL_FRACTION, VERSION, cached_tokenizer, cached_tokens
from jaxllm.data.paths import Found, find_files, stdlib_files
from jaxllm.data.shards import check_shard, open_shard
from jaxllm.data.sources import Source
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer

if TYPE_CHECKING:  # only types need these, and they are slow to import
    from grain import DatasetIterator
    from jaxtyping import Int32

    from jaxllm.config import DataConfig

    Batch = dict[str, Int32[np.ndarray, "B T"]]


_SEARCHED = 1 << 22  # an end-of-text token must occur in this many first tokens


class Tokens:
    """Several token arrays, usually memory-mapped files, read as one."""

    def __init__(self, parts: list[np.ndarray]):
        self.parts = [part for part in parts if len(part)]
        self._starts = [0, *accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def slice(self, start: int, stop: int) -> Tokens:
        """Returns tokens [start, stop) without reading them."""
        bounds = zip(self.parts, self._starts, strict=False)
        return Tokens([part[max(0, start - s) : max(0, stop - s)] for part, s in bounds])

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """Returns tokens [start, stop) as int32."""
        pieces = []
        i = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = start - self._starts[i]
            piece = self.parts[i][offset : offset + stop - start]
            pieces.append(piece.astype(np.int32))
            start += len(piece)
            i += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def documents(tokens: Int32[np.ndarray, "B T"], separator: int) -> Batch:
    """The segment_ids and positions of rows of packed documents, each begun by a `separator`.

    The separator, the end-of-text token, belongs to both documents that it divides.  As an input it
    is the first token of the later document, at position 0; as a label it is the target of the last
    token of the earlier one, which learns where a text ends.  Labels are therefore the next tokens
    as usual, and none is ignored: no token has to predict the first word of a document that it
    does not see.  The data may have the separator before or after each document.  The rest of a
    document at the start of a row counts as a document.
    """
    begins = tokens == separator
    places = np.arange(tokens.shape[-1], dtype=np.int32)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=-1)
    return {
        "segment_ids": np.cumsum(begins, axis=-1, dtype=np.int32),
        "positions": places - starts,
    }


class _Windows:
    """Windows of seq_len + 1 tokens that overlap by one: all tokens but the first are labels.

    separator: the token between documents that do not see each other; None: a window is one text.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int | None):
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._seq_len)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self._seq_len
        window = self._tokens.read(start, start + self._seq_len + 1)
        sample = {"tokens": window[:-1], "labels": window[1:]}
        if self._separator is not None:
            sample |= documents(sample["tokens"], self._separator)
        return sample


class _Rows:
    """`rows` samples of each batch, the first of them `first`, in order."""

    def __init__(self, samples, first: int, rows: int, batch_size: int):
        self._samples, self._first, self._rows, self._batch_size = samples, first, rows, batch_size

    def __len__(self) -> int:
        left = max(0, len(self._samples) - self._first)
        return left // self._batch_size * self._rows + min(left % self._batch_size, self._rows)

    def __getitem__(self, index: int):
        batch, row = divmod(int(index), self._rows)
        return self._samples[self._first + batch * self._batch_size + row]


@dataclass(frozen=True)
class Dataset:
    """Training and validation tokens of one corpus.

    description: one line for people.
    fingerprint: hash of the tokens' origin; a run resumes only with the same fingerprint.
    vocab_size: exclusive upper bound of the ids.
    tokenizer: encodes and decodes text; None for shards without one.
    separator: the token that begins each document with data.pack=documents, else None.
    """

    description: str
    fingerprint: str
    vocab_size: int
    tokenizer: Tokenizer | None
    separator: int | None
    train: Tokens
    val: Tokens
    seq_len: int
    seed: int
    shuffle: bool
    prefetch: int

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def val_tokens(self) -> int:
        return len(self.val)

    def train_batches(
        self, batch_size: int, rank: int, world: int, start_sample: int = 0
    ) -> DatasetIterator[Batch]:
        """Returns an endless iterator of {"tokens", "labels"}: int32 (batch_size / world, T).

        With a separator, batches also have "segment_ids" and "positions" from `documents`.
        batch_size: sequences of all ranks together. start_sample: samples that all ranks together
        have already taken. Every epoch has its own order. The iterator has a `close()`.
        """
        _check_ranks(batch_size, rank, world)
        import grain

        samples = grain.MapDataset.source(_Windows(self.train, self.seq_len, self.separator))
        if self.shuffle:
            samples = samples.seed(self.seed % 2**32).shuffle()
        samples = samples.repeat()
        return self._batches(samples, batch_size, start_sample, rank, world)

    def val_batches(
        self, batch_size: int, rank: int, world: int, max_batches: int | None = None
    ) -> DatasetIterator[Batch]:
        """Returns an iterator of at most `max_batches` batches, the same at every call.

        If `max_batches` leaves some out, the batches are spread evenly over all windows. Only whole
        batches are returned; if the windows do not fill one, they repeat.
        """
        _check_ranks(batch_size, rank, world)
        import grain

        windows = _Windows(self.val, self.seq_len, self.separator)
        batches = max(1, len(windows) // batch_size)
        if max_batches is not None:
            batches = min(batches, max_batches)
        count = batches * batch_size
        order = [i * max(len(windows), count) // count % len(windows) for i in range(count)]
        samples = grain.MapDataset.source(order).map(windows.__getitem__)
        return self._batches(samples, batch_size, 0, rank, world)

    def _batches(
        self, samples, batch_size: int, start: int, rank: int, world: int
    ) -> DatasetIterator[Batch]:
        import grain

        rows = batch_size // world
        part = grain.MapDataset.source(_Rows(samples, start + rank * rows, rows, batch_size))
        batches = part.batch(rows, drop_remainder=True)
        # One thread is enough: 32 x 1024 tokens take 2 to 3 ms on one core (70 us per sample).
        threads = 1 if self.prefetch else 0
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=self.prefetch)
        return iter(batches.to_iter_dataset(options))


def _check_ranks(batch_size: int, rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is not in a world of {world}")
    if batch_size <= 0 or batch_size % world:
        raise InputError(
            f"batch_size={batch_size} is not a positive multiple of the {world} data-parallel ranks"
        )


def open_dataset(
    config: DataConfig, *, seq_len: int, seed: int, vocab_size: int | None, training: bool = True
) -> Dataset:
    """Opens the configured data; the first run trains the tokenizer and encodes the text.

    vocab_size: that of the model, or None to take that of the data.
    training: whether to train on the data; otherwise data.val_path, if given, is all that is read,
    and may be shorter than a window.
    Raises InputError for bad data.
    """
    cache = cache_folder(config.cache_dir)
    only_val = not training and config.val_path is not None
    opened = _open_shards if config.source == "shards" else _open_text
    found, val_found = _find(config, only_val)
    train, val, tokenizer, data_vocab_size, fingerprint, what = opened(
        config, found, val_found, cache, vocab_size, only_val
    )
    if only_val:
        _check_length("data.val_path", val, 2, "to predict one from the other")
    else:
        train, val = _split(train, val, seq_len, given=config.val_path is not None)
        what += f", {len(train):,} training and {len(val):,} validation tokens"
    separator = None
    if config.pack == "documents":
        separator = _separator(tokenizer, val if only_val else train)
    return Dataset(
        description=f"{what}, vocabulary {data_vocab_size:,}{found.left_out}{val_found.left_out}",
        fingerprint=fingerprint,
        vocab_size=data_vocab_size,
        tokenizer=tokenizer,
        separator=separator,
        train=train,
        val=val,
        seq_len=seq_len,
        seed=seed,
        shuffle=config.shuffle,
        prefetch=config.prefetch,
    )


def check_paths(config: DataConfig) -> None:
    """Raises InputError for paths without the configured data; fast, so it can run first."""
    for key in ("path", "val_path"):
        path = getattr(config, key)
        if path is not None and config.source == "stdlib":
            raise InputError(
                f"data.{key}={path} is not read with data.source=stdlib: set data.source to text, "
                "jsonl, parquet or shards"
            )
        if path is not None:
            find_files(config.source, path, key=f"data.{key}")
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().exists():
        raise InputError(
            f"data.tokenizer={config.tokenizer} does not exist; name a tokenizer.json or its folder"
        )


def _find(config: DataConfig, only_val: bool) -> tuple[Found, Found]:
    """The files of data.path and of data.val_path; the latter alone if `only_val`."""
    check_paths(config)
    if config.source == "stdlib":
        return stdlib_files(), Found([])
    if config.val_path is None:
        return find_files(config.source, config.path), Found([])
    val_found = find_files(config.source, config.val_path, key="data.val_path")
    if only_val:
        return val_found, Found([])
    return find_files(config.source, config.path), val_found


def _describe(found: Found, val_found: Found, trained: int) -> str:
    """For people: the files of data.path and of data.val_path."""
    text = found.describe()
    if trained < len(found.files):
        text += f" ({len(found.files) - trained:,} also in data.val_path, so not trained on)"
    if val_found.files:
        text += f" and, for validation, {val_found.describe()}"
    return text


def _nothing_left(config: DataConfig) -> InputError:
    return InputError(
        f"data.path={config.path} has no file besides those of data.val_path={config.val_path},"
        " which are not trained on; name other data, or omit data.val_path to hold out a part"
    )


def _open_text(
    config: DataConfig,
    found: Found,
    val_found: Found,
    cache: Path,
    vocab_size: int | None,
    only_val: bool,
):
    source, val_source = Source(config.source, found.files, config.text_column), None
    held_out = 1.0 if only_val else VAL_FRACTION
    if not source.size:
        raise InputError(f"data.{'val_' * only_val}path={config.path} is empty")
    if val_found.files:
        val_source, held_out = replace(source, files=val_found.files), 0.0
        source = source.without(val_source, cache)
        if not source.files:
            raise _nothing_left(config)
    what = _describe(found, val_found, len(source.files))

    content = source.digest(cache)
    if config.tokenizer is None:
        path = cached_tokenizer(source, content, held_out, config.tokenizer_vocab_size, cache)
    else:
        path = config.tokenizer
    tokenizer = Tokenizer(path, end_token=config.end_token)
    _check(tokenizer, vocab_size)
    val_content = val_source.digest(cache) if val_source else None
    special = config.special_tokens
    around = (tokenizer.begin, tokenizer.finish, special)
    fingerprint = digest(VERSION, content, val_content, held_out, tokenizer.digest, *around)
    folder = cached_tokens(source, val_source, held_out, tokenizer, special, fingerprint, cache)
    counts = json.loads((folder / "counts.json").read_text())
    _check(tokenizer, vocab_size, [counts["largest"]])
    train, val = (open_shard(folder / name)[0] for name in ("train.bin", "val.bin"))
    documents = counts["train"] + counts["val"]
    what = f"{config.source}: {documents:,} documents in {what}"
    if counts["names"]:
        read = "tokens" if special == "tokens" else "plain text"
        what += f", {counts['names']:,} names of special tokens read as {read}"
    size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    return Tokens([train]), Tokens([val]), tokenizer, size, fingerprint, what


def _open_shards(
    config: DataConfig,
    found: Found,
    val_found: Found,
    cache: Path,
    vocab_size: int | None,
    only_val: bool,
):
    files, val_files = found.files, val_found.files
    if only_val:
        files, val_files = val_files, files
    elif not val_files:  # llm.c's names: fineweb_val_000000.bin; `prepare`'s: val_000000.bin
        val_files = [(n, p) for n, p in files if "val" in p.stem.split("_")]
        if len(val_files) < len(files):
            files = [file for file in files if file not in val_files]
        else:  # the path names only validation shards
            val_files = []
    folders = dict.fromkeys(path.parent for _, path in files + val_files)
    for folder in folders:
        job = folder / "prepare.json"
        if job.exists() and not json.loads(job.read_text())["done"]:
            raise InputError(f"{folder} is incomplete: run its `prepare` command again")

    paths = [p for folder in folders if (p := folder / "tokenizer.json").exists()]
    if config.tokenizer is not None:
        paths.insert(0, Path(config.tokenizer))
    tokenizers = [Tokenizer(path, end_token=config.end_token) for path in paths]
    tokenizer = tokenizers[0] if tokenizers else None
    for other in tokenizers[1:]:
        tokenizers[0].check_same(other)
    _check(tokenizer, vocab_size)

    if tokenizer is not None:
        data_vocab_size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    else:
        data_vocab_size = vocab_size or max(open_shard(path)[1] for _, path in files + val_files)
    content = {path: check_shard(path, cache, data_vocab_size) for _, path in files + val_files}
    val_digests = [content[path] for _, path in val_files]
    files = [file for file in files if content[file[1]] not in val_digests]
    if not files and not only_val:
        raise _nothing_left(config)
    digests = [[content[path] for _, path in files], val_digests]
    train, val = (Tokens([open_shard(p)[0] for _, p in group]) for group in (files, val_files))
    trained = len(files) if val_found.files else len(found.files)
    what = f"shards: {_describe(found, val_found, trained)}"
    return train, val, tokenizer, data_vocab_size, digest("shards", digests), what


def _check(
    tokenizer: Tokenizer | None, vocab_size: int | None, ids: Sequence[int] | None = None
) -> None:
    """Raises InputError if the tokenizer, or a token of the data, is not the model's."""
    if tokenizer is not None and vocab_size is not None:
        tokenizer.check(vocab_size, ids)


def _separator(tokenizer: Tokenizer | None, tokens: Tokens) -> int:
    """Returns the token between documents; raises InputError if it is unknown or does not occur."""
    if tokenizer is None:
        raise InputError(
            "data.pack=documents needs the token between documents: set data.tokenizer to the"
            " tokenizer.json that encoded the shards"
        )
    if not tokenizer.begin:
        raise InputError(
            f"data.pack=documents needs a token between documents, and no file beside"
            f" {tokenizer.path} names one; set data.end_token"
        )
    start = tokens.read(0, min(len(tokens), _SEARCHED))
    for separator in (tokenizer.begin[0], *tokenizer.finish):  # other shards may have only one
        if (start == separator).any():
            return separator
    raise InputError(
        f"data.pack=documents finds no end-of-text token (id {tokenizer.begin[0]} of"
        f" {tokenizer.path}) in the first {len(start)} tokens; set data.pack=stream, or set"
        " data.tokenizer to the tokenizer.json that encoded them"
    )


def _split(train: Tokens, val: Tokens, seq_len: int, *, given: bool) -> tuple[Tokens, Tokens]:
    """Returns training and validation tokens of at least one window each.

    If whole documents did not suffice for both (one long file, few shards), holds out the last 5%
    of the windows instead.  given: the user named the validation data, so nothing is held out.
    """
    window = seq_len + 1
    if given:
        _check_length("data.path", train, window, "of one window (seq_len + 1)")
        fix = "; omit it to hold out the end of data.path"
        _check_length("data.val_path", val, window, f"of one window (seq_len + 1){fix}")
        return train, val
    if min(len(train), len(val)) >= window:
        return train, val
    tokens = Tokens(train.parts + val.parts)
    if len(tokens) < 2 * window:
        raise InputError(
            f"the data has {len(tokens)} tokens, fewer than the {2 * window} of one training and "
            f"one validation window of {window} (seq_len + 1)"
        )
    val_windows = max(1, round(VAL_FRACTION * ((len(tokens) - 1) // seq_len)))
    cut = len(tokens) - (val_windows * seq_len + 1)
    return tokens.slice(0, cut), tokens.slice(cut, len(tokens))


def _check_length(key: str, tokens: Tokens, least: int, why: str) -> None:
    if len(tokens) < least:
        raise InputError(f"{key} has {len(tokens)} tokens, fewer than the {least} {why}")
