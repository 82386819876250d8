"""Figure 13: where the time of a request goes, in eight intervals."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.paper.draw import COLOURS, figure
from benchmarks.paper.lab import GPUS, SETTINGS, Case, Lab, study_for, table_3, trace
from hydrainfer.core import Layout
from hydrainfer.metrics import INTERVALS, Timeline, Timelines
from hydrainfer.planner.search import attempt

TITLE = "Figure 13: LLaVA-1.5-7B on TextCaps, 1E3P4D"
MODEL, DATASET, LAYOUT = "llava-1.5-7b", "textcaps", "1E3P4D"
SHARE = 0.8  # of the goodput: the paper does not say its load
N_REQUESTS = 400
MIGRATIONS = ("ep_migration", "pd_migration")
TEXT = """\
The order and the smallness of what moves are the paper's; the load is not known, here it is 80 % of what the layout
carries within Table 3's SLO. Migrations are 2.3 (roofline) and 1.0 % (eager) instead of less than 1 %: a KV cache of
about 325 MB takes 3.3 ms of a link at half of its 200 GB/s, and each instance sends one and takes one at a time. For
6 ms to be 1 %, a request would have to live for 600 ms: the faster the device is taken to be, the more its moves
weigh. Their 95th percentile is 7.5 ms by the roofline and 7.6 ms eager, against 8 ms. Embeddings (4.7 MB) are there
in 1 ms, most of it messages. As in the paper, neither matters for TPOT: it is paid once, between the first token and
the second."""


def simulate(lab: Lab, quick: bool) -> dict[str, Any]:  # noqa: ARG001
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        case = Case(MODEL, DATASET, table_3(MODEL, DATASET), setting)
        goodput = lab.sized(N_REQUESTS).goodput(case, LAYOUT)
        lives: dict[str, Timeline] = {}
        study = study_for(case)
        study = msgspec.structs.replace(study, trace=trace(MODEL, DATASET)[:N_REQUESTS])
        attempt(study, Layout.parse(LAYOUT), SHARE * goodput.rate, hurry=False, timelines=Timelines(lives.__setitem__))
        each = {name: sorted(life.intervals_s.get(name, 0.0) for life in lives.values()) for name in INTERVALS}
        found[setting] = {
            "goodput_per_gpu": goodput.rate / GPUS,
            "rate_per_gpu": SHARE * goodput.rate / GPUS,
            "mean_s": {name: fmean(values) for name, values in each.items()},
            "p95_s": {name: values[int(0.95 * len(values))] for name, values in each.items()},
        }
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    with figure(path, TITLE, 1, 1, 8.4, 2.9) as axes:
        axis = axes[0][0]
        for y, setting in enumerate(found):
            left = 0.0
            for i, name in enumerate(INTERVALS):
                mean = found[setting]["mean_s"][name] * 1e3
                colour = (*COLOURS, "#1f9aa3", "#a3841f")[i]
                label = name.replace("_", " ") if y == 0 else None
                axis.barh(y, mean, left=left, color=colour, height=0.55, label=label)
                left += mean
            axis.text(left + 2, y, f"{left:.0f} ms", va="center", fontsize=8)
        axis.set_yticks(range(len(found)), found)
        axis.set_xlabel("mean ms of a request")
        axis.margins(x=0.08)
        axis.legend(frameon=False, fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    def each(text: Any) -> str:
        return "; ".join(f"{setting}: {text(one)}" for setting, one in found.items())

    def shares(one: dict[str, Any]) -> dict[str, float]:
        mean = one["mean_s"]
        total = sum(mean.values())
        groups = {s: mean[s] + mean[f"{s}_queue"] for s in ("encode", "prefill", "decode")}
        return {k: v / total for k, v in groups.items()} | {"moves": sum(mean[m] for m in MIGRATIONS) / total}

    every = [shares(one) for one in found.values()]
    p95 = [[one["p95_s"][m] * 1e3 for m in MIGRATIONS] for one in found.values()]
    return [
        (
            "most of the latency is decode, then prefill, then encode",
            each(lambda one: ", ".join(f"{k} {v:.0%}" for k, v in shares(one).items() if k != "moves")),
            "holds" if all(s["decode"] > s["prefill"] > s["encode"] for s in every) else "does not hold",
        ),
        (
            "migrations are less than 1 %",
            each(lambda one: f"{shares(one)['moves']:.1%}"),
            "holds" if all(s["moves"] < 0.01 for s in every) else "a little more",
        ),
        (
            "95 % of image migrations within 2 ms, of KV migrations within 8 ms",
            each(lambda one: ", ".join(f"{one['p95_s'][m] * 1e3:.1f} ms" for m in MIGRATIONS)),
            "holds" if all(a <= 2 and b <= 8 for a, b in p95) else "does not hold",
        ),
    ]
