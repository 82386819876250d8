"""What the layers of a decoder are given in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hydrainfer.ops import KV, AttentionBatch, ScanBatch


class LayerCache(NamedTuple):
    """One layer's cache in one step: its tensors `parts` by name, `[n_blocks, *shape]` each, and the batch with this
    cache's block tables. `wait()` is called before the layer: what it reads may still be on its way to the device."""

    parts: Mapping[str, Tensor]
    batch: AttentionBatch | ScanBatch
    wait: Callable[[], None] = lambda: None

    @property
    def kv(self) -> KV:
        """Keys and values of every token."""
        return KV(self.parts["keys"], self.parts["values"])


class LastRows(NamedTuple):
    """The rows whose hidden states are wanted, `rows` [n] int64. `batches`: their requests as decodes, for the last
    layer with a cache of its own and each one behind it; None for a layer without attention."""

    rows: Tensor
    batches: Sequence[AttentionBatch | None]


class DeepRows(NamedTuple):
    """Visual features for the first layers: `features[:, i]` is added to `rows` after layer i. `rows` [n] int64,
    `features` [n, levels, hidden]."""

    rows: Tensor
    features: Tensor


class Turn(NamedTuple):
    """The rotation of one layer: `cos`, `sin` [rows, dim / 2]; see `angles`. `growth` [rows, 1, 1]: what queries are
    multiplied by; None if by nothing."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None

    def of(self, rows: Tensor) -> Turn:
        return Turn(self.cos[rows], self.sin[rows], None if self.growth is None else self.growth[rows])


@dataclass(slots=True)
class Pass:
    """What the layers of one call share. `fresh`: the keys and values that a layer has computed, by its number, for
    layers that also read them. `given` [rows, layers, width]: per-layer embeddings."""

    turns: list[Turn]
    fresh: dict[int, KV]
    given: Tensor | None = None
