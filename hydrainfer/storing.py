"""`hydrainfer store`: what is in a shared store, a check of all its blocks, and their removal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hydrainfer.core import ConfigError

if TYPE_CHECKING:
    from hydrainfer.stores import Contents, KindRow, PlaceTools

_BROKEN = 1  # exit status, as of fsck: faults were found, and mended
_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))

Show = Callable[[str, "PlaceTools", Console | None], bool]
"""A function that does one thing with a place and shows the result, as JSON if there is no console. Returns whether
blocks were broken."""


def store(
    places: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            envvar="HYDRAINFER_STORE",
            help="As --store of `serve`: dir:/path?gib=50, redis://host:6379, or several, with commas.",
        ),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Read all blocks and remove broken ones; exit status 1 if there were any.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all blocks of all models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per place.")] = False,
) -> None:
    """Say what is in a shared store, by model, kind and age. All of it may be done while servers use the store."""
    from hydrainfer.stores import StoreError, parse_places, tools_of

    if check and clear:
        raise ConfigError("--check and --clear exclude each other: what is cleared needs no check")
    show: Show = _list
    if check:
        show = _check
    elif clear:
        show = _clear
    tools = [(place.name, tools_of(place)) for place in parse_places(places)]
    console = None if as_json else Console(highlight=False)
    failures: list[str] = []
    n_broken = 0
    for name, tool in tools:
        try:
            n_broken += show(name, tool, console)
        except StoreError as e:
            failures.append(str(e))
    if failures:
        raise ConfigError("; ".join(failures))
    if n_broken:
        raise typer.Exit(_BROKEN)


def _list(place: str, tools: PlaceTools, console: Console | None) -> bool:
    rows, contents = tools.summary(), tools.contents()
    if console is None:
        facts = {"place": place, "in_use_bytes": contents.n_bytes, "limit_bytes": contents.limit_bytes}
        typer.echo(json.dumps({**facts, "rows": [row._asdict() for row in rows]}))
        return False
    console.print(f"[bold]{escape(place)}[/bold]", soft_wrap=True)
    _show(sorted(rows, key=_order), contents, console)
    if not rows:
        console.print(f"what puts blocks there: [bold]hydrainfer serve --store {escape(place)}[/bold]", soft_wrap=True)
    return False


def _check(place: str, tools: PlaceTools, console: Console | None) -> bool:
    with nullcontext() if console is None else console.status(f"reading all blocks of {escape(place)}"):
        n_whole, n_broken = tools.check()
    if console is None:
        typer.echo(json.dumps({"place": place, "whole": n_whole, "broken": n_broken}))
    else:
        broken = "none is broken"
        if n_broken == 1:
            broken = "1 of them was broken and is removed"
        elif n_broken:
            broken = f"{n_broken:,} of them were broken and are removed"
        _say(console, place, f"{_n_blocks(n_whole + n_broken)} read, {broken}")
    return n_broken > 0


def _clear(place: str, tools: PlaceTools, console: Console | None) -> bool:
    with nullcontext() if console is None else console.status(f"removing all blocks of {escape(place)}"):
        n_blocks, n_bytes = tools.clear()
    if console is None:
        typer.echo(json.dumps({"place": place, "removed": n_blocks, "removed_bytes": n_bytes}))
    else:
        _say(console, place, f"{_n_blocks(n_blocks)} removed, {_size(n_bytes)}")
    return False


def _say(console: Console, place: str, text: str) -> None:
    console.print(f"[bold]{escape(place)}[/bold]: {text}", soft_wrap=True)


def _show(rows: Sequence[KindRow], contents: Contents, console: Console) -> None:
    """Print a table, the sums, and what servers have written to measure the store."""
    from hydrainfer.stores import TRIAL_KIND

    blocks = [row for row in rows if row.kind != TRIAL_KIND]
    trials = [row for row in rows if row.kind == TRIAL_KIND]
    if blocks:
        console.print(_table(blocks))
    limit = ", no limit is set"
    if contents.limit_bytes is not None:
        limit = f" of {_size(contents.limit_bytes)}"
    console.print(f"{_sum(blocks)}; in use in all: {_size(contents.n_bytes)}{limit}", soft_wrap=True)
    if trials:
        text = f"beside these, {_sum(trials)} that servers wrote to measure the store"
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)


def _table(rows: Sequence[KindRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("model", "dtype", "kind"):
        table.add_column(title)
    table.add_column("blocks", justify="right")
    table.add_column("size", justify="right")
    table.add_column("last used")
    for row in rows:
        model, dtype, kind = _order(row)
        cells = (model, dtype, kind, f"{row.n_blocks:,}", _size(row.n_bytes), _last_used(row))
        table.add_row(*(escape(_printable(cell)) for cell in cells))
    return table


def _printable(text: str) -> str:
    """The text without what could steer a terminal, as whoever writes to a store names the models there."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _order(row: KindRow) -> tuple[str, str, str]:
    """The model, the other facts about it, and the kind."""
    others = [value for key, value in row.about.items() if key != "model"]
    return row.about.get("model", "unknown"), ", ".join(others), row.kind


def _sum(rows: Sequence[KindRow]) -> str:
    return f"{_n_blocks(sum(row.n_blocks for row in rows))}, {_size(sum(row.n_bytes for row in rows))}"


def _n_blocks(n: int) -> str:
    return f"{n:,} block{'s' * (n != 1)}"


def _size(n_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= unit_bytes:
            return f"{n_bytes / unit_bytes:,.1f} {unit}"
    return f"{n_bytes} B"


def _last_used(row: KindRow) -> str:
    if row.oldest_s is None or row.newest_s is None:
        return "unknown"
    newest, oldest = _age(row.newest_s), _age(row.oldest_s)
    if newest == oldest:
        return f"{oldest} ago"
    return f"{newest} to {oldest} ago"


def _age(seconds: float) -> str:
    for unit, unit_s in _UNITS:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return "0 s"
