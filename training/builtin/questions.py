"""Questions about a scene with the right answers, in varied words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from training.builtin import phrases as say
from training.builtin.scene import COLOURS, KINDS, LARGE, SMALL, Group, Scene, Thing

Rng = np.random.Generator
ANY = "shape"
_SIDES = {  # phrase → which way `other` lies, as (axis, sign)
    "left of": (0, -1),
    "to the left of": (0, -1),
    "right of": (0, 1),
    "to the right of": (0, 1),
    "above": (1, -1),
    "below": (1, 1),
}
_HALVES = {"on the left": (0, -1), "on the right": (0, 1), "at the top": (1, -1), "at the bottom": (1, 1)}


class Exchange(NamedTuple):
    """One question with its answer; `kind` sorts the score table."""

    kind: str
    question: str
    answer: str


def pick(rng: Rng, options: tuple) -> str:
    return options[int(rng.integers(0, len(options)))]


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(words: str) -> str:
    return words + "s"


def words(colour: str | None, kind: str) -> str:
    return f"{colour} {kind}" if colour else kind


def caption(scene: Scene) -> str:
    """Groups in the order of `KINDS`, then of `COLOURS`: "Two blue squares and a green star."."""
    if scene.what != "shapes":
        fixed = {"photo": say.REFUSAL, "empty": say.EMPTY}
        return fixed.get(scene.what) or f"The digit {scene.digit}."
    numbers = ("", "", "two", "three", "four", "five")
    ordered = sorted(scene.groups().items(), key=lambda g: (KINDS.index(g[0][1]), COLOURS.index(g[0][0])))
    parts = [article(words(*g)) if n == 1 else f"{numbers[n]} {plural(words(*g))}" for g, n in ordered]
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return text[0].upper() + text[1:] + "."


def _fill(rng: Rng, options: tuple[str, ...], **parts: str) -> str:
    text = pick(rng, options)
    for key, value in parts.items():
        text = text.replace("{" + key + "}", value).replace("{" + key.capitalize() + "}", value.capitalize())
    return text


def ask_caption(rng: Rng, scene: Scene) -> Exchange:
    return Exchange("caption", pick(rng, say.CAPTION), caption(scene))


def count_of(scene: Scene, colour: str | None, kind: str) -> int:
    return sum(t.colour in (colour or t.colour,) and kind in (t.kind, ANY) for t in scene.things)


def _described(rng: Rng, scene: Scene) -> tuple[str | None, str]:
    """Something of the scene by colour and kind, by kind, by colour, or just "shape"."""
    t = scene.things[int(rng.integers(0, len(scene.things)))]
    form = rng.random()
    return (t.colour if form < 0.6 or form > 0.8 else None), (t.kind if form < 0.8 else ANY)


def _absent(rng: Rng, scene: Scene) -> tuple[str | None, str]:
    """Something that is not there, though often its colour and its kind are."""
    for _ in range(50):
        colour: str | None = pick(rng, COLOURS)
        kind = pick(rng, KINDS)
        if scene.things and rng.random() < 0.7:
            colour = scene.things[int(rng.integers(0, len(scene.things)))].colour
        if scene.things and rng.random() < 0.6:
            kind = scene.things[int(rng.integers(0, len(scene.things)))].kind
        form = rng.random()
        colour, kind = (None if form < 0.2 else colour), (ANY if form > 0.85 else kind)
        if not count_of(scene, colour, kind):
            return colour, kind
    return next((c, k) for c in COLOURS for k in KINDS if not count_of(scene, c, k))


def ask_exists(rng: Rng, scene: Scene) -> Exchange:
    yes = bool(scene.things) and rng.random() < 0.5
    thing = words(*(_described(rng, scene) if yes else _absent(rng, scene)))
    question = _fill(rng, say.EXISTS, a=article(thing), many=plural(thing))
    return Exchange("exists", question, "Yes." if yes else "No.")


def ask_count(rng: Rng, scene: Scene) -> Exchange:
    form = rng.random()
    colour, kind = _absent(rng, scene) if form < 0.12 or not scene.things else _described(rng, scene)
    if form > 0.7:
        colour, kind = None, ANY
    question = _fill(rng, say.COUNT, many=plural(words(colour, kind)))
    return Exchange("count", question, say.NUMBERS[count_of(scene, colour, kind)])


def _name(rng: Rng, scene: Scene, thing: Thing, *, colour: bool = True) -> str | None:
    """ "the red circle", "the circle" or "the red shape", whichever means only this thing; None if nothing does."""
    ways: list[tuple[str | None, str]] = [(None, thing.kind), (None, ANY)]
    if colour:
        ways += [(thing.colour, thing.kind), (thing.colour, thing.kind), (thing.colour, ANY)]
    unique = [w for w in ways if count_of(scene, *w) == 1]
    return "the " + words(*unique[int(rng.integers(0, len(unique)))]) if unique else None


def _anything(rng: Rng, scene: Scene) -> Thing:
    return scene.things[int(rng.integers(0, len(scene.things)))]


def _missing(rng: Rng, scene: Scene, kind: str, options: tuple[str, ...]) -> Exchange:
    """A question about something that is not there."""
    colour, shape = _absent(rng, scene)
    if kind == "colour":
        colour, shape = None, shape if shape != ANY else pick(rng, KINDS)
        if count_of(scene, colour, shape):
            return ask_exists(rng, scene)
    thing = words(colour, shape)
    return Exchange("missing", _fill(rng, options, the="the " + thing), f"There is no {thing}.")


def ask_colour(rng: Rng, scene: Scene) -> Exchange | None:
    if rng.random() < 0.07:
        return _missing(rng, scene, "colour", say.COLOUR)
    t = _anything(rng, scene)
    same = [x for x in scene.things if x.kind == t.kind]
    if {x.colour for x in same} != {t.colour}:
        return None
    answer = t.colour.capitalize() + "."
    if len(same) > 1:
        return Exchange("colour", _fill(rng, say.COLOURS_OF_MANY, the="the " + plural(t.kind)), answer)
    name = _name(rng, scene, t, colour=False) or "the " + t.kind
    return Exchange("colour", _fill(rng, say.COLOUR, the="it" if name == "the shape" else name), answer)


def ask_shape(rng: Rng, scene: Scene) -> Exchange | None:
    t = _anything(rng, scene)
    alone = len(scene.things) == 1
    if not alone and count_of(scene, t.colour, ANY) != 1:
        return None
    options = [f"the {t.colour} shape", f"the {t.colour} one", f"the {t.colour} thing"]
    name = pick(rng, ("it", "this", "the shape")) if alone and rng.random() < 0.5 else pick(rng, tuple(options))
    if name not in ("it", "this") and rng.random() < 0.2:
        return Exchange("shape", f"Which shape is {t.colour}?", article(t.kind).capitalize() + ".")
    return Exchange("shape", _fill(rng, say.SHAPE, the=name), article(t.kind).capitalize() + ".")


def place(thing: Thing) -> str | None:
    """In which ninth of the picture; None when too close to a border between ninths."""
    if min(abs(v - border) for v in (thing.x, thing.y) for border in (1 / 3, 2 / 3)) < 0.035:
        return None
    return say.PLACES[int(thing.y * 3) * 3 + int(thing.x * 3)]


def ask_where(rng: Rng, scene: Scene) -> Exchange | None:
    if rng.random() < 0.07:
        return _missing(rng, scene, "where", say.WHERE)
    t = _anything(rng, scene)
    name = _name(rng, scene, t)
    if name is None:
        return None
    if rng.random() < 0.3:
        side = pick(rng, tuple(_HALVES))
        axis, sign = _HALVES[side]
        off = sign * ((t.x, t.y)[axis] - 0.5)
        answer = "Yes." if off > 0 else "No."
        return None if abs(off) < 0.1 else Exchange("side", _fill(rng, say.SIDES, the=name, side=side), answer)
    where = place(t)
    return where and Exchange("position", _fill(rng, say.WHERE, the=name), where)


def ask_size(rng: Rng, scene: Scene) -> Exchange | None:
    t = _anything(rng, scene)
    name = _name(rng, scene, t)
    if name is None or SMALL < t.size < LARGE:
        return None
    size = "small" if t.size <= SMALL else "large"
    if rng.random() < 0.3:
        asked = pick(rng, ("small", "large"))
        return Exchange("size", _fill(rng, say.IS_SIZE, the=name, size=asked), "Yes." if asked == size else "No.")
    return Exchange("size", _fill(rng, say.SIZE, the=name), size.capitalize() + ".")


def ask_relation(rng: Rng, scene: Scene) -> Exchange | None:
    """Of two things that one name each means, clearly apart along the axis asked about."""
    if len(scene.things) < 2:
        return None
    a, b = (scene.things[i] for i in rng.choice(len(scene.things), 2, replace=False))
    name, other = _name(rng, scene, a), _name(rng, scene, b)
    side = pick(rng, tuple(_SIDES))
    axis, sign = _SIDES[side]
    off = sign * ((a.x - b.x, a.y - b.y)[axis])
    if name is None or other is None or name == other or abs(off) < 0.12:
        return None
    if off > 0 and len(scene.things) == 2 and rng.random() < 0.3:
        answer = article(words(*a.group)).capitalize() + "."
        return Exchange("which", _fill(rng, say.WHICH, side=side, other=other), answer)
    return Exchange(
        "relation", _fill(rng, say.RELATION, the=name, side=side, other=other), "Yes." if off > 0 else "No."
    )


def ask_digit(rng: Rng, scene: Scene) -> Exchange:
    """On any picture but a photograph."""
    form = rng.random()
    if scene.digit is None:
        if form < 0.5:
            return Exchange("missing", pick(rng, say.READ), say.NO_DIGIT)
        return Exchange("exists", pick(rng, say.ANY_DIGIT), "No.")
    if form < 0.7:
        return Exchange("digit", pick(rng, say.READ), f"{scene.digit}.")
    if form < 0.78:
        return Exchange("exists", pick(rng, say.ANY_DIGIT), "Yes.")
    asked = scene.digit if rng.random() < 0.5 else int(rng.integers(0, 10))
    name = f"{'an' if asked == 8 else 'a'} {asked}" if rng.random() < 0.7 else f"the digit {asked}"
    return Exchange("is_digit", _fill(rng, say.IS_DIGIT, a=name), "Yes." if asked == scene.digit else "No.")


def ask_elsewhere(rng: Rng, scene: Scene) -> Exchange:  # noqa: ARG001  # the scene plays no part
    return Exchange("elsewhere", pick(rng, say.ELSEWHERE), say.REFUSAL)


Asker = Callable[[Rng, Scene], Exchange | None]
_ABOUT_SHAPES: tuple[tuple[Asker, float], ...] = (
    (ask_exists, 0.17),
    (ask_count, 0.27),
    (ask_caption, 0.11),
    (ask_colour, 0.1),
    (ask_shape, 0.1),
    (ask_where, 0.11),
    (ask_relation, 0.08),
    (ask_size, 0.03),
    (ask_digit, 0.02),
    (ask_elsewhere, 0.01),
)
_ABOUT_DIGITS: tuple[tuple[Asker, float], ...] = (
    (ask_digit, 0.66),
    (ask_caption, 0.2),
    (ask_exists, 0.06),
    (ask_count, 0.06),
    (ask_elsewhere, 0.02),
)


def ask(rng: Rng, scene: Scene) -> Exchange:
    """Any question that has one right answer."""
    if scene.what == "photo":
        return _ask_photo(rng)
    table = _ABOUT_SHAPES if scene.what == "shapes" else _ABOUT_DIGITS
    shares = np.array([share for _, share in table])
    while True:
        found = table[int(rng.choice(len(table), p=shares / shares.sum()))][0](rng, scene)
        if found is not None:
            return Exchange(found.kind, _spoken(rng, found.question), found.answer)


def _ask_photo(rng: Rng) -> Exchange:
    """Whatever is asked about a photograph, the answer is the same."""
    form = rng.random()
    colour, kind = pick(rng, COLOURS), pick(rng, (*KINDS, ANY))
    thing = words(colour if form < 0.7 else None, kind)
    options = (say.EXISTS, say.COUNT, say.WHERE, say.READ, say.COLOUR)[int(rng.integers(0, 5))]
    text = _fill(rng, options, a=article(thing), many=plural(thing), the="the " + thing)
    if form < 0.45:
        text = pick(rng, say.CAPTION)
    elif form > 0.8:
        text = pick(rng, say.ELSEWHERE)
    return Exchange("photo", _spoken(rng, text), say.REFUSAL)


def small_talk(rng: Rng) -> Exchange:
    """A question without a picture."""
    form = rng.random()
    if form < 0.4:
        return Exchange("talk", _spoken(rng, pick(rng, say.GREETINGS)), say.GREETING)
    if form < 0.6:
        return Exchange("talk", _spoken(rng, pick(rng, say.ABILITY)), say.ABILITIES)
    everything = (say.ELSEWHERE, say.CAPTION, say.READ)[int(rng.integers(0, 3))]
    return Exchange("talk", _spoken(rng, pick(rng, everything)), say.SHOW_ME)


def _spoken(rng: Rng, question: str) -> str:
    """As people type: American, in small letters, without the mark at the end, polite, or asking for brevity."""
    form = rng.random(5)
    if form[0] < 0.5:
        question = question.replace("colour", "color").replace("centre", "center")
    if form[1] < 0.15:
        question = question.lower()
    if form[2] < 0.1:
        question = question.rstrip("?.!")
    elif form[3] < 0.04:
        question += " " + pick(rng, say.BRIEFLY)
    if form[4] < 0.03:
        question = "Please " + question[0].lower() + question[1:] if not question.endswith("?") else question
    return question


__all__ = ["Exchange", "Group", "ask", "caption", "small_talk"]
