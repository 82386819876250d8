"""Figure 12: the best method of disaggregation by TTFT and TPOT SLO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.paper.draw import METHOD_COLOURS, figure
from benchmarks.paper.lab import GPUS, Case, Lab, bound_of, candidates, crossing
from hydrainfer.config import Slo
from hydrainfer.core import Layout
from hydrainfer.planner.search import method_of

TITLE = "Figure 12: method with the highest goodput, LLaVA-NeXT-7B (eager)"
MODEL, SETTING = "llava-next-7b", "eager"
DATASETS = ("mme", "textcaps", "vizwiz")
TTFT_S = (0.25, 0.5, 1.0, 2.0, 8.0)
TPOT_S = (0.06, 0.14)
SHARES = (0.2, 0.35, 0.5, 0.75, 0.95)  # of each layout's own bound
N_REQUESTS = 300
BUDGETS_TTFT_S = 8.0  # budgets follow the TPOT SLO only
PAPERS = ("EP+D", "ED+P", "E+P+D")
TEXT = """\
The claim holds: three methods besides EPD, or all of the paper's three, win somewhere, and which one depends on data
set and on both SLOs. Where both SLOs are wide (140 ms, 8 s) it pays to decode where there is prefill (EPD, 1E7PD,
1ED7P); where TPOT is tight, to keep decode away from prefill on TextCaps and VizWiz (3ED5P, 4ED4P, 4EP4D): there, at
60 ms, general instances carry half to nine tenths of that, as 19 of the 60 ms are launches and the chunks that are left
cost a step each. A data set with many answer tokens wants more devices that decode, MME hardly one.

Which method wins where deviates. Under a strict TTFT SLO it is E+PD, EP+D or EPD here, not E+P+D: an E that only
encodes is idle most of the time (6 ms for 62 of prefill). In the paper encode must have been a larger part of the work.
Among the paper's three E+P+D wins half of MME; ED+P wins most of TextCaps, EP+D most of VizWiz.

Two layouts within 5 % of each other are not to be told apart: five rates per layout (20 to 95 % of its bound; less
than the first is shown as none), 300 requests each, interpolated. Only one ratio per method, that with the highest
bound, was run, at three data sets and two TPOT SLOs; the paper's axes are not in its text. Budgets follow the TPOT
SLO, and a TTFT SLO of 8 s."""


def simulate(lab: Lab, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dataset in DATASETS[:2] if quick else DATASETS:
        for tpot_s in TPOT_S:
            case = Case(MODEL, dataset, Slo(ttft_s=BUDGETS_TTFT_S, tpot_s=tpot_s), SETTING)
            for layout in candidates(case, 1, mixed=False):
                bound = bound_of(case, layout)
                runs = [lab.run(case, layout, share * bound, N_REQUESTS) for share in SHARES]
                for ttft_s in TTFT_S:
                    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
                    goodput = min(bound, crossing([(run.rate, run.attainment(slo)) for run in runs]))
                    cell = found.setdefault(dataset, {}).setdefault(f"{ttft_s:g}/{tpot_s:g}", {})
                    cell[layout] = goodput / GPUS
    return found


def best_of(cell: dict[str, float], methods: tuple[str, ...] | None = None) -> tuple[str, str, float]:
    """Method, layout and goodput per GPU; ("none", ...) if nothing meets the SLO."""
    some = {k: v for k, v in cell.items() if methods is None or method_of(Layout.parse(k)) in methods}
    layout = max(some, key=some.__getitem__)
    return (method_of(Layout.parse(layout)) if some[layout] > 0 else "none"), layout, some[layout]


def draw(found: dict[str, Any], path: Path) -> None:
    with figure(path, TITLE, 2, len(found), 3.3, 2.9) as axes:
        for row, (methods, said) in enumerate(((None, "all methods"), (PAPERS, "the paper's three"))):
            for column, (dataset, cells) in enumerate(found.items()):
                axis = axes[row][column]
                for x, tpot_s in enumerate(TPOT_S):
                    for y, ttft_s in enumerate(TTFT_S):
                        method, layout, goodput = best_of(cells[f"{ttft_s:g}/{tpot_s:g}"], methods)
                        axis.add_patch(_rectangle(x, y, METHOD_COLOURS[method]))
                        text = f"{layout}\n{goodput:.1f}" if method != "none" else "none"
                        axis.text(x, y, text, ha="center", va="center", fontsize=7)
                axis.set_xlim(-0.5, len(TPOT_S) - 0.5)
                axis.set_ylim(-0.5, len(TTFT_S) - 0.5)
                axis.set_xticks(range(len(TPOT_S)), [f"{1e3 * t:g}" for t in TPOT_S])
                axis.set_yticks(range(len(TTFT_S)), [f"{t:g}" for t in TTFT_S])
                axis.set_title(f"{dataset}, {said}", fontsize=9)
                if row == 1:
                    axis.set_xlabel("TPOT SLO, ms")
            axes[row][0].set_ylabel("TTFT SLO, s")


def _rectangle(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, alpha=0.45, edgecolor="white")


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for methods, said in ((None, "of all methods"), (PAPERS, "of the paper's three")):
        winners = {d: [best_of(cell, methods)[0] for cell in cells.values()] for d, cells in found.items()}
        text = "; ".join(f"{d}: " + ", ".join(f"{m} {w.count(m)}" for m in sorted(set(w))) for d, w in winners.items())
        kinds = {m for w in winners.values() for m in w if m != "none"}
        differ = len({tuple(w) for w in winners.values()}) > 1
        rows.append(
            (
                f"the best method ({said}) changes with SLOs and data set",
                f"cells won: {text}",
                "holds" if len(kinds) > 1 and differ else "does not hold",
            )
        )
    strict = {d: [best_of(cells[f"{TTFT_S[0]:g}/{t:g}"], PAPERS) for t in TPOT_S] for d, cells in found.items()}
    text = "; ".join(f"{d}: " + ", ".join(dict.fromkeys(m for m, _, _ in w)) for d, w in strict.items())
    n = sum(m == "E+P+D" for w in strict.values() for m, _, _ in w)
    rows.append(
        (
            "under strict TTFT, E+P+D has clear advantages",
            f"TTFT {TTFT_S[0]:g} s, of the three: {text}",
            "holds" if n > len(strict) * len(TPOT_S) / 2 else "does not hold",
        )
    )
    return rows
