"""Command-line flags made from the fields of a struct: name, type and default of a field, the rest from its `Meta`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import typer
from msgspec import Meta
from typer.core import TyperCommand

from hydrainfer.core import ConfigError

Command = TypeVar("Command", bound=Callable[..., None])


def flag(panel: str, text: str, *, ge: int | None = None, **more: Any) -> Meta:
    """The `Meta` of a field that is a flag: its `--help` entry is `text`, in the group `panel`. `more`: further
    arguments of `typer.Option`. Among them, `param_decls`: the flag's names, if not that of the field; `bare`: the
    number that the flag means if none follows it, for a verb of class `command_of`."""
    return Meta(title=panel, description=text, ge=ge, extra=more)


def command_of(schema: type[msgspec.Struct]) -> type[TyperCommand]:
    """The command class of a verb whose flags are the fields of `schema`. Flags with `bare` may stand without a
    number."""
    extra = {f.name: f.type.__metadata__[0].extra or {} for f in msgspec.structs.fields(schema)}
    bare = {f"--{name.replace('_', '-')}": more["bare"] for name, more in extra.items() if "bare" in more}

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            given = list[str]()
            for word, following in zip_longest(args, args[1:]):
                given += [word, bare[word]] if word in bare and not (following or "").isdigit() else [word]
            return super().parse_args(ctx, given)

    return Command


def with_flags(schema: type[msgspec.Struct], positional: str, *, as_text: bool = False) -> Callable[[Command], Command]:
    """A decorator that gives `command(own…, **flags)` a flag for each field of `schema`. The field `positional` is its
    argument. `as_text`: values arrive as they were typed, or None if not given, so that a loader can check and merge
    them."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        given = [_parameter(f, f.name == positional, as_text) for f in msgspec.structs.fields(schema)]
        extra = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([*given, *extra])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(field: msgspec.structs.FieldInfo, is_argument: bool, as_text: bool) -> inspect.Parameter:
    meta, kind, default = field.type.__metadata__[0], field.type.__origin__, field.default
    said: dict[str, Any] = {"help": meta.description} | (meta.extra or {})
    names: Sequence[str] = said.pop("param_decls", ())
    for ours in ("bare", "form"):
        said.pop(ours, None)
    paired = any("/" in name for name in names)  # --this/--no-this, which takes no value
    if is_argument:
        said |= {"show_default": False} if as_text else {}
    elif as_text:
        said |= {
            "rich_help_panel": meta.title,
            "show_default": _shown(field),
            "metavar": None if paired else _metavar(kind),
        }
    else:
        said |= {"rich_help_panel": meta.title, "min": meta.ge}
    info = typer.Argument(**said) if is_argument else typer.Option(*names, **said)
    if as_text:
        kind, default = bool | None if paired else str | None, None
    elif default is msgspec.NODEFAULT:
        default = inspect.Parameter.empty
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return next((name.upper() for name in ("float", "int") if name in str(kind)), "TEXT")


def _shown(field: msgspec.structs.FieldInfo) -> str:
    if field.default is None:
        return "none" if field.name == "api_key" else "auto"
    return str(field.default)


def check_out(out: Path) -> None:
    """Make the folder `out`. Raises `ConfigError` if that is impossible, before hours are spent on its content."""
    there = next(folder for folder in (out, *out.absolute().parents) if os.path.exists(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written" if there.is_dir() else "is a file, not a folder"
        raise ConfigError(f"--out {out}: {there} {why}", param="out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: cannot be made: {e.strerror}", param="out") from None
