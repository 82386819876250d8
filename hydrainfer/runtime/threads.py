"""The number of CPU threads that compute a batch: as many as are worth it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from hydrainfer.core import StepBatch

_PAYS = 0.85
"""Twice as many threads are worth it if a batch then takes less than this part of the time. Their cores could be used
by the server, other instances and the preparation of the next step."""
_SAMPLES, _ENOUGH = 9, 5
_TRIED_SOON, _TRIED_LATE = 4, 128
"""One batch in this many tries another number of threads: at first, and when trials have found nothing new for long."""
_FAR_SLOWER = 1.5
"""After a trial that took this many times longer, the next trial comes later."""
_LONG_S = 0.05
"""Batches that take longer are never tried with fewer threads: waiting at barriers is little of their time, and a
client would notice a batch on half of the cores."""


class ThreadCount:
    """The choice of the number of threads for each batch. Batches of similar size are timed with `limit()` threads, a
    half of them, a quarter, …, one. `limit` may change: it is half of the cores while the other lane is busy. `fixed`:
    the number is always the limit.

    The steps of a small model are up to a fifth shorter with two threads if nothing else runs. Beside a busy server
    they take twice as long: at each barrier they wait for a thread that has no core at that moment. So the number must
    be measured. It is judged by the median of its latest batches. Trials go on for as long as the lane runs, to follow
    the load. All methods run on the lane's thread."""

    def __init__(self, limit: Callable[[], int], *, fixed: bool = False) -> None:
        self._limit = limit
        self._fixed = fixed
        self._sizes: dict[tuple[object, ...], _Size] = {}

    def choose(self, batch: StepBatch) -> Team:
        limit = self._limit()
        if self._fixed or limit == 1:
            return Team(limit)
        key = (limit, batch.lane, batch.decodes_only, batch.n_items.bit_length())
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size(limit)
        return Team(size.next(), size)


class Team(NamedTuple):
    """`n` threads for one batch."""

    n: int
    size: _Size | None = None

    def took(self, seconds: float) -> None:
        """Note how long the batch took."""
        if self.size is not None:
            self.size.add(self.n, seconds)


class _Size:
    """Batches of similar size, within a factor of two. `n`: the best number of threads found so far."""

    def __init__(self, limit: int) -> None:
        self.n = self._limit = limit
        self._seconds: dict[int, deque[float]] = {}
        self._gap = self._left = _TRIED_SOON
        self._upwards = False

    def next(self) -> int:
        self._left -= 1
        mine = self._seconds.get(self.n, ())
        if self._left > 0 or len(mine) < _ENOUGH:
            return self.n
        long = statistics.median(mine) > _LONG_S
        if long and self.n == self._limit:
            return self.n
        self._left = self._gap
        self._upwards = long or self.n == 1 or (not self._upwards and self.n < self._limit)
        return min(2 * self.n, self._limit) if self._upwards else self.n // 2

    def add(self, n: int, seconds: float) -> None:
        self._seconds.setdefault(n, deque(maxlen=_SAMPLES)).append(seconds)
        if n == self.n:
            return
        if len(self._seconds[n]) >= _ENOUGH:
            self._judge(n)
        elif seconds > _FAR_SLOWER * statistics.median(self._seconds[self.n]):
            self._gap = min(2 * self._gap, _TRIED_LATE)

    def _judge(self, n: int) -> None:
        """Choose between the present number and `n`, which was tried."""
        few, many = sorted((n, self.n))
        pays = statistics.median(self._seconds[many]) < _PAYS * statistics.median(self._seconds[few])
        best = many if pays else few
        if best == self.n:
            self._gap = min(self._gap + self._gap // 4, _TRIED_LATE)
        else:
            self.n, self._gap = best, _TRIED_SOON
