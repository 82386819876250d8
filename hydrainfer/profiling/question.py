"""The preparation of a question for the planner: what it is about, and whether it can be answered."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hydrainfer.checkpoint import locate_model, name_of
from hydrainfer.config import Slo, inline_slo, locate, read_slo
from hydrainfer.core import ConfigError, Guessing
from hydrainfer.core.guessing import MAX_DRAFTS
from hydrainfer.planner.costs import WEIGHT_BYTES, CostFile, ModelShape, read_engine
from hydrainfer.planner.inputs import prompts_of, shape_of, trace_of
from hydrainfer.planner.nouns import TraceRequest
from hydrainfer.profiling.devices import Devices, Measure, devices_of, is_assumed
from hydrainfer.profiling.inputs import StudyInputs
from hydrainfer.profiling.options import ProfileQuestion
from hydrainfer.profiling.prices import Prices, prices_of, read_prices
from hydrainfer.profiling.tiers import PlannedTiers, check_memory, check_tiers, tiers_of
from hydrainfer.profiling.traces import requests_of
from hydrainfer.workload.sources import Constant, Gamma, OpenLoop, Poisson, Workload, read_workload

_LONGER = 6  # multiples of the first run: two more runs, of 2 and 4 times its length
_AS_DTYPE = "as-dtype"


class ProfileSetup(NamedTuple):
    """A question with all that its answer needs."""

    question: ProfileQuestion
    workload: Workload
    inputs: StudyInputs
    prices: Prices
    tiers: PlannedTiers

    @property
    def devices(self) -> Devices:
        return self.inputs.devices

    @property
    def servable(self) -> bool:
        """Whether `hydrainfer serve` can run what is planned."""
        q = self.question
        if self.inputs.engine.scheduling != "stage-level":
            return False
        return q.tensor_parallel == 1 and q.weights == _AS_DTYPE and not self.devices.unlike

    @property
    def flags(self) -> list[str]:
        """The flags of `hydrainfer serve` for the planned number formats and, on a CPU, for the limits that slices
        keep."""
        flags = []
        on_cpu = self.devices.kind == "cpu"
        if on_cpu:
            flags += ["--device", "cpu"]
        if self.dtype is not None:
            flags += ["--dtype", self.dtype]
        if self.question.quantization != "none":
            flags += ["--quantization", self.question.quantization]
        if on_cpu:
            flags += ["--slo", self.inputs.slo.inline]
        if self.question.drafts != "off" and self.devices.kind == "emulated":
            flags += ["--drafts", self.question.drafts, "--max-drafts", str(self.question.max_drafts)]
        return flags

    @property
    def dtype(self) -> str | None:
        """The dtype that was asked for or measured; None if the server chooses."""
        return _dtype(self.question, self.devices)


def prepare(q: ProfileQuestion, measure: Measure) -> ProfileSetup:
    """The setup of a question. Raises `ConfigError` or `CheckpointError` with a one-line message, before any long work
    except a call of `measure`."""
    _check(q)
    model = locate_model(q.model)
    workload = read_workload(q.workload, data=q.data, pictures=q.pictures)
    slo = slo_of(q.slo, name_of(model), workload.dataset)
    tiers = tiers_of(q)
    trace = requests_of(q, workload, prompts_of(q.model), _arrivals(q))
    devices = devices_of(q, model, measure)
    shape = _shape(q, devices)
    engine = read_engine(q.engine)
    if devices.cost is not None and engine.scheduling != "stage-level":
        raise ConfigError("measured and emulated times are HydraInfer's: leave --engine out", param="engine")
    more = _more(q, workload, _LONGER * len(trace))
    n_instances = q.devices // q.tensor_parallel
    check_memory(tiers, devices, n_instances)
    inputs = StudyInputs(
        shape,
        devices,
        engine,
        trace,
        more,
        slo,
        q.target,
        n_instances,
        drafts=Guessing.of(q.drafts, q.max_drafts),
        host_bytes=tiers.host_bytes,
        store=tiers.store,
    )
    return ProfileSetup(q, workload, inputs, prices_of(q, devices), tiers)


def _shape(q: ProfileQuestion, devices: Devices) -> ModelShape:
    """The model's shape in the formats that were asked for or measured. Raises `ConfigError`."""
    if q.quantization != "none" and devices.kind != "cpu":
        raise ConfigError(
            f"--quantization {q.quantization} is for CPUs, not for {devices.device.name}", param="quantization"
        )
    return msgspec.structs.replace(shape_of(q.model, _dtype(q, devices), q.quantization), weights=q.weights)


