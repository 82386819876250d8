"""The work that waits at an instance, counted in the units that its cost is measured in."""

from __future__ import annotations

from hydrainfer.core import Stage
from hydrainfer.scheduler.scheduler import Scheduler


def backlog(s: Scheduler) -> tuple[int, int, int]:
    """Pictures that wait to be encoded here, tokens to be prefilled, and sequences that decode or come to."""
    prefills = s.role.runs(Stage.PREFILL)
    pictures, tokens = s.waiting.n_pictures, s.waiting.n_tokens if prefills else 0
    decoding = len(s.decoding) + s.parking.n_live
    for group in (s.encoding, s.prefilling, s.arriving):
        for seq in group.values():
            stage = seq.plan[seq.cursor]
            if stage is Stage.DECODE:
                decoding += 1
                continue
            if stage is Stage.ENCODE:
                pictures += len(seq.pending_media)
            if prefills:
                tokens += len(seq.tokens) - seq.n_computed
    return pictures, tokens, decoding
