"""Mixers, which replace attention in some layers and keep a state of fixed size per request. The matrices before and
after a mixer belong to `LlamaLayer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from hydrainfer.checkpoint import Recurrence, TextConfig
from hydrainfer.models.slots import Slot, Weight, empty
from hydrainfer.ops import DeltaLayer, OpSet, ScanBatch


class Mixer(Protocol):
    """One layer's mixer. `in_width`, `out_width`: the widths of its input and output rows; `bias`: whether the products
    before and after it add a bias."""

    in_width: int
    out_width: int
    bias: bool

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The slots of the mixer's own tensors, by canonical name."""

    def around(self, into: Weight, out: Weight) -> dict[str, Weight]:
        """The parts of the matrices before and after the mixer, or of their biases, by the names of the tensors that
        fill them."""

    def mix(self, rows: Tensor, parts: Mapping[str, Tensor], batch: ScanBatch) -> Tensor:
        """[rows, in_width] → [rows, out_width]. Reads the requests' states in `parts` and leaves new ones there."""


class ShortConv:
    """LFM2's mixer: a convolution over the last few tokens, between two gates."""

    def __init__(self, c: Recurrence, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.in_width, self.out_width, self.bias = 3 * c.channels, c.channels, c.bias
        self._ops = ops
        self.weight = empty((c.channels, c.width), dtype, device)
        self.conv_bias = empty((c.channels,), dtype, device) if c.bias else None

    def slots(self, prefix: str) -> dict[str, Slot]:
        channels, width = self.weight.shape
        found = {f"{prefix}.conv.conv.weight": Slot(self.weight, (channels, 1, width))}
        return found if self.conv_bias is None else found | {f"{prefix}.conv.conv.bias": Slot(self.conv_bias)}

    def around(self, into: Weight, out: Weight) -> dict[str, Weight]:
        return {"conv.in_proj": into, "conv.out_proj": out}

    def mix(self, rows: Tensor, parts: Mapping[str, Tensor], batch: ScanBatch) -> Tensor:
        before, after, x = rows.chunk(3, dim=-1)
        return after * self._ops.short_conv(before * x, self.weight, self.conv_bias, parts["conv"], batch)


class GatedDelta:
    """The mixer of Qwen3-Next and Qwen3.5: the gated delta rule on queries, keys and values after a short convolution,
    then a norm per head and a gate."""

    bias = False

    def __init__(self, c: Recurrence, eps: float, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self._ops = c, ops
        self.out_width = c.value_heads * c.value_dim
        self._widths = [c.channels, self.out_width, c.value_heads, c.value_heads]
        self.in_width = sum(self._widths)
        self._layer = DeltaLayer(
            conv=empty((c.channels, c.width), dtype, device),
            norm=empty((c.value_dim,), dtype, device),
            log_rate=empty((c.value_heads,), torch.float32, device),
            step_bias=empty((c.value_heads,), torch.float32, device),
            eps=eps,
        )

    def slots(self, prefix: str) -> dict[str, Slot]:
        layer, (channels, width) = self._layer, self._layer.conv.shape
        return {
            f"{prefix}.linear_attn.conv1d.weight": Slot(layer.conv, (channels, 1, width)),
            f"{prefix}.linear_attn.norm.weight": Slot(layer.norm),
            f"{prefix}.linear_attn.A_log": Slot(layer.log_rate),
            f"{prefix}.linear_attn.dt_bias": Slot(layer.step_bias),
        }

    def around(self, into: Weight, out: Weight) -> dict[str, Weight]:
        grouped = {"qkvz": sum(self._widths[:2]), "ba": sum(self._widths[2:])}
        widths = grouped if self.config.grouped else dict(zip(("qkv", "z", "b", "a"), self._widths))
        cuts = into.split(list(widths.values()))
        parts = {f"linear_attn.in_proj_{name}": part for name, part in zip(widths, cuts)}
        return {**parts, "linear_attn.out_proj": out}

    def mix(self, rows: Tensor, parts: Mapping[str, Tensor], batch: ScanBatch) -> Tensor:
        split = self._by_head(rows) if self.config.grouped else rows.split(self._widths, -1)
        return self._ops.gated_delta(*split, self._layer, parts["conv"], parts["matrix"], batch)

    def _by_head(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The qkv, gate, beta and step of `rows`, in which they are grouped by key head."""
        c, group = self.config, self.config.value_heads // self.config.key_heads
        qkvz, ba = rows.split([sum(self._widths[:2]), sum(self._widths[2:])], -1)
        values = group * c.value_dim
        q, k, v, z = qkvz.unflatten(1, (c.key_heads, -1)).split([c.key_dim, c.key_dim, values, values], -1)
        beta, step = ba.unflatten(1, (c.key_heads, -1)).split([group, group], -1)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
        return qkv, z.flatten(1), beta.flatten(1), step.flatten(1)


def mixer_of(c: TextConfig, layer: int, ops: OpSet, dtype: torch.dtype, device: torch.device) -> Mixer | None:
    """The mixer of a layer; None if it has attention."""
    recurrence = c.recurrence
    if recurrence is None or layer not in recurrence.layers:
        return None
    if recurrence.kind == "conv":
        return ShortConv(recurrence, ops, dtype, device)
    return GatedDelta(recurrence, c.norm_eps, ops, dtype, device)
