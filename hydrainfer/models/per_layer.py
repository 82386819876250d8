"""Per-layer embeddings, as in Gemma 4's small models: each layer adds an embedding of the token that is its own, with a
part that depends on the token's hidden state before the first layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TextConfig
from hydrainfer.models.slots import Slot, Weight, empty, matrix
from hydrainfer.ops import OpSet

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""RMS norm: rows, weight and epsilon → rows."""


class PerLayerInputs:
    """What all layers of a model are given. `table` [vocab, layers * width] is read by token id; `projection`
    [layers * width, hidden] is of the hidden state."""

    def __init__(self, c: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._ops = c, ops
        width = c.layers * c.per_layer
        self.table = empty((c.per_layer_vocab, width), dtype, device)
        self.projection = matrix(ops, (width, c.hidden), dtype, device)
        self.norm = empty((c.per_layer,), dtype, device)
        self._scale = float(torch.tensor(c.per_layer**0.5).to(dtype))

    def slots(self) -> dict[str, Slot]:
        return {
            "text.embed_tokens_per_layer.weight": Slot(self.table),
            "text.per_layer_model_projection.weight": Slot(self.projection),
            "text.per_layer_projection_norm.weight": Slot(self.norm),
        }

    def of(self, x: Tensor, ids: Tensor, norm: Norm) -> Tensor:
        """The inputs [rows, layers, width] for hidden states `x` [rows, hidden] of the tokens `ids` [rows]."""
        c = self._config
        projected = self._ops.linear(x, self.projection) * c.hidden**-0.5
        wide = norm(projected.view(-1, c.per_layer), self.norm, c.norm_eps).view(-1, c.layers, c.per_layer)
        own = F.embedding(ids, self.table).mul_(self._scale).view_as(wide)
        return wide.add_(own).mul_(2.0**-0.5)


@dataclass(slots=True)
class LayerInput:
    """One layer's way to add what it is given: x += norm(out(gelu(gate(x)) * given))."""

    gate: Weight
    out: Weight
    norm: Tensor

    @classmethod
    def make(cls, c: TextConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> LayerInput:
        return cls(
            gate=matrix(ops, (c.per_layer, c.hidden), dtype, device),
            out=matrix(ops, (c.hidden, c.per_layer), dtype, device),
            norm=empty((c.hidden,), dtype, device),
        )

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {
            f"{prefix}.per_layer_input_gate.weight": Slot(self.gate),
            f"{prefix}.per_layer_projection.weight": Slot(self.out),
            f"{prefix}.post_per_layer_input_norm.weight": Slot(self.norm),
        }

    def add(self, x: Tensor, given: Tensor, eps: float, ops: OpSet, norm: Norm) -> None:
        """Add to `x` [rows, hidden], in place, what the layer is `given` [rows, width]."""
        gated = F.gelu(ops.linear(x, self.gate), approximate="tanh") * given
        x.add_(norm(ops.linear(gated, self.out), self.norm, eps))
