"""The places of an instance (`--max-running`), divided among tenants while several want them.

While another tenant waits, nobody takes more than its share, by weight, of the places. A tenant that came first and has
more gives its youngest decodes up, as many as the others want. Tenants within their shares go before those at theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from hydrainfer.core import LiveSequence, Stage
from hydrainfer.scheduler.fair import Fair


class Places:
    """`n`: the number of places. `running`: the sequences of each stage, by id. `arriving`: those whose room is being
    filled. With one tenant this changes nothing."""

    def __init__(
        self,
        n: int,
        running: Mapping[Stage, Mapping[str, LiveSequence]],
        arriving: Mapping[str, LiveSequence],
        fair: Fair,
    ) -> None:
        self._n, self._running, self._arriving, self._fair = n, running, arriving, fair

    def may_enter(self, seq: LiveSequence) -> bool:
        """Whether the sequence's tenant may take another place."""
        if len(self._fair.counters) < 2:
            return True
        tenant, held = seq.request.share.tenant, self._held()
        if held[tenant] < self._limit(tenant, held):
            return True
        self._fair.full.add(tenant)
        return False

    def update(self) -> None:
        """Note which tenants have all places that they may have: they go after the others."""
        if len(self._fair.counters) > 1:
            held = self._held()
            self._fair.full = {t for t, n in held.items() if n >= self._limit(t, held)}

    @property
    def short(self) -> bool:
        """Whether a tenant waits for a place that another has beyond its share."""
        return len(self._fair.counters) > 1 and next(self._surplus(), None) is not None

    def surplus(self) -> list[LiveSequence]:
        """The decoding sequences that must give up their places now. No lane executes them."""
        return [] if len(self._fair.counters) < 2 else [s for s in self._surplus() if not s.in_flight]

    def _surplus(self) -> Iterator[LiveSequence]:
        """The youngest decodes of tenants with more than their shares, as many as others wait for."""
        held = self._held()
        shares = {tenant: self._limit(tenant, held) for tenant in {*held, *self._fair.waiting}}
        wanted = sum(min(n, max(shares[t] - held[t], 0)) for t, n in self._fair.waiting.items())
        n = wanted - (self._n - held.total())
        if n <= 0 or all(held[t] <= share for t, share in shares.items()):
            return
        for seq in sorted(self._running[Stage.DECODE].values(), key=lambda s: s.order, reverse=True):
            tenant = seq.request.share.tenant
            if held[tenant] > shares[tenant]:
                held[tenant] -= 1
                n -= 1
                yield seq
                if not n:
                    return

    def _held(self) -> Counter[str]:
        """The places of each tenant."""
        groups = (group.values() for group in (*self._running.values(), self._arriving))
        return Counter(seq.request.share.tenant for seq in chain.from_iterable(groups))

    def _limit(self, tenant: str, held: Mapping[str, int]) -> int:
        """The most places that a tenant may have now. Alone, it leaves one to tenants that come and go."""
        waiting, weights = self._fair.waiting, self._fair.weights
        if not any(other != tenant for other in waiting):
            return self._n - (self._n > 1 and self._fair.yields(tenant))
        present = {tenant, *waiting, *(t for t, n in held.items() if n)}
        return max(1, int(self._n * weights[tenant] / sum(weights[t] for t in present)))
