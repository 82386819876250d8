"""The folder of a run: who may look inside, that it and its processes go away however the run ends, and what is said
when there is no room for it."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hydrainfer.cluster import RunFolder
from hydrainfer.cluster.folder import _LONGEST_BASE_RAY, PREFIX
from hydrainfer.core import ConfigError
from tests.cluster.processes import alive
from tests.waiting import wait_until

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(60)]
RUN = """
import os, subprocess, sys
from hydrainfer.cluster import RunFolder
folder = RunFolder()
mark = folder.guard() if "guarded" in sys.argv else {"_HYDRAINFER_RUN": str(folder.path)}
child = lambda **env: subprocess.Popen(["sleep", "60"], env=env, start_new_session=True, stdout=subprocess.DEVNULL).pid
print(folder.path, child(**mark), child(), *([folder._guardian.pid] if folder._guardian else []), flush=True)
sys.stdin.read()
if "orderly" in sys.argv:
    folder.remove()
os._exit(9)
"""


@pytest.fixture
def base(monkeypatch):
    """A temporary directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def run(base):
    """Starts a run with one process that belongs to it and one that does not: folder, both, the guardian if any."""
    strangers = []

    def start(*how):
        process = subprocess.Popen([sys.executable, "-c", RUN, *how], stdin=-1, stdout=-1, text=True)
        folder, *pids = process.stdout.readline().split()
        strangers.append(int(pids[1]))
        return process, Path(folder), *map(int, pids)

    yield start
    assert alive(strangers) == strangers
    for pid in strangers:
        os.kill(pid, signal.SIGKILL)


def ignored(pid):
    """Its signals, as bits."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["SigIgn"], 16)


def wait_gone(pids, folder):
    wait_until(lambda: not (alive(pids) or folder.exists()), say=lambda: (alive(pids), folder))


def test_the_next_run_ends_the_leftovers_of_a_killed_run_and_spares_a_living_one(run):
    living = RunFolder()
    process, dead, member, _ = run()
    assert dead.exists() and dead.stat().st_mode & 0o077 == 0
    assert RunFolder().path.exists() and dead.exists() and alive([member]), "it still runs"
    process.kill()
    process.wait()
    latest = RunFolder()
    assert not dead.exists() and not alive([member])
    for folder in (living, latest):
        assert folder.path.exists()
        folder.remove()
        assert not folder.path.exists()


def test_a_guarded_run_that_is_killed_takes_everything_along(run):
    process, folder, member, _, guardian = run("guarded")
    wanted = sum(1 << sig - 1 for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    while ignored(guardian) & wanted != wanted:
        time.sleep(0.01)  # it is starting
    for sig in (signal.SIGTERM, signal.SIGINT):  # as a service is stopped: all hear of it
        os.kill(guardian, sig)
    time.sleep(0.1)
    assert alive([member, guardian]) == [member, guardian] and folder.exists()
    process.kill()
    process.wait()
    wait_gone([member, guardian], folder)


def test_a_guarded_run_that_ends_leaves_nothing(run):
    process, folder, member, _, guardian = run("guarded", "orderly")
    process.communicate()
    assert process.returncode == 9 and alive([member, guardian]) == [] and not folder.exists()


def test_files_with_secrets_are_readable_by_this_user_alone(base):
    before = os.umask(0)
    folder = RunFolder(for_ray=True)
    os.umask(before)
    token = folder.new_token()
    first = token.read_text()
    assert (folder.path.stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o700, 0o600)
    assert token.is_relative_to(folder.path) and folder.ray.is_relative_to(folder.path)
    assert len(first) == 64 and folder.new_token().read_text() != first
    folder.remove()


def test_a_long_base_is_not_used(tmp_path, monkeypatch):
    base = tmp_path / ("x" * 80)
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    folder = RunFolder()
    assert len(str(folder.path)) < 60
    folder.remove()
    folder = RunFolder(for_ray=True)
    longest = folder.path.name.replace(f"-{os.getpid()}-", "-4194304-")
    sockets = f"session_{'2026-11-22_07-00-34_377634'}_4194304/sockets"
    path = f"{'b' * _LONGEST_BASE_RAY}/{longest}/{folder.ray.name}/{sockets}/plasma_store"
    assert len(path) == 107, "the longest that a socket's address may be"
    folder.remove()


@pytest.mark.parametrize("for_ray", [False, True])
def test_a_full_temporary_directory_is_named(base, monkeypatch, for_ray):
    with suppress(OSError), full(base):
        check_full(base, for_ray)
        return

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)  # nothing may be mounted here
    check_full(base, for_ray)


class full:
    """A file system with little room."""

    def __init__(self, at):
        self.at = at

    def __enter__(self):
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", self.at]
        if subprocess.run(command, capture_output=True).returncode:
            raise OSError("cannot mount")

    def __exit__(self, *_):
        subprocess.run(["umount", self.at], check=True)


def check_full(base, for_ray):
    with pytest.raises(ConfigError, match=f"temporary directory {base} is full.*TMPDIR"):
        RunFolder(for_ray)
    assert list(base.glob(f"{PREFIX}*")) == []


def test_a_temporary_directory_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    with pytest.raises(ConfigError, match="temporary directory /proc cannot be used"):
        RunFolder()
