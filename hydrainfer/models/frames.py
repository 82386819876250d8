"""The common part of vision towers that take pictures and frames of any size, many in one pass, cut into patches.

The rows of a merge square lie beside each other from the start, so merging is a view. A row sees only its own frame
pair (temporal patch), so a few frame pairs of a video are encoded like a picture.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from hydrainfer.checkpoint import TowerConfig
from hydrainfer.models.patches import Arranged, Cut, Grid, PatchLayout, arrange, fits, room_for, rows_of, tokens_of
from hydrainfer.models.picture import Normalising, PassSize, PatchedPicture
from hydrainfer.ops import OpSet, Segments, packed_bytes, stepping, to_device, upload

_PASS_ROWS = 16_384
"""The most patches of one pass, unless a single picture has more. The limit bounds the memory that a batch takes."""
_KEPT_LAYOUTS = 8
_CPU_PASS_BYTES = 32 << 20
"""The most bytes of a pass's widest activation on a CPU. glibc returns larger pieces to the system at once, so every
layer would get fresh pages, which cost a sixth of the time. A matrix product gains nothing from more rows than this
allows."""


def halves(head_dim: int, theta: float) -> Tensor:
    """The frequencies by which rows, and likewise columns, are rotated: [head_dim / 4]."""
    quarter = torch.arange(0, head_dim // 2, 2, dtype=torch.int64).float() / (head_dim // 2)
    return 1.0 / (theta**quarter)


def alternating(head_dim: int, theta: float) -> Tensor:
    """The frequencies by which rows are rotated, and those of columns, which lie between them: [2, head_dim / 4]."""
    every = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    return torch.stack([every[0::2], every[1::2]])


FREQUENCIES: dict[str, Callable[[int, float], Tensor]] = {
    "halves": halves,
    "alternating": alternating,
    "axial": halves,
}
"""By `TowerConfig.rotation`: the frequencies of rows and columns, together [head_dim / 4] or one after the other [2,
head_dim / 4]."""
_CHANNELS_FIRST, _CHANNELS_LAST = (6, 8, 1, 4, 7), (6, 1, 4, 7, 8)


class FrameTower(ABC):
    """A `VisionTower` without its weights: from resized frames, uint8 [frames, height, width, 3], to rows. A single
    frame stands for `temporal` equal ones. This class implements `Passes`; a bucket's size is its number of patches."""

    sizes: Sequence[int] = ()
    """The sizes of the buckets; empty where operators depend on the pictures' sizes."""

    def __init__(
        self, c: TowerConfig, ops: OpSet, dtype: torch.dtype, device: torch.device, widest: int, window: int = 0
    ) -> None:
        """`widest`: the width of the widest row between two layers; `window`: the side in tokens of the squares in
        `PatchLayout.windows`, 0 without windows."""
        self.config = c
        self.cut = Cut(1, 0, c.merge) if c.leftover else Cut(c.merge, window)
        self.patch_numbers = 3 * c.temporal * c.patch**2
        self._ops = stepping(ops)
        self.device, self.dtype = device, dtype
        self._widest = widest
        self._inverse = FREQUENCIES[c.rotation](c.head_dim, c.theta).to(device)
        self._normalised = Normalising(c.pixels, device)
        self._layouts: dict[tuple[Grid, ...], PatchLayout] = {}
        self._captured: Tensor | None = None  # the patches of all buckets, of which one is computed at a time
        self.through: Callable[[list[PatchedPicture]], Tensor] | None = None

    @classmethod
    def pass_size(cls, c: TowerConfig) -> PassSize:
        return PassSize(_PASS_ROWS, max(cls.sizes, default=0), c.hidden, c.intermediate, rotates=True)

    @abstractmethod
    def _forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Compute one pass: the rows [tokens of all pictures, width]."""

    def rows(self, picture: PatchedPicture) -> int | None:
        """The number of rows of the picture's embedding; None if the tower does not take this picture."""
        if picture.grid is None:
            return None
        (t, h, w), side = picture.grid, self.config.patch * self.cut.merge
        frames = (1, self.config.temporal) if t == 1 else (t * self.config.temporal,)
        fits = t > 0 and picture.pixels.shape[1:] == (h * side, w * side, 3) and picture.pixels.shape[0] in frames
        return tokens_of(picture.grid, self.cut) or None if fits else None

    def encode(self, pictures: list[PatchedPicture]) -> list[Tensor]:
        """The embedding [rows, width] of each picture."""
        found: list[Tensor] = []
        for some in self._split(pictures):
            found += (self.through or self.compute)(some).split([self._tokens(p) for p in some])
        return found

    @property
    def passes(self) -> FrameTower:
        return self

    @property
    def captures(self) -> bool:
        return bool(self.sizes) and self._ops.replays_segments(self.config.head_dim)

    def compute(self, given: list[PatchedPicture]) -> Tensor:
        """Compute one pass: the rows [tokens of all pictures, width]."""
        grids = _grids(given)
        patches = torch.empty((rows_of(grids, self.cut), self.patch_numbers), dtype=self.dtype, device=self.device)
        self._put_patches(given, patches)
        return self._forward(patches, self._kept_layout(grids))

    def size_of(self, given: list[PatchedPicture]) -> int | None:
        grids = _grids(given)
        return next((n for n in self.sizes if fits(grids, self.cut, room_for(n, self.cut))), None)

    def bucket(self, size: int) -> _FrameBucket:
        if self._captured is None:
            shape = max(self.sizes), self.patch_numbers
            self._captured = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return _FrameBucket(self, self._captured[:size])

    def _split(self, pictures: list[PatchedPicture]) -> Iterator[list[PatchedPicture]]:
        some: list[PatchedPicture] = []
        most = _PASS_ROWS
        if self.device.type == "cpu":
            most = min(most, _CPU_PASS_BYTES // (self._widest * self.dtype.itemsize))
        n = 0
        for picture in pictures:
            more = rows_of(_grids([picture]), self.cut)
            if some and n + more > most:
                yield some
                some, n = [], 0
            some.append(picture)
            n += more
        if some:
            yield some

    def _tokens(self, picture: PatchedPicture) -> int:
        assert picture.grid is not None
        return tokens_of(picture.grid, self.cut)

    def _put_patches(self, pictures: list[PatchedPicture], into: Tensor) -> None:
        """Write normalised patches, one merge square after the other, to the first rows of `into` [rows, patch
        width]."""
        c, merge, first = self.config, self.cut.merge, 0
        for picture in pictures:
            assert picture.grid is not None
            t, h, w = picture.grid
            pixels = to_device(picture.pixels.copy(), self.device)  # [frames, height, width, 3]; the array is read-only
            scaled = self._normalised(pixels).to(self.dtype)
            scaled = scaled.expand(t * c.temporal, -1, -1, -1) if t == 1 else scaled
            parts = scaled.view(t, c.temporal, h, merge, c.patch, w, merge, c.patch, 3)
            inner = _CHANNELS_LAST if c.by_pixel else _CHANNELS_FIRST
            parts = parts.permute(0, 2, 5, 3, *inner)  # [t, h, w, merge, merge, 3, temporal, patch, patch]
            n = rows_of([picture.grid], self.cut)
            into[first : first + n].view(parts.shape).copy_(parts)
            first += n

    def _kept_layout(self, grids: tuple[Grid, ...]) -> PatchLayout:
        """The layout for pictures of these sizes, on the device. The layouts of the last few combinations are kept."""
        layout = self._layouts.pop(grids, None)
        if layout is None:
            arranged = arrange(grids, self.cut)
            layout = self._layout(arranged, upload(arranged.arrays, self.device))
        self._layouts[grids] = layout  # the newest is the last
        if len(self._layouts) > _KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def _layout(self, arranged: Arranged, on: Mapping[str, Tensor], longest: int = 0) -> PatchLayout:
        """The layout from `on`, which is `arranged.arrays` on the device. `longest`: the most rows per frame in a CUDA
        graph."""
        order = on.get("order")
        places = on["places"].flip(1) if self.config.rotation == "axial" else on["places"]  # columns come first
        turns = (places[..., None] * self._inverse).flatten(1)  # [rows, head_dim / 2]
        if order is not None:
            turns = turns.unflatten(0, (-1, self.config.merge**2))[order].flatten(0, 1)
        return PatchLayout(
            arranged.grids,
            turns.cos(),
            turns.sin(),
            on["places"],
            on["sizes"],
            Segments(arranged.frames, self.device, on["frames"], longest),
            Segments(arranged.windows, self.device, on["windows"], self.cut.window_rows),
            order,
            on.get("back"),
            on.get("merged"),
        )


class _FrameBucket:
    """A bucket for passes of up to as many patches as `patches` [rows, patch width] holds. Rows behind those of a pass
    keep what another left there."""

    def __init__(self, tower: FrameTower, patches: Tensor) -> None:
        self._tower, self._room, self._patches = tower, room_for(len(patches), tower.cut), patches
        self._arrange = lru_cache(_KEPT_LAYOUTS)(partial(arrange, cut=tower.cut, room=self._room))
        self._memory: Tensor | None = None
        self.fill([])

    def fill(self, given: list[PatchedPicture]) -> int:
        grids, tower = _grids(given), self._tower
        arrays = self._arrange(grids).arrays
        if self._memory is None:
            self._memory = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=tower.device)
        tower._put_patches(given, self._patches)
        self._step = self._arrange(grids), upload(arrays, tower.device, self._memory)
        return sum(map(tower._tokens, given))

    def compute(self) -> Tensor:
        tower = self._tower
        return tower._forward(self._patches, tower._layout(*self._step, self._room.rows))


def _grids(pictures: list[PatchedPicture]) -> tuple[Grid, ...]:
    return tuple(p.grid for p in pictures if p.grid is not None)
