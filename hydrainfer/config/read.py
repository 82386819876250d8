"""Reading of YAML files, with error messages of one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from yaml.constructor import ConstructorError

from hydrainfer.config.shipped import here_or_shipped, shipped
from hydrainfer.core import ConfigError

T = TypeVar("T")


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file, which may be a shipped one; none if it is empty. Raises `ConfigError`."""
    try:
        content = yaml.load(here_or_shipped(path).read_text("utf-8"), _Loader)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {_fault(e)}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, one option a line")
    return content


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key that is set twice. Every fault but too deep nesting is a `YAMLError`."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise ConstructorError(problem=f"{key.value!r} is set twice", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as e:  # a scalar that its type cannot hold
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(problem=f"{node.value!r:.60} is no {kind}", problem_mark=node.start_mark) from e


def _fault(e: Exception) -> str:
    """What is wrong, and in which line."""
    problem, mark = getattr(e, "problem", None), getattr(e, "problem_mark", None)
    if problem is None or mark is None:
        return str(e).splitlines()[0]
    return f"line {mark.line + 1}: {problem}"


RENAMED = {"landing_gib": "host_cache_gib"}
"""The present names of options that had another one."""


def check_known(key: object, known: Iterable[str], source: str, listed: str = "") -> None:
    """Check that a key is known. Raises `ConfigError` that suggests a similar key or, if there is none, says what the
    keys are, or where they are `listed`."""
    names = list(known)
    if key not in names:
        if RENAMED.get(str(key)) in names:
            raise ConfigError(f"option {key} ({source}) is now called {RENAMED[str(key)]}", param=str(key))
        near = difflib.get_close_matches(str(key), names, 1)
        all_of_them = f"{listed} lists them" if listed else f"known keys are {', '.join(names)}"
        hint = f"; did you mean {near[0]}?" if near else f"; {all_of_them}"
        raise ConfigError(f"unknown option {key!r} ({source}){hint}", param=str(key))


def converted(content: Any, kind: type[T], where: str, param: str) -> T:
    """The content of a file as a `kind`, which is a struct or a tuple of structs. Raises `ConfigError` for a wrong
    value or an unknown key of a struct; its message names `where`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for key in content:
            check_known(key, [f.name for f in msgspec.structs.fields(kind)], where)
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, TypeError) as e:
        raise ConfigError(f"{where}: {str(e)[0].lower()}{str(e)[1:]}", param=param) from None


def locate(kind: str, name: str | Path) -> Path:
    """The path of a file given by its path or as the name of a shipped `configs/KIND/NAME.yaml`. Raises `ConfigError`
    that lists the shipped ones."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml", ".jsonl") or path.is_file():
        return path
    folder = shipped("configs") / kind
    if (folder / f"{name}.yaml").is_file():
        return folder / f"{name}.yaml"
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    raise ConfigError(
        f"no {kind} called {str(name)!r}: give a file, or one of {', '.join(known) or 'none'}", param=kind
    )
