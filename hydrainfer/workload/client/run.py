"""The runner of a load against a server: warm-up first, then the measured requests at their times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from hydrainfer.core import ConfigError
from hydrainfer.workload.client.client import ChatClient, Endpoint
from hydrainfer.workload.client.failures import FailureKind
from hydrainfer.workload.client.record import RequestRecord
from hydrainfer.workload.sources import Arrivals, BodyOptions, ChatRequest, Closed, due_times_s

OnRecord = Callable[[RequestRecord], None]
_PLAIN = BodyOptions()


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one load. `records`: in the workload's order, with times counted from the start of the measured
    part; `warmup`: likewise from the start of the warm-up. If the load was stopped (`stopped` says why), there are no
    records of the `n_cut` requests that were in flight and of the `n_unsent` requests that were never sent."""

    arrivals: Arrivals
    seed: int
    records: tuple[RequestRecord, ...]
    warmup: tuple[RequestRecord, ...] = ()
    n_cut: int = 0
    n_unsent: int = 0
    stopped: str = ""


class Stop:
    """A signal that ends a load and keeps the results so far. It is set by `now` (Ctrl-C), or by itself when
    `dead_after` requests in a row got no connection (None: never)."""

    def __init__(self, dead_after: int | None = None, parent: Stop | None = None) -> None:
        """`parent`: this signal is also set when the parent is, but not the other way round."""
        self._dead_after = dead_after
        self._n_dead = 0
        self._event = asyncio.Event()
        self._children = list[Stop]()
        self.reason = ""
        if parent is not None:
            parent._children.append(self)
            if parent.came:
                self.now(parent.reason)

    def now(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._event.set()
        for child in self._children:
            child.now(reason)

    def hear(self, record: RequestRecord) -> None:
        dead = record.failure is not None and record.failure.kind is FailureKind.CONNECTION
        self._n_dead = self._n_dead + 1 if dead else 0
        if record.failure is not None and self._n_dead == self._dead_after:
            last = record.failure.message
            self.now(f"the server is gone: {self._n_dead} requests in a row failed, the last with: {last}")

    async def wait(self) -> None:
        await self._event.wait()

    @property
    def came(self) -> bool:
        return self._event.is_set()


async def run_load(
    target: Endpoint,
    chats: Sequence[ChatRequest],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    n_warmup: int = 0,
    options: BodyOptions = _PLAIN,
    on_record: OnRecord | None = None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Run a load and return its records. The first `n_warmup` chats end before the measured ones start, so that the
    warm-up does not overlap the measured window. Bodies (pictures included) are made before anything is sent, so peak
    memory grows with the workload. `on_record` gets each measured request as it ends. Raises `ConfigError`, but never
    for what the server does."""
    stop = Stop() if stop is None else stop
    if stop.came:
        n_unsent = max(len(chats) - n_warmup, 0)
        return LoadResult(arrivals=arrivals, seed=seed, records=(), warmup=(), n_unsent=n_unsent, stopped=stop.reason)
    if not 0 <= n_warmup < len(chats):
        raise ConfigError(f"of {len(chats)} requests, {n_warmup} cannot be warm-up", param="n_warmup")
    bodies = [(options.body(chat, target.model), chat.max_tokens) for chat in chats]
    async with ChatClient(target, clock) as client:
        load = _Sender(client, stop, clock)
        warmup, _ = await load.run(bodies[:n_warmup], arrivals, seed + 1, None)
        records, n_cut = await load.run(bodies[n_warmup:], arrivals, seed, on_record)
    return LoadResult(
        arrivals=arrivals,
        seed=seed,
        records=tuple(records),
        warmup=tuple(warmup),
        n_cut=n_cut,
        n_unsent=len(bodies) - n_warmup - len(records) - n_cut,
        stopped=stop.reason,
    )


class _Sender:
    """The sender of bodies at their times, until all are answered or `stop` is set."""

    def __init__(self, client: ChatClient, stop: Stop, clock: Callable[[], float]) -> None:
        self._client = client
        self._stop = stop
        self._clock = clock

    async def run(
        self, bodies: Sequence[tuple[bytes, int]], arrivals: Arrivals, seed: int, on_record: OnRecord | None
    ) -> tuple[list[RequestRecord], int]:
        """The records of the requests that ended, in order, and how many requests were in flight when the load was
        stopped."""
        if self._stop.came:
            return [], 0
        start_s = self._clock()
        records: list[RequestRecord | None] = [None] * len(bodies)
        n_sent = 0

        async def one(index: int, due_s: float) -> None:
            nonlocal n_sent
            n_sent += 1
            body, n_asked = bodies[index]
            record = await self._client.chat(body, index=index, n_asked=n_asked, scheduled_s=due_s)
            records[index] = _since(record, start_s)
            self._stop.hear(record)
            if on_record is not None:
                on_record(record)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as tasks:
                if isinstance(arrivals, Closed):
                    ranks = iter(range(len(bodies)))

                    async def worker() -> None:
                        for index in ranks:
                            await one(index, self._clock())

                    for _ in range(arrivals.concurrency):
                        tasks.create_task(worker())
                else:
                    for index, due_s in enumerate(due_times_s(arrivals, len(bodies), seed)):
                        await asyncio.sleep(max(0.0, start_s + due_s - self._clock()))
                        tasks.create_task(one(index, start_s + due_s))

        await _until_stopped(all_of_them(), self._stop)
        ended = [r for r in records if r is not None]
        return ended, n_sent - len(ended)


async def _until_stopped(work: Coroutine[None, None, None], stop: Stop) -> None:
    """Run `work` to its end, or cancel it when `stop` comes first. No task is left running."""
    load = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((load, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not load.done():
            load.cancel()
        stopped.cancel()
        await asyncio.gather(load, stopped, return_exceptions=True)
    if not load.cancelled():
        load.result()


def _since(record: RequestRecord, start_s: float) -> RequestRecord:
    return msgspec.structs.replace(
        record,
        scheduled_s=record.scheduled_s - start_s,
        sent_s=record.sent_s - start_s,
        end_s=record.end_s - start_s,
        chunk_s=tuple(t - start_s for t in record.chunk_s),
    )
