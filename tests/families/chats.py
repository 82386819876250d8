"""Chats that every family answers, and what they are made of."""

from __future__ import annotations

import numpy as np

from tests.checkpoints import make_picture
from tests.equivalence.reference import PHOTOS, photo

IN_ORDER = (  # keeps pictures where the message has them
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}{{ '<image>' }}{% else %}{{ p['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def image(i: int, size: tuple[int, int] | None = None) -> dict:
    """A photograph, or as much of its middle as fits `size`."""
    picture = photo(PHOTOS[i])
    if size is not None:
        left, top = ((have - want) // 2 for have, want in zip(picture.size, size))
        picture = picture.crop((left, top, left + size[0], top + size[1]))
    return {"type": "image", "image": picture}


def video(seed: int, n: int, height: int, width: int, fps: float) -> dict:
    """Frames that the caller has sampled."""
    frames = np.stack([make_picture(seed + i, max(height, width))[:height, :width] for i in range(n)])
    return {"type": "video", "video": frames, "fps": fps}


def text(t: str) -> dict:
    return {"type": "text", "text": t}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": list(parts)}


def assistant(t: str) -> dict:
    return {"role": "assistant", "content": [text(t)]}


TEXTS = {
    "text": [user(text("Explain how a queue works in one paragraph, and why it is fair to those who wait."))],
    "text in turns": [user(text("Name a colour: é, 色.")), assistant("Blue."), user(text("And another one?"))],
    "long text": [user(text("one two three four five six seven " * 12))],
}
PICTURES = {
    "one": [user(image(0), text("What is in this picture?"))],
    "wide": [user(text("Look at"), image(2, (590, 40)), text("and say what it is."))],
    "tall": [user(text("Describe the colours of"), image(1, (37, 290)))],
    "several sizes": [user(image(3), text("or"), image(4), text("or"), image(5, (301, 211)), text("or"), image(3))],
    "tiny": [user(image(0, (7, 5)), text("?"))],
    "turns": [
        user(image(5), text("What is this?")),
        assistant("A motorcycle."),
        user(text("And"), image(1), text("?")),
    ],
}
SQUARE_VIDEOS = {
    "video": [user(text("What happens:"), video(10, 3, 90, 130, 2.0), text("Say it."))],
    "one frame": [user(video(40, 1, 30, 70, 1.0), text("Where?"))],
    "videos": [user(video(20, 2, 60, 60, 0.7), text("or"), video(30, 2, 112, 56, 3.3), text("Compare."))],
    "video and picture": [user(video(50, 2, 77, 40, 1.0), text("and"), image(4), text("?"))],
}
"""For families whose frames are pictures of one size. Videos of a prompt have equally many frames, as transformers
wants."""
