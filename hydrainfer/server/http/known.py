"""The fields that the clients of a path may send: honoured, refused by name because dropping them would change the
answer in silence, or harmless. Any other is refused, or logged once."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hydrainfer.core import InvalidRequest

_log = logging.getLogger("hydrainfer.server.known")
EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
_MOST_NOTED = 256  # names of unknown fields that are remembered, and so logged


class Refusal(NamedTuple):
    """A refused field. `why`: the error message. `neutral`: the values, besides null, that change nothing."""

    why: str
    neutral: tuple[Any, ...] = EMPTY


class KnownFields(NamedTuple):
    """The fields of one endpoint. `noun`: what their names begin with in messages. `nested`: the fields of objects in
    the body, by the name of the object."""

    honoured: frozenset[str]
    refused: Mapping[str, Refusal]
    harmless: frozenset[str]
    noun: str = ""
    nested: Mapping[str, KnownFields] = MappingProxyType({})

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `InvalidRequest` naming the first refused field that `body` sets."""
        for name, refusal in self.refused.items():
            value = body.get(name)
            if value is not None and value not in refusal.neutral:
                param = f"{self.noun}{name}"
                raise InvalidRequest(refusal.why, param=param, code="unsupported_parameter")

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        known = (self.honoured, self.refused, self.harmless)
        return [f"{self.noun}{name}" for name in body if not any(name in names for names in known)]


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


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
        if known is not None and isinstance(body, Mapping):
            self._check(path, known, body)

    def _check(self, path: str, known: KnownFields, body: Mapping[str, Any]) -> None:
        known.check(body)
        unknown = known.unknown(body)
        if unknown and self._refuses and path.startswith("/v1/"):
            raise _unknown(unknown[0], known)
        self._note(path, unknown)
        for name, fields in known.nested.items():
            value = body.get(name)
            if isinstance(value, Mapping):
                self._check(path, fields, value)

    def _note(self, path: str, names: Iterable[str]) -> None:
        for name in names:
            note = (path, name[:60])
            if note not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(note)
                _log.warning("%s: the unknown field %s is ignored, now and later", path, ascii(note[1]))


def _unknown(name: str, known: KnownFields) -> InvalidRequest:
    """The error for a field that is in no table. Honoured names come first, since they are meant more often."""
    shown, near = name[:60], list[str]()
    for those in (known.honoured, known.refused, known.harmless):
        near = near or difflib.get_close_matches(name[len(known.noun) :][:60], those, 1, 0.75)
    hint = (
        f"did you mean {known.noun}{near[0]}?"
        if near
        else "remove it, or start the server with --unknown-fields ignore"
    )
    return InvalidRequest(f"unknown field {shown!a}; {hint}", param=shown, code="unknown_parameter")
