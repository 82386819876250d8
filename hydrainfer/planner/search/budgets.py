"""The batch budgets of Algorithm 1 for every role, derived from the SLOs (paper, section 4.2).

An instance that decodes must give every sequence a token within the TPOT SLO, whatever else runs. It gets the largest
chunk and the largest vision batch that leave time for its decodes, with contexts of the 90th percentile. Where chunk
and vision batch compete for that time, it gets the pair with which a request finishes soonest.

An instance that does not decode has no deadline for each step. Its batches may take a quarter of the TTFT SLO: a
picture and a prompt each wait for half a batch on average before their own, and half of the time is left for queues and
migrations. A batch is no larger than what brings throughput near its limit, since in larger batches the first request
only waits for the last. The same holds with `--overlap slice`, where batches are cut to the TPOT SLO as they are
formed: the TPOT SLO then bounds only the number of sequences.

The same search works on a cost model and on measured times. With measured times it returns only values that were
measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hydrainfer.config import Slo
from hydrainfer.core import CostModel, Role, Stage
from hydrainfer.core.cost import beside_s
from hydrainfer.judging import at_quantile
from hydrainfer.planner.costs.costfile import BatchTime, CostFile
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.scheduler import Budgets

CHUNKS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PICTURES = (1, 2, 3, 4, 6, 8, 12, 16)
SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MARGIN = 0.9  # of the TPOT SLO: the rest is for messages and for batches that take longer than modelled
TTFT_SHARE = 0.25
SATURATED = 0.95  # of the largest throughput


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The usual load of one instance: `decodes` sequences of `context` tokens each, prompts of `prompt` tokens,
    pictures of `picture` embedding tokens (0: no pictures)."""

    decodes: int = 16
    context: int = 1024
    prompt: int = 1024
    picture: int = 576


def mix_of(trace: Sequence[TraceRequest]) -> Mix:
    """The mix of a trace: the 90th percentile of each length."""

    def high(numbers: list[int]) -> int:
        return at_quantile(sorted(numbers), 0.9) if numbers else 0

    return Mix(
        context=high([t.n_prompt + t.n_output for t in trace]),
        prompt=high([t.n_prompt for t in trace]),
        picture=high([n for t in trace for n in t.pictures]),
    )


class Times(Protocol):
    """Durations of batches. `chunks`, `pictures`, `sequences`: the sizes that may be asked for, ascending."""

    @property
    def chunks(self) -> Sequence[int]: ...

    @property
    def pictures(self) -> Sequence[int]: ...

    @property
    def sequences(self) -> Sequence[int]: ...

    def language_s(self, chunk: int, decodes: int, pictures: int) -> float:
        """Seconds of a batch of one chunk and `decodes` decodes, beside a vision batch of `pictures` pictures (0:
        alone)."""

    def encode_s(self, pictures: int) -> float:
        """Seconds of a vision batch that runs alone."""


class ModelTimes:
    """Batch times from a cost model, for the slowest case: a chunk is the last one of its prompt, which reads the most
    context, and a language batch starts together with the vision batch beside it, which slows it the longest."""

    chunks, pictures, sequences = CHUNKS, PICTURES, SEQUENCES

    def __init__(self, cost: CostModel, mix: Mix) -> None:
        self._cost = cost
        self._mix = mix

    def language_s(self, chunk: int, decodes: int, pictures: int) -> float:
        mix = self._mix
        cost = self._cost
        start = max(0, mix.prompt - chunk)
        n_read = start if chunk else 0
        contexts = decodes * (mix.context + 1)
        alone_s = cost.language_s(chunk, chunk * (start + chunk), decodes, contexts, n_read)
        slowdown = (chunk and cost.prefill_overlap_slowdown) or cost.overlap_slowdown
        if pictures:
            return beside_s(alone_s, self.encode_s(pictures), slowdown)
        return alone_s

    def encode_s(self, pictures: int) -> float:
        return self._cost.encode_s([self._mix.picture] * pictures)


