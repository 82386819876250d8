"""Servers that answer slowly, without end or in crumbs: what that costs, and whom."""

import asyncio
import socket
import threading
import time

import pytest
from msgspec.structs import replace

from hydrainfer.core import DeadlineExceeded, MediaError, RequestTooLarge, Unavailable
from hydrainfer.processor import Fetcher, FetchLimits, Wanted
from hydrainfer.processor.fetching import fetch
from hydrainfer.processor.fetching.connection import PieceBudget
from tests.processor.fetching.test_fetch import PICTURE, A, get, refused, shown, slow
from tests.processor.fetching.websites import PUBLIC, ok, resolver, website
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fetchers_closed")]


async def test_an_endless_body_ends_at_the_limit():
    n_sent = 0

    async def endless(_, writer):
        nonlocal n_sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            n_sent += 65536
            await writer.drain()

    async with website({"/x": endless}) as site:
        await refused(RequestTooLarge, "limit of 1000000", site, wanted=Wanted("picture", 1_000_000, 5.0))
    assert n_sent < 40_000_000


@pytest.mark.parametrize("where", ["head", "body", "informational", "silent"])
async def test_a_slow_drip_ends_by_the_total_time(where):
    async def drip(reader, writer):
        if where == "silent":
            await reader.read()
            return
        if where == "body":
            writer.write(ok(b"", length=900))
        while True:
            writer.write({"informational": b"HTTP/1.1 102 Wait\r\n\r\n"}.get(where, b"H"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async with website({"/x": drip}) as site:
        start_s = time.monotonic()
        with pytest.raises((DeadlineExceeded, MediaError)) as e:
            await get(site, wanted=Wanted("picture", 1000, 0.3))
        assert time.monotonic() - start_s < PATIENCE_S
    if where != "head":  # `HHHH…` may be found to be no HTTP before
        assert e.value.code == "media_timeout" and "within 0.3 s" in e.value.message


ENDLESS = {
    "interim answers": b"HTTP/1.1 102 Wait\r\n\r\n",
    "large interim answers": b"HTTP/1.1 102 Wait\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
    "headers": b"A: b\r\n",
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_heads_without_end_are_refused_early(what):
    n_sent = 0

    async def endless(_, writer):
        nonlocal n_sent
        if what == "headers":
            writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(ENDLESS[what] * (1 + 4096 // len(ENDLESS[what])))
            n_sent += 1
            await writer.drain()

    async with website({"/x": endless}) as site:
        await refused(MediaError, "not HTTP", site, wanted=Wanted("picture", 1000, 60.0))
    assert n_sent < 2000  # what the kernel holds between the two


async def test_a_few_interim_answers_are_no_harm():
    async with website({"/x": b"HTTP/1.1 102 Wait\r\n\r\n" * 20 + ok(b"abc")}) as site:
        assert await get(site) == b"abc"


async def test_tiny_chunks_do_not_keep_the_loop(monkeypatch):
    monkeypatch.setattr(PieceBudget, "PER_S", 1e9)  # as quickly as they can be read

    async def tiny(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"1\r\na\r\n" * 20_000)
        await writer.drain()

    async def longest_turn_s():
        longest_s = 0.0

        async def watch():
            nonlocal longest_s
            while True:
                start_s = time.monotonic()
                await asyncio.sleep(0)
                longest_s = max(longest_s, time.monotonic() - start_s)

        async with website({"/x": tiny}) as site:
            watcher = asyncio.ensure_future(watch())
            await asyncio.sleep(0)
            fetcher = Fetcher(FetchLimits(), resolve=resolver([PUBLIC]), network=site.network)
            with pytest.raises(RequestTooLarge):
                await fetcher.get(A, Wanted("picture", 10_000, 20.0), "p")
            watcher.cancel()
        return longest_s

    turns_s = []
    while len(turns_s) < 4 and min(turns_s, default=1.0) >= 0.25:  # a busy machine may stop everybody for a while
        turns_s.append(await longest_turn_s())
    assert min(turns_s) < 0.25, turns_s


async def test_small_pieces_wait_their_turn_and_large_ones_do_not(monkeypatch):
    n_waits, wait = 0, PieceBudget.wait

    async def counted(self):
        nonlocal n_waits
        n_waits += 1
        await wait(self)

    monkeypatch.setattr(PieceBudget, "wait", counted)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pages = {
        "/small": chunked + b"1\r\na\r\n" * 3_000 + b"0\r\n\r\n",
        "/large": chunked + (b"1000\r\n" + bytes(4096) + b"\r\n") * 700 + b"0\r\n\r\n",
        "/plain": ok(bytes(3_000_000)),
    }
    async with website(pages) as site:
        large = Wanted("picture", 4_000_000, 60.0)
        assert len(await get(site, "http://a.example/large", wanted=large)) == 700 * 4096
        assert len(await get(site, "http://a.example/plain", wanted=large)) == 3_000_000
        assert not n_waits
        start_s = time.monotonic()
        assert await get(site, "http://a.example/small", wanted=large) == b"a" * 3_000
        assert n_waits >= 2_800 / PieceBudget.AT_ONCE and time.monotonic() - start_s > 2_800 / PieceBudget.PER_S


async def test_all_is_done_on_a_thread_of_its_own(tmp_path, monkeypatch):
    """Names, connections, files: none of it may hold up the loop that asks."""
    seen, check = set(), fetch.check_host

    def here(*_):
        seen.add(threading.current_thread().name.partition("-blocking")[0])

    async def resolve(*_):
        here()
        return [PUBLIC]

    (tmp_path / "x.png").write_bytes(b"abc")
    monkeypatch.setattr(fetch, "check_host", lambda *args: here() or check(*args))
    monkeypatch.setattr(fetch, "read_file", lambda *_: here() or b"abc")
    async with website({"/x": ok(b"abc")}) as site:
        fetcher = Fetcher(FetchLimits(roots=(tmp_path,)), resolve=resolve, network=site.network)
        monkeypatch.setattr(site.network, "connect_tcp", _noting(site.network.connect_tcp, here))
        async with fetcher.fetched(shown(A, f"file://{tmp_path}/x.png")) as found:
            assert [p.source for p in found[0].images] == [b"abc", b"abc"]
    assert seen == {"hydra-fetch"}


async def test_a_name_that_is_not_resolved_keeps_its_slot_until_its_thread_ends(tmp_path, monkeypatch):
    """Others wait for a slot. They get no error because all threads are in the resolver."""
    answered = threading.Event()

    def getaddrinfo(host, *_, **__):
        if host.endswith("slow.example"):
            answered.wait(HELD_S)
            raise OSError
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, 80))]

    (tmp_path / "x.png").write_bytes(b"abc")
    async with website({"/x": ok(b"abc")}) as site:
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        limits = FetchLimits(n_parallel=2, connect_s=0.1, roots=(tmp_path,))
        fetcher = Fetcher(limits, network=site.network)
        for i in range(2):
            with pytest.raises(DeadlineExceeded) as e:
                await fetcher.get(f"http://{i}.slow.example/x", PICTURE, "p")
            assert e.value.code == "media_timeout"
        fetcher.limits = replace(limits, connect_s=20.0)
        others = [asyncio.ensure_future(fetcher.get(u, PICTURE, "p")) for u in (A, f"file://{tmp_path}/x.png")]
        assert not (await asyncio.wait(others, timeout=0.3))[0]
        answered.set()
        assert await asyncio.gather(*others) == [b"abc", b"abc"]


def _noting(method, note):
    def noted(*args):
        note()
        return method(*args)

    return noted


async def test_closing_ends_downloads_with_a_word():
    async with website({"/x": slow(0.5)}) as site:
        fetcher = Fetcher(resolve=resolver([PUBLIC]), network=site.network)
        task = asyncio.ensure_future(fetcher.get(A, PICTURE, "p"))
        while not site.asked:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(fetcher.close)
        with pytest.raises(Unavailable):
            await task
        with pytest.raises(Unavailable):
            await fetcher.get(A, PICTURE, "p")
        assert fetcher.held_bytes == 0
