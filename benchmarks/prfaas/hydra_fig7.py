"""HydraInfer, Figure 7: how long requests that decode stall while two requests with pictures arrive."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figure import Panel, save_bars
from benchmarks.paper.lab import Case, study_for, table_3
from benchmarks.prfaas.report import row
from hydrainfer.core import Layout
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.simulation import InstanceModel, ServedRequest, Simulator, as_requests

TITLE = "HydraInfer's Figure 7: generation stall"
HAS_FIGURE = True
MODEL, DATASET = "llava-next-7b", "textcaps"
STRATEGIES = ("prefill-first", "decode-first", "stage-level")
SAME = "decode-first, the chunks of stage-level"
ALONE = "without C and D"
_PICTURE = 2880  # tokens of a LLaVA-NeXT picture in five tiles
DECODING = (
    TraceRequest(arrival_s=0.0, n_text=200, n_output=80),
    TraceRequest(arrival_s=0.0, n_text=400, n_output=80),
)
ARRIVING = (
    TraceRequest(arrival_s=0.150, n_text=100, pictures=(_PICTURE,), n_output=20),
    TraceRequest(arrival_s=0.170, n_text=100, pictures=(_PICTURE,), n_output=20),
)
TEXT = """\
A and B decode when C and D come, 20 ms apart, each with a picture of 2,880 tokens. The project's own engine and
scheduler serve LLaVA-NeXT-7B on one described H800 (shares of its peaks are assumed) in the simulator. Strategies are
those of benchmarks/paper: whole prompts within 5,120 tokens; chunks of 2,048 beside decodes, pictures between steps;
and stage-level batches with chunks of 1,552, which the TPOT SLO of 80 ms allows.

The paper's figure is a drawing without numbers, so only its order can hold, and does. Prefill-first stalls A and B for
both pictures and both prompts (186 ms), decode-first for a picture and a chunk (63 ms), stage-level for a chunk
(42 ms). Of the 20 ms between the last two, 8 are the stage-level idea: with chunks of the same size decode-first stalls
50 ms, as a picture is encoded between two steps, not beside them. The other 13 are the size of the chunk.

C and D pay little: under stage-level their first tokens come 4 % later on average than under prefill-first, and 8 %
earlier than under decode-first."""


def instance(strategy: str) -> list[InstanceModel]:
    """One instance that does all stages by this strategy."""
    name = "decode-first" if strategy == SAME else strategy
    study = study_for(Case(MODEL, DATASET, table_3(MODEL, DATASET), system=name))
    (model,) = study.instances(Layout.parse("1EPD"))
    if strategy == SAME:
        (stage_level,) = instance("stage-level")
        tokens = stage_level.budgets.tokens
        budgets = msgspec.structs.replace(model.budgets, tokens=tokens)
        model = msgspec.structs.replace(model, budgets=budgets)
    return [model]


def run(strategy: str, *, arriving: bool = True) -> dict[str, Any]:
    """Longest gaps between tokens of A and B and times to first token of C and D, in milliseconds, and all times."""
    trace = (*DECODING, *(ARRIVING if arriving else ()))
    served = dict(zip("ABCD", Simulator(instance(strategy)).run(as_requests(trace)), strict=False))
    return {
        "gap_ms": {name: 1e3 * _longest_gap_s(served[name]) for name in "AB"},
        "ttft_ms": {name: 1e3 * (r.token_s[0] - r.arrival_s) for name, r in served.items() if name in "CD"},
        "token_s": {name: r.token_s for name, r in served.items()},
    }


def _longest_gap_s(request: ServedRequest) -> float:
    return max(b - a for a, b in pairwise(request.token_s))


def compute() -> dict[str, Any]:
    """All strategies, and A and B alone."""
    runs = {strategy: run(strategy) for strategy in (*STRATEGIES, SAME)}
    alone = run("stage-level", arriving=False)
    gaps = {strategy: max(found["gap_ms"].values()) for strategy, found in runs.items()}
    ttft = {strategy: sum(found["ttft_ms"].values()) / 2 for strategy, found in runs.items()}
    ordered = sorted(STRATEGIES, key=gaps.__getitem__, reverse=True)
    rows = [row("place of stage-level by the longest gap, of 3", 3, ordered.index("stage-level") + 1, tolerance=0.0)]
    rows.append(
        row("place of prefill-first by the longest gap, of 3", 1, ordered.index("prefill-first") + 1, tolerance=0.0)
    )
    rows += [row(f"longest gap of A and B, {strategy}, ms", None, gap) for strategy, gap in gaps.items()]
    rows.append(row(f"longest gap of A and B, {ALONE}, ms", None, max(alone["gap_ms"].values())))
    rows += [row(f"mean TTFT of C and D, {strategy}, ms", None, mean) for strategy, mean in ttft.items()]
    return {"rows": rows, "runs": runs}


def draw(results: dict[str, Any], path: Path) -> None:
    """Longest gaps of A and B, and times to first token of C and D: a dot each, a bar at their middle."""
    panels = []
    for title, key in (("longest gap of A and B, ms", "gap_ms"), ("TTFT of C and D, ms", "ttft_ms")):
        values = [list(results["runs"][strategy][key].values()) for strategy in STRATEGIES]
        panels.append(Panel(title, list(STRATEGIES), {key: values}))
    save_bars(path, TITLE, panels)
