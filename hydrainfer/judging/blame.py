"""The interval that made a request miss a limit of its SLO.

An interval is blamed for the time it took beyond what it takes without load, not for being long: prefill may be most of
a TTFT, and yet the queue before it may be what load has changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from hydrainfer.judging.attainment import Verdict
from hydrainfer.metrics import INTERVALS

_BEFORE_FIRST, _AFTER_FIRST = INTERVALS[:5], INTERVALS[5:]  # of the first token


def per_token(spent_s: Mapping[str, float], n_tokens: int) -> dict[str, float]:
    """The seconds of each interval, with decode per token after the first."""
    return {name: s / max(n_tokens - 1, 1) if name == "decode" else s for name, s in spent_s.items()}


def blamed(
    verdict: Verdict, spent_s: Mapping[str, float], usual_s: Mapping[str, float], n_tokens: int
) -> dict[str, str]:
    """The interval to blame for each limit that a request missed: "ttft", "tpot", "e2e". `spent_s`: the seconds that
    the request spent in each interval; `usual_s`: the seconds without load, decode per token. Names beyond `INTERVALS`
    are parts of the request that count for every limit."""
    usual = {**usual_s, "decode": usual_s.get("decode", 0.0) * max(n_tokens - 1, 1)}
    excess = {name: spent_s.get(name, 0.0) - usual.get(name, 0.0) for name in dict.fromkeys((*INTERVALS, *spent_s))}
    elsewhere = {"ttft": _AFTER_FIRST, "tpot": _BEFORE_FIRST, "e2e": ()}
    return {
        limit: max((name for name in excess if name not in others), key=excess.__getitem__)
        for limit, others in elsewhere.items()
        if not getattr(verdict, limit)
    }
