"""A soak of a few seconds: everything but the kills, which `tests/cluster` has."""

import asyncio
import os
import signal
import sys
import threading

import pytest
from rich.console import Console

from benchmarks.b10_random_kills import Killer, left_behind
from benchmarks.b29_soak import arguments, experiment, report, violations
from benchmarks.servers import Server

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]


def test_nothing_is_lost_or_left():
    short = "--minutes 0.06 --layout 1EP1D --launcher inproc --kill-s 0 --burst 60 --burst-s 2 --sample-s 1 --rate 6"
    results = asyncio.run(experiment(arguments(short.split()), Console(quiet=True)))
    summary = results["summary"]
    assert not violations(summary), violations(summary)
    assert summary["requests"] > 40 and summary["verdicts"]["text"]["answered"]
    assert "nothing is lost or left behind" in report(summary, results["command"])


def test_a_pid_that_another_process_or_thread_has_got_is_not_left(tmp_path):
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a background job ignore it
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)  # or a failure would keep the test run from ending
    thread.start()
    with (
        Server("stays", waiting, 1, tmp_path / "stays", dict(os.environ)) as stays,
        Server("ends", waiting, 2, tmp_path / "ends", dict(os.environ)) as ends,
    ):
        signal.signal(signal.SIGINT, usual)
        killer = Killer(ends, arguments([]))
        killer.family |= ends.family() | stays.family()
        stat = killer.family[stays.pid]
        killer.family[os.getpid()] = [*stat[:19], str(int(stat[19]) - 1), *stat[20:]]  # began before this process
        killer.family[thread.native_id] = stat
        assert left_behind(ends, killer)["processes"] == [str(stays.pid)]
    stop.set()
    thread.join()
