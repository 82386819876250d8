"""Sampling of tokens from logits. The order is vLLM's: minimum length, bias, penalties, grammar, temperature, min_p /
top_k / top_p.

Every row's result depends on that row alone: neither the batch around it nor a generator's state matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydrainfer.core import TokenLogprobs
from hydrainfer.ops import to_device, to_host, upload
from hydrainfer.runtime.draws import draw
from hydrainfer.runtime.sampling import SamplingPlan


class Sampled(NamedTuple):
    """`tokens` int64 [rows] on the logits' device. `read()` returns them as a list, and the log-probabilities that were
    asked for by row; on CUDA it may be called once the stream has computed them."""

    tokens: Tensor
    read: Callable[[], tuple[list[int], dict[int, TokenLogprobs]]]


def sample(logits: Tensor, plan: SamplingPlan, before: Tensor | None = None) -> Sampled:
    """One token for each row of float32 logits [rows, vocab], which may be overwritten. `before`: the tokens of the
    batch before, if the plan follows it. Does not wait for a GPU."""
    raw = logits.clone() if plan.logprobs and plan.alters_logits else logits
    chosen = choose(logits, plan, before)
    return sampled(chosen, _logprobs(raw, plan.logprobs, chosen) if plan.logprobs else dict)


def sampled(chosen: Tensor, logprobs: Callable[[], dict[int, TokenLogprobs]] = dict) -> Sampled:
    """A `Sampled` of the tokens `chosen`, int64 [rows]."""
    tokens = to_host(chosen)
    return Sampled(chosen, lambda: (tokens.tolist(), logprobs()))


def choose(logits: Tensor, plan: SamplingPlan, before: Tensor | None = None) -> Tensor:
    """The tokens that `sample` returns, int64 [rows]."""
    if plan.alters_logits:
        _alter(logits, plan, before)
    every = len(plan.draws) == len(logits)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device) if every else logits.argmax(-1)
    draw(logits, plan.draws, chosen)
    return chosen


def _alter(logits: Tensor, plan: SamplingPlan, before: Tensor | None) -> None:
    on = upload(_alterations(plan, logits.shape[1]), logits.device)
    if "banned" in on:
        logits.index_put_(tuple(on["banned"]), torch.full((), float("-inf"), device=logits.device))
    if "biased" in on:
        logits.index_put_(tuple(on["biased"]), on["bias"], accumulate=True)
    if before is not None and "last_from" in on:
        _add_last(on, before, logits.shape[0])
    if "seen" in on:
        values = logits[tuple(on["seen"])]
        changed = torch.where(values > 0, values / on["repetition"], values * on["repetition"])
        logits.index_put_(tuple(on["seen"]), changed)
    if "produced" in on:
        amounts = -(on["frequency"] * on["counts"] + on["presence"])
        logits.index_put_(tuple(on["produced"]), torch.where(on["counts"] > 0, amounts, 0.0), accumulate=True)
    if plan.blocked is not None:
        _restrict(logits, plan.guided_rows, on["guided"], on["blocked"])


def _add_last(on: dict[str, Tensor], before: Tensor, n_rows: int) -> None:
    """Add tokens that only the device knows to those that `_alter` changes. If a row has seen its token before, the
    same value is written twice, and the token's count grows by one."""
    rows, ids = on["last_rows"], before[on["last_from"]]
    added, produced = torch.stack([rows, ids]), on.get("produced")
    if "seen" in on:
        on["seen"] = torch.cat([on["seen"], added], 1)
        on["repetition"] = torch.cat([on["repetition"], on["last_repetition"]])
    if produced is not None:
        last = torch.full((n_rows,), -1, dtype=torch.int64, device=ids.device).index_put_((rows,), ids)
        again = (last[produced[0]] == produced[1]).float()
        known = torch.zeros(n_rows, device=ids.device).index_add_(0, produced[0], again)
        on["produced"] = torch.cat([produced, added], 1)
        on["counts"] = torch.cat([on["counts"] + again, 1.0 - known[rows]])
        for name in ("frequency", "presence"):
            on[name] = torch.cat([on[name], on[f"last_{name}"]])


