"""JSON schemas in the form that the grammar library accepts."""

from __future__ import annotations

from typing import Any

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as `json.dumps` writes it. Most models write it so, and cannot then fill an answer with spaces."""
_HELD_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_DATA = ("const", "enum", "default", "examples")


def without_unknown_formats(schema: Any) -> Any:
    """The schema without the `format`s that the library does not know and would refuse. The JSON Schema specification
    treats formats as annotations; pydantic writes some that are unknown here (`path`, `password`, `binary`)."""
    if isinstance(schema, list):
        return [without_unknown_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA else without_unknown_formats(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _HELD_FORMATS)
    }
