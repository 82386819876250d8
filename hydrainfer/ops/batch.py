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

_TILES = {"cpu": 128, "cuda": 2048}
"""Query rows per attention call, by device. On a CPU, 64 to 128 measured best for a prompt of 600 tokens. On a GPU a
call is several launches."""


class Captured(NamedTuple):
    """The shape that a CUDA graph was captured for: `rows` decodes over one cache, whose block tables hold at most
    `pages` blocks together."""

    cache: str
    rows: int
    pages: int


class KV(NamedTuple):
    """Keys and values, either of rows [rows, kv_heads, dim] or of one layer's cache [blocks, block_tokens, kv_heads,
    dim]. Keys and values may differ in `dim`."""

    keys: Tensor
    values: Tensor


class HeadNorms(NamedTuple):
    """The weights [head_dim] by which the heads of queries and of keys are normalised, each head by itself, before they
    are rotated: in the heads' dtype or, see `rms_norm_wide`, in float32."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(slots=True)
class AttentionBatch:
    """A varlen batch over a paged cache. Requests lie one after the other in the flattened rows. Those that compute
    exactly one token ("decodes") come first.

        rows      | d0 | d1 | d2 | p0 p0 p0 p0 | p1 p1 |        counts   = 1 1 1 4 2
        request i sees cached tokens 0 .. contexts[i] + counts[i] - 1, causally; contexts[i] were computed before

    Token indices count from the first token in the request's block table. That is not the request's first token once
    blocks have left a sliding window.
    `tables` [requests, max_blocks] int32: block ids in token order; entries past the end are any valid id.
    `lengths` [requests] int32: contexts + counts. `slots` [rows] int64: where each row's key and value is written,
    `block * block_tokens + offset`. `starts` [requests + 1] int32: first row of each request.

    `window`: a token sees only the last `window` tokens, itself included; 0: no limit. `spans`: (request, first, stop),
    the tokens of one picture. They lie in one chunk and see each other in both directions.

    `shares`: several decodes may be rows of one request, each of which sees the keys of those before it.

    `skips`: a CUDA graph computes the batch, and rows whose slot is -1 are padding, which is not written.
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
    skips: bool = False
    shares: bool = False
    plan: Any = None
    """The result of the chosen attention's `prepare`, if it has one."""
    _tiles: list[list[Tile]] | None = None

    def seen_from(self, token: int) -> int:
        """The first token that `token` sees."""
        return max(0, token - self.window + 1) if self.window else 0

    def spans_of(self, request: int) -> list[tuple[int, int]]:
        return [(first, stop) for owner, first, stop in self.spans if owner == request]

    def tiles(self) -> list[list[Tile]]:
        """The tiles of query rows of each request after the decodes. They are made once and used by all layers."""
        if self._tiles is None:
            masks: dict[tuple, Tensor] = {}
            rows = [0, *accumulate(self.counts)]
            later = range(self.n_decodes, len(self.counts))
            self._tiles = [self._tiles_of(i, rows[i], masks) for i in later]
        return self._tiles

    def _tiles_of(self, request: int, row: int, masks: dict[tuple, Tensor]) -> list[Tile]:
        """The tiles of one request. Each covers only the keys that its rows see, because kernels also spend time on
        masked keys."""
        context, found, tile = self.contexts[request], [], _TILES[self.slots.device.type]
        stop, spans = context + self.counts[request], self.spans_of(request)
        for first in range(context, stop, tile):
            n = min(tile, stop - first)
            met = [span for span in spans if span[0] < first + n and first < span[1]]
            low, high = self.seen_from(first), max([first + n, *(span[1] for span in met)])
            key = (n, first - low, high - low, *((a - low, b - low) for a, b in met))
            plain = low == 0 == first and not met and not (self.window and n > self.window)
            if not plain and key not in masks:
                masks[key] = visible(first, n, range(low, high), self.slots.device, self.window, met)
            found.append(Tile(slice(row + first - context, row + first - context + n), low, high, masks.get(key)))
        return found


class Tile(NamedTuple):
    """Query rows that attend together: rows of the batch, the tokens `low .. high-1` that at least one of them sees,
    and the mask [rows, high - low]. The mask is None for the first rows of a request, each of which sees the rows up to
    itself."""

    rows: slice
    low: int
    high: int
    mask: Tensor | None


class Segments:
    """Rows that attend only within their segment. Segment i is the next `lengths[i]` rows; a length may be 0.

    `starts` int32 [segments + 1]: the first row of each segment, then the end, on the device; passed in if a CUDA graph
    reads it. `longest`: no segment is longer; passed in if a CUDA graph must also take longer segments."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, starts: Tensor | None = None, longest: int = 0
    ) -> None:
        self.lengths = list(lengths)
        self.starts = to_device(starts_of(self.lengths), device) if starts is None else starts
        self.longest = max(longest, *self.lengths, 0)

    @cached_property
    def groups(self) -> list[tuple[Tensor | slice, int, int]]:
        """(rows, number of segments, length) for each distinct length; one attention call computes one group."""
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


class GridRows(NamedTuple):
    """Rows that are patches of pictures. Grid (t, h, w) is the next t frames of h x w squares, each of merge x merge
    patches, which lie one after the other. `places`, `sizes` [rows, 2] float32, on the device: a patch's row and
    column, and its frame's height and width in patches."""

    grids: Sequence[tuple[int, int, int]]
    merge: int
    places: Tensor
    sizes: Tensor


def starts_of(lengths: Sequence[int]) -> np.ndarray:
    """`Segments.starts` as an array on the host."""
    return np.array([0, *accumulate(lengths)], dtype=np.int32)


def visible(
    first: int,
    count: int,
    seen: range,
    device: torch.device,
    window: int = 0,
    spans: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """The attention mask, bool [count, len(seen)], of tokens `first .. first+count-1` over the tokens `seen`. True
    where the row's token sees the column's: the column is not after the row, or both are in one of `spans`; and the
    column is fewer than `window` tokens before the row (0: no limit)."""
    rows = torch.arange(first, first + count, device=device)[:, None]
    columns = torch.arange(seen.start, seen.stop, device=device)[None]
    mask = columns <= rows
    for low, high in spans:
        mask |= (rows >= low) & (rows < high) & (columns >= low) & (columns < high)
    return mask & (columns > rows - window) if window else mask
