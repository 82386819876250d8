"""An upper bound on the rate that each layout can carry. The search uses it to order layouts and to leave some out.
Above the bound a queue grows for as long as requests arrive, and in the end no request is served in time. A short trace
may not show this, so no rate above the bound counts as carried, whatever its simulation says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from hydrainfer.cache import tokens_in
from hydrainfer.core import CostModel, Layout, Stage
from hydrainfer.planner.nouns import ANSWER, TraceRequest
from hydrainfer.planner.search.layouts import role_of
from hydrainfer.planner.search.study import Study

_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class StageWork(NamedTuple):
    """The least device time of a request in seconds, by stage, with the best batching. `arithmetic_s`: the part of
    `decode_s` that prefill in the same batch cannot hide."""

    encode_s: float
    prefill_s: float
    decode_s: float
    arithmetic_s: float


class _Need(NamedTuple):
    """`stages` that share a device, the least `seconds` of a request in each, and the combined `speed` of the lanes (1:
    one lane)."""

    stages: tuple[Stage, ...]
    seconds: tuple[float, ...]
    speed: float = 1.0


class Bound(NamedTuple):
    """`rate`: requests per second that no schedule can exceed for long, with the work of every stage spread ideally
    over the instances that run it; `stages`: the bottleneck, () if that is the server."""

    rate: float
    stages: tuple[Stage, ...]


class Bounds:
    """The bounds of the layouts of one study. `mean`: the mean work of a request on the first kind of device."""

    def __init__(self, study: Study) -> None:
        self._study = study
        n_batch = _largest_batch(study)
        self._costs = dict[str, CostModel]()  # of the first station of each kind
        for name, s in study.stations.items():
            self._costs.setdefault(_kind(name), s.cost)
        self._work = {kind: _mean_work(study, cost, n_batch) for kind, cost in self._costs.items()}
        self.mean = self._work[_kind(next(iter(study.stations)))]

    def work(self, role: str) -> StageWork:
        """The mean least work of a request on the device of a role."""
        return self._work[_kind(role)]

    def of(self, layout: Layout) -> Bound:
        tightest = Bound(math.inf, ())
        for needs in zip(*(_needs(self._costs[kind], work) for kind, work in self._work.items())):
            stages = needs[0].stages
            of_kind = dict(zip(self._work, needs))
            able = [of_kind[_kind(str(role))] for role in layout.instances if any(map(role.runs, stages))]
            rate = min((_most(able, by) for by in {*able} if sum(by.seconds)), default=math.inf)
            if rate < tightest.rate:
                tightest = Bound(rate, stages)
        server = self._study.host_cost(layout)
        rate = server.rate_limit(self._study.trace, len(layout.instances), tightest.rate)
        if rate < tightest.rate:
            return Bound(rate, ())
        return tightest


def _kind(name: str) -> str:
    """The kind of device in a role's name; "" if all devices are alike."""
    return name.partition("@")[2]


def _mean_work(study: Study, cost: CostModel, n_batch: int) -> StageWork:
    per_step = study.drafts.tokens_per_step if study.drafts else 1.0
    each = [work_of(t, cost, n_batch, n, per_step) for t, n in _without_repeats(study.trace)]
    return StageWork(*(sum(column) / len(each) for column in zip(*each)))


def _most(able: Sequence[_Need], by: _Need) -> float:
    """A rate that these devices together cannot exceed. A second of a device counts as the time that `by` takes for the
    same work, in the stage where the device compares best, as work goes to the device that suits it."""

    def worth(need: _Need) -> float:
        return need.speed * max(one / own if own else math.inf for one, own in zip(by.seconds, need.seconds) if one)

    return sum(map(worth, able)) / sum(by.seconds)


def _needs(cost: CostModel, work: StageWork) -> Iterator[_Need]:
    """The work of each set of stages that may share a device, single stages included."""
    prefill = Stage.PREFILL
    decode = Stage.DECODE
    encode = Stage.ENCODE
    # two lanes of a device are no faster together than this
    beside_decode = 1.0 + 1.0 / cost.overlap_slowdown
    beside_prefill = 1.0 + 1.0 / (cost.prefill_overlap_slowdown or cost.overlap_slowdown)
    beside = max(beside_decode, beside_prefill)
    encode_s, prefill_s, decode_s, arithmetic_s = work
    yield _Need((encode,), (encode_s,))
    yield _Need((prefill,), (prefill_s,))
    yield _Need((decode,), (decode_s,))
    yield _Need((prefill, decode), (prefill_s, arithmetic_s))
    yield _Need((encode, prefill), (encode_s, prefill_s), beside_prefill)
    yield _Need((encode, prefill, decode), (encode_s, prefill_s, arithmetic_s), beside)
    yield _Need((encode, prefill, decode), (encode_s, 0.0, decode_s), beside)


