"""When pictures wait for text: the encode gate (Algorithm 1), and lanes that take turns."""

from __future__ import annotations

from collections.abc import Mapping

from hydrainfer.core import Duties, LiveSequence, Stage
from hydrainfer.scheduler.admission import Admission
from hydrainfer.scheduler.order import Order
from hydrainfer.scheduler.policy import Policy


class Gate:
    """`running`: the sequences of each stage, by id."""

    def __init__(
        self,
        duties: Duties,
        policy: Policy,
        order: Order,
        admission: Admission,
        running: Mapping[Stage, Mapping[str, LiveSequence]],
    ) -> None:
        self._duties, self._policy, self._order, self._admission = duties, policy, order, admission
        self._encoding, self._prefilling = running[Stage.ENCODE], running[Stage.PREFILL]

    def prefers_language(self) -> bool:
        """Whether a request that prefills, or could do so now, goes before every picture. If lanes take turns, the
        vision lane then waits: no picture is encoded before better requests have their first token."""
        pictures = self._pictures()
        if not pictures or not self._order.ranked:
            return False
        prefills = [*self._prefilling.values()]
        text = self._admission.best_text() if self._duties.runs(Stage.PREFILL) else None
        if text is not None:
            prefills.append(text)
        turn_of = self._order.fair.turn_of
        return bool(prefills) and min(map(turn_of, prefills)) < min(map(turn_of, pictures))

    def is_open(self, now: float) -> bool:
        return not self._prefilling or now >= self.opens_at()

    def holds_back(self, now: float) -> bool:
        """Whether pictures wait for what is in prefill."""
        return bool(self._pictures()) and not self.is_open(now)

    def opens_at(self) -> float:
        """When the oldest picture behind the gate has waited `encode_wait_s`; inf if none waits or the gate does not
        age."""
        pictures = self._pictures()
        if not pictures or self._policy.encode_gate == "paper":
            return float("inf")
        return min(seq.queued_s for seq in pictures) + self._policy.encode_wait_s

    def _pictures(self) -> list[LiveSequence]:
        """The sequences whose pictures are encoded, and the first of those that wait for it."""
        return [*self._encoding.values(), *self._admission.waiting.pictured.head]
