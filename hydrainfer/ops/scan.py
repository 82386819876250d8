"""Descriptions of a flattened batch for recurrent layers: which rows continue from which state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class ScanRows(NamedTuple):
    """Rows of one request. They continue from the state in block `source` (-1: from none) and leave theirs in block
    `target`, which may be the same."""

    rows: slice
    source: int
    target: int


@dataclass(slots=True)
class ScanBatch:
    """A batch for recurrent layers. Rows and requests lie as in `AttentionBatch`. The first `n_decodes` rows are
    requests of one row each: row i continues from the state in block `sources[i]` (-1: from none) and leaves its own in
    block `targets[i]`; both int64 [n_decodes]. `waves`: the parts in which they are computed, one after the other; a
    row may continue from a state that an earlier one left. `pieces`: the other rows, in order; a piece may continue
    from the state that the piece before it left.

    `captured`: a CUDA graph computes the batch. Then rows whose target is -1 are padding, which leaves no state."""

    n_decodes: int
    sources: Tensor
    targets: Tensor
    pieces: Sequence[ScanRows]
    captured: bool = False
    waves: Sequence[slice] = ()

    def __post_init__(self) -> None:
        if not self.waves and self.n_decodes:
            self.waves = (slice(0, self.n_decodes),)

    @property
    def chunks(self) -> ScanBatch:
        """The batch without its decodes. Rows count from the first piece's first row."""
        n = self.n_decodes
        moved = [p._replace(rows=slice(p.rows.start - n, p.rows.stop - n)) for p in self.pieces]
        return replace(self, n_decodes=0, sources=self.sources[:0], targets=self.targets[:0], pieces=moved, waves=())


class DeltaLayer(NamedTuple):
    """The small weights of a layer with the gated delta rule, without the matrices around it. `conv` [channels, width],
    for queries, keys and values in that order; `norm` [dim], for each head's output, with its `eps`; `log_rate` and
    `step_bias` [heads] float32."""

    conv: Tensor
    norm: Tensor
    log_rate: Tensor
    step_bias: Tensor
    eps: float


def state_of(states: Tensor, sources: Tensor) -> Tensor:
    """Copies of the blocks `sources` of `states` [blocks, ...], stacked as [n, ...]; zeros where a source is -1."""
    found = states[sources.clamp(min=0)]
    return torch.where((sources < 0).view(-1, *[1] * (found.dim() - 1)), 0.0, found)
