"""Damage to JSON files: every place of one, and everything that might stand there instead."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

MISSING = "left out"
VALUES = (0, -1, 2**40, 0.5, "x", None, MISSING, [], {}, True)


def damages(content: dict[str, Any], n: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Up to `n` of them, in words and as a copy, drawn evenly from all."""
    every = [(at, value) for at in _places(content) for value in VALUES]
    for at, value in random.Random(seed).sample(every, min(n, len(every))):
        yield f"{'.'.join(map(str, at))}: {value!r}", _damaged(content, at, value)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part: values, sections, lists and their first entries."""
    if at:
        yield at
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _places(part, (*at, name))
    elif isinstance(value, list) and value:
        yield from _places(value[0], (*at, 0))


def _damaged(content: dict[str, Any], at: tuple[Any, ...], value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    part = copy
    for name in at[:-1]:
        part = part[name]
    if value == MISSING:
        del part[at[-1]]
    else:
        part[at[-1]] = value
    return copy
