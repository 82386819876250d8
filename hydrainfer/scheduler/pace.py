"""The speed at which an instance prefills and encodes, from the batches it has executed."""

from __future__ import annotations

from hydrainfer.core import Duties, Lane, LiveSequence, Stage, StepBatch

_PICTURE_S, _TOKEN_S = 0.3, 1e-3  # until something is measured
_KEEP = 0.9  # the factor by which each batch reduces the weight of earlier ones
_BAND = 1.5  # the pace in force changes when the recent one is this many times as fast, or as slow
_CHUNK = 64  # tokens: smaller chunks take about as long, and tell little about the time per token
_STRETCH = 1.25  # times a batch's time, if that completes the prompt: one more step for the rest takes longer
_LARGE = 256  # tokens; smaller batches do not count for the fastest pace
_MOST = 1 << 30
_FASTER = 2.0  # a request may be this many times as fast as anything measured


class Pace:
    """Seconds per picture and per prefilled token, in the stages that run here. The recent pace is taken over recent
    batches together, so that large ones count more. The pace in force follows it in leaps, because each change makes
    all ranks change.
    """

    def __init__(self, duties: Duties) -> None:
        self.duties = duties
        self._recent = dict.fromkeys(Lane, (0.0, 0.0))  # seconds, pictures or tokens
        self._fastest: dict[Lane, float] = {}
        self._now = {Lane.VISION: _PICTURE_S, Lane.LANGUAGE: _TOKEN_S}  # per picture or token, from `_recent`
        self._in_force = dict(self._now)

    def observe(self, batch: StepBatch, seconds: float) -> bool:
        """Record a batch that took this long. Returns whether the pace in force has changed."""
        lane, n = batch.lane, batch.n_items
        if (lane is Lane.LANGUAGE and not batch.chunked) or seconds <= 0.0:
            return False
        if lane is Lane.LANGUAGE:
            self._note_chunks(batch, seconds)
        if lane is Lane.VISION or n >= _LARGE:
            self._fastest[lane] = min(self._fastest.get(lane, float("inf")), seconds / n)
        before_s, before_n = self._recent[lane]
        recent_s, recent_n = self._recent[lane] = _KEEP * before_s + seconds, _KEEP * before_n + n
        each_s, in_force_s = recent_s / recent_n, self._in_force[lane]
        self._now[lane] = each_s
        if in_force_s / _BAND <= each_s <= in_force_s * _BAND:
            return False
        self._in_force = dict(self._now)
        return True

    def _note_chunks(self, batch: StepBatch, seconds: float) -> None:
        """Keep with each sequence the seconds per token of its chunk, which grow with the context before the chunk."""
        if batch.n_items >= _CHUNK:
            for item in batch.work[batch.n_decodes :]:
                item.seq.token_s = seconds / batch.n_items

    def pictures_in(self, seconds: float) -> int:
        """How many pictures are encoded in `seconds`, judging by recent batches; at least one."""
        return max(1, whole(seconds / self._now[Lane.VISION]))

    def token_s(self, seq: LiveSequence | None = None) -> float:
        """Seconds for one more token of this sequence, or of any sequence."""
        recent_s = self._now[Lane.LANGUAGE]
        return recent_s if seq is None or seq.token_s < recent_s else seq.token_s

    def chunk_in(self, seconds: float, seq: LiveSequence, *, first: bool) -> int:
        """How many tokens of the sequence may be prefilled in `seconds`. Too few for a chunk count as none, except for
        the `first` of a batch, which gets a chunk in any case. If only a little of the prompt would be left, that is
        included."""
        n, left = whole(seconds / self.token_s(seq)), len(seq.tokens) - seq.n_computed
        least = min(_CHUNK, left)
        if n < least:
            return least if first else 0
        return left if n < left <= n * _STRETCH else n

    def seconds(self, n_tokens: int, n_pictures: int) -> float:
        """How long this much work takes here, by the pace in force."""
        tokens_s = n_tokens * self._in_force[Lane.LANGUAGE] if self.duties.runs(Stage.PREFILL) else 0.0
        return tokens_s + n_pictures * self._in_force[Lane.VISION] if self.duties.runs(Stage.ENCODE) else tokens_s

    def least_s(self, n_tokens: int, n_pictures: int) -> float:
        """The least time that this much work takes, judging by measurements; 0 if there are none."""
        fastest = self._fastest
        return (n_tokens * fastest.get(Lane.LANGUAGE, 0.0) + n_pictures * fastest.get(Lane.VISION, 0.0)) / _FASTER


def whole(number: float) -> int:
    """The number rounded down, ignoring differences in the last bits of a clock."""
    return int(min(number + 1e-6, _MOST))
