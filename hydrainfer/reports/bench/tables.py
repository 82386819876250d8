"""A result in words and in tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from hydrainfer.reports.bench.failures import failures_of, main_kind, n_failed_of
from hydrainfer.reports.bench.verdict import interval, is_too_short, surely_less
from hydrainfer.reports.drawing import ms
from hydrainfer.workload.results import LIMITS, NOISY_CORES, PARTS, BenchResult, Percentiles, Run, by_rate


def with_interval(found: Percentiles | None, name: str) -> str:
    """A percentile with its interval, such as `123 (110 to 140)`, in milliseconds."""
    if found is None:
        return "–"
    low, high = found.intervals.get(name, (None, None))
    return f"{ms(getattr(found, name))} ({ms(low)} to {ms(high)})"


def conclusions(result: BenchResult) -> list[str]:
    """The findings behind the `answer`, one sentence each, with the reasons to doubt them."""
    findings = [f"{s.name} could not be measured: {s.failed}" for s in result.servers if s.failed]
    for name, goodput in result.goodput.items():
        findings.append(
            f"{name}: goodput {goodput.rate_per_s:.4g} requests/s (95 %: {interval(goodput)})"
            + (f"; {goodput.note}" if goodput.note else "")
        )
    if not result.goodput:
        findings += _unsettled(result)
    findings += _breaking(result)
    findings += failures_of(result)
    findings += _ranking(result)
    late = sum(run.client_late for run in result.runs)
    if late:
        findings.append(
            f"In {late} of {len(result.runs)} runs the client itself was late: their load was not what it says."
        )
    noisy = sum((run.others_cores or 0.0) > NOISY_CORES for run in result.runs)
    if noisy:
        findings.append(
            f"In {noisy} of {len(result.runs)} runs other processes used more than {NOISY_CORES:g} cores of the "
            "machine, which may have slowed the servers down."
        )
    wrong = sum(run.report.n_count_differs for run in result.runs)
    if wrong:
        findings.append(f"{wrong} answers had another number of token ids than the server's usage says.")
    short = sum(run.report.n_wrong_length for run in result.runs)
    if short:
        findings.append(f"{short} answers were not as long as asked for: loads differ where servers end early.")
    if result.stopped:
        findings.append(f"Stopped before the end: {result.stopped}")
    return [*findings, *result.notes]


def _unsettled(result: BenchResult) -> Iterator[str]:
    """A sentence for each run whose attainment is not that of the steady state."""
    for run in result.runs:
        a = run.attainment
        if a is None or run.rate_per_s is None:
            continue
        where = f"{run.server} at {run.arrivals}"
        if a.grows:
            yield f"{where}: a queue grew until the end: the server does not carry this rate."
        elif is_too_short(run):
            wanted = f"use --requests {a.n_wanted} or more"
            yield f"{where}: {a.met.n} requests are too few to judge this rate; {wanted}."


def _breaking(result: BenchResult) -> Iterator[str]:
    """For each server, what makes most requests miss at the lowest rate at which too many do: a part of their time, or
    that they failed."""
    for name, goodput in result.goodput.items():
        run = next((run for run in _by_ascending_rate(result, name) if _breaks(run, goodput.target)), None)
        if run is None:
            continue
        assert run.attainment is not None
        n_missed = run.attainment.met.n - run.attainment.met.n_met
        blamed = [
            (n, what, part)
            for what in LIMITS
            for part, n in (getattr(run.breakdown, f"{what}_blame").items() if run.breakdown else ())
        ]
        n, what, part = max(blamed, default=(0, "", ""))
        n_failed = n_failed_of(run.report)
        if n_failed > n:
            why = f"{n_failed} of {n_missed} misses have no answer"
            yield f"{name} breaks first because requests fail, most of them {main_kind(run)}: at {run.arrivals}, {why}."
        elif n:
            blame = f"{n} of {n_missed} misses are {what.upper()} because of it"
            yield f"{name} breaks first at {part.replace('_', ' ')}: at {run.arrivals}, {blame}."


def _by_ascending_rate(result: BenchResult, server: str) -> Iterator[Run]:
    for runs in by_rate(result.runs, server).values():
        yield from runs


def _breaks(run: Run, target: float) -> bool:
    """Whether too many requests of a run miss the SLO, for a reason that is known."""
    if run.attainment is None or run.attainment.met.share >= target:
        return False
    return run.breakdown is not None or n_failed_of(run.report) > 0


def _ranking(result: BenchResult) -> Iterator[str]:
    """A sentence for each deployment that carries less than the best."""
    ranked = sorted(result.goodput.items(), key=lambda item: -item[1].rate_per_s)
    if not ranked or not ranked[0][1].rate_per_s:
        return
    top = ranked[0][1].rate_per_s
    first = [g for _, g in ranked if g.rate_per_s == top]
    for name, g in ranked[len(first) :]:
        how = "less, but the intervals overlap: these runs do not prove it"
        if surely_less(g, first):
            how = "clearly less"
        yield f"{name} carries {g.rate_per_s:.4g} requests/s: {how}."


def tables_of(result: BenchResult) -> Iterator[Table]:
    """A table of the runs; then, for servers that sent timings, tables of the parts and what made requests miss."""
    yield _runs(result)
    for server in result.servers:
        timed = [run for runs in by_rate(result.runs, server.name).values() for run in runs if run.breakdown]
        timed = timed or [run for run in result.runs if run.server == server.name and run.breakdown]
        if timed:
            yield _parts(server.name, timed)


def _runs(result: BenchResult) -> Table:
    title = "milliseconds; attainment with its 95 % interval"
    if any(map(is_too_short, result.runs)):
        title += "; ?: by itself too short to judge the rate"
    table = Table(title=title)
    several = len(result.servers) > 1
    heads = ["answered", "attainment", "TTFT p50", "p90", "p99", "TPOT p50", "ITL p99", "tokens/s"]
    for name in ("server", "arrivals") if several else ("arrivals",):
        table.add_column(name)
    for name in heads:
        table.add_column(name, justify="right")
    for run in result.runs:
        r = run.report
        a = run.attainment
        attained = "–"
        if a:
            attained = f"{a.met.share * 100:.1f} % ({a.met.low * 100:.0f}–{a.met.high * 100:.0f})"
        if is_too_short(run):
            attained += " ?"
        numbers = [ms(getattr(r.ttft_s, p) if r.ttft_s else None) for p in ("p50", "p90", "p99")]
        numbers += [ms(r.tpot_s.p50 if r.tpot_s else None), ms(r.itl_s.p99 if r.itl_s else None)]
        arrivals = run.arrivals + (" late" if run.client_late else "")
        names = [run.server, arrivals] if several else [arrivals]
        table.add_row(*names, f"{r.n_ok}/{r.n_requests}", attained, *numbers, f"{r.output_tokens_per_s:.4g}")
    return table


def _parts(server: str, runs: list[Run]) -> Table:
    table = Table(title=f"{server}: where the time went (mean, ms), and what made requests miss")
    for name in ("part", *(run.arrivals for run in runs)):
        table.add_column(name, justify="left" if name == "part" else "right")
    for part in PARTS:
        cells = []
        for run in runs:
            b = run.breakdown
            assert b is not None
            blame = [f"{n} {what.upper()}" for what in LIMITS if (n := getattr(b, f"{what}_blame").get(part))]
            cells.append(ms(b.mean_s[part]) + (f"  [{', '.join(blame)}]" if blame else ""))
        table.add_row(part.replace("_", " "), *cells)
    return table
