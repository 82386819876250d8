"""Descriptions of a flattened batch for layers that sum up tokens: which rows go on from which state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class ScanRows(NamedTuple):
    """Rows of one request that go on from the state in block `source`, or from none if that is -1, and leave theirs in
    block `target`, which may be the same."""

    rows: slice
    source: int
    target: int


@dataclass(slots=True)
class ScanBatch:
    """Rows and requests lie as in `AttentionBatch`. The first `n_decodes` rows are requests of one row each: row i goes
    on from block `sources[i]`, or from nothing if that is -1, and leaves its state in `targets[i]`; both int64
    [n_decodes]. `pieces`: the other rows, in order; one may go on from where the one before it ended."""

    n_decodes: int
    sources: Tensor
    targets: Tensor
    pieces: Sequence[ScanRows]

    @property
    def chunks(self) -> ScanBatch:
        """The pieces by themselves, whose rows begin with the first of theirs."""
        n = self.n_decodes
        moved = [p._replace(rows=slice(p.rows.start - n, p.rows.stop - n)) for p in self.pieces]
        return replace(self, n_decodes=0, sources=self.sources[:0], targets=self.targets[:0], pieces=moved)


class DeltaLayer(NamedTuple):
    """What a layer of the gated delta rule has between the matrices around it. `conv` [channels, width], of queries,
    keys and values, which lie in that order; `norm` [dim], of what each head gives, with its `eps`; `log_rate` and
    `step_bias` [heads] float32."""

    conv: Tensor
    norm: Tensor
    log_rate: Tensor
    step_bias: Tensor
    eps: float


def state_of(states: Tensor, sources: Tensor) -> Tensor:
    """Copies of the blocks `sources` of [blocks, ...], [n, ...]; zeros where one is -1."""
    found = states[sources.clamp(min=0)]
    return torch.where((sources < 0).view(-1, *[1] * (found.dim() - 1)), 0.0, found)
