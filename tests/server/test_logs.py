"""What a running server writes: its log as text and JSON, and the line that says how it is doing."""

import io
import json
import logging
import sys
import threading
import warnings
from contextlib import contextmanager

import pytest

from hydrainfer.core import EventKind, InstanceInfo, InstanceStats, JsonLine, LifecycleEvent
from hydrainfer.metrics import PrometheusRecorder, QueueStats
from hydrainfer.server import StatsLine, written_logs
from hydrainfer.server.http.access import write_line
from hydrainfer.server.http.output import LoggedOutput

pytestmark = pytest.mark.unit


@contextmanager
def logged(*args, **options):
    """The lines written meanwhile."""
    out, lines = io.StringIO(), []
    with written_logs(*args, stream=out, **options):
        yield lines
    lines += out.getvalue().splitlines()


def speak():
    log = logging.getLogger("hydrainfer.cluster.hub")
    log.debug("small")
    log.info("a thing\nin two lines")
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("broken")
    write_line("POST", b"/v1/x", 200, 0.5, "a", "b", "unavailable")
    write_line("GET", b"/v1/overview", 200, 0.1, "", "c")


def test_json():
    with logged("info", "json", access=True) as lines:
        speak()
    made = [json.loads(line) for line in lines]
    by_logger = {(m["logger"], m["level"]): m for m in made}
    assert len(made) == 3 and all(m["time"].endswith("+00:00") for m in made)
    assert by_logger["hydrainfer.cluster.hub", "info"]["message"] == "a thing\nin two lines"
    assert "ValueError: x" in by_logger["hydrainfer.cluster.hub", "error"]["exception"]
    access = by_logger["hydrainfer.access", "info"]
    del access["time"], access["level"], access["logger"]
    parts = {"method": "POST", "path": "/v1/x", "status": 200, "seconds": 0.5}
    words = {"event": "request", "message": "POST /v1/x 200 0.500s id=a run=b error=unavailable"}
    assert access == {**words, **parts, "id": "a", "run": "b", "error": "unavailable"}


def test_whatever_is_printed_warned_of_or_raised_in_a_thread_is_json_too():
    inner = JsonLine().format(logging.LogRecord("hydrainfer.x", logging.INFO, "", 0, "hello", (), None))
    with logged("error", "json", access=False) as lines:
        print("plain\n\nand", end=" ")
        print("more")
        print(f"(D0 pid=12) {inner}", file=sys.stderr)
        print("(D1 pid=13, ip=10.0.0.1) Traceback", file=sys.stderr)
        print('(pid=14) {"time": broken', file=sys.stderr)
        warnings.warn("old", stacklevel=1)
        logging.getLogger("asyncio").error("a task failed")
        thread = threading.Thread(target=lambda: 1 / 0, name="mine")
        thread.start()
        thread.join()
        sys.stderr.write("the end")
    made = [json.loads(line) for line in lines]
    assert all(m.keys() >= {"time", "level", "event", "message"} for m in made)
    printed = [m for m in made if m["event"] == "output"]
    assert [m["message"] for m in printed] == ["plain", "and more", "Traceback", '{"time": broken', "the end"]
    assert printed[2] | {"instance": "D1", "pid": "13", "ip": "10.0.0.1", "level": "warning"} == printed[2]
    of_instance, task, thread_ended = (m for m in made if m not in printed)
    assert of_instance | {"instance": "D0", "pid": "12", "logger": "hydrainfer.x", "message": "hello"} == of_instance
    assert task["message"] == "a task failed"
    assert "mine" in thread_ended["message"] and "ZeroDivisionError" in thread_ended["exception"]


@pytest.mark.parametrize(("level", "n"), [("debug", 2), ("info", 1), ("error", 1)])
def test_text(level, n):
    """Probes are seen at debug only; requests whatever the level, unless nobody wants them."""
    with logged(level, "text", access=True) as lines:
        speak()
    requests = [line for line in lines if " id=" in line]
    assert len(requests) == n and "POST /v1/x 200 0.500s id=a run=b" in requests[0]
    assert any("ERROR hydrainfer.cluster.hub: broken" in line for line in lines)
    assert any("INFO hydrainfer.cluster.hub: a thing" in line for line in lines) == (level != "error")
    with logged(level, "text", access=False) as lines:
        speak()
    assert not any(" id=" in line for line in lines)


class FullDisk(io.StringIO):
    def write(self, _):
        raise OSError("no space left on device")


def test_a_log_that_nobody_can_read_ends_nothing(capsys):
    with written_logs("info", "text", access=True, stream=FullDisk()):
        speak()
    assert capsys.readouterr().err == ""


class Rig:
    def __init__(self, every_s=10.0):
        self.now, self.running, self.refused, self.state = 0.0, 0, 0, "alive"
        self.recorder = PrometheusRecorder("m", self.instances)
        waiting = lambda: QueueStats({}, {"text": self.refused})  # noqa: E731
        self.stats = StatsLine(self.instances, self.recorder, waiting, every_s, lambda: self.now)

    def instances(self):
        stats = InstanceStats("EPD", 2, self.running, 0, 0, self.running, {"kv": (100, 25, 0)}, 0, 0, 0, 0, 0.0)
        return [InstanceInfo("EPD0", "EPD", self.state, stats=stats if self.running else None)]

    def answer(self, id, n):
        at = self.now
        for kind, at_s, fields in (
            (EventKind.ARRIVED, at, {"n": 100}),
            *((EventKind.TOKEN, at + 0.5 + 0.1 * i, {}) for i in range(n)),
            (EventKind.FINISHED, at + 2, {"detail": "stop"}),
        ):
            self.recorder.record(LifecycleEvent(id, kind, at_s, **fields))

    def after(self, seconds, caplog):
        caplog.clear()
        self.now += seconds
        self.stats.tick()
        return [r.getMessage() for r in caplog.records]


def test_the_stats_line_speaks_while_there_is_load(caplog):
    caplog.set_level(logging.INFO, "hydrainfer.stats")
    rig = Rig()
    assert rig.after(60, caplog) == []
    rig.running = 3
    rig.answer("a", 20)
    assert rig.after(5, caplog) == []
    assert rig.after(5, caplog) == [
        "3 running, 2 waiting; 10 prompt and 2 answer tokens/s; 1 ended (median TTFT 0.5 s, TPOT 100 ms); KV 25 %"
    ]
    rig.running, rig.refused, rig.state = 0, 4, "dead"
    (last,) = rig.after(10, caplog)
    assert "0 running" in last and "4 refused" in last and "EPD0 is dead" in last and "0 ended;" in last
    assert rig.after(10, caplog) == []


def test_never(caplog):
    caplog.set_level(logging.INFO, "hydrainfer.stats")
    rig = Rig(every_s=0.0)
    rig.answer("a", 20)
    assert rig.after(99, caplog) == []


def test_what_is_printed_becomes_lines_of_the_log(caplog):
    """Whole lines of each thread; of a progress bar the last state; bytes, too; and no more than fits in memory."""
    caplog.set_level(logging.INFO, logger="hydrainfer.output")
    out = LoggedOutput(sys.stdout, logging.INFO)
    out.write("one\ntw")
    other = threading.Thread(target=out.write, args=("between\n",))
    other.start()
    other.join()
    out.write("o\n")
    for percent in range(100):
        out.write(f"\r{percent} %")
    out.write("\n")
    out.buffer.write("bytes é\n".encode())
    out.write("x" * (1 << 18))
    out.end()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:5] == ["one", "between", "two", "99 %", "bytes é"]
    assert len(lines) == 6 and len(lines[5]) == 1 << 16
