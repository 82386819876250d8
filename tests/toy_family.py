"""Families that do not exist: LLaVA-1.5 that pools its pictures, with a decoder that scales its embeddings, and
LLaVA-1.5 with text between the rows of a picture. One file describes them."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from hydrainfer.checkpoint import Decoder, ModelConfig, TowerConfig
from hydrainfer.families.llava import FAMILIES, llava
from hydrainfer.models import PatchedPicture
from hydrainfer.models.vit import SquareVision
from hydrainfer.processor import ClipImages, InnerText, MediaItem

SCALE = 2.0


def pooled(rows: Tensor) -> Tensor:
    """[pictures, side * side, width] → [pictures, side * side / 4, width]: the means of squares of four."""
    side = int(rows.shape[1] ** 0.5)
    grid = rows.transpose(1, 2).unflatten(2, (side, side))
    return F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)


class PooledConfig(TowerConfig):
    @property
    def square_tokens(self) -> int:
        return self.patches // 4


class PooledVision(SquareVision):
    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        return [pooled(rows[None])[0] for rows in super().encode(pictures)]


TOY = FAMILIES["LlavaForConditionalGeneration"]._replace(
    decoder=Decoder("llama", mlp_bias=None, embed_scale=SCALE),
    tower="tests.toy_family:PooledVision",
    vision=lambda hf, path: PooledConfig(**vars(llava(hf, path))),
)


class LinedImages(ClipImages):
    def fit(self, width: int, height: int) -> MediaItem:
        return super().fit(width, height)._replace(after="<pad>", inner=LINES)


LINES = (InnerText("<pad>", (4, 12)), InnerText("<pad>\nrow<pad>", (8, 15), 4))
"""The texts inside a picture of 16 tokens: behind each row of four, and before the last token."""
MARKS = ("<pad>",)
LINED = FAMILIES["LlavaForConditionalGeneration"]._replace(
    pictures="tests.toy_family:lined_images",
    vision=lambda hf, path: replace(llava(hf, path), marks=MARKS),
)


def lined_images(model: ModelConfig) -> LinedImages:
    return LinedImages(model.vision.pixels, model.vision.tokens)
