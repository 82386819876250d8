"""Guesses by a smaller model of the same vocabulary, which has caches of its own (`--draft-model`).

    the sequence     p p p p p a b c           p p p p p a b are in the draft model's cache, c was sampled
    its pass         c → d                     one pass over what it lacks, then one for each further guess
    the next batch   … c d' e                  d' came instead of d: the cache keeps … c, and d' is fed next

It knows text alone: pictures are left out of what it reads. What it lacks of long prompts it reads in pieces, and does
not guess meanwhile. Its caches hold whole sequences; the one that was not asked about for longest makes room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from hydrainfer.core import LiveSequence, TokenWork
from hydrainfer.models import LayerCache, Model
from hydrainfer.ops import AttentionBatch, to_device
from hydrainfer.runtime.guessing.places import Guesses, Passed, Tables, decodes, places_of
from hydrainfer.runtime.packing import PackedTokens
from hydrainfer.storage import BlockStore

_KEPT = 64
"""Sequences that are kept beside those of a batch, though nothing was asked about them lately."""


@dataclass(slots=True, eq=False)
class _Reader:
    """What the draft model has of a sequence. `text`: the sequence's tokens of text, as far as `n_seen` of all of them;
    `fed`: the tokens in the cache, of which `n_sure` are known to be those of the text."""

    seq: LiveSequence
    n_seen: int = 0
    text: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    n_sure: int = 0
    blocks: list[int] = field(default_factory=list)

    def agree(self, text: Sequence[int]) -> None:
        """Forget what was fed and is not `text`, and its last token, whose pass tells what is next."""
        limit = min(len(self.fed), len(text) - 1)
        n = min(self.n_sure, limit)
        while n < limit and self.fed[n] == text[n]:
            n += 1
        del self.fed[n:]
        self.n_sure = n


class _Text(NamedTuple):
    """A work item's sequence: what the draft model has of it, its text, and the piece of it that is to be read."""

    item: int
    reader: _Reader
    text: list[int]
    piece: list[int]


