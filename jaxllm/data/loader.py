"""Tokens -> windows -> batches, through Grain.

The global order of samples does not depend on the number of ranks: sample g is window
`shuffle(epoch)[g % windows]` with `epoch = g // windows`. In step s all ranks together take samples
[s batch, (s+1) batch), and rank r of `world` the r-th part of them: their concatenated rows, and
with them the rows of each device, do not depend on the number of ranks either. The number of
samples taken is all that a run needs to resume, even with another world or batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.config import IGNORE, Config, round_up
from jaxllm.data.packing import Packed
from jaxllm.data.shards import Tokens
from jaxllm.errors import InputError
from jaxllm.text import Tokenizer

if TYPE_CHECKING:  # only types need these, and they are slow to import
    from grain import DatasetIterator
    from jaxtyping import Int32

    Batch = dict[str, Int32[np.ndarray, "B T"]]


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
    return {"segment_ids": np.cumsum(begins, axis=-1, dtype=np.int32), "positions": places - starts}


class _Windows:
    """Windows of seq_len + 1 tokens that overlap by one: all tokens but the first are labels.

    separator: the token between documents that do not see each other; None: a window is one text.
    whole: whether a last, partial window counts; zeros without labels pad it.
    """

    def __init__(self, tokens: Tokens, seq_len: int, separator: int | None, whole: bool = False):
        self._tokens, self._seq_len, self._separator = tokens, seq_len, separator
        self._whole = whole

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1 + self._whole * (self._seq_len - 1)) // self._seq_len)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self._seq_len
        window = self._tokens.read(start, min(start + self._seq_len + 1, len(self._tokens)))
        sample = {"tokens": window[:-1], "labels": window[1:]}
        if missing := self._seq_len + 1 - len(window):
            for name, value in (("tokens", 0), ("labels", IGNORE)):
                sample[name] = np.pad(sample[name], (0, missing), constant_values=value)
        if self._separator is not None:
            sample |= documents(sample["tokens"], self._separator)
        return sample


@dataclass(frozen=True)
class Dataset:
    """Training and validation tokens of one corpus.

    run: the configuration, which says how long samples are and in which order they come.
    description: one line for people.
    fingerprint: hash of the tokens' origin; a run resumes only with the same fingerprint.
    vocab_size: exclusive upper bound of the ids.
    tokenizer: encodes and decodes text; None for shards without one.
    separator: the token that begins each document with data.pack=documents, else None.
    train, val: tokens, or conversations that are packed already.
    """

    run: Config
    description: str
    fingerprint: str
    vocab_size: int
    tokenizer: Tokenizer | None
    separator: int | None
    train: Tokens | Packed
    val: Tokens | Packed

    @property
    def val_tokens(self) -> int:
        return len(self.val) if isinstance(self.val, Tokens) else self.val.tokens

    def samples(self, part: Tokens | Packed, *, whole: bool = False) -> _Windows | Packed:
        """The samples of train or val; whole: every label once, also in a last, partial window."""
        if not isinstance(part, Tokens):
            return part
        return _Windows(part, self.run.train.seq_len, self.separator, whole)

    def train_batches(
        self, batch_size: int, rank: int, world: int, start_sample: int = 0
    ) -> DatasetIterator[Batch]:
        """Returns an endless iterator of {"tokens", "labels"}: int32 (batch_size / world, T).

        With a separator, batches also have "segment_ids" and "positions" from `documents`.
        batch_size: sequences of all ranks together. start_sample: samples that all ranks together
        have already taken. Every epoch has its own order. The iterator has a `close()`.
        """
        import grain

        samples = grain.MapDataset.source(self.samples(self.train))
        if self.run.data.shuffle:
            samples = samples.seed(self.run.train.seed % 2**32).shuffle()
        return self._batches(samples.repeat(), batch_size, start_sample, rank, world)

    def val_batches(
        self, batch_size: int, rank: int, world: int, max_batches: int | None = None
    ) -> DatasetIterator[Batch]:
        """Returns an iterator of at most `max_batches` batches, the same at every call.

        If `max_batches` leaves some windows out, the batches are spread evenly over the full ones.
        Otherwise every label comes once, and windows without labels fill the last batch.
        """
        import grain

        windows, most = self.samples(self.val), (max_batches or 2**31) * batch_size
        windows = self.samples(self.val, whole=True) if len(windows) < most else windows
        count = min(round_up(len(windows), batch_size), most)
        order = [i * max(len(windows), count) // count for i in range(count)]
        empty = windows[0] | {"labels": np.full_like(windows[0]["labels"], IGNORE)}
        sample = lambda i: windows[i] if i < len(windows) else empty
        return self._batches(grain.MapDataset.source(order).map(sample), batch_size, 0, rank, world)

    def _batches(self, samples, batch_size: int, start: int, rank: int, world: int):
        import grain

        if batch_size % world:
            raise InputError(f"batch_size={batch_size} is not a multiple of the {world} ranks")
        parts = samples[start:].batch(batch_size // world, drop_remainder=True)
        # One thread is enough: 32 x 1024 tokens take 2 to 3 ms on one core (70 us per sample).
        ahead = self.run.data.prefetch
        options = grain.ReadOptions(num_threads=1 if ahead else 0, prefetch_buffer_size=ahead)
        return iter(parts[rank::world].to_iter_dataset(options))