class MeasuredTimes:
    """Measured batch times, as 90th percentiles. A context, picture size or number of sequences of the mix that was not
    measured is replaced by the next larger one that was, or by the largest. Measured times do not always grow with the
    batch, so the time of a batch is the longest among the batches that are no larger."""

    def __init__(self, points: Sequence[BatchTime], mix: Mix, decoding: bool = True) -> None:
        """`decoding`: use chunks that were measured together with decodes, else chunks that were measured without."""
        language = [p for p in points if not p.work.is_vision]
        tokens = _at_least({p.work.tokens for p in points if p.work.is_vision}, mix.picture)
        context = _at_least({p.work.context for p in language if p.work.decodes}, mix.context)
        self._decodes = 0
        if decoding:
            mixed = (p.work for p in language if p.work.chunk)
            self._decodes = _at_least({w.decodes for w in mixed if w.decodes}, mix.decodes)
        self._encode = {p.work.pictures: p.p90_s for p in points if p.work.tokens == tokens and p.beside is None}
        self._language: dict[tuple[int, int, int], float] = {}  # by chunk, decodes, pictures beside
        for p in language:
            if p.work.decodes and p.work.context != context:
                continue
            n_beside = 0
            if p.beside is not None:
                if p.beside.tokens != tokens:
                    continue
                n_beside = p.beside.pictures
            key = p.work.chunk, p.work.decodes, n_beside
            self._language[key] = max(p.p90_s, self._language.get(key, 0.0))  # the slowest of all `start`s
        self.pictures = sorted(self._encode)
        self.sequences = sorted(n for chunk, n, beside in self._language if not chunk and not beside)
        self.chunks = sorted(c for c, n, beside in self._language if c and n == self._decodes and not beside)

    def language_s(self, chunk: int, decodes: int, pictures: int) -> float:
        """The measured time. If this pair of batches was not measured, the sum of the times of the vision and the
        language batch."""
        key = chunk, self._decodes if chunk else decodes, pictures
        if pictures and key not in self._language:
            return self.language_s(chunk, decodes, 0) + self.encode_s(pictures)
        times = (
            seconds
            for (c, n, beside), seconds in self._language.items()
            if beside == pictures and c <= chunk and n <= key[1] and bool(c) == bool(chunk)
        )
        return max(times, default=0.0)

    def encode_s(self, pictures: int) -> float:
        return max((seconds for n, seconds in self._encode.items() if n <= pictures), default=0.0)


def budgets_for(
    cost: CostModel | CostFile, role: Role, slo: Slo, mix: Mix, *, overlap: str = "free", base: Budgets | None = None
) -> Budgets:
    """The budgets of an instance of this role. `overlap`: "off" where lanes take turns, so that every step waits for a
    vision batch; "slice" where no step waits longer than the SLO allows, whatever the budgets. `base`: the budgets for
    which the SLOs set no limit (`running`, and those of a lane that the role lacks). If even the smallest batch takes
    too long, the smallest is returned, since no budget helps then."""
    base = base or Budgets()
    times = _times(cost, role, mix)
    if role.runs(Stage.DECODE) and overlap != "slice":
        bound = msgspec.structs.replace(base, running=_running(times, slo, base))
        choices = list(_beside(times, role, slo, mix, overlap, bound, mix.decodes, 1.0))
        return min(choices, key=lambda c: c.encode_s + c.chunks * c.chunk_s).budgets
    budgets = _not_decoding(times, role, slo, mix, base)
    if overlap != "slice":
        return budgets
    running = _running(times, slo, base) if role.runs(Stage.DECODE) else base.running
    return msgspec.structs.replace(budgets, running=running).within(slo.tpot_s, slo.ttft_s)


class Choice(NamedTuple):
    """Budgets that keep every step within the TPOT SLO while `decodes` sequences decode, and the times that result.
    `encode_s`: seconds to encode the pictures of a request; `chunks`: number of steps for its prompt, of `chunk_s`
    each; `step_s`: seconds of a step that only decodes."""

    decodes: int
    budgets: Budgets
    encode_s: float
    chunks: int
    chunk_s: float
    step_s: float

    def request_s(self, share: RequestShare, n_output: float) -> float:
        """Seconds that the instance spends per request of the deployment. Every step gives each decoding sequence a
        token; some of the steps also hold a chunk."""
        n_chunks = share.prefill * self.chunks
        n_steps = max(0.0, share.decode * n_output / self.decodes - n_chunks)
        return share.encode * self.encode_s + n_chunks * self.chunk_s + n_steps * self.step_s

    def interval_s(self, share: RequestShare, n_output: float) -> float:
        """Mean seconds between two tokens of a sequence while the instance is never idle."""
        return self.decodes * self.request_s(share, n_output) / (share.decode * n_output)


class RequestShare(NamedTuple):
    """The shares of all requests whose pictures, prompts and answers one instance computes."""

    encode: float
    prefill: float
    decode: float


def choices_for(
    cost: CostModel | CostFile,
    role: Role,
    slo: Slo,
    mix: Mix,
    *,
    pictures: float = 1.0,
    overlap: str = "free",
    base: Budgets | None = None,
    most: int = SEQUENCES[-1],
) -> tuple[Choice, ...]:
    """The possible budgets of a role that decodes: one choice for each number of decodes up to `most` and each number
    of pictures in a batch. `pictures`: mean number of pictures per request."""
    base = base or Budgets()
    choices = list[Choice]()
    times = _times(cost, role, mix)
    most = min(most, base.running)
    running = _running(times, slo, base)
    for n in [n for n in times.sequences if n <= most] or times.sequences[:1]:
        own = _times(cost, role, msgspec.structs.replace(mix, decodes=n))
        choices += _beside(own, role, slo, mix, overlap, msgspec.structs.replace(base, running=running), n, pictures)
    return tuple(choices)


