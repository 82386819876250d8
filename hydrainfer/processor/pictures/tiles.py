"""Pictures that are cut into squares by their ratio, the whole picture last, with the same result as
`GotOcr2ImageProcessor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from hydrainfer.checkpoint import ModelConfig, TileSettings
from hydrainfer.processor.pictures.adapter import (
    FRAME_OPTIONS,
    ImageAdapter,
    MediaItem,
    given_options,
    wrong_option,
)
from hydrainfer.processor.pictures.media import Picture, ResizeTarget
from hydrainfer.processor.pictures.pixels import Pixels

TILE_OPTIONS = ("crop_to_patches", "min_patches", "max_patches", *FRAME_OPTIONS)


class TileImages:
    """An `ImageAdapter`. `n_tokens`: of each square; `before`, `after`: texts around the placeholders of a picture."""

    def __init__(
        self, settings: TileSettings, n_tokens: int, before: str = "", after: str = "", limit: int | None = None
    ) -> None:
        """`limit` is the highest number of tiles that a request may ask for."""
        self.settings = settings
        self.parameters = b"tiles|" + msgspec.json.encode(settings)
        self._n_tokens, self._around, self._limit = n_tokens, (before, after), limit or settings.most
        counts = [(c, r) for c in range(1, settings.most + 1) for r in range(1, settings.most // c + 1)]
        counts = [(columns, rows) for columns, rows in counts if settings.tiles and columns * rows >= settings.least]
        self._counts = sorted(counts, key=lambda count: count[0] * count[1])

    def configured(self, options: Mapping[str, Any]) -> ImageAdapter:
        values = given_options(options, TILE_OPTIONS)
        tiles = values.get("crop_to_patches", self.settings.tiles)
        least, most = values.get("min_patches", self.settings.least), values.get("max_patches", self.settings.most)
        if not isinstance(tiles, bool):
            raise wrong_option("crop_to_patches must be true or false")
        if type(least) is not int or type(most) is not int or not 1 <= least <= most <= self._limit:
            raise wrong_option(f"min_patches and max_patches must be whole numbers, 1 to {self._limit}, in this order")
        settings = msgspec.structs.replace(self.settings, tiles=tiles, least=least, most=most)
        return TileImages(settings, self._n_tokens, *self._around, self._limit)

    def fit(self, width: int, height: int) -> MediaItem:
        before, after = self._around
        return MediaItem(self._n_squares(*self._count(width, height)) * self._n_tokens, before=before, after=after)

    def pixels(self, picture: Picture) -> Pixels:
        """uint8 [squares, tile, tile, 3]: the tiles row by row, then the whole picture."""
        side, (columns, rows) = self.settings.tile, self._count(*picture.size)
        squares = np.empty((self._n_squares(columns, rows), side, side, 3), dtype=np.uint8)
        tiles = picture.resized(self._target(columns, rows)).reshape(rows, side, columns, side, 3)
        squares[: columns * rows] = tiles.swapaxes(1, 2).reshape(-1, side, side, 3)
        if len(squares) > columns * rows:
            squares[-1] = picture.resized(self._target(1, 1))
        return squares

    def _target(self, columns: int, rows: int) -> ResizeTarget:
        s = self.settings
        return ResizeTarget(columns * s.tile, rows * s.tile, s.resample, s.backend)

    @staticmethod
    def _n_squares(columns: int, rows: int) -> int:
        n = columns * rows
        return n + 1 if n > 1 else n

    def _count(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of a picture's tiles: those whose ratio is nearest to its own. Of equally near ones the last,
        unless its tiles have twice the picture's pixels or more."""
        best, least = (1, 1), float("inf")
        for columns, rows in self._counts:
            difference = abs(width / height - columns / rows)
            small = width * height > 0.5 * self.settings.tile**2 * columns * rows
            if difference < least or (difference == least and small):
                best, least = (columns, rows), difference
        return best


def tile_images(model: ModelConfig, before: str = "", after: str = "") -> TileImages:
    """The adapter of a checkpoint whose tower takes squares of a picture."""
    return TileImages(model.vision.pixels, model.vision.square_tokens, before, after)


def internvl_images(model: ModelConfig) -> TileImages:
    """The adapter of an InternVL checkpoint, whose processor writes the texts around a picture itself."""
    return tile_images(model, "<img>", "</img>")
