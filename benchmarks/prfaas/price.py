"""Cost: what a request costs over the price of a GB, and from which price the far cluster stops paying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figure import save_lines
from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import CENT, H20_PRICE, homogeneous, prfaas
from hydrainfer.planner.clusters import Service, break_even, solve, throughput

TITLE = "Cost: the price of a GB decides"
HAS_FIGURE = True
CENTS_PER_GB = [k / 10 for k in range(21)]
_PAPERS_RATES = (3.24, 2.11)
_GAIN = 1.0 / 115.0  # a point of "+15 %"
TEXT = """\
The paper prints no prices. 2.0 is the ratio at which its own rates give its 15 %: 3.24 / 2.11 for (64 + 32 × 2.0) /
96 times the money is 1.152. Our rate is 1.3 % below 3.24, and all of that comes off the gain. A gain that is the
small difference of two large numbers is known to two points at best. Above 2.55 times the price of an H20 (queue:
2.66), the far cluster loses before a byte is paid for.

The paper leaves out what the link costs. 0.48 GB cross for the average request. By the equations the far cluster
stops paying at 0.40 cent per GB, if an H20 costs 1.25 an hour (0.44 from the rates that the paper prints). For a
queue it is 0.49 at the arrangement with the highest rate, as 96 H20 lose 4.1 % to the queue and PrfaaS only 1.7 %,
and 0.53 if the arrangement is chosen for its cost (24.8K, 4 P and 4 D), which sends less. At 2 cents, a usual price
between zones or regions, a request costs 38 to 48 % more than on H20 alone. So a plan with a far cluster says
nothing about cost without the price of a GB."""


def costs(service: Service) -> dict[str, Any]:
    """Cents per request over `CENTS_PER_GB`, and break-even prices in cents per GB."""
    alone = solve(homogeneous(), service=service).throughput
    fastest = solve(prfaas(), service=service)
    fixed, chosen, thresholds_k, n_prefill = [], [], [], []
    for cents in CENTS_PER_GB:
        clusters = prfaas(price_per_gb=cents * CENT)
        best = solve(clusters, objective="cost", service=service)
        fixed.append(throughput(clusters, fastest.arrangement, service).price / CENT)
        chosen.append(best.throughput.price / CENT)
        thresholds_k.append(best.arrangement.threshold / 1000)
        n_prefill.append(best.arrangement.n_prefill)
    even = break_even(prfaas(), alone.price, service=service)
    assert even is not None
    gb = fastest.throughput.bytes_per_request / 1e9
    return {
        "96 H20": [alone.price / CENT] * len(CENTS_PER_GB),
        "highest rate": fixed,
        "lowest cost": chosen,
        "lowest cost, threshold_k": thresholds_k,
        "lowest cost, n_prefill": n_prefill,
        "gb_per_request": gb,
        "gain_at_equal_cost": alone.price / fastest.throughput.price,
        "break_even_fixed": (alone.price - fastest.throughput.price) / gb / CENT,
        "break_even": even.price_per_gb / CENT,
        "break_even_threshold_k": even.arrangement.threshold / 1000,
        "dearest_h200": _dearest_h200(service),
    }


def _dearest_h200(service: Service) -> float:
    """The price of an H200 in H20 at which the far cluster costs as much per request as 96 H20, with a free link."""
    ratio = solve(prfaas(), service=service).throughput.rate / solve(homogeneous(), service=service).throughput.rate
    return (96 * ratio - 64) / 32


def at_2_cents(found: dict[str, Any]) -> float:
    """The cost of a request by the cheapest arrangement at 2 cents per GB, relative to that on 96 H20."""
    place = CENTS_PER_GB.index(2.0)
    return float(found["lowest cost"][place] / found["96 H20"][place])


def compute() -> dict[str, Any]:
    """Costs by the equations and for a queue."""
    ours, queue = costs("mean_length"), costs("mean_time")
    with_far, alone = _PAPERS_RATES
    papers_gain = with_far / alone / (128 / 96)
    papers_even = (96 * H20_PRICE / alone - 128 * H20_PRICE / with_far) / 3600 / ours["gb_per_request"] / CENT
    rows = [
        row(
            "rate at equal cost, H200 = 2.0 H20",
            1.15,
            ours["gain_at_equal_cost"],
            queue["gain_at_equal_cost"],
            tolerance=_GAIN,
        ),
        row("break-even at the highest rate, cents per GB", None, ours["break_even_fixed"], queue["break_even_fixed"]),
        row("break-even at the lowest cost, cents per GB", None, ours["break_even"], queue["break_even"]),
        row("cost of a request at 2 cents per GB, of that on 96 H20", None, at_2_cents(ours), at_2_cents(queue)),
        row("dearest H200 with a free link, in H20", None, ours["dearest_h200"], queue["dearest_h200"]),
    ]
    return {
        "rows": rows,
        "from_the_paper_s_rates": {"gain_at_equal_cost": papers_gain, "break_even_cents": papers_even},
        "cents_per_gb": CENTS_PER_GB,
        "equations": ours,
        "queue": queue,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Cents per request for a queue, over the price of a GB."""
    series = {name: results["queue"][name] for name in ("96 H20", "highest rate", "lowest cost")}
    save_lines(path, TITLE, "cents per GB", "cents per request", results["cents_per_gb"], series, log=False)
