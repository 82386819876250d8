"""Block tables of running requests, kept between steps so that a decode step copies only what is new."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hydrainfer.cache import CacheSpec
from hydrainfer.core import LiveSequence


class _Entry(NamedTuple):
    seq: LiveSequence
    attempt: int
    remapped: int
    first: int
    row: int
    n_filled: int


class BlockTables:
    """A growing int32 array [rows, max_blocks] of block tables in one cache, with one row per request seen lately.

    A row is rebuilt if its request was preempted since (`attempt`), its blocks were replaced (`remapped`) or it gave
    some back at the front (`first_block`). When space runs out, the rows of all requests outside the present batch are
    reclaimed.
    """

    def __init__(self, spec: CacheSpec, n_rows: int = 64, n_blocks: int = 64) -> None:
        self.spec = spec
        self._name = spec.name
        self._data = np.zeros((n_rows, n_blocks), dtype=np.int32)
        self._entries: dict[str, _Entry] = {}
        self._free = list(range(n_rows - 1, -1, -1))

    def gather(self, sequences: list[LiveSequence]) -> np.ndarray:
        """The block tables, a fresh int32 array [len(sequences), longest table]. Entries past a request's last block
        repeat its first block, because other values may not be ids in this cache."""
        rows, longest = [], 1
        for seq in sequences:
            blocks = seq.hold.blocks[self._name]
            n = len(blocks)
            entry = self._entries.get(seq.request.id)
            if entry is None or entry.n_filled != n or not self._holds(entry, seq):
                entry = self._update(seq, blocks, entry, sequences)
            rows.append(entry.row)
            longest = max(longest, n)
        return self._data[rows, :longest]

    def firsts(self, sequences: list[LiveSequence]) -> np.ndarray | None:
        """The number of tokens before each sequence's block table, int64 [len(sequences)]; None if all are 0."""
        if not self.spec.slides:
            return None
        blocks = np.array([seq.hold.first_block.get(self._name, 0) for seq in sequences], dtype=np.int64)
        return blocks * self.spec.block_tokens if blocks.any() else None

    def _update(self, seq: LiveSequence, blocks: list[int], entry: _Entry | None, batch: list[LiveSequence]) -> _Entry:
        n = len(blocks)
        known = 0
        if entry is None:
            row = self._row_for(batch)
        else:
            row = entry.row
            if entry.n_filled <= n and self._holds(entry, seq):
                known = entry.n_filled
        if n > self._data.shape[1]:
            wider = np.zeros((self._data.shape[0], max(n, 2 * self._data.shape[1])), dtype=np.int32)
            wider[:, : self._data.shape[1]] = self._data
            wider[:, self._data.shape[1] :] = self._data[:, :1]
            self._data = wider
        self._data[row, known:n] = blocks[known:]
        if not known and n:
            self._data[row, n:] = blocks[0]
        first = seq.hold.first_block.get(self._name, 0)
        self._entries[seq.request.id] = entry = _Entry(seq, seq.attempt, seq.hold.remapped, first, row, n)
        return entry

    def _row_for(self, batch: list[LiveSequence]) -> int:
        if not self._free:
            present = {seq.request.id for seq in batch}
            for id_ in [i for i in self._entries if i not in present]:
                self._free.append(self._entries.pop(id_).row)
        if not self._free:
            n = self._data.shape[0]
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
            self._free = list(range(2 * n - 1, n - 1, -1))
        return self._free.pop()

    def _holds(self, entry: _Entry, seq: LiveSequence) -> bool:
        """Whether the blocks in a row are still the first blocks that the sequence holds."""
        same = entry.seq is seq and entry.attempt == seq.attempt and entry.remapped == seq.hold.remapped
        return same and (not self.spec.slides or entry.first == seq.hold.first_block.get(self._name, 0))
