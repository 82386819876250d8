"""The reason why a layout carries no higher rate: the interval in which requests that missed their SLO lost their
time."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import msgspec

from hydrainfer.core import CostModel, Layout, Stage
from hydrainfer.judging import Verdict, blamed, judge, per_token
from hydrainfer.metrics import INTERVALS, Timeline, Timelines
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.search.study import Study, attempt, token_intervals_s

_NO_TOKEN = Verdict(ttft=False, tpot=True, e2e=True)
_UNLOADED = 24  # requests simulated without load, for the usual intervals
_SPARSE = 20.0  # seconds between arrivals, per second that a request takes alone
_WORDS = {
    "encode_queue": "pictures wait for an encoder",
    "encode": "encode batches are long",
    "ep_migration": "embeddings wait for room or a link on their way to prefill",
    "prefill_queue": "prompts wait for prefill",
    "prefill": "prefill is slowed by what runs beside it",
    "pd_migration": "prefilled requests wait for room or a link on their way to decode",
    "decode_queue": "requests wait to decode",
    "decode": "decode steps are long: many sequences, or encode and prefill beside them",
}
_STAGE = {
    "encode_queue": Stage.ENCODE, "encode": Stage.ENCODE, "ep_migration": Stage.PREFILL, "prefill_queue": Stage.PREFILL,
    "prefill": Stage.PREFILL, "pd_migration": Stage.DECODE, "decode_queue": Stage.DECODE, "decode": Stage.DECODE,
}  # fmt: skip


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """The most common cause of misses at `rate`: the `limit` missed ("TTFT", "TPOT" or "E2E") and the `interval` at
    `stage` that lost the time. `missed`: share of requests with this cause; `mean_s`: mean of each interval over all
    requests."""

    rate: float
    stage: str
    limit: str
    interval: str
    missed: float
    mean_s: dict[str, float]

    def __str__(self) -> str:
        return f"{self.limit} in {self.stage}: {_WORDS[self.interval]}"


def reason(study: Study, layout: Layout, rate: float) -> Reason | None:
    """The most common cause of misses at `rate`; None if no request missed."""
    alone = timelines_at(study.shortened(_UNLOADED), layout, slow_rate(study))
    usual = _means([per_token(t.intervals_s, len(t.token_s)) for t in alone])
    blame: Counter[tuple[str, str]] = Counter()
    timelines = timelines_at(study, layout, rate)
    for t in timelines:
        verdict = judge(study.slo, t.ttft_s, token_intervals_s(t.token_s), t.e2e_s or 0.0)
        verdict = verdict if t.token_s else _NO_TOKEN
        for limit, interval in blamed(verdict, t.intervals_s, usual, len(t.token_s)).items():
            blame[limit.upper(), interval] += 1
    if not blame:
        return None
    (limit, interval), n = blame.most_common(1)[0]
    mean_s = _means([t.intervals_s for t in timelines])
    missed = n / len(timelines)
    return Reason(rate=rate, stage=_STAGE[interval], limit=limit, interval=interval, missed=missed, mean_s=mean_s)


def slow_rate(study: Study) -> float:
    """A rate at which requests hardly overlap: they arrive many times as far apart as the longest of them takes
    alone."""
    first = study.trace[:_UNLOADED]
    stations = study.stations.values()
    return 1.0 / max(_SPARSE * max(_alone_s(s.cost, t) for t in first for s in stations), 1e-3)


def _alone_s(cost: CostModel, t: TraceRequest) -> float:
    """Seconds that a request takes with the device to itself."""
    encode_s = cost.encode_s(t.pictures) if t.pictures else 0.0
    prefill_s = cost.language_s(t.n_prompt, t.n_prompt * t.n_prompt // 2, 0, 0)
    return encode_s + prefill_s + t.n_output * cost.language_s(0, 0, 1, t.n_prompt + t.n_output)


def timelines_at(study: Study, layout: Layout, rate: float) -> list[Timeline]:
    """The timelines of all requests, simulated at `rate`."""
    timelines: dict[str, Timeline] = {}
    attempt(study, layout, rate, hurry=False, timelines=Timelines(timelines.__setitem__))
    return list(timelines.values())


def _means(each: list[dict[str, float]]) -> dict[str, float]:
    if each:
        return {name: fmean(one.get(name, 0.0) for one in each) for name in INTERVALS}
    return {}
