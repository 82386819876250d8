"""A server that was told to end does so within `--drain-s` and ten seconds, whatever still runs."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
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


@pytest.mark.parametrize("hang", HANGS)
def test_a_server_that_does_not_end_is_ended_by_force(tmp_path, hang):
    (tmp_path / "script.py").write_text(SCRIPT.format(hang=HANGS[hang]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {**os.environ, "PYTHONPATH": str(Path(hydrainfer.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(port)], env=here)
    try:
        until_s = time.monotonic() + 120.0
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
                break
            except OSError:
                assert time.monotonic() < until_s and process.poll() is None
                time.sleep(0.1)
        begin_s = time.monotonic()
        process.terminate()
        assert process.wait(30) == -signal.SIGALRM
        assert 1.0 < time.monotonic() - begin_s < 11.0
    finally:
        process.kill()
