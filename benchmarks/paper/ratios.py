"""Figure 11: mean TTFT and TPOT over the ratio of instances, at one load."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.paper.draw import METHOD_COLOURS, figure
from benchmarks.paper.lab import GPUS, Case, Lab, bound_of, short, table_3
from hydrainfer.core import Layout
from hydrainfer.planner.search import layouts, method_of

TITLE = "Figure 11: ratios of instances, LLaVA-NeXT-7B on TextCaps"
MODEL, DATASET = "llava-next-7b", "textcaps"
METHODS = ("EP+D", "ED+P", "E+P+D")
SAME_D = 3
LONG = 3000  # requests
SWEEPS = {
    "8 per GPU, roofline": ("roofline", 8.0 * GPUS, 400),
    "6 per GPU, eager": ("eager", 6.0 * GPUS, 400),
    "8 for the node, roofline": ("roofline", 8.0, 100),
}
"""Setting, requests per second of the node, requests of a run."""
TEXT = """\
Means of TTFT (bars) and TPOT (dots). The paper names neither the model nor whether its 8 requests/s are per GPU;
LLaVA-NeXT-7B at 8 per GPU (64 for the node) by the roofline shows its shape: 1EP7D with the highest TTFT and the
lowest TPOT, TPOT rising as D are taken away, a cliff at one D, ED+P the mirror image, and E+P+D with TPOT falling
with the number of D and TTFT set by the ratio of E to P. The eager setting carries less, so it is shown at 6 per GPU.
At 8 for the node nothing happens at all: that reading cannot be the paper's.

Two things deviate. With 7EP1D, TTFT does not rise in a run of 400 requests: the first token is made by prefill,
before anything migrates, so that it comes late only when the caches of seven EP are full of requests that wait to be
pulled (some 330), and these have to come first. In a run of 3,000 it rises as the paper says. And few ED hurt TPOT,
but not TTFT: encode is small, so that one ED encodes for all, beside decodes that suffer; its TTFT is that of the P.
Once again more load and time would fill its caches.

Means of overloaded ratios say how long the run was: a queue that grows has no mean."""


def simulate(lab: Lab, quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sweep, (setting, rate, n) in SWEEPS.items():
        if quick and setting != "roofline":
            continue
        case = Case(MODEL, DATASET, table_3(MODEL, DATASET), setting)
        for layout in map(short, layouts(GPUS)):
            method = method_of(Layout.parse(layout))
            if method not in METHODS:
                continue
            run = lab.run(case, layout, rate, n // 2 if quick else n)
            found.setdefault(sweep, {}).setdefault(method, {})[layout] = {
                "ttft_s": fmean(run.ttft_s),
                "tpot_s": fmean(run.mean_interval_s),
                "ttft_rise": run.rise,
                "bound": bound_of(case, layout),
            }
        if not quick and setting == "roofline" and rate > GPUS:
            long = lab.run(case, "7EP1D", rate, LONG)
            size = LONG // 10
            found["7EP1D, long"] = {"ttft_s": [fmean(long.ttft_s[i : i + size]) for i in range(0, LONG, size)]}
    return found


def _in_order(method: str, one: dict[str, Any]) -> list[str]:
    """As in the paper: E+P+D by TPOT, the others by their first number."""
    return sorted(one, key=lambda name: one[name]["tpot_s"]) if method == "E+P+D" else sorted(one)


def draw(found: dict[str, Any], path: Path) -> None:
    sweeps = {k: v for k, v in found.items() if k in SWEEPS}
    with figure(path, TITLE, len(sweeps), 3, 4.6, 2.9) as axes:
        for row, (sweep, methods) in enumerate(sweeps.items()):
            for column, method in enumerate(METHODS):
                axis, names = axes[row][column], _in_order(method, methods[method])
                ttft = [methods[method][n]["ttft_s"] for n in names]
                axis.bar(range(len(names)), ttft, color=METHOD_COLOURS[method], alpha=0.55, label="TTFT")
                axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
                axis.set_title(f"{method}, {sweep}", fontsize=9)
                other = axis.twinx()
                tpot = [methods[method][n]["tpot_s"] * 1e3 for n in names]
                other.plot(range(len(names)), tpot, "o-", color="black", markersize=3, linewidth=1, label="TPOT")
                other.set_ylim(0, 1.15 * max(tpot))
                other.spines["top"].set_visible(False)
                if column == 0:
                    axis.set_ylabel("mean TTFT, s (bars)")
                if column == 2:
                    other.set_ylabel("mean TPOT, ms (dots)")


def compare(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Of each sweep but the last, which has no load to speak of."""
    rows = [row for sweep in list(SWEEPS)[:2] if sweep in found for row in _claims(sweep, found[sweep])]
    if (long := found.get("7EP1D, long")) is not None:
        text = ", ".join(f"{t:.1f}" for t in long["ttft_s"])
        said = f"8 per GPU, roofline, {LONG} requests, mean TTFT of each tenth: {text} s"
        holds = "holds in the long run" if long["ttft_s"][-1] > 4 * long["ttft_s"][0] else "does not hold"
        rows.append(("7EP1D: TTFT rises again, as EP waits for D to pull", said, holds))
    last = found.get("8 for the node, roofline")
    if last is not None:
        ttft = [one[n]["ttft_s"] for one in last.values() for n in one]
        said = f"mean TTFT {min(ttft):.2f} to {max(ttft):.2f} s over all 35 ratios"
        rows.append(("(if 8 requests/s were for the node)", said, "nothing would be a bottleneck"))
    return rows


