"""One page over all figures: what the paper says, what the simulation gives, and what to think of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks.paper.lab import Lab

INTRODUCTION = Path(__file__).with_name("introduction.md")


class Figure(Protocol):
    """A module of this package. `compare`: rows of what the paper says, what we get, and whether that holds."""

    TITLE: str
    TEXT: str

    def simulate(self, lab: Lab, quick: bool) -> dict[str, Any]: ...

    def draw(self, found: dict[str, Any], path: Path) -> None: ...

    def compare(self, found: dict[str, Any]) -> list[tuple[str, str, str]]: ...


def write_readme(folder: Path, figures: Mapping[str, Figure]) -> Path:
    """Write README.md from the JSON files that are there, in the paper's order."""
    parts, missing = [INTRODUCTION.read_text()], []
    for name in sorted(figures):
        source = folder / f"{name}.json"
        if source.exists():
            parts.append(_section(name, figures[name], json.loads(source.read_text())))
        else:
            missing.append(name)
    if missing:
        parts.append(f"Not made yet: `python -m benchmarks.paper {' '.join(missing)}`.\n")
    path = folder / "README.md"
    path.write_text("\n".join(parts))
    return path


def _section(name: str, figure: Figure, document: dict[str, Any]) -> str:
    rows = figure.compare(document["results"])
    lines = [f"## {figure.TITLE}", "", f"![{figure.TITLE}]({name}.png)", ""]
    lines += ["| paper says | we get | |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    note = "" if not document["settings"]["quick"] else " These are small runs (`--quick`)."
    lines += ["", figure.TEXT, "", f"Numbers: `{name}.json`, revision {document['revision'][:10]}.{note}", ""]
    return "\n".join(lines)