class DraftModel:
    """`stores`: the caches of `model`, all of the same number of blocks; a block has the same id in each. `n_vocab`:
    ids from there on are no text. `budget`: tokens that it reads in one batch beside guesses."""

    reads_hidden: ClassVar[bool] = False

    def __init__(self, model: Model, stores: Sequence[BlockStore], n_vocab: int, budget: int) -> None:
        self._model, self._budget = model, budget
        self.usual = True
        self._n_vocab = min(n_vocab, model.config.text.vocab)
        by_layer = {
            layer: (store.spec.name, view) for store in stores for layer, view in zip(store.spec.layers, store.layers)
        }
        self._layers = [by_layer[i] for i in range(model.config.text.layers)]
        self._windows = {store.spec.name: store.spec.window for store in stores}
        self._size = stores[0].spec.block_tokens
        self._free = list(range(stores[0].n_blocks))
        self._readers: dict[str, _Reader] = {}  # by sequence, the one that was asked about last at the end

    def ahead(self, _packed: PackedTokens, work: list[TokenWork]) -> dict[int, _Reader]:
        """By work item, what it has of the sequence, up to the tokens of the batch before."""
        readers = {}
        for item, w in enumerate(work):
            if not w.sample or not w.seq.request.sampling.drafts:
                continue
            reader = self._readers.pop(w.seq.id, None)
            if reader is None or reader.seq is not w.seq:
                self._drop(reader)
                reader = _Reader(w.seq)
            self._readers[w.seq.id] = readers[item] = reader
            new = w.seq.tokens[reader.n_seen :]
            reader.text += [token for token in new if token < self._n_vocab]
            reader.n_seen += len(new)
        while len(self._readers) > 4 * len(work) + _KEPT:  # sequences that have ended are among these
            self._drop(self._readers.pop(next(iter(self._readers))))
        return readers

    def guess(
        self, work: list[TokenWork], ahead: dict[int, _Reader], passed: Passed, sampled: Tensor | None, n: int
    ) -> Guesses:
        self.usual = True
        if sampled is None or n == 0 or not ahead or passed.packed.n_decodes < len(passed.packed.counts):
            return {}  # a first token does not wait for guesses
        known, whole = sampled.tolist(), list[_Text]()
        present = {id(reader) for reader in ahead.values()}
        for place in places_of(work, passed.packed, None, known):
            reader = ahead.get(place.item)
            if reader is None:
                continue
            text = [*reader.text, *known[place.first : place.sampled + 1]]
            if len(text) + n <= self._model.config.text.context and self._room(reader, len(text) + n, present):
                reader.agree(text)
                whole.append(_Text(place.item, reader, text, text[len(reader.fed) :]))
        parts = _within(whole, self._budget)
        if not parts:
            return {}
        self.usual = all(len(one.piece) <= n + 1 for one in parts)
        readers = [one.reader for one in parts]
        tables = self._tables(readers)
        hidden = self._read(readers, [one.piece for one in parts], tables)
        ready = [i for i, one in enumerate(parts) if len(one.reader.fed) == len(one.text)]
        if not ready:
            return {}
        items, readers = [parts[i].item for i in ready], [readers[i] for i in ready]
        if len(ready) < len(parts):
            tables, hidden = tables.of_rows(ready), hidden[to_device(np.array(ready, dtype=np.int64), hidden.device)]
        guesses: Guesses = dict.fromkeys(items, ())
        for i in range(n):
            if i:
                hidden = self._read(readers, [[guesses[item][-1]] for item in items], tables)
            for item, token in zip(items, self._model.likeliest(hidden).tolist()):
                guesses[item] = (*guesses[item], token)
        return guesses

    def _read(self, readers: Sequence[_Reader], pieces: Sequence[list[int]], tables: Tables) -> Tensor:
        """Feed each sequence a piece, those with one token first. Returns the hidden states [sequences, hidden] of
        their last tokens."""
        model, device, counts = self._model, self._model.device, [len(piece) for piece in pieces]
        firsts, ends = np.array([len(reader.fed) for reader in readers], dtype=np.int64), [*accumulate(counts)]
        starts = np.array([0, *ends], dtype=np.int32)
        row = np.repeat(np.arange(len(readers)), counts)
        at = np.arange(ends[-1]) - starts[row] + firsts[row]
        ids = to_device(np.array([token for piece in pieces for token in piece], dtype=np.int64), device)
        positions = to_device(at, device)
        batches = {name: self._batch(tables, firsts, counts, window) for name, window in self._windows.items()}
        caches = [LayerCache(parts, batches[name]) for name, parts in self._layers]
        turned = positions if model.config.text.rope.sections is None else positions.expand(3, -1)
        hidden = model.forward(model.embed(ids), turned, caches, ids=ids)
        for reader, piece in zip(readers, pieces):
            reader.fed += piece
        return hidden if len(ends) == ends[-1] else hidden[to_device(np.array(ends, dtype=np.int64) - 1, device)]

    def _batch(self, tables: Tables, firsts: np.ndarray, counts: list[int], window: int) -> AttentionBatch:
        ops, size, device = self._model.ops, self._size, self._model.device
        if len(counts) == sum(counts):
            return decodes(ops, tables, firsts, size, window)
        row = np.repeat(np.arange(len(counts)), counts)
        starts = np.array([0, *accumulate(counts)], dtype=np.int32)
        blocks, offsets = np.divmod(np.arange(len(row)) - starts[row] + firsts[row], size)
        batch = AttentionBatch(
            counts=counts,
            contexts=firsts.tolist(),
            n_decodes=sum(1 for n in counts if n == 1),
            block_tokens=size,
            tables=tables.on,
            lengths=to_device((firsts + counts).astype(np.int32), device),
            slots=to_device(tables.host[row, blocks].astype(np.int64) * size + offsets, device),
            starts=to_device(starts, device),
            window=window,
        )
        ops.prepare(batch)
        return batch

    def _tables(self, readers: Sequence[_Reader]) -> Tables:
        """Entries past the end repeat the first one."""
        longest = max(len(reader.blocks) for reader in readers)
        rows = [reader.blocks + reader.blocks[:1] * (longest - len(reader.blocks)) for reader in readers]
        return Tables.of(np.array(rows, dtype=np.int32), self._model.device)

    def _room(self, reader: _Reader, n_tokens: int, present: set[int]) -> bool:
        """Give it blocks for so many tokens, those of others if need be that are not `present`. Returns whether that
        was possible."""
        n = -(-n_tokens // self._size) - len(reader.blocks)
        for other in list(self._readers.values()) if n > len(self._free) else ():
            if id(other) not in present:
                self._drop(self._readers.pop(other.seq.id))
            if n <= len(self._free):
                break
        if n > len(self._free):
            return False
        reader.blocks += [self._free.pop() for _ in range(max(n, 0))]
        return True

    def _drop(self, reader: _Reader | None) -> None:
        """Take its blocks."""
        if reader is not None:
            self._free += reader.blocks
            reader.blocks.clear()
            reader.fed.clear()
            reader.n_sure = 0


def _within(texts: list[_Text], budget: int) -> list[_Text]:
    """As much of these as is read at once, the shortest pieces first: one token of each, and `budget` more."""
    left, parts = budget + len(texts), list[_Text]()
    for one in sorted(texts, key=lambda one: len(one.piece)):
        if piece := one.piece[:left]:
            parts.append(one._replace(piece=piece))
            left -= len(piece)
    return sorted(parts, key=lambda one: len(one.piece))  # the last one may have been cut