def _dtype(q: ProfileQuestion, devices: Devices) -> str | None:
    if q.dtype is not None:
        return q.dtype
    if isinstance(devices.cost, CostFile):
        return devices.cost.dtype
    return None


def _check(q: ProfileQuestion) -> None:
    if q.devices < 1:
        raise ConfigError(f"{q.devices} devices cannot serve anything; give at least one", param="devices")
    if q.devices % q.tensor_parallel:
        raise ConfigError(
            f"{q.devices} devices are no groups of {q.tensor_parallel}; choose --devices as a multiple",
            param="tensor_parallel",
        )
    if q.weights not in (_AS_DTYPE, *WEIGHT_BYTES):
        known = ", ".join((_AS_DTYPE, *WEIGHT_BYTES))
        raise ConfigError(f"no weights {q.weights!r}; there are {known}", param="weights")
    if q.weights != _AS_DTYPE and q.quantization != "none":
        raise ConfigError("--weights and --quantization both say how weights are stored: give one", param="weights")
    for name, is_set in (("tensor-parallel", q.tensor_parallel > 1), ("weights", q.weights != _AS_DTYPE)):
        if is_set and (q.hardware is None or q.cost_model is not None):
            raise ConfigError(
                f"--{name} is for a described device, such as --hardware h800: measured times are of what was measured",
                param=name.replace("-", "_"),
            )
    if q.drafts != "off" and Guessing.of(q.drafts, q.max_drafts) is None:
        raise ConfigError(f"--drafts is off or right=SHARE, such as right=0.6, not {q.drafts!r}", param="drafts")
    if q.max_drafts > MAX_DRAFTS:
        raise ConfigError(f"--max-drafts is at most {MAX_DRAFTS}, not {q.max_drafts}", param="max_drafts")
    if q.drafts != "off" and q.engine != "hydrainfer":
        raise ConfigError("--drafts are planned for hydrainfer alone: leave --engine out", param="drafts")
    check_tiers(q)
    read_prices(q)
    if q.objective != "goodput" and not (q.rate and q.rate > 0.0):
        raise ConfigError(f"--objective {q.objective} needs a --rate of requests per second", param="rate")
    if not 0.0 < q.target <= 1.0:
        raise ConfigError(f"--target is a share above 0 and at most 1, not {q.target:g}", param="target")
    if q.hardware is not None and q.cost_model is not None and not is_assumed(q.cost_model):
        raise ConfigError("give --hardware or a measured --cost-model, not both", param="hardware")


def burst_shape(q: ProfileQuestion) -> float:
    """The shape of gamma arrivals. Raises `ConfigError` if a shape is given for other arrivals."""
    if q.burst_shape is not None and q.arrivals != "gamma":
        raise ConfigError("--burst-shape is for --arrivals gamma", param="burst_shape")
    if q.burst_shape is None:
        return Gamma(1.0).shape
    return q.burst_shape


def _arrivals(q: ProfileQuestion) -> OpenLoop | None:
    """The arrivals that were asked for; None for those of the workload, if it has times."""
    shape = burst_shape(q)
    if q.arrivals is None:
        return None
    kinds: dict[str, OpenLoop] = {"poisson": Poisson(1.0), "constant": Constant(1.0), "gamma": Gamma(1.0, shape)}
    if q.arrivals not in kinds:
        raise ConfigError(f"no arrivals {q.arrivals!r}: one of {', '.join(kinds)}", param="arrivals")
    return kinds[q.arrivals]


def _more(q: ProfileQuestion, workload: Workload, n: int) -> tuple[TraceRequest, ...]:
    """`n` requests for the longer runs at a rate; none if the workload has a fixed number of requests."""
    if workload.source != "synthetic":
        return ()
    return tuple(trace_of(workload, prompts_of(q.model), n, (q.seed + 1) << 20, _arrivals(q)))


def slo_of(text: str, model: str, dataset: str) -> Slo:
    """The SLO in `text`: limits, or NAME[:DATASET] of configs/slo, or empty for the model's own preset. Raises
    `ConfigError`."""
    if (limits := inline_slo(text)) is not None:
        return limits
    name, _, key = text.partition(":")
    try:
        return read_slo(locate("slo", name or model), key or dataset)
    except ConfigError as e:
        hint = "give the SLO, for example --slo ttft=8,tpot=0.08 (seconds)"
        raise ConfigError(f"{hint}; {e.message}" if not name else e.message, param="slo") from None
