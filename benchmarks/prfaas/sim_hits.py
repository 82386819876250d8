"""Conversations simulated: what cached prefixes save, if each cluster has its own and if they may follow over the
link."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figure import Panel, save_bars
from benchmarks.prfaas.report import at_most
from benchmarks.prfaas.served import PAPERS_OUTPUT, far_share, gb_per_request, p90
from benchmarks.prfaas.setting import BATCH, PAPERS, lengths, prfaas
from hydrainfer.planner.clusters.simulated import Run, Setup, simulate
from hydrainfer.planner.nouns import ANSWER, PromptPart, TraceRequest

TITLE = "Simulated: conversations, and prefixes that are cached at home or far away"
HAS_FIGURE = True
HITS = (0.5, 0.9)
N_TALKS, MAX_TURNS, SHORTEST = 120, 4, 1024
RATE = 1.3
PAUSE_S, MORE_S = 45.0, 30.0
"""Seconds between two turns at least, and what is added on average. The answer takes 26 s."""
SEEDS = range(2)
NOTHING, ALONE, RETURNS = "nothing shared", "each cluster's own", "may follow the prompt"
_NO_WORSE = 1.0
TEXT = """\
Conversations of up to four turns end with a prompt of the case study's lengths; each turn's prompt and answer are 50 or
90 % of the next prompt. 1.3 requests/s at the paper's arrangement, by the rule `length`. "Nothing shared" has the same
lengths at the same times, so it is a hit rate of 0; it differs between 50 and 90 %, as earlier turns are shorter at 50.

The rule counts uncached tokens, so cached prefixes keep follow-up turns at home: 27 % of the requests go far without
hits, 10 % with 50 % hits; 47 % and 9 % with 90 %. The link carries half and a fifth of the bytes. What a D has of a
conversation is not sent again, so a prompt that is computed anew far away sends only its rest.

Prefixes that may follow a prompt over the link help at 50 %: a turn that is the first of its conversation to go far
finds nothing there. The mean of the TTFT falls by 7 %, its p90 by 11 %, for 0.06 GB per request on the way out. At 90 %
they change nothing: the uncached tenth of the longest prompt is below 19.4K, so only first turns leave home."""


def turns(length: int, hit: float) -> list[int]:
    """Lengths of the prompts of a conversation that ends with this one: each turn's prompt and answer are the share
    `hit` of the next prompt."""
    found = [length]
    while len(found) < MAX_TURNS and hit * found[0] - PAPERS_OUTPUT >= SHORTEST:
        found.insert(0, round(hit * found[0]) - PAPERS_OUTPUT)
    return found


def talk(
    name: str, prompts: Sequence[int], begin_s: float, is_shared: bool, rng: random.Random
) -> Iterator[TraceRequest]:
    """The turns of a conversation; if nothing `is_shared`, prompts of the same lengths at the same times."""
    at_s = begin_s
    parts: tuple[PromptPart, ...] = ()
    n_before = 0
    for k, n in enumerate(prompts):
        parts = (*parts, PromptPart(f"{name}, turn {k}", n - n_before))
        yield TraceRequest(arrival_s=at_s, n_text=n, n_output=PAPERS_OUTPUT, parts=parts * is_shared)
        parts = (*parts, PromptPart(ANSWER, PAPERS_OUTPUT))
        n_before = n + PAPERS_OUTPUT
        at_s += PAUSE_S + rng.expovariate(1.0 / MORE_S)


def conversations(hit: float, is_shared: bool, seed: int) -> list[TraceRequest]:
    """Conversations whose last prompts have the lengths of the case study, by time."""
    rng = random.Random(seed)
    talks = [turns(round(lengths().quantile(rng.random())), hit) for _ in range(N_TALKS)]
    per_s = RATE * N_TALKS / sum(len(prompts) for prompts in talks)
    trace: list[TraceRequest] = []
    begin_s = 0.0
    for i, prompts in enumerate(talks):
        begin_s += rng.expovariate(per_s)
        trace += talk(f"talk {i}", prompts, begin_s, is_shared, rng)
    return sorted(trace, key=lambda request: request.arrival_s)


def served(hit: float, name: str) -> dict[str, float]:
    """Means over seeds of what conversations see and send."""
    returns: tuple[str, ...] = ()
    if name == RETURNS:
        returns = ("far",)
    setup = Setup(batch=BATCH, n_output=PAPERS_OUTPUT, returns=returns)
    runs = [simulate(prfaas(), PAPERS, setup, conversations(hit, name != NOTHING, seed)) for seed in SEEDS]

    def mean(values: Iterator[float]) -> float:
        return float(np.mean(list(values)))

    return {
        "n_requests": sum(len(run.served) for run in runs),
        "mean_tokens": mean(one.request.n_prompt for run in runs for one in run.served),
        "ttft_mean_s": mean(float(run.ttft_s.mean()) for run in runs),
        "ttft_p90_s": mean(p90(run.ttft_s) for run in runs),
        "second_p90_s": mean(p90(run.second_s) for run in runs),
        "far_share": mean(far_share(run) for run in runs),
        "gb_per_request": mean(gb_per_request(run) for run in runs),
        "returned_gb_per_request": mean(_returned_gb(run) for run in runs),
    }


def _returned_gb(run: Run) -> float:
    return run.returned_bytes / len(run.served) / 1e9


def compute() -> dict[str, Any]:
    """All cases. The prompts of a hit rate are the same in each."""
    cases = {f"{hit:.0%}": {name: served(hit, name) for name in (NOTHING, ALONE, RETURNS)} for hit in HITS}
    rows = []
    head = ["hits", "prefixes", "mean TTFT, s", "p90, s", "second token p90, s", "far, %", "GB to home", "GB from home"]
    table: list[list[str | float]] = [[*head]]
    for hit, found in cases.items():
        for name, other in ((ALONE, NOTHING), (RETURNS, ALONE)):
            for cell, key in (
                ("mean TTFT", "ttft_mean_s"),
                ("TTFT p90", "ttft_p90_s"),
                ("GB to home", "gb_per_request"),
            ):
                ratio = found[name][key] / found[other][key]
                rows.append(at_most(f"{hit}: {cell}, {name} of {other}", _NO_WORSE, ratio))
        for name, one in found.items():
            seconds = [one["ttft_mean_s"], one["ttft_p90_s"], one["second_p90_s"]]
            sent = [one["gb_per_request"], one["returned_gb_per_request"]]
            table.append([hit, name, *seconds, 100 * one["far_share"], *sent])
    return {"rows": rows, "table": table, "rate": RATE, "seeds": list(SEEDS), "cases": cases}


def draw(results: dict[str, Any], path: Path) -> None:
    """TTFT and what crosses the link."""
    cases = results["cases"]
    panels = []
    for key, title in (
        ("gb_per_request", "GB to home"),
        ("ttft_mean_s", "mean TTFT, s"),
        ("ttft_p90_s", "TTFT p90, s"),
    ):
        series = {name: [[found[name][key]] for found in cases.values()] for name in (NOTHING, ALONE, RETURNS)}
        panels.append(Panel(title, list(cases), series))
    save_bars(path, TITLE, panels)
