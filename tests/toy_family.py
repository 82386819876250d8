"""A family that does not exist: LLaVA-1.5 that pools its pictures. One file describes it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import TowerConfig
from hydrainfer.families.llava import FAMILIES, llava
from hydrainfer.models import PatchedPicture
from hydrainfer.models.vit import SquareVision


def pooled(rows: Tensor) -> Tensor:
    """[pictures, side * side, width] → [pictures, side * side / 4, width]: the means of squares of four."""
    side = int(rows.shape[1] ** 0.5)
    grid = rows.transpose(1, 2).unflatten(2, (side, side))
    return F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)


class PooledConfig(TowerConfig):
    @property
    def tokens(self) -> int:
        return self.patches // 4


class PooledVision(SquareVision):
    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        return [pooled(rows[None])[0] for rows in super().encode(pictures)]


TOY = FAMILIES["LlavaForConditionalGeneration"]._replace(
    tower="tests.toy_family:PooledVision",
    vision=lambda hf, path: PooledConfig(**vars(llava(hf, path))),
)
