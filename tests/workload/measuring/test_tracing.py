"""The first pass over a workload: what is asked again, what is recorded, and what failed."""

import asyncio

import pytest

from hydrainfer.workload.client import Endpoint
from hydrainfer.workload.measuring import first_pass
from tests.workload import virtual
from tests.workload.measuring.test_bench import FAST, TEXT, Quiet
from tests.workload.mock import MockServer, Script

pytestmark = pytest.mark.unit


def test_first_pass_records_lengths():
    async def main():
        async with MockServer(lambda i: Script(n_tokens=i + 1), clock=asyncio.get_running_loop().time) as mock:
            chats = TEXT.chats(6, seed=1)
            return await first_pass("text", Endpoint(base_url=mock.url), chats, 4, 1, 1, Quiet()), mock

    (recording, *_), mock = virtual.run(main())
    assert [c.max_tokens for c in recording.chats] == [2, 3, 4, 4, 4, 4] and recording.n_cut_short == 4
    assert "ignore_eos" not in mock.served[-1].body and recording.model == "mock"


def test_first_pass_asks_without_a_limit_where_the_context_is_less():
    whole, short = Script(n_tokens=2), Script(n_tokens=9, most_tokens=3)

    def script(i):  # the probe, six requests, and those that were refused
        return whole if i in (0, 2, 4, 6) else short

    async def main():
        async with MockServer(script, clock=asyncio.get_running_loop().time) as mock:
            return await first_pass("text", Endpoint(base_url=mock.url), TEXT.chats(6, seed=1), 4, 1, 1, Quiet()), mock

    made, mock = virtual.run(main())
    assert [s.body["max_tokens"] for s in mock.served] == [2, *[4] * 6, *[None] * 3]
    assert [c.max_tokens for c in made.recording.chats] == [3, 2, 3, 2, 3, 2] and made.recording.n_cut_short == 3
    assert made.failures == () and made.stopped == "" and made.recording.n_failed == 0


def test_first_pass_asks_again_what_a_busy_server_refused():
    busy, whole, short = Script(status=429), Script(n_tokens=2), Script(n_tokens=9, most_tokens=3)
    scripts = [whole, *[busy, whole] * 2, busy, short, short, whole]  # the probe, four requests, what was refused

    async def main():
        async with MockServer(lambda i: scripts[i], clock=asyncio.get_running_loop().time) as mock:
            return await first_pass("text", Endpoint(base_url=mock.url), TEXT.chats(4, seed=1), 4, 1, 1, Quiet()), mock

    made, mock = virtual.run(main())
    assert [s.body["max_tokens"] for s in mock.served] == [2, *[4] * 6, None, 4]
    assert [c.max_tokens for c in made.recording.chats] == [2, 2, 3, 2] and made.recording.n_failed == 0


def test_first_pass_says_what_failed_and_why():
    broken = Script(status=500, error_body=b'{"error":{"message":"the model step failed"}}')

    async def main():
        scripts = [FAST, FAST, broken, Script(n_tokens=2, refuses=("messages",)), Script(done=False)]
        async with MockServer(
            lambda i: scripts[min(i, 4)] if i < 5 else scripts[3], clock=asyncio.get_running_loop().time
        ) as mock:
            return await first_pass("text", Endpoint(base_url=mock.url), TEXT.chats(4, seed=1), 4, 1, 1, Quiet())

    made = virtual.run(main())
    assert len(made.recording.chats) == 1 and made.recording.n_failed == 3
    assert [(f.kind.value, f.status) for f in made.failures] == [("status", 500), ("status", 400), ("malformed", None)]
    assert made.failures[0].message == "500: the model step failed" and "unknown field" in made.failures[1].message
