"""A link that loses 96 % of its bandwidth for three minutes, simulated: what the threshold does, and the TTFT."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import Curves, save_curves
from benchmarks.prfaas.report import at_most
from benchmarks.prfaas.served import SHORT_OUTPUT, p90
from benchmarks.prfaas.setting import BATCH, GBIT, LINK_GBPS, PAPERS, THRESHOLD, lengths, prfaas
from hydrainfer.planner.clusters.simulated import Floats, Run, Setup, simulate, trace_at

TITLE = "Simulated: a step of the bandwidth from 100 to 4 Gbps and back"
HAS_FIGURE = True
RATE = 1.3
BEGIN_S, END_S, STOP_S = 300.0, 480.0, 540.0
N_REQUESTS = round(RATE * 1.2 * STOP_S)  # enough of them to fill the last window
LAST_S = 60.0  # of the step, in which latencies are read
STEP_GBPS = 4.0
WINDOW_S, CHANGES_S = 20.0, 10.0
PREFILL_BYTES = 5e9  # of each P: a little more than the longest prompt needs
SEEDS = range(6)
FIXED, LOOP, SECONDS = "fixed threshold", "short loop", "rule seconds"
_HALF, _BACK_S, _CHANGES = 0.5, 90.0, 1
_NEAR = 1.1  # of the threshold, from which it counts as back
_NAME = "far"
TEXT = """\
1.3 requests/s at the paper's arrangement, six seeds; the link has 4 Gbps from 300 s to 480 s, which carries 1.04
requests/s at 19.4K. Answers have 128 tokens in steps that are eight times as long, so D are as busy as with 1,024. Each
P has 5 GB of caches, little more than the longest prompt needs. This is what makes the TTFT suffer: KV that waits for
the link fills the memory of the far P, and prompts wait for memory. With a fixed threshold, five of the six seeds get
there (28 to 46 s), one does not (4 s).

The loop and the rule `seconds` both hold: in the last minute of the step, the p90 of the TTFT is a quarter and a fifth
of that with a fixed threshold. At steady load the threshold does not move, as the link is at 5 % of its rate. It is
back 14 s after the end of the step at the latest.

What is not smooth: within the step the threshold swings between 19.4K and four times that, 84 to 106 changes in all, as
home becomes busier than the link and then the link busier than home. So two seeds end the step at 19.4K and count as
back at once. `seconds` has no threshold to swing. Its TTFT is a little better than the loop's, its second token not."""


def stepped(name: str, seed: int) -> Run:
    """A run through the step."""
    rates = ((0.0, LINK_GBPS * GBIT), (BEGIN_S, STEP_GBPS * GBIT), (END_S, LINK_GBPS * GBIT))
    setup = Setup(
        batch=BATCH,
        n_output=SHORT_OUTPUT,
        prefill_bytes=PREFILL_BYTES,
        rule="seconds" if name == SECONDS else "length",
        adapts=name == LOOP,
        rates={_NAME: rates},
    )
    trace = trace_at(lengths(), SHORT_OUTPUT, RATE, N_REQUESTS, seed)
    return simulate(prfaas(), PAPERS, setup, trace)


def within(run: Run, values: Floats, from_s: float, to_s: float) -> Floats:
    """The value over the requests that arrived in this time."""
    return values[(run.arrivals_s >= from_s) & (run.arrivals_s < to_s)]


def thresholds_at(changes: list[tuple[float, float]], times_s: list[float]) -> list[float]:
    """The threshold at each of the times; `changes`: the times from which each held."""
    begins_s = [at_s for at_s, _ in changes]
    return [changes[max(0, bisect_right(begins_s, at_s) - 1)][1] for at_s in times_s]


def back_s(changes: list[tuple[float, float]]) -> float:
    """Seconds from the end of the step until the threshold is within 10 % of its base; infinite if it never is."""
    (at_end,) = thresholds_at(changes, [END_S])
    values = [(END_S, at_end), *[change for change in changes if change[0] > END_S]]
    return min((at_s - END_S for at_s, value in values if value <= _NEAR * THRESHOLD), default=float("inf"))


