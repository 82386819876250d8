"""The input of a vision tower, and its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hydrainfer.models.slots import Slot
from hydrainfer.ops import to_device

Given = TypeVar("Given")
Taken = TypeVar("Taken", contravariant=True)


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


class Bucket(Protocol[Taken]):
    """Passes up to one size, over memory that stays where it is, so that a graph can replay `compute`."""

    def fill(self, given: Taken) -> int:
        """Put a pass into that memory. Returns how many entries of the result are its own: the first."""

    def compute(self) -> Tensor:
        """The pass that was put there last, and padding. At first there is an empty one."""


class Passes(Protocol[Given]):
    """How a tower computes one pass, by `through` if a runner has set that to what replays graphs, else by `compute`.
    A tower that can be captured has this as `passes`."""

    through: Callable[[Given], Tensor] | None

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of buckets, ascending."""

    @property
    def captures(self) -> bool:
        """Whether the operators of a bucket do the same for every pass that fits it, as a graph does."""

    def compute(self, given: Given) -> Tensor: ...

    def size_of(self, given: Given) -> int | None:
        """The smallest bucket that the pass fits; None if it fits none."""

    def bucket(self, size: int) -> Bucket[Given]: ...


class Squares:
    """Pictures of one size through `compute`, uint8 [n, size, size, 3] on `device` → [n, tokens, width], at most
    `at_once` in one pass, which bounds its memory. They are `Passes`: a bucket holds one number of pictures."""

    sizes = (1, 2, 3, 4, 5)
    """A picture of LLaVA-NeXT is up to five. More keep a GPU busy longer than their launches take."""
    captures = True

    def __init__(self, compute: Callable[[Tensor], Tensor], size: int, device: torch.device, at_once: int) -> None:
        self.compute = compute
        self.through: Callable[[Tensor], Tensor] | None = None
        self.size, self.device, self.at_once = size, device, at_once

    def size_of(self, given: Tensor) -> int | None:
        return len(given) if len(given) in self.sizes else None

    def bucket(self, size: int) -> _SquareBucket:
        return _SquareBucket(self, size)

    def encode(self, squares: Sequence[np.ndarray]) -> list[Tensor]:
        """uint8 [size, size, 3] each → parts of [n, tokens, width], in order."""
        parts = [squares[i : i + self.at_once] for i in range(0, len(squares), self.at_once)]
        return [(self.through or self.compute)(to_device(np.stack(part), self.device)) for part in parts]


class _SquareBucket:
    def __init__(self, squares: Squares, n: int) -> None:
        self._squares = squares
        self._pixels = torch.zeros((n, squares.size, squares.size, 3), dtype=torch.uint8, device=squares.device)

    def fill(self, given: Tensor) -> int:
        self._pixels.copy_(given)
        return len(given)

    def compute(self) -> Tensor:
        return self._squares.compute(self._pixels)
