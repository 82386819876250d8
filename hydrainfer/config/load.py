"""The configuration loader: defaults < YAML file < environment < flags, with the provenance of every value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from hydrainfer import builtin
from hydrainfer.config.foreign import adopt
from hydrainfer.config.read import check_known, read_yaml
from hydrainfer.config.schema import ServeConfig
from hydrainfer.config.vllm_names import NAMES, nearest_of_vllm
from hydrainfer.core import ConfigError

ENV_PREFIX = "HYDRAINFER_"
STORE_PASSWORD, STORE_USERNAME = ENV_PREFIX + "STORE_PASSWORD", ENV_PREFIX + "STORE_USERNAME"
"""Variables that are no options, so that no flag, file or message holds their values."""
_OF_SERVICE = {
    r"SERVICE_HOST|PORT_\d+_(TCP|UDP|SCTP)_ADDR": r"[\d.]+|[\da-f]*:[\da-f:.]+",
    r"SERVICE_PORT(_[A-Z\d_]+)?|PORT_\d+_(TCP|UDP|SCTP)_PORT": r"\d+",
    r"PORT(_\d+_(TCP|UDP|SCTP))?": r"(tcp|udp|sctp)://\S+:\d+",
    r"PORT_\d+_(TCP|UDP|SCTP)_PROTO": r"tcp|udp|sctp",
}
"""The variables that Kubernetes sets in every container for each service: patterns of their names, after the service's
name, and of their values."""

_GUARDS = ("api_key", "tenants", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "media_domains")
"""Options that protect the server. An empty value, as of an unset shell variable, must not turn them off."""

_SECRETS = ("api_key", "store")
"""Options whose values no message shows. No password belongs into a store's address, but somebody may write one."""

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_SIGNS = {">=": "of at least", "<=": "up to", ">": "above", "<": "below"}


class Loaded(NamedTuple):
    """A loaded configuration. `provenance[field]` is "default", "built-in" (the model), the YAML file's path, the
    variable's name or "flag". `notes`: a line for each option of vLLM that was given and sets nothing here."""

    config: ServeConfig
    provenance: dict[str, str]
    notes: tuple[str, ...] = ()


class Option(NamedTuple):
    """One field of the schema, for `--help` and for the table printed at start."""

    name: str
    group: str
    help: str
    type: Any
    default: Any


@cache
def _fields(schema: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a schema. It takes 10 ms to evaluate their types."""
    return msgspec.structs.fields(schema)


def options(schema: type[msgspec.Struct] = ServeConfig) -> Iterator[Option]:
    for f in _fields(schema):
        meta = f.type.__metadata__[0]
        default = None if f.default is msgspec.NODEFAULT else f.default
        yield Option(f.name, meta.title, meta.description, f.type.__origin__, default)


def load(
    flags: Mapping[str, Any],
    yaml_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    given: str = "flag",
) -> Loaded:
    """Load the configuration. `flags` holds only the given flags, and `given` is what messages call one. Options may
    have the names of vLLM (`vllm_names`). Variables in `environ` are ignored that Kubernetes sets for a service, or
    that hold the user and password of a store. Raises `ConfigError` that names the source, the key and the accepted
    values."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if yaml_path is not None:
        layers.append((str(yaml_path), read_yaml(yaml_path)))
    for key, text in sorted((environ or {}).items()):
        is_ours = key.startswith(ENV_PREFIX) and key not in (STORE_PASSWORD, STORE_USERNAME)
        if is_ours and not _is_of_service(key, text):
            layers.append((key, {key.removeprefix(ENV_PREFIX).lower(): text}))
    layers.append((given, flags))
    known, notes = [o.name for o in options()], list[str]()
    for name, layer in layers:
        adopted = adopt(layer, NAMES, name)
        notes += adopted.notes
        for key, value in adopted.options.items():
            if key not in known:
                near = nearest_of_vllm(str(key), known)
                check_known(key, [*known, *filter(None, [near])], name, "`hydrainfer serve --help`")
            values[key], source[key] = value, name
    if "model" not in values:
        values["model"], source["model"] = builtin.NAME, "built-in"
    checked = {key: _convert(key, value, source[key]) for key, value in values.items()}
    provenance = {o.name: source.get(o.name, "default") for o in options()}
    return Loaded(ServeConfig(**checked), provenance, tuple(notes))


def _is_of_service(key: str, text: str) -> bool:
    """Whether Kubernetes set the variable for a service called `hydrainfer` or `hydrainfer-…`. HYDRAINFER_PORT is our
    option if it is a number, and the service's address if it is a URL."""
    rest = key.removeprefix(ENV_PREFIX)
    return any(
        re.fullmatch(f"([A-Z\\d_]+_)?({name})", rest) and re.fullmatch(value, text)
        for name, value in _OF_SERVICE.items()
    )


def _convert(key: str, value: Any, source: str) -> Any:
    """Check one value against its field, and convert strings (from the environment)."""
    field = next(f for f in _fields(ServeConfig) if f.name == key)
    if value in ("auto", "") and isinstance(value, str) and field.default is None and key not in _GUARDS:
        return None
    try:
        converted = msgspec.convert(value, field.type, strict=False)
    except msgspec.ValidationError as e:
        form = (field.type.__metadata__[0].extra or {}).get("form")  # of a field with a pattern
        rule = form or _rule(field.type) or _in_words(str(e))
        kind = type(value).__name__
        got = _KINDS.get(kind, kind) if key in _SECRETS and value else repr(value)
        raise ConfigError(f"{key} ({source}): must be {rule}, got {got}", param=key) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{key} ({source}): must be finite, got {value!r}", param=key)
    return converted


def _rule(annotated: Any) -> str:
    """The values that a field may have, in words, if it has a list of choices; else ""."""
    kinds = get_args(annotated.__origin__) if get_origin(annotated.__origin__) in (Union, UnionType) else ()
    literals = [kind for kind in (annotated.__origin__, *kinds) if get_origin(kind) is Literal]
    if not literals:
        return ""
    choices = [str(choice) for kind in literals for choice in get_args(kind)]
    others = [_number(kind) for kind in kinds if get_origin(kind) is Annotated]
    return " or ".join([*choices, *others]) if others else f"one of {', '.join(choices)}"


def _number(annotated: Any) -> str:
    """The accepted numbers in words, such as "a whole number of at least 1"."""
    least = next((meta.ge for meta in annotated.__metadata__ if getattr(meta, "ge", None) is not None), None)
    what = _KINDS[annotated.__origin__.__name__]
    return what if least is None else f"{what} {_SIGNS['>=']} {least:g}"


def _in_words(message: str) -> str:
    """A rule in words from msgspec's message: "Expected `int | null` >= 1, got `str`" → "a whole number of at least
    1"."""
    found = re.match(r"Expected `([^`]+)`(?: (of length )?(>=|<=|>|<) (\S+?))?(?:,|$| -)", message)
    if found is None:
        return message.lower()
    kinds, of_length, sign, bound = found.groups()
    what = " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null")
    if of_length:
        return f"{what} that is not empty"
    return f"{what} {_SIGNS[sign]} {float(bound):g}" if sign else what
