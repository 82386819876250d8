"""Do the intervals of `hydrainfer profile` hold what long simulations say a layout carries?

    python -m benchmarks.b23_profile_intervals [--seeds 12] [--requests 1000] [--long 12000]

A layout of each setting is measured as the finals of a search are, with traces of `--requests` of so many seeds. The
truth is the rate at which a run of `--long` requests with another seed, its warm-up left out, just keeps 90 % within
the SLO, to 3 %.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import new_console, options
from benchmarks.figure import COLOURS
from benchmarks.paper.draw import figure
from benchmarks.record import write_result
from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.judging import steady_state
from hydrainfer.planner.costs import read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.search import Bounds, Study, measured, narrow, observe, study_of
from hydrainfer.workload.sources import read_workload

QUESTION = (__doc__ or "").partition("\n")[0]
_TRUTH_SEED, _EXACT = 1_000_003, 0.03


class Setting(NamedTuple):
    model: str
    dataset: str
    hardware: str
    layout: str
    slo: Slo


SETTINGS = (
    Setting("llava-next-7b", "textcaps", "h800", "8EPD", Slo(ttft_s=8.0, tpot_s=0.08)),
    Setting("llava-1.5-7b", "textcaps", "h800", "1ED3P", Slo(ttft_s=0.25, tpot_s=0.04)),
    Setting("llava-next-7b", "pope", "h800", "1E1PD+2EPD", Slo(ttft_s=1.0, tpot_s=0.06)),
    Setting("qwen2-vl-7b", "mme", "a100", "4EPD", Slo(ttft_s=1.0, tpot_s=0.05)),
)


def study_for(s: Setting, n: int, seed: int, n_more: int) -> Study:
    workload, prompts = read_workload(s.dataset), prompts_of(s.model)
    trace = trace_of(workload, prompts, n, seed)
    more = trace_of(workload, prompts, n_more, (seed + 1) << 20) if n_more else ()
    return study_of(shape_of(s.model), read_hardware(s.hardware), trace, s.slo, more=more)


def truth(s: Setting, n: int, near: float) -> float:
    study = study_for(s, n, _TRUTH_SEED, 0)

    def carries(rate: float) -> bool:
        state = steady_state([observe(study, Layout.parse(s.layout), rate).series])
        return not state.grows and state.met.share >= study.target

    low, high = near * 0.98, near * 1.02
    while low > near / 3 and not carries(low):
        low, high = low / 1.06, low
    while high < near * 3 and high > near and carries(high):
        low, high = high, high * 1.06
    low, high = narrow(carries, low, high, _EXACT)
    return (low * high) ** 0.5


def one(job: tuple[int, int, int]) -> dict[str, Any]:
    i, seed, n = job
    s = SETTINGS[i]
    study = study_for(s, n, seed, 2 * n)
    layout = Layout.parse(s.layout)
    bound = Bounds(study).of(layout).rate
    f = measured(study, layout, bound, bound * 0.85)
    simulated = sum(a.n for a in f.attempts)
    return {
        "setting": i,
        "seed": seed,
        "goodput": f.goodput,
        "low": f.goodput_low,
        "high": f.goodput_high,
        "n": simulated,
    }


def summary(rows: list[dict[str, Any]], truths: list[float]) -> dict[str, Any]:
    """`covered` of `of`, and the mean bias, by setting and in all."""
    found = []
    for i, (s, true) in enumerate(zip(SETTINGS, truths)):
        mine = [r for r in rows if r["setting"] == i]
        covered = sum(r["low"] <= true <= r["high"] for r in mine)
        bias = sum(r["goodput"] for r in mine) / len(mine) / true - 1 if mine else None
        name = f"{s.model} {s.dataset} {s.hardware} {s.layout} {s.slo}"
        found.append({"setting": name, "truth": true, "covered": covered, "of": len(mine), "bias": bias})
    total = {"covered": sum(f["covered"] for f in found), "of": len(rows)}
    return {"settings": found, **total, "runs": rows}


def draw(results: dict[str, Any], path: Path) -> None:
    """Every interval as a share of its setting's truth."""
    with figure(path, QUESTION, 1, len(SETTINGS), 2.6, 3.4) as axes:
        for i, (axis, s, found) in enumerate(zip(axes[0], SETTINGS, results["settings"])):
            mine = [r for r in results["runs"] if r["setting"] == i]
            for x, r in enumerate(mine):
                low, rate, high = (r[k] / found["truth"] for k in ("low", "goodput", "high"))
                colour = COLOURS[0] if low <= 1.0 <= high else COLOURS[4]
                axis.plot([x, x], [low, high], color=colour)
                axis.plot(x, rate, "o", color=colour, markersize=4)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_title(f"{s.model} {s.dataset}\n{s.layout}: {found['covered']} of {found['of']}", fontsize=9)
            axis.set_ylim(0.6, 1.5)
            axis.set_xlabel("seed")
        axes[0][0].set_ylabel("goodput / truth")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--long", type=int, default=12_000)
    args, console = parser.parse_args(), new_console()
    jobs = [(i, seed, args.requests) for seed in range(args.seeds) for i in range(len(SETTINGS))]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("forkserver").Pool() as pool:
        for row in pool.imap(one, jobs):
            rows.append(row)
            name = SETTINGS[row["setting"]].layout
            console.print(f"{name} seed {row['seed']}: {row['goodput']:.3g} ({row['low']:.3g} to {row['high']:.3g})")
        near = [sum(r["goodput"] for r in rows if r["setting"] == i) / args.seeds for i in range(len(SETTINGS))]
        truths = pool.starmap(truth, [(s, args.long, rate) for s, rate in zip(SETTINGS, near)])
    results = summary(rows, truths)
    for found in results["settings"]:
        console.print(found)
    console.print(f"covered: {results['covered']} of {results['of']}")
    path = write_result("b23_profile_intervals", __doc__, args, results)
    draw(results, path.with_suffix(".png"))
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
