"""The plan of sampling: the operations on each row of logits, read from the sequences at launch and never later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hydrainfer.core import SamplingParams, TokenWork
from hydrainfer.core.random import draw_key
from hydrainfer.grammar import Guided


class Draw(NamedTuple):
    """One row to sample at random. `key`, 64 bits, determines the noise. `top_k` 0 is off."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int

    @property
    def filters(self) -> bool:
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0


class Penalty(NamedTuple):
    """The penalties of one row and the tokens that they concern: `seen` in prompt or output (unique), `produced` ids
    with their `counts`, and, unless `follows` is -1, the token with this index in the batch before."""

    row: int
    seen: np.ndarray
    produced: np.ndarray
    counts: np.ndarray
    repetition: float
    presence: float
    frequency: float
    follows: int = -1


@dataclass(slots=True)
class SamplingPlan:
    """The rows that need each kind of work. A row in none of the lists is greedy and costs nothing more."""

    penalties: list[Penalty] = field(default_factory=list)
    banned: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    biases: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    logprobs: list[tuple[int, int]] = field(default_factory=list)
    guided: list[Guided] = field(default_factory=list)
    blocked: np.ndarray | None = None
    """The tokens that the grammars of `guided` forbid, bool [guided rows, vocab]; set while the forward pass runs."""

    @property
    def greedy(self) -> bool:
        """Whether only the likeliest token of each row is needed."""
        return not (self.draws or self.logprobs or self.alters_logits)

    @property
    def guided_rows(self) -> list[int]:
        return [row for one in self.guided for row in range(one.row, one.row + one.n_rows)]

    @property
    def alters_logits(self) -> bool:
        return bool(self.penalties or self.banned or self.biases or self.guided)


def plan_sampling(work: list[TokenWork], follows: Sequence[int] | None = None) -> SamplingPlan:
    """The plan for the sampled rows of `work`, numbered in the order of `StepResult.tokens`. `follows`: for each row,
    the index in the batch before of the row's last token; -1 if that token is known; None if all are."""
    plan = SamplingPlan()
    rows = ((w, i) for w in work if w.sample for i in range(len(w.drafts) + 1))
    for row, (w, n_before) in enumerate(rows):
        seq, drafts, position = w.seq, w.drafts[:n_before], w.start + w.count - len(w.drafts) + n_before
        request = seq.request
        s = request.sampling
        if s.penalised:
            last = -1 if follows is None else follows[row]
            plan.penalties.append(_penalty(row, [*seq.tokens, *drafts], request.n_prompt, s, last))
        if ends := request.ends_to_avoid(position - request.n_prompt):
            plan.banned.append((row, ends))
        if s.bad_ids:
            produced = [*seq.tokens[request.n_prompt :], *drafts]
            plan.banned += [(row, ids[-1:]) for ids in s.bad_ids if _ends_with(produced, ids[:-1])]
        if s.logit_bias:
            ids, values = zip(*s.logit_bias)
            plan.biases.append((row, ids, values))
        if not s.greedy:
            key = draw_key(request.seed, request.choice, position)
            plan.draws.append(Draw(row, s.temperature, max(s.top_k, 0), s.top_p, s.min_p, key))
        if s.grammar is not None and not n_before:
            produced = seq.tokens[request.n_prompt :]
            plan.guided.append(Guided(row, seq.id, s.grammar, produced, s.reasoning, drafts=w.drafts))
        if s.logprobs is not None:
            plan.logprobs.append((row, s.logprobs))
    return plan


def _ends_with(produced: list[int], ids: tuple[int, ...]) -> bool:
    return not ids or tuple(produced[-len(ids) :]) == ids


def _penalty(row: int, tokens: list[int], n_prompt: int, s: SamplingParams, last: int) -> Penalty:
    produced, counts = np.unique(np.array(tokens[n_prompt:], dtype=np.int64), return_counts=True)
    seen = np.unique(np.array(tokens, dtype=np.int64)) if s.repetition_penalty != 1.0 else produced
    return Penalty(row, seen, produced, counts, s.repetition_penalty, s.presence_penalty, s.frequency_penalty, last)
