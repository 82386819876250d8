"""What the scheduler tells the engine: the turn of a lane, and the outcomes of an applied batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from hydrainfer.core import HydraError, LiveSequence, Stage, StepBatch, TokenLogprobs


class Turn(NamedTuple):
    """What a lane executes next (`batch`, None if it has nothing to do), and what changed when that was chosen:
    sequences whose present stage is in a batch for the first time, those that were preempted, and those that go on
    to another instance: they found all their pictures in the cache here, or need an encoder after all."""

    batch: StepBatch | None = None
    started: Iterable[LiveSequence] = ()
    preempted: Iterable[LiveSequence] = ()
    departed: Iterable[LiveSequence] = ()


class Outcome(msgspec.Struct, frozen=True):
    """The effect of a step on one sequence: new tokens, several if drafts were right, the end of a stage, or its end
    (`finish` or `error`)."""

    seq: LiveSequence
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    ended: Stage | None = None
    finish: str | None = None
    error: HydraError | None = None