def work_of(t: TraceRequest, cost: CostModel, n_batch: int, n_found: int = 0, per_step: float = 1.0) -> StageWork:
    """The work of one request that decodes in a batch of `n_batch`, `per_step` tokens in each, and finds `n_found`
    tokens of its prompt in the cache. The requests of a batch share its fixed time; that of prefill batches is left
    out, and so is that of drafts that are wrong."""
    encode_s = sum(min(cost.encode_s([p] * n) / n for n in _BATCHES) for p in t.pictures)
    n_fresh = t.n_prompt - n_found
    prefill_s = cost.prefill_token_s * n_fresh + cost.prefill_attention_s * (t.n_prompt**2 - n_found**2) / 2
    n_steps = t.n_output - 1  # tokens; prefill makes the first one
    n_contexts = n_steps * t.n_prompt + n_steps * (n_steps + 1) // 2
    arithmetic_s = cost.decode_token_s * n_steps + cost.decode_context_s * n_contexts
    weights_s = cost.weights_s + cost.experts_read_s(n_batch)
    shared_by = n_batch * per_step  # tokens of a step
    traffic_s = (weights_s / shared_by + cost.sequence_s) * n_steps + cost.context_s * n_contexts
    decode_s = max(arithmetic_s, traffic_s) + cost.step_base_s * n_steps / shared_by
    return StageWork(encode_s, prefill_s, decode_s, arithmetic_s)


def _largest_batch(study: Study) -> int:
    """The largest number of sequences that decode at once on one instance. Beginnings that prompts share take no room,
    so that the number is too high rather than too low."""
    usual = sum(t.n_prompt - n_found for t, n_found in _without_repeats(study.trace)) / len(study.trace)
    decoders = [s for role, s in study.stations.items() if role_of(role).runs(Stage.DECODE)]
    return max([1, *(int(min(s.budgets.running, tokens_in(s.sizes.most) / usual)) for s in decoders)])


def uncached_tokens(trace: Sequence[TraceRequest]) -> list[int]:
    """The fewest tokens of each prompt that have to be prefilled, if all earlier requests are still cached."""
    return [t.n_prompt - n_cached for t, n_cached in _without_repeats(trace)]


def _without_repeats(trace: Sequence[TraceRequest]) -> Iterator[tuple[TraceRequest, int]]:
    """The requests of the trace without pictures that were seen before, as these need not be encoded; and for each
    request, the most tokens of its prompt that earlier requests may have computed."""
    seen: set[str] = set()
    begun: set[tuple[str, ...]] = set()
    for t in trace:
        if t.parts:
            yield _of_parts(t, seen, begun)
            continue
        again = t.content in seen
        seen |= {t.content} - {""}
        yield (msgspec.structs.replace(t, pictures=(), n_text=t.n_prompt) if again else t), 0


def _of_parts(t: TraceRequest, seen: set[str], begun: set[tuple[str, ...]]) -> tuple[TraceRequest, int]:
    """One request of `_without_repeats` that has parts. `seen`: pictures of earlier requests; `begun`: the beginnings
    of earlier prompts and answers, in whole parts. The request is added to both."""
    names = tuple(part.name for part in t.parts)
    n_begun = len(names)
    while n_begun and names[:n_begun] not in begun:
        n_begun -= 1
    n_cached = sum(part.n_tokens for part in t.parts[:n_begun])
    pictures = [part for part in t.parts if part.picture]
    new = tuple(part.n_tokens for part in pictures if part.name not in seen)
    seen.update(part.name for part in pictures)
    served = (*names, ANSWER)
    begun.update(served[:n] for n in range(1, len(served) + 1))
    fresh = msgspec.structs.replace(t, pictures=new, n_text=t.n_prompt - sum(new))
    return fresh, min(n_cached, t.n_prompt - 1)
