"""The fetcher against a real server: what is good comes, what is hostile is a typed error in time, nothing is left."""

import asyncio
import ssl
import subprocess
import time
from types import SimpleNamespace

import pytest

from hydrainfer.core import (
    HydraError,
    InvalidRequest,
    MediaError,
    Overloaded,
    RequestTooLarge,
)
from hydrainfer.processor import ChatMessage, Fetcher, FetchLimits, ImagePart, TextPart, Wanted
from tests.processor.fetching.websites import PUBLIC, Detour, moved, ok, resolver, unknown_name, website
from tests.waiting import HELD_S, PATIENCE_S

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fetchers_closed")]
PICTURE = Wanted("picture", 1000, 5.0, ("video/",))
A = "http://a.example/x"


async def get(site, url=A, *, resolve=None, wanted=PICTURE, tls=None, network=None, **limits):
    """Fetch, and check that it leaves neither a task nor memory; `website` looks for sockets."""
    fetcher = Fetcher(
        FetchLimits(**limits), resolve=resolve or resolver([PUBLIC]), network=network or site.network, tls=tls
    )
    before = asyncio.all_tasks()
    try:
        return await fetcher.get(url, wanted, "p")
    finally:
        assert fetcher.held_bytes == 0 and fetcher._thread.n_tasks == 0
        fetcher.close()
        await asyncio.sleep(0.001)  # asyncio ends abandoned generators in the next turn
        ours = [t for t in asyncio.all_tasks() - before if "Site.serve" not in repr(t)]
        assert not ours, ours


async def refused(kind, match, site, *args, **options):
    with pytest.raises(kind, match=match) as e:
        await get(site, *args, **options)
    said = e.value
    assert said.param == "p" and "10." not in said.message and "secret" not in said.message
    assert type(said) is kind and (said.__cause__ is None and (said.__suppress_context__ or not said.__context__))
    return said


async def test_a_picture_comes():
    async with website({"/x?y=1": ok(b"abc")}) as site:
        assert await get(site, "http://a.example:81/x?y=1#z") == b"abc"
    (head,) = site.asked
    assert "Host: a.example:81\r\n" in head and "Accept-Encoding: identity" in head
    assert site.network.dialled == [(PUBLIC, 81)]


@pytest.mark.parametrize(
    "page",
    [
        b"HTTP/1.1 200 OK\r\n\r\nabc",  # no length
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        ok(b"abc", "application/octet-stream"),
        ok(b"abc", "text/plain"),
        ok(b"abc", "IMAGE/JPEG; x=y", more="Content-Encoding: identity\r\n"),
    ],
)
async def test_servers_differ(page):
    async with website({"/x": page}) as site:
        assert await get(site) == b"abc"


BAD_ANSWERS = {
    "404": (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", MediaError, "status 404"),
    "500": (b"HTTP/1.1 500 secret\r\nContent-Length: 0\r\n\r\n", MediaError, "status 500"),
    "204": (b"HTTP/1.1 204 No\r\n\r\n", MediaError, "status 204"),
    "206": (b"HTTP/1.1 206 Part\r\nContent-Length: 1\r\n\r\na", MediaError, "status 206"),
    "redirect to nowhere": (b"HTTP/1.1 302 Go\r\nContent-Length: 0\r\n\r\n", MediaError, "status 302"),
    "page": (ok(b"<html>", "text/html; charset=secret"), MediaError, "leads to text/html, not to a picture"),
    "video": (ok(b"x", "video/mp4"), MediaError, "leads to video"),
    "compressed": (ok(b"x", more="Content-Encoding: gzip\r\n"), MediaError, "compressed"),
    "compressed transfer": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", MediaError, "not HTTP"),
    "too large": (ok(b"", length=1001), RequestTooLarge, "limit of 1000"),
    "far too large": (ok(b"", length="9" * 19), RequestTooLarge, "limit of 1000"),
    "huge number": (ok(b"", length="9" * 9000), HydraError, ""),
    "cut off": (ok(b"ab", length=3), MediaError, "cut off"),
    "too long": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1001), RequestTooLarge, "limit of 1000"),
    "two lengths": (ok(b"abc", more="Content-Length: 5\r\n"), MediaError, "not HTTP"),
    "no http": (b"220 secret.internal ESMTP ready\r\n", MediaError, "not HTTP"),
    "nothing": (b"", MediaError, "not HTTP|breaks off"),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000, MediaError, "not HTTP|breaks off"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
