"""Sockets of a run: where they are, and that the next run clears away what a killed one left."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hydrainfer.assemble.folder import RunFolder

pytestmark = pytest.mark.cpu


def test_the_folder_of_a_killed_run_is_removed_and_that_of_a_living_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path) if len(str(tmp_path)) <= 50 else tempfile.mkdtemp())
    living = RunFolder()
    code = f"import tempfile; tempfile.tempdir = {tempfile.tempdir!r}\n"
    code += (
        "from hydrainfer.assemble.folder import RunFolder\nimport os\nprint(RunFolder().path, flush=True)\nos._exit(9)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    dead = Path(run.stdout.strip())
    assert dead.exists() and dead.stat().st_mode & 0o077 == 0
    latest = RunFolder()
    assert not dead.exists() and living.path.exists() and latest.path.exists()
    for folder in (living, latest):
        folder.remove()
        assert not folder.path.exists()


def test_a_long_base_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    folder = RunFolder()
    assert len(str(folder.path)) < 60
    folder.remove()
