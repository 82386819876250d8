"""Published measurements compared with the planner's predictions for the same deployments, and engines fitted to
them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from hydrainfer.config import Slo, check_known, converted, read_yaml
from hydrainfer.core import ConfigError, Layout, Stage
from hydrainfer.planner.costs import EngineModel, read_hardware
from hydrainfer.planner.inputs import prompts_of, shape_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.planner.search import Bounds, Study, bracket, mean_interval_s, narrow, served_at, study_of
from hydrainfer.planner.simulation import ServedRequest
from hydrainfer.workload.sources import Poisson, due_times_s

_EXACT = 0.04  # relative tolerance of a predicted goodput
_ROUNDS = 3
_Z90 = 1.645

Quantity = Literal["goodput", "throughput", "ttft", "tpot", "e2e"]


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement of a deployment with `requests` requests, each of `text` tokens, `pictures` (sides in pixels) and
    `output` tokens. `quantity`: "goodput" is the highest rate at which a share `target` of the requests have their
    first token within `ttft_s` and a mean time per token within `tpot_s`; "throughput": requests per second at `rate`;
    "ttft", "tpot", "e2e": mean seconds at `rate`. `rate`: None if all requests arrive at once. `tokens`, `running`: the
    engine's budgets, if not the usual ones. `at_least`: the value is a lower limit, as no more was tried. `fit`:
    whether engines may be fitted to this measurement; if not, it only shows their error. Raises `ConfigError`."""

    name: str
    source: str
    model: str
    hardware: str
    layout: str
    quantity: Quantity
    value: float
    text: int
    output: int
    pictures: tuple[tuple[int, int], ...] = ()
    requests: int = 400
    rate: float | None = None
    target: float = 0.99
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens: int | None = None
    running: int | None = None
    at_least: bool = False
    fit: bool = True

    def __post_init__(self) -> None:
        numbers = ("value", "text", "output", "requests", "rate", "target", "ttft_s", "tpot_s", "tokens", "running")
        given = {name: getattr(self, name) for name in numbers} | {"pictures": min(chain(*self.pictures), default=None)}
        for name, number in given.items():
            if number is not None and not 0 < number < math.inf:
                raise ConfigError(f"{self.name}: {name} must be positive, not {number:g}", param="points")


def read_measured(path: Path) -> tuple[Measured, ...]:
    """The `points:` of a file. Raises `ConfigError`."""
    content: dict[str, Any] = read_yaml(path)
    check_known(next(iter(content), "points"), ("points",), str(path))
    found = converted(content.get("points", []), tuple[Measured, ...], str(path), "points")
    if not found:
        raise ConfigError(f"{path} has no points", param="points")
    return found


def predicted(m: Measured, engine: EngineModel) -> float:
    """The quantity of a measurement as the simulation predicts it. Raises `ConfigError`."""
    own = {k: v for k, v in (("tokens", m.tokens), ("running", m.running)) if v is not None}
    study, layout = _study(m, msgspec.structs.replace(engine, **own)), Layout.parse(m.layout)
    if m.quantity == "goodput":
        most = Bounds(study).of(layout).rate  # a run of finite length could exceed it, a deployment cannot
        low, high = bracket(lambda rate: _met(m, study, layout, rate), 0.0, min(m.value, 0.95 * most), most, 1.3)
        low, high = narrow(lambda rate: _met(m, study, layout, rate), low, high, _EXACT)
        return math.sqrt(low * high)
    served = served_at(study, layout, m.rate or 1e6)
    begin_s, end_s = served[0].arrival_s, max(s.token_s[-1] for s in served)
    if m.quantity == "throughput":
        return len(served) / (end_s - begin_s)
    if m.quantity == "ttft":
        return statistics.fmean(s.token_s[0] - s.arrival_s for s in served)
    if m.quantity == "e2e":
        return statistics.fmean(s.token_s[-1] - s.arrival_s for s in served)
    return statistics.fmean(mean_interval_s(s) or 0.0 for s in served)


