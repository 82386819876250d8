"""Guesses of the next tokens by a model's MTP layer, after a language batch was sampled.

    the decoder's rows     a  b  c  x  y        c, x and y were sampled from; x and y are drafts
    their tokens next      b  c  x  y' z        of which x was right and y' is what came instead of y
    the layer's rows       a  b  c  x  y        all write keys and values; x, the last right one, guesses

Further guesses feed on the first. They have slots as far as the sequence has blocks; what they write there, the next
batch writes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydrainfer.cache import CacheSpec
from hydrainfer.core import TokenWork
from hydrainfer.models import LastRows, LayerCache, Model
from hydrainfer.ops import AttentionBatch, to_device
from hydrainfer.runtime.packing import PackedTokens, picture_row
from hydrainfer.storage import BlockStore


class Ahead(NamedTuple):
    """What is known of a batch when it is packed. `tokens` [rows] int64: the token behind each row's, 0 where it is
    sampled or unknown. `n_slots`: by work item, the tokens for which its sequence has blocks. `ends`, `ends_rows`: rows
    that end a chunk within a picture, and the row of the embedding store that comes next."""

    tokens: np.ndarray
    n_slots: list[int]
    ends: list[int]
    ends_rows: list[int]


class Passed(NamedTuple):
    """A batch behind its pass: what was packed and copied to the device, the layer's cache, and the hidden states
    [rows, hidden]."""

    packed: PackedTokens
    on: Mapping[str, Tensor]
    cache: LayerCache
    hidden: Tensor


class _Place(NamedTuple):
    """The row behind whose sampled token an item's guesses come: its number, that of its request, its position among
    those that the cache holds, and how many slots there are behind it."""

    item: int
    row: int
    request: int
    position: int
    n_behind: int


class Guesser:
    """Writes the layer's part of the cache `spec` in each batch, and guesses where it is asked to."""

    def __init__(self, model: Model, spec: CacheSpec, embeds: BlockStore | None) -> None:
        self._model, self.spec, self._embeds = model, spec, embeds

    def ahead(self, packed: PackedTokens, work: list[TokenWork]) -> Ahead:
        """Read from the sequences what `guess` needs; they may change later."""
        n_vocab, size = self._model.config.text.vocab, self.spec.block_tokens
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
        n_slots = [len(w.seq.hold.blocks[self.spec.name]) * size for w in work]
        return Ahead(tokens, n_slots, cut, cut_rows)

    def guess(
        self, work: list[TokenWork], ahead: Ahead, passed: Passed, sampled: Tensor | None, n: int
    ) -> dict[int, tuple[int, ...]]:
        """Up to `n` guesses of what follows the last right one of an item's sampled tokens, by the number of the item.
        `sampled` [sampled rows] int64."""
        on, cache = passed.on, passed.cache
        assert isinstance(cache.batch, AttentionBatch)
        embedded = self._embedded(ahead, passed, sampled)
        places = [] if sampled is None or n == 0 else _places(work, ahead, passed, sampled.tolist())
        rows = torch.tensor([p.row for p in places], dtype=torch.int64, device=embedded.device)
        requests = torch.tensor([p.request for p in places], dtype=torch.int64, device=embedded.device)
        tables, positions = cache.batch.tables[requests], on["positions"][..., rows]
        at = np.array([p.position for p in places], dtype=np.int64)
        last = LastRows(rows, self._decodes(cache.batch, tables, at) if places else None)
        hidden = self._model.guess(passed.hidden, embedded, on["positions"], cache, last)
        found: list[tuple[list[int], Tensor]] = []
        here = list(range(len(places)))
        for i in range(1, n + 1):
            if not here:
                break
            tokens = self._model.likeliest(hidden)
            found.append((here, tokens))
            more = [j for j, p in enumerate(here) if places[p].n_behind >= i] if i < n else []
            here, chosen = [here[j] for j in more], torch.tensor(more, dtype=torch.int64, device=tokens.device)
            if more:
                tables, positions, at = tables[chosen], positions[..., chosen] + 1, at[more] + 1
                step = LayerCache(cache.parts, self._decodes(cache.batch, tables, at))
                hidden = self._model.guess(hidden[chosen], self._model.embed(tokens[chosen]), positions, step, None)
        guesses: dict[int, tuple[int, ...]] = {}
        for those, tokens in found:
            for p, token in zip(those, tokens.tolist()):
                guesses[places[p].item] = (*guesses.get(places[p].item, ()), token)
        return guesses

    def _embedded(self, ahead: Ahead, passed: Passed, sampled: Tensor | None) -> Tensor:
        """The embeddings of the tokens behind each row's."""
        on, packed = passed.on, passed.packed
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

    def _decodes(self, full: AttentionBatch, tables: Tensor, at: np.ndarray) -> AttentionBatch:
        """One row each at the positions `at` of these block tables."""
        n, size = len(at), full.block_tokens
        positions = to_device(at, tables.device)
        blocks = tables.gather(1, (positions // size)[:, None])[:, 0].to(torch.int64)
        batch = AttentionBatch(
            counts=[1] * n,
            contexts=at.tolist(),
            n_decodes=n,
            block_tokens=size,
            tables=tables,
            lengths=(positions + 1).to(torch.int32),
            slots=blocks * size + positions % size,
            starts=torch.arange(n + 1, dtype=torch.int32, device=tables.device),
            window=full.window,
        )
        self._model.ops.prepare(batch)
        return batch


def _places(work: list[TokenWork], ahead: Ahead, passed: Passed, sampled: list[int]) -> list[_Place]:
    """The places of all items that sample."""
    packed, batch = passed.packed, passed.cache.batch
    assert isinstance(batch, AttentionBatch)
    found, first = list[_Place](), 0
    for item, w in enumerate(work):
        if not w.sample:
            continue
        pairs = zip(w.drafts, sampled[first : first + len(w.drafts)])
        i = first + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        first += 1 + len(w.drafts)
        row, request = packed.sample_rows[i], packed.sample_requests[i]
        position = batch.contexts[request] + row - int(packed.starts[request])
        found.append(_Place(item, row, request, position, ahead.n_slots[item] - position - 1))
    return found
