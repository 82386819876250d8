"""A store in a server of Redis's protocol: what comes back is what was written, whatever the server does."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import fakeredis
import pytest

from hydrainfer.stores import StoreError, StoreFull, resp_tools
from hydrainfer.stores.address import PASSWORD
from hydrainfer.stores.port import Root
from hydrainfer.stores.resp import RespStore
from hydrainfer.stores.resp_values import HEADER_BYTES, VALUE_BYTES, block_key, pack, value_keys
from tests.stores.resp_server import (
    ROOT,
    SERVER,
    answering,
    at,
    block_of,
    fails,
    free_port,
    got,
    name_of,
    put,
    running,
)

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

BIG = 2 * VALUE_BYTES + 1000
ONE, TWO = name_of(1), name_of(2)
KEY = block_key(ROOT, ONE)
SECRET = "s3cret-Pa55word"


class Fake:
    """A server in this process. `data`: a client of it for the test."""

    def __init__(self):
        self.connect = partial(fakeredis.FakeRedis, server=fakeredis.FakeServer(server_type="redis"))
        self.data = self.connect()

    def open(self, options="", root=ROOT):
        return RespStore(f"redis://host{options}", root, {}, self.connect)


@pytest.fixture
def fake():
    return Fake()


SIZES = (0, 1, 5000, VALUE_BYTES - HEADER_BYTES, VALUE_BYTES - HEADER_BYTES + 1, VALUE_BYTES, BIG)


@pytest.mark.parametrize("n_bytes", SIZES)
def test_blocks_come_back_in_another_store(fake, n_bytes):
    names = [ONE, name_of(2, "images"), name_of(3)]
    assert put(fake.open(), names, n_bytes) == 3
    other = fake.open()
    assert other.has([*names, name_of(4)]) == [True, True, True, False]
    assert got(other, [name_of(4), *names], n_bytes) == [False, True, True, True]
    assert other.touch([name_of(4), *names]) == [False, True, True, True]
    assert not other.counts
    assert max(fake.data.strlen(key) for key in fake.data.keys("*")) <= VALUE_BYTES


def test_more_than_a_batch_and_buffers_of_other_types(fake):
    names = [name_of(i) for i in range(12)]
    numbers = memoryview(bytearray(BIG // 8 * 8)).cast("Q").toreadonly()
    assert fake.open().write(names, [numbers] * 12) == 12
    into = [memoryview(bytearray(b"x" * numbers.nbytes)).cast("Q") for _ in names]
    assert fake.open().read(names, into) == [True] * 12
    assert all(buffer == numbers for buffer in into)


def test_models_do_not_see_each_others_blocks(fake):
    put(fake.open(), [ONE])
    other = fake.open(root=Root(b"s" * 16, {}))
    assert other.has([ONE, ONE._replace(kind="images")]) == [False, False]
    assert got(other, [ONE]) == [False]


def test_nothing_asked_is_nothing_answered(fake):
    store = fake.open()
    assert (store.has([]), store.read([], []), store.write([], []), store.touch([])) == ([], [], 0, [])


def test_what_is_there_is_not_written_again_and_counts_as_written(fake):
    store, asked = fake.open(), []
    put(store, [ONE, name_of(3)])
    names = [ONE, TWO, name_of(3), name_of(4)]
    blocks = [block_of(name.number, 1000) for name in names]

    def wanted():
        asked.append(len(fake.data.keys("*kv*")))
        return len(asked) < 2

    assert store.write(names, blocks, wanted) == 3
    assert len(asked) == 2
    assert store.has(names) == [True, True, True, False]


def test_nothing_more_is_written_once_it_is_not_wanted(fake):
    store = fake.open()
    answers = iter([True, False, True, True])
    assert store.write([ONE, TWO, name_of(3)], [block_of(i, 10) for i in (1, 2, 3)], lambda: next(answers)) == 1
    assert store.has([ONE, TWO, name_of(3)]) == [True, False, False]
    assert next(answers) is True


def damaged(n_bytes, change):
    values = [bytes(value) for value in pack(KEY, block_of(1, n_bytes))]
    change(values)
    return values


def flip(i, at_byte):
    def change(values):
        value = bytearray(values[i])
        value[at_byte] ^= 0x40
        values[i] = bytes(value)

    return change


def replace(i, by):
    def change(values):
        values[i] = by(values[i])

    return change


DAMAGES = {
    "empty": (1000, replace(0, lambda value: b"")),
    "a header cut": (1000, replace(0, lambda value: value[: HEADER_BYTES - 1])),
    "a header alone": (1000, replace(0, lambda value: value[:HEADER_BYTES])),
    "cut by a byte": (1000, replace(0, lambda value: value[:-1])),
    "a byte too many": (1000, replace(0, lambda value: value + b"x")),
    "other data": (1000, replace(0, lambda value: b"hello")),
    "zeros": (1000, replace(0, lambda value: bytes(len(value)))),
    "of another size": (1000, replace(0, lambda value: b"".join(pack(KEY, block_of(1, 999))))),
    "of another name": (1000, replace(0, lambda value: b"".join(pack(KEY + "0", block_of(1, 1000))))),
    **{f"byte {i} flipped": (1000, flip(0, i)) for i in (0, 7, 8, 11, 12, 16, 19, 20, 500, -1)},
    "the last part flipped": (BIG, flip(2, 5)),
    "the middle part cut": (BIG, replace(1, lambda value: value[:-1])),
    "the middle part empty": (BIG, replace(1, lambda value: b"")),
    "parts exchanged": (BIG, replace(slice(1, 3), lambda values: values[::-1])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_block_is_a_miss_and_removed(fake, damage):
    n_bytes, change = DAMAGES[damage]
    values = damaged(n_bytes, change)
    fake.data.mset(dict(zip(value_keys(KEY, len(values)), values, strict=True)))
    store = fake.open()
    put(store, [TWO], n_bytes)
    assert got(store, [TWO, ONE, TWO], n_bytes) == [True, False, True]
    assert store.counts == {"corrupt": 1}
    assert not fake.data.keys(f"{KEY}*")
    assert put(store, [ONE], n_bytes) == 1
    assert got(store, [ONE], n_bytes) == [True]


def test_a_key_that_holds_no_bytes_is_a_miss_and_removed(fake):
    fake.data.rpush(KEY, "x")
    store = fake.open()
    assert store.has([ONE]) == [False]
    assert got(store, [ONE]) == [False]
    assert store.counts == {"corrupt": 1}
    assert not fake.data.exists(KEY)
    fake.data.rpush(KEY, "x")
    assert put(store, [ONE]) == 1
    assert got(store, [ONE]) == [True]


@pytest.mark.parametrize("i", range(3))
def test_a_block_of_two_writers_parts_is_a_miss(fake, i):
    mine, theirs = pack(KEY, block_of(1, BIG)), pack(KEY, block_of(2, BIG))
    values = [theirs[k] if k == i else mine[k] for k in range(3)]
    fake.data.mset(dict(zip(value_keys(KEY, 3), map(bytes, values), strict=True)))
    store = fake.open()
    assert got(store, [ONE], BIG) == [False]
    assert store.counts == {"corrupt": 1}


@pytest.mark.parametrize("i", range(3))
def test_a_block_that_lost_a_part_is_absent_and_written_again(fake, i):
    store = fake.open()
    put(store, [ONE], BIG)
    fake.data.delete(value_keys(KEY, 3)[i])
    assert store.has([ONE]) == store.touch([ONE]) == got(store, [ONE], BIG) == [False]
    assert store.counts["corrupt"] == 0
    assert put(store, [ONE], BIG) == 1
    assert got(store, [ONE], BIG) == [True]


def test_blocks_have_a_time_to_live_that_uses_renew(fake):
    store = fake.open("?ttl_s=100")
    put(store, [ONE, TWO], BIG)
    keys = [*value_keys(KEY, 3), f"hydrainfer:{ROOT.digest.hex()}:about"]
    assert all(90 < fake.data.ttl(key) <= 100 for key in keys)
    for use in (store.touch, lambda names: [put(store, names, BIG) == 1]):
        for key in keys[:3]:
            fake.data.expire(key, 5)
        assert use([ONE]) == [True]
        assert all(fake.data.ttl(key) > 90 for key in keys[:3])
    fake.data.delete(KEY)
    assert store.touch([ONE, TWO]) == [False, True]


def test_without_a_time_to_live_blocks_stay(fake):
    store = fake.open()
    put(store, [ONE])
    store.touch([ONE])
    assert fake.data.ttl(KEY) == -1


def test_threads_share_a_store(fake):
    store = fake.open()

    def work(k):
        names = [name_of(i) for i in range(k, k + 10)]
        for _ in range(5):
            put(store, names)
            assert got(store, names) == [True] * 10
            assert store.touch(names) == store.has(names) == [True] * 10

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(0, 30, 5)))
    assert not store.counts


# ---- what people ask


def test_the_tools_see_all_models_and_nothing_else(fake):
    put(fake.open(), [ONE, TWO], BIG)
    put(fake.open(), [name_of(3, "images")])
    put(fake.open(root=Root(b"s" * 16, {})), [ONE])
    fake.data.mset({"hydrainfer:mine": "x", "other": "y"})
    contents = fake.open().contents()
    assert (contents.n_blocks, contents.limit_bytes) == (3 + 3 + 1 + 1 + 2 + 2, None)
    tools = ("redis://host", {}, fake.connect)
    images, kv, other = resp_tools.summary(*tools)
    assert (kv.about, kv.kind, kv.n_blocks, kv.n_bytes) == (ROOT.about, "kv", 2, 2 * (BIG + HEADER_BYTES))
    assert (images.about, images.kind, images.n_blocks) == (ROOT.about, "images", 1)
    assert (other.about, other.n_blocks) == ({}, 1)
    fake.data.setrange(f"{KEY}:1", 77, b"x")
    assert resp_tools.check(*tools) == (3, 1)
    assert resp_tools.check(*tools) == (3, 0)
    assert resp_tools.clear(*tools) == (3, BIG + 2 * 1000 + 3 * HEADER_BYTES)
    assert sorted(fake.data.keys()) == [b"hydrainfer:mine", b"other"]
    assert resp_tools.summary(*tools) == []


def test_the_tools_say_why_they_fail():
    url = f"redis://127.0.0.1:{free_port()}"
    for tool in (resp_tools.summary, resp_tools.check, resp_tools.clear):
        with pytest.raises(StoreError, match="Connection refused"):
            tool(url, {})
    with answering(lambda command: b"$2\r\nno\r\n") as port, pytest.raises(StoreError, match="does not answer"):
        resp_tools.summary(f"redis://127.0.0.1:{port}", {})


# ---- a real server

real = pytest.mark.skipif(SERVER is None, reason="no redis-server or valkey-server is installed")


@real
def test_a_real_server_that_evicts_dies_and_comes_back(tmp_path):
    port, names = free_port(), [name_of(i) for i in range(40)]
    options = ("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru", "--requirepass", SECRET)
    store = at(port, {PASSWORD: SECRET}, timeout_ms=5000)
    with running(tmp_path, port, *options):
        assert put(store, names[:4], BIG) == 4
        assert got(store, names[:4], BIG) == [True] * 4
        put(store, names, BIG)
        arrived = got(store, names, BIG)  # also checks the bytes
        assert 0 < sum(arrived) < 12
        assert store.counts["corrupt"] == 0
        contents = store.contents()
        assert contents.limit_bytes == 24 << 20
        assert contents.n_bytes > 0
        assert PASSWORD in fails(at(port))
        assert "wrong" in fails(at(port, {PASSWORD: "other"}))
        assert "database 99" in fails(RespStore(f"redis://127.0.0.1:{port}/99", ROOT, {PASSWORD: SECRET}))
    with pytest.raises(StoreError):
        store.has(names)
    with running(tmp_path, port, *options):
        assert store.has(names) == [False] * 40
        assert put(store, names[:2], BIG) == 2
        assert got(store, names[:3], BIG) == [True, True, False]
        tools = (f"redis://127.0.0.1:{port}", {PASSWORD: SECRET})
        assert resp_tools.check(*tools) == (2, 0)
        assert resp_tools.clear(*tools)[0] == 2


@real
def test_a_real_server_that_is_full_can_be_read(tmp_path):
    port, names = free_port(), [name_of(i) for i in range(20)]
    with running(tmp_path, port, "--maxmemory", "16mb"):
        store = at(port, timeout_ms=5000)
        assert put(store, names[:3], BIG) == 3
        with pytest.raises(StoreFull, match="maxmemory"):
            put(store, names, BIG)
        there = store.has(names)
        assert there == [True] * there.count(True) + [False] * there.count(False)
        assert got(store, names, BIG) == there
        store.close()