def off_by(m: Measured, value: float) -> float:
    """The factor by which a prediction is too good: predicted / measured for rates, measured / predicted for times."""
    ratio = min(1.0, value / m.value) if m.at_least else value / m.value
    return ratio if m.quantity in ("goodput", "throughput") else 1.0 / ratio


def calibrated(engine: EngineModel, points: Sequence[Measured]) -> EngineModel:
    """The engine with `slower` and `mixed` fitted to the points with `fit`, and with the `error` that the other points
    then show (if there are none, the same points). Raises `ConfigError`."""
    mine = [m for m in points if m.fit] or list(points)
    of_mixed = [m for m in mine if _mixes(m)]
    alone = [m for m in mine if not _mixes(m)]
    for _ in range(_ROUNDS):
        engine = msgspec.structs.replace(engine, slower=engine.slower * _usual(engine, alone or of_mixed))
        if alone and of_mixed:
            engine = msgspec.structs.replace(engine, mixed=engine.mixed * _usual(engine, of_mixed))
    return msgspec.structs.replace(engine, error=error_of(engine, [m for m in points if not m.fit] or mine))


def _mixes(m: Measured) -> bool:
    """Whether an instance encodes besides other stages."""
    roles = Layout.parse(m.layout).instances
    return bool(m.pictures) and any(role.runs(Stage.ENCODE) and len(role.stages) > 1 for role in roles)


def _usual(engine: EngineModel, points: Sequence[Measured]) -> float:
    """The geometric mean of the factors by which predictions are too good."""
    return math.exp(statistics.fmean(_log_off(m, engine) for m in points))


def _log_off(m: Measured, engine: EngineModel) -> float:
    """The logarithm of `off_by`. Raises `ConfigError` if the prediction is 0, as no engine can be fitted to that."""
    value = predicted(m, engine)
    if value <= 0.0:
        raise ConfigError(
            f"{m.name}: the predicted {m.quantity} is 0, so {engine.name} cannot be fitted to it; check the point, or "
            "leave it out",
            param="points",
        )
    return math.log(off_by(m, value))


def error_of(engine: EngineModel, points: Sequence[Measured]) -> float:
    """The `error` of an engine: nine of ten measurements lie within a factor of 1 + `error` of their prediction, if
    errors are log-normal."""
    logs = [_log_off(m, engine) for m in points]
    return math.exp(_Z90 * math.sqrt(statistics.fmean(x * x for x in logs))) - 1.0


def _study(m: Measured, engine: EngineModel) -> Study:
    picture = prompts_of(m.model).picture
    if m.pictures and picture is None:
        raise ConfigError(f"{m.name} has pictures, but {m.model} cannot see", param="model")
    tokens = tuple(picture(*side) for side in m.pictures) if picture is not None else ()
    at_s = due_times_s(Poisson(1.0), m.requests, 0)
    pixels = sum(width * height for width, height in m.pictures) / 1e6
    plain = TraceRequest(arrival_s=0.0, n_text=m.text, pictures=tokens, n_output=m.output, megapixels=pixels)
    trace = [msgspec.structs.replace(plain, arrival_s=s) for s in at_s]
    slo = Slo(ttft_s=m.ttft_s or 1e3, tpot_s=m.tpot_s or 1e3)
    return study_of(shape_of(m.model), read_hardware(m.hardware), trace, slo, engine=engine, target=m.target)


def _met(m: Measured, study: Study, layout: Layout, rate: float) -> bool:
    served = served_at(study, layout, rate)
    return sum(_kept(s, m) for s in served) >= m.target * len(served)


def _kept(s: ServedRequest, m: Measured) -> bool:
    return s.token_s[0] - s.arrival_s <= (m.ttft_s or math.inf) and (mean_interval_s(s) or 0.0) <= (
        m.tpot_s or math.inf
    )
