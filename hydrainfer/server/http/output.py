"""What libraries print while a server runs, as records of its log."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from hydrainfer.core import log_event

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

output_log = logging.getLogger("hydrainfer.output")
_log = logging.getLogger("hydrainfer.server.output")
_LONGEST = 1 << 16  # letters of a line that does not end
_OF_RAY = re.compile(r"\((?:(?P<instance>\S+) )?pid=(?P<pid>\d+)(?:, ip=(?P<ip>[^)]+))?\) ?(?P<text>.*)")
"""What Ray puts before each line of an actor: its name, its process and, on another machine, its address."""


class LoggedOutput(io.TextIOBase):
    """A standard stream whose lines become records of `output_log`. A line that an instance has logged as JSON is kept,
    with the instance's name. Any thread may write. Of what a carriage return overwrites, such as the states of a
    progress bar, only the last is kept."""

    def __init__(self, stream: TextIO, level: int) -> None:
        """`stream`: the stream that this one stands for; nothing is written to it."""
        self._stream, self._level = stream, level
        self._lock = threading.Lock()
        self._rests: dict[int, str] = {}  # by thread: the line that it has begun

    @property
    def buffer(self) -> io.RawIOBase:
        """The stream of bytes below, which takes UTF-8."""
        return _Below(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        writer = threading.get_ident()
        with self._lock:
            *lines, rest = (self._rests.pop(writer, "") + text).split("\n")
            if rest:
                overwritten = "\r" if rest.endswith("\r") else ""
                self._rests[writer] = _last_state(rest)[-_LONGEST:] + overwritten
        for line in lines:
            self._record(_last_state(line))
        return len(text)

    def end(self) -> None:
        """Record the lines that have not been ended."""
        with self._lock:
            rests, self._rests = self._rests, {}
        for rest in rests.values():
            self._record(rest)

    def _record(self, line: str) -> None:
        if not line.strip():
            return
        of_ray = _OF_RAY.fullmatch(line)
        source: dict[str, str] = {}
        if of_ray is not None:
            source = {name: value for name, value in of_ray.groupdict().items() if value and name != "text"}
            line = of_ray["text"]
            logged = _json_line(line)
            if logged is not None:
                output_log.log(self._level, "%s", line, extra={"line": source | logged})
                return
        log_event(output_log, "output", line, self._level, **source)


class _Below(io.RawIOBase):
    """Bytes for a `LoggedOutput`."""

    def __init__(self, above: LoggedOutput) -> None:
        self._above = above

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._above.write(bytes(data).decode("utf-8", "replace"))
        return len(data)


def _last_state(line: str) -> str:
    """What a terminal would show of a line with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


def _json_line(text: str) -> dict[str, Any] | None:
    """The object of a line that `JsonLine` has formatted, or None."""
    if not text.startswith('{"time"'):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


@contextmanager
def logged_output() -> Iterator[None]:
    """Within the block, what is printed, warnings, and exceptions that end a thread are records of the log."""
    streams = sys.stdout, sys.stderr
    out, err = (LoggedOutput(stream, level) for stream, level in zip(streams, (logging.INFO, logging.WARNING)))
    hooks = threading.excepthook, sys.unraisablehook
    sys.stdout, sys.stderr = out, err
    threading.excepthook, sys.unraisablehook = _thread_ended, _unraisable
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        threading.excepthook, sys.unraisablehook = hooks
        sys.stdout, sys.stderr = streams
        out.end()
        err.end()


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "?"
    exc_info = _exc_info(args.exc_type, args.exc_value, args.exc_traceback)
    _log.error("the thread %s has ended by an error", name, exc_info=exc_info)


def _unraisable(args: UnraisableHookArgs) -> None:
    exc_info = _exc_info(args.exc_type, args.exc_value, args.exc_traceback)
    _log.error("%s: %r", args.err_msg or "an exception was ignored", args.object, exc_info=exc_info)


def _exc_info(
    kind: type[BaseException], value: BaseException | None, traceback: TracebackType | None
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    return kind, value or kind(), traceback
