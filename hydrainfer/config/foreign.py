"""Options of vLLM that somebody types here: each is an option of ours, means nothing here, or is refused with what
comes nearest. The table is in `vllm_names`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hydrainfer.core import ConfigError

Options = dict[str, Any]
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Name(NamedTuple):
    """What an option of vLLM is here. `says`: in words, for documents, notes and errors.

    `ours`: the options that it sets, by `options(value)`, or to the value itself. Without `ours` it means nothing here
    if its value is in `harmless`, or with `idle` whatever it is; other values are refused.
    """

    says: str
    ours: tuple[str, ...] = ()
    options: Callable[[Any], Options] | None = None
    harmless: Collection[Any] = ()
    idle: bool = False


class Adopted(NamedTuple):
    """`options` in our names; `notes`: a line for each that means nothing here."""

    options: Options
    notes: tuple[str, ...]


def adopt(given: Mapping[str, Any], names: Mapping[str, Name], source: str) -> Adopted:
    """Options of which some have names of vLLM, in ours. Raises `ConfigError` for those that cannot be had here, and
    for two that set the same."""
    options, notes, owner = Options(), list[str](), dict[str, str]()
    for key, value in given.items():
        spelled = str(key).replace("-", "_")
        name = names.get(spelled)
        if name is None:
            made = {spelled if isinstance(key, str) else key: value}
        elif value is None:  # the default of most options there, and of ours with these names
            made = {}
        elif name.ours:
            made = _made(spelled, name, value, source)
            if not made and value not in (False, "false"):
                notes.append(f"{spelled} ({source}) is vLLM's and sets nothing here: {name.says.replace('`', '')}")
        elif name.idle or _plain(value) in name.harmless:
            notes.append(f"{spelled} ({source}) is vLLM's and sets nothing here: {name.says}")
            continue
        else:
            raise ConfigError(f"{spelled} ({source}) is vLLM's and not to be had here: {name.says}", param=spelled)
        for option in made:
            if option in options:
                raise ConfigError(f"{owner[option]} and {key} ({source}) both set {option}; give one", param=str(key))
            owner[option] = str(key)
        options |= made
    return Adopted(options, tuple(notes))


def _made(spelled: str, name: Name, value: Any, source: str) -> Options:
    if name.options is None:
        return dict.fromkeys(name.ours, value)
    try:
        return name.options(value)
    except (ValueError, TypeError, AttributeError, LookupError) as e:
        raise ConfigError(f"{spelled} ({source}), an option of vLLM: {e}", param=spelled) from None


def _plain(value: Any) -> Any:
    """A value that can be looked up: text of a command line as a number, truth value or text."""
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else json.dumps(value, default=str)
    lowered = {"true": True, "false": False, "none": None}
    return lowered.get(value.lower(), int(value) if value.isdecimal() else value)


def whole_number(value: Any) -> int:
    """A number as vLLM takes them: 32k is 32,000, 32K is 32,768."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", str(value))
    if found is not None:
        number = float(found[1]) * _UNITS.get(found[2], 1)
        if number.is_integer():
            return int(number)
    raise ValueError("it must be a whole number, such as 4096, 32k or 32K")


def mapping(value: Any) -> Mapping[str, Any]:
    """An object, or its JSON."""
    content = value
    if isinstance(value, str):
        try:
            content = json.loads(value)
        except json.JSONDecodeError:
            content = None
    if not isinstance(content, Mapping):
        raise TypeError('it must be an object, such as {"image": 4}')
    return content


def listed(value: Any) -> str:
    """A list, its JSON, or words, with commas between."""
    if isinstance(value, str) and value.startswith("["):
        value = json.loads(value)
    return value if isinstance(value, str) else ",".join(map(str, value))


def on(value: Any) -> bool:
    return (
        value if isinstance(value, bool) else {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    )


class Spelling(NamedTuple):
    """How options stand on a command line. `bare`: those that need no value; `several`: those that may have more than
    one; `short`: their short forms."""

    bare: Collection[str]
    several: Collection[str]
    short: Mapping[str, str]


class _Flag(NamedTuple):
    """A word of a command line. `inner`: the keys after dots, as in `--limit-mm-per-prompt.image`; `value`: None if it
    is in the next words."""

    key: str
    inner: tuple[str, ...]
    value: Any


def gathered(words: Sequence[str], names: Mapping[str, Name], spelling: Spelling) -> tuple[list[str], Options]:
    """The words of a command line without the options in `names`, and these with their values. Raises `ConfigError`."""
    rest, given, at = list[str](), Options(), 0
    model_first = bool(words) and not words[0].startswith("-")  # else the last of several words may be the model
    while at < len(words):
        word, at = words[at], at + 1
        flag = _read(word, names, spelling)
        if flag is None:
            rest.append(word)
            continue
        value = flag.value
        if value is None:
            stop = next((i for i in range(at, len(words)) if re.match("--?[a-zA-Z]", words[i])), len(words))
            taken = words[at:stop] if model_first and flag.key in spelling.several else words[at:stop][:1]
            if not taken:
                raise ConfigError(f"{word} needs a value", param=flag.key)
            value, at = taken[0] if len(taken) == 1 else list(taken), at + len(taken)
        _put(given, flag, value)
    return rest, given


def _read(word: str, names: Mapping[str, Name], spelling: Spelling) -> _Flag | None:
    """The flag that a word is, if it is in `names`."""
    stem, equals, text = re.sub(r"^-O(\d)$", r"-O=\1", word).partition("=")
    key, *inner = spelling.short.get(stem, stem).removeprefix("--").split(".")
    key, value = key.replace("-", "_"), text if equals else None
    if not stem.startswith("-"):
        return None
    if key in names:
        return _Flag(key, tuple(inner), True if value is None and key in spelling.bare else value)
    turned = key.removeprefix("no_")
    return _Flag(turned, (), False) if turned in names and turned in spelling.bare else None


def _put(given: Options, flag: _Flag, value: Any) -> None:
    if not flag.inner:
        given[flag.key] = value
        return
    try:
        part = given[flag.key] = dict(mapping(given.get(flag.key, {})))
        for key in flag.inner[:-1]:
            part = part.setdefault(key, {})
        part[flag.inner[-1]] = _json(value)
    except (TypeError, ValueError, AttributeError):
        where = ".".join((flag.key, *flag.inner))
        raise ConfigError(
            f"--{where.replace('_', '-')} does not fit what else is given of it", param=flag.key
        ) from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
