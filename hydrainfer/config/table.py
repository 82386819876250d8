"""The table of the resolved configuration that is printed at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from hydrainfer.config.load import Loaded, options


def config_table(loaded: Loaded, facts: Mapping[str, Any]) -> Table:
    """The rows of `config_rows`, for people."""
    table = Table(title="hydrainfer", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, value, source in config_rows(loaded, facts):
        table.add_row(name, value, f"[dim]{source}[/dim]" if source else "")
    return table


def config_rows(loaded: Loaded, facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The options that the server runs with: name, value, and the source of the value. Unchanged defaults are left out,
    unless they were resolved from `auto`. The rest of the `facts` follows, without sources."""
    rows = []
    for o in options():
        source = loaded.provenance[o.name]
        value = facts.get(o.name, getattr(loaded.config, o.name))
        if o.name == "api_key" and value:
            value = "set"
        if source != "default" or o.name in facts:
            rows.append((o.name, str(value), "auto" if source == "default" else source))
    of_options = {o.name for o in options()}
    return rows + [(name, str(value), "") for name, value in facts.items() if name not in of_options]