def most_changes(changes: list[tuple[float, float]], to_s: float) -> int:
    """The most changes of the threshold in `CHANGES_S`, before a time. The first entry is the base, not a change."""
    times_s = [at_s for at_s, _ in changes[1:] if at_s < to_s]
    return max((bisect_right(times_s, at_s + CHANGES_S) - i for i, at_s in enumerate(times_s)), default=0)


def facts(run: Run) -> dict[str, Any]:
    """What is read off a run."""
    windows_s = np.arange(0.0, STOP_S, WINDOW_S)
    changes = [(at_s, values[_NAME]) for at_s, values in run.thresholds]
    return {
        "ttft_p90_s": p90(within(run, run.ttft_s, END_S - LAST_S, END_S)),
        "second_p90_s": p90(within(run, run.second_s, END_S - LAST_S, END_S)),
        "back_s": back_s(changes),
        "highest_threshold": max(value for _, value in changes),
        "changes_before": most_changes(changes, BEGIN_S),
        "changes_in_all": len(changes) - 1,
        "ttft_p90_by_window_s": [p90(within(run, run.ttft_s, at_s, at_s + WINDOW_S)) for at_s in windows_s],
        "threshold_by_window": thresholds_at(changes, [float(at_s) + WINDOW_S / 2 for at_s in windows_s]),
    }


def compute() -> dict[str, Any]:
    """Latencies in the last minute of the step, and how the threshold moves, over seeds."""
    by_name = {name: [facts(stepped(name, seed)) for seed in SEEDS] for name in (FIXED, LOOP, SECONDS)}
    table: list[list[str | float]] = [
        ["last minute, p90", "TTFT, mean, s", "median", "second token, mean, s", "median"]
    ]
    mean, median = {}, {}
    for name, seeds in by_name.items():
        for key in ("ttft_p90_s", "second_p90_s"):
            values = [seed[key] for seed in seeds]
            mean[name, key], median[name, key] = float(np.mean(values)), float(np.median(values))
        cells = [middle[name, key] for key in ("ttft_p90_s", "second_p90_s") for middle in (mean, median)]
        table.append([name, *cells])
    rows = []
    for name in (LOOP, SECONDS):
        for cell, key in (("TTFT", "ttft_p90_s"), ("second token", "second_p90_s")):
            for kind, middle in (("mean", mean), ("median", median)):
                ratio = middle[name, key] / middle[FIXED, key]
                rows.append(at_most(f"{cell} p90, {name} of fixed, {kind} of {len(SEEDS)} seeds", _HALF, ratio))
    loop = by_name[LOOP]
    rows.append(at_most("seconds until the threshold is back, latest seed", _BACK_S, max(s["back_s"] for s in loop)))
    steady = max(seed["changes_before"] for seed in loop)
    rows.append(at_most("changes of the threshold in 10 s before the step, worst seed", _CHANGES, steady))
    return {"rows": rows, "table": table, "rate": RATE, "seeds": list(SEEDS), "by_name": by_name}


def draw(results: dict[str, Any], path: Path) -> None:
    """Means over seeds by 20 s: TTFT p90 and threshold."""
    by_name = results["by_name"]
    times_s = [float(at_s) + WINDOW_S / 2 for at_s in np.arange(0.0, STOP_S, WINDOW_S)]

    def over_seeds(name: str, key: str) -> list[float]:
        return [float(value) for value in np.mean([seed[key] for seed in by_name[name]], axis=0)]

    ttft = {name: over_seeds(name, "ttft_p90_by_window_s") for name in (FIXED, LOOP, SECONDS)}
    thresholds = {name: over_seeds(name, "threshold_by_window") for name in (FIXED, LOOP)}
    save_curves(
        path,
        [
            Curves("4 Gbps from 300 s to 480 s", "arrival, s", "p90 of the TTFT, s", times_s, ttft, log=False),
            Curves("the threshold", "s", "tokens", times_s, thresholds, log=False),
        ],
    )
