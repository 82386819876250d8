"""Drafts from predictions: what comes next in the answer that the client expects."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from hydrainfer.core import LiveSequence, Prediction
from hydrainfer.scheduler.drafting.drafter import Guess

_LONG = 4  # tokens that agreed in a row


class PredictionDrafter:
    """`Request.predicted_ids`, from where they last agreed with the answer."""

    name: ClassVar[str] = "prediction"

    def __init__(self) -> None:
        self._known: dict[str, _Followed] = {}

    def guess(self, seq: LiveSequence, n: int) -> Guess:
        ids = seq.request.predicted_ids
        if not ids:
            return Guess()
        followed = self._known.get(seq.id)
        if followed is None or followed.tokens is not seq.tokens:
            followed = self._known[seq.id] = _Followed(seq, Prediction(ids))
        prediction = followed.up_to_now()
        return Guess(prediction.next(n), (prediction.run > 0) + (prediction.run >= _LONG))

    def keep(self, seqs: Collection[LiveSequence]) -> None:
        self._known = {seq.id: self._known[seq.id] for seq in seqs if seq.id in self._known}


class _Followed:
    """A prediction and the tokens of the answer that it follows."""

    def __init__(self, seq: LiveSequence, prediction: Prediction) -> None:
        self.tokens, self._n_followed, self._prediction = seq.tokens, seq.n_prompt, prediction

    def up_to_now(self) -> Prediction:
        self._prediction.follow(self.tokens[self._n_followed :])
        self._n_followed = len(self.tokens)
        return self._prediction
