"""Recent costs of work on this instance. Placement compares instances by them."""

from __future__ import annotations

from hydrainfer.core import Lane, Load, StepBatch

_WEIGHT = 0.2  # weight of the newest measurement


class Costs:
    """Running means of measured batches and copies, in seconds per picture, per token prefilled, decoded or copied."""

    def __init__(self) -> None:
        self._picture_s = self._token_s = self._decode_s = self._pull_s = 0.0

    def __copy__(self) -> Costs:  # `copy.copy` by itself takes several times as long
        twin = Costs()
        vars(twin).update(vars(self))
        return twin

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Record a batch that took this long. A batch with prefill in it counts as prefill: decodes are the smaller
        part."""
        each_s = seconds / batch.n_items
        if batch.lane is Lane.VISION:
            self._picture_s = _mean(self._picture_s, each_s)
        elif not batch.chunked:
            self._decode_s = _mean(self._decode_s, each_s)
        else:
            self._token_s = _mean(self._token_s, each_s)

    def pulled(self, n_tokens: int, seconds: float) -> None:
        """Record that the KV of `n_tokens` tokens was copied to this instance in `seconds`."""
        self._pull_s = _mean(self._pull_s, seconds / n_tokens)

    def load(self, n_pictures: int, n_tokens: int, n_decoding: int, sizes: tuple[tuple[int, int], ...]) -> Load:
        costs_s = self._picture_s, self._token_s, self._decode_s, self._pull_s
        return Load(n_pictures, n_tokens, n_decoding, *costs_s, sizes)


def _mean(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old) if old else new
