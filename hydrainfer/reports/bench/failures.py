"""Requests without an answer, in words: how many, of which kind, and what the first of each kind was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hydrainfer.workload.client import Failure, FailureKind
from hydrainfer.workload.results import BenchResult, LoadReport, Run

_WORDS = {
    FailureKind.STATUS: "refused",
    FailureKind.CONNECTION: "without a connection",
    FailureKind.MALFORMED: "with a broken stream",
    FailureKind.SERVER: "with an error in the stream",
    FailureKind.TIMEOUT: "timed out",
}
_LONGEST = 120  # characters of a message


def failures_of(result: BenchResult) -> Iterator[str]:
    """A sentence for each load of each server in which requests failed, over all its rounds."""
    loads: dict[tuple[str, str], list[LoadReport]] = {}
    for run in result.runs:
        loads.setdefault((run.server, run.arrivals), []).append(run.report)
    for (server, arrivals), reports in loads.items():
        n_failed = sum(n_failed_of(report) for report in reports)
        if n_failed:
            n = sum(report.n_requests for report in reports)
            misses = ""
            if result.slo:
                misses = " and so missed the SLO"
            yield f"{server} at {arrivals}: {n_failed} of {n} requests failed{misses}: {_kinds(reports)}."


def n_failed_of(report: LoadReport) -> int:
    """The number of requests of a run that failed."""
    return report.n_requests - report.n_ok


def main_kind(run: Run) -> str:
    """How most of the failed requests of a run failed, such as "refused (429)"."""
    kind = max(run.report.failures, key=run.report.failures.__getitem__)
    first = _first([run.report], kind)
    words = _WORDS[FailureKind(kind)]
    if first is not None and first.status is not None:
        return f"{words} ({first.status})"
    return words


def _kinds(reports: Sequence[LoadReport]) -> str:
    """The number of failures of each kind, most first, with the message of one of them."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.failures)
    parts = []
    for kind, n in counts.most_common():
        first = _first(reports, kind)
        part = f"{n} {_WORDS[FailureKind(kind)]}"
        if first is not None:
            part += f' (the first: "{_short(first.message)}")'
        parts.append(part)
    return ", ".join(parts)


def _first(reports: Sequence[LoadReport], kind: str) -> Failure | None:
    """The first failure of this kind that is kept; reports keep a few."""
    return next((f for report in reports for f in report.failure_examples if f.kind == kind), None)


def _short(message: str) -> str:
    line = " ".join(message.split())
    if len(line) > _LONGEST:
        return line[:_LONGEST] + "…"
    return line
