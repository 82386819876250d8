"""How fast an instance prefills and encodes, from the batches it has executed."""

from __future__ import annotations

from hydrainfer.core import Lane, LiveSequence, Role, Stage, StepBatch

_PICTURE_S, _TOKEN_S = 0.3, 1e-3  # before anything is measured
_KEEP = 0.9  # what each batch leaves of the weight of those before it
_BAND = 1.5  # the pace in force changes when the recent one is so many times as fast, or as slow
_CHUNK = 64  # tokens: smaller ones take about as long, and tell little of what a token takes
_STRETCH = 1.25  # times the time that a batch may take, if the prompt is then done: a step for the rest takes longer
_LARGE = 256  # tokens of a batch by which the fastest pace may be told
_MOST = 1 << 30
_FASTER = 2.0  # a request may be so many times as fast as anything measured


class Pace:
    """Seconds per picture and per prefilled token, in the stages that run here. `recent` is of recent batches together,
    so that the large ones count. The pace in force follows it in leaps, for what is ordered by it must be ordered anew.
    """

    def __init__(self, role: Role) -> None:
        self._encodes, self.prefills = role.runs(Stage.ENCODE), role.runs(Stage.PREFILL)
        self._recent = dict.fromkeys(Lane, (0.0, 0.0))  # seconds, pictures or tokens
        self._fastest: dict[Lane, float] = {}
        self._now = {Lane.VISION: _PICTURE_S, Lane.LANGUAGE: _TOKEN_S}  # per picture or token, going by `_recent`
        self._in_force = dict(self._now)

    def observe(self, batch: StepBatch, seconds: float) -> bool:
        """A batch took this long. Returns whether the pace in force has changed."""
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
        """Keep with each sequence what a token of it takes: the longer the context before a chunk, the more."""
        if batch.n_items >= _CHUNK:
            for item in batch.work[batch.n_decodes :]:
                item.seq.token_s = seconds / batch.n_items

    def pictures_in(self, seconds: float) -> int:
        """How many pictures are encoded in so long, going by recent batches; at least one."""
        return max(1, whole(seconds / self._now[Lane.VISION]))

    def token_s(self, seq: LiveSequence | None = None) -> float:
        """Seconds of one more token of this sequence, or of any."""
        recent_s = self._now[Lane.LANGUAGE]
        return recent_s if seq is None or seq.token_s < recent_s else seq.token_s

    def chunk_in(self, seconds: float, seq: LiveSequence, *, first: bool) -> int:
        """How many tokens of it may be prefilled in so long. Fewer than make a chunk are none, unless it is the `first`
        of a batch, which has a chunk in any case. If only a little would be left, it may be a little more."""
        n, left = whole(seconds / self.token_s(seq)), len(seq.tokens) - seq.n_computed
        least = min(_CHUNK, left)
        if n < least:
            return least if first else 0
        return left if n < left <= n * _STRETCH else n

    def seconds(self, n_tokens: int, n_pictures: int) -> float:
        """How long so much work takes here, by the pace in force."""
        tokens_s = n_tokens * self._in_force[Lane.LANGUAGE] if self.prefills else 0.0
        return tokens_s + n_pictures * self._in_force[Lane.VISION] if self._encodes else tokens_s

    def least_s(self, n_tokens: int, n_pictures: int) -> float:
        """How long so much work takes at least, going by what was measured; 0 if nothing was."""
        fastest = self._fastest
        return (n_tokens * fastest.get(Lane.LANGUAGE, 0.0) + n_pictures * fastest.get(Lane.VISION, 0.0)) / _FASTER


def whole(number: float) -> int:
    """Rounded down, but not by what only the last bits of a clock make a difference of."""
    return int(min(number + 1e-6, _MOST))
