"""What runs say: which requests a server refused, what made requests miss, and which runs are too short."""

import io
import re

import msgspec
import pytest
from rich.console import Console

from hydrainfer.config import Slo
from hydrainfer.judging import Goodput, Proportion
from hydrainfer.reports.bench import conclusions, page_of, tables_of
from hydrainfer.workload.client import Failure, FailureKind, LoadResult, RequestRecord
from hydrainfer.workload.client.sse import Usage
from hydrainfer.workload.results import BenchResult, Reference, Server, run_of
from hydrainfer.workload.sources import Poisson, Workload

pytestmark = pytest.mark.unit
SLO = Slo(ttft_s=0.25, tpot_s=0.04)
BUSY = Failure(FailureKind.STATUS, "429: too many requests wait", 429)


def record(i, token_s=0.02, failure=None):
    """A request that was answered with two tokens, `token_s` apart, most of it in decode; or one that failed."""
    chunks = ()
    usage = None
    if failure is None:
        chunks = (i + 0.1, i + 0.1 + token_s)
        usage = Usage(7, 2, hydrainfer={"decode_s": token_s, "e2e_s": 0.1 + token_s})
    return RequestRecord(
        index=i,
        n_asked=2,
        scheduled_s=float(i),
        sent_s=float(i),
        end_s=i + 0.1 + token_s,
        chunk_s=chunks,
        chunk_tokens=(1,) * len(chunks),
        usage=usage,
        failure=failure,
    )


def run(n_met, n_slow, n_refused, failure=BUSY, **more):
    numbers = range(n_met + n_slow + n_refused)
    records = [record(i, 0.02 if i < n_met else 0.5, failure if i >= n_met + n_slow else None) for i in numbers]
    load = LoadResult(arrivals=Poisson(150.0), seed=0, records=tuple(records), warmup=())
    return msgspec.structs.replace(run_of("server", load, SLO, Reference()), **more)


def result(*runs, **more):
    goodput = Goodput(rate_per_s=50.0, low=40.0, high=150.0, target=0.9, curve=())
    given = {"slo": SLO, "goodput": {"server": goodput}}
    return BenchResult(
        title="A server",
        command="hydrainfer bench",
        date="2026-11-28",
        seeds=(0,),
        workload=Workload(dataset="talks", n_pictures=0),
        like="",
        hardware={},
        versions={},
        servers=(Server(name="server"),),
        runs=runs,
        **given | more,
    )


def test_refused_requests_are_counted_by_kind_with_an_example():
    said = conclusions(result(run(10, 4, 6)))
    assert (
        "server at poisson 150/s: 6 of 20 requests failed and so missed the SLO: 6 refused (the first: "
        '"429: too many requests wait").'
    ) in said
    lost = run(18, 0, 2, Failure(FailureKind.CONNECTION, "no connection\nto it"))
    (line,) = (x for x in conclusions(result(run(10, 4, 6), lost)) if "failed" in x and "breaks" not in x)
    assert line.startswith("server at poisson 150/s: 8 of 40 requests failed")
    assert '6 refused (the first: "429' in line and '2 without a connection (the first: "no connection to it")' in line
    assert not [x for x in conclusions(result(run(20, 0, 0))) if "fail" in x]
    assert not [x for x in conclusions(result(run(10, 4, 6), slo=None)) if "missed the SLO" in x]


@pytest.mark.parametrize(
    ("run_", "words"),
    [
        (run(10, 4, 6), "because requests fail, most of them refused (429): at poisson 150/s, 6 of 10 misses have no"),
        (run(10, 6, 4), "at decode: at poisson 150/s, 6 of 10 misses are TPOT because of it."),
        (run(0, 0, 9), "because requests fail, most of them refused (429): at poisson 150/s, 9 of 9 misses have no"),
    ],
)
def test_a_server_breaks_first_at_what_makes_most_requests_miss(run_, words):
    (line,) = (x for x in conclusions(result(run_)) if "breaks first" in x)
    assert f"breaks first {words}" in line


def test_the_page_sums_what_made_requests_miss_over_the_rounds():
    page = page_of(result(run(10, 4, 6), run(10, 5, 1, round=1)))
    blamed = page[page.index("Which stage made requests miss") : page.index("Every run")]
    (row,) = re.findall(r"<tr><td>server</td>(.*?)</tr>", blamed)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row) == ["poisson 150/s", "–", "decode 9", "–", "7", "0", "0"]
    assert "Of all rounds." in blamed
    refused = page_of(result(run(0, 0, 9)))
    assert "Which stage made requests miss" in refused and "Where the time" not in refused


def shown(found):
    console = Console(width=150, record=True, file=io.StringIO())
    for table in tables_of(found):
        console.print(table)
    return console.export_text()


def test_a_run_that_is_too_short_for_its_queue_is_marked():
    judged = run(10, 10, 0)
    short, long, grown = (
        msgspec.structs.replace(judged, attainment=msgspec.structs.replace(judged.attainment, n_wanted=n, grows=grows))
        for n, grows in ((500, False), (20, False), (500, True))
    )
    assert "50.0 % (30–70) ?" in shown(result(short)) and "?: by itself too short" in shown(result(short))
    assert "?" not in shown(result(long, grown))
    assert "50.0 % ?</td>" in page_of(result(short)) and "50.0 % ?" not in page_of(result(long, grown))


def error_bar(goodput):
    """The length of the bar of the one rate in the figure of attainment."""
    page = page_of(result(run(10, 10, 0), goodput={"server": goodput}))
    figure = re.search(r"<h3>SLO met</h3>(.*?)</svg>", page, re.DOTALL)[1]
    ((low, high),) = re.findall(r'opacity=".6" d="M[0-9.]+ ([0-9.]+)V([0-9.]+)"', figure)
    return float(low) - float(high)


def test_the_figure_of_attainment_has_the_wider_interval():
    """Where a run is too short for its queue, it has that of the long run, by which a rate is judged."""
    curve = ((150.0, Proportion.of(10, 20, 1.0)),)
    wide = Goodput(rate_per_s=50.0, low=40.0, high=None, target=0.9, curve=curve)
    narrow = msgspec.structs.replace(wide, curve=())
    assert error_bar(wide) > error_bar(narrow)
    assert "not certain (150 tried)" in page_of(result(run(10, 10, 0), goodput={"server": wide}))
