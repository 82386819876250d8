"""Test pictures by a plain `ImageDraw` script that shares no drawing, layout or wording with the training pictures:
other sizes in pixels, Pillow's named colours, shapes on a loose grid, checked, two-tone and framed backgrounds."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from PIL import Image, ImageDraw

NAMES = ("red", "orange", "yellow", "green", "blue", "purple")
KINDS = ("circle", "square", "triangle", "star")
_BACKS = ("white", "lightgrey", "beige", "lightcyan", "lavender", "dimgrey", "midnightblue", "darkslategrey", "tan")
_TOO_CLOSE = {
    "white": {"yellow"},
    "beige": {"yellow"},
    "dimgrey": {"purple", "green"},
    "midnightblue": {"blue", "purple"},
    "darkslategrey": {"blue", "purple", "green"},
    "tan": {"orange"},
}
_COUNTS = ("None.", "One.", "Two.", "Three.", "Four.", "Five.")
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")


class Case(NamedTuple):
    """One question about one picture, with the answer expected."""

    kind: str
    picture: Image.Image
    question: str
    answer: str


def _draw(pen: ImageDraw.ImageDraw, kind: str, colour: str, x: float, y: float, r: float) -> None:
    if kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=colour)
    elif kind == "triangle":
        pen.polygon([(x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)], fill=colour)
    else:
        tips = [(r if i % 2 == 0 else 0.4 * r, math.pi * (i / 5 - 0.5)) for i in range(10)]
        pen.polygon([(x + d * math.cos(a), y + d * math.sin(a)) for d, a in tips], fill=colour)


def _back(rng: random.Random, side: int, name: str) -> Image.Image:
    canvas = Image.new("RGB", (side, side), name)
    pen, form = ImageDraw.Draw(canvas), rng.random()
    dimmer = tuple(int(0.93 * v) for v in canvas.getpixel((0, 0)))
    if form < 0.2:
        step = side // rng.randint(4, 9)
        for i in range(0, side, step):
            for j in range(0, side, 2 * step):
                pen.rectangle((i, j + (i // step % 2) * step, i + step, j + (i // step % 2) * step + step), dimmer)
    elif form < 0.4:
        pen.rectangle((0, side // 2, side, side), dimmer)
    elif form < 0.5:
        pen.rectangle((0, 0, side - 1, side - 1), outline="grey", width=max(1, side // 90))
    return canvas


def _scene(rng: random.Random, n: int) -> tuple[Image.Image, list[tuple[str, str, float, float]]]:
    """A picture with `n` shapes of distinct (colour, kind), in cells of a grid; (kind, colour, x, y), 0..1."""
    side = rng.choice((300, 336, 400, 512, 640))
    back = rng.choice(_BACKS)
    canvas = _back(rng, side, back)
    pen, cells = ImageDraw.Draw(canvas), 1 if n == 1 and rng.random() < 0.3 else 3
    allowed = [(k, c) for k in KINDS for c in NAMES if c not in _TOO_CLOSE.get(back, ())]
    chosen = rng.sample(allowed, n)
    things = []
    for (kind, colour), cell in zip(chosen, rng.sample(range(cells * cells), n)):
        room = 1 / cells
        r = rng.uniform(0.28, 0.44) * room
        x, y = (room * (at + 0.5) + rng.uniform(-1, 1) * (room / 2 - r) * 0.8 for at in (cell % cells, cell // cells))
        _draw(pen, kind, colour, x * side, y * side, r * side)
        things.append((kind, colour, x, y))
    return canvas, things


def _repeated(rng: random.Random, n: int) -> tuple[Image.Image, str, str]:
    """A picture with `n` equal things and its (kind, colour)."""
    side, back = rng.choice((300, 336, 400, 512, 640)), rng.choice(_BACKS)
    canvas = _back(rng, side, back)
    kind, colour = rng.choice(KINDS), rng.choice([c for c in NAMES if c not in _TOO_CLOSE.get(back, ())])
    for cell in rng.sample(range(9), n):
        x, y = ((at + 0.5) / 3 + rng.uniform(-0.04, 0.04) for at in (cell % 3, cell // 3))
        _draw(ImageDraw.Draw(canvas), kind, colour, x * side, y * side, rng.uniform(0.09, 0.13) * side)
    return canvas, kind, colour


def _article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def cases(seed: int, n: int) -> list[Case]:
    """`n` of each kind."""
    rng = random.Random(seed)
    return [made for _ in range(n) for made in (_exists(rng), _colour(rng), _shape(rng), _count(rng), _place(rng))]


def _exists(rng: random.Random) -> Case:
    canvas, things = _scene(rng, rng.randint(1, 4))
    there = {(k, c) for k, c, _, _ in things}
    yes = rng.random() < 0.5
    kind, colour = rng.choice([p for k in KINDS for c in NAMES if ((p := (k, c)) in there) == yes])
    return Case("exists", canvas, f"Is there {_article(colour)} {kind}?", "Yes." if yes else "No.")


def _colour(rng: random.Random) -> Case:
    while True:
        canvas, things = _scene(rng, rng.randint(1, 4))
        once = [(k, c) for k, c, _, _ in things if sum(t[0] == k for t in things) == 1]
        if once:
            kind, colour = rng.choice(once)
            return Case("colour", canvas, f"What colour is the {kind}?", f"{colour.capitalize()}.")


def _shape(rng: random.Random) -> Case:
    while True:
        canvas, things = _scene(rng, rng.randint(1, 4))
        once = [(k, c) for k, c, _, _ in things if sum(t[1] == c for t in things) == 1]
        if once:
            kind, colour = rng.choice(once)
            return Case("shape", canvas, f"What shape is the {colour} one?", f"{_article(kind).capitalize()}.")


def _count(rng: random.Random) -> Case:
    n = rng.randint(1, 5)
    if rng.random() < 0.5:
        return Case("count", _scene(rng, n)[0], "How many shapes are there?", _COUNTS[n])
    canvas, kind, colour = _repeated(rng, n)
    return Case("count", canvas, f"How many {colour} {kind}s are there?", _COUNTS[n])


def _place(rng: random.Random) -> Case:
    canvas, things = _scene(rng, 1)
    kind, colour, x, y = things[0]
    row, column = _ROWS[int(3 * y)], _COLUMNS[int(3 * x)]
    if row == column == "middle":
        answer = "In the centre."
    elif row == "middle":
        answer = f"On the {column}."
    else:
        answer = f"At the {row}" + ("." if column == "middle" else f" {column}.")
    return Case("position", canvas, f"Where is the {colour} {kind}?", answer)
