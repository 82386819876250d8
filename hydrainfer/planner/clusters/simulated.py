"""Clusters on the virtual clock: instances whose prompts take the measured seconds, and what they serve at a rate."""

from __future__ import annotations

from functools import lru_cache

from hydrainfer.core import CostModel, Lane, StepBatch
from hydrainfer.planner.clusters.times import Times


class MeasuredCost(CostModel, frozen=True, kw_only=True):
    """A device by a table of whole prompts: a chunk takes what the table says of its end less what it says of its
    start, but never less than a prompt of its own length. Several prompts of a batch take turns. Decodes are as in
    `CostModel`."""

    times: Times

    def step_s(self, batch: StepBatch) -> float:
        if batch.lane is Lane.VISION or not batch.chunked:
            return super().step_s(batch)
        seconds = 0.0
        if batch.n_decodes:
            seconds = self.step_base_s + self.decode_token_s * batch.n_decodes
        for item in batch.work[batch.n_decodes :]:
            seconds += self._chunk_s(item.start, item.count)
        return seconds

    def _chunk_s(self, start: int, count: int) -> float:
        alone_s = _prefill_s(self.times, count)
        if not start:
            return alone_s
        return max(alone_s, _prefill_s(self.times, start + count) - _prefill_s(self.times, start))


@lru_cache(maxsize=65536)
def _prefill_s(times: Times, n_tokens: int) -> float:
    return float(times.prefill_s(n_tokens))