def _claims(sweep: str, one: dict[str, Any]) -> list[tuple[str, str, str]]:
    epd, edp, three = (one[m] for m in METHODS)

    def said(d: dict[str, Any], *names: str) -> str:
        every = ", ".join(f"{n} {d[n]['ttft_s']:.2f} s / {d[n]['tpot_s'] * 1e3:.0f} ms" for n in names)
        return f"{sweep}: {every}"

    few_ep, rising = epd["1EP7D"], [epd[f"{k}EP{8 - k}D"]["tpot_s"] for k in range(1, 8)]
    others = min(v["ttft_s"] for v in epd.values())
    ed1, ed4, ed7 = (edp[n] for n in ("1ED7P", "4ED4P", "7ED1P"))
    by_d: dict[int, list[float]] = {}
    for name, v in three.items():
        by_d.setdefault(int(name[-2]), []).append(v["tpot_s"])
    means = [fmean(by_d[k]) for k in sorted(by_d)]
    of_d = {name: v["ttft_s"] for name, v in three.items() if int(name[-2]) == SAME_D}
    best, worst = min(of_d, key=of_d.__getitem__), max(of_d, key=of_d.__getitem__)
    checks = [
        (
            "1EP7D: a much higher TTFT, the lowest TPOT",
            said(epd, "1EP7D", "5EP3D"),
            few_ep["ttft_s"] > 2 * others and few_ep["tpot_s"] == min(rising),
        ),
        (
            "with more EP and fewer D, TPOT rises",
            f"{sweep}: " + ", ".join(f"{t * 1e3:.0f}" for t in rising) + " ms",
            all(b > 0.97 * a for a, b in pairwise(rising)),
        ),
        (
            "7EP1D: decode is the bottleneck",
            said(epd, "6EP2D", "7EP1D"),
            rising[-1] > 1.5 * rising[-2],
        ),
        (
            "ED+P: few ED hurt TTFT",
            said(edp, "1ED7P", "4ED4P"),
            ed1["ttft_s"] > 1.2 * ed4["ttft_s"],
        ),
        (
            "ED+P: few ED hurt TPOT, few P hurt TTFT",
            said(edp, "1ED7P", "4ED4P", "7ED1P"),
            ed1["tpot_s"] > 2 * ed4["tpot_s"] and ed7["ttft_s"] > 2 * ed4["ttft_s"],
        ),
        (
            "E+P+D: TPOT falls with the number of D",
            f"{sweep}: " + ", ".join(f"{k} D {m * 1e3:.0f} ms" for k, m in zip(sorted(by_d), means)),
            means[0] == max(means) and means[-1] == min(means),
        ),
        (
            "E+P+D with as many D: some ratios have a much lower TTFT",
            f"{sweep}, {SAME_D} D: {best} {of_d[best]:.2f} s, {worst} {of_d[worst]:.2f} s",
            of_d[worst] > 2 * of_d[best],
        ),
    ]
    return [(paper, ours, "holds" if holds else "does not hold") for paper, ours, holds in checks]
