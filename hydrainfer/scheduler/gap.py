"""The limit on a decoding request's wait for its next token, and what fits beside a decode step within it.

With a limit, nine in ten of a request's intervals must be within it, as in an SLO (paper, section 2.3). So when every
decoding request may have a late token, they all pause, and the waiting pictures and prompts are computed at once. That
is the soonest for those that wait, and costs each decoding request one interval, however long (no work is begun after
`_PAUSE_S`). Until they may pause, other work waits, for `Budgets.wait_s` at most in each stage, except for prompts that
fit the limit whole; after that it is cut to fit.
Without a limit the gap is a few decode steps, so that streams stay smooth. It is longer while a request has waited for
its first token for seconds, since requests that decode alone read all weights for one token each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from hydrainfer.core import Lane, LiveSequence, StepBatch
from hydrainfer.scheduler.filling import exceeds_batch, waiting_since
from hydrainfer.scheduler.pace import Pace, whole
from hydrainfer.scheduler.policy import Budgets
from hydrainfer.scheduler.waiting import Waiting

_STEPS = 2.5  # the length of a gap in decode steps, if there is no limit
_FIRST, _WIDEST, _NARROWEST = 0.85, 0.95, 0.5  # the used share of the limit: some work takes longer than measured
_LESS, _MORE = 0.03, 0.0003  # its change with a late token and with one in time, so that one in 100 is late
_BY_CHANCE = 1.5  # limits: a longer interval was not cut, or was disturbed
_PATIENCE_S, _SHARE = 2.0, 0.3  # without a limit: a longer wait gets this share of the rest at a time
_LEAST = 0.5  # decode steps; other work gets as much in any case
_CHUNK = 16  # tokens: smaller chunks take about as long
_UP, _DOWN = 0.1, 0.5  # the weight of a longer and of a shorter decode step: disturbances only make it longer
_KEEP = 0.9  # the factor by which each batch reduces the weight of earlier chunks
_STALE = 32  # batches with chunks in them after which a decode step is measured again
_PAUSE_S = 2.0  # the longest wait for a token during which other work is still begun
_LATE = 0.1  # of a request's intervals may be longer than the limit (paper, section 2.3)
_FEW, _MANY = 8, 64  # answers: the fewest that tell a usual length, and the latest ones that count
_INF = float("inf")


class _Step:
    """Recent decode steps of about one size: their seconds, and the number of batches with chunks since the last
    step."""

    __slots__ = ("age", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds, self.age = seconds, 0


class Gap:
    """The bound on the time between two decode steps, `Budgets.gap_s`. `decoding`: requests that decode; `waiting` and
    `begun`: those without a first token. Decode steps are measured by size, in powers of two, and chunks by the time
    that a batch takes beyond its decode step."""

    def __init__(
        self,
        budgets: Budgets,
        decoding: Mapping[str, LiveSequence],
        waiting: Waiting,
        begun: Collection[Mapping[str, LiveSequence]],
        pace: Pace,
    ) -> None:
        self.bounded, self.limited = budgets.gap_s is not None, bool(budgets.gap_s)
        self._late_s, self._wait_s = budgets.gap_s or 0.0, budgets.wait_s
        self._used = _FIRST
        self._lengths, self._n_usual = deque[int](maxlen=_MANY), 0  # of answers; intervals that nine in ten reach
        self._decoding = decoding
        self._most_s = budgets.step_s
        self._waiting, self._begun, self._pace = waiting, begun, pace
        self._steps: dict[int, _Step] = {}
        self._chunks = (0.0, 0.0)  # seconds, tokens

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Record a batch that took this long by itself."""
        if not self.bounded or batch.lane is Lane.VISION:
            return
        if not batch.chunked:
            size = batch.n_items.bit_length()
            if (step := self._steps.get(size)) is None:
                self._steps[size] = _Step(seconds)
            else:
                step.seconds += (_UP if seconds > step.seconds else _DOWN) * (seconds - step.seconds)
                step.age = 0
        elif (step := self._steps.get((batch.n_decodes + batch.n_drafts).bit_length())) is not None:
            step.age += 1
            before_s, before_n = self._chunks
            more_s = max(seconds - step.seconds, 0.0)
            n_chunked = batch.n_items - batch.n_decodes - batch.n_drafts
            self._chunks = _KEEP * before_s + more_s, _KEEP * before_n + n_chunked

    def landed(self, batch: StepBatch, now: float) -> None:
        """Adapt the used share of the limit after a batch that was cut to it. Call this before `made` hears of its
        tokens."""
        if self.limited and batch.n_decodes and (batch.chunked or batch.after_s) and not self.may_be_late():
            interval_s = now - batch.work[0].seq.latest_s
            if interval_s <= self._late_s:
                self._used = min(self._used + _MORE, _WIDEST)
            elif interval_s <= _BY_CHANCE * self._late_s:
                self._used = max(self._used - _LESS, _NARROWEST)

    def made(self, seq: LiveSequence, n: int, now: float) -> None:
        """Note that the sequence has got `n` tokens, which count as `n` equal intervals."""
        if (now - seq.latest_s) / n > self._late_s:
            seq.n_late += n
        seq.latest_s = now

    def ended(self, n: int) -> None:
        """Note that an answer of `n` tokens ended by its length or a token. (Stop strings are not known here.)"""
        if self.limited:
            self._lengths.append(n)
            if len(self._lengths) >= _FEW:
                self._n_usual = sorted(self._lengths)[len(self._lengths) // 10] - 1

    def may_be_late(self) -> bool:
        """Whether every decoding request may wait for its next token for longer than the limit. It may if nine in ten
        of its intervals are still within the limit, should its answer become as long as nine in ten answers do; or if
        too many were late already."""
        if not self.limited:
            return False
        for seq in self._decoding.values():
            n_most = seq.n_most - seq.n_prompt - 1
            n_likely = max(seq.n_produced, min(self._n_usual, n_most))
            if _LATE * n_likely < seq.n_late + 1 <= _LATE * n_most + 1:
                return False
        return True

    def may_pause(self, now: float) -> bool:
        """Whether decodes may wait for all other work: every decoding request may be late, some can still keep the
        limit, and none has waited for `_PAUSE_S`."""
        if not self.limited or self._waited_s(now) >= _PAUSE_S or not self.may_be_late():
            return False
        return any(seq.n_late <= _LATE * (seq.n_most - seq.n_prompt - 1) for seq in self._decoding.values())

    def pauses_for_prompts(self, now: float) -> bool:
        """`may_pause`, if there is more work than one batch takes: a last prompt shares its batch with the decodes."""
        return (
            self.limited and exceeds_batch(self._waiting, self._begun, self._pace, self._most_s) and self.may_pause(now)
        )

    def _waiting_since(self) -> float:
        return waiting_since(self._waiting, self._begun)

    def _waited_s(self, now: float) -> float:
        """The longest time that a decoding request has waited for its next token."""
        return now - min((seq.latest_s for seq in self._decoding.values()), default=now)

    def waits(self, now: float) -> bool:
        """Whether work that does not fit the limit whole waits, because a pause may come soon."""
        return self.limited and 0.0 <= now - self._waiting_since() < self._wait_s and not self.may_be_late()

    def pictures_s(self, n_decodes: int, now: float) -> float:
        """How long the pictures being encoded may go on beside a decode step of `n_decodes` sequences."""
        return 0.0 if self.waits(now) else self.other_s(n_decodes, now)

    def other_s(self, n_decodes: int, now: float) -> float:
        """How long other work may take beside a decode step of `n_decodes` sequences. 0: the step is to be measured by
        itself."""
        if not self.bounded or not n_decodes:
            return _INF
        step = self._steps.get(n_decodes.bit_length())
        if step is None or step.age >= _STALE:
            return 0.0
        if self.limited:
            if self.may_be_late():
                return self._most_s
            return max(self._used * self._late_s - step.seconds, _LEAST * step.seconds)
        queued_s = now - self._waiting_since() - _PATIENCE_S
        return min(max((_STEPS - 1.0) * step.seconds, _SHARE * queued_s), self._most_s)

    def token_s(self, seq: LiveSequence) -> float:
        """Seconds of one more prefilled token beside a decode step."""
        seconds, n = self._chunks
        return seconds / n if n else seq.token_s

    def chunk_in(self, seconds: float, seq: LiveSequence, *, first: bool) -> int:
        """How many tokens of the sequence may be prefilled in `seconds`; as `Pace.chunk_in`."""
        each_s, least = self.token_s(seq), min(_CHUNK, len(seq.tokens) - seq.n_computed)
        n = whole(seconds / each_s) if each_s > 0.0 else least
        return n if n >= least else least if first else 0
