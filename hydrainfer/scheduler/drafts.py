"""Drafts: guesses of a sequence's next tokens, verified beside its decode step (speculative decoding).

    tokens     … x   drafts   a  b  c        one work item of 1 + 3 rows, each of which samples its own token
    sampled          a  b  d  e              a and b are as drafted, d is what follows, e is not used

Guesses come from drafters (`drafting`), or with the result that they follow (`StepResult.drafts`). Whatever is drafted,
the answer has the same tokens as without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple, Protocol

from hydrainfer.core import DraftCounts, Guessing, LiveSequence, StepBatch, TokenWork
from hydrainfer.scheduler.drafting import BroughtDrafter, Drafter, Guess, Guide
from hydrainfer.scheduler.policy import Budgets
from hydrainfer.scheduler.worth import MANY_ROWS, Luck, Worth

logger = logging.getLogger("hydrainfer.scheduler.drafts")

_DEVICE = "device"
"""The name of the drafter of an emulated device."""
_USUAL = 0.02
"""What a new draft weighs at least in the luck of all sequences."""


class Drafting(NamedTuple):
    """Who drafts: the first of the `drafters` that has a guess speaks. `worth` decides how many drafts are verified;
    None: all. `most`: drafts of a sequence in one step. `guide`: knows the grammars of sequences; without it those that
    have one get no drafts. `n_vocab`: the ids that the model knows."""

    drafters: Sequence[Drafter] = ()
    worth: Worth | None = None
    most: int = 63
    guide: Guide | None = None
    n_vocab: int = 1 << 31

    @classmethod
    def of_guesses(cls, guesses: Guessing, budgets: Budgets) -> Drafting:
        """The drafting of a device whose results bring guesses."""
        return cls((), Worth(MANY_ROWS, budgets.draft_s), guesses.most)


class DraftRoom(Protocol):
    """Blocks for drafts; see `SequenceRoom`."""

    def room_for_drafts(self, seq: LiveSequence, n: int) -> int: ...

    def drafted(self, seq: LiveSequence, n_before: int, n_computed: int) -> None: ...


class Drafts:
    """The drafts of a scheduler's sequences."""

    def __init__(self, room: DraftRoom, drafting: Drafting) -> None:
        self._room, self._most = room, drafting.most
        self._drafters = list(drafting.drafters)
        self._worth, self._guide, self._n_vocab = drafting.worth, drafting.guide, drafting.n_vocab
        brought = next((one for one in self._drafters if isinstance(one, BroughtDrafter)), None)
        self._asks = brought is not None
        self._brought = BroughtDrafter(_DEVICE) if brought is None else brought
        if brought is None:
            self._drafters.append(self._brought)
        self._usual: dict[tuple[str, int], Luck] = {}  # by drafter and kind: of all sequences
        self._lucks: dict[tuple[str, str, int], Luck] = {}  # by sequence, drafter and kind
        self._in_flight: dict[str, tuple[str, int]] = {}  # by sequence: the drafter and kind of what is verified
        self.counts: dict[str, DraftCounts] = {}

    def keep(self, seq: LiveSequence, guesses: tuple[int, ...]) -> None:
        """Keep guesses of what follows the tokens that the sequence has now, which came with a result."""
        if guesses:
            self._brought.bring(seq, guesses)

    @property
    def expected(self) -> bool:
        """Whether there may be guesses."""
        return len(self._drafters) > 1 or len(self._brought) > 0

    def wanted(self, work: list[TokenWork]) -> int:
        """How many tokens the device shall guess behind each that it samples in a batch of this work. None while a
        prompt has a next chunk: that batch takes no drafts."""
        if not self._asks or not all(item.sample for item in work):
            return 0
        seqs = [item.seq for item in work if item.sample and self._shall_guess(item)]
        if self._worth is None or not seqs:
            return self._most if seqs else 0
        return self._worth.guesses([self._luck(seq, self._brought.name, 0) for seq in seqs], self._most)

    def _shall_guess(self, item: TokenWork) -> bool:
        """Whether to ask the device about a sequence: not while another drafter, which costs nothing, speaks for it."""
        name, _ = self._in_flight.get(item.seq.id, (self._brought.name, 0)) if item.drafts else (self._brought.name, 0)
        return name == self._brought.name and item.seq.request.sampling.drafts

    def extend(self, ready: list[TokenWork], budget: int) -> tuple[list[TokenWork], int]:
        """These decodes, with the drafts of their sequences, and how many tokens they are then. Drafts take only room
        that is free, and no part of the `budget` that another decode needs."""
        seqs, left = [item.seq for item in ready], budget - len(ready)
        self._forget(seqs)
        offers = [self._offer(seq) for seq in seqs] if left > 0 else []
        self._brought.clear()
        if not any(guess.tokens for _, guess in offers):
            return ready, len(ready)
        counts = [len(guess.tokens) for _, guess in offers]
        if self._worth is not None:
            lucks = [self._luck(seq, name, guess.kind) for seq, (name, guess) in zip(seqs, offers)]
            counts = self._worth.share(len(ready), lucks, counts)
        work: list[TokenWork] = []
        for item, (name, guess), count in zip(ready, offers, counts):
            n, fits = len(guess.tokens), min(count, left)
            drafts = tuple(guess.tokens[:fits])
            if drafts:
                drafts = drafts[: self._room.room_for_drafts(item.seq, fits)]
            if len(drafts) < n:
                self._counts_of(name).leave_out(cost=n - count, budget=count - fits, room=fits - len(drafts))
            if drafts:
                left -= len(drafts)
                self._in_flight[item.seq.id] = name, guess.kind
                item = TokenWork(item.seq, item.start, 1 + len(drafts), True, drafts)
            work.append(item)
        return work, budget - left

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Record a batch that took this long by itself."""
        if batch.guess_failed and self._asks:
            self._asks = False
            self._drop(self._brought)
        if self._worth is not None:
            self._worth.observe(batch, seconds)

    def verified(self, seq: LiveSequence, drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
        """`verified`, from which it learns."""
        n_before = len(seq.tokens) - 1
        tokens = verified(seq, drafts, sampled)
        self._room.drafted(seq, n_before, len(seq.tokens))
        name, kind = self._in_flight.pop(seq.id, (_DEVICE, 0))
        n_right = sum(map(eq, tokens, drafts))
        self._luck(seq, name, kind).learn(len(drafts), n_right)
        self._usual[name, kind].learn(len(drafts), n_right)
        self._counts_of(name).add(len(drafts), n_right)
        return tokens

    def _counts_of(self, name: str) -> DraftCounts:
        return self.counts.setdefault(name, DraftCounts())

    def _offer(self, seq: LiveSequence) -> tuple[str, Guess]:
        """The drafter that speaks first, and its guess; or the device's, if more of that is expected to be right."""
        n, sampling = min(self._most, seq.n_most - len(seq.tokens) - 1), seq.request.sampling
        if n <= 0 or not sampling.drafts or (sampling.grammar is not None and self._guide is None):
            return _DEVICE, Guess()
        first: tuple[str, Guess] | None = None
        for drafter in list(self._drafters):
            if first is not None and drafter is not self._brought:
                continue
            try:
                tokens, kind = drafter.guess(seq, n)
            except Exception:
                self._fell(drafter)
                continue
            if tokens and (tokens := self._possible(seq, tokens)):
                offer = drafter.name, Guess(tokens, kind)
                if first is None or self._expected(seq, offer) > self._expected(seq, first):
                    first = offer
                if not self._asks:
                    break
        return first or (_DEVICE, Guess())

    def _expected(self, seq: LiveSequence, offer: tuple[str, Guess]) -> float:
        """How many of these guesses are right, on average."""
        name, guess = offer
        return sum(self._luck(seq, name, guess.kind).chances(len(guess.tokens)))

    def _possible(self, seq: LiveSequence, guesses: Sequence[int]) -> Sequence[int]:
        """The first of the guesses, up to one that cannot come."""
        if max(guesses) >= self._n_vocab or min(guesses) < 0:  # a picture's placeholders have such ids
            guesses = list(takewhile(lambda token: 0 <= token < self._n_vocab, guesses))
        if self._guide is None or seq.request.sampling.grammar is None or not guesses:
            return guesses
        return self._guide.allowed(seq, guesses)

    def _fell(self, drafter: Drafter) -> None:
        """Go on without a drafter that has raised an error."""
        logger.exception("the drafter %s has failed; from now on this instance goes without it", drafter.name)
        self._drop(drafter)

    def _drop(self, drafter: Drafter) -> None:
        self._drafters.remove(drafter)
        self._counts_of(drafter.name).n_failures += 1

    def _luck(self, seq: LiveSequence, name: str, kind: int) -> Luck:
        """How often this drafter's guesses of this kind are right for a sequence, at first as often as usual."""
        luck = self._lucks.get((seq.id, name, kind))
        if luck is None:
            usual = self._usual.setdefault((name, kind), Luck(least=_USUAL))
            luck = self._lucks[seq.id, name, kind] = usual.like()
        return luck

    def _forget(self, seqs: Collection[LiveSequence]) -> None:
        """Forget sequences that are gone, once they are as many as those that are there."""
        if len(self._lucks) > 4 * len(seqs) + 64:
            here = {seq.id for seq in seqs}
            self._lucks = {key: luck for key, luck in self._lucks.items() if key[0] in here}
            self._in_flight = {id_: of for id_, of in self._in_flight.items() if id_ in here}
            for drafter in list(self._drafters):
                try:
                    drafter.keep(seqs)
                except Exception:
                    self._fell(drafter)


def verified(seq: LiveSequence, drafts: tuple[int, ...], sampled: list[int]) -> tuple[int, ...]:
    """The new tokens of `seq` among `sampled`, which has one more than `drafts`: up to the first that differs from its
    draft or ends the choice. All but the last are appended to `seq.tokens`."""
    taken: list[int] = []
    for draft, token in zip(drafts, sampled):
        taken.append(token)
        if token != draft:
            return tuple(taken)
        seq.extend((token,))
        if seq.finish_reason(token) is not None:
            seq.retract()
            return tuple(taken)
    return *taken, sampled[-1]
