"""Fifty clients hang up at random moments: before their request is whole, in the queue, between two instances, in the
middle of their answer. All that is done for them stops, and every block comes back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from urllib.parse import urlsplit

import httpx
import pytest
from rich.console import Console

from hydrainfer.config import load
from hydrainfer.serving import serve_in_background
from tests.checkpoints import make_llava
from tests.serving.test_real_engine import chat, picture

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
N_CLIENTS = 50
STOPS_S = 3.0  # less than an answer takes
FIRST = 1000  # client i asks for FIRST + i tokens, by which its requests are known
COSTS = "{encode_image_s: 0.02, step_base_s: 0.005, prefill_token_s: 1.0e-4, decode_token_s: 1.0e-5}"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    (folder / "costs.yaml").write_text(COSTS)
    device = {"device": "emulated", "cost_model": str(folder / "costs.yaml")}
    options = {"layout": "1E1P1D", "launcher": "inproc", "port": 0, "max_running": 16, "token_budget": 128, **device}
    config = load({"model": str(make_llava(folder / "llava")), **options})
    with serve_in_background(config, Console(quiet=True)) as (url, instance):
        body = {"messages": chat(picture(99)), "max_tokens": 1}  # the media workers start with the first picture
        httpx.post(url + "/v1/chat/completions", json=body, timeout=60).raise_for_status()
        yield url, instance


def left(instance):
    """What is still held or done, by any instance."""
    found = {"live": instance.sessions.n_live}
    for name, node in instance.engine.launcher.nodes.items():
        engine = node.engine
        stats, pool = engine.stats(time.monotonic()), instance.pools()[name]
        found[f"{name} works on"] = stats.n_waiting + stats.n_running + stats.n_migrating + stats.n_arriving
        found[f"{name} leases"] = sum(leased for _, leased, _ in pool.usage().values())
        found[f"{name} moves"] = 0 if engine.moves.idle else 1
    return {what: n for what, n in found.items() if n}


class Clients:
    def __init__(self, url, instance, seed):
        self.at, self.side, self.rng = urlsplit(url), instance.engine._side, random.Random(seed)
        self.instance = instance
        self.left_s, self.overstayed, self.seen = {}, set(), set()

    async def one(self, i):
        rng = self.rng
        pictures = [picture(rng.randrange(12)) for _ in range(i % 3)]
        body = {"messages": chat(*pictures), "max_tokens": FIRST + i, "ignore_eos": True, "n": 1 + i % 2}
        data = json.dumps({**body, "stream": bool(i % 4)}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
        message = f"{head}content-type: application/json\r\n\r\n".encode() + data
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        reader, writer = await asyncio.open_connection(self.at.hostname, self.at.port)
        writer.write(message if i % 10 else message[:-10])
        reading = asyncio.ensure_future(reader.read())
        await asyncio.sleep(rng.choice([rng.uniform(0.0, 0.1), rng.uniform(0.0, 1.5)]))
        writer.transport.abort()
        self.left_s[i] = time.monotonic()
        await asyncio.wait([reading])
        reading.exception()

    async def watch(self):
        """Who is worked for longer than may be."""
        while True:
            now = time.monotonic()
            for live in list(self.side.lives._live.values()):
                i = live.request.max_tokens - FIRST
                self.seen.add(i)
                if now - self.left_s.get(i, now) > STOPS_S:
                    self.overstayed.add(i)
            await asyncio.sleep(0.02)

    async def all(self):
        watching = asyncio.ensure_future(self.watch())
        await asyncio.gather(*(self.one(i) for i in range(N_CLIENTS)))
        await asyncio.sleep(1.0)
        end_s = time.monotonic() + STOPS_S
        while left(self.instance) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        watching.cancel()


@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_clients_that_hang_up(served, seed):
    url, instance = served
    clients = Clients(url, instance, seed)
    asyncio.run(clients.all())
    assert left(instance) == {}, "seconds after the last has gone"
    assert clients.overstayed == set()
    assert len(clients.seen) > N_CLIENTS / 2, "most of them were being served"
    for pool in instance.pools().values():
        pool.check(idle=True)
    instance.sessions.check(idle=True)
    instance.intake.processor.pixels.check(idle=True)
    body = {"messages": chat(picture(99)), "max_tokens": 20, "ignore_eos": True}
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 20
