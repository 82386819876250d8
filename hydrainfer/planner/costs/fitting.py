"""A cost model fitted to measured batches: non-negative least squares, judged on points held out of the fit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from hydrainfer.core import ConfigError, CostModel
from hydrainfer.planner.costs.costfile import BatchShape, BatchTime
from hydrainfer.planner.costs.shape import slowdown_of

_FOLDS = 4
_ROUNDS = 12  # at most, to tell points bound by arithmetic from points bound by traffic
_BETTER = 0.9  # the roofline has two more terms: its error must be smaller by this factor
_ENCODE = ("encode_base_s", "encode_image_s", "encode_token_s", "encode_attention_s")
_ARITHMETIC = ("prefill_token_s", "prefill_attention_s", "decode_token_s", "decode_context_s")
_TRAFFIC = ("weights_s", "context_s")
_NOTHING = CostModel(encode_image_s=0.0, step_base_s=0.0, prefill_token_s=0.0, decode_token_s=0.0)
_STAGES = ("encode", "prefill", "decode", "mixed")
Terms = dict[str, float]


class Fitted(NamedTuple):
    """A cost model and its `errors`: by stage, the `median`, `worst` and number `n` of relative errors on points held
    out."""

    cost: CostModel
    errors: dict[str, dict[str, float]]


def fit_cost(points: Sequence[BatchTime], of: Literal["p50_s", "min_s"] = "p50_s") -> Fitted:
    """The cost model that fits the points best. `of`: the time to fit, medians or, where other work on the machine
    disturbed the runs, minima. Raises `ConfigError` if there are no language points."""
    alone = [msgspec.structs.replace(p, p50_s=getattr(p, of)) for p in points if p.beside is None]
    vision, language = ([p for p in alone if p.work.is_vision is seen] for seen in (True, False))
    if not language:
        raise ConfigError("nothing was measured: give it more minutes")
    held_out: dict[BatchTime, float] = {}
    chosen = _linear
    if len(language) >= 2 * _FOLDS:
        linear, roofline = (_held_out(language, fit) for fit in (_linear, _roofline))
        simple = _BETTER * statistics.median(linear.values()) <= statistics.median(roofline.values())
        chosen, held_out = (_linear, linear) if simple else (_roofline, roofline)
    held_out |= _held_out(vision, _encode)
    terms = chosen(language) | (_encode(vision) if vision else {})
    cost = msgspec.structs.replace(_NOTHING, **terms, **_slowdowns(points))
    errors = {}
    for stage in _STAGES:
        stage_errors = [error for p, error in held_out.items() if _stage(p.work) == stage]
        if stage_errors:
            median, worst = (round(x, 4) for x in (statistics.median(stage_errors), max(stage_errors)))
            errors[stage] = {"median": median, "worst": worst, "n": float(len(stage_errors))}
    return Fitted(cost, errors)


def _stage(w: BatchShape) -> str:
    if w.is_vision:
        return "encode"
    if w.chunk:
        return "mixed" if w.decodes else "prefill"
    return "decode"


def predicted_s(cost: CostModel, w: BatchShape) -> float:
    if w.is_vision:
        return cost.encode_s([w.tokens] * w.pictures)
    contexts = w.decodes * (w.context + 1)
    return cost.language_s(w.chunk, w.chunk * (w.start + w.chunk), w.decodes, contexts, w.start)


def non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimizes |rows @ x - targets|, by Lawson and Hanson's active-set method. The columns must be of
    similar magnitude."""
    gram = rows.T @ rows
    moments = rows.T @ targets
    n = len(moments)
    x = np.zeros(n)
    used = np.zeros(n, dtype=bool)
    for _ in range(3 * n):
        gain = np.where(used, 0.0, moments - gram @ x)
        if gain.max(initial=0.0) <= 1e-9 * abs(moments).max(initial=0.0):
            break
        used[int(gain.argmax())] = True
        while used.any():
            z = np.zeros(n)
            z[used] = np.linalg.lstsq(gram[np.ix_(used, used)], moments[used], rcond=None)[0]
            below = used & (z <= 0.0)
            if not below.any():
                x = z
                break
            step = 0.0
            if (x[below] > z[below]).all():
                step = float(np.min(x[below] / (x[below] - z[below]), initial=1.0))
            x = np.where(used, x + step * (z - x), 0.0)
            used &= ~(below & (x <= 1e-12 * abs(x).max(initial=0.0)))
            x[~used] = 0.0
    return x


