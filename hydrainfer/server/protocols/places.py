"""Errors name the fields and places in the client's body, not those of the chat or completion that it became."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hydrainfer.core import HydraError

_NAME = re.compile(
    r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # a text in quotes, which no name equals
    r"|(?<![\w.])[a-z]+(?:_[a-z]+)*(?:\.[a-z0-9_]+)+"  # a path, such as tools.0.function
    r"|(?:^|(?<=\bthe ))[a-z]+(?!\w)"
    r"|(?<![\w.])[a-z]+(?:_[a-z]+)+(?!\w)"
)
"""What may be the name of a field in a message."""
_DEEPEST = 16
"""Segments of a path that are looked at. Longer ones are a client's text."""


class Place(NamedTuple):
    """Where in the client's body an object of a chat is from. `fields`: the places of those of its fields that have
    another name, or another place, in the body."""

    where: str
    fields: Mapping[str, str]


def placed(part: dict[str, Any], where: str, **fields: str) -> dict[str, Any]:
    """`part`, a message of a chat or an object in it, with its `Place`, unless it has one. Only errors read it."""
    return {"place": Place(where, fields), **part}


def name_fields(error: HydraError, names: Mapping[str, str], messages: Sequence[Mapping[str, Any]] = ()) -> None:
    """Let `error` name the client's fields and places instead of ours. `names`: the client's names, by ours; a name may
    be a path with `*` for each index (`tools.*.function`), and then stands for all that begin with it. `messages`:
    those of the chat; objects in them that are `placed` have their places instead. In the message, texts in quotes stay
    as they are, and so do words that may be plain English, unless they begin it or follow `the`."""

    def own(path: str) -> str:
        segments = path.split(".")
        if len(segments) > _DEEPEST:
            return path
        return _by_place(segments, messages) or _by_name(segments, names) or path

    error.message = _NAME.sub(lambda match: own(match[0]), error.message)
    if error.param is not None:
        error.param = own(error.param)


@contextmanager
def own_names(names: Mapping[str, str], messages: Sequence[Mapping[str, Any]] = ()) -> Iterator[None]:
    """A context whose errors name the client's fields and places. `names`, `messages`: as in `name_fields`."""
    try:
        yield
    except HydraError as e:
        name_fields(e, names, messages)
        raise


def _by_place(segments: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The path that is written `segments` in the chat, by the innermost object on it that is placed; None if none is,
    as in a client's text that looks like a path."""
    value: Any = {"messages": messages}
    own = None
    for n, segment in enumerate(segments, 1):
        field = _place(value).fields.get(segment)
        if field is not None:
            own = [field, *segments[n:]]
        value = _inside(value, segment)
        where = _place(value).where
        if where:
            own = [where, *segments[n:]]
    return ".".join(own) if own is not None else None


def _place(value: Any) -> Place:
    place = value.get("place") if isinstance(value, Mapping) else None
    return place if isinstance(place, Place) else Place("", {})


def _inside(value: Any, segment: str) -> Any:
    """The field or entry `segment` of `value`; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(segment)
    if not isinstance(value, list) or not segment.isdecimal() or len(segment) > 6:
        return None
    index = int(segment)
    return value[index] if index < len(value) else None


def _by_name(segments: Sequence[str], names: Mapping[str, str]) -> str | None:
    """The path with the client's name of its longest beginning that is in `names`; None if none is."""
    for n in range(len(segments), 0, -1):
        indexes = [segment for segment in segments[:n] if segment.isdecimal()]
        own = names.get(".".join("*" if segment.isdecimal() else segment for segment in segments[:n]))
        if own is not None:
            for index in indexes:
                own = own.replace("*", index, 1)
            return ".".join([own, *segments[n:]])
    return None
