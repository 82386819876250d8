"""CLIP's vision transformer, up to the last layer whose output is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ClipConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet, Segments, to_device


@dataclass(slots=True)
class ClipLayer:
    """One block's weights; query, key and value projections fused, biases beside their weights."""

    norm_1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm_2: tuple[Tensor, Tensor]
    fc_1: tuple[Tensor, Tensor]
    fc_2: tuple[Tensor, Tensor]

    def slots(self, prefix: str) -> dict[str, Slot]:
        found: dict[str, Slot] = {}
        hidden = self.out[0].shape[0]
        for i, letter in enumerate("qkv"):
            part = tuple(t[i * hidden : (i + 1) * hidden] for t in self.qkv)
            found |= _pair(f"{prefix}.self_attn.{letter}_proj", part)
        found |= _pair(f"{prefix}.self_attn.out_proj", self.out)
        found |= _pair(f"{prefix}.layer_norm1", self.norm_1) | _pair(f"{prefix}.layer_norm2", self.norm_2)
        return found | _pair(f"{prefix}.mlp.fc1", self.fc_1) | _pair(f"{prefix}.mlp.fc2", self.fc_2)


def _pair(name: str, tensors: tuple[Tensor, ...]) -> dict[str, Slot]:
    return {f"{name}.weight": Slot(tensors[0]), f"{name}.bias": Slot(tensors[1])}


class Clip:
    """Pictures → features of `config.features`, concatenated."""

    def __init__(self, config: ClipConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops
        self._activation = activation(config.activation, ops)
        h, m, patch = config.hidden, config.intermediate, 3 * config.patch_size**2

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        self.patch = make(h, patch)
        self.class_row = make(h)
        self.positions = make(config.patches + 1, h)
        self.pre_norm = (make(h), make(h))
        self.layers = [
            ClipLayer(
                norm_1=(make(h), make(h)),
                qkv=(make(3 * h, h), make(3 * h)),
                out=(make(h, h), make(h)),
                norm_2=(make(h), make(h)),
                fc_1=(make(m, h), make(m)),
                fc_2=(make(h, m), make(h)),
            )
            for _ in range(max(config.features))
        ]
        self._mean = torch.tensor(config.pixels.mean, device=device)
        self._std = torch.tensor(config.pixels.std, device=device)

    def slots(self) -> dict[str, Slot]:
        c = self.config
        found = {
            "vision.embeddings.class_embedding": Slot(self.class_row),
            "vision.embeddings.patch_embedding.weight": Slot(self.patch, (c.hidden, 3, c.patch_size, c.patch_size)),
            "vision.embeddings.position_embedding.weight": Slot(self.positions),
        } | _pair("vision.pre_layrnorm", self.pre_norm)
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"vision.encoder.layers.{i}")
        return found

    def patches(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """uint8 pictures → normalised patches [pictures, patches, 3 * patch_size ** 2]."""
        size, p = self.config.image_size, self.config.patch_size
        side = size // p
        pixels = to_device(np.stack(pictures), self.patch.device)  # [n, size, size, 3] uint8
        scaled = (pixels.float().mul_(self.config.pixels.scale) - self._mean).div_(self._std)
        grid = scaled[:, : side * p, : side * p].unflatten(2, (side, p)).unflatten(1, (side, p))
        return grid.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2).to(self.patch.dtype)

    def forward(self, pictures: Sequence[np.ndarray]) -> Tensor:
        """[pictures, tokens, hidden * len(features)]."""
        patches = self.patches(pictures)
        n, n_patches, _ = patches.shape
        x = torch.empty((n, n_patches + 1, self.config.hidden), dtype=patches.dtype, device=patches.device)
        x[:, 0] = self.class_row
        x[:, 1:] = self._ops.linear(patches.flatten(0, 1), self.patch).unflatten(0, (n, n_patches))
        x = self._norm(x.add_(self.positions), self.pre_norm).flatten(0, 1)  # [pictures * (patches + 1), hidden]
        taken = {0: x.clone()} if 0 in self.config.features else {}
        segments = Segments([n_patches + 1] * n, x.device)
        for i, layer in enumerate(self.layers, start=1):
            self._run(layer, x, segments)
            if i in self.config.features:
                taken[i] = x if i == len(self.layers) else x.clone()
        first = 0 if self.config.keep_class else 1
        features = [taken[i].unflatten(0, (n, n_patches + 1))[:, first:] for i in self.config.features]
        return features[0] if len(features) == 1 else torch.cat(features, dim=-1)

    def _norm(self, x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x, (self.config.hidden,), weights[0], weights[1], self.config.norm_eps)

    def _run(self, layer: ClipLayer, x: Tensor, segments: Segments) -> None:
        """One block over [pictures * tokens, hidden], in place."""
        ops, heads = self._ops, self.config.heads
        dim = self.config.hidden // heads
        q, k, v = ops.linear(self._norm(x, layer.norm_1), *layer.qkv).view(-1, 3, heads, dim).unbind(1)
        mixed = ops.attention_segments(q, k, v, segments, dim**-0.5)  # [rows, heads, dim]
        ops.linear_add(x, mixed.flatten(1), *layer.out)
        inner = self._activation(ops.linear(self._norm(x, layer.norm_2), *layer.fc_1))
        ops.linear_add(x, inner, *layer.fc_2)
