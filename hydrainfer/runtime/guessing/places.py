"""Where a batch's guesses are made: behind the last token of each sequence that was sampled and is right.

the batch's rows       a  b  c  x  y        c, x and y were sampled from; x and y are drafts
their tokens next      b  c  x  y' z        of which x was right and y' is what came instead of y
                                ^           so guesses are of what follows y'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hydrainfer.cache import CacheSpec
from hydrainfer.core import TokenWork
from hydrainfer.models import LayerCache
from hydrainfer.ops import AttentionBatch, OpSet, to_device, upload
from hydrainfer.runtime.packing import PackedTokens

Guesses = dict[int, tuple[int, ...]]
"""By the number of the work item, what may follow the tokens that were sampled for it."""


class Passed(NamedTuple):
    """A batch behind its pass: what was packed and copied to the device, the caches of all layers, and the hidden
    states [rows, hidden] of every row, if the guesser reads them."""

    packed: PackedTokens
    on: Mapping[str, Tensor]
    caches: list[LayerCache]
    hidden: Tensor | None


class Guesser(Protocol):
    """Who guesses on the device. `reads_hidden`: whether it needs the hidden states of every row. `usual`: whether the
    last call took as long as guesses usually do.

    `ahead` reads from the sequences what `guess` needs, on the caller's thread; they may change later. `guess` returns
    up to `n` guesses behind each item that sampled; `sampled` int64 [sampled rows], None if none did. It runs after
    every batch, also where `n` is 0."""

    reads_hidden: ClassVar[bool]
    usual: bool

    def ahead(self, packed: PackedTokens, work: list[TokenWork]) -> Any: ...

    def guess(self, work: list[TokenWork], ahead: Any, passed: Passed, sampled: Tensor | None, n: int) -> Guesses: ...


class Place(NamedTuple):
    """The row behind whose sampled token an item's guesses come: its number, that of its request, that of the token
    among the batch's sampled ones and that of the item's first, and how many slots there are behind the row."""

    item: int
    row: int
    request: int
    sampled: int
    first: int
    n_behind: int


def slots_of(work: list[TokenWork], specs: Sequence[CacheSpec]) -> list[int]:
    """By work item, for how many tokens from the first on its sequence has blocks in all of these caches."""
    ends = []
    for w in work:
        hold = w.seq.hold
        n = min(
            hold.first_block.get(s.name, 0) * s.block_tokens + len(hold.blocks[s.name]) * s.block_tokens for s in specs
        )
        ends.append(n)
    return ends


def places_of(
    work: list[TokenWork], packed: PackedTokens, n_slots: list[int] | None, sampled: list[int]
) -> list[Place]:
    """The places of all items that sample. `n_slots`: as from `slots_of`; None: as many as anybody wants."""
    places, first = list[Place](), 0
    for item, w in enumerate(work):
        if not w.sample:
            continue
        pairs = zip(w.drafts, sampled[first : first + len(w.drafts)])
        n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        at = first + n_right
        last = w.start + w.count - 1 - len(w.drafts) + n_right  # the row's token among all of the sequence
        n_behind = 1 << 30 if n_slots is None else n_slots[item] - last - 1
        places.append(Place(item, packed.sample_rows[at], packed.sample_requests[at], at, first, n_behind))
        first += 1 + len(w.drafts)
    return places


class Steps:
    """One row for each of some places, which goes on from step to step in the paged cache `spec`."""

    def __init__(
        self, ops: OpSet, device: torch.device, spec: CacheSpec, packed: PackedTokens, places: Sequence[Place]
    ) -> None:
        page = packed.paged[spec.name]
        at = [page.contexts[p.request] + p.row - int(packed.starts[p.request]) for p in places]
        self._ops, self._spec, self._at = ops, spec, np.array(at, dtype=np.int64)
        self._tables = Tables.of(page.tables[[p.request for p in places]], device)

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with these alone."""
        self._tables, self._at = self._tables.of_rows(chosen), self._at[chosen]

    def decodes(self, ahead: int) -> AttentionBatch:
        """Rows that lie `ahead` behind the places', as decodes."""
        return decodes(self._ops, self._tables, self._at + ahead, self._spec.block_tokens, self._spec.window)


class Tables(NamedTuple):
    """Block tables [sequences, blocks] int32, on the host and on the device."""

    host: np.ndarray
    on: Tensor

    @classmethod
    def of(cls, host: np.ndarray, device: torch.device) -> Tables:
        return cls(host, to_device(host, device))

    def of_rows(self, chosen: Sequence[int]) -> Tables:
        return Tables.of(self.host[list(chosen)], self.on.device)


def decodes(ops: OpSet, tables: Tables, at: np.ndarray, block_tokens: int, window: int) -> AttentionBatch:
    """One row of each sequence, at the positions `at`."""
    n = len(at)
    blocks, offsets = np.divmod(at, block_tokens)
    slots = tables.host[np.arange(n), blocks].astype(np.int64) * block_tokens + offsets
    lengths, starts = (at + 1).astype(np.int32), np.arange(n + 1, dtype=np.int32)
    on = upload({"slots": slots, "lengths": lengths, "starts": starts}, tables.on.device)
    batch = AttentionBatch(
        counts=[1] * n,
        contexts=at.tolist(),
        n_decodes=n,
        block_tokens=block_tokens,
        tables=tables.on,
        lengths=on["lengths"],
        slots=on["slots"],
        starts=on["starts"],
        window=window,
    )
    ops.prepare(batch)
    return batch
