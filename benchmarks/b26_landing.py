"""What does it gain that requests without room on the device that decodes land in its host's memory?

    python -m benchmarks.b26_landing [--bursts 6] [--seeds 3]

The production scheduler, engines and migration in the simulator, 1P1D, LLaVA-1.5-7B on an H100 as assumed in
`configs/costs`. The caches of either instance hold 16 sequences, host memory beside the decoding one 64 (`landing`) or
none. `bursts`: 64 requests at once, about as often as they can be decoded. `growing`: answers of which half find room,
so that they outgrow it and the youngest are preempted: they are computed again, or parked.

`stalled`: seconds in which prompts wait for the prefill instance and it computes nothing. `interval`: between two
tokens of a request, but the first two. `TPOT`: from its first token to its last over their number, with the wait
for room to decode, where the first token does not wait for that.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import ROOT, write_result
from hydrainfer.cache import CacheSpec, FullSpec
from hydrainfer.core import CostModel, EventKind, LifecycleEvent, Role, Stage
from hydrainfer.planner.nouns import Link, TraceRequest
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator, as_requests
from hydrainfer.scheduler import STEP_S, Budgets, Policy
from hydrainfer.workload.results import Percentiles

QUESTION = (__doc__ or "").partition("\n")[0]
COST = ROOT / "configs" / "costs" / "illustrative-h100-llava-7b.yaml"
KV = FullSpec.of(layers=32, kv_heads=32, head_dim=128, dtype="bfloat16", block_tokens=16)
ROOM, HOST, BURST = 16, 64, 64  # sequences
PROMPT, ANSWER = (800, 1200), (128, 384)  # tokens
CASES = {"bursts": (ANSWER, 32), "growing": ((512, 1024), 0)}  # answers, headroom
EVERY_S = {"bursts": 12.0, "growing": 40.0}
BUDGETS = Budgets(tokens=2048, running=64, step_s=STEP_S)


def read_cost() -> CostModel:
    return msgspec.yaml.decode(COST.read_bytes(), type=CostModel)


def room_for(kv: CacheSpec, case: str) -> tuple[int, int]:
    """Blocks of an instance's cache and of its host memory."""
    (low, high), headroom = CASES[case]
    prompt = statistics.fmean(PROMPT)
    answer = (low + high) / 2 + headroom if case == "bursts" else 128
    return ROOM * kv.blocks_for(round(prompt + answer)), HOST * kv.blocks_for(round(prompt + high))


