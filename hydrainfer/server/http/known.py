"""The fields that the clients of a path may send: honoured, refused by name because dropping them would change the
answer in silence, or harmless. Any other is refused, or logged once."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from hydrainfer.core import InvalidRequest

_log = logging.getLogger("hydrainfer.server.known")
EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
_MOST_OBJECTS = 256
"""Objects of a body, and entries of a list, that are looked into. A client that misspells a name does so early."""
_MOST_COMPARED = 8  # names of an object that are compared with known ones, which takes about 20 µs each
_MOST_NOTED = 256  # names of unknown fields that are remembered, and so logged


class Refusal(NamedTuple):
    """A refused field. `why`: the error message. `neutral`: the values, besides null, that change nothing."""

    why: str
    neutral: tuple[Any, ...] = EMPTY


class KnownFields(NamedTuple):
    """The fields of one endpoint, or of an object in its body. `nested`: the fields of the objects, and of those in
    lists, that are values of fields, in the order in which they are looked into. `loose`: clients write more into this
    object than any table holds, so only those unknown fields count that look like a known one that is missing."""

    honoured: frozenset[str]
    refused: Mapping[str, Refusal]
    harmless: frozenset[str]
    nested: Mapping[str, KnownFields] = MappingProxyType({})
    loose: bool = False

    def check(self, body: Mapping[str, Any], place: str = "") -> None:
        """Raises `InvalidRequest` naming the first refused field that `body` sets. `place`: what the names of its
        fields begin with in messages."""
        for name, refusal in self.refused.items():
            value = body.get(name)
            if value is not None and value not in refusal.neutral:
                raise InvalidRequest(refusal.why, param=f"{place}{name}", code="unsupported_parameter")

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        known = (self.honoured, self.refused, self.harmless)
        unknown = (name for name in body if not any(name in names for names in known))
        if self.loose:
            unknown = (name for name in islice(unknown, _MOST_COMPARED) if self._replaces(name, body))
        return list(unknown)

    def _replaces(self, name: str, body: Mapping[str, Any]) -> bool:
        """Whether `name` stands where a known field was meant, which `body` lacks."""
        near = self.nearest(name)
        return near is not None and near not in body

    def objects(self, body: Mapping[str, Any], place: str = "") -> Iterator[tuple[KnownFields, Mapping[str, Any], str]]:
        """`body` and the objects in it, each behind its fields and before its place."""
        yield self, body, place
        for name, fields in self.nested.items():
            value = body.get(name)
            if isinstance(value, Mapping):
                yield from fields.objects(value, f"{place}{name}.")
            elif isinstance(value, list):
                for i, item in enumerate(value[:_MOST_OBJECTS]):
                    if isinstance(item, Mapping):
                        yield from fields.objects(item, f"{place}{name}.{i}.")

    def nearest(self, name: str) -> str | None:
        """The known field that `name` is most like, if any. Honoured ones come first, since they are meant more
        often."""
        for known in (self.honoured, self.refused, self.harmless):
            near = difflib.get_close_matches(name[:60], known, 1, 0.75)
            if near:
                return near[0]
        return None


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def loose(honoured: str, harmless: str = "", **nested: KnownFields) -> KnownFields:
    """The fields of an object in a body, of which only misspelt ones are refused."""
    return KnownFields(names(honoured), {}, names(harmless), nested, loose=True)


def refusals(names: str, hint: str = "", neutral: tuple[Any, ...] = EMPTY) -> dict[str, Refusal]:
    """These fields, refused. `hint`: what to do instead."""
    more = f"; {hint}" if hint else ""
    return {name: Refusal(f"{name} is not supported by this server{more}", neutral) for name in names.split()}


class FieldCheck:
    """The check of a body's fields by the table of its endpoint. Unknown fields of paths under /v1 are refused, as
    OpenAI does: a misspelt name would give another answer without a trace. Others are logged once, up to `_MOST_NOTED`
    of them, since clients choose the names."""

    def __init__(self, known: Mapping[str, KnownFields], refuses: bool = True) -> None:
        """`known`: by path. `refuses`: whether unknown fields are refused anywhere."""
        self._known, self._refuses = known, refuses
        self._noted: set[tuple[str, str]] = set()

    def check(self, path: str, body: object) -> None:
        """Raises `InvalidRequest` naming a refused field, or an unknown one with the known name that comes nearest."""
        known = self._known.get(path)
        if known is None or not isinstance(body, Mapping):
            return
        for fields, found, place in islice(known.objects(body), _MOST_OBJECTS):
            fields.check(found, place)
            unknown = fields.unknown(found)
            if unknown and self._refuses and path.startswith("/v1/"):
                raise _unknown(unknown[0], fields, place)
            self._note(path, (f"{place}{name}" for name in unknown))

    def _note(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            note = (path, name[:60])
            if note not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(note)
                _log.warning("%s: the unknown field %s is ignored, now and later", path, ascii(note[1]))


def _unknown(name: str, known: KnownFields, place: str) -> InvalidRequest:
    """The error for a field that is in no table."""
    shown, near = f"{place}{name[:60]}", known.nearest(name)
    hint = "remove it, or start the server with --unknown-fields ignore"
    if near is not None:
        hint = f"did you mean {place}{near}?"
    return InvalidRequest(f"unknown field {shown!a}; {hint}", param=shown, code="unknown_parameter")
