"""The chunks of prompts in a language batch, within the budgets of tokens and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydrainfer.core import LiveSequence, Stage, TokenWork
from hydrainfer.scheduler.admission import Admission
from hydrainfer.scheduler.filling import add_chunk
from hydrainfer.scheduler.gap import Gap
from hydrainfer.scheduler.order import Order, Rank
from hydrainfer.scheduler.pace import Pace
from hydrainfer.scheduler.policy import Budgets, Policy


class Prompts:
    """`prefilling`: the sequences whose prefill has room, by id. `enter(seq)` puts an admitted one among them, and
    returns whether it could."""

    def __init__(
        self,
        budgets: Budgets,
        policy: Policy,
        order: Order,
        gap: Gap,
        admission: Admission,
        prefilling: Mapping[str, LiveSequence],
        enter: Callable[[LiveSequence], bool],
    ) -> None:
        self.budgets, self.policy, self.order, self.gap = budgets, policy, order, gap
        self.admission, self.prefilling, self.enter = admission, prefilling, enter

    def fill(self, now: float, work: list[TokenWork], n: int, before: Rank) -> int:
        """Add chunks of sequences that go before `before` to `work` of `n` tokens; returns its new number of tokens."""
        other_s = self.gap.other_s(n, now)
        if not other_s:
            return n
        return _Batch(self, work, n, before, other_s, whole=n > 0 and self.gap.waits(now)).fill()


class _Batch:
    """One batch with `n` tokens so far, `n_before` of which decode. `other_s`: the most time that prompts may take of
    it. `whole`: only chunks that complete their prompts."""

    def __init__(
        self, prompts: Prompts, work: list[TokenWork], n: int, before: Rank, other_s: float, *, whole: bool
    ) -> None:
        self._prompts, self._work, self._before, self._whole = prompts, work, before, whole
        self._n = self._n_before = n
        order, gap = prompts.order, prompts.gap
        self._pace: Pace | Gap = gap if n and gap.bounded else order.pace
        self._most_s = min(prompts.budgets.step_s - n * order.pace.token_s(), other_s)
        self._spent_s = 0.0

    def fill(self) -> int:
        prompts, budgets = self._prompts, self._prompts.budgets
        waiting = prompts.admission.to_prefill()
        for seq in prompts.order.turns(prompts.prefilling.values(), waiting, self._admit):
            fit = self._tokens_in_time(seq)
            count = add_chunk(self._work, seq, min(budgets.tokens - self._n, fit), first=self._n == self._n_before)
            self._n += count
            self._spent_s += count * self._pace.token_s(seq)
            completes = count > 0 and self._work[-1].sample
            if self._n >= budgets.tokens or not (fit or self._whole):
                break
            if completes and self._spent_s >= budgets.enough_s:
                break
        return self._n

    def _tokens_in_time(self, seq: LiveSequence) -> int:
        left_s = self._prompts.order.fair.time_for(seq, self._most_s - self._spent_s, self._spent_s)
        if seq.rank > self._before:
            return 0
        count = self._pace.chunk_in(left_s, seq, first=self._n == self._n_before and not self._whole)
        return 0 if self._whole and count < self._prompts.admission.left_of(seq) else count

    def _admit(self, new: LiveSequence) -> bool:
        """Admit no more than may be half way through prefill, except those that this batch completes."""
        prompts = self._prompts
        in_time = self._tokens_in_time(new)
        if not in_time:
            return False
        n_begun = sum(seq.started for seq in prompts.prefilling.values()) if prompts.order.ranked else 0
        completed = new.rest[0] <= min(prompts.budgets.tokens - self._n, in_time)
        if n_begun >= prompts.policy.half_way and not completed:
            return False
        return prompts.admission.admit(new) and prompts.enter(new) and new.stage is Stage.PREFILL
