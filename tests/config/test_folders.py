"""Where files of a user are kept: in the home, or, where that cannot be written, in a folder nobody else may open."""

import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest

from hydrainfer.config import cache_folder, keep, locked
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, and an empty temporary directory."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_home_or_what_the_environment_names(home, monkeypatch):
    assert cache_folder() == home / ".cache" / "hydrainfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "other"))
    assert cache_folder() == home / "other" / "hydrainfer"


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("what", ["read-only", "none"])
def test_without_a_home_to_write_to_a_private_one(home, monkeypatch, what):
    monkeypatch.setenv("HOME", "/proc")  # where not even root may make a folder
    if what == "none":
        monkeypatch.setattr(Path, "home", no_home)
    folder = cache_folder()
    assert folder.parent == home / "tmp" and folder.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == folder, "so that kernels are built once"


@pytest.mark.parametrize("how", ["open", "link"])
def test_a_folder_that_other_users_may_have_filled_is_not_used(home, monkeypatch, how):
    monkeypatch.setenv("HOME", "/proc")
    foreign = home / "tmp" / f"hydrainfer.cache-{os.getuid()}"
    if how == "open":
        foreign.mkdir()
        foreign.chmod(0o777)
    else:
        (home / "theirs").mkdir(mode=0o700)
        foreign.symlink_to(home / "theirs")
    folder = cache_folder()
    assert folder != foreign and folder.stat().st_mode & 0o777 == 0o700


def test_a_file_is_replaced_at_once_or_stays(tmp_path, monkeypatch):
    file = tmp_path / "file"
    keep(file, b"one")
    keep(file, b"other")
    assert file.read_bytes() == b"other"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    keep(file, b"a third")
    assert file.read_bytes() == b"other" and list(tmp_path.iterdir()) == [file]
    keep(tmp_path / "absent" / "file", b"one")


def test_one_at_a_time_is_in_a_lock(tmp_path):
    path, done = tmp_path / "folder" / "file", threading.Event()

    def second():
        with locked(path):
            done.set()

    other = threading.Thread(target=second)
    with locked(path):
        other.start()
        assert not done.wait(0.05)
        with locked(tmp_path / "folder" / "another"):
            pass
    other.join(PATIENCE_S)
    assert done.is_set()
    with locked(path / "no folder" / "file"):
        pass
