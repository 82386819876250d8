"""The page with everything that a result says. Figures and style are inside, so it needs no network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hydrainfer.judging import Goodput, Proportion
from hydrainfer.reports.bench.failures import n_failed_of
from hydrainfer.reports.bench.tables import conclusions, with_interval
from hydrainfer.reports.bench.verdict import answer, is_too_short, unsure_rate
from hydrainfer.reports.drawing import (
    COLOURS,
    Axis,
    Bar,
    PlotSeries,
    Point,
    answered,
    document,
    legend,
    lines,
    ms,
    percent,
    stacked,
    table,
)
from hydrainfer.workload.results import LIMITS, PARTS, BenchResult, Run, Server, by_rate

MAX_CDF_RATES = 3
FLOOR_S = 1e-4  # start of a logarithmic axis: shorter times are of tokens that came in one read
PART_COLOURS = ("#a9c6e8", "#2f6db3", "#8a929b", "#f3cfa4", "#d9822b", "#4d545c", "#b7dcc0", "#4a9a5d", "#dcdfe3")
"""A hue per stage, lighter for its queue; greys for migrations and the rest."""


def page_of(result: BenchResult) -> str:
    """A whole HTML document."""
    colours = {server.name: COLOURS[i % len(COLOURS)] for i, server in enumerate(result.servers)}
    body = "".join(_sections(result, colours))
    return document(result.title, body)


def _sections(result: BenchResult, colours: dict[str, str]) -> Iterator[str]:
    slo = f"SLO: {result.slo}" if result.slo else "no SLO"
    like = f", answers as long as {result.like}'s" if result.like else ""
    yield f"<h1>{escape(result.title)}</h1><p class=sub>{escape(result.date)} · "
    workload = f"workload {result.workload.dataset} ({result.workload.source}){like}"
    yield f"{escape(workload)} · {escape(slo)}</p>"
    yield answered(answer(result))
    rated = [run for run in result.runs if run.rate_per_s is not None and run.attainment is not None]
    if rated:
        yield (
            "<h2>SLO attainment against the request rate</h2><div class=pair>" + _attainment(result, colours) + "</div>"
        )
    yield "<h2>Findings</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in conclusions(result)) + "</ul>"
    yield "<h2>What was compared</h2>" + _servers(result)
    yield from _distributions(result, colours)
    yield from _breakdowns(result)
    yield "<h2>Every run</h2>" + _runs(result)
    yield "<h2>To repeat it</h2>" + _repeat(result)


def _servers(result: BenchResult) -> str:
    rows = []
    for s in result.servers:
        f = s.facts
        alone = s.unloaded
        ttft, tpot = (getattr(alone, name) if alone else None for name in ("ttft_s", "tpot_s"))
        rows.append(
            [
                escape(s.name) + (f"<br>failed: {escape(s.failed.splitlines()[0])}" if s.failed else ""),
                escape(f"{f.model} {f.version}" if f else ""),
                escape(s.cores or "not said"),
                escape(s.threads_per_instance or "not said"),
                escape(f.prefix_cache if f else ""),
                f"{ms(ttft.p50 if ttft else None)} / {ms(tpot.p50 if tpot else None)}",
                f"{s.startup_s:.1f} s" if s.startup_s is not None else "–",
            ]
        )
    head = [
        "deployment",
        "model, version",
        "cores of it all",
        "threads an instance",
        "prefix cache",
        "alone: TTFT / TPOT p50, ms",
        "start",
    ]
    return table(head, rows, n_left=5)


def _pooled(runs: Sequence[Run], name: str) -> Proportion:
    proportions = [getattr(run.attainment, name) for run in runs if run.attainment is not None]
    effective = [run.attainment.n_effective for run in runs if run.attainment is not None]
    n = sum(p.n for p in proportions)
    n_met = sum(p.n_met for p in proportions)
    return Proportion.of(n_met, n, min(float(n), sum(effective)))


def _rates(result: BenchResult) -> tuple[float, float, bool]:
    """The lowest and the highest value of the rate axis, and whether it should be logarithmic."""
    rates = [run.rate_per_s for run in result.runs if run.rate_per_s is not None and math.isfinite(run.rate_per_s)]
    least = min(rates)
    most = max(rates)
    log = most > 8 * least
    if log:
        return (least / 1.15, most * 1.15, True)
    return (0.0, most * 1.08, False)


def _attainment(result: BenchResult, colours: dict[str, str]) -> str:
    least, most, log = _rates(result)
    x = Axis("requests per second", least, most, log=log)
    figures = []
    for what, title in (
        ("met", "SLO met"),
        ("ttft", "TTFT within its SLO"),
        ("tpot", "token intervals within their SLO"),
    ):
        series = []
        for server in result.servers:
            points = []
            goodput = result.goodput.get(server.name)
            steady = dict(goodput.curve) if goodput is not None and what == "met" else {}
            for rate, runs in by_rate(result.runs, server.name).items():
                p = _pooled(runs, what)
                long_run = steady.get(rate, p)
                if p.n:
                    points.append(Point(rate, p.share, min(p.low, long_run.low), max(p.high, long_run.high)))
            series.append(PlotSeries(server.name, colours[server.name], points))
        y = Axis(title, 0.0, 1.0, limit=_target(result) if what == "met" else None, percent=True)
        figures.append(f"<div><h3>{escape(title)}</h3>{lines(title, x, y, series)}</div>")
    names = legend(list(colours), list(colours.values()))
    note = (
        f"<p class=sub>Dashed: {_target(result) * 100:g} %. Vertical bars: Wilson intervals, 95 %, widened for "
        "requests that share a queue, and where runs were too short for their queue.</p>"
    )
    return figures[0] + f"<div>{names}{_goodputs(result)}{note}</div>" + "".join(figures[1:])


def _target(result: BenchResult) -> float:
    """The share of the requests that has to meet the SLO, the same for all servers."""
    return next((g.target for g in result.goodput.values()), 0.9)


def _goodputs(result: BenchResult) -> str:
    rows = []
    for name, g in result.goodput.items():
        low = "0" if g.low is None else f"{g.low:.4g}"
        high = _surely_below(g)
        rows.append([escape(name), f"{g.rate_per_s:.4g}", low, high])
    head = ["deployment", "goodput, /s", f"surely ≥ {_target(result) * 100:g} %", "surely below"]
    return table(head, rows) if rows else ""


def _surely_below(goodput: Goodput) -> str:
    if goodput.high is not None:
        return f"{goodput.high:.4g}"
    unsure = unsure_rate(goodput)
    if unsure is None:
        return "not reached"
    return f"not certain ({unsure:.4g} tried)"


def _shared_rates(result: BenchResult) -> list[str]:
    """The arrivals that most servers were loaded with, at most three: the first, a middle one, the last."""
    seen: dict[str, set[str]] = {}
    for run in result.runs:
        if run.curves:
            seen.setdefault(run.arrivals, set()).add(run.server)
    most = max((len(servers) for servers in seen.values()), default=0)
    shared = [arrivals for arrivals, servers in seen.items() if len(servers) == most]
    if len(shared) <= MAX_CDF_RATES:
        return shared
    return [shared[0], shared[len(shared) // 2], shared[-1]]


def _distributions(result: BenchResult, colours: dict[str, str]) -> Iterator[str]:
    for i, arrivals in enumerate(_shared_rates(result)):
        figures = []
        for name, title in (("ttft", "TTFT, ms"), ("tpot", "time between tokens, ms")):
            limit = None
            if result.slo:
                limit = getattr(result.slo, f"{name}_s")
            series = []
            reach = []
            for server in result.servers:
                runs = [
                    r for r in result.runs if (r.server, r.arrivals) == (server.name, arrivals) and name in r.curves
                ]
                if runs:  # the run with the middle curve: quantiles of several runs cannot be averaged
                    curve = sorted(r.curves[name] for r in runs)[len(runs) // 2]
                    reach += [max(curve[98], FLOOR_S), max(curve[1], FLOOR_S)]
                    points = [Point(max(s, FLOOR_S) * 1e3, q / 100, 0, 0) for q, s in enumerate(curve)]
                    series.append(PlotSeries(server.name, colours[server.name], points, marks=False))
            if series:
                top = max([*reach, limit or 0.0]) * 1e3
                log = max(reach) > 20 * min(reach)
                least = min(reach) * 900 if log else 0.0
                x = Axis(title, least, top * 1.1, log=log, limit=limit * 1e3 if limit else None)
                figures.append(f"<div>{lines(title, x, Axis('share of samples', 0, 1, percent=True), series)}</div>")
        if figures:
            head = ""
            if i == 0:
                head = "<h2>Distributions of latency</h2>" + legend(list(colours), list(colours.values()))
            yield f"{head}<h3>{escape(arrivals)}</h3><div class=pair>{''.join(figures)}</div>"


def _breakdowns(result: BenchResult) -> Iterator[str]:
    """The mean time of each part in the first round, and what made requests miss in all rounds."""
    bars = []
    for server in result.servers:
        for run in result.runs:
            if run.server == server.name and run.round == 0 and run.breakdown is not None:
                means = [run.breakdown.mean_s[part] * 1e3 for part in PARTS]
                bars.append(Bar(f"{server.name}, {run.arrivals}", means))
    if bars:
        names = [part.replace("_", " ") for part in PARTS]
        yield (
            "<h2>Where the time of a request went</h2>"
            + legend(names, PART_COLOURS)
            + stacked("mean latency by part", "ms", bars, names, PART_COLOURS)
        )
        yield "<p class=sub>Means of the first round, by the server; <i>outside</i> is what it does not see.</p>"
    if result.slo and any(run.breakdown or n_failed_of(run.report) for run in result.runs):
        yield "<h2>Which stage made requests miss</h2>" + _blamed(result)
        yield (
            "<p class=sub>Of all rounds. The part that is blamed took longest beyond its time without load; a request "
            "that failed misses without a part to blame.</p>"
        )


def _blamed(result: BenchResult) -> str:
    """A table of the parts to blame for each limit, and of the requests that failed, summed over the rounds."""
    loads: dict[tuple[str, str], list[Run]] = {}
    for server in result.servers:
        for run in result.runs:
            if run.server == server.name and (run.breakdown or n_failed_of(run.report)):
                loads.setdefault((server.name, run.arrivals), []).append(run)
    rows = []
    for (name, arrivals), runs in loads.items():
        breakdowns = [run.breakdown for run in runs if run.breakdown is not None]
        blame = [_summed(getattr(b, f"{limit}_blame") for b in breakdowns) for limit in LIMITS]
        counts = _summed(b.counts for b in breakdowns)
        rows.append(
            [
                escape(name),
                escape(arrivals),
                *("; ".join(f"{escape(part.replace('_', ' '))} {n}" for part, n in c.items()) or "–" for c in blame),
                str(sum(n_failed_of(run.report) for run in runs)),
                str(counts.get("n_migrations", 0)),
                str(counts.get("n_preemptions", 0)),
            ]
        )
    missed = [f"missed {limit.upper()} because of" for limit in LIMITS]
    return table(["deployment", "arrivals", *missed, "failed", "migrations", "preemptions"], rows, n_left=5)


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sum of the counts, largest first."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common())


def _runs(result: BenchResult) -> str:
    rows = []
    for run in result.runs:
        r = run.report
        rows.append(
            [
                escape(run.server),
                escape(run.arrivals) + (" (client late)" if run.client_late else ""),
                str(run.seed),
                f"{r.n_ok}/{r.n_requests}",
                _met(run),
                with_interval(r.ttft_s, "p50"),
                with_interval(r.ttft_s, "p90"),
                with_interval(r.tpot_s, "p50"),
                with_interval(r.itl_s, "p99"),
                f"{r.output_tokens_per_s:.4g}",
                ms(r.late_s.p99 if r.late_s else None),
                "–" if run.others_cores is None else f"{run.others_cores:.2f}",
            ]
        )
    head = [
        "deployment",
        "arrivals",
        "seed",
        "answered",
        "met",
        "TTFT p50, ms",
        "p90",
        "TPOT p50",
        "ITL p99",
        "tokens/s",
        "client late p99",
        "cores of others",
    ]
    note = ""
    if any(map(is_too_short, result.runs)):
        note = "<p class=sub>?: the run by itself is too short to judge its rate.</p>"
    return f"<div class=whole>{table(head, rows, n_left=2)}</div>{note}"


def _met(run: Run) -> str:
    if run.attainment is None:
        return "–"
    if is_too_short(run):
        return f"{percent(run.attainment.met.share)} ?"
    return percent(run.attainment.met.share)


def _repeat(result: BenchResult) -> str:
    facts = "<br>".join(f"{escape(k)}: {escape(str(v))}" for k, v in {**result.hardware, **result.versions}.items())
    started = "".join(_started(s) for s in result.servers if s.command)
    seeds = ", ".join(str(s) for s in result.seeds)
    notes = f"<p class=sub>Workload: {escape(result.workload.notes)}</p>" if result.workload.notes else ""
    command = f"<p><code>{escape(result.command)}</code></p>"
    return f"{command}<ul>{started}</ul><p class=sub>seeds {seeds}<br>{facts}</p>{notes}"


def _started(server: Server) -> str:
    return f"<li>{escape(server.name)}: <code>{escape(server.command)}</code></li>"
