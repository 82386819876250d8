"""The vision transformers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures of any sizes, many in one pass.

frames -> patches -> blocks, each segment of rows by itself -> every merge x merge rows become one
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.qwen_vl import QwenVisionConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.frames import FrameTower
from hydrainfer.models.patches import PatchLayout
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet, Segments

_EPS = 1e-6


@dataclass(slots=True)
class _Block:
    """One layer's weights; a norm is a weight and perhaps a bias."""

    norm_1: tuple[Tensor, ...]
    norm_2: tuple[Tensor, ...]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    def slots(self, prefix: str, gated: bool) -> dict[str, Slot]:
        found = _named(f"{prefix}.norm1", self.norm_1) | _named(f"{prefix}.norm2", self.norm_2)
        found |= _named(f"{prefix}.attn.qkv", self.qkv) | _named(f"{prefix}.attn.proj", self.out)
        if not gated:
            return found | _named(f"{prefix}.mlp.fc1", self.up) | _named(f"{prefix}.mlp.fc2", self.down)
        gate, up = zip(*(t.chunk(2) for t in self.up))
        found |= _named(f"{prefix}.mlp.gate_proj", gate) | _named(f"{prefix}.mlp.up_proj", up)
        return found | _named(f"{prefix}.mlp.down_proj", self.down)


@dataclass(slots=True)
class _Merger:
    """The weights that merge patches into tokens. `late`: the norm comes after merging."""

    norm: tuple[Tensor, ...]
    fc_1: tuple[Tensor, Tensor]
    fc_2: tuple[Tensor, Tensor]
    late: bool = False

    def slots(self, prefix: str) -> dict[str, Slot]:
        return (
            _named(f"{prefix}.norm", self.norm)
            | _named(f"{prefix}.fc1", self.fc_1)
            | _named(f"{prefix}.fc2", self.fc_2)
        )


def _named(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Slot]:
    return {f"{name}.{leaf}": Slot(t) for leaf, t in zip(("weight", "bias"), tensors)}


class QwenVision(FrameTower):
    """The vision tower of the Qwen-VL models. Its rows: [tokens, out * (1 + levels)]."""

    config: QwenVisionConfig
    sizes = range(256, 4097, 256)
    """More patches keep a GPU busy for longer than kernel launches take. Up to 255 patches of a pass are padding."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c: QwenVisionConfig = config.vision
        super().__init__(c, ops, dtype, device, max(3 * c.hidden, c.intermediate * (1 + c.gated)), c.window)
        self._activation = activation(c.activation, ops)

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        def norm(width: int) -> tuple[Tensor, ...]:
            return (make(width),) if c.gated else (make(width), make(width))

        def linear(inner: int, outer: int) -> tuple[Tensor, Tensor]:
            return make(outer, inner), make(outer)

        self.patch = make(c.hidden, 3 * c.temporal * c.patch**2)
        self.patch_bias = make(c.hidden) if c.patch_bias else None
        self.table = make(c.grid**2, c.hidden) if c.grid else None
        self.blocks = [
            _Block(
                norm(c.hidden),
                norm(c.hidden),
                qkv=linear(c.hidden, 3 * c.hidden),
                out=linear(c.hidden, c.hidden),
                up=linear(c.hidden, c.intermediate * (1 + c.gated)),
                down=linear(c.intermediate, c.hidden),
            )
            for _ in range(c.layers)
        ]
        wide = c.hidden * c.merge**2
        self.merger = _Merger(norm(c.hidden), linear(wide, wide), linear(wide, c.out))
        self.deep = [_Merger(norm(wide), linear(wide, wide), linear(wide, c.out), late=True) for _ in c.levels]

    def slots(self) -> dict[str, Slot]:
        c = self.config
        found = {"vision.patch_embed.proj.weight": Slot(self.patch, (c.hidden, 3, c.temporal, c.patch, c.patch))}
        if self.patch_bias is not None:
            found["vision.patch_embed.proj.bias"] = Slot(self.patch_bias)
        if self.table is not None:
            found["vision.pos_embed.weight"] = Slot(self.table)
        for i, block in enumerate(self.blocks):
            found |= block.slots(f"vision.blocks.{i}", c.gated)
        found |= self.merger.slots("vision.merger")
        for i, merger in enumerate(self.deep):
            found |= merger.slots(f"vision.deepstack_merger_list.{i}")
        return found

    def multiplied(self) -> list[Tensor]:
        block, merger = self.blocks[0], self.merger
        pairs = block.qkv, block.out, block.up, block.down, merger.fc_1, merger.fc_2
        return [self.patch, *(weight for weight, _ in pairs)]

    def _forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        c = self.config
        x = self._ops.linear(patches, self.patch, self.patch_bias)
        if self.table is not None:
            x += self._positions(self.table, layout).to(x.dtype)
        if layout.order is not None:
            x = x.unflatten(0, (-1, c.merge**2))[layout.order].flatten(0, 1)
        deep = {}
        for i, block in enumerate(self.blocks):
            whole = not c.window or i in c.full_layers
            self._run(block, x, layout, layout.frames if whole else layout.windows)
            if i in c.levels:
                deep[i] = self._merge(self.deep[c.levels.index(i)], x)
        merged = self._merge(self.merger, x)
        if layout.back is not None:
            merged = merged[layout.back]
        return torch.cat([merged, *(deep[i] for i in sorted(deep))], dim=1) if deep else merged

    def _positions(self, table: Tensor, layout: PatchLayout) -> Tensor:
        """The learned grid of positions, stretched bilinearly over each picture, corners aligned: [rows, hidden]
        float32."""
        side = self.config.grid
        at = layout.places * (side - 1) / (layout.sizes - 1).clamp(min=1)  # [rows, 2]
        low = at.floor()
        part, low = at - low, low.long()
        high = (low + 1).clamp(max=side - 1)
        found = torch.zeros((at.shape[0], table.shape[1]), device=table.device)
        for rows, row_weight in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
            for columns, weight in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
                found += table[rows * side + columns].float() * (row_weight * weight)[:, None]
        return found

    def _norm(self, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        if len(weights) == 1:
            return self._ops.rms_norm(x, weights[0], _EPS)
        return F.layer_norm(x, (x.shape[-1],), weights[0], weights[1], _EPS)

    def _run(self, block: _Block, x: Tensor, layout: PatchLayout, segments: Segments) -> None:
        """Run one block over `x` [rows, hidden], in place."""
        ops, heads = self._ops, self.config.heads
        dim = self.config.hidden // heads
        qkv = ops.linear(self._norm(x, block.norm_1), *block.qkv).view(-1, 3 * heads, dim)
        ops.rope(qkv[:, : 2 * heads], layout.cos, layout.sin)
        q, k, v = qkv.split(heads, dim=1)
        mixed = ops.attention_segments(q, k, v, segments, dim**-0.5)
        ops.linear_add(x, mixed.flatten(1), *block.out)
        inner = ops.linear(self._norm(x, block.norm_2), *block.up)
        inner = ops.silu_and_mul(inner) if self.config.gated else self._activation(inner)
        ops.linear_add(x, inner, *block.down)

    def _merge(self, merger: _Merger, x: Tensor) -> Tensor:
        """[rows, hidden] → [tokens, out]."""
        n = self.config.merge**2
        if merger.late:
            x = self._norm(x.unflatten(0, (-1, n)).flatten(1), merger.norm)
        else:
            x = self._norm(x, merger.norm).unflatten(0, (-1, n)).flatten(1)
        return self._ops.linear(F.gelu(self._ops.linear(x, *merger.fc_1)), *merger.fc_2)
