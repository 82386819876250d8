"""What waits at an instance, counted in the units that its cost is measured in."""

from __future__ import annotations

from hydrainfer.core import Stage
from hydrainfer.scheduler.scheduler import Scheduler


def backlog(s: Scheduler) -> tuple[int, int, int]:
    """Pictures that wait to be encoded here, tokens to be prefilled, and sequences that decode or come to."""
    pictures = tokens = decoding = 0
    queued = (seq for queue in s.waiting.values() for seq in queue)
    for seq in [*s.encoding.values(), *s.prefilling.values(), *s.arriving.values(), *queued]:
        if seq.stage is Stage.ENCODE:
            pictures += len(seq.pending_media)
        if seq.stage is Stage.DECODE:
            decoding += 1
        elif s.role.runs(Stage.PREFILL):
            tokens += len(seq.tokens) - seq.n_computed
    return pictures, tokens, decoding + len(s.decoding)
