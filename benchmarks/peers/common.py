"""The picture that calibrates a random checkpoint. Part of its recipe: changing it changes the weights."""

import numpy as np
from PIL import Image, ImageDraw


def draw_image(seed: int, width: int, height: int) -> Image.Image:
    """Gradient, noise and shapes without antialiasing, so that it is the same with every version of Pillow."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    fx, fy, phase = rng.uniform(0.5, 4, 3), rng.uniform(0.5, 4, 3), rng.uniform(0, 6.28, 3)
    waves = [127 + 100 * np.sin(6.28 * (fx[c] * x / width + fy[c] * y / height) + phase[c]) for c in range(3)]
    pixels = np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    image = Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x0, y0 = int(rng.integers(0, width - 8)), int(rng.integers(0, height - 8))
        x1, y1 = int(rng.integers(x0 + 4, width)), int(rng.integers(y0 + 4, height))
        colour = tuple(int(v) for v in rng.integers(0, 256, 3))
        if rng.random() < 0.5:
            draw.rectangle([x0, y0, x1, y1], fill=colour)
        else:
            draw.line([x0, y0, x1, y1], fill=colour, width=5)
    return image
