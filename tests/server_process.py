"""A real server in a process of its own that logs JSON, for tests of what operators put around it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_until


class ServerProcess:
    """`hydrainfer serve ARGS --port 0 --log-format json`, once it is ready. Its output goes to files in `folder`."""

    def __init__(self, folder: Path, *args: object, start_s: float = 120.0) -> None:
        self._files = [folder / "stdout.txt", folder / "stderr.txt"]
        out, err = (path.open("wb") for path in self._files)
        usual = ["--port", "0", "--log-format", "json"]
        command = [sys.executable, "-m", "hydrainfer", "serve", *usual, *map(str, args)]
        with out, err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, "NO_COLOR": "1"})
        wait_until(lambda: self.process.poll() is not None or self.lines_of("ready"), start_s)
        assert self.process.poll() is None, self.texts()

    def texts(self) -> list[str]:
        """What is on stdout and on stderr so far."""
        return [path.read_text() for path in self._files]

    def events(self) -> list[dict]:
        """The log lines of stderr so far."""
        *whole, _ = self.texts()[1].split("\n")
        return [json.loads(line) for line in whole]

    def wait_for(self, event: str, n: int = 1) -> dict:
        """The `n`th line of an event, once it is there."""
        wait_until(lambda: len(self.lines_of(event)) >= n, 60)
        return self.lines_of(event)[n - 1]

    def lines_of(self, event: str) -> list[dict]:
        return [line for line in self.events() if line["event"] == event]

    @property
    def url(self) -> str:
        return self.lines_of("ready")[0]["url"]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """The exit status of the server, which is told to end."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(60)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
