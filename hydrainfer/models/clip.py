"""CLIP's vision transformer, up to the last layer whose output is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.families.llava import ClipConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.picture import Normalising
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet, Segments


class Blocks(NamedTuple):
    """The properties that all blocks of a tower share."""

    ops: OpSet
    heads: int
    norm_eps: float
    activation: Callable[[Tensor], Tensor]
    known: dict[tuple[int, int], Segments]

    def segments(self, n: int, length: int, device: torch.device) -> Segments:
        """`n` segments of one length. They are kept, because a CUDA graph must not copy from the host."""
        if (n, length) not in self.known:
            self.known[n, length] = Segments([length] * n, device)
        return self.known[n, length]

    def norm(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, weights[0].shape, weights[0], weights[1], self.norm_eps)


class Patches:
    """uint8 [pictures, size, size, 3] → normalised patches [pictures, patches, 3 * patch ** 2]."""

    def __init__(self, pixels: ClipSettings, size: int, patch: int, dtype: torch.dtype, device: torch.device) -> None:
        self._side, self._patch, self._dtype = size // patch, patch, dtype
        self._normalised = Normalising(pixels, device)

    def __call__(self, pixels: Tensor) -> Tensor:
        side, p = self._side, self._patch
        grid = self._normalised(pixels)[:, : side * p, : side * p].unflatten(2, (side, p)).unflatten(1, (side, p))
        return grid.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2).to(self._dtype)


@dataclass(slots=True)
class ClipLayer:
    """One block's weights; query, key and value projections fused, biases beside their weights."""

    norm_1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm_2: tuple[Tensor, Tensor]
    fc_1: tuple[Tensor, Tensor]
    fc_2: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, hidden: int, inner: int, tensor: Callable[..., Tensor]) -> ClipLayer:
        return cls(
            norm_1=(tensor(hidden), tensor(hidden)),
            qkv=(tensor(3 * hidden, hidden), tensor(3 * hidden)),
            out=(tensor(hidden, hidden), tensor(hidden)),
            norm_2=(tensor(hidden), tensor(hidden)),
            fc_1=(tensor(inner, hidden), tensor(inner)),
            fc_2=(tensor(hidden, inner), tensor(hidden)),
        )

    def run(self, x: Tensor, segments: Segments, how: Blocks) -> None:
        """Run this block over `x` [pictures * tokens, hidden] in place. Each picture is a segment."""
        dim = x.shape[1] // how.heads
        q, k, v = how.ops.linear(how.norm(x, self.norm_1), *self.qkv).view(-1, 3, how.heads, dim).unbind(1)
        mixed = how.ops.attention_segments(q, k, v, segments, dim**-0.5)  # [rows, heads, dim]
        how.ops.linear_add(x, mixed.flatten(1), *self.out)
        inner = how.activation(how.ops.linear(how.norm(x, self.norm_2), *self.fc_1))
        how.ops.linear_add(x, inner, *self.fc_2)

    def multiplied(self) -> list[Tensor]:
        return [weight for weight, _ in (self.qkv, self.out, self.fc_1, self.fc_2)]

    def slots(self, prefix: str) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        hidden = self.out[0].shape[0]
        for i, letter in enumerate("qkv"):
            part = tuple(t[i * hidden : (i + 1) * hidden] for t in self.qkv)
            found |= pair_slots(f"{prefix}.self_attn.{letter}_proj", part)
        found |= pair_slots(f"{prefix}.self_attn.out_proj", self.out)
        found |= pair_slots(f"{prefix}.layer_norm1", self.norm_1) | pair_slots(f"{prefix}.layer_norm2", self.norm_2)
        return found | pair_slots(f"{prefix}.mlp.fc1", self.fc_1) | pair_slots(f"{prefix}.mlp.fc2", self.fc_2)


def pair_slots(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Slot]:
    return {f"{name}.weight": Slot(tensors[0]), f"{name}.bias": Slot(tensors[1])}


class Clip:
    """CLIP's tower. It returns the outputs of the layers `config.features`, concatenated."""

    def __init__(self, config: ClipConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops
        self._blocks = Blocks(ops, config.heads, config.norm_eps, activation(config.activation, ops), {})
        h, m, patch = config.hidden, config.intermediate, 3 * config.patch_size**2

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        self.patch = make(h, patch)
        self.class_row = make(h)
        self.positions = make(config.patches + 1, h)
        self.pre_norm = (make(h), make(h))
        self.layers = [ClipLayer.make(h, m, make) for _ in range(max(config.features))]
        self._patches = Patches(config.pixels, config.image_size, config.patch_size, dtype, device)

    def slots(self) -> dict[str, Slot]:
        c = self.config
        found = {
            "vision.embeddings.class_embedding": Slot(self.class_row),
            "vision.embeddings.patch_embedding.weight": Slot(self.patch, (c.hidden, 3, c.patch_size, c.patch_size)),
            "vision.embeddings.position_embedding.weight": Slot(self.positions),
        } | pair_slots("vision.pre_layrnorm", self.pre_norm)
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"vision.encoder.layers.{i}")
        return found

    def multiplied(self) -> list[Tensor]:
        return [self.patch, *self.layers[0].multiplied()] if self.layers else [self.patch]

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 [pictures, size, size, 3] → [pictures, tokens, hidden * len(features)]."""
        patches = self._patches(pixels)
        n, n_patches, _ = patches.shape
        x = torch.empty((n, n_patches + 1, self.config.hidden), dtype=patches.dtype, device=patches.device)
        x[:, 0] = self.class_row
        x[:, 1:] = self._ops.linear(patches.flatten(0, 1), self.patch).unflatten(0, (n, n_patches))
        x = self._blocks.norm(x.add_(self.positions), self.pre_norm).flatten(0, 1)  # [pictures * (patches + 1), hidden]
        taken = {0: x.clone()} if 0 in self.config.features else {}
        segments = self._blocks.segments(n, n_patches + 1, x.device)
        for i, layer in enumerate(self.layers, start=1):
            layer.run(x, segments, self._blocks)
            if i in self.config.features:
                taken[i] = x if i == len(self.layers) else x.clone()
        first = 0 if self.config.keep_class else 1
        features = [taken[i].unflatten(0, (n, n_patches + 1))[:, first:] for i in self.config.features]
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1)