def trace(case: str, bursts: int, seed: int) -> Iterable[TraceRequest]:
    draw = random.Random(seed)
    for i in range(bursts * BURST):
        yield TraceRequest(
            arrival_s=EVERY_S[case] * (i // BURST) + 1e-4 * (i % BURST),
            n_text=draw.randint(*PROMPT),
            n_output=draw.randint(*CASES[case][0]),
        )


def simulate(
    case: str, landing: bool, requests: Iterable[TraceRequest], cost: CostModel, kv: CacheSpec, link: Link
) -> tuple[list[ServedRequest], dict[str, float]]:
    """The requests served, and what is read off the events of the instances."""
    events = list[LifecycleEvent]()
    room, host = room_for(kv, case)
    policy = Policy(headroom_tokens=CASES[case][1])
    same: dict[str, Any] = {"cost": cost, "blocks": {kv: room}, "budgets": BUDGETS, "policy": policy}
    instances = [
        InstanceModel(name="P0", role=Role.parse("P"), **same),
        InstanceModel(name="D0", role=Role.parse("D"), host={kv: host} if landing else {}, **same),
    ]
    simulator = Simulator(instances, link, record=events.append)
    served = simulator.run(as_requests(requests))
    stats = simulator.nodes["D0"].engine.stats(simulator.now)
    return served, {"stalled_s": stalled_s(events), "preemptions": stats.n_preemptions, "end_s": simulator.now}


def stalled_s(events: list[LifecycleEvent]) -> float:
    """Seconds in which prompts wait for prefill and none is computed."""
    marks: list[tuple[float, int, int]] = []  # time, change of those that wait, of those that are computed
    for e in events:
        if e.stage != Stage.PREFILL or e.kind not in (EventKind.QUEUED, EventKind.STARTED, EventKind.ENDED):
            continue
        waits = {EventKind.QUEUED: 1, EventKind.STARTED: -1}.get(e.kind, 0)
        computes = {EventKind.STARTED: 1, EventKind.ENDED: -1}.get(e.kind, 0)
        marks.append((e.at_s, waits, computes))
    total = 0.0
    n_wait = n_compute = 0
    for (at_s, waits, computes), (next_s, *_) in pairwise(sorted(marks, key=lambda m: m[0])):
        n_wait, n_compute = n_wait + waits, n_compute + computes
        total += (next_s - at_s) * (n_wait > 0 and n_compute == 0)
    return total


def figures(served: list[tuple[float, list[float]]], seen: list[dict[str, float]]) -> dict[str, Any]:
    """`served`: of each request its arrival and the times of its tokens."""

    def of(samples: Iterable[float]) -> Any:
        return msgspec.to_builtins(Percentiles.of(samples))

    gaps = [[b - a for a, b in pairwise(token_s)] for _, token_s in served]
    return {
        "ttft_s": of(token_s[0] - arrival_s for arrival_s, token_s in served),
        "second_token_s": of(g[0] for g in gaps),
        "interval_s": of(gap for g in gaps for gap in g[1:]),
        "tpot_s": of(statistics.fmean(g) for g in gaps),
        "e2e_s": of(token_s[-1] - arrival_s for arrival_s, token_s in served),
        **{key: statistics.fmean(s[key] for s in seen) for key in seen[0]},
    }


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    cost, link = read_cost(), Link(host_bytes_per_s=args.host_gb_s * 1e9)
    for case in CASES:
        for name, landing in (("none", False), ("landing", True)):
            traces = [trace(case, args.bursts, seed) for seed in range(args.seeds)]
            runs = [simulate(case, landing, requests, cost, KV, link) for requests in traces]
            results[f"{case}, {name}"] = figures(
                [(r.arrival_s, r.token_s) for served, _ in runs for r in served], [seen for _, seen in runs]
            )
    return results


SHOWN = {
    "P stalled, s": lambda r: r["stalled_s"],
    "TTFT p50, s": lambda r: r["ttft_s"]["p50"],
    "TTFT p90, s": lambda r: r["ttft_s"]["p90"],
    "interval p50, ms": lambda r: r["interval_s"]["p50"] * 1e3,
    "interval p99, ms": lambda r: r["interval_s"]["p99"] * 1e3,
    "TPOT p50, ms": lambda r: r["tpot_s"]["p50"] * 1e3,
    "total p50, s": lambda r: r["e2e_s"]["p50"],
    "total p90, s": lambda r: r["e2e_s"]["p90"],
    "preempted": lambda r: r["preemptions"],
    "all done, s": lambda r: r["end_s"],
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--host-gb-s", type=float, default=20.0, help="copies between device and host memory")
    args, console = parser.parse_args(), new_console()
    results = experiment(args)
    table = new_table(QUESTION, ("", *SHOWN))
    for name, row in results.items():
        table.add_row(name, *(f"{of(row):.2f}" for of in SHOWN.values()))
    console.print(table)
    path = write_result("b26_landing", __doc__, args, results)
    names = [name for name in SHOWN if name not in ("TTFT p50, s", "interval p99, ms", "preempted", "all done, s")]
    panels = [
        Panel(name, list(CASES), {w: [[SHOWN[name](results[f"{c}, {w}"])] for c in CASES] for w in ("none", "landing")})
        for name in names
    ]
    save_bars(path.with_suffix(".png"), QUESTION, panels)
    console.print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
