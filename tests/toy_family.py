"""The layers of a family that does not exist: LLaVA-1.5 that pools its pictures, with a decoder that scales its
embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hydrainfer.models import Decoder, Layers, PatchedPicture
from hydrainfer.models.llava import LAYERS as LLAVA
from hydrainfer.models.llava import LlavaVision

SCALE = 2.0


def pooled(rows: Tensor) -> Tensor:
    """[pictures, side * side, width] → [pictures, side * side / 4, width]: the means of squares of four."""
    side = int(rows.shape[1] ** 0.5)
    grid = rows.transpose(1, 2).unflatten(2, (side, side))
    return F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)


class PooledVision(LlavaVision):
    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        return [pooled(rows[None])[0] for rows in super().encode(pictures)]


class ScaledDecoder(Decoder):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * SCALE


LAYERS = Layers(LLAVA.canonical, PooledVision, ScaledDecoder)
