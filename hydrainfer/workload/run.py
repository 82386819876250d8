"""Runs a load against a server: warm-up first, then the measured requests at their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.workload.arrivals import Arrivals, Closed, due_times_s
from hydrainfer.workload.chat import BodyOptions, ChatRequest
from hydrainfer.workload.client import ChatClient, Target
from hydrainfer.workload.record import RequestRecord

OnRecord = Callable[[RequestRecord], None]
_PLAIN = BodyOptions()


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """`records` in the workload's order, times counted from the start of the measured part; `warmup` likewise from the
    start of the warm-up."""

    arrivals: Arrivals
    seed: int
    records: tuple[RequestRecord, ...]
    warmup: tuple[RequestRecord, ...] = ()


async def run_load(
    target: Target,
    chats: Sequence[ChatRequest],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    n_warmup: int = 0,
    options: BodyOptions = _PLAIN,
    on_record: OnRecord | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """The first `n_warmup` chats run to their end before the measured ones start, so that nothing of them lies in the
    measured window. Bodies (pictures included) are made before anything is sent: peak memory grows with the workload.
    `on_record` sees each measured request as it ends. Raises `ConfigError`, never for what the server does."""
    if not 0 <= n_warmup < len(chats):
        raise ConfigError(f"of {len(chats)} requests, {n_warmup} cannot be warm-up", param="n_warmup")
    bodies = [(options.body(chat, target.model), chat.max_tokens) for chat in chats]
    async with ChatClient(target, clock) as client:
        warmup = await _run(client, bodies[:n_warmup], arrivals, seed + 1, None, clock)
        records = await _run(client, bodies[n_warmup:], arrivals, seed, on_record, clock)
    return LoadResult(arrivals=arrivals, seed=seed, records=tuple(records), warmup=tuple(warmup))


async def _run(
    client: ChatClient,
    bodies: Sequence[tuple[bytes, int]],
    arrivals: Arrivals,
    seed: int,
    on_record: OnRecord | None,
    clock: Callable[[], float],
) -> list[RequestRecord]:
    start_s = clock()
    records: list[RequestRecord | None] = [None] * len(bodies)

    async def one(index: int, due_s: float) -> None:
        body, n_asked = bodies[index]
        record = await client.chat(body, index=index, n_asked=n_asked, scheduled_s=due_s)
        records[index] = _since(record, start_s)
        if on_record is not None:
            on_record(record)

    async with asyncio.TaskGroup() as tasks:
        if isinstance(arrivals, Closed):
            ranks = iter(range(len(bodies)))

            async def worker() -> None:
                for index in ranks:
                    await one(index, clock())

            for _ in range(arrivals.concurrency):
                tasks.create_task(worker())
        else:
            for index, due_s in enumerate(due_times_s(arrivals, len(bodies), seed)):
                await asyncio.sleep(max(0.0, start_s + due_s - clock()))
                tasks.create_task(one(index, start_s + due_s))
    return [r for r in records if r is not None]


def _since(record: RequestRecord, start_s: float) -> RequestRecord:
    return msgspec.structs.replace(
        record,
        scheduled_s=record.scheduled_s - start_s,
        sent_s=record.sent_s - start_s,
        end_s=record.end_s - start_s,
        chunk_s=tuple(t - start_s for t in record.chunk_s),
    )
