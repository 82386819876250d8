"""What people may do with places, in folders and servers alike, and trials of a store."""

import errno
import os
from contextlib import closing, contextmanager
from threading import Thread

import msgspec
import pytest
from fakeredis import TcpFakeServer

from hydrainfer.config import ServeConfig, read_layout
from hydrainfer.core import ConfigError
from hydrainfer.stores import (
    TRIAL_KIND,
    Root,
    StoreFull,
    check_folder,
    check_stores,
    open_places,
    parse_places,
    remove_trial,
    tools_of,
    try_out,
)
from hydrainfer.stores.resp_client import RespClient
from hydrainfer.stores.resp_tools import _idle_s
from tests.stores.folders import is_exact
from tests.stores.resp_server import ROOT, name_of, put
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]
TRIAL = Root(bytes(16), {"model": "trial"})


@contextmanager
def fake_server():
    server = TcpFakeServer(("127.0.0.1", 0))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}?timeout_ms=5000"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


@pytest.fixture(params=["dir", "redis"])
def place(request, tmp_path):
    if request.param == "dir":
        yield parse_places(f"dir:{tmp_path}/blocks?gib=0.1")[0]
        return
    with fake_server() as url:
        yield parse_places(url)[0]


def test_the_same_tools_for_folders_and_servers(place):
    with closing(open_places([place], ROOT, {})) as store:
        assert put(store, [name_of(i) for i in range(5)] + [name_of(9, "embed")]) == 6
        tools = tools_of(place, {})
        rows = {row.kind: row for row in tools.summary()}
        assert {kind: (row.about, row.n_blocks) for kind, row in rows.items()} == {
            "kv": (ROOT.about, 5),
            "embed": (ROOT.about, 1),
        }
        assert all(row.n_bytes >= 1000 * row.n_blocks for row in rows.values())
        assert tools.contents().n_blocks >= 6
        assert tools.check() == (6, 0)
        assert tools.clear()[0] == 6
        assert tools.summary() == [] and not any(store.has([name_of(1)]))


def test_a_trial_says_how_fast_a_store_is_and_leaves_nothing_if_it_is_removed(place):
    with closing(open_places([place], TRIAL, {})) as store:
        assert try_out(store).byte_s > 0
        ((about, kind, n_blocks, *_),) = tools_of(place, {}).summary()
        assert (about, kind, n_blocks) == (TRIAL.about, TRIAL_KIND, 8)
        assert try_out(store).full == ""
        remove_trial(store)
        assert tools_of(place, {}).summary() == []


def test_every_place_of_a_store_takes_part_in_a_trial(tmp_path):
    places = parse_places(f"dir:{tmp_path}/a?gib=0.1,dir:{tmp_path}/b?gib=0.1")
    with closing(open_places(places, TRIAL, {})) as store:
        assert try_out(store).byte_s > 0
    assert [tools_of(place).summary()[0].n_blocks > 0 for place in places] == [True, True]


def test_a_trial_of_a_store_that_takes_no_blocks(tmp_path, monkeypatch):
    (place,) = parse_places(f"dir:{tmp_path}/a?gib=0.1")
    with closing(open_places([place], TRIAL, {})) as store:
        monkeypatch.setattr(store, "write", full)
        assert try_out(store) == (0.0, "no room")
        monkeypatch.undo()
        try_out(store)
        monkeypatch.setattr(store, "write", full)
        trial = try_out(store)
    assert trial.byte_s > 0, "what an earlier trial wrote is read"
    assert trial.full == "no room"


def full(*_):
    raise StoreFull("no room")


