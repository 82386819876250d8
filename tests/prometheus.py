"""A Prometheus of the machine, for tests; those that need it are skipped where there is none."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.waiting import PATIENCE_S, wait_until


def installed(name: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    return path


class Prometheus:
    """A Prometheus that runs with a configuration, until the end of the block."""

    def __init__(self, folder: Path, config: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.log = folder / "prometheus.log"
        command = [
            installed("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)

    def __enter__(self) -> Prometheus:
        wait_until(self._is_ready, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def query(self, question: str) -> list[dict]:
        """The series of the answer to an instant query."""
        answer = self.http.get("/api/v1/query", params={"query": question}).json()
        assert answer["status"] == "success", (question, answer)
        return answer["data"]["result"]

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False
