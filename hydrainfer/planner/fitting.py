"""From measured batches to a cost model: least squares with terms that cannot be negative, judged on what they did not
see."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hydrainfer.core import ConfigError, CostModel
from hydrainfer.planner.costfile import Point, Work
from hydrainfer.planner.shape import TAKE_TURNS

_FOLDS = 4
_ROUNDS = 12  # of telling what is bound by arithmetic from what is bound by traffic
_BETTER = 0.9  # the roofline has two terms more: it must err less by this much
_ENCODE = ("encode_base_s", "encode_image_s", "encode_token_s", "encode_attention_s")
_ARITHMETIC = ("prefill_token_s", "prefill_attention_s", "decode_token_s", "decode_context_s")
_TRAFFIC = ("weights_s", "context_s")
_NOTHING = CostModel(encode_image_s=0.0, step_base_s=0.0, prefill_token_s=0.0, decode_token_s=0.0)
Terms = dict[str, float]


class Fitted(NamedTuple):
    """`errors`: by stage, `median`, `worst` and `n` of relative errors on points held out of the fit."""

    cost: CostModel
    errors: dict[str, dict[str, float]]


def fit_cost(points: Sequence[Point]) -> Fitted:
    """Raises `ConfigError` if there is no language point at all."""
    alone = [p for p in points if p.beside is None]
    vision, language = ([p for p in alone if p.work.is_vision is seen] for seen in (True, False))
    if not language:
        raise ConfigError("nothing was measured: give it more minutes")
    chosen = _linear
    if len(language) >= 2 * _FOLDS:
        chosen = min(
            (_linear, _roofline), key=lambda f: _median(_held_out(language, f)) * (_BETTER if f is _linear else 1.0)
        )
    terms = chosen(language) | (_encode(vision) if vision else {})
    cost = msgspec.structs.replace(_NOTHING, **terms, **_slowdowns(points))
    errors = {}
    for name, of, fit in (
        ("encode", vision, _encode),
        ("prefill", [p for p in language if p.work.chunk and not p.work.decodes], chosen),
        ("decode", [p for p in language if not p.work.chunk], chosen),
        ("mixed", [p for p in language if p.work.chunk and p.work.decodes], chosen),
    ):
        found = _held_out(vision if fit is _encode else language, fit, of)
        if found:
            errors[name] = {"median": round(_median(found), 4), "worst": round(max(found), 4), "n": float(len(found))}
    return Fitted(cost, errors)


def predicted_s(cost: CostModel, w: Work) -> float:
    if w.is_vision:
        return cost.encode_s([w.tokens] * w.pictures)
    contexts = w.decodes * (w.context + 1)
    return cost.language_s(w.chunk, w.chunk * (w.start + w.chunk), w.decodes, contexts, w.start)


def slowdown_of(speed: float) -> float:
    """Of `DeviceTime`, for lanes that together have so many times the speed of either alone."""
    return min(TAKE_TURNS, max(1.0, 1.0 / (speed - 1.0))) if speed > 1.0 else TAKE_TURNS


def non_negative(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |rows @ x - targets|; for a few columns, all sets of which are tried."""
    n = rows.shape[1]
    best, least = np.zeros(n), float(np.sum(targets**2))
    for size in range(1, n + 1):
        for columns in itertools.combinations(range(n), size):
            x = np.linalg.lstsq(rows[:, columns], targets, rcond=None)[0]
            if (x < 0).any():
                continue
            error = float(np.sum((rows[:, columns] @ x - targets) ** 2))
            if error < least * (1 - 1e-9):  # fewer terms where they do as well
                best, least = np.zeros(n), error
                best[list(columns)] = x
    return best


def _encode(points: Sequence[Point]) -> Terms:
    rows = [(1, w.pictures, w.pictures * w.tokens, w.pictures * w.tokens**2) for w in (p.work for p in points)]
    return _solve(_ENCODE, rows, points)


def _linear(points: Sequence[Point]) -> Terms:
    return _solve(("step_base_s", *_ARITHMETIC), [(1, *_arithmetic(p.work)) for p in points], points)


def _roofline(points: Sequence[Point]) -> Terms:
    """Every point is on one of the two sides; which, is found by turns."""
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


def _arithmetic(w: Work) -> tuple[float, ...]:
    return w.chunk, w.chunk * (w.start + w.chunk), w.decodes, w.decodes * (w.context + 1)


def _contexts(w: Work) -> float:
    return w.decodes * (w.context + 1) + w.start


def _solve(names: Sequence[str], rows: Sequence[Sequence[float]], points: Sequence[Point]) -> Terms:
    """Relative errors count, not absolute ones: decode steps are as important as long chunks."""
    times = np.array([p.p50_s for p in points])
    scaled = np.array(rows, dtype=float) / times[:, None]
    widths = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    found = non_negative(scaled / widths, np.ones(len(points))) / widths
    return dict(zip(names, (float(x) for x in found)))


def _held_out(
    points: Sequence[Point], fit: Callable[[Sequence[Point]], Terms], of: Sequence[Point] | None = None
) -> list[float]:
    """Relative errors of each point (of `of`) by a fit to the other folds."""
    ordered = sorted(points, key=lambda p: msgspec.structs.astuple(p.work))
    if len(ordered) < _FOLDS:
        return []
    errors = []
    for fold in range(_FOLDS):
        kept = [p for i, p in enumerate(ordered) if i % _FOLDS != fold]
        cost = msgspec.structs.replace(_NOTHING, **fit(kept))
        held = (p for i, p in enumerate(ordered) if i % _FOLDS == fold and (of is None or p in of))
        errors += [abs(predicted_s(cost, p.work) / p.p50_s - 1.0) for p in held]
    return errors


def _slowdowns(points: Sequence[Point]) -> Terms:
    """From batches that ran beside each other: the speeds of both, compared with either alone, add up."""
    alone = {p.work: p.p50_s for p in points if p.beside is None}
    pairs: dict[tuple[Work, Work], float] = {}
    for p in points:
        if p.beside is not None and p.work in alone:
            pair = (p.work, p.beside) if p.work.is_vision else (p.beside, p.work)
            pairs[pair] = pairs.get(pair, 0.0) + alone[p.work] / p.p50_s
    found = {}
    for name, prefills in (("overlap_slowdown", False), ("prefill_overlap_slowdown", True)):
        speeds = [speed for (_, language), speed in pairs.items() if bool(language.chunk) is prefills]
        if speeds:
            found[name] = slowdown_of(statistics.median(speeds))
    return found


def _median(numbers: Sequence[float]) -> float:
    return statistics.median(numbers) if numbers else float("inf")
