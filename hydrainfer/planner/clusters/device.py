"""Instances of the simulator whose prompts take the seconds and leave the bytes of a table."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from hydrainfer.cache import CacheSpec, FullSpec, Part, StateSpec
from hydrainfer.core import ConfigError, CostModel, Lane, StepBatch
from hydrainfer.planner.clusters.lengths import Lengths
from hydrainfer.planner.clusters.times import Times

BLOCK_TOKENS = 256  # of the simulated caches: large, as thousands of blocks per prompt would say no more
_ITEM_BYTES = 4  # of what the simulated blocks are made of
_STATES = 2  # of a request: the one at the last boundary, and the one after it


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


class TableCaches(NamedTuple):
    """Caches whose blocks have the bytes of a table: `token_bytes` per token of KV and `state_bytes` per request, by
    the line that is nearest to it over the prompts, which have the table's bytes on average."""

    token_bytes: float
    state_bytes: float

    @classmethod
    def of(cls, times: Times, lengths: Lengths) -> TableCaches:
        kv_bytes = times.kv_bytes(lengths.tokens)
        mean_bytes = lengths.mean(kv_bytes)
        apart = lengths.tokens - lengths.mean_tokens
        variance = lengths.mean(apart**2)
        if not variance:  # all prompts have one length
            return cls(mean_bytes / lengths.mean_tokens, 0.0)
        token_bytes = lengths.mean(apart * kv_bytes) / variance
        state_bytes = mean_bytes - token_bytes * lengths.mean_tokens
        if state_bytes < 0.0:
            return cls(mean_bytes / lengths.mean_tokens, 0.0)
        return cls(token_bytes, state_bytes)

    def kv_bytes(self, n_tokens: int) -> float:
        """What a prompt leaves in the caches."""
        return self.state_bytes + self.token_bytes * n_tokens

    def blocks(self, n_bytes: float, usual: float, longest: float) -> dict[CacheSpec, int]:
        """As many blocks of each cache as fit in `n_bytes`, shared so that requests of the `usual` length have two
        states each, as they have while they are prefilled. Raises `ConfigError` if the `longest` does not fit."""
        n_items = max(1, round(self.token_bytes * BLOCK_TOKENS / _ITEM_BYTES))
        kv = FullSpec("kv", BLOCK_TOKENS, (Part("rows", (n_items,), "float32"),), (0,))
        blocks: dict[CacheSpec, int] = {}
        n_state_items = round(self.state_bytes / _ITEM_BYTES)
        if n_state_items:
            state = StateSpec("state", BLOCK_TOKENS, (Part("matrix", (n_state_items,), "float32"),), (0,))
            n_requests = n_bytes / (self.token_bytes * usual + _STATES * state.block_bytes)
            blocks[state] = math.ceil(_STATES * max(1.0, n_requests)) + 1
            n_bytes -= blocks[state] * state.block_bytes
        blocks = {kv: int(n_bytes // kv.block_bytes), **blocks}
        if blocks[kv] * BLOCK_TOKENS < longest:
            raise ConfigError(
                f"{max(0, blocks[kv]) * BLOCK_TOKENS} tokens fit into the caches of an instance, but the longest "
                f"request has {longest:.0f}",
                param="clusters",
            )
        return blocks
