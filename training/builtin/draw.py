"""Draws scenes with Pillow: several styles, backgrounds, sizes in pixels and kinds of noise."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.builtin.scene import Thing

RGB = tuple[int, int, int]
Polygon = list[tuple[float, float]]
_SHADES = {  # hue in degrees, saturation, value: ranges that a person would give that name
    "red": ((-8, 7), (0.75, 1.0), (0.65, 1.0)),
    "orange": ((22, 39), (0.85, 1.0), (0.9, 1.0)),
    "yellow": ((51, 61), (0.75, 1.0), (0.88, 1.0)),
    "green": ((92, 155), (0.6, 1.0), (0.4, 0.9)),
    "blue": ((203, 244), (0.65, 1.0), (0.5, 1.0)),
    "purple": ((268, 303), (0.5, 1.0), (0.4, 0.8)),
}


def shade(rng: np.random.Generator, colour: str) -> RGB:
    hue, saturation, value = (rng.uniform(*r) for r in _SHADES[colour])
    return hsv(hue, saturation, value)


def hsv(hue: float, saturation: float, value: float) -> RGB:
    """Hue in degrees, the rest 0..1."""

    def channel(n: int) -> int:
        k = (n + hue / 60) % 6
        return round(255 * (value - value * saturation * max(0.0, min(k, 4 - k, 1.0))))

    return channel(5), channel(3), channel(1)


def apart(a: RGB, b: RGB) -> float:
    """How different two colours look, about 0..765 ("redmean")."""
    mean = (a[0] + b[0]) / 2
    r, g, b_ = (x - y for x, y in zip(a, b))
    return math.sqrt((2 + mean / 256) * r * r + 4 * g * g + (2 + (255 - mean) / 256) * b_ * b_)


def outline(kind: str, x: float, y: float, size: float, angle: float) -> Polygon:
    """The polygon of a thing in pixels. The square's side is 0.86 of `size`, so that all kinds look equally large."""
    r, turn = size / 2, math.radians(angle)
    if kind == "circle":
        points = [(math.cos(t), math.sin(t)) for t in np.linspace(0, 2 * math.pi, 40, endpoint=False)]
    elif kind == "square":
        points = [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]
    elif kind == "triangle":
        points = [(0.0, -0.95), (0.95, 0.8), (-0.95, 0.8)]
    else:
        radii = [1.0, 0.43] * 5
        points = [(f * math.sin(i * math.pi / 5), -f * math.cos(i * math.pi / 5)) for i, f in enumerate(radii)]
    c, s = math.cos(turn) * r, math.sin(turn) * r
    return [(x + px * c - py * s, y + px * s + py * c) for px, py in points]


def things(rng: np.random.Generator, canvas: Image.Image, scene: tuple[Thing, ...], back: RGB) -> None:
    """Draw onto `canvas`, in one style for the picture, with colours that stand out against `back`."""
    side, draw = canvas.width, ImageDraw.Draw(canvas)
    style = str(rng.choice(("fill", "edge", "shadow"), p=(0.75, 0.18, 0.07)))
    fills: dict[str, RGB] = {}
    for t in scene:
        if t.colour not in fills or rng.random() < 0.3:
            fills[t.colour] = _standing_out(rng, t.colour, back)
        fill = fills[t.colour]
        points = outline(t.kind, t.x * side, t.y * side, t.size * side, t.angle)
        width = max(1, round(t.size * side * rng.uniform(0.03, 0.07)))
        if style == "shadow":
            off = 0.06 * t.size * side
            draw.polygon([(x + off, y + off) for x, y in points], tuple(int(v * 0.6) for v in back))
        draw.polygon(points, fill)
        if style == "edge":
            edge = (0, 0, 0) if rng.random() < 0.6 else tuple(int(v * 0.55) for v in fill)
            draw.line([*points, points[0], points[1]], edge, width, joint="curve")


def _standing_out(rng: np.random.Generator, colour: str, back: RGB) -> RGB:
    tried = [shade(rng, colour) for _ in range(4)]
    return max(tried, key=lambda rgb: min(apart(rgb, back), 200.0))


def plain(rng: np.random.Generator, colours: set[str]) -> RGB:
    """A background colour unlike every colour of the scene."""
    for _ in range(200):
        kind = rng.random()
        if kind < 0.25:
            back = (255, 255, 255)
        elif kind < 0.45:
            back = (int(v := rng.uniform(150, 255)), int(v), int(v))
        elif kind < 0.55:
            back = (int(v := rng.uniform(0, 90)), int(v), int(v))
        elif kind < 0.8:
            back = hsv(rng.uniform(0, 360), rng.uniform(0.05, 0.4), rng.uniform(0.6, 1.0))
        else:
            back = hsv(rng.uniform(0, 360), rng.uniform(0.1, 1.0), rng.uniform(0.1, 0.9))
        if all(_differs(back, c) for c in colours):
            return back
    return (128, 128, 128)


def _differs(back: RGB, colour: str) -> bool:
    (h0, h1), (s0, s1), (v0, v1) = _SHADES[colour]
    middle = hsv((h0 + h1) / 2, (s0 + s1) / 2, (v0 + v1) / 2)
    return apart(back, middle) > 180


def background(rng: np.random.Generator, side: int, back: RGB) -> Image.Image:
    """`back`, often with a gradient, noise, stripes, a grid or soft clouds of about that colour."""
    style, canvas = rng.random(), Image.new("RGB", (side, side), back)
    if style < 0.5:
        return canvas
    base = np.array(back, np.float32)
    if style < 0.65:
        angle = rng.uniform(0, 2 * math.pi)
        ramp = np.linspace(-0.5, 0.5, side)[:, None] * math.sin(angle) + np.linspace(-0.5, 0.5, side) * math.cos(angle)
        made = base + ramp[..., None] * rng.uniform(-60, 60, 3)
    elif style < 0.75:
        made = base + rng.normal(0, rng.uniform(3, 18), (side, side, 1))
    elif style < 0.88:
        cells = rng.normal(0, rng.uniform(5, 18), (int(rng.integers(2, 9)),) * 2)
        clouds = Image.fromarray(cells.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
        made = base + np.asarray(clouds)[..., None]
    else:
        return _lines(rng, canvas, back)
    return Image.fromarray(np.clip(made, 0, 255).astype(np.uint8))


def _lines(rng: np.random.Generator, canvas: Image.Image, back: RGB) -> Image.Image:
    draw, side = ImageDraw.Draw(canvas), canvas.width
    step = rng.uniform(0.05, 0.2) * side
    ink = tuple(int(np.clip(v + rng.uniform(-30, 30), 0, 255)) for v in back)
    width = max(1, int(step * rng.uniform(0.05, 0.3)))
    both = rng.random() < 0.5
    for i in range(int(side / step) + 1):
        draw.line((0, i * step, side, i * step), ink, width)
        if both:
            draw.line((i * step, 0, i * step, side), ink, width)
    return canvas


def spoil(rng: np.random.Generator, picture: Image.Image) -> Image.Image:
    """What cameras and files do: blur, noise, JPEG."""
    if rng.random() < 0.08:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.0) * picture.width / 150))
    if rng.random() < 0.15:
        pixels = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(2, 10), (picture.width, picture.width, 3))
        picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(rng.integers(40, 96)))
        picture = Image.open(file).convert("RGB")
    return picture
