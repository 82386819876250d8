"""Does the search keep the layout that trying everything would choose, and what does it save?

    python -m benchmarks.b16_pruning [--requests 400] [--devices 2 3 4]

Every workload and SLO below is searched twice over the same layouts and the same trace: pruned and screened as
`hydrainfer profile` does, and exhaustively. The winner is kept if its goodput lies in the interval of the exhaustive
winner's, or the other way round.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.command import options
from benchmarks.record import write_result
from hydrainfer.config import Slo
from hydrainfer.planner.costs import read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.search import Finding, candidates_of, search, study_of
from hydrainfer.workload.sources import read_workload

CASES = (
    ("llava-1.5-7b", "textcaps", "h800", Slo(ttft_s=0.25, tpot_s=0.04)),
    ("llava-next-7b", "textcaps", "h800", Slo(ttft_s=0.4, tpot_s=0.03)),
    ("llava-next-7b", "pope", "h800", Slo(ttft_s=1.0, tpot_s=0.06)),
    ("qwen2-vl-7b", "mme", "a100", Slo(ttft_s=1.0, tpot_s=0.05)),
    ("qwen2-vl-7b", "textvqa", "l40s", Slo(ttft_s=2.0, tpot_s=0.08)),
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4])
    args = parser.parse_args()
    rows = []
    for n_devices in args.devices:
        for case in CASES:
            rows.append(_row(case, n_devices, args.requests))
            print(_line(rows[-1]), flush=True)
    kept = sum(row["kept"] for row in rows)
    results = {"cases": rows, "kept": kept, "of": len(rows)}
    write_result("b16_pruning", __doc__, args, results)
    print(f"the winner was kept in {kept} of {len(rows)} cases")


def _row(case: tuple[str, str, str, Slo], n_devices: int, n_requests: int) -> dict[str, Any]:
    model, dataset, hardware, slo = case
    trace = trace_of(read_workload(dataset), prompts_of(model), n_requests)
    study = study_of(shape_of(model), read_hardware(hardware), trace, slo)
    candidates = candidates_of(study, n_devices)
    found: dict[str, list[Finding]] = {}
    took: dict[str, float] = {}
    for name in ("pruned", "exhaustive"):
        begin_s = time.perf_counter()
        found[name] = search(study, candidates, exhaustive=name == "exhaustive")
        took[name] = time.perf_counter() - begin_s
    quick, every = (found[name][0] for name in ("pruned", "exhaustive"))
    truth = next(f for f in found["exhaustive"] if f.layout == quick.layout)
    return {
        "model": model,
        "dataset": dataset,
        "hardware": hardware,
        "slo": str(slo),
        "devices": n_devices,
        "layouts": len(candidates),
        "pruned_winner": _told(quick),
        "exhaustive_winner": _told(every),
        "lost": 1.0 - (truth.goodput or 0.0) / every.goodput if every.goodput else 0.0,
        "kept": quick.layout == every.layout or _within(quick, every) or _within(every, quick),
        "n_simulations": {name: sum(len(f.attempts) for f in found[name]) for name in found},
        "seconds": took,
    }


def _within(one: Finding, other: Finding) -> bool:
    return (other.goodput_low or 0.0) <= (one.goodput or 0.0) <= (other.goodput_high or 0.0)


def _told(f: Finding) -> dict[str, Any]:
    return {"layout": f.layout, "goodput": f.goodput, "low": f.goodput_low, "high": f.goodput_high}


def _line(row: dict[str, Any]) -> str:
    quick, every, n = row["pruned_winner"], row["exhaustive_winner"], row["n_simulations"]
    return (
        f"{row['devices']} x {row['hardware']} {row['model']} {row['dataset']}: {quick['layout']} "
        f"{quick['goodput'] or 0:.3g}/s, of all {every['layout']} {every['goodput'] or 0:.3g}/s, "
        f"lost {row['lost']:.1%}; "
        f"{n['pruned']} simulations for {n['exhaustive']}, {row['seconds']['pruned']:.0f} s for "
        f"{row['seconds']['exhaustive']:.0f} s"
    )


if __name__ == "__main__":
    main()
