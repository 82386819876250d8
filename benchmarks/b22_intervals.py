"""Do the intervals of goodput hold the truth, and how many requests do they need?

    python -m benchmarks.b22_intervals [--replicates 200] [--loads 0.5 0.7 0.85 0.95]

The search of `bench` and `profile` on queues whose goodput under a limit is known, at several shares of the capacity.
`thorough`: up to six runs at each rate, the first of 800 requests; `quick`: up to three, the first of 400. `bench` has
up to three, the first of 100 requests or more; `profile` two or three, the first of 1,000 (`--requests` of both).
"""

from __future__ import annotations

import multiprocessing
import statistics
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.queues import CAPACITY, QUEUES, limit_s, searched
from benchmarks.record import write_result

QUESTION = (__doc__ or "").partition("\n")[0]
EFFORTS = {"thorough": (800, 6), "quick": (400, 3)}


def row(queue: str, load: float, effort: str, n: int, pool: Any) -> dict[str, Any]:
    """`coverage`: share of the stated 95 % intervals that hold the truth; `decided`: of those that name both ends."""
    truth, (n_first, max_runs) = load * CAPACITY, EFFORTS[effort]
    one = partial(searched, queue, limit_s(queue, truth), n_first=n_first, max_runs=max_runs)
    results = pool.map(one, range(n))
    found = [goodput for goodput, _ in results]
    lows, highs = [g.low or 0.0 for g in found], [g.high or float("inf") for g in found]
    rates = [g.rate_per_s for g in found]
    return {
        "queue": queue,
        "load": load,
        "effort": effort,
        "truth": truth,
        "replicates": n,
        "coverage": sum(low <= truth <= high for low, high in zip(lows, highs)) / n,
        "bias": statistics.fmean(rates) / truth - 1,
        "scatter": statistics.pstdev(rates) / truth,
        "above_capacity": sum(rate > CAPACITY for rate in rates),
        "decided": sum(g.low is not None and g.high is not None for g in found) / n,
        "low": statistics.median(lows) / truth,
        "high": statistics.median(highs) / truth,
        "requests": statistics.median(n for _, n in results),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    shown = new_table(
        "95 % intervals of goodput; interval as a share of the truth, medians",
        ("queue", "load", "effort", "covered", "bias", "scatter", "above capacity", "interval", "requests"),
    )
    for r in rows:
        cells = (f"{r['coverage']:.1%}", f"{r['bias']:+.1%}", f"{r['scatter']:.1%}", str(r["above_capacity"]))
        interval = f"{r['low']:.2f} to {r['high']:.2f}"
        shown.add_row(r["queue"], f"{r['load']:g}", r["effort"], *cells, interval, f"{r['requests']:.0f}")
    return shown


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.85, 0.95], help="of the capacity")
    args, console = parser.parse_args(), new_console()
    rows = []
    with multiprocessing.get_context("forkserver").Pool() as pool:
        for effort in EFFORTS:
            for queue in QUEUES:
                rows += [row(queue, load, effort, args.replicates, pool) for load in args.loads]
                console.print(f"{effort}, {queue}: least coverage {min(r['coverage'] for r in rows):.1%}")
    console.print(table(rows))
    path = write_result("b22_intervals", __doc__, args, rows)
    panels = []
    for title, key in (("intervals that hold the truth, %", "coverage"), ("bias, %", "bias")):
        series = {
            effort: [[abs(r[key]) * 100 for r in rows if r["queue"] == q and r["effort"] == effort] for q in QUEUES]
            for effort in EFFORTS
        }
        panels.append(Panel(title if key == "coverage" else "bias, %, without sign", list(QUEUES), series))
    save_bars(path.with_suffix(".png"), QUESTION, panels)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
