"""The first pass over a workload: every request once, to the natural end of its answer, to learn the answer lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from hydrainfer.workload.client import Endpoint, Failure, FailureKind, RequestRecord, Stop, probe, run_load
from hydrainfer.workload.measuring.session import DEAD_AFTER, Watcher
from hydrainfer.workload.measuring.single import until_interrupted
from hydrainfer.workload.results import now
from hydrainfer.workload.sources import BodyOptions, ChatRequest, Closed, DrawingStopped, Recording, encoded_aside

_REFUSED, _BUSY = (400, 422), 429
_ROUNDS = 4  # in which requests are asked again that a busy server has refused
_WAIT_S = 2.0  # before each of them


class FirstPass(NamedTuple):
    """The result of a first pass. `failures`: of the requests that the recording leaves out. `stopped`: why the pass
    ended early."""

    recording: Recording
    failures: tuple[Failure, ...]
    stopped: str


async def first_pass(
    dataset: str,
    target: Endpoint,
    chats: Sequence[ChatRequest],
    max_tokens: int,
    concurrency: int,
    seed: int,
    watch: Watcher,
) -> FirstPass:
    """Record greedy answers, without `ignore_eos`, of at most `max_tokens`. A request that is refused is sent again
    without a limit: if prompt and `max_tokens` together exceed the model's context, the context is the smaller limit.
    What a busy server has refused is asked again later, one after the other. An interrupted pass keeps the requests
    that were answered. Raises `ConfigError` if the server cannot be used."""
    target, options, facts = await probe(target)
    options = msgspec.structs.replace(options, ignore_eos=False, timings=False)
    stop = Stop(DEAD_AFTER)
    ended = dict[int, RequestRecord]()
    asked: list[ChatRequest] = []

    async def ask(which: Sequence[int], what: str, options: BodyOptions, at_once: int = concurrency) -> None:
        watch.begins(facts.model, what, len(which))
        some = [asked[i] for i in which]
        result = await run_load(target, some, Closed(at_once), options=options, on_record=watch.record, stop=stop)
        ended.update((which[r.index], r) for r in result.records)
        watch.ended(facts.model, None)

    def refused(*statuses: int) -> list[int]:
        return [i for i, r in ended.items() if r.failure is not None and r.failure.status in statuses]

    with until_interrupted(stop), suppress(DrawingStopped):
        limited = [msgspec.structs.replace(chat, max_tokens=max_tokens) for chat in chats]
        unlimited = msgspec.structs.replace(options, extra={"max_tokens": None})
        asked += await encoded_aside(limited, lambda: stop.came, watch.draws)
        await ask(range(len(chats)), "first pass", options)
        tried = set[int]()
        for n_left in range(_ROUNDS, -1, -1):
            again = [i for i in refused(*_REFUSED) if i not in tried]
            if again and not stop.came:
                tried.update(again)
                await ask(again, "without a limit", unlimited)
            busy = refused(_BUSY)
            if not (busy and n_left) or stop.came:
                break
            await asyncio.sleep(_WAIT_S)
            tried.difference_update(busy)
            await ask(busy, "again, as the server was busy", options, 1)
    ok = {i: r for i, r in sorted(ended.items()) if r.ok and r.n_tokens}
    return FirstPass(
        Recording(
            dataset=dataset,
            seed=seed,
            model=facts.model,
            server=facts.version,
            n_cut_short=sum(r.finish_reason == "length" or r.n_tokens >= max_tokens for r in ok.values()),
            n_failed=len(ended) - len(ok),
            date=now(),
            chats=tuple(msgspec.structs.replace(chats[i], max_tokens=r.n_tokens) for i, r in ok.items()),
        ),
        tuple(_failure(r) for i, r in ended.items() if i not in ok),
        stop.reason,
    )


def _failure(record: RequestRecord) -> Failure:
    return record.failure or Failure(FailureKind.MALFORMED, "an answer without a token")
