"""Guesses by a copy of the model with 8-bit weights, which reads and writes the model's own cache (`self-int8`).

A copy's step reads a quarter of the bytes of one in float32, and its likeliest token is nearly always the model's. Keys
and values that it writes lie behind what the sequence has; the next batch writes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from hydrainfer.cache import CacheSpec
from hydrainfer.core import TokenWork
from hydrainfer.models import LayerCache, Model
from hydrainfer.ops import AttentionBatch, to_device
from hydrainfer.runtime.guessing.places import Guesses, Passed, Steps, places_of, slots_of
from hydrainfer.runtime.packing import PackedTokens


class CopyGuesser:
    """`model`: the copy. `specs`: the caches of the model, none of them of recurrent states."""

    reads_hidden: ClassVar[bool] = False

    def __init__(self, model: Model, specs: Sequence[CacheSpec]) -> None:
        self._model, self._specs = model, list(specs)
        self.usual = True

    def ahead(self, _packed: PackedTokens, work: list[TokenWork]) -> list[int]:
        n_slots = slots_of(work, self._specs)
        return [n if w.seq.request.sampling.drafts else 0 for w, n in zip(work, n_slots)]

    def guess(self, work: list[TokenWork], ahead: list[int], passed: Passed, sampled: Tensor | None, n: int) -> Guesses:
        if sampled is None or n == 0:
            return {}
        model, packed = self._model, passed.packed
        places = [p for p in places_of(work, packed, ahead, sampled.tolist()) if p.n_behind > 0]
        if not places:
            return {}
        device = sampled.device
        positions = passed.on["positions"][..., to_device(np.array([p.row for p in places], dtype=np.int64), device)]
        tokens = sampled[to_device(np.array([p.sampled for p in places], dtype=np.int64), device)]
        steps: dict[int, Steps] = {}  # by the batch that layers have in common
        for cache in passed.caches:
            assert isinstance(cache.batch, AttentionBatch)
            if id(cache.batch) not in steps:
                steps[id(cache.batch)] = Steps(model.ops, cache.batch, packed, places)
        guesses: Guesses = {}
        for i in range(1, n + 1):
            batches = {key: step.decodes(i) for key, step in steps.items()}
            caches = [LayerCache(cache.parts, batches[id(cache.batch)]) for cache in passed.caches]
            tokens = model.likeliest(model.forward(model.embed(tokens), positions + i, caches))
            for p, token in zip(places, tokens.tolist()):
                guesses[p.item] = (*guesses.get(p.item, ()), token)
            more = [j for j, p in enumerate(places) if p.n_behind > i]
            if not more:
                break
            if len(more) < len(places):
                chosen = to_device(np.array(more, dtype=np.int64), device)
                places = [places[j] for j in more]
                positions, tokens = positions[..., chosen], tokens[chosen]
                for step in steps.values():
                    step.keep(more)
        return guesses
