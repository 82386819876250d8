"""Packing of a language batch into the arrays of one forward pass. Reads sequences, decides nothing, copies to no
device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hydrainfer.cache import CacheSpec
from hydrainfer.core import LiveSequence, MediaSpan, TokenWork
from hydrainfer.ops import ScanRows
from hydrainfer.runtime.positions import RotaryPositions
from hydrainfer.runtime.tables import BlockTables


class Paged(NamedTuple):
    """The part of a batch that concerns one paged cache; see `ops.AttentionBatch` for the fields. `tables` [requests,
    blocks] and `lengths` [requests] int32, `slots` [rows] int64."""

    tables: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    contexts: list[int]
    spans: list[tuple[int, int, int]]


class Scanned(NamedTuple):
    """The part of a batch that concerns one cache of recurrent states; see `ops.ScanBatch` for the fields. `sources`,
    `targets` [decodes] int64."""

    sources: np.ndarray
    targets: np.ndarray
    pieces: list[ScanRows]
    waves: list[slice]


class AskedRows(NamedTuple):
    """The rows of a batch, from `first` on, that tell how likely these `ids` of the prompt of work item number `item`
    were. `n_top`: how many of the likeliest tokens to return with each."""

    item: int
    first: int
    ids: list[int]
    n_top: int


@dataclass(slots=True)
class PackedTokens:
    """A flattened batch, requests with one token first (see `ops.AttentionBatch`). A decode with drafts is packed as
    several requests with one token each, of one block table and growing lengths; then it `shares`. These lie one behind
    the other or, in a model with recurrent layers, behind the first rows of all others, and so on (`ScanBatch.waves`).

    `ids` [rows] int64. `positions` [rows] int64, or [3, rows] of (time, row, column). `starts` [requests + 1] int32.
    `counts` per request. `paged`, `scanned`: by the name of the cache.
    `sample_rows`: for each sampled token, in the batch's order, the row whose logits it needs; `sample_requests`: its
    request's index among the packed ones. `embed_at`, `embed_rows` int64: rows of the batch, and the rows of the
    embedding store that they take instead of their token's embedding. `asked`: the rows for the prompt's
    log-probabilities. `follows` [rows] int64: the index, among the tokens sampled by the batch before, of the row's id;
    -1 if the id is known; None if all are.
    """

    ids: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    counts: list[int]
    n_decodes: int
    paged: dict[str, Paged]
    scanned: dict[str, Scanned]
    sample_rows: list[int]
    sample_requests: list[int]
    embed_at: np.ndarray | None
    embed_rows: np.ndarray | None
    asked: list[AskedRows] = field(default_factory=list)
    follows: np.ndarray | None = None
    shares: bool = False

    @property
    def waits(self) -> bool:
        """Whether a row continues from the state that another one leaves."""
        return self.shares and any(len(scan.waves) > 1 for scan in self.scanned.values())


def _row_of(work: TokenWork, n: int) -> TokenWork:
    """Row `n` of a decode with drafts."""
    return TokenWork(work.seq, work.start + n, 1, True)


def pack_tokens(
    work: list[TokenWork],
    tables: Iterable[BlockTables],
    embed: CacheSpec | None,
    rotary: RotaryPositions | None = None,
    sums: Iterable[CacheSpec] = (),
    before: Iterable[TokenWork] = (),
) -> PackedTokens:
    """Pack `work` for one pass. `tables`: one for each paged cache; `embed`: the embedding cache's spec, if any;
    `rotary`: for models whose positions have three dimensions; `sums`: the specs of caches of recurrent states.
    `before`: the work of the batch before this one, whose tokens may not be known yet."""
    singles = [i for i, w in enumerate(work) if w.count == 1]
    drafted = chunks = list[int]()
    if len(singles) < len(work):
        drafted = [i for i, w in enumerate(work) if w.drafts]
        chunks = [i for i, w in enumerate(work) if w.count > 1 and not w.drafts]
    states, steps = list(sums), [(i, n) for i in drafted for n in range(work[i].count)]
    if states:
        steps.sort(key=itemgetter(1))
    items = [work[i] for i in singles] + [_row_of(work[i], n) for i, n in steps]
    rows = items + [work[i] for i in chunks]
    n_decodes = len(items)
    counts = [w.count for w in rows]
    ids = [0 if w.unknown else w.seq.tokens[w.start] for w in items[: len(singles)]]
    ids += [(work[i].seq.tokens[work[i].start], *work[i].drafts)[n] for i, n in steps]
    first = np.array([w.start for w in rows], dtype=np.int64)
    if not chunks:
        starts = np.arange(n_decodes + 1, dtype=np.int32)
        request, positions = np.arange(n_decodes), first
    else:
        starts = np.array([0, *accumulate(counts)], dtype=np.int32)
        request = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(int(starts[-1])) - starts[request] + first[request]
    for w in rows[n_decodes:]:
        ids += w.seq.tokens[w.start : w.start + w.count]
    sequences, spans = [w.seq for w in rows], _spans(rows[n_decodes:], n_decodes)
    places, begins = list[tuple[int, int]](), list(range(len(work)))  # item and row of it; each item's first row
    if states or drafted or chunks:
        places = [*((i, 0) for i in singles), *steps, *((i, 0) for i in chunks)]
    if drafted or chunks:
        row_of = {place: row for row, place in enumerate(places)}
        begins = [row_of[i, 0] for i in begins]
        sampled = [row_of[i, n] for i, w in enumerate(work) if w.sample for n in range(len(w.drafts) + 1)]
    else:
        sampled = [i for i, w in enumerate(work) if w.sample]
    packed = PackedTokens(
        ids=np.array(ids, dtype=np.int64),
        positions=positions if rotary is None else rotary.of(rows, positions, starts),
        starts=starts,
        counts=counts,
        n_decodes=n_decodes,
        paged={t.spec.name: _page(t, sequences, first, counts, request, positions, spans) for t in tables},
        scanned={spec.name: _scan(spec, work, places, n_decodes) for spec in states},
        sample_rows=[int(starts[r + 1]) - 1 for r in sampled],
        sample_requests=sampled,
        embed_at=None,
        embed_rows=None,
        follows=_follows(items, before, int(starts[-1])) if any(w.unknown for w in items[: len(singles)]) else None,
        asked=[
            _asked(i, w, int(starts[begins[i]])) for i, w in enumerate(work) if w.start < w.seq.n_prompt and w.asked
        ],
        shares=bool(drafted),
    )
    if embed is not None:
        _place_embeddings(packed, rows, embed)
    return packed


def one_token(caches: Iterable[str], states: Iterable[str] = (), *, multimodal: bool) -> PackedTokens:
    """A batch for a dry run: one decode of token 0, at the start of block 0 of every cache. `states`: the caches of
    recurrent states, in whose block 0 it leaves its own. `multimodal`: its positions have three dimensions."""
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int32)
    page = Paged(np.zeros((1, 1), dtype=np.int32), one, zero, [0], [])
    scan = Scanned(np.full(1, -1, dtype=np.int64), zero, [], [slice(0, 1)])
    positions = np.zeros((3, 1), dtype=np.int64) if multimodal else zero
    starts = np.arange(2, dtype=np.int32)
    paged, scanned = dict.fromkeys(caches, page), dict.fromkeys(states, scan)
    return PackedTokens(zero, positions, starts, [1], 1, paged, scanned, [0], [0], None, None)


def padded(p: PackedTokens, n: int) -> PackedTokens:
    """A batch of decodes, padded to `n` with copies of the one that reads least, which compute and write the same
    values again. In a model with recurrent layers that cannot be, because each row steps its state in place: there the
    copies continue from no state and leave nothing. All rows sample."""
    read = [sum(page.contexts[r] for page in p.paged.values()) for r in range(len(p.ids))]
    rows = np.full(n, int(np.argmin(read)), dtype=np.int64)
    rows[: len(p.ids)] = np.arange(len(p.ids))
    slots = {name: page.slots[rows] for name, page in p.paged.items()}
    for one in slots.values() if p.scanned else ():
        one[len(p.ids) :] = -1
    paged = {
        name: Paged(page.tables[rows], page.lengths[rows], slots[name], [page.contexts[r] for r in rows], [])
        for name, page in p.paged.items()
    }
    idle = np.full(n - len(p.ids), -1, dtype=np.int64)
    scanned = {
        name: Scanned(np.concatenate([scan.sources, idle]), np.concatenate([scan.targets, idle]), [], [slice(0, n)])
        for name, scan in p.scanned.items()
    }
    every, starts = list(range(n)), np.arange(n + 1, dtype=np.int32)
    follows = None if p.follows is None else p.follows[rows]
    positions = p.positions[..., rows]
    return PackedTokens(
        p.ids[rows], positions, starts, [1] * n, n, paged, scanned, every, every, None, None, [], follows
    )


def _follows(items: list[TokenWork], before: Iterable[TokenWork], n_rows: int) -> np.ndarray:
    """`PackedTokens.follows` of items of which decodes come first. (A request that was not in the batch before, because
    that could not be packed, has ended.)"""
    found, sampled = np.full(n_rows, -1, dtype=np.int64), {w.seq.id: i for i, w in enumerate(before)}
    for r, w in enumerate(items):
        if w.unknown:
            found[r] = sampled.get(w.seq.id, -1)
    return found


def _asked(item: int, work: TokenWork, first: int) -> AskedRows:
    positions, n_top = work.asked, work.seq.request.sampling.prompt_logprobs
    return AskedRows(item, first, work.seq.tokens[positions.start : positions.stop], n_top or 0)


def _page(
    tables: BlockTables,
    sequences: list[LiveSequence],
    contexts: np.ndarray,
    counts: list[int],
    request: np.ndarray,
    positions: np.ndarray,
    spans: list[tuple[int, int, int]],
) -> Paged:
    """The part of a batch that concerns one paged cache. `request`, `positions` [rows]: each row's request and its
    position there. `spans`: by positions in the request."""
    size, table, behind = tables.spec.block_tokens, tables.gather(sequences), tables.firsts(sequences)
    if behind is not None:
        contexts, positions = contexts - behind, positions - behind[request]
        spans = [(r, low - int(behind[r]), high - int(behind[r])) for r, low, high in spans]
    block, offset = np.divmod(positions, size)
    slots = table[request, block].astype(np.int64) * size + offset
    return Paged(table, (contexts + counts).astype(np.int32), slots, contexts.tolist(), spans)


def _scan(spec: CacheSpec, work: list[TokenWork], places: list[tuple[int, int]], n_decodes: int) -> Scanned:
    """The part of a batch that concerns one cache of recurrent states. `places`: the work item of each request, and
    which of its rows that is."""
    sources, targets, waves = [], [], list[slice]()
    scans = {i: spec.scan(w.seq.hold.blocks[spec.name], w.start, w.count, bool(w.drafts)) for i, w in enumerate(work)}
    for row, (i, n) in enumerate(places[:n_decodes]):
        source, writes = scans[i]
        blocks = [source, *(block for _, block in writes)]
        sources.append(blocks[n])
        targets.append(blocks[n + 1])
        if n == len(waves):
            waves.append(slice(row, row))
        waves[n] = slice(waves[n].start, row + 1)
    pieces: list[ScanRows] = []
    row = n_decodes
    for i, _ in places[n_decodes:]:
        w, (source, writes) = work[i], scans[i]
        at = w.start
        for stop, target in writes:
            pieces.append(ScanRows(slice(row + at - w.start, row + stop - w.start), source, target))
            at, source = stop, target
        row += w.count
    return Scanned(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64), pieces, waves)


def _spans(chunks: list[TokenWork], first: int) -> list[tuple[int, int, int]]:
    """(request, first, stop) of each picture in these chunks whose tokens see each other. If the cache has the start
    of a picture, `first` is where its rest begins. The first chunk is request number `first` of the batch."""
    return [
        (r, max(w.start, span.start), span.end)
        for r, w in enumerate(chunks, first)
        for span in w.seq.request.media
        if span.whole and w.start < span.end <= w.start + w.count
    ]


def picture_row(seq: LiveSequence, spec: CacheSpec, position: int) -> int | None:
    """The row of the embedding store for a token of a picture; None if the token is none, or not encoded yet."""
    request = seq.request
    for i, (span, blocks) in enumerate(zip(request.media, spec.pictures(request))):
        row = span.rows_before(position)
        if row < span.rows_before(position + 1) and i not in seq.pending_media:
            block, offset = divmod(row, spec.block_tokens)
            return spec.held(seq, blocks)[block] * spec.block_tokens + offset
    return None


def _place_embeddings(packed: PackedTokens, items: list[TokenWork], spec: CacheSpec) -> None:
    """Find the placeholder rows of the batch and the rows of their embeddings. Their ids become 0, because a
    placeholder's id may lie outside the embedding table."""
    at: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for r, w in enumerate(items):
        request = w.seq.request
        if not request.media or w.start >= len(request.prompt_ids):
            continue
        end, first_row = w.start + w.count, int(packed.starts[r])
        for span, blocks in zip(request.media, spec.pictures(request)):
            low, high = span.rows_before(w.start), span.rows_before(end)
            if low >= high:
                continue
            pictured = np.arange(low, high)
            block, offset = np.divmod(pictured, spec.block_tokens)
            held = np.array(spec.held(w.seq, blocks), dtype=np.int64)
            at.append(_placeholders(span, pictured) - w.start + first_row)
            rows.append(held[block] * spec.block_tokens + offset)
    if at:
        packed.embed_at, packed.embed_rows = np.concatenate(at), np.concatenate(rows)
        packed.ids[packed.embed_at] = 0


def _placeholders(span: MediaSpan, rows: np.ndarray) -> np.ndarray:
    """The positions in the prompt of the placeholders of these rows of a picture's embedding."""
    if not span.gaps:
        return rows + span.start
    behind, n_others = np.array(((0, 0), *span.gaps)).T
    return rows + span.start + n_others[np.searchsorted(behind, rows, side="right") - 1]
