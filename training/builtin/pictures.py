"""Seeded pictures with their scenes, preprocessed as the server does it, in cached shards.

python -m training.builtin.pictures CACHE --shards 24      # renders what is missing
"""

from __future__ import annotations

import argparse
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from hydrainfer.processor.clip import ClipImages, ClipSettings
from hydrainfer.processor.media import Picture
from training.builtin import draw, sources
from training.builtin.scene import COLOURS, KINDS, Scene, sample_shapes

SIDE, PATCH = 96, 12
GRID = SIDE // PATCH
SHARD = 4096
_IMAGES = ClipImages(ClipSettings(resize=SIDE, crop=(SIDE, SIDE)), GRID * GRID)


@dataclass(frozen=True, slots=True)
class Shard:
    """`pixels` uint8 [n, SIDE, SIDE, 3]; `marks` uint8 [n, GRID * GRID, 3]: per patch the kind and the colour that
    cover it (0: none, i + 1) and whether a thing's centre is in it."""

    pixels: np.ndarray
    marks: np.ndarray
    scenes: list[Scene]


def make(rng: np.random.Generator, held_out: bool = False) -> tuple[Image.Image, Scene]:
    """A picture of any kind, at its own size in pixels."""
    what = str(rng.choice(("shapes", "digit", "photo", "empty"), p=(0.69, 0.19, 0.1, 0.02)))
    return make_one(rng, what, held_out)


def make_one(rng: np.random.Generator, what: str, held_out: bool = False) -> tuple[Image.Image, Scene]:
    side = int(rng.choice((96, 128, 192, int(rng.integers(96, 260))), p=(0.2, 0.2, 0.25, 0.35)))
    if what == "digit":
        picture, value = sources.digit(rng, side, held_out)
        return draw.spoil(rng, picture), Scene(what, digit=value)
    if what == "photo":
        return sources.photo(rng, side, held_out), Scene(what)
    things = sample_shapes(rng) if what == "shapes" else ()
    back = draw.plain(rng, {t.colour for t in things})
    canvas = draw.background(rng, side, back)
    draw.things(rng, canvas, things, back)
    return draw.spoil(rng, canvas), Scene(what, things)


def preprocess(picture: Image.Image) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3], by the server's own code."""
    return _IMAGES.pixels(Picture(picture.convert("RGB"), "RGB"))


def marks(scene: Scene) -> np.ndarray:
    """uint8 [GRID * GRID, 3], see `Shard`."""
    owner = Image.new("L", (SIDE, SIDE))
    pen = ImageDraw.Draw(owner)
    found = np.zeros((GRID * GRID, 3), np.uint8)
    for i, t in enumerate(scene.things):
        pen.polygon(draw.outline(t.kind, t.x * SIDE, t.y * SIDE, t.size * SIDE, t.angle), i + 1)
        found[int(t.y * GRID) * GRID + int(t.x * GRID), 2] = 1
    patches = np.asarray(owner).reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2).reshape(GRID * GRID, -1)
    covered = np.stack([(patches == i + 1).sum(1) for i in range(len(scene.things))] or [np.zeros(GRID * GRID)], 1)
    best, enough = covered.argmax(1), covered.max(1) >= PATCH * PATCH // 5
    for p in np.flatnonzero(enough):
        t = scene.things[best[p]]
        found[p, :2] = KINDS.index(t.kind) + 1, COLOURS.index(t.colour) + 1
    return found


def shard(cache: Path, seed: int, index: int) -> Shard:
    """Read, or rendered and kept."""
    path = cache / f"pictures-{seed}-{index:03d}.pickle"
    if not path.exists():
        rng = np.random.default_rng([seed, index])
        made = [make(rng) for _ in range(SHARD)]
        scenes = [s for _, s in made]
        content = Shard(np.stack([preprocess(p) for p, _ in made]), np.stack([marks(s) for s in scenes]), scenes)
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
