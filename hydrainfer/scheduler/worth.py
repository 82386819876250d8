"""How many drafts a step is worth: those with which it yields the most tokens per second.

A draft costs a row of the step, and yields a token if it and all before it are right. Both are learnt: the seconds of a
step by its rows from the steps themselves, a sequence's luck from what became of its drafts. So drafts turn themselves
off where they do not pay, and are tried again now and then.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hydrainfer.core import Lane, StepBatch

_TO_PAY = 1.05  # times the tokens per second of fewer rows
_LEVEL = 0.2  # weight of a new step in the level
_SAMPLES, _ENOUGH, _OLD = 7, 3, 1024  # of a factor: the most, those whose median counts; steps after which it is old
_OUTLIER = 4.0  # a step that takes this many times as long as expected counts as no more
_FIRST, _PRIOR, _LEAST = 0.7, 2.0, 0.1  # a sequence's luck before any draft, what that weighs, a new draft's weight
_PLAIN, _PLAIN_MOST = 8, 64  # steps with drafts before one without: at first, and at most
_RETRY = 32  # steps after which a sequence whose drafts do not pay gets one row
_PATIENCE_MOST = 256  # steps after which the device guesses again, if it did not pay for long

MANY_ROWS = 64
"""The most rows of a step with drafts, where no kernel sets a limit."""

Shape = Callable[[int], float]
"""`shape(rows)`: seconds of a step of so many rows, in those of one row, before any was measured."""


class StepSeconds:
    """Seconds of decode steps by rows: a level, which follows the latest steps (their contexts grow), times a factor by
    rows, which is learnt when their number changes from one step to the next: the median of the latest few, so that a
    step that was disturbed counts for little. A number of rows that was seen a few times, long ago or never gets the
    benefit of the doubt, the least factor that speaks for it: it is tried sooner than avoided for ever."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._seen: list[int] = []  # numbers of rows, in order
        self._factors: dict[int, float] = {}  # by those, logarithms, beside the shape
        self._samples: dict[int, deque[tuple[int, float]]] = {}  # by those: the steps, and logarithms of factors
        self._level_s, self._rows, self._n_steps = 0.0, 0, 0

    @property
    def known(self) -> bool:
        """Whether a step was seen."""
        return self._level_s > 0.0

    def of(self, rows: int) -> float:
        """In seconds, once a step was seen; before, in those of a step of one row."""
        return (self._level_s or 1.0) * self._shape(rows) * math.exp(self._factor(rows))

    def _factor(self, rows: int) -> float:
        seen, factors = self._seen, self._factors
        i = bisect_left(seen, rows)
        if i == len(seen):
            return factors[seen[-1]] if seen else 0.0
        if i == 0 or seen[i] == rows:
            return factors[seen[i]]
        return min(factors[seen[i - 1]], factors[seen[i]])

    def observe(self, rows: int, seconds: float) -> None:
        """Record a step of nothing but `rows` rows that took this long."""
        self._n_steps += 1
        if not self._level_s:
            self._level_s = seconds / self._shape(rows)
        surprise = math.log(max(min(seconds / self.of(rows), _OUTLIER), 1 / _OUTLIER))
        if rows == self._rows:
            self._level_s *= math.exp(_LEVEL * surprise)
            return
        samples = self._samples.get(rows)
        if samples is None:
            samples = self._samples[rows] = deque(maxlen=_SAMPLES)
            insort(self._seen, rows)
        samples.append((self._n_steps, math.log(seconds / (self._level_s * self._shape(rows)))))
        self._level_s *= math.exp(_LEVEL / 4 * surprise)
        self._rows = rows
        self._settle(rows)
        if self._n_steps % _SAMPLES == 0:  # another one, so that what is old is forgotten
            self._settle(self._seen[self._n_steps // _SAMPLES % len(self._seen)])

    def _settle(self, rows: int) -> None:
        """Set the factor of this number of rows from its samples."""
        samples = self._samples[rows]
        while samples and samples[0][0] < self._n_steps - _OLD:
            samples.popleft()
        if samples:
            values = sorted(value for _, value in samples)
            self._factors[rows] = values[len(values) // 2] if len(values) >= _ENOUGH else values[0]
        elif len(self._seen) > 1:
            self._seen.remove(rows)
            del self._samples[rows], self._factors[rows]


class Luck:
    """How often drafts are right: the first, and one behind others that were right. `first`: what is thought before any
    was verified; `least`: the least that a new draft weighs."""

    __slots__ = ("_least", "_n", "_share", "n_skipped")

    def __init__(self, first: Sequence[float] = (_FIRST, _FIRST), least: float = _LEAST) -> None:
        self._share, self._n, self._least = list(first), [0, 0], least
        self.n_skipped = 0  # steps since it had a draft

    def like(self) -> Luck:
        """The luck of somebody of whom nothing else is known."""
        return Luck(self._share)

    def chances(self, n: int) -> Iterator[float]:
        """The chances that at least 1, 2, … `n` drafts are right."""
        chance = 1.0
        for i in range(n):
            chance *= self._share[i > 0]
            yield chance

    def learn(self, n_drafts: int, n_right: int) -> None:
        for i in range(min(n_right + 1, n_drafts)):
            later = i > 0
            self._n[later] += 1
            weight = max(1.0 / (_PRIOR + self._n[later]), self._least)
            self._share[later] += weight * ((i < n_right) - self._share[later])


class Worth:
    """`most_rows`: no step gets more because of drafts. `limit_s`: nor one that takes longer."""

    def __init__(self, most_rows: int, limit_s: float = math.inf, shape: Shape = lambda _: 1.0) -> None:
        self._most_rows, self._limit_s = most_rows, limit_s
        self._guess_s = 0.0  # what one guess behind each sampled token takes
        self._n_without, self._patience = 0, _RETRY  # steps without such guesses, and until the next
        self._n_drafted, self._plain = 0, _PLAIN  # steps since the last one without drafts, and until the next
        self.seconds = StepSeconds(shape)

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Record a batch that took this long by itself."""
        if batch.lane is Lane.LANGUAGE and batch.n_decodes == len(batch.work) and seconds > batch.guess_s:
            self.seconds.observe(batch.n_decodes + batch.n_drafts, seconds - batch.guess_s)
            if batch.n_guesses:
                self._guess_s += _LEVEL * (batch.guess_s / batch.n_guesses - self._guess_s)

    def guesses(self, lucks: Sequence[Luck], most: int) -> int:
        """How many guesses behind each of these sequences' next tokens are worth the time that it takes to make and to
        verify them. `lucks`: of such guesses."""
        n, tokens = len(lucks), float(len(lucks))
        best, rate = 0, _TO_PAY * tokens / self.seconds.of(n)
        chances = [tuple(luck.chances(most)) for luck in lucks]
        for k in range(1, min(most, self._most_rows // n - 1) + 1):
            tokens += sum(chance[k - 1] for chance in chances)
            took_s = self.seconds.of(n + n * k) + k * self._guess_s
            if tokens / took_s > rate:
                best, rate = k, tokens / took_s
        if best:
            self._n_without, self._patience = 0, _RETRY
            return best
        self._n_without += 1
        if self._n_without < self._patience or self._most_rows <= n:
            return 0
        self._n_without, self._patience = 0, min(2 * self._patience, _PATIENCE_MOST)
        for luck in lucks:  # all at once: the device guesses for all of them
            luck.n_skipped = _RETRY
        return 1

    def share(self, n_decodes: int, lucks: Sequence[Luck], offers: Sequence[int]) -> list[int]:
        """How many of its `offers` of drafts each of these sequences gets in a step of `n_decodes`."""
        counts = [0] * len(lucks)
        most = self._most_rows - n_decodes
        if most <= 0 or not any(offers) or self._is_plain():
            return counts
        chances = ((chance, i) for i, luck in enumerate(lucks) for chance in luck.chances(offers[i]))
        ordered = sorted(chances, key=lambda pair: -pair[0])[:most]
        best, tokens = 0, float(n_decodes)
        rate = _TO_PAY * tokens / self.seconds.of(n_decodes)
        for n, (chance, _) in enumerate(ordered, 1):
            tokens += chance
            step_s = self.seconds.of(n_decodes + n)
            if step_s > self._limit_s:
                break
            if tokens / step_s > rate:
                best, rate = n, tokens / step_s
        for _, i in ordered[:best]:
            counts[i] += 1
        for i, luck in enumerate(lucks):
            self._try_again(luck, counts, i, offers[i], most - sum(counts))
        self._n_drafted += any(counts)
        return counts

    def _is_plain(self) -> bool:
        """Whether the step goes without drafts, so that it is known how long such a step takes."""
        if not self.seconds.known:
            return True
        if self._n_drafted < self._plain:
            return False
        self._n_drafted, self._plain = 0, min(2 * self._plain, _PLAIN_MOST)
        return True

    @staticmethod
    def _try_again(luck: Luck, counts: list[int], i: int, n_offered: int, n_left: int) -> None:
        """Give a sequence that had no draft for long one row."""
        if counts[i] or not n_offered:
            luck.n_skipped = 0 if counts[i] else luck.n_skipped
            return
        luck.n_skipped += 1
        if luck.n_skipped >= _RETRY and n_left > 0:
            counts[i], luck.n_skipped = 1, 0