def _encode(points: Sequence[BatchTime]) -> Terms:
    rows = [(1, w.pictures, w.pictures * w.tokens, w.pictures * w.tokens**2) for w in (p.work for p in points)]
    return _solve(_ENCODE, rows, points)


def _linear(points: Sequence[BatchTime]) -> Terms:
    return _solve(("step_base_s", *_ARITHMETIC), [(1, *_arithmetic(p.work)) for p in points], points)


def _roofline(points: Sequence[BatchTime]) -> Terms:
    """The terms of a roofline. Each point is bound by arithmetic or by traffic; iteration finds out by which."""
    by_traffic = [p.work.chunk == 0 for p in points]
    terms: Terms = {}
    for _ in range(_ROUNDS):
        rows = [
            (1, *(0,) * 4, 1, _contexts(p.work)) if traffic else (1, *_arithmetic(p.work), 0, 0)
            for p, traffic in zip(points, by_traffic)
        ]
        terms = _solve(("step_base_s", *_ARITHMETIC, *_TRAFFIC), rows, points)
        sides = [
            terms["weights_s"] + terms["context_s"] * _contexts(p.work)
            > sum(terms[name] * x for name, x in zip(_ARITHMETIC, _arithmetic(p.work)))
            for p in points
        ]
        if sides == by_traffic:
            break
        by_traffic = sides
    return terms


def _arithmetic(w: BatchShape) -> tuple[float, ...]:
    return w.chunk, w.chunk * (w.start + w.chunk), w.decodes, w.decodes * (w.context + 1)


def _contexts(w: BatchShape) -> float:
    return w.decodes * (w.context + 1) + w.start


def _solve(names: Sequence[str], rows: Sequence[Sequence[float]], points: Sequence[BatchTime]) -> Terms:
    """The non-negative terms with the least relative errors, so that decode steps count as much as long chunks."""
    times = np.array([p.p50_s for p in points])
    scaled = np.array(rows, dtype=float) / times[:, None]
    widths = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    coefficients = non_negative(scaled / widths, np.ones(len(points))) / widths
    return dict(zip(names, (float(x) for x in coefficients)))


def _held_out(points: Sequence[BatchTime], fit: Callable[[Sequence[BatchTime]], Terms]) -> dict[BatchTime, float]:
    """The relative error at each point when the cost is fitted to the other folds (cross-validation)."""
    ordered = sorted(points, key=lambda p: msgspec.structs.astuple(p.work))
    errors: dict[BatchTime, float] = {}
    for fold in range(_FOLDS if len(ordered) >= _FOLDS else 0):
        cost = msgspec.structs.replace(_NOTHING, **fit([p for i, p in enumerate(ordered) if i % _FOLDS != fold]))
        errors |= {p: abs(predicted_s(cost, p.work) / p.p50_s - 1.0) for p in ordered[fold::_FOLDS]}
    return errors


def _slowdowns(points: Sequence[BatchTime]) -> Terms:
    """The slowdowns of batches that ran beside each other, from the sum of both speeds, each relative to running alone.
    Medians are used, since the fastest run beside another batch is one whose neighbour was held up."""
    alone = {p.work: p.p50_s for p in points if p.beside is None}
    pairs: dict[tuple[BatchShape, BatchShape], float] = {}
    for p in points:
        if p.beside is not None and p.work in alone:
            pair = (p.work, p.beside) if p.work.is_vision else (p.beside, p.work)
            pairs[pair] = pairs.get(pair, 0.0) + alone[p.work] / p.p50_s
    slowdowns = {}
    for name, prefills in (("overlap_slowdown", False), ("prefill_overlap_slowdown", True)):
        speeds = [speed for (_, language), speed in pairs.items() if bool(language.chunk) is prefills]
        if speeds:
            slowdowns[name] = slowdown_of(statistics.median(speeds))
    return slowdowns
