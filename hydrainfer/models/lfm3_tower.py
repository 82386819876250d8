"""LFM3-VL's vision tower: gated convolutions over the grid of patches, attention in some layers.

frames -> patches -> layers -> every merge x merge rows become one, projected
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.lfm import Lfm3VisionConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.frames import FrameTower
from hydrainfer.models.patches import PatchLayout
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import GridRows, HeadNorms, OpSet

_PROJECTOR_EPS = 1e-6


@dataclass(slots=True)
class _Layer:
    """One layer's weights. `into` projects to queries, keys and values; `heads_norm` normalises queries and keys. In a
    layer with a `conv` [hidden, 1, kernel, kernel], `into` projects to two gates and the input of the convolution."""

    norm: Tensor
    into: Tensor
    out: Tensor
    heads_norm: tuple[Tensor, Tensor] | None
    conv: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def make(cls, c: Lfm3VisionConfig, attends: bool, make: Callable[..., Tensor]) -> _Layer:
        dim = c.hidden // c.heads
        return cls(
            norm=make(c.hidden),
            into=make((c.heads + 2 * c.kv_heads) * dim if attends else 3 * c.hidden, c.hidden),
            out=make(c.hidden, c.hidden),
            heads_norm=(make(dim), make(dim)) if attends else None,
            conv=None if attends else make(c.hidden, 1, c.kernel, c.kernel),
            mlp_norm=make(c.hidden),
            gate_up=make(2 * c.intermediate, c.hidden),
            down=make(c.hidden, c.intermediate),
        )

    def slots(self, prefix: str, c: Lfm3VisionConfig) -> dict[str, Slot]:
        gate, up = self.gate_up.chunk(2)
        found = {"operator_norm": self.norm, "ffn_norm": self.mlp_norm}
        found |= {"feed_forward.w1": gate, "feed_forward.w3": up, "feed_forward.w2": self.down}
        if self.heads_norm is not None:
            dim = c.hidden // c.heads
            for letter, part in zip("qkv", self.into.split([c.hidden, c.kv_heads * dim, c.kv_heads * dim])):
                found[f"self_attn.{letter}_proj"] = part
            found |= dict(zip(("self_attn.q_norm", "self_attn.k_norm"), self.heads_norm))
            found["self_attn.out_proj"] = self.out
        if self.conv is not None:
            found |= {"conv.in_proj": self.into, "conv.spatial_conv": self.conv, "conv.out_proj": self.out}
        return {f"{prefix}.{name}.weight": Slot(t) for name, t in found.items()}


class Lfm3Vision(FrameTower):
    """LFM3-VL's vision tower. Its rows: [tokens, the language model's width]."""

    config: Lfm3VisionConfig
    sizes = range(256, 4097, 256)
    """As those of Qwen's towers."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c: Lfm3VisionConfig = config.vision
        super().__init__(c, ops, dtype, device, widest=max(3 * c.hidden, 2 * c.intermediate))

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        self._activation = activation(c.activation, ops)
        self.patch = make(c.hidden, 3 * c.temporal * c.patch**2)
        self.first_norm = make(c.hidden)
        self.layers = [_Layer.make(c, i in c.attending, make) for i in range(c.layers)]
        self.last_norm = make(c.hidden), make(c.hidden)
        widths = c.hidden * c.merge**2, c.projector, config.text.hidden
        self.projection = [
            (make(outer, inner), make(outer) if c.projector_bias else None) for inner, outer in pairwise(widths)
        ]

    @property
    def captures(self) -> bool:
        c = self.config
        packs = c.hidden * self.dtype.itemsize % 16 == 0 and c.kernel == 3  # what the kernel of `grid_conv` takes
        return super().captures and packs and self._ops.captures_grids

    def slots(self) -> dict[str, Slot]:
        found = {"vision.patch_embed.weight": Slot(self.patch), "vision.embedding_norm.weight": Slot(self.first_norm)}
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"vision.layers.{i}", self.config)
        for name, pair in zip(("layer_norm", "linear_1", "linear_2"), (self.last_norm, *self.projection)):
            found |= {f"projector.{name}.{leaf}": Slot(t) for leaf, t in zip(("weight", "bias"), pair) if t is not None}
        return found

    def multiplied(self) -> list[Tensor]:
        layers = [weight for x in self.layers for weight in (x.into, x.out, x.gate_up, x.down)]
        return [self.patch, *layers, *(weight for weight, _ in self.projection)]

    def _forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        c, ops = self.config, self._ops
        x = ops.linear(patches, self.patch)
        x = ops.rms_norm(x, self.first_norm, c.norm_eps)
        for layer in self.layers:
            self._run(layer, x, layout)
        x = F.layer_norm(x, (c.hidden,), *self.last_norm, _PROJECTOR_EPS).unflatten(0, (-1, c.merge**2)).flatten(1)
        first, last = self.projection
        return ops.linear(self._activation(ops.linear(x, *first)), *last)

    def _run(self, layer: _Layer, x: Tensor, layout: PatchLayout) -> None:
        """Run one layer over `x` [rows, hidden], in place."""
        c, ops = self.config, self._ops
        rows = ops.linear(ops.rms_norm(x, layer.norm, c.norm_eps), layer.into)
        if layer.conv is None:
            mixed = self._attend(layer, rows, layout)
        else:
            mixed = ops.grid_conv(rows, layer.conv, GridRows(layout.grids, c.merge, layout.places, layout.sizes))
        ops.linear_add(x, mixed, layer.out)
        inner = ops.linear(ops.rms_norm(x, layer.mlp_norm, c.norm_eps), layer.gate_up)
        ops.linear_add(x, ops.silu_and_mul(inner), layer.down)

    def _attend(self, layer: _Layer, rows: Tensor, layout: PatchLayout) -> Tensor:
        """Attention within each frame: rows of queries, keys and values → [rows, hidden]."""
        c, ops = self.config, self._ops
        dim = c.hidden // c.heads
        assert layer.heads_norm is not None
        heads = rows.unflatten(1, (-1, dim))
        qk, v = heads.split([c.heads + c.kv_heads, c.kv_heads], 1)
        norms = HeadNorms(*layer.heads_norm, c.norm_eps)
        q, k = ops.norm_rope(qk, c.kv_heads, norms, layout.cos, layout.sin, ops)
        k, v = (x.repeat_interleave(c.heads // c.kv_heads, 1) for x in (k, v))
        return ops.attention_segments(q, k, v, layout.frames, dim**-0.5).flatten(1)
