"""The arithmetic of the report, on records made by hand."""

import json

import msgspec
import pytest

from hydrainfer.workload.client import Failure, FailureKind, LoadResult, RequestRecord
from hydrainfer.workload.client.sse import Usage
from hydrainfer.workload.results import LoadReport, Percentiles, report_of
from hydrainfer.workload.sources import Closed

pytestmark = pytest.mark.unit


def record(index=0, sent=1.0, chunks=(1.5, 1.6, 1.8), **changes):
    fields = {
        "index": index,
        "n_asked": len(chunks),
        "scheduled_s": sent - 0.25,
        "sent_s": sent,
        "end_s": (chunks[-1] if chunks else sent) + 0.2,
        "chunk_s": chunks,
        "chunk_tokens": (1,) * len(chunks),
        "token_ids": tuple(range(len(chunks))),
        "usage": Usage(7, len(chunks)),
    }
    return RequestRecord(**fields | changes)


def report(*records, warmup=()):
    return report_of(LoadResult(arrivals=Closed(1), seed=0, records=records, warmup=warmup))


def test_one_record():
    r = record()
    assert r.late_s == pytest.approx(0.25)
    assert r.ttft_s == pytest.approx(0.5)
    assert r.itl_s == pytest.approx((0.1, 0.2))
    assert r.tpot_s == pytest.approx(0.15)
    assert r.e2e_s == pytest.approx(1.0)


def test_tpot_counts_tokens_not_chunks():
    r = record(chunks=(1.0, 2.0), chunk_tokens=(1, 4), token_ids=tuple(range(5)), usage=Usage(7, 5))
    assert r.tpot_s == pytest.approx(0.25) and r.itl_s == (1.0,) and not r.count_differs


def test_without_usage_ids_count_and_without_ids_chunks_do():
    assert record(usage=None, chunk_tokens=(1, 2, 1), token_ids=(1, 2, 3, 4)).n_tokens == 4
    assert record(usage=None, token_ids=None).n_tokens == 3


def test_report():
    failed = record(2, 4.0, (), failure=Failure(FailureKind.STATUS, "429: busy", 429), usage=None, token_ids=None)
    got = report(record(), record(1, 2.0, (3.0, 3.5)), failed, warmup=(record(),))
    assert (got.n_requests, got.n_ok, got.n_warmup, got.n_warmup_failed) == (3, 2, 1, 0)
    assert got.failures == {"status": 1} and got.failure_examples[0].status == 429
    assert got.duration_s == pytest.approx(4.2 - 1.0)
    assert got.requests_per_s == pytest.approx(2 / 3.2)
    assert got.output_tokens_per_s == pytest.approx(5 / 3.2)
    assert got.n_prompt_tokens == 14 and got.n_output_tokens == 5
    assert got.ttft_s.n == 2 and got.ttft_s.p50 == pytest.approx(0.75) and got.ttft_s.max == pytest.approx(1.0)
    assert got.itl_s.n == 3 and got.itl_s.p50 == pytest.approx(0.2)
    assert got.tpot_s.mean == pytest.approx((0.15 + 0.5) / 2)
    assert got.late_s.n == 3
    assert got.warmup_ttft_s.p50 == pytest.approx(0.5)


def test_wrong_counts_are_counted():
    wrong_usage = record(usage=Usage(7, 4), n_asked=4)
    too_short = record(n_asked=5)
    got = report(record(), wrong_usage, too_short)
    assert (got.n_count_differs, got.n_wrong_length) == (1, 1)


def test_nothing_but_failures():
    got = report(record(0, 1.0, (), failure=Failure(FailureKind.CONNECTION, "refused"), usage=None))
    assert got.ttft_s is None and got.tpot_s is None and got.requests_per_s == 0.0


def test_percentiles():
    got = Percentiles.of(float(i) for i in range(101))
    assert (got.n, got.mean, got.p50, got.p90, got.p99, got.max) == (101, 50.0, 50.0, 90.0, 99.0, 100.0)
    assert Percentiles.of([]) is None


def test_json_round_trip():
    got = report(record(), record(1, 2.0))
    assert json.loads(got.to_json())["arrivals"] == {"type": "closed", "concurrency": 1}
    assert msgspec.json.decode(got.to_json(), type=LoadReport) == got
