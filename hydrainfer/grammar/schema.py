"""JSON schemas as the grammar library takes them."""

from __future__ import annotations

from typing import Any

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as `json.dumps` writes it: what most models write, and a model cannot fill its answer with white space."""
_HELD_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_DATA = ("const", "enum", "default", "examples")


def without_unknown_formats(schema: Any) -> Any:
    """The schema without the formats that the library refuses because it does not know them. To a schema's
    specification they are annotations; pydantic writes some (`path`, `password`, `binary`)."""
    if isinstance(schema, list):
        return [without_unknown_formats(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA else without_unknown_formats(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _HELD_FORMATS)
    }
