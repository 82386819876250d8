"""Traces, the input of the simulator: requests as numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from hydrainfer.core import ConfigError, MediaSpan, Request, SamplingParams

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
_ID = 5  # any token id


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace: `n_text` prompt tokens that are no placeholders; `pictures`: embedding tokens of each;
    `n_output` tokens are produced. `content` names the pictures: equal names are the same pictures, "" are new ones."""

    arrival_s: float
    n_text: int
    pictures: tuple[int, ...] = ()
    n_output: int
    content: str = ""

    @property
    def n_prompt(self) -> int:
        return self.n_text + sum(self.pictures)


def as_requests(trace: Iterable[TraceRequest]) -> list[Request]:
    """The requests of a trace in order of arrival, with pictures before the text. Raises `ConfigError` if the trace or
    a request is empty."""
    found = [_request(i, t) for i, t in enumerate(sorted(trace, key=lambda t: t.arrival_s))]
    if not found:
        raise ConfigError("the trace is empty: there is nothing to plan for")
    return found


def _request(i: int, t: TraceRequest) -> Request:
    if t.n_output < 1 or t.n_prompt < 1 or t.arrival_s < 0.0:
        raise ConfigError(f"request {i} of the trace needs a prompt, an output of at least one token and a time: {t}")
    media, at, content = [], 0, t.content or f"#{i}"
    for k, n in enumerate(t.pictures):
        key = f"{content}/{k}"
        media.append(MediaSpan(at, n, key.encode(), key))
        at += n
    return Request(
        id=f"r{i}",
        prompt_ids=(_ID,) * t.n_prompt,
        sampling=_GREEDY,
        max_tokens=t.n_output,
        seed=i,
        media=tuple(media),
        arrival_s=t.arrival_s,
    )


def at_rate(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """The same requests, their arrivals stretched to `rate` per second: common random numbers for every rate."""
    span = trace[-1].arrival_s
    if rate <= 0.0:
        raise ConfigError(f"a rate of {rate:g} requests per second is none; give a positive one")
    if span <= 0.0:
        return list(trace)
    by = len(trace) / rate / span
    return [msgspec.structs.replace(t, arrival_s=t.arrival_s * by) for t in trace]
