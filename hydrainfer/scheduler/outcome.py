"""The scheduler's answers to the engine: a lane's turn, and the outcomes of an applied batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from hydrainfer.core import HydraError, LiveSequence, Stage, StepBatch, TokenLogprobs


class Turn(NamedTuple):
    """The batch that a lane executes next (None if it has nothing to do), and what choosing it changed: the sequences
    whose present stage is in a batch for the first time, those that were preempted, and those that go on to another
    instance, because they found all their pictures in the cache here or need an encoder after all."""

    batch: StepBatch | None = None
    started: Iterable[LiveSequence] = ()
    preempted: Iterable[LiveSequence] = ()
    departed: Iterable[LiveSequence] = ()


class Outcome(msgspec.Struct, frozen=True):
    """The effect of a step on one sequence: new tokens (several if some of its `n_drafted` drafts were right), the end
    of a stage, or the end of the sequence (`finish` or `error`)."""

    seq: LiveSequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    ended: Stage | None = None
    finish: str | None = None
    error: HydraError | None = None
    n_drafted: int = 0
