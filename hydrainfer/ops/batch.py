"""Descriptions of a flattened batch: which rows attend to which cached tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydrainfer.ops.pinned import to_device

TILE = 128
"""Query rows per attention call; 64 to 128 measured best for a prompt of 600 tokens."""


class Captured(NamedTuple):
    """What a graph that computes a batch was captured for: decodes of one cache, so many rows, and the most pages that
    their tables may have together."""

    cache: str
    rows: int
    pages: int


class KV(NamedTuple):
    """Keys and values: of rows [rows, kv_heads, dim], or one layer's cache [blocks, block_tokens, kv_heads, dim]. The
    two may differ in `dim`."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class AttentionBatch:
    """A varlen batch over a paged cache. Requests lie one after the other in the flattened rows, those that compute
    exactly one token ("decodes") first.

        rows      | d0 | d1 | d2 | p0 p0 p0 p0 | p1 p1 |        counts   = 1 1 1 4 2
        request i sees cached tokens 0 .. contexts[i] + counts[i] - 1, causally; contexts[i] were computed before

    Tokens count from the first one in the request's table: where blocks fell out of a window, that is not its first.
    `tables` [requests, max_blocks] int32: block ids in token order; entries past the end are any valid id.
    `lengths` [requests] int32: contexts + counts. `slots` [rows] int64: where each row's key and value is written,
    `block * block_tokens + offset`. `starts` [requests + 1] int32: first row of each request.

    `window`: a token sees no token that is so many or more before it; 0: there is no such limit. `spans`: (request,
    first, stop), tokens of one picture, that lie in one chunk and see each other whatever their order.
    """

    counts: list[int]
    contexts: list[int]
    n_decodes: int
    block_tokens: int
    tables: Tensor
    lengths: Tensor
    slots: Tensor
    starts: Tensor
    window: int = 0
    spans: Sequence[tuple[int, int, int]] = ()
    captured: Captured | None = None
    plan: Any = None
    """What the chosen attention's `prepare` made of it, if anything."""
    _tiles: list[list[Tile]] | None = None

    def seen_from(self, token: int) -> int:
        """The first token that `token` sees."""
        return max(0, token - self.window + 1) if self.window else 0

    def spans_of(self, request: int) -> list[tuple[int, int]]:
        return [(first, stop) for owner, first, stop in self.spans if owner == request]

    def tiles(self) -> list[list[Tile]]:
        """For every request past the decodes, its rows in tiles of queries; made once for all layers."""
        if self._tiles is None:
            masks: dict[tuple, Tensor] = {}
            rows = [0, *accumulate(self.counts)]
            later = range(self.n_decodes, len(self.counts))
            self._tiles = [self._tiles_of(i, rows[i], masks) for i in later]
        return self._tiles

    def _tiles_of(self, request: int, row: int, masks: dict[tuple, Tensor]) -> list[Tile]:
        """Each tile sees no further than it must: of what is masked a kernel computes much."""
        context, found = self.contexts[request], []
        stop, spans = context + self.counts[request], self.spans_of(request)
        for first in range(context, stop, TILE):
            n = min(TILE, stop - first)
            met = [span for span in spans if span[0] < first + n and first < span[1]]
            low, high = self.seen_from(first), max([first + n, *(span[1] for span in met)])
            key = (n, first - low, high - low, *((a - low, b - low) for a, b in met))
            plain = low == 0 == first and not met and not (self.window and n > self.window)
            if not plain and key not in masks:
                masks[key] = visible(first, n, range(low, high), self.slots.device, self.window, met)
            found.append(Tile(slice(row + first - context, row + first - context + n), low, high, masks.get(key)))
        return found


class Tile(NamedTuple):
    """Queries that attend together: rows of the batch, the tokens `low .. high-1` that some of them see, and the mask
    [rows, high - low] of which; None for the first rows of a request, each of which sees those up to itself."""

    rows: slice
    low: int
    high: int
    mask: Tensor | None


class Segments:
    """Rows that attend among themselves: segment i is the next `lengths[i]` rows, or none where that is 0.

    `starts` int32 [segments + 1]: the first row of each, and the end, on the device; given, if a graph reads them.
    `longest`: no segment is longer; given, if a graph is to take longer ones."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, starts: Tensor | None = None, longest: int = 0
    ) -> None:
        self.lengths = list(lengths)
        self.starts = to_device(starts_of(self.lengths), device) if starts is None else starts
        self.longest = max(longest, *self.lengths, 0)

    @cached_property
    def groups(self) -> list[tuple[Tensor | slice, int, int]]:
        """(rows, segments, length) per length: what a call of its own computes."""
        by_length: dict[int, list[int]] = {}
        for start, length in zip(starts_of(self.lengths).tolist(), self.lengths):
            if length:
                by_length.setdefault(length, []).append(start)
        groups = []
        for length, firsts in by_length.items():
            rows: Tensor | slice = slice(firsts[0], firsts[0] + len(firsts) * length)
            if any(b - a != length for a, b in pairwise(firsts)):
                rows = to_device((np.array(firsts)[:, None] + np.arange(length)).flatten(), self.starts.device)
            groups.append((rows, len(firsts), length))
        return groups


def starts_of(lengths: Sequence[int]) -> np.ndarray:
    """`Segments.starts` on the host."""
    return np.array([0, *accumulate(lengths)], dtype=np.int32)


def visible(
    first: int,
    count: int,
    seen: range,
    device: torch.device,
    window: int = 0,
    spans: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """[count, len(seen)] bool, True where the token of the row, `first` and those after it, sees that of the column:
    one not after it, or of the same one of `spans`; and in either case fewer than `window` before it, unless that is
    0."""
    rows = torch.arange(first, first + count, device=device)[:, None]
    columns = torch.arange(seen.start, seen.stop, device=device)[None]
    mask = columns <= rows
    for low, high in spans:
        mask |= (rows >= low) & (rows < high) & (columns >= low) & (columns < high)
    return mask & (columns > rows - window) if window else mask
