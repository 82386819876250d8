"""How far are plans of described devices from what others have measured of engines as they are?

    python -m benchmarks.b24_predictions [vllm sglang] [vllm=points.yaml]

Each engine of benchmarks/published is fitted (`benchmarks/calibrating.py`) to half of its points. The table has
what is predicted of all of them, before and after; the other half tells how good it is. `NAME=FILE` fits an engine to
your own points.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.calibrating import Measured, calibrated, error_of, off_by, predicted, read_measured
from benchmarks.command import new_console, new_table, options
from benchmarks.record import ROOT, write_result
from hydrainfer.planner.costs import EngineModel, read_engine

ENGINES = ("vllm", "sglang")
_PLAIN = {"slower": 1.0, "mixed": 1.0, "error": None}


def of_engine(word: str) -> dict[str, Any]:
    """Every point with its predictions by the engine as described, and fitted to half of them. `word`: NAME or
    NAME=FILE."""
    name, _, file = word.partition("=")
    points = read_measured(Path(file or ROOT / "benchmarks" / "published" / f"{name}.yaml"))
    plain = msgspec.structs.replace(read_engine(name), **_PLAIN)
    fitted = calibrated(plain, points)
    rows = [_row(m, plain, fitted) for m in points]
    held = [abs(math.expm1(math.log(r["off"]))) for r in rows if not r["fit"]]
    return {
        "engine": name,
        "slower": fitted.slower,
        "mixed": fitted.mixed,
        "error": fitted.error,
        "error_of_all": error_of(fitted, points),
        "median_held_out": statistics.median(held) if held else None,
        "worst_held_out": max(held, default=None),
        "directions": _directions(points, rows),
        "points": rows,
    }


def _row(m: Measured, plain: EngineModel, fitted: EngineModel) -> dict[str, Any]:
    before, after = predicted(m, plain), predicted(m, fitted)
    return {**msgspec.to_builtins(m), "before": before, "predicted": after, "off": off_by(m, after)}


def _directions(points: tuple[Measured, ...], rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether the better one of two layouts with the same work is the one that was measured to be."""
    found: dict[str, bool] = {}
    for i, (m, a) in enumerate(zip(points, rows)):
        for other, b in list(zip(points, rows))[i + 1 :]:
            same = (m.text, m.pictures, m.output, m.model) == (other.text, other.pictures, other.output, other.model)
            if same and m.quantity == other.quantity == "goodput" and m.layout != other.layout:
                better = (m.value - other.value) * (a["predicted"] - b["predicted"]) > 0
                found[f"{m.name} and {other.layout}"] = better
    return found


def table(found: dict[str, Any]) -> Table:
    title = f"{found['engine']}: {found['slower']:.3g} times slower, {found['mixed']:.3g} times that beside an encoder"
    shown = new_table(title, ("point", "measured", "described", "fitted", "off", "used"))
    for r in found["points"]:
        numbers = (f"{r['value']:.3g}", f"{r['before']:.3g}", f"{r['predicted']:.3g}", f"{r['off'] - 1:+.0%}")
        shown.add_row(f"{r['name']} ({r['quantity']})", *numbers, "fit" if r["fit"] else "held out")
    return shown


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("engines", nargs="*", default=list(ENGINES))
    args, console = parser.parse_args(), new_console()
    with multiprocessing.get_context("forkserver").Pool() as pool:
        results = pool.map(of_engine, args.engines)
    for found in results:
        console.print(table(found))
        console.print({k: v for k, v in found.items() if k != "points"})
    console.print(f"wrote {write_result('b24_predictions', __doc__, args, results).name}")


if __name__ == "__main__":
    main()