async def test_bad_answers(name):
    page, kind, says = BAD_ANSWERS[name]
    async with website({"/x": page}) as site:
        if kind is HydraError:
            with pytest.raises(HydraError):
                await get(site)
        else:
            await refused(kind, says, site)


async def test_a_host_that_does_not_answer_is_a_media_error():
    async with website({}) as site:
        dead = Detour(site.port, dead=(PUBLIC,))
        await refused(MediaError, "cannot be reached", site, network=dead)
        await refused(MediaError, "no address that this server connects to", site, resolve=resolver(unknown_name()))
        await refused(MediaError, "no address that this server connects to", site, resolve=resolver([]))


async def test_the_next_address_is_tried():
    other = "93.184.216.35"
    async with website({"/x": ok(b"abc")}) as site:
        network = Detour(site.port, dead=(PUBLIC,))
        assert await get(site, resolve=resolver([PUBLIC, other]), network=network) == b"abc"
    assert [ip for ip, _ in network.dialled] == [PUBLIC, other]


PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fe80::1%eth0", "64:ff9b::a00:1"]


@pytest.mark.parametrize("ip", PRIVATE)
async def test_names_of_private_addresses_are_never_connected_to(ip):
    async with website({"/x": ok(b"abc")}) as site:
        unknown = await refused(MediaError, "no address", site, resolve=resolver(unknown_name()))
        for answer in ([ip], [PUBLIC, ip], [ip, PUBLIC]):
            said = await refused(MediaError, "no address", site, resolve=resolver(answer))
            assert said.message == unknown.message  # a name of the inside looks like one that does not exist
    assert not site.network.dialled and not site.asked


async def test_private_addresses_can_be_allowed():
    async with website({"/x": ok(b"abc")}) as site:
        assert await get(site, resolve=resolver(["127.0.0.1"]), hosts="any") == b"abc"
        assert await get(site, "http://127.0.0.1/x", hosts="any") == b"abc"
        await refused(InvalidRequest, "does not connect to", site, "http://127.0.0.1/x")
        await refused(InvalidRequest, "does not connect to", site, "http://169.254.169.254/x", hosts="any")
        await refused(MediaError, "no address", site, resolve=resolver(["169.254.169.254"]), hosts="any")


async def test_rebinding_changes_nothing():
    """The name is public when it is checked and private ever after."""
    calls = []
    async with website({"/x": ok(b"abc")}) as site:
        resolve = resolver([PUBLIC], ["127.0.0.1"], calls=calls)
        assert await get(site, resolve=resolve) == b"abc"
        assert calls == ["a.example"] and site.network.dialled == [(PUBLIC, 80)]
        await refused(MediaError, "no address", site, resolve=resolve)  # asked again, it is private
        assert len(site.network.dialled) == 1


async def test_redirects_are_followed_and_checked():
    pages = {"/x": moved("/y"), "/y": moved("//b.example:81/z", 307), "/z": moved("../w?q"), "/w?q": ok(b"abc")}
    calls = []
    async with website(pages) as site:
        assert await get(site, resolve=resolver([PUBLIC], calls=calls)) == b"abc"
    assert calls == ["a.example", "a.example", "b.example", "b.example"]
    assert "Host: b.example:81\r\n" in site.asked[3]


@pytest.mark.parametrize(
    ("location", "path", "host"),
    [
        ("/bücher.png".encode(), "/b%C3%BCcher.png", "a.example"),
        ("/bücher.png".encode("latin-1"), "/b%FCcher.png", "a.example"),
        (b"/b%C3%BCcher.png", "/b%C3%BCcher.png", "a.example"),
        ("/日本?q=é".encode(), "/%E6%97%A5%E6%9C%AC?q=%C3%A9", "a.example"),
        (b"/two words.png ", "/two%20words.png", "a.example"),
        ("http://bücher.example/ü".encode(), "/%C3%BC", "xn--bcher-kva.example"),
    ],
)
async def test_a_location_is_read_as_browsers_read_it(location, path, host):
    head, end = moved("LOCATION").split(b"LOCATION")
    async with website({"/x": head + location + end, path: ok(b"abc")}) as site:
        assert await get(site, resolve=resolver([PUBLIC])) == b"abc"
    assert f"Host: {host}" in site.asked[1]


