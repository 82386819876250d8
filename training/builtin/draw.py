"""Draws scenes with Pillow: several styles, backgrounds, sizes in pixels and kinds of noise."""

from __future__ import annotations

import io
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.builtin.scene import Thing

RGB = tuple[int, int, int]
Polygon = list[tuple[float, float]]
_SHADES = {  # hue in degrees, saturation, value: ranges that a person would give that name
    "red": ((-10, 8), (0.7, 1.0), (0.6, 1.0)),
    "orange": ((21, 40), (0.8, 1.0), (0.85, 1.0)),
    "yellow": ((50, 63), (0.7, 1.0), (0.85, 1.0)),
    "green": ((88, 160), (0.55, 1.0), (0.35, 0.95)),
    "blue": ((200, 248), (0.6, 1.0), (0.45, 1.0)),
    "purple": ((265, 308), (0.45, 1.0), (0.35, 0.85)),
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


class Form(NamedTuple):
    """How the things of a picture are built: a star's inner radius, a square's half side, a triangle's (top, bottom,
    half width), in radii. These make all kinds look equally large."""

    star: float = 0.43
    square: float = 0.86
    triangle: tuple[float, float, float] = (0.95, 0.8, 0.95)


def form(rng: np.random.Generator) -> Form:
    if rng.random() < 0.3:
        return Form()
    triangle = rng.uniform(0.82, 1.0), rng.uniform(0.6, 0.9), rng.uniform(0.82, 1.0)
    return Form(rng.uniform(0.34, 0.52), rng.uniform(0.76, 0.92), triangle)


def outline(kind: str, x: float, y: float, size: float, angle: float, form: Form = Form()) -> Polygon:  # noqa: B008
    """The polygon of a thing in pixels."""
    r, turn = size / 2, math.radians(angle)
    if kind == "circle":
        points = [(math.cos(t), math.sin(t)) for t in np.linspace(0, 2 * math.pi, 40, endpoint=False)]
    elif kind == "square":
        a = form.square
        points = [(-a, -a), (a, -a), (a, a), (-a, a)]
    elif kind == "triangle":
        top, bottom, half = form.triangle
        points = [(0.0, -top), (half, bottom), (-half, bottom)]
    else:
        radii = [1.0, form.star] * 5
        points = [(f * math.sin(i * math.pi / 5), -f * math.cos(i * math.pi / 5)) for i, f in enumerate(radii)]
    c, s = math.cos(turn) * r, math.sin(turn) * r
    return [(x + px * c - py * s, y + px * s + py * c) for px, py in points]


def things(rng: np.random.Generator, canvas: Image.Image, scene: tuple[Thing, ...], back: RGB) -> Image.Image:
    """`canvas` with the things, in one style for the picture, with colours that stand out against `back`. Half of the
    pictures have smooth edges, drawn larger and reduced."""
    finer = 1 if rng.random() < 0.5 else 2 if canvas.width > 200 else 3
    large = canvas.resize((canvas.width * finer,) * 2, Image.Resampling.NEAREST) if finer > 1 else canvas
    _things(rng, large, scene, back)
    return large.reduce(finer)


def _things(rng: np.random.Generator, canvas: Image.Image, scene: tuple[Thing, ...], back: RGB) -> None:
    side, draw, built = canvas.width, ImageDraw.Draw(canvas), form(rng)
    style = str(rng.choice(("fill", "edge", "shadow"), p=(0.68, 0.24, 0.08)))
    fills: dict[str, RGB] = {}
    for t in scene:
        if t.colour not in fills or rng.random() < 0.3:
            fills[t.colour] = _standing_out(rng, t.colour, back)
        fill = fills[t.colour]
        points = outline(t.kind, t.x * side, t.y * side, t.size * side, t.angle, built)
        width = max(1, round(t.size * side * rng.uniform(0.02, 0.08)))
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
    return apart(back, middle) > 165


def background(rng: np.random.Generator, side: int, back: RGB) -> Image.Image:
    """`back`, often with a gradient, noise, stripes, a grid, pale forms or soft clouds of about that colour."""
    style, canvas = rng.random(), Image.new("RGB", (side, side), back)
    if style < 0.4:
        return canvas
    if style < 0.55:
        return _pale(rng, canvas, back)
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


def _about(rng: np.random.Generator, back: RGB) -> RGB:
    """A colour a little unlike `back`."""
    r, g, b = (int(np.clip(v + rng.uniform(-30, 30), 0, 255)) for v in back)
    return r, g, b


def _pale(rng: np.random.Generator, canvas: Image.Image, back: RGB) -> Image.Image:
    """A few large or many small forms that are hardly darker or lighter: polygons of any place, half out of the
    picture, which no question is about."""
    draw, side, inks = ImageDraw.Draw(canvas), canvas.width, [_about(rng, back) for _ in range(2)]
    few = rng.random() < 0.5
    for _ in range(int(rng.integers(1, 4) if few else rng.integers(5, 25))):
        x, y = rng.uniform(-0.1, 1.1, 2) * side
        r, turn = side * (rng.uniform(0.3, 1.0) if few else rng.uniform(0.03, 0.15)), rng.uniform(0, 2 * math.pi)
        corners = np.arange(int(rng.integers(3, 9)))
        ends = [turn + 2 * math.pi * i / len(corners) for i in corners]
        draw.polygon([(x + r * math.cos(t), y + r * math.sin(t)) for t in ends], inks[int(rng.integers(0, 2))])
    return canvas


def _lines(rng: np.random.Generator, canvas: Image.Image, back: RGB) -> Image.Image:
    draw, side = ImageDraw.Draw(canvas), canvas.width
    step = rng.uniform(0.05, 0.2) * side
    ink = _about(rng, back)
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
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.2) * picture.width / 150))
    if rng.random() < 0.2:
        pixels = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(2, 10), (picture.width, picture.width, 3))
        picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if rng.random() < 0.2:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(rng.integers(40, 96)))
        picture = Image.open(file).convert("RGB")
    return picture
