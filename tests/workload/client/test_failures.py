"""Every way an answer can go wrong is told apart, and what came before it is kept."""

import asyncio
import re
import socket

import pytest

from hydrainfer.core import ConfigError
from hydrainfer.workload.client import ChatClient, Endpoint, FailureKind, RequestFailed, run_load
from hydrainfer.workload.results import report_of
from hydrainfer.workload.sources import ChatRequest, Closed
from tests.workload.mock import MockServer, Script

pytestmark = pytest.mark.unit


async def one(script, n=1, timeout_s=5.0):
    async with MockServer(script) as server:
        target = Endpoint(base_url=server.url, model="m", timeout_s=timeout_s)
        result = await run_load(target, [ChatRequest(text="x", max_tokens=4)] * n, Closed(1))
    return server, result


@pytest.mark.parametrize(
    ("script", "kind", "said", "n_chunks"),
    [
        (Script(status=429), FailureKind.STATUS, "429: too many requests", 0),
        (Script(status=500, error_body=b"<h1>oops</h1>"), FailureKind.STATUS, "500: <h1>oops</h1>", 0),
        (
            Script(status=404, error_body=b"<!DOCTYPE HTML>\n<html>\n</html>\n"),
            FailureKind.STATUS,
            "^404: a web page$",
            0,
        ),
        (Script(status=404, error_body=b'{\n"detail":\n"none"}'), FailureKind.STATUS, '^404: { "detail": "none"}$', 0),
        (Script(cut_after=0), FailureKind.CONNECTION, "broke before", 0),
        (Script(cut_after=2), FailureKind.CONNECTION, "broke before", 2),
        (Script(garbage_after=2), FailureKind.MALFORMED, "not a chat chunk", 2),
        (Script(error_after=3), FailureKind.SERVER, "the engine died", 3),
        (Script(done=False), FailureKind.MALFORMED, r"without \[DONE\]", 4),
        (Script(itl_s=(0.0, 9.0)), FailureKind.TIMEOUT, r"within 1\.0 s", 2),
    ],
    ids=lambda v: getattr(v, "value", None),
)
async def test_kinds(script, kind, said, n_chunks):
    _, result = await one(script, timeout_s=1.0 if kind is FailureKind.TIMEOUT else 20.0)
    (record,) = result.records
    assert record.failure.kind is kind
    assert re.search(said, record.failure.message)
    assert len(record.chunk_s) == n_chunks and record.end_s >= record.sent_s
    report = report_of(result)
    assert report.n_ok == 0 and report.failures == {kind.value: 1} and report.ttft_s is None


async def test_the_load_goes_on_after_failures():
    bad = {1: Script(status=429), 2: Script(cut_after=1), 4: Script(garbage_after=0)}
    _server, result = await one(lambda i: bad.get(i, Script()), n=6)
    assert [r.ok for r in result.records] == [True, False, False, True, False, True]
    assert result.records[1].failure.status == 429
    assert report_of(result).failures == {"status": 1, "connection": 1, "malformed": 1}


async def test_a_usage_that_does_not_add_up_is_counted():
    _, result = await one(Script(usage_offset=1))
    report = report_of(result)
    assert report.n_ok == 1 and report.n_count_differs == 1 and report.n_wrong_length == 1


async def test_a_kept_connection_that_the_server_closed_is_replaced():
    server, result = await one(Script(keep_alive=False), n=4)
    assert all(r.ok for r in result.records), [r.failure for r in result.records]
    assert server.n_connections == 4


async def test_a_server_that_does_not_listen_is_a_failed_connection():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        target = Endpoint(base_url=f"http://127.0.0.1:{s.getsockname()[1]}")
        result = await run_load(target, [ChatRequest(text="x")], Closed(1))
        assert result.records[0].failure.kind is FailureKind.CONNECTION
        async with ChatClient(target, asyncio.get_running_loop().time) as client:
            assert not await client.healthy()
            with pytest.raises(RequestFailed, match="no connection"):
                await client.models()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"SSH-2.0-OpenSSH\r\n", FailureKind.MALFORMED),
        (b"", FailureKind.CONNECTION),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", FailureKind.CONNECTION),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", None),  # as long as the connection
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", FailureKind.MALFORMED),
    ],
)
async def test_servers_that_speak_something_else(answer, kind):
    async def speak(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        target = Endpoint(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout_s=5.0)
        result = await run_load(target, [ChatRequest(text="x")], Closed(1))
    failure = result.records[0].failure
    assert failure is None if kind is None else failure.kind is kind


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://"])
async def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="looks like"):
        await run_load(Endpoint(base_url=url), [ChatRequest(text="x")], Closed(1))


@pytest.mark.parametrize("more", ["", "v1", "v1/"])
async def test_headers_and_path(more):
    heads = []

    async def speak(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 34\r\n\r\n{"data":[{"id":"a"},{"id":"b c"}]}')
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/under/{more}"
        async with ChatClient(Endpoint(base_url=url, api_key="k"), asyncio.get_running_loop().time) as client:
            assert await client.models() == ["a", "b c"]
    assert heads[0].startswith("GET /under/v1/models HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "authorization: Bearer k\r\n" in heads[0]
