"""What is in a picture, before it is drawn: things with kind, colour, place and size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

KINDS = ("circle", "square", "triangle", "star")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple")
MOST = 5
_SMALLEST = 0.15
SMALL, LARGE = 0.22, 0.3  # at most, at least: diameter as a share of the picture's side
Group = tuple[str, str]  # (colour, kind)


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape. `x`, `y`: its centre, `size`: its diameter, as shares of the picture's side; `angle` in degrees."""

    kind: str
    colour: str
    x: float
    y: float
    size: float
    angle: float

    @property
    def group(self) -> Group:
        return self.colour, self.kind


@dataclass(frozen=True, slots=True)
class Scene:
    """`what`: "shapes", "digit", "photo" or "empty"."""

    what: str
    things: tuple[Thing, ...] = ()
    digit: int | None = None

    def groups(self) -> Counter[Group]:
        return Counter(t.group for t in self.things)

    def one(self, group: Group) -> Thing:
        (thing,) = [t for t in self.things if t.group == group]
        return thing


def sample_shapes(rng: np.random.Generator) -> tuple[Thing, ...]:
    """One to five things that hardly touch: all alike, all different or anything between."""
    n = int(rng.integers(1, MOST + 1))
    groups = _sample_groups(rng, (1, n, int(rng.integers(1, n + 1)))[int(rng.choice(3, p=(0.25, 0.3, 0.45)))])
    owners = [*range(len(groups)), *rng.integers(0, len(groups), n - len(groups))]
    size = _sample_sizes(rng, n)
    things: list[Thing] = []
    near = (0.52, 0.0) if rng.random() < 0.3 else (0.56, 0.015)
    for owner, diameter in zip(owners, sorted(size, reverse=True)):
        place = _free_place(rng, things, diameter, near)
        if place is not None:
            colour, kind = groups[owner]
            things.append(Thing(kind, colour, *place, _sample_angle(rng, kind)))
    return tuple(things)


def _sample_groups(rng: np.random.Generator, n: int) -> list[Group]:
    """Distinct; often of the same colour or the same kind, so that neither alone answers a question."""
    alike = rng.random()
    found: list[Group] = []
    while len(found) < n:
        colour, kind = str(rng.choice(COLOURS)), str(rng.choice(KINDS))
        if found and alike < 0.15:
            colour = found[0][0]
        elif found and alike < 0.35:
            kind = found[0][1]
        if (colour, kind) not in found:
            found.append((colour, kind))
        elif alike < 0.15 and len(found) >= len(KINDS):
            alike = 1.0
    return found


def _sample_sizes(rng: np.random.Generator, n: int) -> np.ndarray:
    biggest = (0.95, 0.6, 0.48, 0.42, 0.4)[n - 1]
    if rng.random() < 0.35:  # all about the same
        return rng.uniform(_SMALLEST, biggest) * rng.uniform(0.88, 1.0, n)
    return rng.uniform(_SMALLEST, biggest, n)


def _free_place(
    rng: np.random.Generator, things: list[Thing], size: float, near: tuple[float, float]
) -> tuple[float, float, float] | None:
    """(x, y, size), smaller after many failures; None if there is no room. `near`: how close centres may be, as a share
    of both sizes and more."""
    for attempt in range(90):
        if attempt and attempt % 15 == 0:
            size = max(_SMALLEST, size * 0.75)
        edge = size / 2 + 0.01
        x, y = rng.uniform(edge, 1 - edge, 2)
        if all(np.hypot(x - t.x, y - t.y) > (size + t.size) * near[0] + near[1] for t in things):
            return float(x), float(y), float(size)
    return None


def _sample_angle(rng: np.random.Generator, kind: str) -> float:
    if rng.random() < 0.4 or kind == "circle":
        return 0.0
    return float(rng.uniform(-10, 10))
