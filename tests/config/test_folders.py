"""Where files of a user are kept: in the home, or, where that cannot be written, in a folder nobody else may open."""

import os
import tempfile
from pathlib import Path

import pytest

from hydrainfer.config import cache_folder

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
