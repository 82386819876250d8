"""Guesses by a model's MTP layer.

    the decoder's rows     a  b  c  x  y        of the tokens next, b c x y' z, all but z are known to be right
    the layer's rows       a  b  c  x  y        all write keys and values; x, behind which y' came, guesses

Further guesses feed on the first. They have slots as far as the sequence has blocks; what they write there, the next
batch writes again.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from hydrainfer.cache import CacheSpec
from hydrainfer.core import TokenWork
from hydrainfer.models import LastRows, LayerCache, Model
from hydrainfer.ops import to_device
from hydrainfer.runtime.guessing.places import Guesses, Passed, Steps, places_of, slots_of
from hydrainfer.runtime.packing import PackedTokens, picture_row
from hydrainfer.storage import BlockStore


class _Ahead(NamedTuple):
    """What is known of a batch when it is packed. `tokens` [rows] int64: the token behind each row's, 0 where it is
    sampled or unknown. `n_slots`: as from `slots_of`. `ends`, `ends_rows`: rows that end a chunk within a picture, and
    the row of the embedding store that comes next."""

    tokens: np.ndarray
    n_slots: list[int]
    ends: list[int]
    ends_rows: list[int]


class MtpGuesser:
    """Writes the layer's part of the cache `spec` in each batch, and guesses where it is asked to."""

    reads_hidden: ClassVar[bool] = True

    def __init__(self, model: Model, spec: CacheSpec, embeds: BlockStore | None) -> None:
        self._model, self._spec, self._embeds = model, spec, embeds
        self.usual = True

    def ahead(self, packed: PackedTokens, work: list[TokenWork]) -> _Ahead:
        n_vocab = self._model.config.text.vocab
        tokens = np.roll(packed.ids, -1)
        ends = packed.starts[1:] - 1
        tokens[ends] = 0
        singles = [w for w in work if w.count == 1]
        chunks = [w for w in work if w.count > 1 and not w.drafts]
        cut, cut_rows = list[int](), list[int]()
        for request, w in (*enumerate(singles), *enumerate(chunks, packed.n_decodes)):
            if w.sample:
                continue
            row = None if self._embeds is None else picture_row(w.seq, self._embeds.spec, w.start + w.count)
            if row is not None:
                cut.append(int(ends[request]))
                cut_rows.append(row)
            elif (token := w.seq.tokens[w.start + w.count]) < n_vocab:
                tokens[ends[request]] = token
        return _Ahead(tokens, slots_of(work, [self._spec]), cut, cut_rows)

    def guess(self, work: list[TokenWork], ahead: _Ahead, passed: Passed, sampled: Tensor | None, n: int) -> Guesses:
        on, cache, model = passed.on, passed.caches[-1], self._model
        assert passed.hidden is not None
        embedded = self._embedded(ahead, passed, sampled)
        known = [] if sampled is None or n == 0 else sampled.tolist()
        places = places_of(work, passed.packed, ahead.n_slots, known) if known else []
        rows = to_device(np.array([p.row for p in places], dtype=np.int64), embedded.device)
        positions, steps = on["positions"][..., rows], Steps(model.ops, model.device, self._spec, passed.packed, places)
        last = LastRows(rows, [steps.decodes(0) if places else None])
        hidden = model.guess(passed.hidden, embedded, on["positions"], cache, last)
        guesses: Guesses = {}
        for i in range(1, n + 1 if places else 0):
            tokens = model.likeliest(hidden)
            for p, token in zip(places, tokens.tolist()):
                guesses[p.item] = (*guesses.get(p.item, ()), token)
            more = [j for j, p in enumerate(places) if p.n_behind >= i] if i < n else []
            if not more:
                break
            if len(more) < len(places):
                chosen = to_device(np.array(more, dtype=np.int64), tokens.device)
                places = [places[j] for j in more]
                positions, hidden, tokens = positions[..., chosen], hidden[chosen], tokens[chosen]
                steps.keep(more)
            step = LayerCache(cache.parts, steps.decodes(i))
            hidden = model.guess(hidden, model.embed(tokens), positions + i, step, None)
        return guesses

    def _embedded(self, ahead: _Ahead, passed: Passed, sampled: Tensor | None) -> Tensor:
        """The embeddings of the tokens behind each row's."""
        on, packed = passed.on, passed.packed
        assert passed.hidden is not None
        ids = to_device(ahead.tokens, passed.hidden.device)
        if sampled is not None:
            ids[on["sample_rows"]] = sampled
        embedded = self._model.embed(ids)
        rows, at = ahead.ends_rows, ahead.ends
        if packed.embed_at is not None and packed.embed_rows is not None:
            follow = np.flatnonzero(~np.isin(packed.embed_at, packed.starts[:-1]))
            rows, at = [*rows, *packed.embed_rows[follow].tolist()], [*at, *(packed.embed_at[follow] - 1).tolist()]
        if rows:
            assert self._embeds is not None and self._embeds.rows is not None, "this role has no embedding cache"
            pictures = self._embeds.rows[to_device(np.array(rows, dtype=np.int64), embedded.device)]
            into = to_device(np.array(at, dtype=np.int64), embedded.device)
            embedded[into] = pictures[:, : embedded.shape[1]].to(embedded.dtype)
        return embedded
