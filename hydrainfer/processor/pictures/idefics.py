"""Pictures for Idefics3 and SmolVLM: resized up to three times, each time rounded, and cut into square tiles.

picture -> longest edge -> multiples of a tile -> tiles row by row, then the whole in one tile
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from hydrainfer.checkpoint import IdeficsSettings, ModelConfig
from hydrainfer.processor.pictures.adapter import ImageAdapter, InnerText, MediaItem, without_options
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels

_LONGEST = 4096  # pixels that no side exceeds after the first resize
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class IdeficsImages:
    """An `ImageAdapter`. A picture that fits one tile is one; a larger one is its tiles and the whole, with a text
    before each. `n_tokens`: the rows of a tile."""

    def __init__(self, settings: IdeficsSettings, n_tokens: int) -> None:
        self.settings, self._n_tokens = settings, n_tokens
        self.parameters = b"idefics|" + msgspec.json.encode(settings)

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        return without_options(options, self)

    def fit(self, width: int, height: int) -> MediaItem:
        rows, columns = self._tiles(width, height)
        n = self._n_tokens
        if rows * columns == 1:
            return MediaItem(n, before=f"{_AROUND}{_WHOLE}", after=_AROUND)
        tiles = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        before, *others = (f"{_AROUND}<row_{row}_col_{column}>" for row, column in tiles)
        inner = [
            InnerText(f"\n{text}" if column == 1 else text, (i * n,), 2 + (column == 1))
            for i, (text, (_, column)) in enumerate(zip(others, tiles[1:]), 1)
        ]
        inner.append(InnerText(f"\n\n{_AROUND}{_WHOLE}", (len(tiles) * n,), 3))
        return MediaItem(n * (len(tiles) + 1), before=before, after=_AROUND, inner=tuple(inner))

    def pixels(self, picture: Picture) -> Pixels:
        """uint8 [tiles, side, side, 3]: the tiles row by row and, if there are several, the whole picture."""
        s, side = self.settings, self.settings.tile
        if s.edge is not None:
            picture = self._resized(picture, *_within(*picture.size, s.edge))
        rows, columns = self._tiles(*picture.size) if s.edge is None else _grid(*picture.size, side)
        if not s.split:
            return self._array(picture, side, side)[None]
        whole = self._resized(picture, columns * side, rows * side)
        tiles = np.asarray(whole.image).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        found = np.empty((rows * columns + (rows * columns > 1), side, side, 3), np.uint8)
        found[: rows * columns] = tiles.reshape(-1, side, side, 3)
        if rows * columns > 1:
            found[-1] = self._array(whole, side, side)
        return found

    def _resized(self, picture: Picture, width: int, height: int) -> Picture:
        return picture._replace(image=Image.fromarray(self._array(picture, width, height)), full=None)

    def _array(self, picture: Picture, width: int, height: int) -> np.ndarray:
        return picture.resized(ResizeTarget(width, height, self.settings.resample, self.settings.backend))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles of a picture; (1, 1) if it is one tile."""
        s = self.settings
        if not s.split:
            return 1, 1
        if s.edge is not None:
            width, height = _within(width, height, s.edge)
        return _grid(width, height, s.tile)


def _within(width: int, height: int, edge: int) -> tuple[int, int]:
    """(width, height) with the longest edge resized to `edge`, the other one in proportion, rounded down and then up to
    an even number, and both at most `_LONGEST`."""
    aspect = width / height
    if width >= height:
        width, height = edge, int(edge / aspect)
        height += height % 2
    else:
        width, height = int(edge * aspect), edge
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / aspect)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * aspect), _LONGEST
    return max(width, 1), max(height, 1)


def _grid(width: int, height: int, side: int) -> tuple[int, int]:
    """Rows and columns of tiles that hold a picture of this size: the longer edge decides, the other one follows in
    proportion."""
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / side)
        return math.ceil(int(columns * side / aspect) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * aspect) / side)


def idefics_images(model: ModelConfig) -> IdeficsImages:
    """The adapter of an Idefics3 or SmolVLM checkpoint."""
    return IdeficsImages(model.vision.pixels, model.vision.square_tokens)
