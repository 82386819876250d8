"""Traces made into the requests that engines take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain

import msgspec

from hydrainfer.core import ConfigError, MediaSpan, Request, SamplingParams, chain_keys, chain_root
from hydrainfer.planner.nouns import ANSWER, PromptPart, TraceRequest
from hydrainfer.planner.simulation.leap import TOKEN
from hydrainfer.workload.sources import in_turn

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
_ID = 5  # any token id
_FIRST_ID = 8  # the first of the ids that tell texts apart


def as_requests(trace: Iterable[TraceRequest], block_tokens: int = 16) -> list[Request]:
    """The requests of a trace in order of arrival, with pictures before the text or, if there are parts, in their
    order. Requests with parts share common beginnings in blocks of `block_tokens`. Raises `ConfigError` if the trace or
    a request is empty."""
    prompts = _Prompts(block_tokens)
    requests = [_request(i, t, prompts) for i, t in enumerate(sorted(trace, key=lambda t: t.arrival_s))]
    if not requests:
        raise ConfigError("the trace is empty: there is nothing to plan for")
    return requests


def _request(i: int, t: TraceRequest, prompts: _Prompts) -> Request:
    if t.n_output < 1 or t.n_prompt < 1 or t.arrival_s < 0.0:
        raise ConfigError(f"request {i} of the trace needs a prompt, an output of at least one token and a time: {t}")
    ids = _ids(t.n_prompt)
    media = _media_first(t, t.content or f"#{i}")
    keys = b""
    if t.parts:
        ids, media, keys = prompts.of(t.parts, t.whole)
        assert len(ids) == t.n_prompt, f"the parts of request {i} are another prompt"
    return Request(
        id=f"r{i}",
        prompt_ids=ids,
        sampling=_GREEDY,
        max_tokens=t.n_output,
        seed=i,
        media=media,
        arrival_s=t.arrival_s,
        keys=keys,
    )


@cache
def _ids(n: int) -> tuple[int, ...]:
    return (_ID,) * n


def _media_first(t: TraceRequest, content: str) -> tuple[MediaSpan, ...]:
    media = []
    at = 0
    for k, n in enumerate(t.pictures):
        key = f"{content}/{k}"
        media.append(MediaSpan(at, n, key.encode(), key, whole=t.whole))
        at += n
    return tuple(media)


class _Prompts:
    """Prompts made of parts, with a token id for each text. The keys of each beginning are computed once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[str, int] = {ANSWER: TOKEN}
        self._keys: dict[tuple[PromptPart, ...], list[bytes]] = {(): [chain_root(b"trace")]}

    def of(self, parts: tuple[PromptPart, ...], whole: bool) -> tuple[tuple[int, ...], tuple[MediaSpan, ...], bytes]:
        """The token ids, pictures and keys of a prompt."""
        ids = tuple(chain.from_iterable(self._of(part) for part in parts))
        media = tuple(_spans(parts, whole))
        n_known = next(n for n in range(len(parts), -1, -1) if parts[:n] in self._keys)
        keys = self._keys[parts[:n_known]]
        for n in sorted({min(n_known + 1, len(parts)), len(parts)}):
            some = ids[: sum(part.n_tokens for part in parts[:n])]
            keys = [*keys, *chain_keys(keys[-1], some, self._block_tokens, media, len(keys) - 1)]
            self._keys[parts[:n]] = keys
        return ids, media, b"".join(keys)

    def _of(self, part: PromptPart) -> tuple[int, ...]:
        token = _ID if part.picture else self._ids.setdefault(part.name, _FIRST_ID + len(self._ids))
        return (token,) * part.n_tokens


def _spans(parts: Iterable[PromptPart], whole: bool) -> Iterator[MediaSpan]:
    at = 0
    for part in parts:
        if part.picture:
            yield MediaSpan(at, part.n_tokens, part.name.encode(), part.name, whole=whole)
        at += part.n_tokens


def at_rate(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests with arrivals stretched to `rate` per second: common random numbers for every rate. Turns that
    have an `apart_s` come so long after the turn before, at any rate. Raises `ConfigError` unless the rate is
    positive."""
    span = trace[-1].arrival_s
    if rate <= 0.0:
        raise ConfigError(f"a rate of {rate:g} requests per second is none; give a positive one")
    if span <= 0.0:
        return list(trace)
    by = len(trace) / rate / span
    turns = in_turn(trace, rate)
    return [msgspec.structs.replace(t, arrival_s=at.arrival_s * by) for t, at in zip(turns, trace)]
