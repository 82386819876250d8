"""Decode steps that a simulator need not turn one by one."""

from __future__ import annotations

from hydrainfer.core import StepBatch, TokenWork
from hydrainfer.scheduler.scheduler import Scheduler


def skip(s: Scheduler, batch: StepBatch, tokens: list[list[int]]) -> StepBatch:
    """As if a batch of decodes and all but the last of others like it had been applied, with these tokens of each
    sequence; the last is returned, in flight. None of them may end a sequence or want more room than there is."""
    for (seq, *_), made in zip(batch.work, tokens):
        seq.tokens += made
        seq.n_computed += len(made)
        while len(seq.tokens) > seq.capacity:
            grown = s.room.grow(seq)
            assert grown, "a skip that wanted more room than there is"
    s.n_batches += len(tokens[0])
    work = [TokenWork(seq, seq.n_computed, 1, True) for seq, *_ in batch.work]
    return StepBatch(s.n_batches, batch.lane, work, len(work))
