"""The reading of dataset files, with errors that name the file, the entry and what was expected there."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from hydrainfer.core import ConfigError


def wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; see datasets/README.md for the format", param="path")


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises `ConfigError`."""
    try:
        return path.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", param="path") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `ConfigError`."""
    try:
        return orjson.loads(read_bytes(path))
    except orjson.JSONDecodeError as e:
        raise wrong(path, f"not JSON ({e})") from None


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of each line that is not empty. Raises `ConfigError`."""
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as e:
            raise wrong(path, f"line {number} is not JSON ({e})") from None
        if not isinstance(entry, dict):
            raise wrong(path, f"line {number} is not an object")
        yield f"line {number}", entry


def read_table(path: Path) -> tuple[list[str], Iterator[tuple[str, dict[str, str]]]]:
    """The columns, and (where, row) for each row, of a CSV file with a header. Raises `ConfigError`."""
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise wrong(path, "not a text file") from None
    rows = csv.DictReader(lines)
    return list(rows.fieldnames or []), ((f"row {i}", row) for i, row in enumerate(rows, 1))


def field(path: Path, where: str, entry: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """`entry[name]`. Raises `ConfigError` if it is absent or of another type."""
    value = None
    if isinstance(entry, dict):
        value = entry.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        problem = "is not there" if value is None else f"is {type(value).__name__}"
        raise wrong(path, f"{where}: {name!r} must be {kinds}, but {problem}")
    return value


def entries_of(path: Path, content: Any, key: str | None = None) -> list[Any]:
    """The list that a JSON dataset is, or has under `key`. Raises `ConfigError` if there is no list or it is empty."""
    found = content
    if key is not None and isinstance(content, dict):
        found = content.get(key)
    if not isinstance(found, list) or not found:
        where = "a list"
        if key:
            where = f"an object with a list {key!r}"
        raise wrong(path, f"must be {where} of entries")
    return found
