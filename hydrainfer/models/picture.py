"""The input of a vision tower."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from hydrainfer.models.slots import Slot


class PatchedPicture(NamedTuple):
    """`pixels`: uint8, as the family's adapter in `processor` shaped it; `grid`: see `core.MediaSpan`."""

    pixels: np.ndarray
    grid: tuple[int, int, int] | None = None


class VisionTower(Protocol):
    """One family's way from pixels to rows of the embedding cache."""

    def slots(self) -> dict[str, Slot]:
        """Canonical tensor name → where it goes."""

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of its embedding; None if it is no picture that this tower takes."""

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """[rows, embed_width] each; pictures of any sizes in one pass, each as if it were alone."""
