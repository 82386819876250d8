"""Packs a language batch into the arrays of one forward pass. Reads sequences, decides nothing, copies to no device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hydrainfer.cache import CacheSpec
from hydrainfer.core import TokenWork
from hydrainfer.runtime.positions import RotaryPositions
from hydrainfer.runtime.tables import BlockTables


@dataclass(slots=True)
class PackedTokens:
    """A flattened batch, requests with one token first (see `ops.AttentionBatch`).

    `ids`, `slots` [rows] int64. `positions` [rows] int64, or [3, rows] of (time, row, column). `tables` [requests,
    blocks] int32. `lengths` [requests] and `starts` [requests + 1] int32. `counts`, `contexts` per request.
    `sample_rows`: for each sampling work item, in the batch's order, the row whose logits it needs; `sample_requests`:
    its place among the packed requests. `embed_at`, `embed_rows` int64: rows of the batch that take these rows of the
    embedding store instead of the table's.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    counts: list[int]
    contexts: list[int]
    n_decodes: int
    sample_rows: list[int]
    sample_requests: list[int]
    embed_at: np.ndarray | None
    embed_rows: np.ndarray | None


def pack_tokens(
    work: list[TokenWork],
    tables: BlockTables,
    block_tokens: int,
    embed: CacheSpec | None,
    rotary: RotaryPositions | None = None,
) -> PackedTokens:
    """Pack `work` in one pass. `block_tokens` is the KV cache's; `embed` the embedding cache's spec, if any; `rotary`
    for models whose positions have three dimensions."""
    order = [i for i, w in enumerate(work) if w.count == 1]
    n_decodes = len(order)
    if n_decodes < len(work):
        order += [i for i, w in enumerate(work) if w.count != 1]
        items = [work[i] for i in order]
    else:
        items = work
    contexts = [w.start for w in items]
    counts = [w.count for w in items]
    table = tables.gather([w.seq for w in items])
    ids = [w.seq.tokens[w.start] for w in items[:n_decodes]]
    starts = np.zeros(len(items) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    first = np.array(contexts, dtype=np.int64)
    if n_decodes == len(items):
        request, positions = np.arange(n_decodes), first
    else:
        for w in items[n_decodes:]:
            ids += w.seq.tokens[w.start : w.start + w.count]
        request = np.repeat(np.arange(len(items)), counts)
        positions = np.arange(len(ids)) - starts[request] + first[request]
    block, offset = np.divmod(positions, block_tokens)
    slots = table[request, block].astype(np.int64) * block_tokens + offset
    place = order if n_decodes == len(items) else np.argsort(order).tolist()
    sampled = [place[i] for i, w in enumerate(work) if w.sample]
    packed = PackedTokens(
        ids=np.array(ids, dtype=np.int64),
        positions=positions if rotary is None else rotary.of(items, positions, starts),
        slots=slots,
        tables=table,
        lengths=(first + counts).astype(np.int32),
        starts=starts,
        counts=counts,
        contexts=contexts,
        n_decodes=n_decodes,
        sample_rows=[int(starts[r + 1]) - 1 for r in sampled],
        sample_requests=sampled,
        embed_at=None,
        embed_rows=None,
    )
    if embed is not None:
        _place_embeddings(packed, items, embed)
    return packed


def _place_embeddings(packed: PackedTokens, items: list[TokenWork], spec: CacheSpec) -> None:
    """Find the placeholder rows of the batch and where their embeddings lie. Their ids become 0: a placeholder's id may
    lie outside the table."""
    at: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    for r, w in enumerate(items):
        media = w.seq.request.media
        if not media or w.start >= media[-1].start + media[-1].n_tokens:
            continue
        end, first_row = w.start + w.count, int(packed.starts[r])
        for span, blocks in zip(media, spec.pictures(w.seq.request)):
            low, high = max(w.start, span.start), min(end, span.start + span.n_tokens)
            if low >= high:
                continue
            block, offset = np.divmod(np.arange(low - span.start, high - span.start), spec.block_tokens)
            held = np.array(spec.held(w.seq, blocks), dtype=np.int64)
            at.append(np.arange(low, high) - w.start + first_row)
            rows.append(held[block] * spec.block_tokens + offset)
    if at:
        packed.embed_at, packed.embed_rows = np.concatenate(at), np.concatenate(rows)
        packed.ids[packed.embed_at] = 0
