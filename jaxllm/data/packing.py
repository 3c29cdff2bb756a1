"""Packs conversations into rows by best fit."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy as np

from jaxllm.config import IGNORE
from jaxllm.data.shards import Tokens
from jaxllm.terminal import counted


class Packed:
    """Rows of whole conversations, each a segment, as a source of samples.

    A conversation of n tokens takes n - 1 places: its last token is only a label.
    """

    def __init__(self, entries: Tokens, spans: np.ndarray, seq_len: int):
        """entries: 2 id + (1 if the token has loss); spans: (n, 2), of conversations."""
        self._entries, self._spans, self._seq_len = entries, spans, seq_len
        self.tokens = int((spans[:, 1] - spans[:, 0]).sum())
        self._rows = best_fit((spans[:, 1] - spans[:, 0] - 1).tolist(), seq_len)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        size, row = self._seq_len, self._rows[int(index)]
        # Padding is a segment, too, and its tokens have no loss.
        sample = {
            "tokens": np.zeros(size, np.int32),
            "labels": np.full(size, IGNORE, np.int32),
            "segment_ids": np.full(size, len(row), np.int32),
            "positions": np.zeros(size, np.int32),
        }
        start = 0
        for segment, i in enumerate(row):
            entries = self._entries.read(*self._spans[i])
            ids, stop = entries >> 1, start + len(entries) - 1
            sample["tokens"][start:stop] = ids[:-1]
            sample["labels"][start:stop] = np.where(entries[1:] & 1, ids[1:], IGNORE)
            sample["segment_ids"][start:stop] = segment
            sample["positions"][start:stop] = np.arange(stop - start)
            start = stop
        sample["positions"][start:] = np.arange(size - start)
        return sample

    def describe(self) -> str:
        """For people: conversations, rows, and how full these are."""
        full = (self.tokens - len(self._spans)) / (len(self) * self._seq_len)
        return f"{len(self._spans):,} in {counted(len(self), 'row')}, {full:.0%} full"


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Packs lengths (1 to `size`) into rows by best-fit decreasing; returns each row's indices."""
    rows: list[list[int]] = []
    rooms: list[int] = []  # sorted: the distinct free spaces of rows
    having = defaultdict(list)  # {free space: its rows}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if (at := bisect_left(rooms, lengths[i])) == len(rooms):
            row, room = len(rows), size
            rows.append([])
        else:
            room = rooms[at]
            row = having[room].pop()
            if not having[room]:
                del rooms[at]
        rows[row].append(i)
        if left := room - lengths[i]:
            if not having[left]:
                insort(rooms, left)
            having[left].append(row)
    return rows
