"""The store of an instance: a fault of it ends the start in one line, before weights are read. A disk that fills up
later does not keep an instance from starting again."""

import errno
import os

import pytest

from hydrainfer.assemble import engine, server, start_instance, store
from hydrainfer.config import ServeConfig
from hydrainfer.core import CheckpointError, ConfigError
from hydrainfer.stores.files import FileStore

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(60)]
EMULATED = {"device": "emulated", "cost_model": "configs/costs/fast.yaml", "launcher": "inproc", "media_workers": 0}


def config_of(place, layout="1EPD"):
    return ServeConfig(model="builtin", layout=layout, store=place, **EMULATED)


@pytest.fixture
def unchecked(monkeypatch):
    """As in an instance that is started again, or on another machine."""
    monkeypatch.setattr(server, "check_stores", lambda *_: None)


@pytest.mark.parametrize(("place", "text"), [("dir:/x?gib=ten", "gib must be"), ("dir:{}/file", "no folder")])
def test_a_store_is_checked_before_the_model_is_read(tmp_path, monkeypatch, place, text):
    (tmp_path / "file").touch()
    monkeypatch.setattr(server, "parse_config", None)
    with pytest.raises(ConfigError, match=text):
        start_instance(config_of(place.format(tmp_path)))


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_what_only_an_instance_finds_out_is_one_line_too(tmp_path, unchecked, layout):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as raised:
        start_instance(config_of(f"dir:{tmp_path}/file", layout))
    assert raised.value.message == f"dir:{tmp_path}/file: no folder"


def real(place):
    return ServeConfig(model="builtin", layout="1EPD", store=place, launcher="inproc", media_workers=0, threads=1)


def test_an_instance_looks_at_its_store_before_it_reads_weights(tmp_path, unchecked, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(engine, "load_for", None)
    monkeypatch.setattr(store, "whole_fingerprint", None)
    with pytest.raises(ConfigError, match="file: no folder"):
        start_instance(real(f"dir:{tmp_path}/file"))


def test_a_store_is_closed_if_the_weights_cannot_be_loaded(tmp_path, monkeypatch):
    def broken(*_):
        raise CheckpointError("no weights")

    closed = []
    monkeypatch.setattr(engine, "load_for", broken)
    monkeypatch.setattr(FileStore, "close", lambda one: closed.append(one.place))
    with pytest.raises(CheckpointError, match="no weights"):
        start_instance(real(f"dir:{tmp_path}/blocks"))
    assert closed == [f"dir:{tmp_path}/blocks"]


@pytest.mark.parametrize("layout", ["1EPD", "1E1P1D"])
def test_an_instance_starts_again_on_a_disk_that_has_filled_up(tmp_path, unchecked, monkeypatch, caplog, layout):
    config = config_of(f"dir:{tmp_path}/blocks", layout)
    start_instance(config).close()

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for file in (tmp_path / "blocks").rglob("*-probe"):
        file.unlink()
    monkeypatch.setattr(os, "pwritev", no_space)
    parts = start_instance(config)
    try:
        assert f"dir:{tmp_path}/blocks: " in parts.facts["store"]
    finally:
        parts.close()
    assert "No space left on device; nothing is written to the store until there is room" in caplog.text


def test_a_server_that_is_away_is_tried_again_later(caplog):
    parts = start_instance(config_of("redis://127.0.0.1:1"))
    try:
        assert parts.facts["store"] == "redis://127.0.0.1:1, not reached"
    finally:
        parts.close()
    assert "Connection refused; the server starts without it and tries again" in caplog.text
