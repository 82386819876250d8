"""The requests that wait for room at an instance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from hydrainfer.core import LiveSequence, Stage
from hydrainfer.scheduler.fair import Fair, rank_of

_MOST_PASSED = 16  # each is looked at in every step


class Line:
    """The requests that wait for one stage: a queue per tenant, by rank. Iteration yields them in the order in which
    they go, if each is admitted when it is its turn. Adding or removing requests invalidates an iterator."""

    def __init__(self, fair: Fair) -> None:
        self._fair = fair
        self._queues: dict[str, list[LiveSequence]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[LiveSequence]:
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            return iter(queue)
        return self._fair.in_turn(self._queues)

    @property
    def first(self) -> LiveSequence | None:
        return next(iter(self), None)

    @property
    def head(self) -> tuple[LiveSequence, ...]:
        """The first request, if there is one."""
        return tuple(islice(self, 1))

    def add(self, seq: LiveSequence) -> None:
        insort(self._queues.setdefault(seq.request.share.tenant, []), seq, key=rank_of)
        self._n += 1

    def remove(self, seq: LiveSequence) -> bool:
        """Remove a request. Returns whether it was there."""
        if (place := self._place(seq)) is None:
            return False
        queue = self._queues[seq.request.share.tenant]
        del queue[place]
        self._n -= 1
        if not queue:
            del self._queues[seq.request.share.tenant]
        return True

    def __contains__(self, seq: LiveSequence) -> bool:
        return self._place(seq) is not None

    def _place(self, seq: LiveSequence) -> int | None:
        """The index of a sequence in its queue. Equal ranks occur: choices of one request that began at several
        instances."""
        queue = self._queues.get(seq.request.share.tenant, [])
        place = bisect_left(queue, seq.rank, key=rank_of)
        while place < len(queue) and queue[place].rank == seq.rank:
            if queue[place] is seq:
                return place
            place += 1
        return None

    def sort(self) -> None:
        """Sort again, because ranks have changed."""
        for queue in self._queues.values():
            queue.sort(key=rank_of)

    def check(self) -> None:
        """Check that every queue is in order. For tests."""
        assert self._n == sum(map(len, self._queues.values())) and all(self._queues.values())
        for queue in self._queues.values():
            assert sorted(queue, key=rank_of) == queue, "a queue is out of order"


class Waiting:
    """A line of requests for each stage where they can wait, and the work that they bring: `n_tokens` to compute,
    `n_pictures` to encode. `sizes`: (requests, tokens) by the bit length of a request's number of those tokens."""

    def __init__(self, fair: Fair) -> None:
        self._fair = fair
        self.pictured, self.ready = Line(fair), Line(fair)
        self._lines: Mapping[Stage, Line] = {Stage.ENCODE: self.pictured, Stage.PREFILL: self.ready}
        self.n_tokens = self.n_pictures = 0
        self.sizes: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self.pictured) + len(self.ready)

    def __bool__(self) -> bool:
        return bool(self.pictured or self.ready)

    def add(self, seq: LiveSequence) -> None:
        """Queue a sequence by its rank. Its rank and its remaining work must not change until `sort`."""
        self._fair.arrive(seq.request)
        self._lines[seq.stage].add(seq)
        self._count(seq, 1)

    def remove(self, seq: LiveSequence) -> None:
        """Remove a sequence. Safe if it does not wait."""
        line = self._lines.get(seq.stage)
        if line is not None and line.remove(seq):
            self._fair.leave(seq.request)
            self._count(seq, -1)

    def __contains__(self, seq: LiveSequence) -> bool:
        line = self._lines.get(seq.stage)
        return line is not None and seq in line

    def first(self, passed: Callable[[LiveSequence], bool]) -> list[LiveSequence]:
        """The head of each line, in order, without those that are to be `passed`, which are few."""
        lines = (line for line in self._lines.values() if line)
        heads = (next((s for s in islice(line, _MOST_PASSED) if not passed(s)), None) for line in lines)
        return sorted((s for s in heads if s is not None), key=self._fair.turn_of)

    def sort(self) -> None:
        """Sort again, because ranks have changed."""
        for line in self._lines.values():
            line.sort()

    def _count(self, seq: LiveSequence, by: int) -> None:
        n_tokens, size = seq.rest[0], seq.rest[0].bit_length()
        self.n_tokens += by * n_tokens
        n, tokens = self.sizes.get(size, (0, 0))
        self.sizes[size] = n + by, tokens + by * n_tokens
        if seq.stage is Stage.ENCODE:
            self.n_pictures += by * len(seq.request.media)

    def check(self) -> None:
        """Check that the lines are in order and the counts are right. For tests."""
        queued = [*self.pictured, *self.ready]
        assert self.n_tokens == sum(s.rest[0] for s in queued) == sum(tokens for _, tokens in self.sizes.values())
        assert sum(n for n, _ in self.sizes.values()) == len(queued)
        assert self.n_pictures == sum(len(s.pending_media) for s in self.pictured)
        for line in self._lines.values():
            line.check()
