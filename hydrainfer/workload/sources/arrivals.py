"""The times at which requests arrive. Open-loop arrivals do not wait for answers; closed-loop arrivals wait for one."""

from __future__ import annotations

import itertools
import math
import random

import msgspec

from hydrainfer.core import ConfigError


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Open loop, exponential gaps: `rate_per_s` requests per second on average. Raises `ConfigError`."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """Open loop, equal gaps of 1 / `rate_per_s` seconds. Raises `ConfigError`."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)


class Gamma(msgspec.Struct, frozen=True, tag="gamma"):
    """Open loop, gamma-distributed gaps of mean 1 / `rate_per_s`. `shape` 1 is Poisson, below it is burstier (the
    squared coefficient of variation is 1 / shape), above it more regular. Raises `ConfigError`."""

    rate_per_s: float
    shape: float = 0.5

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        if not (self.shape > 0 and math.isfinite(self.shape)):
            raise ConfigError(f"the gamma shape must be positive, not {self.shape}", param="shape")


class Replay(msgspec.Struct, frozen=True, tag="replay"):
    """Open loop, at recorded times (seconds, ascending), `speed` times as fast. `source`: where the times are from. A
    load longer than the recording starts it again. Raises `ConfigError`."""

    times_s: tuple[float, ...]
    speed: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ConfigError(f"the speed of a replay must be positive, not {self.speed}", param="speed")
        if not self.times_s or any(b < a for a, b in itertools.pairwise(self.times_s)):
            raise ConfigError(f"{self.source or 'a replay'}: needs times of arrival in ascending order", param="trace")

    @property
    def rate_per_s(self) -> float:
        """The average rate; infinite if all times are equal."""
        span_s = (self.times_s[-1] - self.times_s[0]) / self.speed
        if span_s:
            return (len(self.times_s) - 1) / span_s
        return math.inf


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: `concurrency` clients, each of which sends a request when its last answer has ended. Raises
    `ConfigError`."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, not {self.concurrency}", param="concurrency")


OpenLoop = Poisson | Constant | Gamma | Replay
Arrivals = Poisson | Constant | Gamma | Replay | Closed


def label(arrivals: Arrivals) -> str:
    """The arrivals in words: `poisson 2/s`, `closed 4`."""
    if isinstance(arrivals, Closed):
        return f"closed {arrivals.concurrency}"
    if isinstance(arrivals, Replay):
        return f"replay of {arrivals.source or 'a trace'} × {arrivals.speed:g}"
    shape = f" (shape {arrivals.shape:g})" if isinstance(arrivals, Gamma) else ""
    return f"{type(arrivals).__name__.lower()} {arrivals.rate_per_s:.4g}/s{shape}"


def _check_rate(rate_per_s: float) -> None:
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise ConfigError(
            f"rate must be a positive number of requests per second, not {rate_per_s}", param="rate_per_s"
        )


def due_times_s(arrivals: OpenLoop, n: int, seed: int) -> list[float]:
    """Times at which `n` requests are due, ascending, in seconds after the start. The first is due at once, so `n`
    requests span n - 1 gaps. The same seed gives the same times."""
    if isinstance(arrivals, Replay):
        return _replayed(arrivals, n)
    if isinstance(arrivals, Constant):
        return [i / arrivals.rate_per_s for i in range(n)]
    draw = random.Random(seed)
    shape = arrivals.shape if isinstance(arrivals, Gamma) else 1.0
    scale_s = 1.0 / (arrivals.rate_per_s * shape)
    times = []
    now_s = 0.0
    for _ in range(n):
        times.append(now_s)
        now_s += draw.expovariate(arrivals.rate_per_s) if shape == 1.0 else draw.gammavariate(shape, scale_s)
    return times


def _replayed(replay: Replay, n: int) -> list[float]:
    """The recorded times, repeated, with a mean gap between the last time and the first of the next repetition."""
    first_s = replay.times_s[0]
    last_s = replay.times_s[-1]
    gap_s = (last_s - first_s) / max(len(replay.times_s) - 1, 1)
    rounds = (
        (t - first_s + k * (last_s - first_s + gap_s)) / replay.speed for k in itertools.count() for t in replay.times_s
    )
    return list(itertools.islice(rounds, n))
