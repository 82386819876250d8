"""One page over all tables and figures: the paper's value of each cell, ours, their ratio, and whether that holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

INTRODUCTION = Path(__file__).with_name("introduction.md")
USUAL = 0.05


class Part(Protocol):
    """A module of this package. The results of `compute` have `rows`, made by `row` or, if the part simulates, by
    `simulated` and `at_most`, and perhaps a `table`: lists of cells, the first of which is its head. A part with
    `HAS_FIGURE` also has a function `draw(results, path)`."""

    TITLE: str
    TEXT: str
    HAS_FIGURE: bool

    def compute(self) -> dict[str, Any]: ...


def row(
    cell: str,
    paper: float | None,
    ours: float,
    queue: float | None = None,
    *,
    tolerance: float = USUAL,
    is_calibrated: bool = False,
) -> dict[str, Any]:
    """A cell of the paper (None if it prints none) beside ours, by its equations and, if that differs, by what a queue
    serves. `tolerance`: of the ratio of the equations' value to the paper's. `is_calibrated`: the model was fitted to
    this cell."""
    return {
        "cell": cell,
        "paper": paper,
        "ours": ours,
        "ratio": _relative(ours, paper),
        "queue": queue,
        "queue_ratio": _relative(queue, paper),
        "tolerance": tolerance,
        "verdict": _verdict(_relative(ours, paper), tolerance, is_calibrated),
    }


def simulated(cell: str, expected: float, value: float, *, tolerance: float = USUAL) -> dict[str, Any]:
    """What was simulated beside what the model or the paper expects; the cell's name says which of the two."""
    return {
        "cell": cell,
        "expected": expected,
        "simulated": value,
        "ratio": value / expected,
        "tolerance": tolerance,
        "verdict": _verdict(value / expected, tolerance, is_calibrated=False),
    }


def at_most(cell: str, limit: float, value: float) -> dict[str, Any]:
    """What was simulated beside the most that it should be."""
    verdict = "holds" if value <= limit else "**does not hold**"
    return {"cell": cell, "at_most": limit, "simulated": value, "verdict": verdict}


def write_readme(folder: Path, parts: Mapping[str, Part]) -> Path:
    """Write README.md from the JSON files that are there."""
    sections = [INTRODUCTION.read_text()]
    for name, part in parts.items():
        source = folder / f"{name}.json"
        if source.exists():
            sections.append(_section(name, part, json.loads(source.read_text())))
    path = folder / "README.md"
    path.write_text("\n".join(sections))
    return path


def _relative(value: float | None, paper: float | None) -> float | None:
    if value is None or paper is None:
        return None
    return value / paper


def _verdict(ratio: float | None, tolerance: float, is_calibrated: bool) -> str:
    if ratio is None:
        return "not in the paper"
    if is_calibrated:
        return "calibrated"
    if abs(ratio - 1.0) <= tolerance:
        return "holds"
    return f"**does not hold** (beyond {tolerance:.1%})"


def _section(name: str, part: Part, document: dict[str, Any]) -> str:
    lines = [f"## {part.TITLE}", ""]
    if part.HAS_FIGURE:
        lines += [f"![{part.TITLE}]({name}.png)", ""]
    rows = document["results"]["rows"]
    lines += _simulated_rows(rows) if "simulated" in rows[0] else _paper_rows(rows)
    lines += _table(document["results"].get("table", []))
    lines += ["", part.TEXT, "", f"Numbers: `{name}.json`, revision {document['revision'][:10]}.", ""]
    return "\n".join(lines)


def _paper_rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| cell | paper | ours | ratio | queue | ratio | |", "|---|---|---|---|---|---|---|"]
    for cells in rows:
        values = [cells["paper"], cells["ours"], cells["ratio"], cells["queue"], cells["queue_ratio"]]
        shown = [_number(values[0]), _number(values[1]), _ratio(values[2]), _number(values[3]), _ratio(values[4])]
        lines.append(f"| {' | '.join([cells['cell'], *shown, cells['verdict']])} |")
    return lines


def _simulated_rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| cell | expected | simulated | ratio | |", "|---|---|---|---|---|"]
    for cells in rows:
        expected = _number(cells.get("expected"))
        if "at_most" in cells:
            expected = f"≤ {_number(cells['at_most'])}"
        shown = [expected, _number(cells["simulated"]), _ratio(cells.get("ratio"))]
        lines.append(f"| {' | '.join([cells['cell'], *shown, cells['verdict']])} |")
    return lines


def _table(rows: list[list[str | float]]) -> list[str]:
    shown = [[cell if isinstance(cell, str) else _number(cell) for cell in cells] for cells in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in shown]
    if not lines:
        return []
    return ["", lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1000.0:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}"
