"""The progress of a load while it runs: requests, rate and attainment so far."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hydrainfer.config import Slo
from hydrainfer.workload.client import RequestRecord
from hydrainfer.workload.output import ticking
from hydrainfer.workload.output.ticking import Ticker
from hydrainfer.workload.results import Run, verdict_of


class Shown:
    """A progress bar while a run lasts, and a line when it has ended; without a terminal, a line every ten seconds. Use
    as a context manager."""

    def __init__(self, console: Console, slo: Slo | None) -> None:
        self._console = console
        self._slo = slo
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
        )
        # drawing takes processor time from the client: only four times a second, and only on a terminal
        self._progress = Progress(
            *columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal
        )
        self._task = self._progress.add_task("", now="", visible=False)
        self._n = self._n_ok = self._n_met = 0
        self._start_s = self._said_s = time.perf_counter()
        self._doing = "preparing"
        self._total = 0
        self._ticker: Ticker | None = None

    def __enter__(self) -> Shown:
        self._progress.start()
        if not self._console.is_terminal:
            self._ticker = Ticker(self._say, ticking.EVERY_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        if self._ticker is not None:
            self._ticker.close()
        self._progress.stop()

    def draws(self, n: int) -> None:
        self._console.print(f"drawing {n} pictures", highlight=False)
        self._now_doing(f"drawing {n} pictures")

    def begins(self, server: str, what: str, n: int) -> None:
        self._n = self._n_ok = self._n_met = 0
        self._start_s = time.perf_counter()
        if not self._console.is_terminal:
            self._console.print(f"{server}  {what}: {n} requests", markup=False, soft_wrap=True)
        self._now_doing(f"{server}  {what}", n)
        self._progress.reset(self._task, total=n, description=f"{server}  {what}", now="", visible=True)

    def record(self, record: RequestRecord) -> None:
        self._n += 1
        self._n_ok += record.ok
        if self._slo is not None:
            self._n_met += verdict_of(record, self._slo).met
        if (now_s := time.perf_counter()) - self._said_s > 0.2:
            self._said_s = now_s
            self._progress.update(self._task, completed=self._n, now=self._line(now_s - self._start_s))

    def _line(self, passed_s: float) -> str:
        failed = ""
        if self._n > self._n_ok:
            failed = f", {self._n - self._n_ok} failed"
        met = ""
        if self._slo and self._n:
            met = f", attainment {self._n_met / self._n:.0%}"
        return f"{self._n_ok / max(passed_s, 1e-9):.3g} answers/s{met}{failed}"

    def ended(self, server: str, run: Run | None) -> None:  # noqa: ARG002
        self._progress.update(self._task, visible=False)
        self._now_doing("between two runs")
        if run is not None:
            self._console.print(summary_line(run), markup=False, highlight=False, soft_wrap=True)

    def _now_doing(self, what: str, total: int = 0) -> None:
        """Store what the line of every ten seconds says. `total`: of the requests of a run."""
        self._doing = what
        self._total = total
        self._start_s = time.perf_counter()
        if self._ticker is not None:
            self._ticker.said()

    def _say(self) -> None:
        passed_s = time.perf_counter() - self._start_s
        count = ""
        if self._total:
            count = f": {self._n} of {self._total}, {self._line(passed_s)}"
        line = f"{self._doing}{count} ({passed_s:.0f} s)"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary_line(run: Run) -> str:
    """One line of text about a run that has ended."""
    report = run.report
    parts = [f"{run.server}  {run.arrivals}: {report.n_ok} of {report.n_requests} answered"]
    if run.attainment is not None:
        met = run.attainment.met
        parts.append(f"attainment {met.share:.1%} ({met.low:.1%} to {met.high:.1%})")
    for name, found in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s)):
        if found is not None:
            parts.append(f"{name} p50 {found.p50 * 1e3:.4g} p90 {found.p90 * 1e3:.4g} ms")
    if run.client_late and report.late_s is not None:
        parts.append(f"THE CLIENT WAS LATE by {report.late_s.p99 * 1e3:.0f} ms (p99)")
    return "; ".join(parts)
