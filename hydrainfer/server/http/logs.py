"""The log of a running server, as text or JSON lines, and its periodic line of statistics."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from hydrainfer.core import InstanceInfo, JsonLine, LogForm, log_event, log_formatter, total
from hydrainfer.metrics import PrometheusRecorder, QueueStats
from hydrainfer.server.http.access import AccessLines, access_log
from hydrainfer.server.http.output import logged_output, output_log

_ACCESS = ("method", "path", "status", "seconds")  # the arguments of an access log record; the ids follow
stats_log = logging.getLogger("hydrainfer.stats")


@contextmanager
def written_logs(level: str, form: LogForm, *, access: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Write the logs of this process, from `level` on, to `stream` (default: stderr) within the block. `access`: also
    one line per request. As JSON, everything that is printed within the block is logged, too."""
    stream = stream or sys.stderr
    ours, root = logging.getLogger("hydrainfer"), logging.getLogger()
    before = [(log, list(log.handlers), log.level, log.propagate) for log in (ours, access_log, output_log)]
    lines = _Lines(stream)
    lines.setLevel(level.upper())
    lines.setFormatter(ServerLine() if form == "json" else log_formatter("text"))
    printed = _Lines(stream)  # whatever its level
    printed.setFormatter(lines.formatter)
    root.addHandler(lines)
    ours.setLevel(level.upper())
    access_log.propagate = output_log.propagate = False
    access_log.handlers = [AccessLines(stream, line=ServerLine().format if form == "json" else None)] if access else []
    access_log.setLevel(min(logging.INFO, ours.level) if access else logging.CRITICAL)
    output_log.handlers = [printed]
    output_log.setLevel(logging.INFO)
    try:
        with logged_output() if form == "json" else nullcontext():
            yield
    finally:
        root.removeHandler(lines)
        for handler in access_log.handlers:
            handler.flush()
        for log, handlers, was, propagate in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(was)


class _Lines(logging.StreamHandler[TextIO]):
    """Writes the lines of a log. A server runs on if nobody can read them: the disk may be full, or the reader of a
    pipe gone."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


class ServerLine(JsonLine):
    """Formats a record of a server as one JSON object. Records of the access log have their parts as fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] | None = getattr(record, "line", None)
        if line is not None:  # an instance has formatted it
            return json.dumps(line, ensure_ascii=False)
        if record.name == access_log.name and isinstance(record.args, tuple):
            fields: dict[str, Any] = dict(zip(_ACCESS, record.args))
            fields["seconds"] = round(fields["seconds"], 3)
            record.fields = fields | dict(word.split("=", 1) for word in str(record.args[-1]).split())
            record.event = "request"
        return super().format(record)


class StatsLine:
    """Logs a line about the load every `every_s`, while the server is busy, and once more when it becomes idle."""

    def __init__(
        self,
        instances: Callable[[], list[InstanceInfo]],
        recorder: PrometheusRecorder,
        waiting: Callable[[], QueueStats],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`every_s`: 0 means never."""
        self._instances, self._recorder, self._waiting, self._clock = instances, recorder, waiting, clock
        self._every_s = every_s
        self._at_s = clock()
        self._tokens = recorder.n_tokens
        self._refused, self._number = 0, 0
        self._busy = False

    def tick(self) -> None:
        """Log a line if it is due. To be called often."""
        now = self._clock()
        if not self._every_s or now - self._at_s < self._every_s:
            return
        line, self._at_s = self._line(now - self._at_s), now
        if line is not None:
            log_event(stats_log, "load", line)

    def _line(self, passed_s: float) -> str | None:
        """The line about the load, or None if the server has been idle since the last line."""
        prompt, answer = (new - old for new, old in zip(self._recorder.n_tokens, self._tokens))
        self._tokens = self._recorder.n_tokens
        overload = self._waiting()
        refused, n_unprepared = sum(overload.refused.values()), sum(overload.unprepared.values())
        new_refused, self._refused = refused - self._refused, refused
        ended = self._recorder.ended_after(self._number)
        if ended:
            self._number = ended[-1].number
        infos = self._instances()
        stats = total([i.stats for i in infos if i.stats is not None and i.state != "dead"])
        busy, was_busy = stats.n_running + stats.n_waiting > 0, self._busy
        self._busy = busy
        if not (busy or was_busy or prompt or answer or new_refused or ended):
            return None
        kv_total, kv_leased, _ = stats.cache_blocks.get("kv", (0, 0, 0))
        words = [
            f"{stats.n_running} running, {stats.n_waiting + n_unprepared} waiting",
            f"{prompt / passed_s:.0f} prompt and {answer / passed_s:.0f} answer tokens/s",
            f"{len(ended)} ended{_medians([e.ttft_s for e in ended], [e.tpot_s for e in ended])}",
            *([f"KV {100 * kv_leased / kv_total:.0f} %"] if kv_total else []),
            *([f"{new_refused} refused"] if new_refused else []),
            *(f"{i.name} is {i.state}" for i in infos if i.state != "alive"),
        ]
        return "; ".join(words)


def _medians(ttfts: list[float | None], tpots: list[float | None]) -> str:
    medians = []
    for name, given, unit, scale in (("TTFT", ttfts, "s", 1.0), ("TPOT", tpots, "ms", 1e3)):
        known = sorted(value for value in given if value is not None)
        if known:
            medians.append(f"{name} {known[len(known) // 2] * scale:.3g} {unit}")
    return f" (median {', '.join(medians)})" if medians else ""
