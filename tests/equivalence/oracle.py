"""A drafter that knows the answers, and is wrong as often as a test likes."""

from __future__ import annotations

import random
from contextlib import contextmanager

from hydrainfer.scheduler import DRAFTERS, Guess, Worth


def key(prompt_ids, sampling, choice):
    return tuple(prompt_ids), sampling.grammar, sampling.seed, sampling.min_tokens, choice


class Oracle:
    """`answers`: by `key`. `right`: how often a guess is right."""

    name = "oracle"

    def __init__(self, answers, right):
        self.answers, self.right, self.rng = answers, right, random.Random(1)

    def guess(self, seq, n):
        request = seq.request
        answer = self.answers.get(key(request.prompt_ids, request.sampling, request.choice), ())
        guesses = answer[seq.n_produced : seq.n_produced + n]
        return Guess([token if self.rng.random() < self.right else self._other(token, answer) for token in guesses])

    def _other(self, token, answer):
        """A wrong guess that a grammar may permit, as it permits few tokens at random."""
        return self.rng.choice([other for other in answer if other != token] or [token ^ 1])

    def keep(self, seqs):
        pass


@contextmanager
def drafted_by(monkeypatch, outputs, params, right):
    """Within, `--drafts oracle` knows these outputs of requests with these parameters, in this process; all that it
    guesses is verified."""
    answers = {
        key(out.prompt_token_ids, sampling, i): one.token_ids
        for out, sampling in zip(outputs, params, strict=True)
        for i, one in enumerate(out.outputs)
    }
    with drafts_of(monkeypatch, answers, right):
        yield


@contextmanager
def drafts_of(monkeypatch, answers, right):
    """As `drafted_by`, of answers by their keys."""
    with monkeypatch.context() as patch:
        patch.setitem(DRAFTERS, Oracle.name, lambda _: Oracle(answers, right))
        patch.setattr(Worth, "share", lambda worth, n_decodes, lucks, offers: list(offers))
        yield
