"""The description of a model for this engine, and what the descriptions of all vision towers have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import msgspec

from hydrainfer.checkpoint.decoder import TextConfig
from hydrainfer.checkpoint.fp8 import Fp8
from hydrainfer.checkpoint.pixels import PixelBackend

Sight = Literal["", "all", "windows"]
"""The layers in which tokens of a picture see each other in both directions: none, all, or those with a window."""
Fit = Callable[[int, int], int]
"""A function that returns the number of embedding tokens of a picture of this width and height in pixels."""
REFERENCE = (1024, 768)
"""The most common picture size in the paper's data sets, width and height in pixels."""
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu", "relu")


class VisionShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a vision tower and its projector, counting only layers that run. `row_weights`: weights that are
    multiplied with every patch; `token_weights`: with every embedding token. `rows_per_token`: patches per token.
    `window_rows`: patches that attend to each other, 0 for all of a picture; `full_layers`: number of layers without
    windows, in which all patches of a picture do. `picture_tokens`: tokens of the largest picture. `table_weights`:
    weights that are only looked up."""

    layers: int
    hidden: int
    row_weights: int
    token_weights: int
    rows_per_token: float
    picture_tokens: int
    window_rows: int = 0
    full_layers: int = 0
    table_weights: int = 0

    @property
    def weights(self) -> int:
        return self.row_weights + self.token_weights


class VisionConfig(Protocol):
    """The description of one family's vision tower and of the pixels that it takes."""

    @property
    def tokens(self) -> int:
        """The rows of the largest picture."""

    @property
    def levels(self) -> tuple[int, ...]:
        """The layers whose features are added in the first language layers."""
        return ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The special tokens, by their texts, that stand around or inside a picture besides `ModelConfig.around`. A
        user's text may not have them."""
        return ()

    @property
    def videos(self) -> Any:
        """The preprocessing of videos; None if the checkpoint takes none."""
        return None

    def by(self, backend: PixelBackend) -> Self:
        """The description with pictures prepared by this backend. Raises `ConfigError` if it lacks a filter."""

    def shape(self, width: int, fit: Fit) -> VisionShape:
        """The tower as numbers for the planner. `width`: hidden size of the decoder."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The description of a model for this engine. `vision` is the family's own `VisionConfig`, None for text-only
    models. `media_tokens`: ids of the placeholders of pictures and, if config.json names it, videos; `around`: ids of
    the tokens before and after each. `blanked`: ids that are embedded as `TextConfig.pad`, wherever they come from:
    a model may also say them. `sees_whole`: where tokens of a picture see each other in both directions; if
    anywhere, all of them are computed at once. `dtype` is that of the saved weights, or of what those in FP8 were made
    from: `fp8` describes these, None if the checkpoint has none. `variant`: see `Family.variants`; "" for the family
    itself."""

    architecture: str
    text: TextConfig
    vision: Any
    media_tokens: tuple[int, ...]
    dtype: str
    around: tuple[int, ...] = ()
    blanked: tuple[int, ...] = ()
    sees_whole: Sight = ""
    fp8: Fp8 | None = None
    variant: str = ""

    def sees_whole_in(self, window: int) -> bool:
        """Whether tokens of a picture see each other in layers with this window, 0 for none."""
        return self.sees_whole == "all" or (self.sees_whole == "windows" and window > 0)

    def by(self, backend: PixelBackend) -> ModelConfig:
        """The description with pictures, if the model takes any, prepared by this backend. Raises `ConfigError` if it
        lacks a filter."""
        return self if self.vision is None else replace(self, vision=self.vision.by(backend))

    @property
    def deepstack(self) -> int:
        """The number of levels of picture features that the first language layers add, besides the embedding itself."""
        return 0 if self.vision is None else len(self.vision.levels)

    @property
    def embed_width(self) -> int:
        """The width of one row of the embedding cache."""
        return self.text.hidden * (1 + self.deepstack)