def best_of(choices: Sequence[Choice], share: RequestShare, slo: Slo, n_output: float) -> Choice:
    """The choice with the highest throughput among those that keep the mean token interval within the TPOT SLO (times
    `MARGIN`) on an instance that is never idle. If no choice does, the one with the shortest interval."""
    limit_s = math.inf if slo.tpot_s is None else MARGIN * slo.tpot_s
    enough = [c for c in choices if c.interval_s(share, n_output) <= limit_s]
    if not enough:
        return min(choices, key=lambda c: c.interval_s(share, n_output))
    return min(enough, key=lambda c: c.request_s(share, n_output))


def _times(cost: CostModel | CostFile, role: Role, mix: Mix) -> Times:
    if isinstance(cost, CostFile):
        return MeasuredTimes(cost.points, mix, role.runs(Stage.DECODE))
    return ModelTimes(cost, mix)


def _beside(
    times: Times, role: Role, slo: Slo, mix: Mix, overlap: str, base: Budgets, decodes: int, n_pictures: float
) -> Iterator[Choice]:
    """One choice for each number of pictures in a vision batch that leaves time for the decodes, with the largest chunk
    that fits beside the two."""
    limit_s = math.inf if slo.tpot_s is None else MARGIN * slo.tpot_s

    def step_s(chunk: int, pictures: int) -> float:
        if overlap == "free" or not pictures:
            return times.language_s(chunk, decodes, pictures)
        return times.language_s(chunk, decodes, 0) + times.encode_s(pictures)

    encodes = role.runs(Stage.ENCODE) and bool(mix.picture and times.pictures)
    prefills = role.runs(Stage.PREFILL) and bool(times.chunks)
    sizes = [0]
    if encodes:
        limit = _saturating(times.pictures, times.encode_s)
        smallest = times.pictures[0]
        sizes = [n for n in times.pictures if n == smallest or (n <= limit and step_s(0, n) <= limit_s)]
    for n_images in sizes:
        budgets = base
        choice = Choice(decodes, base, 0.0, 0, 0.0, times.language_s(0, decodes, 0))
        if n_images:
            budgets = msgspec.structs.replace(budgets, images=n_images)
            choice = choice._replace(encode_s=n_pictures * times.encode_s(n_images) / n_images)
        if prefills:
            chunk = largest(times.chunks, lambda n, k=n_images: step_s(n, k) <= limit_s)  # type: ignore[misc]
            budgets = msgspec.structs.replace(budgets, tokens=chunk + decodes)
            n_chunks = math.ceil(mix.prompt / chunk)
            choice = choice._replace(chunks=n_chunks, chunk_s=times.language_s(chunk, decodes, 0))
        yield choice._replace(budgets=budgets)


def _running(times: Times, slo: Slo, base: Budgets) -> int:
    """The number of sequences that may decode in one step within the TPOT SLO."""
    if slo.tpot_s is None or not times.sequences:
        return base.running
    limit_s = MARGIN * slo.tpot_s
    return min(base.running, largest(times.sequences, lambda n: times.language_s(0, n, 0) <= limit_s))


def _not_decoding(times: Times, role: Role, slo: Slo, mix: Mix, base: Budgets) -> Budgets:
    limit_s = math.inf if slo.ttft_s is None else TTFT_SHARE * slo.ttft_s
    tokens = base.tokens
    images = base.images
    if role.runs(Stage.ENCODE) and mix.picture and times.pictures:
        in_time = largest(times.pictures, lambda n: times.encode_s(n) <= limit_s)
        images = min(in_time, _saturating(times.pictures, times.encode_s))
    if role.runs(Stage.PREFILL) and times.chunks:

        def chunk_s(n: int) -> float:
            return times.language_s(n, 0, 0)

        enough = max(_saturating(times.chunks, chunk_s), mix.prompt)
        at = bisect_left(times.chunks, enough)
        wanted = times.chunks[min(at, len(times.chunks) - 1)]
        tokens = min(wanted, largest(times.chunks, lambda n: chunk_s(n) <= limit_s))
    return msgspec.structs.replace(base, tokens=tokens, images=images)


def largest(candidates: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The last of the ascending candidates that fits, by binary search; the first if none does."""
    return candidates[max(0, bisect_left(candidates, True, key=lambda n: not fits(n)) - 1)]


def _saturating(candidates: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest candidate whose throughput is nearly the largest (`SATURATED`)."""
    rates = [n / max(seconds(n), 1e-12) for n in candidates]
    return next(n for n, rate in zip(candidates, rates) if rate >= SATURATED * max(rates))


def _at_least(numbers: set[int], wanted: int) -> int:
    ordered = sorted(numbers)
    return next((n for n in ordered if n >= wanted), ordered[-1] if ordered else wanted)
