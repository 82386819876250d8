"""What does the load client itself cost per streamed token, and how late does it see tokens at 200 requests/s?

A mock server in a process of its own streams 64 tokens per request, 10 ms apart, to 8 clients. Counted is the
processor time of the client's process: it shares the cores with the server under test. `httpx` is there for contrast.

Then 200 requests per second are streamed to the client, which is pinned to one core (the mock to another, where there
is one). The delay of a token is from the mock's writing it to the client's noting it, by the one clock that both have;
it includes the kernel and, on a busy machine, whoever else had the core. The 99th percentile is to be at most 2 ms.

On a virtual machine an idle core is given back and comes back late, whatever the client does. So each round is run
twice: with cores as they come, and with cores kept awake by a loop of idle priority, which any work displaces at once.
Beside each stands the machine's own lateness: that of a 1 ms sleep while nothing is asked of anybody.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import httpx
import msgspec
import uvloop

from benchmarks.command import options
from benchmarks.record import spread, write_result
from hydrainfer.workload.client import Endpoint, EventSplitter, RequestRecord, parse_chunk, run_load
from hydrainfer.workload.results import Percentiles, report_of
from hydrainfer.workload.sources import BodyOptions, ChatRequest, Closed, Poisson, distinct_chats
from tests.workload.mock import MockServer, Script

N_TOKENS, N_CLIENTS, N_REQUESTS = 64, 8, 80
RATE_PER_S, RATE_S, RATE_TOKENS = 200.0, 10.0, 16
LIMIT_S = 2e-3


def stay_awake(core: int) -> None:
    """Keep a core from sleeping, at a priority that yields to everything. Runs in a process of its own."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def awake(cores: set[int]) -> Iterator[None]:
    spinners = [multiprocessing.get_context("spawn").Process(target=stay_awake, args=(core,)) for core in cores]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def late_sleeps(n: int = 2000, sleep_s: float = 1e-3) -> dict[str, Any]:
    """How late this core comes back from a short sleep when nobody asks anything of it."""
    late_s = []
    for _ in range(n):
        due_s = time.perf_counter() + sleep_s
        time.sleep(sleep_s)
        late_s.append(time.perf_counter() - due_s)
    return msgspec.to_builtins(Percentiles.of(late_s))


def serve(pipe: Connection) -> None:
    """Serve in a process of its own: tell the address first and, asked for `served`, when each token was written."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with MockServer(Script(ttft_s=0.02, itl_s=0.01)) as server:
            pipe.send(server.url)
            while await loop.run_in_executor(None, pipe.recv) == "served":
                pipe.send({s.body["messages"][0]["content"][-1]["text"]: s.token_s for s in server.served})

    asyncio.run(run())


async def at_rate(url: str, pipe: Connection, seed: int) -> dict[str, Any]:
    """Delays of tokens and of requests at 200 requests per second."""
    n = round(RATE_PER_S * RATE_S)
    chats = [ChatRequest(text=f"{seed}.{i}", max_tokens=RATE_TOKENS) for i in range(n)]
    records: list[RequestRecord] = []  # with absolute times, as they end
    used_s = time.process_time()
    arrivals = Poisson(RATE_PER_S)
    target = Endpoint(base_url=url, model="m")
    result = await run_load(target, chats, arrivals, seed=seed, on_record=records.append)
    used_s = time.process_time() - used_s
    pipe.send("served")
    served = pipe.recv()
    assert len(records) == n and all(r.ok for r in records), report_of(result).failure_examples
    delays = [
        seen_s - written_s
        for r in records
        for seen_s, written_s in zip(r.chunk_s, served[f"{seed}.{r.index}"], strict=True)
    ]
    return {
        "delay_s": msgspec.to_builtins(Percentiles.of(delays)),
        "late_s": msgspec.to_builtins(report_of(result).late_s),
        "client_cores": used_s / RATE_S,
        "load_1m": os.getloadavg()[0],
    }


def padding() -> str:
    """Text as long as a 336 px picture, whose drawing is not the client's cost."""
    (chat,) = distinct_chats(1, seed=1)
    return "x" * len(BodyOptions().body(chat, "m"))


async def with_ours(url: str) -> dict[str, Any]:
    chats = [ChatRequest(text="x", max_tokens=N_TOKENS)] * N_REQUESTS
    options = BodyOptions(extra={"padding": padding()})
    start_s = time.process_time()
    result = await run_load(Endpoint(base_url=url, model="m"), chats, Closed(N_CLIENTS), options=options)
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
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    server.start()
    try:
        url = here.recv()
        runs = [
            {"ours": asyncio.run(with_ours(url)), "httpx": asyncio.run(with_httpx(url))} for _ in range(args.rounds)
        ]
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        at_200 = []
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in `hydrainfer bench`
            for seed in range(args.rounds):
                for kept in (set(), cores):
                    with awake(kept):
                        floor = {"cores": "kept awake" if kept else "as they come", "machine_late_s": late_sleeps()}
                        at_200.append(floor | runner.run(at_rate(url, here, seed)))
    finally:
        here.send("stop")
        server.join()
    results = {name: spread([run[name]["per_token_s"] for run in runs]) for name in ("ours", "httpx")}
    for name, cost in results.items():
        assert cost is not None
        print(f"{name:>6}: {cost['median'] * 1e6:.0f} µs per token ({cost['min'] * 1e6:.0f}–{cost['max'] * 1e6:.0f})")
    for r in at_200:
        seen, late, slow = r["delay_s"], r["late_s"], r["delay_s"]["p99"] > LIMIT_S
        print(
            f"{RATE_PER_S:.0f}/s, cores {r['cores']} (a sleep {r['machine_late_s']['p99'] * 1e3:.2f} ms late at p99): "
            f"tokens noted {seen['p50'] * 1e3:.2f} ms (p50), {seen['p99'] * 1e3:.2f} ms (p99) after they were written; "
            f"requests {late['p99'] * 1e3:.2f} ms late (p99); {r['client_cores']:.2f} cores; "
            f"load {r['load_1m']:.1f}{'  OVER THE LIMIT' if slow else ''}"
        )
    settings: dict[str, Any] = {**vars(args), "tokens": N_TOKENS, "clients": N_CLIENTS, "requests": N_REQUESTS}
    settings |= {"real_time_priority": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)}  # by `chrt -r 10`
    settings |= {"rate_per_s": RATE_PER_S, "rate_s": RATE_S, "rate_tokens": RATE_TOKENS}
    path = write_result("b04_client_overhead", __doc__, settings, {**results, "runs": runs, "at_200": at_200})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
