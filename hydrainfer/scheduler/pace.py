"""How fast an instance prefills and encodes, from the batches it has executed."""

from __future__ import annotations

from hydrainfer.core import Lane, Role, Stage, StepBatch

_PICTURE_S, _TOKEN_S = 0.3, 1e-3  # before anything is measured
_KEEP = 0.9  # what each batch leaves of the weight of those before it
_BAND = 1.5  # the pace in force changes when the recent one is so many times as fast, or as slow
_LARGE = 256  # tokens of a batch by which the fastest pace may be told
_FASTER = 2.0  # a request may be so many times as fast as anything measured


class Pace:
    """Seconds per picture and per prefilled token, in the stages that run here. `recent` is of recent batches together,
    so that the large ones count. The pace in force follows it in leaps, for what is ordered by it must be ordered anew.
    """

    def __init__(self, role: Role) -> None:
        self._runs = {Lane.VISION: role.runs(Stage.ENCODE), Lane.LANGUAGE: role.runs(Stage.PREFILL)}
        self._recent = dict.fromkeys(Lane, (0.0, 0.0))  # seconds, pictures or tokens
        self._in_force = {Lane.VISION: _PICTURE_S, Lane.LANGUAGE: _TOKEN_S}
        self._fastest: dict[Lane, float] = {}

    def observe(self, batch: StepBatch, seconds: float) -> bool:
        """A batch took this long. Returns whether the pace in force has changed."""
        lane, n = batch.lane, batch.n_items
        if (lane is Lane.LANGUAGE and not batch.chunked) or seconds <= 0.0:
            return False
        if lane is Lane.VISION or n >= _LARGE:
            self._fastest[lane] = min(self._fastest.get(lane, float("inf")), seconds / n)
        before_s, before_n = self._recent[lane]
        recent_s, recent_n = self._recent[lane] = _KEEP * before_s + seconds, _KEEP * before_n + n
        measured, old = recent_s / recent_n, self._in_force[lane]
        if old / _BAND <= measured <= old * _BAND:
            return False
        self._in_force[lane] = measured
        return True

    def seconds(self, n_tokens: int, n_pictures: int) -> float:
        """How long so much work takes here, by the pace in force."""
        return self._seconds(self._in_force, n_tokens, n_pictures)

    def least_s(self, n_tokens: int, n_pictures: int) -> float:
        """How long so much work takes at least, going by what was measured; 0 if nothing was."""
        return self._seconds(self._fastest, n_tokens, n_pictures) / _FASTER

    def _seconds(self, pace: dict[Lane, float], n_tokens: int, n_pictures: int) -> float:
        work = {Lane.LANGUAGE: n_tokens, Lane.VISION: n_pictures}
        return sum(n * pace.get(lane, 0.0) for lane, n in work.items() if self._runs[lane])
