"""Which part is blamed, on records made by hand."""

import pytest

from hydrainfer.config import Slo
from hydrainfer.metrics import INTERVALS
from hydrainfer.workload.client import RequestRecord
from hydrainfer.workload.client.sse import Usage
from hydrainfer.workload.results import Reference
from hydrainfer.workload.results.attribution import OUTSIDE, breakdown_of

pytestmark = pytest.mark.unit

ALONE = {"encode": 0.1, "prefill": 0.3, "decode": 0.2}
SLO = Slo(ttft_s=0.6, tpot_s=0.05)


def record(parts, n=5, outside_s=0.0, gap_s=0.04):
    """Its times are those that the parts make; the time outside is before the first token."""
    before = sum(parts.get(name, 0.0) for name in INTERVALS[:5]) + outside_s
    chunks = tuple(before + i * gap_s for i in range(n))
    said = {f"{name}_s": parts.get(name, 0.0) for name in INTERVALS} | {"n_migrations": 1, "choices": []}
    said["e2e_s"] = sum(parts.values())
    return RequestRecord(
        index=0, n_asked=n, scheduled_s=0.0, sent_s=0.0, end_s=said["e2e_s"] + outside_s,
        chunk_s=chunks, chunk_tokens=(1,) * n, usage=Usage(7, n, said),
    )  # fmt: skip


REFERENCE = Reference.of([record(ALONE)] * 3)


@pytest.mark.parametrize(
    ("slower", "blamed"),
    [
        ({"prefill": 0.55}, "prefill"),
        ({"encode_queue": 0.3, "prefill": 0.35}, "encode_queue"),
        ({"encode": 0.4}, "encode"),
        ({"ep_migration": 0.25}, "ep_migration"),
        ({"prefill_queue": 0.25, "decode_queue": 9.0}, "prefill_queue"),
    ],
)
def test_ttft(slower, blamed):
    found = breakdown_of([record(ALONE | slower)], SLO, REFERENCE)
    assert found.ttft_blame == {blamed: 1} and found.tpot_blame == {}


def test_time_that_the_server_does_not_see_is_attributed_to_the_client():
    found = breakdown_of([record(ALONE, outside_s=0.4)], SLO, REFERENCE)
    assert found.ttft_blame == {OUTSIDE: 1} and found.mean_s[OUTSIDE] == pytest.approx(0.4)


@pytest.mark.parametrize(("part", "seconds"), [("decode", 0.4), ("pd_migration", 0.3), ("decode_queue", 0.3)])
def test_tpot(part, seconds):
    found = breakdown_of([record(ALONE | {part: seconds}, gap_s=0.1)], SLO, REFERENCE)
    assert found.tpot_blame == {part: 1} and found.ttft_blame == {}


@pytest.mark.parametrize(
    ("slower", "outside_s", "blamed"),
    [({"prefill": 0.9}, 0.0, "prefill"), ({"decode": 0.9}, 0.0, "decode"), ({}, 0.6, OUTSIDE)],
)
def test_e2e(slower, outside_s, blamed):
    found = breakdown_of([record(ALONE | slower, outside_s=outside_s)], Slo(e2e_s=1.0), REFERENCE)
    assert found.e2e_blame == {blamed: 1} and found.ttft_blame == found.tpot_blame == {}


def test_decode_counts_per_token():
    """Twice as many tokens may take twice as long: the migration is what is new."""
    long = record(ALONE | {"decode": 0.45, "pd_migration": 0.1}, n=9, gap_s=0.06)
    assert breakdown_of([long], SLO, REFERENCE).tpot_blame == {"pd_migration": 1}


def test_met_missed_and_counts():
    found = breakdown_of([record(ALONE)] * 3 + [record(ALONE | {"encode_queue": 1.0})], SLO, REFERENCE)
    assert found.n == 4 and found.counts["n_migrations"] == 4 and found.n_unexplained == 0
    assert found.met_mean_s["encode_queue"] == 0.0 and found.missed_mean_s["encode_queue"] == 1.0
    assert found.mean_s["prefill"] == pytest.approx(0.3)
    assert found.p95_s["encode_queue"] == 1.0


def test_servers_that_say_nothing():
    bare = RequestRecord(index=0, n_asked=1, scheduled_s=0.0, sent_s=0.0, end_s=1.0, chunk_s=(0.9,), chunk_tokens=(1,))
    assert breakdown_of([bare], SLO, Reference()) is None and bare.timings == {}
    found = breakdown_of([bare, record(ALONE)], SLO, REFERENCE)
    assert found.n == 1 and found.n_unexplained == 1
