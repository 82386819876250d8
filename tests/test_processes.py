"""Processes that compute end with the one they compute for, quietly."""

import os
import signal
import subprocess
import sys

import pytest

from hydrainfer.workload.deployments import all_stats
from tests.waiting import wait_until

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]
SCRIPT = """
import time
from hydrainfer.processes import processes

if __name__ == "__main__":
    with processes(2) as pool:
        future = [pool.submit(time.sleep, 300) for _ in range(4)][0]
        print("ready", flush=True)
        future.result()
"""


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_said_and_nothing_is_left(tmp_path, sig):
    """Ctrl-C goes to all, SIGTERM and SIGKILL to the first only."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "ready\n"
    (os.killpg if sig == signal.SIGINT else os.kill)(process.pid, sig)
    _, said = process.communicate()  # once nobody has the pipe any more
    assert said.count("Traceback") == (sig == signal.SIGINT) and "Process" not in said  # its own

    def left():
        return [pid for pid, stat in all_stats() if int(stat[3]) == process.pid and stat[0] != "Z"]

    wait_until(lambda: not left(), say=left)
