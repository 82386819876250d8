"""The requests that wait for room at an instance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from itertools import islice

from hydrainfer.core import Sequence, Stage
from hydrainfer.scheduler.order import rank_of

_MOST_PASSED = 16  # each is looked at in every step


class Waiting:
    """A queue per stage that takes in requests, best rank first, and the work that all of them bring: `n_tokens` to
    compute, `n_pictures` to encode."""

    def __init__(self) -> None:
        self.queues: Mapping[Stage, list[Sequence]] = {Stage.ENCODE: [], Stage.PREFILL: []}
        self.pictured, self.ready = self.queues.values()
        self.n_tokens = self.n_pictures = 0

    def __len__(self) -> int:
        return len(self.pictured) + len(self.ready)

    def __bool__(self) -> bool:
        return bool(self.pictured or self.ready)

    def add(self, seq: Sequence) -> None:
        """Queue it by its rank, which must stay as it is until `sort`."""
        insort(self.queues[seq.stage], seq, key=rank_of)
        self._count(seq, 1, seq.n_computed)

    def remove(self, seq: Sequence, n_computed: int | None = None) -> None:
        """Forget it. Safe if it does not wait. `n_computed`: of its tokens when it came, if that has changed."""
        if (place := self._place(seq)) is not None:
            del self.queues[seq.stage][place]
            self._count(seq, -1, seq.n_computed if n_computed is None else n_computed)

    def __contains__(self, seq: Sequence) -> bool:
        return self._place(seq) is not None

    def _place(self, seq: Sequence) -> int | None:
        """Where it is in its queue, among its equals: choices of a request that began at several instances."""
        queue = self.queues.get(seq.stage, [])
        place = bisect_left(queue, seq.rank, key=rank_of)
        while place < len(queue) and queue[place].rank == seq.rank:
            if queue[place] is seq:
                return place
            place += 1
        return None

    def first(self, passed: Callable[[Sequence], bool]) -> list[Sequence]:
        """The heads of the queues, the best rank first; behind those that are to be `passed`, which are few."""
        heads = (next((s for s in islice(q, _MOST_PASSED) if not passed(s)), None) for q in self.queues.values() if q)
        return sorted((s for s in heads if s is not None), key=rank_of)

    def sort(self) -> None:
        """Ranks have changed."""
        for queue in self.queues.values():
            queue.sort(key=rank_of)

    def _count(self, seq: Sequence, by: int, n_computed: int) -> None:
        self.n_tokens += by * (len(seq.tokens) - n_computed)
        if seq.stage is Stage.ENCODE:
            self.n_pictures += by * len(seq.request.media)

    def check(self) -> None:
        """The queues are in order and the counts right. For tests."""
        queued = [*self.pictured, *self.ready]
        assert self.n_tokens == sum(len(s.tokens) - s.n_computed for s in queued)
        assert self.n_pictures == sum(len(s.pending_media) for s in self.pictured)
        for queue in self.queues.values():
            assert sorted(queue, key=rank_of) == queue, "a queue is out of order"
