"""Real material: handwritten digits of scikit-learn and photographs that come with scikit-learn, scikit-image and
matplotlib. Each is split once, by index or name, into what is trained on and what is held out."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from training.builtin.draw import apart, background, hsv, plain

DIGITS_TRAINED = 1500  # load_digits()[:1500]; the other 297 are by other writers, and held out
HELD_OUT_PHOTOS = ("astronaut.png", "chelsea.png", "flower.jpg", "brick.png", "rocket.jpg")
_PHOTOS = (
    *HELD_OUT_PHOTOS,
    *("camera.png", "cell.png", "clock_motion.png", "coffee.png", "coins.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg", "text.png"),
    *("china.jpg", "grace_hopper.jpg"),
)
_WAYS = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images.astype(np.float32) / 16, found.target


@cache
def photos(held_out: bool) -> tuple[Image.Image, ...]:
    """At most 640 pixels wide."""
    import matplotlib
    import skimage.data
    import sklearn.datasets

    folders = [Path(m.__file__).parent for m in (skimage.data, sklearn.datasets)]
    folders = [folders[0], folders[1] / "images", Path(matplotlib.get_data_path()) / "sample_data"]
    found = []
    for name in _PHOTOS:
        if (name in HELD_OUT_PHOTOS) == held_out:
            (path,) = [f / name for f in folders if (f / name).exists()]
            image = Image.open(path).convert("RGB")
            image.thumbnail((640, 640))
            found.append(image)
    return tuple(found)


def digit(rng: np.random.Generator, side: int, held_out: bool) -> tuple[Image.Image, int, Image.Image]:
    """A handwritten digit somewhere in a picture of `side` pixels, its value, and where its ink is ("L")."""
    images, values = _digits()
    i = int(rng.integers(DIGITS_TRAINED, len(values)) if held_out else rng.integers(0, DIGITS_TRAINED))
    small = images[i]
    size = int(side * rng.uniform(0.8, 1.0))
    way = _WAYS[int(rng.choice(4, p=(0.2, 0.3, 0.35, 0.15)))]
    large = Image.fromarray((np.pad(small, 1) * 255).astype(np.uint8))
    ink = large.resize((size, size), way)
    if not held_out and rng.random() < 0.75:
        ink = _warped(rng, ink)
    if rng.random() < 0.6:
        ink = ink.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    alpha = np.asarray(ink, np.float32) / 255
    if rng.random() < 0.5:  # thinner or thicker, with a sharper edge
        alpha = np.clip((alpha - rng.uniform(0.3, 0.5)) * rng.uniform(2, 8) + 0.5, 0, 1)
    x, y = (int(v) for v in rng.integers(0, side - size + 1, 2))
    where = Image.new("L", (side, side))
    where.paste(Image.fromarray((alpha * 255).astype(np.uint8)), (x, y))
    return _ink(rng, side, alpha, x, y), int(values[i]), where


def _warped(rng: np.random.Generator, ink: Image.Image) -> Image.Image:
    """As another hand would have written it: slanted, narrower or wider, with corners of a 4 by 4 grid moved a little.
    There are only 1500 digits to learn from."""
    size, cells = ink.width, 4
    at = np.linspace(-0.5, 0.5, cells + 1)
    y, x = np.meshgrid(at, at, indexing="ij")
    slant, wide, high = rng.uniform(-0.2, 0.2), *rng.uniform(0.9, 1.15, 2)
    grid = np.stack([x * wide + y * slant, y * high], -1) + rng.normal(0, 0.014, (cells + 1, cells + 1, 2))
    source, corner = (grid + 0.5) * size, np.round((at + 0.5) * size).astype(int)
    mesh = []
    for i in range(cells):
        for j in range(cells):
            around = (source[i, j], source[i + 1, j], source[i + 1, j + 1], source[i, j + 1])
            box = (int(corner[j]), int(corner[i]), int(corner[j + 1]), int(corner[i + 1]))
            mesh.append((box, tuple(float(v) for point in around for v in point)))
    return ink.transform(ink.size, Image.Transform.MESH, mesh, Image.Resampling.BILINEAR)


def _ink(rng: np.random.Generator, side: int, alpha: np.ndarray, x: int, y: int) -> Image.Image:
    """`alpha` [h, w] 0..1 at (x, y) in one colour on a background that it stands out against."""
    while True:
        back = plain(rng, set())
        dark = hsv(rng.uniform(0, 360), rng.uniform(0, 1), rng.uniform(0, 0.5))
        bright = hsv(rng.uniform(0, 360), rng.uniform(0, 1), rng.uniform(0.7, 1.0))
        colour = [(0, 0, 0), (255, 255, 255), dark, bright][int(rng.integers(0, 4))]
        if apart(colour, back) > 220:
            break
    pixels = np.asarray(background(rng, side, back), np.float32).copy()
    h, w = alpha.shape
    part = pixels[y : y + h, x : x + w]
    part += (np.array(colour, np.float32) - part) * alpha[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def photo(rng: np.random.Generator, side: int, held_out: bool) -> Image.Image:
    """A crop of a photograph, flipped, turned and tinted; when training, sometimes waves or cloudy noise instead."""
    if not held_out and rng.random() < 0.2:
        return _texture(rng, side)
    pool = photos(held_out)
    image = pool[int(rng.integers(0, len(pool)))]
    crop = int(min(image.size) * (1.0 if rng.random() < 0.3 else rng.uniform(0.3, 1.0)))
    x, y = (int(rng.integers(0, n - crop + 1)) for n in image.size)
    made = image.resize((side, side), Image.Resampling.BICUBIC, (x, y, x + crop, y + crop))
    if held_out:
        return made
    if rng.random() < 0.5:
        made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.2:
        made = made.transpose(Image.Transpose.ROTATE_90)
    if rng.random() < 0.4:
        made = Image.merge("RGB", [made.split()[i] for i in rng.permutation(3)])
    pixels = np.asarray(made, np.float32) * rng.uniform(0.7, 1.2, 3 if rng.random() < 0.4 else 1)
    return Image.fromarray(np.clip(pixels + rng.uniform(-20, 20), 0, 255).astype(np.uint8))


def _texture(rng: np.random.Generator, side: int) -> Image.Image:
    y, x = np.mgrid[0:side, 0:side] / side
    if rng.random() < 0.5:
        fx, fy, phase = rng.uniform(0.5, 5, 3), rng.uniform(0.5, 5, 3), rng.uniform(0, 6.28, 3)
        made = 127 + 100 * np.sin(2 * math.pi * (x[..., None] * fx + y[..., None] * fy) + phase)
    else:
        made = np.full((side, side, 3), 127.0)
        for cells in (4, 9, 20, 45):
            noise = rng.normal(0, 1, (cells, cells, 3)) * 90 / cells**0.4
            layers = [Image.fromarray(noise[..., i].astype(np.float32)) for i in range(3)]
            made += np.stack([np.asarray(n.resize((side, side), Image.Resampling.BICUBIC)) for n in layers], -1)
    return Image.fromarray(np.clip(made + rng.normal(0, 6, made.shape), 0, 255).astype(np.uint8))
