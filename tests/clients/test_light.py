"""The checks of clients that this environment has; the others are in `make test-clients`, each in one of its own."""

import os
import subprocess
import sys

import pytest

from tests.clients.__main__ import CHECKS, LIGHT, servers

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def variables():
    with servers() as found:
        yield found


@pytest.mark.parametrize("name", LIGHT)
def test_client(variables, name):
    pytest.importorskip(name)
    script, _ = LIGHT[name]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "PROXY" not in k.upper()}
    run = subprocess.run(
        [sys.executable, str(CHECKS / script)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | variables,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and lines and all(line.startswith("ok ") for line in lines), run.stdout + run.stderr
