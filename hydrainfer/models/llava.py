"""LLaVA-1.5: one square of CLIP patches through a projector into a decoder. Names and parts that LLaVA-NeXT shares."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig
from hydrainfer.models.clip_projector import ClipProjector
from hydrainfer.models.layers import Layers
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.models.slots import Slot
from hydrainfer.ops import OpSet

_RENAMES = (  # published (before transformers 4.52) and present names → ours
    (re.compile(r"^(?:model\.)?vision_tower\.(?:vision_model\.)?"), "vision."),
    (re.compile(r"^(?:model\.)?image_newline$"), "projector.newline"),
    (re.compile(r"^(?:model\.)?multi_modal_projector\."), "projector."),
    (re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.language_model\.model\.|language_model\.model\.|model\.language_model\.)"), "text."),
)


def canonical(name: str) -> str:
    """`vision_tower.vision_model.pre_layrnorm.bias` → `vision.pre_layrnorm.bias`; unknown names stay."""
    for pattern, ours in _RENAMES:
        renamed, n = pattern.subn(ours, name, count=1)
        if n:
            return renamed
    return name


class LlavaVision:
    """LLaVA-1.5's vision tower: one square per picture."""

    def __init__(self, config: ModelConfig, ops: OpSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config.vision
        self._tower = ClipProjector(config.vision, config.text.hidden, ops, dtype, device)
        self.passes = self._tower.passes

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


LAYERS = Layers(canonical, LlavaVision, pass_size=ClipProjector.pass_size)
