"""Figure 14: goodput with everything, without disaggregation, and without stage-level scheduling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from benchmarks.paper.draw import COLOURS, figure
from benchmarks.paper.lab import GPUS, Case, Lab, candidates, study_for, table_3
from hydrainfer.core import Layout

TITLE = "Figure 14: ablation, LLaVA-NeXT-7B on TextCaps (TTFT 8 s, TPOT 80 ms)"
MODEL, DATASET = "llava-next-7b", "textcaps"
PAPER = {"hybrid": 9.5, "8 EPD": 7.2, "8 EPD, prefill-first": 5.1}  # requests per second and GPU, as we read it
SETTINGS = ("roofline", "additive", "eager")
MIXED = ("3EP1D+4EPD",)
ERROR = 1.04  # the tolerance of a goodput
_ALIKE = 1.2  # as much as the paper's
ROWS = {
    "8 EPD": ("stage-level", False),
    "hybrid": ("stage-level", True),
    "8 EPD, prefill-first": ("prefill-first", False),
    "8 EPD, decode-first": ("decode-first", False),
    "8 EPD, joined lanes": ("stage-level, joined lanes", False),
}
TEXT = """\
Rates per GPU. What stage-level scheduling is worth over prefill-first is there in every setting and without a fit,
and larger than in the paper: 2.7x, 2.5x and 3.5x against 1.4x. Prefill-first itself carries 5.3 (roofline) and 4.8
(additive), where the paper has 5.1. That is the arithmetic of a stall: a prompt and its picture take 67 ms of an H800
by the roofline, two of them in a row make a step longer than 80 ms, and one step in ten may be. So the device seems
to be described about right, and what the paper's stage-level engine loses (7.2 instead of 12 to 14) is lost
elsewhere. In the eager setting a single stall is beyond 80 ms, and prefill-first falls to 2.3, which is the price of
that setting. The paper's third bar may also be something milder than vLLM v0, with chunks for instance: decode-first
carries 14.4, 9.7 and 2.3.

What disaggregation is worth over 8 general instances depends on what a step costs. By the roofline it is a loss (13.4
against 14.4): chunks and decodes share a batch for free, 8 general instances keep 8 GPUs busy with any mix, and a
split wastes what its integers do not divide. Added up, the two are equal (11.7). With 19 ms of launches a step, 80 ms
leave room for chunks of 1,000 tokens and two pictures, each chunk pays for its step, and who need not decode takes the
whole prompt in one: 9.2 against 8.0, a factor of 1.15, where the paper has 9.5 and 1.32. The 19 ms were fitted to 7.2
for the middle bar when budgets stood for the worst case of a role; with today's, which follow layout and load, 8 EPD
carry 8.0, and the fit was left as it is. So the order of the three bars is the paper's in the eager setting; the
second step holds everywhere, the first only where steps are expensive against the TPOT SLO.

The paper explains the first step by interference that breaks the TPOT SLO. Here batches never break it, as they take
exactly what the budgets assume; the price of keeping it is small chunks. An engine whose batches vary would lose
more, and more so where stages are mixed: that the simulation cannot show.

Best is 3ED5P, one of the three methods that win somewhere in the paper; 3EP1D+4EPD carries as much (9.2), and 5EP3D
follows, 7 % below.
Joined lanes make no difference: encode takes 6 ms of a device for 62 of prefill, beside which it is not any faster."""


def simulate(lab: Lab, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slo = table_3(MODEL, DATASET)
    for setting in SETTINGS:
        of_setting = found[setting] = {}
        for name, (system, any_layout) in ROWS.items():
            case = Case(MODEL, DATASET, slo, setting, system)
            if any_layout:
                split = [lab.goodput(case, x) for x in candidates(case, 1, mixed=False) if x != "8EPD"]
                mixed = [] if quick else [lab.goodput(case, x) for x in MIXED]
                of_setting["tried"] = {g.layout: g.rate / GPUS for g in (*split, *mixed)}
                best = max(*split, *mixed, key=lambda g: g.rate)
            else:
                best = lab.goodput(case, "8EPD")
            of_setting[name] = best._asdict() | {"budgets": _budgets(case, best.layout)}
    return found


def _budgets(case: Case, layout: str) -> dict[str, Any]:
    return {role: msgspec.to_builtins(b) for role, b in study_for(case).budgets(Layout.parse(layout)).items()}


def draw(found: dict[str, Any], path: Path) -> None:
    names = ["hybrid", "8 EPD", "8 EPD, prefill-first"]
    with figure(path, TITLE, 1, 1, 6.6, 3.8) as axes:
        axis = axes[0][0]
        series = {"paper": [PAPER[n] for n in names]} | {
            s: [found[s][n]["rate"] / GPUS for n in names] for s in SETTINGS
        }
        for rank, (label, values) in enumerate(series.items()):
            at = [i + (rank - 1.5) * 0.21 for i in range(len(names))]
            axis.bar(at, values, 0.2, color=COLOURS[rank], label=label)
            for x, value in zip(at, values):
                axis.text(x, value + 0.15, f"{value:.1f}", ha="center", fontsize=7)
        axis.set_xticks(range(len(names)), ["hybrid EPD", "8 general, stage-level", "8 general, prefill-first"])
        axis.set_ylabel("goodput, requests/s per GPU")
        axis.legend(frameon=False, fontsize=8)


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    def every(name: str) -> str:
        return ", ".join(f"{s} {of[name]['rate'] / GPUS:.1f}" + _layout(of[name]) for s, of in found.items())

    rows = [(f"{name}: {paper}", every(name), "") for name, paper in PAPER.items()]
    paper = "hybrid / general 1.32, general / without 1.41"
    for setting, of in found.items():
        best, general, plain = (of[name]["rate"] for name in PAPER)
        said = f"first {_verdict(best / general, 1.32)}, second {_verdict(general / plain, 1.41)}"
        rows.append((paper, f"{setting}: {best / general:.2f}, {general / plain:.2f}", said))
    extra = [name for name in ROWS if name not in PAPER]
    return [*rows, *(("(not in the paper) " + name, every(name), "") for name in extra)]


def _verdict(ours: float, paper: float) -> str:
    """A step holds if it is worth as much as in the paper but for `ERROR` and what is not known of the setting."""
    if ours <= ERROR:
        return "does not hold (no gain)"
    return "holds" if paper / _ALIKE < ours < paper * _ALIKE else f"does not hold ({ours / paper:.1f} times as much)"


def _layout(one: dict[str, Any]) -> str:
    return "" if one["layout"] == "8EPD" else f" ({one['layout']})"
