"""The work that waits at an instance, in the units in which its cost is measured."""

from __future__ import annotations

from typing import NamedTuple

from hydrainfer.core import Stage
from hydrainfer.scheduler.scheduler import Scheduler


class Backlog(NamedTuple):
    """Pictures that wait to be encoded here, tokens to be prefilled, and sequences that decode here or will. `sizes`:
    see `Load`."""

    n_pictures: int
    n_tokens: int
    n_decoding: int
    sizes: tuple[tuple[int, int], ...]


def backlog(s: Scheduler) -> Backlog:
    """The present backlog, including the batches that are being computed."""
    prefills = s.duties.runs(Stage.PREFILL)
    pictures, tokens = s.waiting.n_pictures, s.waiting.n_tokens if prefills else 0
    decoding = len(s.decoding) + s.parking.n_live
    sizes = dict(s.waiting.sizes) if prefills else {}
    for group in (s.encoding, s.prefilling, s.arriving, s.fetching.live):
        for seq in group.values():
            stage = seq.plan[seq.cursor]
            if stage is Stage.DECODE:
                decoding += 1
                continue
            if stage is Stage.ENCODE:
                pictures += len(seq.pending_media)
            if prefills:
                left = len(seq.tokens) - seq.n_computed
                tokens += left
                n, m = sizes.get(left.bit_length(), (0, 0))
                sizes[left.bit_length()] = n + 1, m + left
    told = tuple(size for size in sizes.values() if size[0]) if s.policy.order == "rank" else ()
    return Backlog(pictures, tokens, decoding, told)