@pytest.mark.parametrize(
    "to",
    [
        *("http://127.0.0.1/y", "http://[::1]/y", "http://2130706433/", "http://169.254.169.254/latest", "file:///etc"),
        *(
            "data:image/png;base64,YQ==",
            "ftp://a.example/",
            "http://u:p@a.example/y",
            "http://[::1",
            "http://not-listed/",
        ),
    ],
)
async def test_redirects_elsewhere_are_refused(to):
    async with website({"/x": moved(to), "/y": ok(b"abc")}) as site:
        domains = ("a.example", "127.0.0.1") if "not-listed" in to else ()
        await refused(MediaError, "redirects to one that this server does not fetch", site, domains=domains)
    assert len(site.network.dialled) == 1


async def test_a_redirect_to_a_name_that_is_private_is_refused():
    async with website({"/x": moved("http://b.example/y"), "/y": ok(b"abc")}) as site:
        await refused(MediaError, "no address", site, resolve=resolver([PUBLIC], ["10.0.0.1"]))
    assert len(site.network.dialled) == 1


async def test_redirect_loops_end():
    async with website({"/x": moved("/x")}) as site:
        await refused(MediaError, "more than 3 times", site)
    assert len(site.asked) == 4


async def test_no_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://10.0.0.1:9")
    async with website({"/x": ok(b"abc")}) as site:
        assert await get(site) == b"abc"
    assert site.network.dialled == [(PUBLIC, 80)]


