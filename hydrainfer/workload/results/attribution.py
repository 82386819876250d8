"""The part of its time that made a request miss its SLO (`judging.blamed`), from the server's `timings`.

The reference is the median of requests sent one at a time. Time that the server does not account for (network, HTTP,
reading the body, the client itself) is `outside`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from hydrainfer.config import Slo
from hydrainfer.judging import at_quantile, blamed, per_token
from hydrainfer.metrics import INTERVALS
from hydrainfer.workload.client import RequestRecord
from hydrainfer.workload.results.judged import verdict_of

OUTSIDE = "outside"
PARTS = (*INTERVALS, OUTSIDE)
LIMITS = ("ttft", "tpot", "e2e")
"""The limits that an SLO may have; for each of them, a `Breakdown` has the parts to blame."""


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The mean seconds per part over the `n` requests with timings from the server: all of them, those that met the SLO
    and those that missed it; and 95th percentiles over all. `ttft_blame`, `tpot_blame`, `e2e_blame`: for each part, how
    many requests missed that limit because of it; `n_unexplained`: requests that missed the SLO and have no timings."""

    n: int
    mean_s: dict[str, float]
    p95_s: dict[str, float]
    met_mean_s: dict[str, float] = {}
    missed_mean_s: dict[str, float] = {}
    ttft_blame: dict[str, int] = {}
    tpot_blame: dict[str, int] = {}
    e2e_blame: dict[str, int] = {}
    n_unexplained: int = 0
    counts: dict[str, int] = {}


class Reference(msgspec.Struct, frozen=True):
    """The seconds that each part takes without load; `decode`: per token after the first."""

    parts_s: dict[str, float] = {}
    n: int = 0

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Reference:
        parts = [per_token(_parts(r), r.n_tokens) for r in records if r.ok and r.timings]
        if not parts:
            return cls()
        return cls({name: statistics.median(p[name] for p in parts) for name in PARTS}, len(parts))


def breakdown_of(records: Sequence[RequestRecord], slo: Slo | None, reference: Reference) -> Breakdown | None:
    """The breakdown of a load; None if no answer came with timings. Without a reference, the longest part is blamed."""
    timed = [(r, _parts(r)) for r in records if r.ok and r.timings]
    if not timed:
        return None
    met: list[dict[str, float]] = []
    missed: list[dict[str, float]] = []
    blame: dict[str, Counter[str]] = {limit: Counter() for limit in LIMITS}
    for record, parts in timed if slo else ():
        verdict = verdict_of(record, slo)  # type: ignore[arg-type]
        (met if verdict.met else missed).append(parts)
        for limit, part in blamed(verdict, parts, reference.parts_s, record.n_tokens).items():
            blame[limit][part] += 1
    counts = {
        k: round(sum(r.timings.get(k, 0) for r, _ in timed)) for k in ("n_preemptions", "n_migrations", "n_recoveries")
    }
    every = [parts for _, parts in timed]
    return Breakdown(
        n=len(timed),
        mean_s=_means(every),
        p95_s={name: at_quantile(sorted(parts[name] for parts in every), 0.95) for name in PARTS},
        met_mean_s=_means(met),
        missed_mean_s=_means(missed),
        **{f"{limit}_blame": dict(counts.most_common()) for limit, counts in blame.items()},
        n_unexplained=sum(not verdict_of(r, slo).met for r in records if not r.timings) if slo else 0,
        counts=counts,
    )


def _parts(record: RequestRecord) -> dict[str, float]:
    timings = record.timings
    parts = {name: timings.get(name + "_s", 0.0) for name in INTERVALS}
    return parts | {OUTSIDE: max(0.0, record.e2e_s - timings.get("e2e_s", sum(parts.values())))}


def _means(each: list[dict[str, float]]) -> dict[str, float]:
    if each:
        return {name: statistics.fmean(p[name] for p in each) for name in PARTS}
    return {}
