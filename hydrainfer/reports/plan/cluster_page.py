"""The report of a plan over clusters as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from hydrainfer.planner.clusters import ALONE, ClusterFacts, ClusterPlan, Curves, Deployment, LinkFacts
from hydrainfer.reports.drawing import COLOURS, Axis, PlotSeries, Point, answered, document, legend, lines, table
from hydrainfer.reports.plan.clusters import cells_of, cluster_answer, cluster_conclusions, tokens
from hydrainfer.reports.plan.tables import said

_STYLE = """
.if{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:6px 14px;align-items:center;
max-width:640px}.if input{width:100%;accent-color:var(--mark)}.if output{font-variant-numeric:tabular-nums}
#if{background:var(--tint);border-left:4px solid var(--mark);padding:10px 14px;margin:12px 0;max-width:640px}
"""
_SCRIPT = """
{const d=%s,e=i=>document.getElementById(i),f=x=>+x.toPrecision(3),r=()=>{const p=+e('if-p').value;
e('if-po').value=f(p);let b=d.points[0],c=1/0;for(const q of d.points){const x=q.device_cost+q.thousand_gb*p;
if(x<c){c=x;b=q}}e('if').textContent=`At ${f(p)} per GB a thousand requests cost at least ${+c.toPrecision(4)}`+
` with far prefill (a threshold of ${Math.round(b.threshold).toLocaleString('en')} tokens, ${b.n_prefill} P and `+
`${b.n_decode} D, ${f(b.rate)} requests/s), ${+d.alone.toPrecision(4)} on home alone: far prefill `+
(c<d.alone?'pays.':'does not pay.')};e('if-p').oninput=r;r()}
"""
_STAGES = (("far_prefill", "far prefill"), ("link", "link"), ("home_prefill", "home prefill"), ("decode", "decode"))
_HIGH = 2.5  # times the highest rate, where a figure of stages ends


def cluster_page(plan: ClusterPlan) -> str:
    """The page of a plan."""
    return document(_title(plan), "".join(_body(plan)), _STYLE)


def _title(plan: ClusterPlan) -> str:
    return f"Clusters for {plan.model}, {plan.workload['dataset']}"


def _body(plan: ClusterPlan) -> Iterator[str]:
    asked = {"goodput": "most requests per second", "cost": "least cost of a request"}[plan.objective]
    facts = [plan.date.partition("T")[0], f"asked for: {asked}", f"SLO: {plan.slo}"]
    yield f"<h1>{escape(_title(plan))}</h1><p class=sub>{escape(' · '.join(fact for fact in facts if fact))}</p>"
    answer = cluster_answer(plan)
    yield answered(answer)
    known = [line for line in cluster_conclusions(plan)[len(answer) :] if line not in plan.unknown]
    yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in known) + "</ul>"
    yield "<h2>Beside other ways</h2>" + _deployments(plan)
    if plan.curves is not None:
        yield from _curves(plan, plan.curves)
        yield from _what_if(plan, plan.curves)
    yield "<h2>What this does not know</h2>"
    yield "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in plan.unknown) + "</ul>"
    yield from _given(plan)


def _deployments(plan: ClusterPlan) -> str:
    head = ["deployment", "threshold", "at home", "requests/s", "limited by", "over links", "TTFT mean, p90"]
    if plan.chosen.cost is not None:
        head.append("per 1,000")
    rows = [[escape(cell) for cell in cells_of(plan, row)] for row in plan.deployments]
    return f"<div class=whole>{table(head, rows)}</div>"


def _curves(plan: ClusterPlan, curves: Curves) -> Iterator[str]:
    planned = plan.named(curves.of)
    assert planned is not None
    yield f"<h2>How the rate depends on each choice</h2><p class=sub>Around “{escape(curves.of)}”.</p>"
    yield "<div class=pair><div>" + _by_threshold(curves, planned) + "</div><div>" + _by_split(curves) + "</div></div>"
    yield "<div class=pair><div>" + _by_link(curves) + "</div></div>"


def _line(name: str, colour: str, xs: Sequence[float], ys: Sequence[float | None], marks: bool = False) -> PlotSeries:
    pairs = zip(xs, ys, strict=True)
    return PlotSeries(name, colour, [Point(x, y, y, y) for x, y in pairs if y is not None], marks)


def _by_threshold(curves: Curves, planned: Deployment) -> str:
    """What each stage allows, and all, with a dot at the planned threshold."""
    points = curves.thresholds
    xs = [point.threshold for point in points]
    top = _HIGH * max(point.rate for point in points)
    series = []
    for (field, name), colour in zip(_STAGES, COLOURS[1:]):
        ys = [getattr(point, field) for point in points]
        if any(y is not None for y in ys):
            series.append(_line(name, colour, xs, [y if y is None or y <= top else None for y in ys]))
    series.append(_line("all", COLOURS[0], xs, [point.rate for point in points]))
    if planned.threshold and planned.threshold >= xs[0]:
        series.append(_line("planned", "var(--ink)", [planned.threshold], [planned.rate], marks=True))
    x = Axis("threshold, tokens", xs[0], max(xs[-1], xs[0] * 1.01), log=True)
    figure = lines("requests per second by threshold", x, Axis("requests per second", 0.0, top), series)
    text = "<h3>Threshold</h3>" + legend([one.name for one in series], [one.colour for one in series]) + figure
    return text + "<p class=sub>With the planned split. The lowest line is the rate.</p>"


def _by_split(curves: Curves) -> str:
    points = curves.splits
    xs = [float(point.n_prefill) for point in points]
    series = [
        _line("best threshold for each", COLOURS[2], xs, [point.best_rate for point in points], marks=True),
        _line("planned threshold", COLOURS[0], xs, [point.rate for point in points], marks=True),
    ]
    top = 1.1 * max(point.best_rate for point in points)
    x = Axis(f"P at home, of {len(points) - 1}", 0.0, xs[-1])
    figure = lines("requests per second by split", x, Axis("requests per second", 0.0, top), series)
    text = "<h3>Prefill and decode at home</h3>"
    return text + legend([one.name for one in series], [one.colour for one in series]) + figure


def _by_link(curves: Curves) -> str:
    points = curves.links
    xs = [point.gbps for point in points]
    named = [f"{point.gbps:.3g} Gbps (threshold {tokens(point.threshold)}, {point.n_prefill} P)" for point in points]
    best = [
        Point(point.gbps, point.best_rate, point.best_rate, point.best_rate, name)
        for point, name in zip(points, named, strict=True)
    ]
    series = [
        PlotSeries("threshold and split chosen anew", COLOURS[2], best),
        _line("as planned", COLOURS[0], xs, [point.rate for point in points], marks=True),
    ]
    top = 1.1 * max(point.best_rate for point in points)
    x = Axis("Gbps of all links", xs[0], xs[-1], log=True)
    figure = lines("requests per second by the rate of the links", x, Axis("requests per second", 0.0, top), series)
    text = "<h3>Rate of the links</h3>" + legend([one.name for one in series], [one.colour for one in series]) + figure
    return text + "<p class=sub>From 1/64 to twice the given rate.</p>"


def _what_if(plan: ClusterPlan, curves: Curves) -> Iterator[str]:
    """A slider over the price of a GB, which answers whether the far cluster pays at one's own price, if the curves are
    of one."""
    alone, row = plan.named(ALONE), plan.named(curves.of)
    if not curves.prices or alone is None or row is None or len(row.far) != 1:
        return
    data = {"points": msgspec.to_builtins(curves.prices), "alone": alone.cost}
    now = next(link.price_per_gb for link in plan.links if link.source == row.far[0]) or 0.0
    even = next(worth.price_per_gb for worth in plan.worth if worth.name == row.far[0]) or 0.0
    most = max(2.0 * even, 1.25 * now)
    slider = f'id=if-p type=range min=0 max="{most:.6g}" value="{now:.6g}" step="{most / 200:.6g}"'
    yield "<h2>What if a GB costs something else</h2>"
    yield f"<div class=if><label for=if-p>price of a GB</label><input {slider}><output id=if-po></output></div>"
    yield "<p id=if></p>"
    yield f"<script>{_SCRIPT % msgspec.json.encode(data).decode().replace('<', chr(92) + 'u003c')}</script>"


def _given(plan: ClusterPlan) -> Iterator[str]:
    """The inputs of the plan, and how to repeat it."""
    yield "<h2>What was planned for</h2>"
    head = ["cluster", "devices", "times", "decodes", "price of a device, hour"]
    yield table(head, [_cluster(cluster) for cluster in plan.clusters], n_left=4)
    if plan.links:
        yield table(["link", "Gbps", "latency, ms", "price of a GB", "may be used"], [_link(x) for x in plan.links])
    prompts = (
        f"{plan.workload['dataset']}: prompts of {_number(plan.workload['prompt_mean'])} tokens on average, p90 "
        f"{_number(plan.workload['prompt_p90'])}, answers of {_number(plan.workload['output_mean'])}"
    )
    facts = {
        "model": plan.model,
        "workload": prompts,
        "SLO": f"{plan.slo}; TTFT for {plan.target * 100:g} % of the requests",
        "search": f"{plan.took_s:.3g} s",
        "version": f"hydrainfer {plan.version}",
    }
    yield "<h2>To repeat it</h2>" + (f"<p><code>{escape(plan.command)}</code></p>" if plan.command else "")
    yield "<p class=sub>" + "<br>".join(f"{escape(k)}: {escape(v)}" for k, v in facts.items()) + "</p>"


def _cluster(cluster: ClusterFacts) -> list[str]:
    decodes = "no"
    if cluster.batch is not None and cluster.step_s is not None:
        decodes = f"{cluster.batch} sequences in {cluster.step_s * 1e3:.3g} ms"
    price = "–"
    if cluster.price is not None:
        price = f"{cluster.price:.4g}"
    times = f"{'measured' if cluster.measured else 'ASSUMED'}: {cluster.source}"
    devices = f"{cluster.instances} x {cluster.devices} {cluster.hardware}"
    return [escape(cell) for cell in (cluster.name, devices, times, decodes, price)]


def _link(link: LinkFacts) -> list[str]:
    price = "–"
    if link.price_per_gb is not None:
        price = f"{link.price_per_gb:.4g}"
    names = f"{link.source} to {link.target}"
    return [escape(names), said(link.gbps), said(link.latency_ms), price, f"{link.max_share:.0%}"]


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"
