"""Draws the sample pictures: `python -m training.builtin.samples` rewrites datasets/samples and the package's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from hydrainfer import builtin
from training.builtin.draw import outline

FOLDER = Path("datasets/samples")
DIGIT = 1718  # of scikit-learn's load_digits; held out from training
_SIDE, _FINER = 384, 4
_PAINT = {"red": "#d62828", "blue": "#1d5fd1", "green": "#2a9d3a", "yellow": "#f7d417", "purple": "#7b2cbf"}
_SHAPES = {  # file → background and (kind, colour, x, y, size, angle), as shares of the side
    "shapes.png": (
        "#f4f1ea",
        [
            ("circle", "red", 0.27, 0.3, 0.34, 0),
            ("square", "blue", 0.72, 0.33, 0.34, 6),
            ("star", "green", 0.5, 0.75, 0.36, -4),
        ],
    ),
    "stars.png": (
        "#dfe9f2",
        [
            ("star", "purple", 0.24, 0.26, 0.28, 0),
            ("star", "purple", 0.72, 0.3, 0.3, 8),
            ("star", "purple", 0.3, 0.73, 0.26, -6),
            ("star", "purple", 0.75, 0.74, 0.24, 0),
        ],
    ),
    "night.png": ("#1b2340", [("star", "yellow", 0.22, 0.22, 0.26, 5), ("circle", "red", 0.68, 0.66, 0.4, 0)]),
}


def shapes(back: str, things: list[tuple[str, str, float, float, float, float]]) -> Image.Image:
    """Drawn four times as large and reduced, so that edges are smooth."""
    side = _SIDE * _FINER
    canvas = Image.new("RGB", (side, side), back)
    pen = ImageDraw.Draw(canvas)
    for kind, colour, x, y, size, angle in things:
        pen.polygon(outline(kind, x * side, y * side, size * side, angle), _PAINT[colour])
    return canvas.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)


def digit(index: int) -> Image.Image:
    """Dark ink on paper."""
    from sklearn.datasets import load_digits

    small = np.pad(load_digits().images[index] / 16 * 255, 2).astype(np.uint8)
    ink = Image.fromarray(small).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    paper, pen = (Image.new("RGB", (_SIDE, _SIDE), c) for c in ("#faf6e9", "#22304a"))
    return Image.composite(pen, paper, ink)


def main() -> None:
    made = {name: shapes(*content) for name, content in _SHAPES.items()} | {"digit.png": digit(DIGIT)}
    for name, picture in made.items():
        few = picture.quantize(64, dither=Image.Dither.NONE)
        few.save(FOLDER / name, optimize=True)
    made["shapes.png"].quantize(64, dither=Image.Dither.NONE).save(builtin.PICTURE, optimize=True)


if __name__ == "__main__":
    main()
