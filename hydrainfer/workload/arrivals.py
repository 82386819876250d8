"""When requests arrive. Open-loop arrivals never wait for an answer; closed-loop ones do nothing else."""

from __future__ import annotations

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


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: `concurrency` clients, each of which sends once its last answer has ended. Raises `ConfigError`."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, not {self.concurrency}", param="concurrency")


Arrivals = Poisson | Constant | Closed


def _check_rate(rate_per_s: float) -> None:
    if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
        raise ConfigError(
            f"rate must be a positive number of requests per second, not {rate_per_s}", param="rate_per_s"
        )


def due_times_s(arrivals: Poisson | Constant, n: int, seed: int) -> list[float]:
    """Times in seconds after the start, ascending, at which `n` requests are due. The first is due at once, so that
    n requests span n - 1 gaps; the same seed gives the same times."""
    if isinstance(arrivals, Constant):
        return [i / arrivals.rate_per_s for i in range(n)]
    draw = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(n):
        times.append(now_s)
        now_s += draw.expovariate(arrivals.rate_per_s)
    return times
