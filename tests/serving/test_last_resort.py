"""A server that was told to end does so within `--drain-s` and ten seconds, whatever still runs."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import hydrainfer

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]
SCRIPT = """
import re, sys, threading, time
from hydrainfer import serving
from hydrainfer.assemble import ServerParts
from hydrainfer.config import load
from rich.console import Console

def hang(self):
    {hang}

ServerParts.close = hang
serving.serve_forever(load({{"port": int(sys.argv[1]), "drain_s": 1.0, "threads": 1}}), Console())
"""
HANGS = {"waits": "threading.Event().wait()", "holds the GIL": 're.match("(a+)+b", "a" * 60)'}


@contextmanager
def server(folder, hang):
    """A server's process, and its port."""
    script = folder / f"{hang.replace(' ', '_')}.py"
    script.write_text(SCRIPT.format(hang=HANGS[hang]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {**os.environ, "PYTHONPATH": str(Path(hydrainfer.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, str(script), str(port)], env=here)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def wait_for(process, port):
    until_s = time.monotonic() + 120.0
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
            return
        except OSError:
            assert time.monotonic() < until_s and process.poll() is None
            time.sleep(0.1)


def test_servers_that_do_not_end_are_ended_by_force(tmp_path):
    """Both at once, since each takes the whole time that a server has to end."""
    with ExitStack() as stack:
        servers = [stack.enter_context(server(tmp_path, hang)) for hang in HANGS]
        for process, port in servers:
            wait_for(process, port)
        told_s = []
        for process, _ in servers:
            told_s.append(time.monotonic())
            process.terminate()
        for (process, _), begin_s in zip(servers, told_s):
            assert process.wait(30) == -signal.SIGALRM
            assert 1.0 < time.monotonic() - begin_s < 11.0
