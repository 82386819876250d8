"""`hydrainfer serve`, up to where the server starts."""

import errno
import io
import os

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hydrainfer import cli
from hydrainfer.config import load

pytestmark = pytest.mark.cpu


@pytest.fixture
def served(monkeypatch):
    """The configurations that servers were started with."""
    configs = []
    monkeypatch.setattr("hydrainfer.serving.serve_forever", lambda loaded, _: configs.append(loaded.config))
    return configs


def test_a_key_in_vllms_variable_is_the_servers(served):
    for environ in ({"VLLM_API_KEY": "theirs"}, {"VLLM_API_KEY": "theirs", "HYDRAINFER_API_KEY": "ours"}, {}):
        assert CliRunner().invoke(cli.app, ["serve"], env=environ, catch_exceptions=False).exit_code == 0
    assert [config.api_key for config in served] == ["theirs", "ours", None]


def test_a_full_disk_behind_the_console_is_no_reason_not_to_start():
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    loaded = load({"tensor_parallel_size": 1})
    assert loaded.notes
    cli._begin(loaded, Console(file=Full()))