def certificates(folder):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a.example -keyout key.pem -out cert.pem"
    extra = ["-addext", "subjectAltName=DNS:a.example"]
    made = subprocess.run([*command.split(), *extra], cwd=folder, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return server, ssl.create_default_context(cafile=folder / "cert.pem")


async def test_tls_goes_by_the_name_not_by_the_address(tmp_path):
    try:
        server, client = certificates(tmp_path)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    asked_for = []
    server.sni_callback = lambda _, name, __: asked_for.append(name)
    pages = {"/x": ok(b"abc"), "/down": moved("http://a.example/x"), "/silent": None}
    async with website(pages, server) as site:
        assert await get(site, "https://a.example/x", tls=client) == b"abc"
        assert asked_for == ["a.example"] and site.network.dialled == [(PUBLIC, 443)]
        await refused(MediaError, "no valid certificate", site, "https://b.example/x", tls=client)
        await refused(MediaError, "no valid certificate", site, "https://a.example/x")
        await refused(MediaError, "from https to http", site, "https://a.example/down", tls=client)
    async with website({"/x": ok(b"abc")}) as plain:  # no TLS there: the handshake fails
        await refused(
            MediaError,
            "certificate|cannot be reached|not HTTP",
            plain,
            "https://a.example/x",
            tls=client,
            connect_s=0.3,
        )


def shown(*urls):
    return [ChatMessage("user", (TextPart("look"), *(ImagePart(u, f"p{i}") for i, u in enumerate(urls))))]


def slow(seconds):
    async def page(_, writer):
        await asyncio.sleep(seconds)
        writer.write(ok(b"abc"))

    return page


async def test_pictures_of_a_request_come_side_by_side():
    all_asked = asyncio.Barrier(10)

    async def page(_, writer):
        await all_asked.wait()
        writer.write(ok(b"abc"))

    async with website({f"/{i}": page for i in range(10)}) as site:
        fetcher = Fetcher(FetchLimits(), resolve=resolver([PUBLIC]), network=site.network)
        messages = shown(*(f"http://a.example/{i}" for i in range(10)), "data:image/png;base64,YQ==")
        async with fetcher.fetched(messages) as found:
            assert [p.source for p in found[0].images] == [*[b"abc"] * 10, "data:image/png;base64,YQ=="]
            assert [p.param for p in found[0].images] == [f"p{i}" for i in range(11)]
            assert found[0].parts[0] == TextPart("look") and fetcher.held_bytes == 30
        assert fetcher.held_bytes == 0


async def test_the_same_url_is_fetched_once():
    async with website({"/x": ok(b"abc")}) as site:
        fetcher = Fetcher(FetchLimits(), resolve=resolver([PUBLIC]), network=site.network)
        async with fetcher.fetched([*shown(A, A), *shown(A)]) as found:
            assert [p.source for m in found for p in m.images] == [b"abc"] * 3
    assert len(site.asked) == 1


async def test_no_more_than_allowed_come_at_once():
    async with website({f"/{i}": slow(0.05) for i in range(9)}) as site:
        fetcher = Fetcher(FetchLimits(n_parallel=3), resolve=resolver([PUBLIC]), network=site.network)
        async with fetcher.fetched(shown(*(f"http://a.example/{i}" for i in range(9)))):
            pass
    assert site.most_open == 3


async def test_one_failure_ends_the_others():
    async with website({"/x": slow(HELD_S), "/bad": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"}) as site:
        fetcher = Fetcher(FetchLimits(image_s=HELD_S, read_s=HELD_S), resolve=resolver([PUBLIC]), network=site.network)
        start_s = time.monotonic()
        with pytest.raises(MediaError, match="status 404") as e:
            async with fetcher.fetched(shown(A, "http://a.example/bad")):
                pass
        assert e.value.param == "p1" and time.monotonic() - start_s < PATIENCE_S and fetcher.held_bytes == 0
        site.pages.clear()
        for task in asyncio.all_tasks():
            if "Site.serve" in repr(task):
                task.cancel()


async def test_a_wrong_url_is_refused_before_anything_is_fetched():
    async with website({"/x": ok(b"abc")}) as site:
        fetcher = Fetcher(FetchLimits(), resolve=resolver([PUBLIC]), network=site.network)
        for bad in ("http://127.0.0.1/", "ftp://a.example/", "cat.png", "", "file:///etc/passwd"):
            with pytest.raises(InvalidRequest, match="data: URL") as e:
                async with fetcher.fetched(shown(A, bad)):
                    pass
            assert e.value.param == "p1" and "passwd" not in e.value.message
    assert not site.network.dialled


async def test_cancelling_leaves_no_task_and_no_socket():
    began = asyncio.Event()

    async def stuck(reader, writer):
        writer.write(ok(b"a", length=900))
        await writer.drain()
        began.set()
        assert await reader.read() == b""  # until the other side closes

    before = asyncio.all_tasks()
    async with website({"/x": stuck}) as site:
        fetcher = Fetcher(FetchLimits(), resolve=resolver([PUBLIC]), network=site.network)

        async def whole():
            async with fetcher.fetched(shown(A)):
                pytest.fail("it never comes")

        task = asyncio.ensure_future(whole())
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not site.n_open:
                break
            await asyncio.sleep(0.01)
        assert not site.n_open and fetcher.held_bytes == 0
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_cancelling_while_the_server_says_nothing_closes_the_socket(scheme):
    gone = asyncio.Event()
    began = asyncio.Event()

    async def silent(reader, writer):
        began.set()
        while await reader.read(4096):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    fetcher = Fetcher(resolve=resolver([PUBLIC]), network=Detour(server.sockets[0].getsockname()[1]))
    task = asyncio.ensure_future(fetcher.get(f"{scheme}://a.example/x", PICTURE, "p"))
    await began.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(gone.wait(), PATIENCE_S)
    server.close()


async def test_memory_is_bounded():
    async with website({"/x": ok(bytes(600)), "/y": ok(bytes(600))}) as site:
        fetcher = Fetcher(FetchLimits(held_bytes=1000), resolve=resolver([PUBLIC]), network=site.network)
        async with fetcher.fetched(shown(A)):
            with pytest.raises(Overloaded):
                await fetcher.get("http://a.example/y", PICTURE, "p")
        assert len(await fetcher.get("http://a.example/y", PICTURE, "p")) == 600


def test_one_fetcher_serves_one_loop_after_another():
    async def once():
        async with website({"/x": slow(0.05), "/y": slow(0.05)}) as site:
            network.connect_tcp = site.network.connect_tcp
            async with fetcher.fetched(shown(A, "http://a.example/y")) as found:
                return len(found[0].images)

    network = SimpleNamespace()
    fetcher = Fetcher(FetchLimits(n_parallel=1), resolve=resolver([PUBLIC]), network=network)
    assert [asyncio.run(once()) for _ in range(2)] == [2, 2]


async def test_videos_have_limits_of_their_own():
    async with website({"/x": ok(bytes(2000), "video/mp4"), "/y": ok(b"abc", "image/png")}) as site:
        limits = FetchLimits(max_image_bytes=1000, max_video_bytes=3000)
        assert (limits.picture().total_s, limits.video().total_s) == (5.0, 30.0)
        fetcher = Fetcher(limits, resolve=resolver([PUBLIC]), network=site.network)
        assert len(await fetcher.get(A, limits.video(), "p")) == 2000
        with pytest.raises(MediaError, match="leads to image, not to a video"):
            await fetcher.get("http://a.example/y", limits.video(), "p")
        with pytest.raises(MediaError, match="leads to video, not to a picture"):
            await fetcher.get(A, limits.picture(), "p")
