"""What requests cost, as products of prices, devices and rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydrainfer.planner.clusters import ClusterFacts, Deployment, LinkFacts
from hydrainfer.planner.search import DevicePrice, LayoutPlan, Row

_THOUSAND = "1,000 requests"


def thousand(row: Row) -> str:
    """The cost of a thousand requests."""
    if row.request_cost is None:
        return "–"
    return f"{row.request_cost * 1e3:.3g}"


def bill(plan: LayoutPlan) -> Iterator[str]:
    """Sentences on the cost and the energy of requests at full load, each with the numbers that it is made of."""
    best = plan.choice
    if best is None or not best.goodput:
        return
    an_hour = f"({best.goodput:.3g} requests/s × 3,600 s)"
    hours = plan.devices / best.goodput / 3.6
    yield f"{_THOUSAND} take {hours:.3g} device-hours: {plan.devices} devices ÷ {an_hour} × 1,000, always at that rate."
    if best.request_cost is not None and best.million_cost is not None and plan.price is not None:
        n_tokens = best.request_cost / best.million_cost * 1e6
        yield (f"Price of {best.layout}'s devices: {hourly(plan.prices, plan.price)}, in the currency of --price.")
        yield (
            f"{_THOUSAND} cost {thousand(best)}: {plan.price:.4g} an hour ÷ {an_hour} × 1,000, with every device paid "
            f"for and always at that rate; at half the rate, twice as much."
        )
        yield (
            f"1,000,000 answer tokens cost {best.million_cost:.3g}: {thousand(best)} ÷ (1,000 × {n_tokens:.3g} answer "
            "tokens of a request) × 1,000,000."
        )
    if best.request_wh is not None and plan.watts is not None:
        yield (
            f"{_THOUSAND} take {best.request_wh:.3g} kWh: {plan.watts / 1e3:.3g} kW, every board at its limit and "
            f"hosts not counted, ÷ {an_hour} × 1,000."
        )


def hourly(prices: Sequence[DevicePrice], total: float) -> str:
    """The price of all devices for an hour, as a sum of products."""
    terms = " + ".join(f"{p.n} {p.device} × {p.per_hour:.4g}" for p in prices)
    if terms:
        terms = f"{terms} an hour each = "
    return f"{terms}{total:.4g} an hour"


def cluster_bill(row: Deployment, clusters: Sequence[ClusterFacts], links: Sequence[LinkFacts]) -> Iterator[str]:
    """The products behind the cost of a thousand requests of a deployment, devices and link."""
    if row.device_cost is None or not row.rate:
        return
    used = [c for c in clusters if c.batch is not None or c.name in row.far]
    terms = " + ".join(f"{c.instances * c.devices} devices of {c.name} × {c.price or 0.0:.4g}" for c in used)
    total = sum(c.instances * c.devices * (c.price or 0.0) for c in used)
    yield (
        f"Devices: {terms} an hour each = {total:.4g} an hour; ÷ ({row.rate:.3g} requests/s × 3,600 s) × 1,000 = "
        f"{row.device_cost:.4g} for {_THOUSAND}."
    )
    used_links = [link for link in links if link.source in row.far and link.price_per_gb is not None]
    if len(used_links) == 1 and row.link_cost:
        gb = row.link_cost / (used_links[0].price_per_gb or 1.0)
        yield (
            f"Link: {gb:.4g} GB for {_THOUSAND} × {used_links[0].price_per_gb:.4g} per GB = {row.link_cost:.4g}; in "
            f"all {row.cost:.4g}."
        )
