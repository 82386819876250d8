"""The input of a vision tower, and its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hydrainfer.checkpoint import ModelConfig, PixelSettings
from hydrainfer.families import family_of
from hydrainfer.models.slots import Slot
from hydrainfer.ops import to_device

Given = TypeVar("Given")
Taken = TypeVar("Taken", contravariant=True)


class PatchedPicture(NamedTuple):
    """A picture as a vision tower takes it. `pixels`: uint8, in the shape that the family's adapter in `processor`
    gives; `grid`: see `core.MediaSpan`."""

    pixels: np.ndarray
    grid: tuple[int, int, int] | None = None


class Normalising:
    """Rescales and normalises pixels: uint8 [..., 3] → float32 of the same shape. The operations and their order are
    those of transformers' image processor with the same backend."""

    def __init__(self, settings: PixelSettings, device: torch.device) -> None:
        self._scale, self._how, self._normalises = settings.scale, settings.arithmetic, bool(settings.std)
        mean, std = torch.tensor(settings.mean), torch.tensor(settings.std)
        if self._how == "folded":  # on the CPU: arithmetic on the meta device imports torch's compiler, in a second
            mean, std = mean * (1.0 / settings.scale), std * (1.0 / settings.scale)
        self._mean, self._std = mean.to(device), std.to(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        wide = pixels.float()
        if self._how == "scaled":
            wide.mul_(self._scale)
        elif self._how == "divided":
            wide.div_(1.0 / self._scale)
        if self._normalises:
            wide.sub_(self._mean).div_(self._std)
        return wide


class PassSize(NamedTuple):
    """The size of a tower's passes: the most patches of one, unless a single picture has more; those of the largest
    that is captured in a CUDA graph; and the widths of a patch's row between the layers and within an MLP. `rotates`:
    queries and keys are rotated, in float32."""

    rows: int
    captured_rows: int
    hidden: int
    inner: int
    rotates: bool


class VisionTower(Protocol):
    """The vision tower of a model family: from pixels to rows of the embedding cache. It is built empty, from
    (`ModelConfig`, ops, dtype, device)."""

    @classmethod
    def pass_size(cls, c: Any) -> PassSize:
        """The size of its passes, from the family's `VisionConfig`."""

    def slots(self) -> dict[str, Slot]:
        """The slot of each tensor, by canonical name."""

    def multiplied(self) -> Iterable[Tensor]:
        """The weights that the tower multiplies by through its operators; at least one of each shape."""

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [rows, embed_width] of each picture. Pictures of any sizes share a pass without affecting each
        other."""


def tower_of(config: ModelConfig) -> Any:
    """The class of the model's `VisionTower`; None if it takes text only."""
    tower = family_of(config).tower
    return resolve_name(tower) if tower else None


class Bucket(Protocol[Taken]):
    """Passes of up to one size, over memory at fixed addresses, so that a CUDA graph can replay `compute`."""

    def fill(self, given: Taken) -> int:
        """Copy a pass into the fixed memory. Returns how many entries, at the start of the result, belong to it."""

    def compute(self) -> Tensor:
        """Compute the pass that was filled in last, and padding. Before the first `fill` it is an empty pass."""


class Passes(Protocol[Given]):
    """The way a tower computes one pass: by `through` if a runner has set it, to replay CUDA graphs, else by `compute`.
    A tower that can be captured in graphs has this as `passes`."""

    through: Callable[[Given], Tensor] | None

    @property
    def sizes(self) -> Sequence[int]:
        """The sizes of the buckets, ascending."""

    @property
    def captures(self) -> bool:
        """Whether a bucket's operators do the same for every pass that fits it, so that a CUDA graph can replay
        them."""

    def compute(self, given: Given) -> Tensor: ...

    def size_of(self, given: Given) -> int | None:
        """The size of the smallest bucket that the pass fits; None if it fits none."""

    def bucket(self, size: int) -> Bucket[Given]: ...


class Squares:
    """Passes over pictures of one size. `compute`: uint8 [n, size, size, 3] on `device` → [n, tokens, width]. A pass
    has at most `at_once` pictures, which bounds its memory. This class implements `Passes`; a bucket holds a fixed
    number of pictures."""

    sizes = (1, 2, 3, 4, 5)
    """A picture of LLaVA-NeXT has up to five squares. More squares keep a GPU busy for longer than kernel launches
    take."""
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
        """The embeddings of squares, uint8 [size, size, 3] each, in order, as parts [n, tokens, width]."""
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