def test_a_server_that_does_not_say_ages(monkeypatch):
    """The fake one does not know the command. A real one says them unless it counts uses."""
    with fake_server() as url, closing(open_places(parse_places(url), ROOT, {})) as store:
        put(store, [name_of(1)])
        (row,) = tools_of(parse_places(url)[0], {}).summary()
        assert (row.oldest_s, row.newest_s) == (None, None)
        monkeypatch.setattr("hydrainfer.stores.resp_tools._idle_s", lambda _, keys: [7] * len(keys))
        put(store, [name_of(2)])
        (row,) = tools_of(parse_places(url)[0], {}).summary()
        assert (row.oldest_s, row.newest_s) == (7, 7)
    address = parse_places(url)[0].address
    assert _idle_s(RespClient(address, {}), ["a", "b"]) == [None, None]


# ---- before anything is loaded


def config_of(**options):
    return ServeConfig(model="builtin", **options)


def test_a_folder_is_made_and_written_to_and_nothing_is_left(tmp_path):
    (place,) = parse_places(f"dir:{tmp_path}/new/blocks")
    check_folder(place)
    check_folder(place)
    folder = place.address.path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {"hydrainfer.lock", "writing"}
    with closing(open_places([place], ROOT)) as store:
        assert is_exact(store, folder)


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(folder, monkeypatch):
    monkeypatch.setattr(os, "pwritev", no_space)
    return "No space left on device"


def folder_of_another_user(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    return "belongs to another user"


def file_in_its_place(folder, monkeypatch):
    folder.touch()
    return "no folder"


def folder_that_is_not_writable(folder, monkeypatch):
    folder.mkdir()
    real = os.open

    def refuse(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    return "Permission denied"


FAULTS = [full_disk, folder_of_another_user, file_in_its_place, folder_that_is_not_writable]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("own", [False, True])
def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path, monkeypatch, fault, own):
    """`own`: it is the store of one instance alone."""
    folder = tmp_path / "blocks"
    (tmp_path / "layout.yaml").write_text(f"instances: [{{role: EP}}, {{role: D, store: 'dir:{folder}'}}]")
    specs, config = read_layout("1EPD"), config_of(store=f"dir:{folder}?gib=1")
    if own:
        specs, config = read_layout(str(tmp_path / "layout.yaml")), config_of()
    text = fault(folder, monkeypatch)
    with pytest.raises(ConfigError, match=rf"^dir:{folder}: {text}$") as raised:
        check_stores(config, specs)
    assert raised.value.param == "store"
    check_stores(msgspec.structs.replace(config, ray_address="10.0.0.1:6379"), specs)  # it is a folder of others


def test_what_was_tried_on_a_full_disk_is_not_counted(tmp_path, monkeypatch):
    (place,) = parse_places(f"dir:{tmp_path}/blocks")
    with closing(open_places([place], ROOT)) as store:
        put(store, [name_of(1)])
        full_disk(tmp_path, monkeypatch)
        with pytest.raises(ConfigError):
            check_folder(place)
        assert is_exact(store, place.address.path)


@pytest.mark.parametrize(
    ("store", "text"),
    [("dir:/x?gib=ten", "gib must be a positive number"), ("redis://u:s3cret@host", "must not hold a user")],
)
def test_an_address_that_is_wrong_is_an_error_of_each_instance(tmp_path, store, text):
    (tmp_path / "layout.yaml").write_text(f"instances: [{{role: EP}}, {{role: D, store: '{store}'}}]")
    for config, specs in [
        (config_of(store=store), read_layout("1EPD")),
        (config_of(store=store), ()),  # the layout is not known yet
        (config_of(), read_layout(str(tmp_path / "layout.yaml"))),
    ]:
        with pytest.raises(ConfigError, match=text) as raised:
            check_stores(config, specs)
        assert "s3cret" not in raised.value.message


def test_a_server_that_is_away_is_no_error_but_its_package_must_be_there(monkeypatch):
    config = config_of(store="redis://127.0.0.1:1")
    check_stores(config, read_layout("1EPD"))
    monkeypatch.setattr("hydrainfer.stores.places.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hydrainfer\[redis\]"):
        check_stores(config, read_layout("1EPD"))