def _alterations(plan: SamplingPlan, vocab: int) -> dict[str, np.ndarray]:
    """The logits that `_alter` changes: their places [2, n], (row, token), and the amounts. Empty kinds are left
    out."""
    found: dict[str, np.ndarray] = {}
    banned = [(r, i) for r, ids in plan.banned for i in ids if i < vocab]
    biases = [(r, i, v) for r, ids, amounts in plan.biases for i, v in zip(ids, amounts) if 0 <= i < vocab]
    repeated = [(p, p.seen[p.seen < vocab]) for p in plan.penalties if p.repetition != 1.0]
    produced = [p for p in plan.penalties if len(p.produced)]
    if banned:
        found["banned"] = np.array(banned, dtype=np.int64).T
    if biases:
        found["biased"] = np.array([place[:2] for place in biases], dtype=np.int64).T
        found["bias"] = np.array([amount for _, _, amount in biases], dtype=np.float32)
    if repeated:
        found["seen"] = _places([(p.row, seen) for p, seen in repeated])
        amounts = [np.full(len(seen), p.repetition, dtype=np.float32) for p, seen in repeated]
        found["repetition"] = np.concatenate(amounts)
    if produced:
        found["produced"] = _places([(p.row, p.produced) for p in produced])
        found["counts"] = np.concatenate([p.counts.astype(np.float32) for p in produced])
        sizes = [len(p.produced) for p in produced]
        found["frequency"] = np.repeat(np.array([p.frequency for p in produced], dtype=np.float32), sizes)
        found["presence"] = np.repeat(np.array([p.presence for p in produced], dtype=np.float32), sizes)
    if last := [p for p in plan.penalties if p.follows >= 0]:
        found["last_rows"] = np.array([p.row for p in last], dtype=np.int64)
        found["last_from"] = np.array([p.follows for p in last], dtype=np.int64)
        for name in ("repetition", "frequency", "presence"):
            found[f"last_{name}"] = np.array([getattr(p, name) for p in last], dtype=np.float32)
    if plan.blocked is not None:
        found |= {"guided": np.array(plan.guided_rows, dtype=np.int64), "blocked": plan.blocked}
    return found


def _places(ids_by_row: list[tuple[int, np.ndarray]]) -> np.ndarray:
    rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row])
    return np.stack([rows, np.concatenate([ids for _, ids in ids_by_row])])


def _restrict(logits: Tensor, guided: list[int], rows: Tensor, blocked: Tensor) -> None:
    """Mask the `blocked` [guided, vocab] tokens of the `guided` rows. If a grammar allows only tokens that the minimum
    length forbids, the grammar wins, because its text is complete."""
    whole = len(guided) == logits.shape[0]
    kept = logits if whole else logits[rows]
    kept.masked_fill_(blocked, float("-inf"))
    stuck = torch.isneginf(kept.amax(-1))
    if logits.device.type != "cpu" or bool(stuck.any()):
        kept.masked_fill_(stuck[:, None] & ~blocked, 0.0)
    if not whole:
        logits[rows] = kept


def _logprobs(raw: Tensor, wanted: list[tuple[int, int]], chosen: Tensor) -> Callable[[], dict[int, TokenLogprobs]]:
    """A function that returns, by row, log-probabilities of the distribution before penalties, bias and temperature. It
    is to be called like `Sampled.read`."""
    rows = to_device(np.array([row for row, _ in wanted], dtype=np.int64), raw.device)
    told = logprobs_of(raw[rows], chosen[rows], [k for _, k in wanted])
    return lambda: {row: one for (row, _), one in zip(wanted, told())}


def logprobs_of(logits: Tensor, ids: Tensor, n_top: list[int]) -> Callable[[], list[TokenLogprobs]]:
    """A function that returns how likely each row's id was, with the `n_top` likeliest tokens of each; it is to be
    called like `Sampled.read`. Logits float32 [rows, vocab], ids int64 [rows]. An id beyond the columns (a picture's
    placeholder may be one) has probability 0."""
    n_columns = logits.shape[1]
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(1, ids.clamp(max=n_columns - 1)[:, None])
    own = own.masked_fill((ids >= n_columns)[:, None], float("-inf"))
    ranks = (table > own).sum(-1).add_(1)
    most = max(n_top)
    values, others = table.topk(most, dim=-1) if most else (table[:, :0], table[:, :0])
    there = [to_host(part) for part in (own[:, 0], ranks, others, values)]

    def read() -> list[TokenLogprobs]:
        told = zip(n_top, *(part.tolist() for part in there))
        return [TokenLogprobs(p, rank, tuple(zip(i[:k], v[:k]))) for k, p, rank, i, v in told]

    return read
