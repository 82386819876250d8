"""Distributions by name, for latencies in the mock server and for lengths and sizes in synthetic workloads."""

from __future__ import annotations

import math
import random
import re
from statistics import NormalDist

import msgspec

from hydrainfer.core import ConfigError

KINDS = ("fixed", "uniform", "exponential", "lognormal", "truncated")
_LOGARITHMIC = ("lognormal", "truncated")


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution: its `kind` and parameters, in the caller's unit. `fixed`: always a; `uniform`: from a to b;
    `exponential`: mean a; `lognormal`: median a, and standard deviation b of the logarithm. Draws are clipped to
    [least, most]. `truncated`: a log-normal whose draws outside of these are drawn again. Raises `ConfigError`."""

    kind: str = "fixed"
    a: float = 0.0
    b: float = 0.0
    least: float = 0.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown distribution {self.kind!r}: one of {', '.join(KINDS)}", param="distribution")
        wrong = not (self.a >= 0 and self.b >= 0 and math.isfinite(self.a) and math.isfinite(self.b))
        if wrong or self.least > self.most or (self.kind == "uniform" and self.b < self.a):
            raise ConfigError(f"{self}: parameters must be finite, not negative and in order", param="distribution")
        if self.kind == "truncated" and not (
            self.a > 0 and self.b > 0 and self._uncut(self.least) < self._uncut(self.most)
        ):
            raise ConfigError(
                f"{self}: a median and a deviation above 0 are needed, and draws within the bounds",
                param="distribution",
            )

    @classmethod
    def parse(cls, text: str | float) -> Spread:
        """The distribution in a text such as `"lognormal:50:0.5"`, `"uniform:10:30"`, `"exponential:20"`, or a number.
        `[1..64]` after it clips the draws. Raises `ConfigError`."""
        if _is_number(text):
            return cls("fixed", float(text))
        match = re.fullmatch(r"(\w+):([^:\[]+)(?::([^:\[]+))?(?:\[(.+)\.\.(.+)\])?", str(text).strip())
        numbers = [g for g in match.groups()[1:] if g is not None] if match else []
        if match is None or not all(_is_number(x) for x in numbers):
            raise ConfigError(f"cannot read {text!r}: write a number or KIND:A[:B], such as lognormal:50:0.5")
        a, b, least, most = (None if g is None else float(g) for g in match.groups()[1:])
        return cls(match[1], a or 0.0, b or 0.0, 0.0 if least is None else least, math.inf if most is None else most)

    def __str__(self) -> str:
        clip = "" if (self.least, self.most) == (0.0, math.inf) else f"[{self.least:g}..{self.most:g}]"
        return f"{self.kind}:{self.a:g}" + (f":{self.b:g}" if self.kind in ("uniform", *_LOGARITHMIC) else "") + clip

    def draw(self, rng: random.Random) -> float:
        return self.quantile(rng.random())

    def quantile(self, p: float) -> float:
        """The value that a share `p` of draws stays below; p in [0, 1)."""
        if self.kind == "uniform":
            x = self.a + p * (self.b - self.a)
        elif self.kind == "exponential":
            x = -self.a * math.log1p(-p)
        elif self.kind in _LOGARITHMIC:
            if self.kind == "truncated":
                below = self._uncut(self.least)
                p = below + p * (self._uncut(self.most) - below)
            x = self.a * math.exp(self.b * NormalDist().inv_cdf(min(max(p, 1e-12), 1 - 1e-12)))
        else:
            x = self.a
        return min(max(x, self.least), self.most)

    def below(self, x: float) -> float:
        """The share of draws that are at most `x`."""
        if x >= self.most:
            return 1.0
        if x < self.least:
            return 0.0
        if self.kind == "uniform":
            if self.b > self.a:
                return min(max((x - self.a) / (self.b - self.a), 0.0), 1.0)
            return float(x >= self.a)
        if self.kind == "exponential":
            return 1.0 - math.exp(-x / self.a) if self.a else 1.0
        if self.kind == "lognormal" and self.a and self.b:
            return self._uncut(x)
        if self.kind == "truncated":
            below = self._uncut(self.least)
            return (self._uncut(x) - below) / (self._uncut(self.most) - below)
        return float(x >= self.a)

    def scaled(self, by: float) -> Spread:
        """The distribution of the draws times `by`."""
        b = self.b if self.kind in _LOGARITHMIC else self.b * by
        return Spread(self.kind, self.a * by, b, self.least * by, self.most * by)

    def _uncut(self, x: float) -> float:
        """The share of a log-normal's draws that are at most `x`, before any are clipped or drawn again."""
        if x <= 0:
            return 0.0
        if math.isinf(x):
            return 1.0
        return NormalDist().cdf(math.log(x / self.a) / self.b)


def _is_number(text: str | float) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
