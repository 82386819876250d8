"""Accounting for decode steps that a simulator skips instead of executing one by one."""

from __future__ import annotations

from hydrainfer.core import StepBatch, TokenWork
from hydrainfer.scheduler.scheduler import Scheduler


def skip(s: Scheduler, batch: StepBatch, tokens: list[list[int]], ends: list[float]) -> StepBatch:
    """Apply `batch`, which holds only decodes, and all but the last of the batches like it that follow. `tokens`: those
    that each sequence produced in them; `ends`: when each batch was done. Returns the last batch, which is in flight.
    None of the batches may end a sequence or need more room than there is."""
    s.gap.landed(batch, ends[0])
    for item, made in zip(batch.work, tokens):
        seq = item.seq
        seq.extend(made, computed=True)
        for at in ends if s.gap.limited else ():
            s.gap.made(seq, 1, at)
        if seq.n_computed >= seq.hold.due:
            s.room.settle(seq)
        while len(seq.tokens) > seq.hold.capacity:
            grown = s.room.grow(seq)
            assert grown, "a skip that wanted more room than there is"
    s.n_batches += len(tokens[0])
    work = [TokenWork(item.seq, item.seq.n_computed, 1, True) for item in batch.work]
    return StepBatch(s.n_batches, batch.lane, work, len(work), len(work))
