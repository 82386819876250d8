"""What vision towers for pictures and frames of any size have in common: many in one pass, cut into patches.

The rows of a merge square lie beside each other from the start, so merging is a view. No row sees another frame pair
(temporal patch), so some frame pairs of a video are a picture like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hydrainfer.checkpoint import FramesConfig
from hydrainfer.models.picture import PatchedPicture
from hydrainfer.ops import OpSet, Segments, to_device

_PASS_ROWS = 16_384
"""Patches of one pass, unless a single picture has more: bounds the memory that a batch takes."""
_KEPT_LAYOUTS = 8
_CPU_PASS_BYTES = 32 << 20
"""The most that a pass's widest activation takes on a CPU. glibc gives larger pieces back at once and every layer gets
fresh pages, which cost a sixth of the time; and a matrix product of this many rows gains nothing by more."""


class PatchLayout(NamedTuple):
    """Where the patches of a pass lie. `cos`, `sin` [rows, head_dim / 2]; `places` [rows, 2]: row and column; `sizes`
    [rows, 2]: patches high and wide; `order`: tokens by windows, with `back` its inverse, None without windows."""

    cos: Tensor
    sin: Tensor
    places: Tensor
    sizes: Tensor
    frames: Segments
    windows: Segments
    order: Tensor | None
    back: Tensor | None


class FrameTower(ABC):
    """A `VisionTower` but for its weights: uint8 [frames, height, width, 3], already resized → rows. One frame alone
    stands for `temporal` equal ones."""

    def __init__(
        self, c: FramesConfig, ops: OpSet, dtype: torch.dtype, device: torch.device, widest: int, window: int = 0
    ) -> None:
        """`widest`: numbers of the widest row between two layers; `window`: side in tokens of the squares of
        `PatchLayout.windows`, 0 without."""
        self.config = c
        self._ops = ops
        self.device, self.dtype = device, dtype
        self._widest, self._window = widest, window
        quarter = torch.arange(0, c.hidden // c.heads // 2, 2, dtype=torch.int64).float() / (c.hidden // c.heads // 2)
        self._inverse = 1.0 / (c.theta**quarter)
        self._mean = torch.tensor(c.pixels.mean, device=device)
        self._std = torch.tensor(c.pixels.std, device=device)
        self._layouts: dict[tuple, PatchLayout] = {}

    @abstractmethod
    def _forward(self, pictures: list[PatchedPicture], layout: PatchLayout) -> Tensor:
        """[tokens of all pictures, width] of one pass."""

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of its embedding; None if it is no picture that this tower takes."""
        if picture.grid is None:
            return None
        (t, h, w), side = picture.grid, self.config.patch * self.config.merge
        frames = (1, self.config.temporal) if t == 1 else (t * self.config.temporal,)
        fits = t > 0 and picture.pixels.shape[1:] == (h * side, w * side, 3) and picture.pixels.shape[0] in frames
        return t * h * w if fits and h and w else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """[rows, width] each."""
        found: list[Tensor] = []
        for some in self._passes(pictures):
            found += self._forward(some, self._kept_layout(some)).split([_tokens(p) for p in some])
        return found

    def _passes(self, pictures: list[PatchedPicture]) -> Iterator[list[PatchedPicture]]:
        some: list[PatchedPicture] = []
        most = _PASS_ROWS
        if self.device.type == "cpu":
            most = min(most, _CPU_PASS_BYTES // (self._widest * self.dtype.itemsize))
        n, each = 0, self.config.merge**2
        for picture in pictures:
            more = _tokens(picture) * each
            if some and n + more > most:
                yield some
                some, n = [], 0
            some.append(picture)
            n += more
        if some:
            yield some

    def _patches(self, picture: PatchedPicture) -> Tensor:
        """Normalised patches [rows, 3 * temporal * patch ** 2], merge squares one after the other."""
        c = self.config
        assert picture.grid is not None
        t, h, w = picture.grid
        pixels = to_device(picture.pixels.copy(), self.device)  # [frames, height, width, 3]; it is read-only
        scaled = (pixels.float().mul_(c.pixels.scale) - self._mean).div_(self._std).to(self.dtype)
        scaled = scaled.expand(t * c.temporal, -1, -1, -1) if t == 1 else scaled
        parts = scaled.view(t, c.temporal, h, c.merge, c.patch, w, c.merge, c.patch, 3)
        return parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).flatten(0, 4).flatten(1)

    def _kept_layout(self, pictures: list[PatchedPicture]) -> PatchLayout:
        """`_layout`, of the last few combinations of sizes kept: its parts are made on the host."""
        key = tuple(picture.grid for picture in pictures)
        layout = self._layouts.pop(key, None)
        if layout is None:
            layout = self._layout(pictures)
        self._layouts[key] = layout  # the newest is the last
        if len(self._layouts) > _KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def _layout(self, pictures: list[PatchedPicture]) -> PatchLayout:
        m = self.config.merge
        places, sizes, frames, windows, order = [], [], [], [], []
        first = 0
        for picture in pictures:
            assert picture.grid is not None
            t, h, w = picture.grid
            rows = torch.arange(h * m).view(h, 1, m, 1).expand(h, w, m, m)
            columns = torch.arange(w * m).view(1, w, 1, m).expand(h, w, m, m)
            places.append(torch.stack([rows.flatten(), columns.flatten()], dim=1).repeat(t, 1))
            sizes.append(torch.tensor([[h * m, w * m]]).expand(t * h * w * m * m, 2))
            frames += [h * w * m * m] * t
            if self._window:
                window = _windows(t, h, w, self._window)
                order.append(window.argsort(stable=True) + first)
                windows += [n * m * m for n in window.bincount().tolist()]
            first += t * h * w
        place = torch.cat(places)  # [rows, 2]: row and column of each patch
        turns = (place.float()[..., None] * self._inverse).flatten(1)  # [rows, head_dim / 2]
        by_window = torch.cat(order) if self._window else None
        if by_window is not None:
            turns = turns.unflatten(0, (-1, m * m))[by_window].flatten(0, 1)
        turns = turns.to(self.device)
        return PatchLayout(
            turns.cos(),
            turns.sin(),
            place.to(self.device),
            torch.cat(sizes).to(self.device),
            Segments(frames, self.device),
            Segments(windows, self.device),
            None if by_window is None else by_window.to(self.device),
            None if by_window is None else by_window.argsort().to(self.device),
        )


def _tokens(picture: PatchedPicture) -> int:
    assert picture.grid is not None
    t, h, w = picture.grid
    return t * h * w


def _windows(t: int, h: int, w: int, side: int) -> Tensor:
    """The window of every token, [t * h * w]: squares of `side` tokens, smaller at the right and lower edges."""
    across, down = -(-w // side), -(-h // side)
    frame = (torch.arange(h) // side)[:, None] * across + torch.arange(w) // side
    return (frame + (torch.arange(t) * (across * down))[:, None, None]).flatten()
