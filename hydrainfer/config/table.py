"""The table of the resolved configuration that is printed at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from hydrainfer.config.load import Loaded, options


def config_table(loaded: Loaded, facts: Mapping[str, Any]) -> Table:
    """The options that the server runs with, and the source of each value. Unchanged defaults are left out, unless they
    were resolved from `auto`."""
    table = Table(title="hydrainfer", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    for o in options():
        source = loaded.provenance[o.name]
        value = facts.get(o.name, getattr(loaded.config, o.name))
        if o.name == "api_key" and value:
            value = "set"
        if source != "default" or o.name in facts:
            table.add_row(o.name, str(value), f"[dim]{'auto' if source == 'default' else source}[/dim]")
    of_options = {o.name for o in options()}
    for name, value in facts.items():
        if name not in of_options:
            table.add_row(name, str(value), "")
    return table
