"""Gemma 3's vision tower: a SigLIP tower, whose patches are averaged, normalised and projected."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.gemma3 import SiglipConfig
from hydrainfer.models.activations import activation
from hydrainfer.models.clip import Blocks, ClipLayer, Patches, pair_slots
from hydrainfer.models.picture import PassSize, PatchedPicture, Squares
from hydrainfer.models.slots import Slot, empty
from hydrainfer.ops import OpSet

_AT_ONCE = 8  # pictures


class GemmaVision:
    """Gemma 3's vision tower: one square per picture."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        c = self.config = config.vision
        self._ops = ops
        self._blocks = Blocks(ops, c.heads, c.norm_eps, activation(c.activation, ops), {})
        self._patches = Patches(c.pixels, c.image_size, c.patch_size, dtype, device)
        self.passes = Squares(self._pass, c.image_size, device, _AT_ONCE)

        def make(*shape: int) -> Tensor:
            return empty(shape, dtype, device)

        self.patch = (make(c.hidden, 3 * c.patch_size**2), make(c.hidden))
        self.positions = make(c.patches, c.hidden)
        self.layers = [ClipLayer.make(c.hidden, c.intermediate, make) for _ in range(c.layers)]
        self.last_norm = (make(c.hidden), make(c.hidden))
        self.pooled_norm = empty((c.hidden,), torch.float32, device)
        self.projection = make(c.hidden, config.text.hidden)

    @staticmethod
    def pass_size(c: SiglipConfig) -> PassSize:
        return PassSize(_AT_ONCE * c.patches, Squares.sizes[-1] * c.patches, c.hidden, c.intermediate, rotates=False)

    def slots(self) -> dict[str, Slot]:
        c, embeddings = self.config, "vision.embeddings"
        found = {
            f"{embeddings}.patch_embedding.weight": Slot(self.patch[0], (c.hidden, 3, c.patch_size, c.patch_size)),
            f"{embeddings}.patch_embedding.bias": Slot(self.patch[1]),
            f"{embeddings}.position_embedding.weight": Slot(self.positions),
            "projector.mm_soft_emb_norm.weight": Slot(self.pooled_norm, plus=1.0),
            "projector.mm_input_projection_weight": Slot(self.projection),
        } | pair_slots("vision.post_layernorm", self.last_norm)
        for i, layer in enumerate(self.layers):
            found |= layer.slots(f"vision.encoder.layers.{i}")
        return found

    def multiplied(self) -> list[Tensor]:
        return [self.patch[0], *self.layers[0].multiplied()]

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        side = self.config.image_size
        return self.config.tokens if picture.pixels.shape == (side, side, 3) else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [tokens, width] of each picture, uint8 [image_size, image_size, 3]."""
        return [rows for part in self.passes.encode([p.pixels for p in pictures]) for rows in part]

    def _pass(self, pixels: Tensor) -> Tensor:
        """uint8 [pictures, size, size, 3] → [pictures, tokens, width]."""
        c, patches = self.config, self._patches(pixels)
        n, n_patches, _ = patches.shape
        x = self._ops.linear(patches.flatten(0, 1), *self.patch).unflatten(0, (n, n_patches))
        x = x.add_(self.positions).flatten(0, 1)  # [pictures * patches, hidden]
        segments = self._blocks.segments(n, n_patches, x.device)
        for layer in self.layers:
            layer.run(x, segments, self._blocks)
        x = self._blocks.norm(x, self.last_norm)
        side = round(n_patches**0.5)
        grid = x.view(n, c.side, side // c.side, c.side, side // c.side, c.hidden)
        pooled = grid.mean((2, 4)).flatten(1, 2)  # [pictures, tokens, hidden]
        normed = F.rms_norm(pooled.float(), (c.hidden,), self.pooled_norm, c.norm_eps).to(pooled.dtype)
        return normed @ self.projection
