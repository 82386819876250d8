"""The first pass over a workload: every request once, to its natural end, to learn how long the answers are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hydrainfer.workload.arrivals import Closed
from hydrainfer.workload.bench import until_interrupted
from hydrainfer.workload.chat import ChatRequest, encoded
from hydrainfer.workload.client import Target
from hydrainfer.workload.probe import probe
from hydrainfer.workload.result import now
from hydrainfer.workload.run import Stop, run_load
from hydrainfer.workload.session import DEAD_AFTER, Watcher
from hydrainfer.workload.sources import Recording


async def first_pass(
    dataset: str,
    target: Target,
    chats: Sequence[ChatRequest],
    max_tokens: int,
    concurrency: int,
    seed: int,
    watch: Watcher,
) -> Recording:
    """Greedy, without `ignore_eos`, `max_tokens` at most. Interrupted, it keeps the requests that have been answered.
    Raises `ConfigError` if the server cannot be used."""
    target, options, facts = await probe(target)
    stop = Stop(DEAD_AFTER)
    asked = [msgspec.structs.replace(chat, max_tokens=max_tokens) for chat in chats]
    watch.begins(facts.model, "first pass", len(chats))
    with until_interrupted(stop):
        result = await run_load(
            target,
            encoded(asked),
            Closed(concurrency),
            options=msgspec.structs.replace(options, ignore_eos=False, timings=False),
            on_record=watch.record,
            stop=stop,
        )
    watch.ended(facts.model, None)
    ok = [r for r in result.records if r.ok and r.n_tokens]
    return Recording(
        dataset=dataset,
        seed=seed,
        model=facts.model,
        server=facts.version,
        n_cut_short=sum(r.n_tokens >= max_tokens for r in ok),
        n_failed=len(result.records) - len(ok),
        date=now(),
        chats=tuple(msgspec.structs.replace(chats[r.index], max_tokens=r.n_tokens) for r in ok),
    )
