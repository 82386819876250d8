"""One loader: defaults < YAML file < environment < flags, with the provenance of every value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from hydrainfer import builtin
from hydrainfer.config.read import check_known, read_yaml
from hydrainfer.config.schema import ServeConfig
from hydrainfer.core import ConfigError

ENV_PREFIX = "HYDRAINFER_"


class Loaded(NamedTuple):
    """`provenance[field]` is "default", "built-in" (the model), the YAML file's path, the variable's name or "flag"."""

    config: ServeConfig
    provenance: dict[str, str]


class Option(NamedTuple):
    """One field of the schema, for `--help` and for the table printed at start."""

    name: str
    group: str
    help: str
    type: Any
    default: Any


def options(schema: type[msgspec.Struct] = ServeConfig) -> Iterator[Option]:
    for f in msgspec.structs.fields(schema):
        meta = f.type.__metadata__[0]
        default = None if f.default is msgspec.NODEFAULT else f.default
        yield Option(f.name, meta.title, meta.description, f.type.__origin__, default)


def load(flags: Mapping[str, Any], yaml_path: Path | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """`flags` holds only what was given. Raises `ConfigError` naming the source, the key and what is accepted."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if yaml_path is not None:
        layers.append((str(yaml_path), read_yaml(yaml_path)))
    for key, text in sorted((environ or {}).items()):
        if key.startswith(ENV_PREFIX):
            layers.append((key, {key.removeprefix(ENV_PREFIX).lower(): text}))
    layers.append(("flag", flags))
    known = [o.name for o in options()]
    for name, layer in layers:
        for key, value in layer.items():
            check_known(key, known, name)
            values[key], source[key] = value, name
    if "model" not in values:
        values["model"], source["model"] = str(builtin.MODEL), "built-in"
    checked = {key: _convert(key, value, source[key]) for key, value in values.items()}
    provenance = {o.name: source.get(o.name, "default") for o in options()}
    return Loaded(ServeConfig(**checked), provenance)


def _convert(key: str, value: Any, source: str) -> Any:
    """Check one value against its field, strings (from the environment) converted."""
    field = next(f for f in msgspec.structs.fields(ServeConfig) if f.name == key)
    if value in ("auto", "") and isinstance(value, str) and field.default is None and key != "api_key":
        return None  # (an empty key, of an unset shell variable, must not open the server to all)
    try:
        converted = msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"{key} ({source}): {_rule(field.type) or str(e).lower()}, got {value!r}", param=key
        ) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{key} ({source}): must be finite, got {value!r}", param=key)
    return converted


def _rule(annotated: Any) -> str:
    choices = get_args(annotated.__origin__) if get_origin(annotated.__origin__) is Literal else ()
    return f"must be one of {', '.join(choices)}" if choices else ""
