"""LLaVA-1.5's vision tower: one square of CLIP patches through a projector."""

from __future__ import annotations

import torch
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.families.llava import ClipConfig
from hydrainfer.models.clip_projector import ClipProjector
from hydrainfer.models.picture import PassSize, PatchedPicture
from hydrainfer.models.slots import Slot
from hydrainfer.ops import OpSet


class LlavaVision:
    """LLaVA-1.5's vision tower: one square per picture."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config.vision
        self._tower = ClipProjector(config.vision, config.text.hidden, ops, dtype, device)
        self.passes = self._tower.passes

    @staticmethod
    def pass_size(c: ClipConfig) -> PassSize:
        return ClipProjector.pass_size(c)

    def slots(self) -> dict[str, Slot]:
        return self._tower.slots()

    def multiplied(self) -> list[Tensor]:
        return self._tower.multiplied()

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        side = self.config.image_size
        return self.config.tokens if picture.pixels.shape == (side, side, 3) else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [tokens, width] of each picture, uint8 [image_size, image_size, 3]."""
        return list(self._tower.encode([p.pixels for p in pictures]))
