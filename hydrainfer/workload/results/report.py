"""The numbers of a load that people compare. Failed requests count as failures and are not part of any latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from hydrainfer.judging import quantile_interval
from hydrainfer.workload.client import Failure, LoadResult
from hydrainfer.workload.sources import Arrivals

N_EXAMPLES = 5


class Percentiles(msgspec.Struct, frozen=True):
    """The percentiles of `n` samples, linearly interpolated between ranks. `intervals`: for each percentile, the
    interval that holds the true value with 95 % confidence if samples are independent; None on a side for which there
    are too few samples."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    intervals: dict[str, tuple[float | None, float | None]] = {}

    @classmethod
    def of(cls, samples: Iterable[float]) -> Percentiles | None:
        """The percentiles of `samples`; None if there are no samples."""
        values = np.sort(np.fromiter(samples, dtype=np.float64))
        if not values.size:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
        ordered = values.tolist()
        intervals = {f"p{p}": quantile_interval(ordered, p / 100) for p in (50, 90, 99)}
        return cls(len(ordered), float(values.mean()), p50, p90, p99, ordered[-1], intervals)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one load. Latencies are in seconds, of successful requests only. `duration_s`: from the first
    measured request sent to the last one ended. `late_s`: how far the client lagged behind its own schedule.
    `n_count_differs`: answers whose number of ids differs from `usage`. `n_wrong_length`: answers that do not have the
    length asked for. `n_cut`: requests in flight when the load was stopped; `n_unsent`: requests that were not sent;
    neither is in `n_requests`."""

    arrivals: Arrivals
    seed: int
    n_requests: int
    n_ok: int
    n_warmup: int
    n_warmup_failed: int
    failures: dict[str, int]
    failure_examples: tuple[Failure, ...]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    n_prompt_tokens: int
    n_output_tokens: int
    n_count_differs: int
    n_wrong_length: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None
    late_s: Percentiles | None
    warmup_ttft_s: Percentiles | None
    n_cut: int = 0
    n_unsent: int = 0
    stopped: str = ""

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def report_of(result: LoadResult) -> LoadReport:
    """The report of a load. Rates count successful requests and their tokens over `duration_s`."""
    records = result.records
    ok = [r for r in records if r.ok]
    failed = [r.failure for r in records if r.failure is not None]
    first_s = min((r.sent_s for r in records), default=0.0)
    last_s = max((r.end_s for r in records), default=0.0)
    span_s = last_s - first_s
    requests_per_s = 0.0
    output_tokens_per_s = 0.0
    n_tokens = sum(r.n_tokens for r in ok)
    if span_s:
        requests_per_s = len(ok) / span_s
        output_tokens_per_s = n_tokens / span_s
    return LoadReport(
        arrivals=result.arrivals,
        seed=result.seed,
        n_requests=len(records),
        n_ok=len(ok),
        n_warmup=len(result.warmup),
        n_warmup_failed=sum(not r.ok for r in result.warmup),
        failures=dict(Counter(f.kind.value for f in failed)),
        failure_examples=tuple(failed[:N_EXAMPLES]),
        duration_s=span_s,
        requests_per_s=requests_per_s,
        output_tokens_per_s=output_tokens_per_s,
        n_prompt_tokens=sum(r.usage.prompt_tokens for r in ok if r.usage),
        n_output_tokens=n_tokens,
        n_count_differs=sum(r.count_differs for r in ok),
        n_wrong_length=sum(r.n_tokens != r.n_asked for r in ok),
        ttft_s=Percentiles.of(r.ttft_s for r in ok if r.ttft_s is not None),
        tpot_s=Percentiles.of(r.tpot_s for r in ok if r.tpot_s is not None),
        itl_s=Percentiles.of(gap for r in ok for gap in r.itl_s),
        e2e_s=Percentiles.of(r.e2e_s for r in ok),
        late_s=Percentiles.of(r.late_s for r in records),
        warmup_ttft_s=Percentiles.of(r.ttft_s for r in result.warmup if r.ok and r.ttft_s is not None),
        n_cut=result.n_cut,
        n_unsent=result.n_unsent,
        stopped=result.stopped,
    )
