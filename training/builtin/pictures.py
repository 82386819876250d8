"""Seeded pictures with their scenes, preprocessed as the server does it, in cached shards.

python -m training.builtin.pictures CACHE --shards 24      # renders what is missing
"""

from __future__ import annotations

import argparse
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from hydrainfer.checkpoint import ClipSettings
from hydrainfer.processor import ClipImages, Picture
from training.builtin import draw, sources
from training.builtin.scene import COLOURS, KINDS, Scene, Thing, sample_shapes

SIDE, PATCH = 96, 12
GRID = SIDE // PATCH
SHARD = 4096
N_MARKS = 3 + (PATCH // 2) ** 2 + 3
_IMAGES = ClipImages(ClipSettings(resize=SIDE, crop=(SIDE, SIDE)), GRID * GRID)


@dataclass(frozen=True, slots=True)
class Shard:
    """`pixels` uint8 [n, SIDE, SIDE, 3]; `marks` uint8 [n, GRID * GRID, N_MARKS], see `marks`."""

    pixels: np.ndarray
    marks: np.ndarray
    scenes: list[Scene]


def make(rng: np.random.Generator, held_out: bool = False) -> tuple[Image.Image, Scene, np.ndarray]:
    """A picture of any kind, at its own size in pixels, and its marks."""
    what = str(rng.choice(("shapes", "digit", "photo", "empty"), p=(0.7, 0.2, 0.085, 0.015)))
    return make_one(rng, what, held_out)


def make_one(rng: np.random.Generator, what: str, held_out: bool = False) -> tuple[Image.Image, Scene, np.ndarray]:
    side = int(rng.choice((96, 128, 192, int(rng.integers(64, 320))), p=(0.15, 0.15, 0.2, 0.5)))
    side = side * 2 if rng.random() < 0.1 else side
    if what == "digit":
        picture, value, ink = sources.digit(rng, side, held_out)
        return draw.spoil(rng, picture), Scene(what, digit=value), _digit_marks(ink, value)
    if what == "photo":
        return sources.photo(rng, side, held_out), Scene(what), marks(np.zeros((SIDE, SIDE), np.uint8), [])
    things = sample_shapes(rng) if what == "shapes" else ()
    back = draw.plain(rng, {t.colour for t in things})
    canvas = draw.background(rng, side, back)
    canvas = draw.things(rng, canvas, things, back)
    return draw.spoil(rng, canvas), Scene(what, things), _shape_marks(things)


def preprocess(picture: Image.Image) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3], by the server's own code."""
    return _IMAGES.pixels(Picture(picture.convert("RGB"), "RGB"))


class Owner(NamedTuple):
    """What covers a patch: `kind` from 1, of `KINDS` and the digits; `colour` from 1, or 0; place and size 0..1."""

    kind: int
    colour: int
    x: float
    y: float
    size: float


def _shape_marks(things: tuple[Thing, ...]) -> np.ndarray:
    owner = Image.new("L", (SIDE, SIDE))
    pen = ImageDraw.Draw(owner)
    for i, t in enumerate(things):
        pen.polygon(draw.outline(t.kind, t.x * SIDE, t.y * SIDE, t.size * SIDE, t.angle), i + 1)
    owners = [Owner(KINDS.index(t.kind) + 1, COLOURS.index(t.colour) + 1, t.x, t.y, t.size) for t in things]
    return marks(np.asarray(owner), owners)


def _digit_marks(ink: Image.Image, value: int) -> np.ndarray:
    there = np.asarray(ink.resize((SIDE, SIDE), Image.Resampling.BOX)) > 80
    ys, xs = np.nonzero(there)
    if not len(ys):
        return marks(np.zeros((SIDE, SIDE), np.uint8), [])
    x, y = ((v.min() + v.max() + 1) / 2 / SIDE for v in (xs, ys))
    size = (max(np.ptp(xs), np.ptp(ys)) + 1) / SIDE
    return marks(there.astype(np.uint8), [Owner(len(KINDS) + 1 + value, 0, x, y, size)])


def marks(owner: np.ndarray, owners: list[Owner]) -> np.ndarray:
    """`owner` [SIDE, SIDE], 0 or the number from 1 of what is there → uint8 [GRID * GRID, N_MARKS], per patch: kind and
    colour that cover it, whether a centre is in it, its mask at half resolution, the way to the centre and the size."""
    found = np.zeros((GRID * GRID, N_MARKS), np.uint8)
    patches = owner.reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2).reshape(GRID * GRID, PATCH, PATCH)
    found[:, 3:-3] = (patches[:, 1::2, 1::2] > 0).reshape(GRID * GRID, -1)
    counts = np.stack([(patches == i + 1).sum((1, 2)) for i in range(len(owners))] or [np.zeros(GRID * GRID)], 1)
    best, enough = counts.argmax(1), counts.max(1) >= PATCH * PATCH // 8
    for o in owners:
        found[min(int(o.y * GRID), GRID - 1) * GRID + min(int(o.x * GRID), GRID - 1), 2] = 1
    for p in np.flatnonzero(enough):
        o = owners[best[p]]
        dx, dy = o.x - (p % GRID + 0.5) / GRID, o.y - (p // GRID + 0.5) / GRID
        found[p, :2] = o.kind, o.colour
        found[p, -3:] = 128 + 127 * dx, 128 + 127 * dy, 255 * min(o.size, 1)
    return found


def shard(cache: Path, seed: int, index: int) -> Shard:
    """Read, or rendered and kept."""
    path = cache / f"pictures-{seed}-{index:03d}.pickle"
    if not path.exists():
        rng = np.random.default_rng([seed, index])
        pictures, scenes, marked = zip(*(make(rng) for _ in range(SHARD)))
        content = Shard(np.stack([preprocess(p) for p in pictures]), np.stack(marked), list(scenes))
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(content, protocol=5))
        part.replace(path)
        return content
    return pickle.loads(path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the training pictures.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    a.cache.mkdir(parents=True, exist_ok=True)
    for i in range(a.shards):
        made = shard(a.cache, a.seed, i)
        print(f"shard {i}: {len(made.scenes)} pictures", flush=True)


if __name__ == "__main__":
    from training.builtin.pictures import main  # its classes, not those of `__main__`, go into the files

    main()
