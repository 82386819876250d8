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
from hydrainfer.ops import to_device
from hydrainfer.runtime.guessing.places import Guesses, Passed, Steps, places_of, slots_of
from hydrainfer.runtime.packing import PackedTokens


class CopyGuesser:
    """`model`: the copy. `specs`: the caches of the model, none of them of recurrent states."""

    reads_hidden: ClassVar[bool] = False

    def __init__(self, model: Model, specs: Sequence[CacheSpec]) -> None:
        self._model, self._specs = model, list(specs)
        names = {layer: spec.name for spec in specs for layer in spec.layers}
        self._names = [names[i] for i in range(model.config.text.layers)]
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
        steps = {spec.name: Steps(model.ops, device, spec, packed, places) for spec in self._specs}
        guesses: Guesses = {}
        for i in range(1, n + 1):
            batches = {name: step.decodes(i) for name, step in steps.items()}
            caches = [LayerCache(cache.parts, batches[name]) for name, cache in zip(self._names, passed.caches)]
            tokens = model.likeliest(model.forward(model.embed(tokens), positions + i, caches, ids=tokens))
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
