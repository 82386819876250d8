"""The work that a batch takes from each sequence within the budgets, and the work and waiting time that remain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from hydrainfer.core import EncodeWork, Handoff, LiveSequence, Stage, TokenWork
from hydrainfer.scheduler.pace import Pace
from hydrainfer.scheduler.waiting import Waiting


def waiting_since(waiting: Waiting, running: Iterable[Mapping[str, LiveSequence]]) -> float:
    """The start of the longest wait among the first of each queue and the sequences in `running`; infinity if there are
    none."""
    heads = (*waiting.pictured.head, *waiting.ready.head)
    return min((seq.queued_s for seq in chain(heads, *(group.values() for group in running))), default=float("inf"))


def exceeds_batch(waiting: Waiting, begun: Collection[Mapping[str, LiveSequence]], pace: Pace, most_s: float) -> bool:
    """Whether several sequences wait or are in the stages of `begun`, or one does whose work takes longer than
    `most_s`."""
    if len(waiting) + sum(map(len, begun)) > 1:
        return True
    heads = (*waiting.pictured.head, *waiting.ready.head)
    return any(pace.seconds(*seq.rest) > most_s for seq in chain(heads, *(group.values() for group in begun)))


def add_chunk(work: list[TokenWork], seq: LiveSequence, budget: int, *, first: bool) -> int:
    """Add the sequence's next prefill chunk, up to the next of its `stops`. Returns the number of its tokens. That is
    at most `budget`, unless it is the `first` chunk of a batch and begins with a picture that must not be cut."""
    left = len(seq.tokens) - seq.n_computed
    stop = next((stop for stop in seq.hold.stops if stop > seq.n_computed), seq.hold.capacity)
    count = min(left, budget, min(stop, seq.hold.capacity) - seq.n_computed)
    if seq.request.media and 0 < count < left:
        count = _uncut(seq, count, first=first)
    if count > 0:
        work.append(TokenWork(seq, seq.n_computed, count, count == left))
    return count


def _uncut(seq: LiveSequence, count: int, *, first: bool) -> int:
    """`count`, or less, so that the chunk ends before a picture that would be cut; more if it is `first` and starts
    there."""
    start, stop = seq.n_computed, seq.n_computed + count
    cut = next((m for m in seq.request.media if m.whole and m.start < stop < m.end), None)
    if cut is None:
        return count
    if cut.start > start:
        return cut.start - start
    return cut.end - start if first and cut.end <= seq.hold.capacity else 0


def add_pictures(work: list[EncodeWork], seq: LiveSequence, left: int, most: int) -> int:
    """Add the sequence's pictures, in order, until there are `most` or one does not fit the `left` tokens; a batch
    takes at least one. Returns the tokens that are then left."""
    for i in seq.pending_media[: max(most - len(work), 0)]:
        n = seq.request.media[i].n_tokens
        if work and n > left:
            return 0
        work.append(EncodeWork(seq, i))
        left -= n
    return left


def rest_of(handoff: Handoff) -> tuple[int, int]:
    """The tokens and pictures of an offered request that are still to be computed."""
    request = handoff.request
    n_pictures = len(request.media) if handoff.stage is Stage.ENCODE else 0
    return request.n_prompt + len(handoff.produced) - handoff.n_computed, n_pictures
