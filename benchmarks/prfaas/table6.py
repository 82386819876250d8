"""Table 6: three deployments of the case study."""

from __future__ import annotations

from typing import Any

from benchmarks.prfaas.report import row
from benchmarks.prfaas.setting import ALL_FAR, GBIT, PAPERS, THRESHOLD, h20_curve, homogeneous, prfaas
from hydrainfer.planner.clusters import Service, prefill_seconds, solve, throughput

TITLE = "Table 6: PrfaaS, homogeneous, all prefill far"
HAS_FIGURE = False
_EGRESS = 0.08
TEXT = """\
The throughput of each stage and the egress are at the paper's arrangement (threshold 19.4K, 3 P and 5 D). The rate
and the ratios are at the optimum of each column, which the grid finds: at 19.6K by the equations and at 19.7K for a
queue, both with 3 P and 5 D.

The least certain cell is the egress. The load at 3.24 requests/s is 12.4 Gbps: 49.6 % of those send 0.967 GB each,
as a prompt of 45K does. The paper's 13 are probably 4 Φ(32K) = 12.8, which is Eq. 2 with the nearest column of
Table 5.

T is convex, so E[T(L)] is more than T(E[L]), and the equations promise 2 to 5 % more than instances can carry. The
ratios of the deployments hardly depend on it. Our TTFT has neither queues nor the link in it, and the paper's cells
agree with that, though it speaks of queues and transfers."""


def rates(service: Service) -> dict[str, float]:
    """The cells of Table 6 that depend on how long the average prompt takes."""
    best = solve(prfaas(), service=service)
    alone = solve(homogeneous(), service=service)
    naive = throughput(prfaas(), ALL_FAR, service)
    at_papers = throughput(prfaas(), PAPERS, service)
    assert at_papers.far_per_s is not None and at_papers.home_per_s is not None
    assert alone.throughput.home_per_s is not None and naive.far_per_s is not None
    return {
        "threshold": best.arrangement.threshold,
        "n_prefill": best.arrangement.n_prefill,
        "far": at_papers.far_per_s,
        "home": at_papers.home_per_s,
        "decode": at_papers.decode_per_s,
        "egress_gbps": at_papers.egress_bytes_per_s / GBIT,
        "rate": best.throughput.rate,
        "homogeneous_n_prefill": alone.arrangement.n_prefill,
        "homogeneous_prefill": alone.throughput.home_per_s,
        "homogeneous_decode": alone.throughput.decode_per_s,
        "homogeneous_rate": alone.throughput.rate,
        "naive_prefill": naive.far_per_s,
        "naive_decode": naive.decode_per_s,
        "naive_rate": naive.rate,
        "ratio": best.throughput.rate / alone.throughput.rate,
        "naive_ratio": naive.rate / alone.throughput.rate,
        "over_naive": best.throughput.rate / naive.rate,
    }


def compute() -> dict[str, Any]:
    """All cells, and the curve of H20 that they were calibrated with."""
    ours, queue = rates("mean_length"), rates("mean_time")
    rows = [*_traffic_rows()]
    for cell, paper, key, is_calibrated in (
        ("PrfaaS: best threshold, tokens", THRESHOLD, "threshold", False),
        ("PrfaaS: best number of P, of 8", 3, "n_prefill", False),
        ("homogeneous: best number of P, of 12", 9, "homogeneous_n_prefill", False),
        ("PrfaaS: far prefill, req/s", 1.61, "far", False),
        ("PrfaaS: home prefill, req/s", 1.64, "home", True),
        ("PrfaaS: decode, req/s", 3.91, "decode", False),
        ("homogeneous: prefill, req/s", 2.11, "homogeneous_prefill", True),
        ("homogeneous: decode, req/s", 2.35, "homogeneous_decode", False),
        ("all far: prefill, req/s", 2.45, "naive_prefill", False),
        ("all far: decode, req/s", 6.25, "naive_decode", True),
        ("PrfaaS: rate, req/s", 3.24, "rate", False),
        ("homogeneous: rate, req/s", 2.11, "homogeneous_rate", True),
        ("all far: rate, req/s", 2.45, "naive_rate", False),
        ("PrfaaS / homogeneous", 1.54, "ratio", False),
        ("all far / homogeneous", 1.16, "naive_ratio", False),
        ("PrfaaS / all far", 1.32, "over_naive", False),
    ):
        rows.append(row(cell, paper, ours[key], queue[key], is_calibrated=is_calibrated))
    egress = row("PrfaaS: egress, Gbps", 13.0, ours["egress_gbps"], queue["egress_gbps"], tolerance=_EGRESS)
    return {"rows": [*rows, egress, *_ttft_rows()], "h20_curve_s": h20_curve()}


def _traffic_rows() -> list[dict[str, Any]]:
    found = throughput(prfaas(), PAPERS)
    assert found.far_tokens is not None
    return [
        row("mean length, tokens", 27_000, prfaas().lengths.mean_tokens),
        row("share of the requests that go far", 0.496, found.far_share),
        row("mean length of those, tokens", 44_000, found.far_tokens),
    ]


def _ttft_rows() -> list[dict[str, Any]]:
    far = prefill_seconds(prfaas(), PAPERS.threshold)
    alone = prefill_seconds(homogeneous(), PAPERS.threshold)
    naive = prefill_seconds(prfaas(), ALL_FAR.threshold)
    return [
        row("PrfaaS: mean TTFT, s", 2.22, far.mean),
        row("PrfaaS: p90 of TTFT, s", 3.51, far.p90),
        row("homogeneous: mean TTFT, s", 4.44, alone.mean),
        row("homogeneous: p90 of TTFT, s", 9.73, alone.p90, is_calibrated=True),
        row("all far: mean TTFT, s", 1.74, naive.mean),
        row("all far: p90 of TTFT, s", 3.51, naive.p90),
    ]
