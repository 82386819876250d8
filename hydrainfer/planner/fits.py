"""Embedding tokens of a picture by its size, for families whose adapters `processor` does not have yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def fit_anyres(config: dict[str, Any], given: dict[str, Any]) -> Callable[[int, int], int]:
    """LLaVA-NeXT (`get_number_of_features` of transformers): the whole picture in one square, and tiles of the canvas
    that keeps most of it and wastes least, freed of padding, each row ended by a newline."""
    tile = config["vision_config"]["image_size"]
    side = tile // config["vision_config"]["patch_size"]
    points = given.get("image_grid_pinpoints") or config["image_grid_pinpoints"]

    def fit(width: int, height: int) -> int:
        def kept(point: tuple[int, int]) -> tuple[int, int]:
            high, wide = point
            scale = min(wide / width, high / height)
            n = min(int(width * scale) * int(height * scale), width * height)
            return n, n - high * wide

        high, wide = max(points, key=kept)
        rows, columns = high // tile * side, wide // tile * side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return side**2 + rows * (columns + 1)

    return fit


def fit_qwen(config: dict[str, Any], given: dict[str, Any]) -> Callable[[int, int], int]:
    """Qwen2-VL (`smart_resize` of transformers): both sides become multiples of a token's square, the area is within
    limits."""
    factor = given.get("patch_size", config["vision_config"]["patch_size"]) * given.get("merge_size", 2)
    least, most = given.get("min_pixels") or 56 * 56, given.get("max_pixels") or 28 * 28 * 1280

    def fit(width: int, height: int) -> int:
        h, w = (max(factor, round(side / factor) * factor) for side in (height, width))
        if h * w > most:
            scale = math.sqrt(height * width / most)
            h, w = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        elif h * w < least:
            scale = math.sqrt(least / (height * width))
            h, w = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return h * w // factor**2

    return fit
