"""A model as this engine sees it, and what the description of every vision tower has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hydrainfer.checkpoint.decoder import TextConfig

Fit = Callable[[int, int], int]
"""The embedding tokens of a picture of this width and height in pixels."""
REFERENCE = (1024, 768)
"""The commonest picture of the paper's data sets, in pixels."""
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu", "relu")


class VisionShape(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower and its projector, of the layers that run. `row_weights`: multiplied with every patch;
    `token_weights`: with every embedding token; `rows_per_token` patches come to one token. `window_rows`: patches that
    attend to each other, 0 for all of a picture; `full_layers`: those in which all of a picture do in spite of windows.
    `picture_tokens`: of the largest picture."""

    layers: int
    hidden: int
    row_weights: int
    token_weights: int
    rows_per_token: float
    picture_tokens: int
    window_rows: int = 0
    full_layers: int = 0

    @property
    def weights(self) -> int:
        return self.row_weights + self.token_weights


class VisionConfig(Protocol):
    """One family's description of its vision tower and of the pixels that it takes."""

    @property
    def tokens(self) -> int:
        """Rows of the largest picture."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Layers whose features the first language layers add."""
        return ()

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower as numbers for the planner; `width` is that of the decoder."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model as this engine sees it. `vision` is its family's own `VisionConfig`, None without one. `media_tokens`:
    ids of the placeholders of pictures and, if it takes any, videos; `around`: ids of what stands before and after
    each. `sees_whole`: tokens of a picture see each other whatever their order, so all of them are computed at once.
    `dtype` is what the checkpoint was saved in."""

    architecture: str
    text: TextConfig
    vision: Any
    media_tokens: tuple[int, ...]
    dtype: str
    around: tuple[int, ...] = ()
    sees_whole: bool = False

    @property
    def deepstack(self) -> int:
        """Levels of picture features that the first language layers add, beside the embedding itself."""
        return 0 if self.vision is None else len(self.vision.levels)

    @property
    def embed_width(self) -> int:
        """The width of one row of the embedding cache."""
        return self.text.hidden * (1 + self.deepstack)
