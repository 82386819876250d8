"""Logits → tokens. The order is vLLM's: minimum length, bias, penalties, grammar, temperature, min_p / top_k / top_p.

Every row's result depends on that row alone: neither the batch around it nor a generator's state matters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydrainfer.core import TokenLogprobs
from hydrainfer.runtime.sampling import Draw, SamplingPlan

_TOP_P_PREFIX = 512
"""Candidates tried before a full sort: they nearly always hold the whole top_p mass."""


def sample(logits: Tensor, plan: SamplingPlan) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """float32 logits [rows, vocab] (may be overwritten) → one token per row, and log-probabilities where asked for."""
    raw = logits
    if plan.alters_logits:
        if plan.logprobs:
            raw = logits.clone()
        _alter(logits, plan)
    chosen = logits.argmax(-1)
    if plan.draws:
        plain = [d for d in plan.draws if not d.top_k and d.top_p >= 1.0 and d.min_p <= 0.0]
        _draw_plain(logits, plain, chosen)
        for d in plan.draws:
            if d.top_k or d.top_p < 1.0 or d.min_p > 0.0:
                chosen[d.row] = draw_filtered(logits[d.row], d)
    tokens = chosen.tolist()
    return tokens, _logprobs(raw, plan.logprobs, tokens) if plan.logprobs else {}


def _alter(logits: Tensor, plan: SamplingPlan) -> None:
    vocab, device = logits.shape[1], logits.device
    for r, ids in plan.banned:
        logits[r, [i for i in ids if i < vocab]] = float("-inf")
    for r, ids, amounts in plan.biases:
        kept = [(i, v) for i, v in zip(ids, amounts) if 0 <= i < vocab]
        if kept:
            where, amount = zip(*kept)
            logits[r, list(where)] += torch.tensor(amount, device=device)
    for p in plan.penalties:
        row = logits[p.row]
        if p.repetition != 1.0:
            seen = torch.from_numpy(p.seen[p.seen < vocab]).to(device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / p.repetition, values * p.repetition)
        if len(p.produced):
            counts = torch.from_numpy(p.counts).to(device)
            row[torch.from_numpy(p.produced).to(device)] -= p.frequency * counts + p.presence
    if plan.blocked is not None:
        _restrict(logits, [g.row for g in plan.guided], torch.from_numpy(plan.blocked).to(device))


def _restrict(logits: Tensor, rows: list[int], blocked: Tensor) -> None:
    """Leave what is not `blocked` [rows, vocab]. Where a grammar allows nothing but what minimum length forbids, the
    grammar leads: it is over."""
    whole = len(rows) == logits.shape[0]
    kept = logits if whole else logits[rows]
    kept.masked_fill_(blocked, float("-inf"))
    stuck = torch.isneginf(kept.amax(-1)).nonzero()[:, 0]
    if len(stuck):
        kept[stuck] = torch.zeros_like(kept[stuck]).masked_fill_(blocked[stuck], float("-inf"))
    if not whole:
        logits[rows] = kept


def _draw_plain(logits: Tensor, draws: list[Draw], chosen: Tensor) -> None:
    """Rows with temperature only: the inverse of the cumulative distribution in the order of token ids."""
    if not draws:
        return
    rows = torch.tensor([d.row for d in draws], device=logits.device)
    temperature = torch.tensor([d.temperature for d in draws], device=logits.device)
    probs = torch.softmax(logits[rows] / temperature[:, None], dim=-1)  # [draws, vocab]
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    u = torch.tensor([d.u for d in draws], dtype=torch.float64, device=logits.device)
    found = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    chosen[rows] = torch.where(found < logits.shape[1], found, chosen[rows])  # u rounded up to the very end


def draw_filtered(logits: Tensor, d: Draw) -> int:
    """One row [vocab] through min_p, top_k (ties at the k-th value stay) and top_p, then the inverse of the cumulative
    distribution of what is left."""
    scaled = logits / d.temperature
    floor = -math.inf
    if d.min_p > 0.0:  # p >= min_p * p_max, in logits
        floor = float(scaled.max()) + math.log(d.min_p)
    if 0 < d.top_k < scaled.shape[0]:
        floor = max(floor, float(scaled.topk(d.top_k).values[-1]))
    if floor > -math.inf:
        ids = (scaled >= floor).nonzero()[:, 0]
        values = scaled[ids]
    else:
        ids, values = None, scaled
    probs = torch.softmax(values, dim=-1, dtype=torch.float64)
    if d.top_p < 1.0:
        probs, kept = _nucleus(probs, d.top_p)
        ids = kept if ids is None else ids[kept]
    cumulative = probs.cumsum(-1)
    at = int(torch.searchsorted(cumulative, d.u * cumulative[-1], right=True))
    at = min(at, probs.shape[0] - 1)
    return at if ids is None else int(ids[at])


def _nucleus(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely entries whose predecessors sum to less than `top_p`, and their indices; ties by index."""
    n = probs.shape[0]
    candidates = None
    if n > 2 * _TOP_P_PREFIX:
        least = probs.topk(_TOP_P_PREFIX).values[-1]
        candidates = (probs >= least).nonzero()[:, 0]
        if float(probs[candidates].sum()) <= top_p:
            candidates = None
    values = probs if candidates is None else probs[candidates]
    ordered, index = values.sort(descending=True, stable=True)
    keep = int(((ordered.cumsum(-1) - ordered) < top_p).sum())
    index = index[: max(keep, 1)]
    return ordered[: max(keep, 1)], index if candidates is None else candidates[index]


def _logprobs(raw: Tensor, wanted: list[tuple[int, int]], tokens: list[int]) -> dict[int, TokenLogprobs]:
    """Log-probabilities, by row, of the distribution before penalties, bias and temperature."""
    rows = torch.tensor([row for row, _ in wanted], device=raw.device)
    table = torch.log_softmax(raw[rows], dim=-1)  # [wanted, vocab]
    picked = torch.tensor([tokens[row] for row, _ in wanted], device=raw.device)
    own = table.gather(1, picked[:, None])
    ranks = (table > own).sum(-1).add_(1).tolist()
    most = max(k for _, k in wanted)
    top = table.topk(most, dim=-1) if most else None
    values, ids = (top.values.tolist(), top.indices.tolist()) if top else ([[]] * len(wanted), [[]] * len(wanted))
    return {
        row: TokenLogprobs(p, rank, tuple(zip(i[:k], v[:k])))
        for (row, k), p, rank, i, v in zip(wanted, own[:, 0].tolist(), ranks, ids, values)
    }
