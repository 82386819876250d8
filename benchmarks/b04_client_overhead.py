"""What does the load client itself cost per streamed token, and against `httpx`?

A mock server in a process of its own streams 64 tokens per request, 10 ms apart, to 8 clients. Counted is the
processor time of the client's process: it shares the cores with the server under test.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.record import spread, write_result
from hydrainfer.workload import BodyOptions, ChatRequest, Closed, Target, distinct_chats, report_of, run_load
from hydrainfer.workload.sse import EventSplitter, parse_chunk
from hydrainfer.workload.mock import MockServer, Script

N_TOKENS, N_CLIENTS, N_REQUESTS = 64, 8, 80


def serve(pipe: Connection) -> None:
    """In its own process: tell the address, then serve until told to stop."""

    async def run() -> None:
        async with MockServer(Script(ttft_s=0.02, itl_s=0.01)) as server:
            pipe.send(server.url)
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    asyncio.run(run())


def padding() -> str:
    """As long as a 336 px picture, whose drawing is not the client's cost."""
    (chat,) = distinct_chats(1, seed=1)
    return "x" * len(BodyOptions().body(chat, "m"))


async def with_ours(url: str) -> dict[str, Any]:
    chats = [ChatRequest(text="x", max_tokens=N_TOKENS)] * N_REQUESTS
    options = BodyOptions(extra={"padding": padding()})
    start_s = time.process_time()
    result = await run_load(Target(base_url=url, model="m"), chats, Closed(N_CLIENTS), options=options)
    used_s = time.process_time() - start_s
    report = report_of(result)
    assert report.n_ok == N_REQUESTS and report.itl_s is not None, report.failure_examples
    return {"per_token_s": used_s / report.n_output_tokens, "itl_s": msgspec.to_builtins(report.itl_s)}


async def with_httpx(url: str) -> dict[str, Any]:
    body = BodyOptions(extra={"padding": padding()}).body(ChatRequest(text="x", max_tokens=N_TOKENS), "m")
    n_tokens = 0

    async def client() -> None:
        nonlocal n_tokens
        for _ in range(N_REQUESTS // N_CLIENTS):
            events = EventSplitter()
            async with http.stream("POST", f"{url}/v1/chat/completions", content=body) as answer:
                async for piece in answer.aiter_raw():
                    n_tokens += sum(parse_chunk(e).n_tokens for e in events.feed(piece) if e != b"[DONE]")

    async with httpx.AsyncClient(timeout=None) as http:
        start_s = time.process_time()
        await asyncio.gather(*(client() for _ in range(N_CLIENTS)))
        used_s = time.process_time() - start_s
    assert n_tokens == N_REQUESTS * N_TOKENS
    return {"per_token_s": used_s / n_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    server.start()
    try:
        url = here.recv()
        runs = [
            {"ours": asyncio.run(with_ours(url)), "httpx": asyncio.run(with_httpx(url))} for _ in range(args.rounds)
        ]
    finally:
        here.send("stop")
        server.join()
    results = {name: spread([run[name]["per_token_s"] for run in runs]) for name in ("ours", "httpx")}
    for name, cost in results.items():
        assert cost is not None
        print(f"{name:>6}: {cost['median'] * 1e6:.0f} µs per token ({cost['min'] * 1e6:.0f}–{cost['max'] * 1e6:.0f})")
    settings = {"rounds": args.rounds, "tokens": N_TOKENS, "clients": N_CLIENTS, "requests": N_REQUESTS}
    path = write_result("b04_client_overhead", __doc__.splitlines()[0], settings, {**results, "runs": runs}, args.out)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
