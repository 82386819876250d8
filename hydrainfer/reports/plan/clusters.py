"""A plan over clusters in words and as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from hydrainfer.planner.clusters import ALL_FAR, ALONE, ClusterFacts, ClusterPlan, Deployment, Queued, Worth
from hydrainfer.reports.drawing import percent
from hydrainfer.reports.plan.prices import cluster_bill
from hydrainfer.reports.plan.tables import said

_HEAD = ("deployment", "threshold", "at home", "requests/s", "limited by", "over links", "TTFT mean, p90")


def cluster_table(plan: ClusterPlan) -> Table:
    """The chosen deployment, and those beside it."""
    table = Table(title=f"{plan.model}, {plan.workload['dataset']}: TTFT without queues", title_justify="left")
    priced = plan.chosen.cost is not None
    for name in (*_HEAD, *(("per 1,000",) if priced else ())):
        is_text = name in ("deployment", "limited by")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in plan.deployments:
        table.add_row(*map(escape, cells_of(plan, row)))
    return table


def cells_of(plan: ClusterPlan, row: Deployment) -> list[str]:
    """The cells of a deployment, the last one only if prices are known. With several far clusters, the first cell says
    which, unless it is all."""
    name = row.name
    if len(plan.clusters) > 2 and row.far and row.name != ALL_FAR:
        name = f"{name}: {', '.join(row.far)}"
    over = "–"
    if row.egress_gbps:
        over = f"{row.egress_gbps:.3g} Gbps, {row.link_share:.0%}"
    cells = [
        name,
        tokens(row.threshold),
        f"{row.n_prefill}P {row.n_decode}D",
        said(row.rate),
        row.limit,
        over,
        f"{row.ttft_mean:.3g} s, {row.ttft_p90:.3g} s",
    ]
    if row.cost is not None:
        cells.append(f"{row.cost:.4g}")
    return cells


def cluster_conclusions(plan: ClusterPlan) -> list[str]:
    """The answer first, then rates, links, first tokens and costs, and what is not known."""
    return [*cluster_answer(plan), *_details(plan), *plan.unknown]


def cluster_answer(plan: ClusterPlan) -> list[str]:
    """The answer to the question, in a few sentences."""
    best, alone = plan.chosen, plan.named(ALONE)
    assert alone is not None
    if not plan.met:
        return [
            f"Nothing meets the SLO: even without queues, no more than {percent(best.ttft_met)} of the requests have "
            f"their first token within {plan.slo.ttft_s:g} s, {percent(plan.target)} have to."
        ]
    if best is alone:
        return list(_stay_at_home(plan, alone))
    more = ""
    if alone.rate:
        more = f", {best.rate / alone.rate:.3g} times what {_home(plan).name} carries alone{_money(plan, best)}"
    lines = [f"Send {_arrangement(best)}: {said(best.rate)} requests/s{more}. What limits it is {best.limit}."]
    if plan.pays is False:
        lines.insert(0, f"No far cluster pays: {_costs(best)} with one, {_costs(alone)} on home alone.")
    if alone.ttft_met < plan.target:
        lines.append(
            f"Home alone does not meet the SLO: even without queues, {percent(alone.ttft_met)} of its requests have "
            f"their first token within {plan.slo.ttft_s:g} s."
        )
    return lines


def tokens(threshold: float | None) -> str:
    """A threshold in tokens; of one that is below all prompts, "all"."""
    if threshold is None:
        return "–"
    if threshold == 0.0:
        return "all"
    return f"{float(f'{threshold:.3g}'):,.0f}"


def _stay_at_home(plan: ClusterPlan, alone: Deployment) -> Iterator[str]:
    far = [row for row in plan.deployments if row.far]
    priced = [row for row in far if row.cost is not None]
    if not far:
        yield "There is no far cluster."
    elif not priced:
        yield "No far cluster pays: one adds next to nothing to the rate."
    else:
        cheapest = min(priced, key=lambda row: row.cost or 0.0)
        yield f"No far cluster pays: {_costs(alone)} on home alone, and {cheapest.cost:.4g} at least with one."
    yield f"Home alone carries {said(alone.rate)} requests/s with {_split(alone)}. What limits it is {alone.limit}."
    fastest = max(priced, key=lambda row: row.rate, default=alone)
    if fastest.rate > alone.rate:
        yield f"To send {_arrangement(fastest)} would carry {said(fastest.rate)} requests/s; {_costs(fastest)} then."


def _costs(row: Deployment) -> str:
    assert row.cost is not None
    return f"a thousand requests cost {row.cost:.4g}"


def _home(plan: ClusterPlan) -> ClusterFacts:
    return next(cluster for cluster in plan.clusters if cluster.batch is not None)


def _money(plan: ClusterPlan, row: Deployment) -> str:
    """What the devices of a deployment cost, in times of those at home; "" if prices are not known."""
    names = (_home(plan).name, *row.far)
    prices = {c.name: c.instances * c.devices * (c.price or 0.0) for c in plan.clusters if c.name in names}
    if not prices[names[0]]:
        return ""
    return f", with {sum(prices.values()) / prices[names[0]]:.3g} times the price of devices"


def _split(row: Deployment) -> str:
    return f"{row.n_prefill} P and {row.n_decode} D"


def _arrangement(row: Deployment) -> str:
    prompts = f"prompts of more than {tokens(row.threshold)} tokens"
    if row.threshold == 0.0:
        prompts = "all prompts"
    return f"{prompts} to {' and '.join(row.far)}, with {_split(row)} at home"


def _details(plan: ClusterPlan) -> Iterator[str]:
    best, alone = plan.chosen, plan.named(ALONE)
    assert alone is not None
    home, lengths = _home(plan), plan.workload
    yield (
        f"Prompts have {float(lengths['prompt_mean']):,.0f} tokens on average, answers "
        f"{float(lengths['output_mean']):,.0f}. A D decodes {home.batch} sequences in steps of "
        f"{1e3 * (home.step_s or 0.0):.3g} ms."
    )
    naive = plan.named(ALL_FAR)
    if naive is not None and best.far:
        yield f"All prefill far carries {said(naive.rate)} requests/s; what limits it is {naive.limit}."
    for use in best.uses:
        yield (
            f"{use.name} gets {percent(use.share)} of the requests and sends {use.egress_bytes_per_s * 8 / 1e9:.3g} "
            f"Gbps, {use.link_share:.0%} of its link."
        )
    met = ""
    if plan.slo.ttft_s is not None:
        met = f"; {percent(best.ttft_met)} of the requests are within {plan.slo.ttft_s:g} s"
    yield f"TTFT without queues: {best.ttft_mean:.3g} s on average, p90 {best.ttft_p90:.3g} s{met}."
    for row in {best.name: best, alone.name: alone}.values():
        if row.queued:
            yield _queued(plan, row, row.queued)
    if best.cost is not None and best.far:
        yield (
            f"With the link, {_costs(best)} ({best.device_cost:.4g} devices, {best.link_cost:.4g} link); on home "
            f"alone, {alone.cost:.4g}. That is at full load: devices cost the same when idle."
        )
    yield from cluster_bill(best, plan.clusters, plan.links)
    for worth in plan.worth:
        yield _worth(plan, worth)


def _queued(plan: ClusterPlan, row: Deployment, seen: Queued) -> str:
    met = ""
    if plan.slo.ttft_s is not None:
        met = f", {percent(seen.ttft_met)} within {plan.slo.ttft_s:g} s"
        if seen.ttft_met < plan.target:
            met += ", LESS THAN THE SLO: plan for a lower rate"
    return (
        f"With queues, {row.name} at {seen.rate:.3g} requests/s ({percent(seen.load)} of its rate, {seen.requests} "
        f"simulated): TTFT {seen.ttft_mean:.3g} s on average, p90 {seen.ttft_p90:.3g} s{met}; second token p90 "
        f"{seen.second_p90:.3g} s."
    )


def _worth(plan: ClusterPlan, worth: Worth) -> str:
    link = next(link for link in plan.links if link.source == worth.name)
    now = "its price is not known"
    if link.price_per_gb is not None:
        now = f"it costs {link.price_per_gb:.4g}"
    if worth.price_per_gb is None:
        return f"{worth.name} does not pay even if its link costs nothing."
    beside = ""
    if len(plan.worth) > 1:
        beside = "; doing without it costs less then, with the others at their prices"
    return (
        f"{worth.name} stops paying at {worth.price_per_gb:.3g} per GB ({now}), with a threshold of "
        f"{tokens(worth.threshold)} and {worth.n_prefill} P{beside}."
    )
