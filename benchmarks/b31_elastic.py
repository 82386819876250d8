"""What does it gain that caches of tokens, windows and states lend each other memory?

    python -m benchmarks.b31_elastic [--seeds 1]

The production scheduler and engine in the simulator: one instance on an H100 as it is described, whose caches have
few bytes (`CASES`). A workload turns from short requests to long ones and back; each phase is a batch of requests that
come at once, first come, first served. Compared are one arena and caches of fixed sizes: with 10 % to 90 % of the bytes
for what does not grow with a request (states; the keys and values of a window), and as a server sizes them.

A phase's throughput: its tokens, of prompts and answers, over the time to its last token, when it begins after the one
before has ended, and caches are as that one has left them. `ratio`: that of the arena to the best of the fixed sizes in
this phase, whatever those do in the others. `in one go`: all phases wait from the beginning.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.command import new_console, new_table, options
from benchmarks.figure import Panel, save_bars
from benchmarks.record import write_result
from hydrainfer.cache import CacheSizes, CacheSpec, Wishes, share_memory, size_caches
from hydrainfer.core import CostModel, Role
from hydrainfer.planner.costs import blocks_of, cost_of, read_hardware
from hydrainfer.planner.inputs import shape_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import InstanceModel, Simulator, as_requests
from hydrainfer.scheduler import Budgets, Policy

QUESTION = (__doc__ or "").partition("\n")[0]
ROLE = Role.parse("PD")
PHASES, TOTAL = ("short", "long", "short again"), "in one go"
SHOWN = (*PHASES, TOTAL)
APART_S, AT_ONCE_S = 1000.0, 1e-6
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
ELASTIC, USUAL = "elastic", "fixed, as a server splits"


class Case(NamedTuple):
    """A model, the memory of its caches, and how many requests of which prompts and answers are short and long."""

    memory_gib: float
    short: tuple[int, tuple[int, int], tuple[int, int]]
    long: tuple[int, tuple[int, int], tuple[int, int]]


CASES = {
    "qwen3.5-9b": Case(12.0, (400, (100, 400), (100, 400)), (80, (8_000, 16_000), (200, 500))),
    "gemma-3-4b": Case(6.0, (400, (100, 400), (100, 400)), (80, (16_000, 32_000), (200, 500))),
}


def requests(case: Case, apart_s: float, seed: int) -> Iterator[TraceRequest]:
    draw = random.Random(seed)
    for k, (n, prompts, answers) in enumerate((case.short, case.long, case.short)):
        for _ in range(n):
            yield TraceRequest(arrival_s=apart_s * k, n_text=draw.randint(*prompts), n_output=draw.randint(*answers))


def simulate(name: str, sizes: CacheSizes, cost: CostModel, apart_s: float, seed: int) -> dict[str, Any]:
    """Tokens per second of each phase and of all, and what the instance says of itself."""
    case = CASES[name]
    trace = list(requests(case, apart_s, seed))
    budgets, policy = Budgets(tokens=2048, running=256), Policy(order="fcfs")
    instance = InstanceModel(
        name="PD0", role=ROLE, cost=cost, blocks=sizes.blocks, split=sizes.split, budgets=budgets, policy=policy
    )
    simulator = Simulator([instance])
    served = simulator.run(as_requests(trace))
    rates, first = {}, 0
    for phase_name, (n, *_) in zip(PHASES, (case.short, case.long, case.short)):
        phase = served[first : first + n]
        tokens = sum(len(r.request.prompt_ids) + len(r.tokens) for r in phase)
        rates[phase_name] = tokens / (max(r.token_s[-1] for r in phase) - phase[0].arrival_s)
        first += n
    total = sum(len(r.request.prompt_ids) + len(r.tokens) for r in served) / max(r.token_s[-1] for r in served)
    node = simulator.nodes["PD0"]
    node.caches.check(idle=True)
    stats, arena = node.engine.stats(simulator.now), node.caches.arena
    return {
        "tokens_per_s": rates | {TOTAL: total},
        "preemptions": stats.n_preemptions,
        "extents_lent": 0 if arena is None else arena.n_lent,
    }


def both(name: str, sizes: CacheSizes, cost: CostModel, seeds: int) -> dict[str, Any]:
    """Means over seeds, of phases by themselves and of all in one go."""
    apart = [simulate(name, sizes, cost, APART_S, seed) for seed in range(seeds)]
    at_once = [simulate(name, sizes, cost, AT_ONCE_S, seed) for seed in range(seeds)]
    rates = {p: statistics.fmean(r["tokens_per_s"][p] for r in apart) for p in PHASES}
    rates[TOTAL] = statistics.fmean(r["tokens_per_s"][TOTAL] for r in at_once)
    counts = {key: statistics.fmean(r[key] for r in apart) for key in ("preemptions", "extents_lent")}
    return {"tokens_per_s": rates, **counts}


def fixed(specs: list[CacheSpec], n_bytes: int, share: float, longest: int) -> CacheSizes | None:
    """`share` of the bytes to the second of the two caches; None if the longest request does not fit then."""
    sizes = {spec: int(n_bytes * part) // spec.block_bytes for spec, part in zip(specs, (1.0 - share, share))}
    enough = all(n >= len(spec.span(0, longest)) for spec, n in sizes.items())
    return CacheSizes(sizes) if enough else None


def experiment(name: str, seeds: int) -> dict[str, Any]:
    shape, device, case = shape_of(name), read_hardware("h100"), CASES[name]
    cost, n_bytes, wishes = cost_of(shape, device), int(case.memory_gib * 2**30), Wishes(n_longest=shape.context)
    usual = size_caches([s for s in blocks_of(shape, device, ROLE) if s.takes_the_rest], wishes, n_bytes)
    compared = {USUAL: CacheSizes(usual), ELASTIC: share_memory(usual, wishes)}
    for share in SHARES:
        sizes = fixed(list(usual), n_bytes, share, case.long[1][1] + case.long[2][1])
        if sizes is not None:
            compared[f"{share:.0%}"] = sizes
    rows = {key: both(name, sizes, cost, seeds) for key, sizes in compared.items()}
    rates = {key: row["tokens_per_s"] for key, row in rows.items()}

    def best_at(p: str) -> str:
        return max((key for key in rates if key != ELASTIC), key=lambda key: rates[key][p])

    best = {p: best_at(p) for p in SHOWN}
    return {
        "rows": rows,
        "best_fixed": best,
        "ratio": {p: rates[ELASTIC][p] / rates[best[p]][p] for p in SHOWN},
        "worst_phase": {key: min(of[p] / rates[best[p]][p] for p in PHASES) for key, of in rates.items()},
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES)
    args, console = parser.parse_args(), new_console()
    results = {name: experiment(name, args.seeds) for name in args.models}
    for name, found in results.items():
        table = new_table(
            f"{name}: thousand tokens per second", ("", *SHOWN, "worst phase / best", "preempted", "extents lent")
        )
        for key, row in found["rows"].items():
            rates = (f"{row['tokens_per_s'][p] / 1e3:.2f}" for p in SHOWN)
            counts = (f"{row[k]:.0f}" for k in ("preemptions", "extents_lent"))
            table.add_row(key, *rates, f"{found['worst_phase'][key]:.2f}", *counts)
        table.add_row("elastic / best fixed", *(f"{found['ratio'][p]:.3f}" for p in SHOWN))
        console.print(table)
    path = write_result("b31_elastic", __doc__, args, results)
    panels = [Panel(f"{name}: tokens/s, best fixed = 1", list(SHOWN), _bars(of)) for name, of in results.items()]
    save_bars(path.with_suffix(".png"), QUESTION, panels)
    console.print(f"wrote {path.name}")


def _bars(found: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Each beside the best of the fixed sizes in this phase."""
    rows, best = found["rows"], found["best_fixed"]
    shown = {ELASTIC: ELASTIC, USUAL: USUAL} | {f"fixed, best for {p}": best[p] for p in PHASES[:2]}
    rates = {label: rows[key]["tokens_per_s"] for label, key in shown.items()}
    return {label: [[of[p] / rows[best[p]]["tokens_per_s"][p]] for p in SHOWN] for label, of in rates.items()}


if __name__ == "__main__":
    main()
