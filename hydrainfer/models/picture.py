"""The input of a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hydrainfer.models.slots import Slot
from hydrainfer.ops import to_device


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


class Squares:
    """Pictures of one size through `compute`, uint8 [n, size, size, 3] on `device` → [n, tokens, width], at most
    `at_once` in one pass, which bounds its memory. A tower that consists of this has it as `squares`; a runner may set
    `through`, which is called, to what replays graphs of `compute`."""

    def __init__(self, compute: Callable[[Tensor], Tensor], size: int, device: torch.device, at_once: int) -> None:
        self.compute = self.through = compute
        self.size, self.device, self.at_once = size, device, at_once

    def encode(self, squares: Sequence[np.ndarray]) -> list[Tensor]:
        """uint8 [size, size, 3] each → parts of [n, tokens, width], in order."""
        parts = [squares[i : i + self.at_once] for i in range(0, len(squares), self.at_once)]
        return [self.through(to_device(np.stack(part), self.device)) for part in parts]
