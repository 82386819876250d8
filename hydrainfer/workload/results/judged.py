"""The verdicts on requests: how many met the SLO, and which limit the others missed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from hydrainfer.config import Slo
from hydrainfer.judging import FAILED, Proportion, Series, Verdict, delay_limit_s, effective_n, judge, steady_state
from hydrainfer.workload.client import RequestRecord


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO attainment of a load. `met`: share of requests that met the SLO, with its Wilson interval; a failed
    request is a miss. `ttft`, `tpot`, `e2e`: shares that kept that limit. `n_failed`: requests that failed; `n_both`:
    requests that missed TTFT and TPOT without failing. `n_effective`: see `metrics.effective_n`. `grows`: whether a
    queue certainly grew; `n_wanted`: requests that a run needs before its share is that of the steady state (see
    `judging.steady_state`)."""

    slo: Slo
    met: Proportion
    ttft: Proportion
    tpot: Proportion
    e2e: Proportion
    n_failed: int
    n_both: int
    n_effective: float = 0.0
    grows: bool = False
    n_wanted: int = 0


def verdict_of(record: RequestRecord, slo: Slo) -> Verdict:
    """The verdict by the paper's section 2.3. TTFT counts from the time when the request was sent."""
    if record.ok:
        return judge(slo, record.ttft_s, record.token_interval_s, record.e2e_s)
    return FAILED


def series_of(records: Sequence[RequestRecord], slo: Slo) -> Series:
    """The series of a run's requests in the order in which they were sent."""
    ordered = sorted(records, key=lambda record: record.sent_s)
    delays = [math.inf if record.ttft_s is None else record.ttft_s for record in ordered]
    rest_s = [record.e2e_s - record.ttft_s for record in ordered if record.ok and record.ttft_s is not None]
    met = [verdict_of(record, slo).met for record in ordered]
    return Series([record.sent_s for record in ordered], delays, met, delay_limit_s(slo, rest_s))


def attainment_of(records: Sequence[RequestRecord], slo: Slo) -> Attainment:
    judged = [(record, verdict_of(record, slo)) for record in records]

    def kept(name: str) -> Proportion:
        return Proportion.of_each([getattr(verdict, name) for _, verdict in judged])

    state = steady_state([series_of(records, slo)])
    return Attainment(
        slo=slo,
        met=kept("met"),
        ttft=kept("ttft"),
        tpot=kept("tpot"),
        e2e=kept("e2e"),
        n_effective=effective_n([verdict.met for _, verdict in judged]),
        grows=state.grows,
        n_wanted=state.n_wanted,
        n_failed=sum(not record.ok for record, _ in judged),
        n_both=sum(record.ok and not (v.ttft or v.tpot) for record, v in judged),
    )
