"""Descriptions of a flattened batch: which rows attend to which cached tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """A varlen batch over a paged cache. Requests lie one after the other in the flattened rows, those that compute
    exactly one token ("decodes") first.

        rows      | d0 | d1 | d2 | p0 p0 p0 p0 | p1 p1 |        counts   = 1 1 1 4 2
        request i sees cached tokens 0 .. contexts[i] + counts[i] - 1, causally; contexts[i] were computed before

    `tables` [requests, max_blocks] int32: block ids in token order; entries past the end are any valid id.
    `lengths` [requests] int32: contexts + counts. `slots` [rows] int64: where each row's key and value is written,
    `block * block_tokens + offset`. `starts` [requests + 1] int32: first row of each request.
    """

    counts: list[int]
    contexts: list[int]
    n_decodes: int
    block_tokens: int
    tables: Tensor
    lengths: Tensor
    slots: Tensor
    starts: Tensor
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, count: int, context: int) -> Tensor:
        """`causal_mask` on this batch's device, made once for all layers."""
        found = self._masks.get((count, context))
        if found is None:
            found = self._masks[count, context] = causal_mask(count, context, self.slots.device)
        return found

    def chunks(self) -> list[tuple[int, int, int, int]]:
        """(request, first row, count, context) of every request past the decodes."""
        found, row = [], self.n_decodes
        for i in range(self.n_decodes, len(self.counts)):
            found.append((i, row, self.counts[i], self.contexts[i]))
            row += self.counts[i]
        return found


class Segments:
    """Rows that attend among themselves: segment i is the next `lengths[i]` rows. Those of one length run together."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        starts = [0, *accumulate(self.lengths)]
        by_length: dict[int, list[int]] = {}
        for start, length in zip(starts, self.lengths):
            by_length.setdefault(length, []).append(start)
        self.groups: list[tuple[Tensor | slice, int, int]] = []
        """(rows, segments, length) per length."""
        for length, firsts in by_length.items():
            rows: Tensor | slice = slice(firsts[0], firsts[0] + len(firsts) * length)
            if any(b - a != length for a, b in pairwise(firsts)):
                rows = (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten().to(device)
            self.groups.append((rows, len(firsts), length))


def causal_mask(count: int, context: int, device: torch.device) -> Tensor:
    """[count, context + count] bool, True where row i may see column j: j <= context + i."""
    columns = torch.arange(context + count, device=device)
    rows = torch.arange(context, context + count, device=device)
    return columns[None, :] <= rows[:, None]
