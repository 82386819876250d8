"""The places of a store: what may be written, what each mistake is answered with, and what is opened."""

import os
from pathlib import Path

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.stores import StoreError
from hydrainfer.stores.address import PASSWORD, FolderAddress, ServerAddress
from hydrainfer.stores.places import open_places, parse_places
from hydrainfer.stores.resp import RespStore
from hydrainfer.stores.several import SeveralStores
from tests.stores.resp_server import ROOT, free_port, name_of

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

GIB = 1 << 30


def address(text):
    (place,) = parse_places(text)
    return place.address


FOLDERS = {
    "dir:/data/kv": ("/data/kv", 16 * GIB),
    "dir:/data/kv?gib=50": ("/data/kv", 50 * GIB),
    "dir:/data/kv/../other/?gib=0.5": ("/data/other", GIB // 2),
    "dir:///data/kv?gib=1e2": ("/data/kv", 100 * GIB),
    "DIR:/a b@c/%20": ("/a b@c/%20", 16 * GIB),
    "dir:here": (f"{os.getcwd()}/here", 16 * GIB),
    "dir:~/kv": (str(Path.home() / "kv"), 16 * GIB),
}


@pytest.mark.parametrize("text", FOLDERS)
def test_folders(text):
    path, limit_bytes = FOLDERS[text]
    assert address(text) == FolderAddress(Path(path), limit_bytes)


SERVERS = {
    "redis://host": ("redis://host:6379", ServerAddress("host", 6379, 0, False, None, 1000)),
    "redis://Host:7000/": ("redis://host:7000", ServerAddress("host", 7000, 0, False, None, 1000)),
    "rediss://a.b-c_d:7/2": ("rediss://a.b-c_d:7/2", ServerAddress("a.b-c_d", 7, 2, True, None, 1000)),
    "redis://10.0.0.1/0?ttl_s=60": ("redis://10.0.0.1:6379", ServerAddress("10.0.0.1", 6379, 0, False, 60, 1000)),
    "redis://[::1]:7?timeout_ms=5&ttl_s=1": ("redis://[::1]:7", ServerAddress("::1", 7, 0, False, 1, 5)),
}


@pytest.mark.parametrize("text", SERVERS)
def test_servers(text):
    (place,) = parse_places(f" {text} ")
    assert (place.name, place.address) == SERVERS[text]
    assert place.text == text
    assert RespStore(text, ROOT, {}).place == place.name


def test_several_places_keep_their_order():
    places = parse_places("redis://b, dir:/x?gib=1 ,redis://a")
    assert [place.name for place in places] == ["redis://b:6379", "dir:/x", "redis://a:6379"]


MISTAKES = {
    "": "begins with dir:",
    "/data/kv": "dir:/path",
    "dir:/a,/b": "begins with dir:",
    "redis://a,": "begins with dir:",
    "http://host": "redis://",
    "dir:": "needs a path",
    "dir:?gib=5": "needs a path",
    "dir:/x\0y": "zero byte",
    "dir:/x?gb=5": "the options are gib",
    "dir:/x?gib": "positive",
    "dir:/x?gib=": "positive",
    "dir:/x?gib=much": "positive",
    "dir:/x?gib=0": "positive",
    "dir:/x?gib=-1": "positive",
    "dir:/x?gib=nan": "positive",
    "dir:/x?gib=inf": "positive",
    "dir:/x?gib=1&gib=2": "twice",
    "dir:~nobody-of-this-name/x": "whole path",
    "redis:host": "redis://host:6379",
    "redis://": "redis://host:6379",
    "redis://:6379": "redis://host:6379",
    "redis://host:port": "redis://host:6379",
    "redis://host:0": "redis://host:6379",
    "redis://host:70000": "redis://host:6379",
    "redis://[::1": "redis://host:6379",
    "redis://ho st": "redis://host:6379",
    "redis://host/db": "number of a database",
    "redis://host/1/2": "number of a database",
    "redis://host#1": "number of a database",
    "redis://host?gib=5": "ttl_s and timeout_ms",
    "redis://host?password=x": "ttl_s and timeout_ms",
    "redis://host?ttl_s=0": "ttl_s must be a whole number from 1",
    "redis://host?ttl_s=1.5": "ttl_s must be a whole number from 1",
    "redis://host?ttl_s=-1": "ttl_s must be a whole number from 1",
    "redis://host?ttl_s=99999999999": "ttl_s must be a whole number from 1",
    "redis://host?timeout_ms=": "timeout_ms must be a whole number from 1",
    "redis://host?timeout_ms=700000": "timeout_ms must be a whole number from 1",
    "redis://host?ttl_s=1&ttl_s=2": "twice",
    "redis://host,redis://HOST:6379/0?ttl_s=5": "named twice",
    "dir:/x?gib=1,dir:/y/../x": "named twice",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_answered_in_one_line(text):
    with pytest.raises(ConfigError, match=MISTAKES[text]) as raised:
        parse_places(text)
    assert raised.value.param == "store"
    assert "\n" not in str(raised.value)


PASSWORDS = (
    "redis://:{}@host",
    "redis://user:{}@host:6379",
    "rediss://{}@host",
    "redis://user:{}/x@host",
    "redis://user:{}#?x@host",
    "redis://user:a,{}@host",
    "redis://user:{},b@host",
    "redis://user:{}:70000@host",
    "redi://user:{}@host",
    "dir:/x,redis://user:{}@host",
    "redis://[user:{}@host",
)


@pytest.mark.parametrize("text", PASSWORDS)
def test_a_password_in_an_address_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match=PASSWORD) as raised:
        parse_places(text.format("s3cret"))
    error = raised.value
    while error is not None:
        assert "s3cret" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    "text", ["redis://host:s3cret", "redis://host/s3cret", "redis://host?s3cret", "redis://h#s3cret"]
)
def test_no_text_that_may_be_a_password_is_repeated(text):
    with pytest.raises(ConfigError) as raised:
        parse_places(text)
    error = raised.value
    while error is not None:
        assert "s3cret" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__


def test_a_server_that_is_away_can_be_opened():
    port = free_port()
    store = open_places(parse_places(f"redis://127.0.0.1:{port}"), ROOT, {})
    assert store.place == f"redis://127.0.0.1:{port}"
    with pytest.raises(StoreError):
        store.has([name_of(1)])
    store.close()


def test_a_folder_is_one_store_and_several_places_are_one_store(tmp_path):
    one = open_places(parse_places(f"dir:{tmp_path}/a"), ROOT, {})
    assert one.place == f"dir:{tmp_path}/a"
    assert one.write([name_of(1)], [memoryview(b"block")]) == 1
    several = open_places(parse_places(f"dir:{tmp_path}/a,dir:{tmp_path}/b,redis://nowhere.invalid"), ROOT, {})
    assert isinstance(several, SeveralStores)
    assert several.place == f"dir:{tmp_path}/a,dir:{tmp_path}/b,redis://nowhere.invalid:6379"
    several.close()


def test_a_folder_that_cannot_be_used_is_a_mistake_in_the_configuration(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        open_places(parse_places(f"redis://host,dir:{tmp_path}/file"), ROOT, {})
    assert raised.value.param == "store"
    assert str(tmp_path) in str(raised.value)


def test_without_the_redis_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hydrainfer.stores.places.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hydrainfer\[redis\]"):
        open_places(parse_places("redis://host"), ROOT, {})
